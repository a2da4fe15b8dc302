"""Where documents come from. Every source gives records by index, the same ones every time."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal, Protocol

from laneformer_jax.errors import UserError

if TYPE_CHECKING:
    import numpy as np

Record = dict[str, Any]
Split = Literal["train", "heldout", "all"]


class BadDocument(UserError):
    """One document that cannot be used; `reason` is the word it is counted under."""

    def __init__(self, where: str, reason: str, detail: str = ""):
        super().__init__(f"{where}: {detail or reason}")
        self.reason = reason


def json_object(text: str, where: str) -> Record:
    """The JSON object that `text` holds; raises BadDocument when it holds none."""
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise BadDocument(where, "malformed", f"not valid JSON: {error.msg}") from None
    except RecursionError:
        raise BadDocument(where, "malformed", "JSON nested too deeply") from None
    except ValueError:  # Python's limit of digits
        raise BadDocument(where, "malformed", "JSON with a number too long to read") from None
    if not isinstance(record, dict):
        raise BadDocument(where, "malformed", f"must be an object, not {_type(record)}")
    return record


def _type(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


class Source(Protocol):
    """Documents by index. Pickles cheaply: workers get a copy."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Record:
        """The record at `index`; raises BadDocument when it cannot be read."""

    def where(self, index: int) -> str:
        """File and row, for errors."""

    def name_hashes(self) -> np.ndarray:
        """uint64 [len]: of each document's name, which decides whether it is held out."""

    def revision(self) -> dict[str, Any]:
        """What tells whether the source is still the same: paths, sizes, times, fingerprints."""
