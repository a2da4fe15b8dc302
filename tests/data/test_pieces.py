"""Long files cut into documents: nothing lost, nothing twice, lines whole."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.config import SourceConfig
from data.sources import BadDocument
from data.sources.opening import open_source

lines = st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\n"), max_size=12))


def read(source):
    texts = []
    for i in range(len(source)):
        try:
            texts.append(source[i]["text"])
        except BadDocument as error:
            pytest.fail(str(error))
    return texts


@settings(max_examples=60, deadline=None)
@given(lines, st.integers(1, 40))
def test_pieces_are_the_file(tmp_path_factory, content, size):
    folder = tmp_path_factory.mktemp("pieces")
    whole = "\n".join(content)
    (folder / "a.txt").write_text(whole, encoding="utf-8", newline="")
    source = open_source("s", SourceConfig("text", str(folder), piece_bytes=size))
    texts = read(source)
    assert "".join(texts) == whole
    assert all(text.endswith("\n") for text in [t for t in texts if t][:-1])
    longest = max([len(line.encode()) + 1 for line in content], default=1)
    assert all(len(text.encode()) <= size + longest for text in texts)


def test_a_piece_is_in_the_split_of_its_file(tmp_path):
    for i in range(30):
        (tmp_path / f"{i}.py").write_text(f"# file {i}\n" * 20)
    config = SourceConfig("text", str(tmp_path), piece_bytes=50, heldout=0.3)
    files = {}
    for split in ("train", "heldout"):
        source = open_source("s", config, split)
        files[split] = {text.split("\n")[0] for text in read(source) if text}
    assert files["train"]
    assert files["heldout"]
    assert not files["train"] & files["heldout"]
    assert len(files["train"] | files["heldout"]) == 30
