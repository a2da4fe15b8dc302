"""Errors that are the user's to fix, and suggestions for misspelt names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Bad input, told in one line: what is wrong, where, and what would be right.

    The command line prints `error: <message>` and exits with 2, without a traceback.
    """


def nearest(name: str, allowed: Iterable[str]) -> str:
    """`" (did you mean 'x'?)"` for the allowed name closest to `name`; `""` when none is close."""
    names = list(allowed)
    folded = {candidate.lower(): candidate for candidate in names}
    match = difflib.get_close_matches(name.lower(), folded, n=1, cutoff=0.6)
    return f" (did you mean {folded[match[0]]!r}?)" if match else ""
