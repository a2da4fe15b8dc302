"""Errors that are the user's to fix, and suggestions for misspelt names."""

from __future__ import annotations

import difflib
import errno
import os
import re
import warnings
from collections.abc import Iterable

# Of 1. Other libraries' names stay below: `rms_norm_eps` is 0.80 like `norm_eps`, `sep_token_id` 0.83 like
# `pad_token_id`; a letter too many, too few or swapped is above.
_MISSPELT = 0.86
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # of writes, which name no file


class UserError(ValueError):
    """Bad input, told in one line: what is wrong, where, and what would be right.

    The command line prints `error: <message>` and exits with 2, without a traceback.
    """


def refusal(error: BaseException) -> str | None:
    """What the system refused, a write to a full disk say, in one line; None for errors of ours."""
    if isinstance(error, OSError):
        if error.filename is not None:
            return f"{error.filename}: {error.strerror}"
        if error.errno in _DISK_ERRORS:
            return f"{error.strerror}; nothing half-written is left"
    # How tensorstore, under orbax, tells of it.
    code = (
        re.search(r"os_error_code='(\d+)'", str(error)) if isinstance(error, ValueError) else None
    )
    if code is None:
        return None
    file = re.search(r'"([^"]+)"', str(error))
    return f"{file[1] if file else 'checkpoint'}: {os.strerror(int(code[1]))}"


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
