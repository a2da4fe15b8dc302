"""Documents that are almost another one, by MinHash (`datasketch`)."""

from __future__ import annotations

import re

from datasketch import LeanMinHash, MinHash, MinHashLSH

from data.documents import Encoder, texts_of
from data.sources import BadDocument
from laneformer_jax.errors import UserError
from laneformer_jax.progress import progress

_PERMUTATIONS = 128
_SHINGLE = 5  # words
_WORD = re.compile(r"\w+")


def find_near_duplicates(encoder: Encoder, threshold: float) -> list[int]:
    """Indices of documents whose estimated Jaccard similarity of 5-word sequences to an earlier,
    kept one is at least `threshold`.

    The same source and threshold always give the same indices. Documents of fewer than five words
    are kept.

    Raises:
        UserError: `threshold` is not from 0.1 to 0.95, where 128 permutations can tell.
    """
    if not 0.1 <= threshold <= 0.95:
        raise UserError(f"near_duplicates = {threshold}: must be from 0.1 to 0.95")
    source = encoder.source
    assert source is not None
    index = MinHashLSH(threshold=threshold, num_perm=_PERMUTATIONS)
    kept: dict[int, LeanMinHash] = {}
    out = []
    with progress(len(source), f"near-duplicates of {encoder.name}", "documents") as bar:
        for i in range(len(source)):
            bar.advance()
            try:
                text = "\n".join(texts_of(source[i], encoder.config))
            except BadDocument:
                continue
            words = _WORD.findall(text)
            shingles = {
                " ".join(words[j : j + _SHINGLE]).encode() for j in range(len(words) - _SHINGLE + 1)
            }
            if not shingles:
                continue
            sketch = MinHash(num_perm=_PERMUTATIONS, seed=1)
            sketch.update_batch(sorted(shingles))
            lean = LeanMinHash(sketch)
            # The index answers with candidates; the estimate decides.
            if any(lean.jaccard(kept[j]) >= threshold for j in index.query(lean)):
                out.append(i)
                continue
            index.insert(i, lean)
            kept[i] = lean
    return out
