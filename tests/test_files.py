"""Files are written whole, and land where they should."""

import os
import stat

import pytest

from merit_lab import files
from merit_lab.errors import InputError


def test_a_file_is_written_with_its_folders_and_nothing_beside_it(tmp_path):
    path = tmp_path / "new" / "folder" / "text.txt"
    files.write_whole(path, "η = 0,1\r\n")
    assert path.read_bytes() == "η = 0,1\r\n".encode()
    files.write_whole(path, b"\x00\x01")
    assert path.read_bytes() == b"\x00\x01"
    assert [other.name for other in path.parent.iterdir()] == ["text.txt"]


def test_a_reader_sees_the_old_content_until_the_new_is_whole(tmp_path):
    path = tmp_path / "text"
    path.write_text("old")
    with files.whole(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_text() == "old"
    assert path.read_text() == "new"


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_after_an_error_the_old_content_stands_and_nothing_is_left(tmp_path, error):
    path = tmp_path / "text"
    path.write_text("old")
    with pytest.raises(error), files.whole(path) as file:
        file.write(b"half of the n")
        raise error
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_others_may_read_what_the_umask_lets_them(tmp_path):
    old = os.umask(0o027)
    try:
        files.write_whole(tmp_path / "text", "")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "text").stat().st_mode) == 0o640


def test_the_cache_is_where_the_variable_says(tmp_path, monkeypatch):
    monkeypatch.setenv("MERIT_LAB_DATA", str(tmp_path / "here"))
    assert files.cache_dir() == tmp_path / "here"
    assert files.cache_dir().is_dir()


def test_a_named_cache_that_cannot_be_written_is_refused_by_name(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("MERIT_LAB_DATA", str(tmp_path / "file" / "below"))
    with pytest.raises(InputError, match=r"MERIT_LAB_DATA=.*below.*set it to one"):
        files.cache_dir()


def test_without_the_variable_it_is_in_the_checkout(tmp_path, monkeypatch):
    monkeypatch.delenv("MERIT_LAB_DATA", raising=False)
    assert files.cache_dir() == files.repo_root() / "data" / "cache"


def test_outside_a_writable_checkout_it_is_the_users(tmp_path, monkeypatch):
    monkeypatch.delenv("MERIT_LAB_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(files, "PACKAGE", tmp_path / "site-packages" / "merit_lab")
    assert files.repo_root() is None
    assert files.data_dir() == tmp_path / "site-packages" / "merit_lab" / "data"
    assert files.cache_dir() == tmp_path / "merit_lab"
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "pyproject.toml").touch()
    (tmp_path / "site-packages" / "data").touch()  # no folder can be made in here
    assert files.repo_root() == tmp_path / "site-packages"
    assert files.cache_dir() == tmp_path / "merit_lab"
