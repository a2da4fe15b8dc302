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
from laneformer_jax.errors import UserError

_NO_COUNTS = {"documents": 0, "tokens": 0, "bytes": 0, "truncated": 0}


class Mixture(grain.IterDataset):
    """Mixes streams of encoded documents (see `data.documents.Encoder`) by token share.

    A source that ends is left out and the others keep their proportions; the mixture ends with the
    last one. Skipped documents are counted and not passed on.

    Args:
        parents: one stream per source.
        names: of the sources.
        weights: of the sources; any positive scale.
        sizes: documents of each source. A source that gives none to use among so many in a row
            raises UserError: it would be read forever.
    """

    def __init__(
        self,
        parents: Sequence[grain.IterDataset],
        names: Sequence[str],
        weights: Sequence[float],
        sizes: Sequence[int],
    ):
        super().__init__(parents)
        self.names, self.weights, self.sizes = list(names), list(weights), list(sizes)

    def __iter__(self) -> grain.DatasetIterator:
        return MixtureIterator([iter(p) for p in self.parents], self)


class MixtureIterator(grain.DatasetIterator):
    """The iterator of a `Mixture`. Its state holds every source's state and counts."""

    def __init__(
        self,
        parents: Sequence[grain.DatasetIterator],
        mixture: Mixture,
    ):
        super().__init__(parents)
        self._streams = list(parents)
        self._names, self._weights, self._sizes = mixture.names, mixture.weights, mixture.sizes
        # Tokens that a source is behind its share; they sum to zero.
        self._behind = [0.0] * len(self._names)
        self._ended = [False] * len(self._names)
        self._counts: list[dict[str, int]] = [dict(_NO_COUNTS) for _ in self._names]
        self._skipped_in_a_row = [0] * len(self._names)
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
                self._count_skipped(source)
                continue
            self._skipped_in_a_row[source] = 0
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

    def _count_skipped(self, source: int) -> None:
        self._skipped_in_a_row[source] += 1
        if self._skipped_in_a_row[source] > self._sizes[source]:
            told = ", ".join(
                f"{reason.removeprefix('skipped_')} {n}"
                for reason, n in self._counts[source].items()
                if reason.startswith("skipped_")
            )
            raise UserError(
                f"source {self._names[source]!r}: none of its documents can be used ({told})"
            )

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
