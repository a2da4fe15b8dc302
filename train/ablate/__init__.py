"""Ablations: the same training over cells of a grid, and what may be said about their differences.

`config` says what to compare, `runs` expands it into cached runs, `stats` pairs seeds, `report`
writes tables and plots. From the command line: `laneformer ablate`.
"""
