"""What Prometheus reads. Time to first token, one request's speed and totals are three things here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

if TYPE_CHECKING:
    from decode.server.jobs import Job

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_RATES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)


class Metrics:
    """Counters and histograms of one server.

    Every request to `/v1/completions` and `/v1/chat/completions` is counted once when it ends, under
    what became of it: `stop` or `length` (a whole answer), `cancelled` (the client went away),
    `shutdown`, `error` (the server's), `rejected` (queue full, or ending), `invalid` (the client's).
    """

    def __init__(self) -> None:
        disable_created_metrics()  # a time beside every series, of no use here
        self.registry = CollectorRegistry()
        where: Any = {"namespace": "laneformer", "registry": self.registry}
        self.requests = Counter(
            "requests", "Requests that have ended", ("endpoint", "outcome"), **where
        )
        self.waiting = Gauge("queue_length", "Requests that wait for their turn", **where)
        self.active = Gauge("active_requests", "Requests being answered: 0 or 1", **where)
        self.prompt_tokens = Counter(
            "prompt_tokens", "Prompt tokens of requests whose turn came", ("outcome",), **where
        )
        self.generated_tokens = Counter(
            "generated_tokens", "Tokens generated", ("outcome",), **where
        )
        self.queue_seconds = Histogram(
            "queue_seconds", "From a request's arrival to its turn", buckets=_SECONDS, **where
        )
        self.first_token = Histogram(
            "time_to_first_token_seconds",
            "From a request's arrival, waiting included, to its first token",
            buckets=_SECONDS,
            **where,
        )
        self.rate = Histogram(
            "decode_tokens_per_second",
            "Tokens of one answer per second, after its first burst",
            buckets=_RATES,
            **where,
        )
        self.proposed = Counter("draft_tokens", "Draft tokens that speculation proposed", **where)
        self.accepted = Counter("accepted_draft_tokens", "Draft tokens that were right", **where)

    def ended(self, job: Job, outcome: str) -> None:
        """Count a job that was queued."""
        self.requests.labels(job.endpoint, outcome).inc()
        self.generated_tokens.labels(outcome).inc(job.drawn)
        if job.started is None:
            return
        self.prompt_tokens.labels(outcome).inc(job.prompt_tokens)
        self.queue_seconds.observe(job.started - job.received)
        if job.speed.first is not None:
            self.first_token.observe(job.speed.first - job.received)
        if (rate := job.speed.rate) is not None:
            self.rate.observe(rate)

    def text(self) -> bytes:
        """In Prometheus's text format."""
        return generate_latest(self.registry)
