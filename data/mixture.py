"""Documents of several sources in one stream, each source with its share of the tokens.

grain mixes by number of elements; documents of different lengths then miss their token shares. Here
the next document always comes from the source that is furthest behind its share, so after any
number of tokens a source is at most about one document away from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import grain

from data.documents import SKIP_REASONS

_NO_COUNTS = {"documents": 0, "tokens": 0, "bytes": 0, "truncated": 0}


class Mixture(grain.IterDataset):
    """Mixes streams of encoded documents (see `data.documents.Encoder`) by token share.

    A source that ends is left out and the others keep their proportions; the mixture ends with the
    last one. Skipped documents are counted and not passed on.

    Args:
        parents: one stream per source.
        names: of the sources.
        weights: of the sources; any positive scale.
    """

    def __init__(
        self,
        parents: Sequence[grain.IterDataset],
        names: Sequence[str],
        weights: Sequence[float],
    ):
        super().__init__(parents)
        self._names, self._weights = list(names), list(weights)

    def __iter__(self) -> grain.DatasetIterator:
        return MixtureIterator([iter(p) for p in self.parents], self._names, self._weights)


class MixtureIterator(grain.DatasetIterator):
    """The iterator of a `Mixture`. Its state holds every source's state and counts."""

    def __init__(
        self,
        parents: Sequence[grain.DatasetIterator],
        names: Sequence[str],
        weights: Sequence[float],
    ):
        super().__init__(parents)
        self._streams = list(parents)
        self._names, self._weights = names, weights
        # Tokens that a source is behind its share; they sum to zero.
        self._behind = [0.0] * len(names)
        self._ended = [False] * len(names)
        self._counts: list[dict[str, int]] = [dict(_NO_COUNTS) for _ in names]
        self._parent_states = [p.get_state() for p in self._streams]

    def __next__(self) -> dict[str, Any]:
        while not all(self._ended):
            source = max(
                (i for i, ended in enumerate(self._ended) if not ended),
                key=self._behind.__getitem__,
            )
            try:
                document = next(self._streams[source])
            except StopIteration:
                self._end(source)
                continue
            self._parent_states[source] = self._streams[source].get_state()
            counts = dict(self._counts[source])  # copied: states that were handed out keep theirs
            self._counts[source] = counts
            if document["skip"]:
                reason = f"skipped_{SKIP_REASONS[document['skip']]}"
                counts[reason] = counts.get(reason, 0) + 1
                continue
            example = document["example"]
            counts["documents"] += 1
            counts["tokens"] += len(example)
            counts["bytes"] += document["bytes"]
            counts["truncated"] += document["truncated"]
            self._advance(source, len(example))
            return {"example": example}
        raise StopIteration

    def _advance(self, source: int, tokens: int) -> None:
        if len(self._names) == 1:
            return
        running = sum(w for w, e in zip(self._weights, self._ended, strict=True) if not e)
        for i, ended in enumerate(self._ended):
            if not ended:
                self._behind[i] += tokens * self._weights[i] / running
        self._behind[source] -= tokens

    def _end(self, source: int) -> None:
        self._ended[source] = True
        self._parent_states[source] = self._streams[source].get_state()
        self._behind[source] = 0.0

    def get_state(self) -> dict[str, Any]:
        return {
            "sources": {
                name: {
                    "state": self._parent_states[i],
                    "behind": self._behind[i],
                    "ended": self._ended[i],
                    "counts": self._counts[i],
                }
                for i, name in enumerate(self._names)
            }
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        for i, name in enumerate(self._names):
            saved = state["sources"][name]
            self._streams[i].set_state(saved["state"])
            self._parent_states[i] = saved["state"]
            self._behind[i] = float(saved["behind"])
            self._ended[i] = bool(saved["ended"])
            self._counts[i] = dict(saved["counts"])
