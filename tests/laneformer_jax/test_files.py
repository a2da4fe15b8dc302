import os

import pytest

from laneformer_jax.errors import UserError
from laneformer_jax.files import atomic_dir, atomic_file


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def test_file_appears_whole_in_new_folders(tmp_path):
    target = tmp_path / "a" / "b.txt"
    with atomic_file(target) as file:
        file.write("δ = 2\r\n")
        assert not target.exists()
    assert target.read_bytes() == "δ = 2\r\n".encode()
    assert names(target.parent) == ["b.txt"]


def test_bytes_replace_an_existing_file(tmp_path):
    target = tmp_path / "x"
    target.write_bytes(b"old")
    with atomic_file(target, "wb") as file:
        file.write(b"\x00\xff")
    assert target.read_bytes() == b"\x00\xff"


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_failed_file_leaves_the_old_one_and_nothing_else(tmp_path, error):
    target = tmp_path / "x"
    target.write_text("old")

    def fail():
        with atomic_file(target) as file:
            file.write("half")
            raise error

    with pytest.raises(error):
        fail()
    assert target.read_text() == "old"
    assert names(tmp_path) == ["x"]


def test_file_has_the_permissions_of_the_umask(tmp_path):
    old = os.umask(0o027)
    try:
        with atomic_file(tmp_path / "x") as file:
            file.write("1")
    finally:
        os.umask(old)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o640


def test_append_mode_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'w' or 'wb'"), atomic_file(tmp_path / "x", "a"):
        pass


def test_folder_appears_whole(tmp_path):
    target = tmp_path / "new" / "model"
    with atomic_dir(target) as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "weights").write_text("1")
        assert not target.exists()
    assert (target / "sub" / "weights").read_text() == "1"
    assert names(target.parent) == ["model"]


def test_failed_folder_leaves_nothing(tmp_path):
    def fail():
        with atomic_dir(tmp_path / "model") as folder:
            (folder / "half").write_text("1")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert names(tmp_path) == []


def test_full_folder_is_refused_before_any_work_unless_overwritten(tmp_path):
    target = tmp_path / "model"
    target.mkdir()
    (target / "old").write_text("1")
    with pytest.raises(UserError, match="exists and is not empty"), atomic_dir(target):
        pytest.fail("the block must not run")
    assert names(target) == ["old"]
    with atomic_dir(target, overwrite=True) as folder:
        (folder / "new").write_text("2")
    assert names(target) == ["new"]
    assert names(tmp_path) == ["model"]


def test_empty_folder_may_be_filled_and_a_file_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with atomic_dir(tmp_path / "empty") as folder:
        (folder / "x").write_text("1")
    assert names(tmp_path / "empty") == ["x"]
    with pytest.raises(UserError, match="is a file"), atomic_dir(tmp_path / "empty" / "x"):
        pytest.fail("the block must not run")
