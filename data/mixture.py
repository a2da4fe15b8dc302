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

from data.config import DataConfig, SchedulePoint
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
    def of(cls, config: DataConfig, streams: int) -> Weights:
        """A mixture's, as one of `streams` equal streams of a run sees them."""
        if not config.schedule:
            return cls.constant([source.weight for source in config.sources.values()])
        return cls.scheduled(config.schedule, list(config.sources), streams)

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

    def __init__(self, parents: Sequence[grain.DatasetIterator], mixture: Mixture):
        super().__init__(parents)
        self._streams = list(parents)
        self._names, self._weights, self._sizes = mixture.names, mixture.weights, mixture.sizes
        self._tokens = 0
        # Tokens that each source is behind its share; they sum to zero.
        self._behind = [0.0] * len(self._names)
        # Packers take the state at every document and keep it: it is replaced, never changed.
        self._sources: dict[str, dict[str, Any]] = {
            name: {"state": stream.get_state(), "ended": False, "counts": dict(_NO_COUNTS)}
            for name, stream in zip(self._names, self._streams, strict=True)
        }
        self._skipped_in_a_row = [0] * len(self._names)
        self._set_shares()

    def __next__(self) -> dict[str, Any]:
        while (source := self._next_source()) is not None:
            name = self._names[source]
            try:
                document = next(self._streams[source])
            except StopIteration:
                self._replace(name, source, ended=True)
                self._behind[source] = 0.0
                self._set_shares()
                continue
            counts = dict(self._sources[name]["counts"])
            self._replace(name, source, counts=counts)
            if document["skip"]:
                reason = f"skipped_{SKIP_REASONS[document['skip']]}"
                counts[reason] = counts.get(reason, 0) + 1
                self._count_skipped(source, counts)
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

    def _next_source(self) -> int | None:
        if not self._open:
            return None
        if len(self._open) == 1:
            return self._open[0]
        # One without a share now waits, however far behind an earlier share left it.
        return max(self._open, key=lambda i: (self._shares[i] > 0, self._behind[i]))

    def _replace(self, name: str, source: int, **fields: Any) -> None:
        state = self._streams[source].get_state()
        self._sources = {
            **self._sources,
            name: {**self._sources[name], "state": state, **fields},
        }

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
        self._open = [i for i, n in enumerate(self._names) if not self._sources[n]["ended"]]
        total = sum(weights[i] for i in self._open)
        self._shares = [0.0] * len(self._names)
        for i in self._open:
            # Where only sources without weight are left, they share alike.
            self._shares[i] = weights[i] / total if total else 1 / len(self._open)

    def _count_skipped(self, source: int, counts: Mapping[str, int]) -> None:
        self._skipped_in_a_row[source] += 1
        if self._skipped_in_a_row[source] > self._sizes[source]:
            told = ", ".join(
                f"{reason.removeprefix('skipped_')} {n}"
                for reason, n in counts.items()
                if reason.startswith("skipped_")
            )
            raise UserError(
                f"source {self._names[source]!r}: none of its documents can be used ({told})"
            )

    def get_state(self) -> dict[str, Any]:
        return {"tokens": self._tokens, "behind": list(self._behind), "sources": self._sources}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._tokens = int(state["tokens"])
        self._behind = [float(x) for x in state["behind"]]
        self._sources = {name: dict(state["sources"][name]) for name in self._names}
        for name, stream in zip(self._names, self._streams, strict=True):
            stream.set_state(self._sources[name]["state"])
        self._set_shares()
