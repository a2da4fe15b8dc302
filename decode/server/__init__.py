"""`laneformer serve`: OpenAI's HTTP interface to one model, one request at a time, and a page to try it.

schema    what a request may say
jobs      the queue and the thread that works on it
replies   what a client gets, in each endpoint's format
security  key, host, size of a body
metrics   what Prometheus reads
app       the routes
cli       the command
"""
