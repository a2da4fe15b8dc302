"""Documents of several sources in one stream, each source with its share of the tokens.

grain mixes by number of elements; documents of different lengths then miss their token shares. Here
the next document always comes from the source that is furthest behind its share, so after any
number of tokens a source is at most about one document away from it.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grain

from data.config import SchedulePoint
from data.documents import SKIP_REASONS
from laneformer_jax.errors import UserError

_NO_COUNTS = {"documents": 0, "tokens": 0, "bytes": 0, "truncated": 0}


# Rows of a stream in a row that may all be skipped before that counts as an error.
_STREAM_SIZE = 100_000


@dataclass(frozen=True)
class Weights:
    """Weights in straight lines from point to point, constant before and after.

    Attributes:
        tokens: int [points], rising; weights: float [points][sources].
    """

    tokens: tuple[int, ...]
    weights: tuple[tuple[float, ...], ...]

    @classmethod
    def constant(cls, weights: Sequence[float]) -> Weights:
        """The same weights throughout."""
        return cls((0,), (tuple(weights),))

    @classmethod
    def scheduled(
        cls, points: Sequence[SchedulePoint], names: Sequence[str], streams: int
    ) -> Weights:
        """A schedule as one of `streams` equal streams of a run sees it."""
        return cls(
            tuple(p.tokens // streams for p in points),
            tuple(tuple(float(p.weights.get(n, 0)) for n in names) for p in points),
        )

    def at(self, tokens: int) -> Sequence[float]:
        """The weights after `tokens` tokens."""
        after = bisect.bisect_right(self.tokens, tokens)
        if after in (0, len(self.tokens)):
            return self.weights[max(after - 1, 0)]
        begin, end = self.tokens[after - 1], self.tokens[after]
        part = (tokens - begin) / (end - begin)
        return [
            a + (b - a) * part
            for a, b in zip(self.weights[after - 1], self.weights[after], strict=True)
        ]


class Mixture(grain.IterDataset):
    """Mixes streams of encoded documents (see `data.documents.Encoder`) by token share.

    A source that ends is left out and the others keep their proportions; the mixture ends with the
    last one. Skipped documents are counted and not passed on.

    Args:
        parents: one stream per source.
        names: of the sources.
        weights: of the sources after so many tokens; any scale.
        sizes: documents of each source, None for a stream. A source that gives none to use among
            so many in a row raises UserError: it would be read forever.
    """

    def __init__(
        self,
        parents: Sequence[grain.IterDataset],
        names: Sequence[str],
        weights: Weights,
        sizes: Sequence[int | None],
    ):
        super().__init__(parents)
        self.names, self.weights = list(names), weights
        self.sizes = [_STREAM_SIZE if n is None else n for n in sizes]

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
        self._tokens = 0
        self._set_shares()
        self._skipped_in_a_row = [0] * len(self._names)
        self._parent_states = [p.get_state() for p in self._streams]

    def __next__(self) -> dict[str, Any]:
        while not all(self._ended):
            # A source without a share now waits, however far behind an earlier share left it.
            source = max(
                (i for i, ended in enumerate(self._ended) if not ended),
                key=lambda i: (self._shares[i] > 0, self._behind[i]),
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
        self._tokens += tokens
        if len(self._names) == 1:
            return
        self._set_shares()
        for i, share in enumerate(self._shares):
            self._behind[i] += tokens * share
        self._behind[source] -= tokens

    def _set_shares(self) -> None:
        """The shares at this place of the run among the sources that have not ended."""
        weights = self._weights.at(self._tokens)
        open_ = [0.0 if ended else w for w, ended in zip(weights, self._ended, strict=True)]
        total = sum(open_)
        # Only sources without weight are left: they share alike.
        alike = 1 / max(self._ended.count(False), 1)
        self._shares = [
            w / total if total else alike * (not ended)
            for w, ended in zip(open_, self._ended, strict=True)
        ]

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
        self._set_shares()

    def get_state(self) -> dict[str, Any]:
        return {
            "tokens": self._tokens,
            "sources": {
                name: {
                    "state": self._parent_states[i],
                    "behind": self._behind[i],
                    "ended": self._ended[i],
                    "counts": self._counts[i],
                }
                for i, name in enumerate(self._names)
            },
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._tokens = int(state["tokens"])
        for i, name in enumerate(self._names):
            saved = state["sources"][name]
            self._streams[i].set_state(saved["state"])
            self._parent_states[i] = saved["state"]
            self._behind[i] = float(saved["behind"])
            self._ended[i] = bool(saved["ended"])
            self._counts[i] = dict(saved["counts"])
        self._set_shares()
