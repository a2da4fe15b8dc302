"""Errors that are the user's to fix, and suggestions for misspelt names."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterable

# Of 1. Other libraries' names stay below: `rms_norm_eps` is 0.80 like `norm_eps`, `sep_token_id` 0.83 like
# `pad_token_id`; a letter too many, too few or swapped is above.
_MISSPELT = 0.86


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


def warn_of_misspellings(given: Iterable[str], known: Iterable[str], source: str) -> None:
    """Warn of each name that is not known but all but the same as one that is: it has no effect."""
    names = list(known)
    for name in given:
        if name in names:
            continue
        close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=_MISSPELT)
        if close:
            warnings.warn(
                f"{source}: {name!r} is not known and has no effect (did you mean {close[0]!r}?)",
                stacklevel=3,
            )
