"""Where files live, how they are read, and how they are written: whole or not at all."""

import errno
import json
import os
import secrets
import stat
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from .errors import InputError

PACKAGE = Path(__file__).resolve().parent


def repo_root() -> Path | None:
    """The checkout this package stands in, or None if it was installed as a wheel."""
    root = PACKAGE.parent
    return root if (root / "pyproject.toml").is_file() else None


def data_dir() -> Path:
    """The folder with corpora.toml: the checkout's data/, else the copy inside the wheel."""
    root = repo_root()
    return root / "data" if root else PACKAGE / "data"


def cache_dir() -> Path:
    """A writable folder for fetched and prepared texts; it is created if it is missing.

    MERIT_LAB_DATA, if set, is taken at its word: InputError if it cannot be written.
    Otherwise data/cache in the checkout, or the user's cache folder where that is read-only.
    """
    named = os.environ.get("MERIT_LAB_DATA")
    if named:
        folder = Path(named).expanduser().absolute()
        if not _writable(folder):
            raise InputError(
                f"MERIT_LAB_DATA={named!r} is not a folder that can be written; "
                "set it to one that can, or unset it to use the default"
            )
        return folder
    root = repo_root()
    if root and _writable(root / "data" / "cache"):
        return root / "data" / "cache"
    folder = _user_cache() / "merit_lab"
    if not _writable(folder):
        raise InputError(f"no writable folder for texts: tried {folder}; set MERIT_LAB_DATA to one that is")
    return folder


def read_bytes(path: str | os.PathLike) -> bytes:
    """What is in an ordinary file. OSError for anything else, so that a pipe does not wait for a writer for ever."""
    try:
        kind = os.stat(path).st_mode
    except ValueError:  # a NUL or a lone surrogate
        raise OSError(errno.EINVAL, "no file can have this name") from None
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(kind):
        raise OSError(errno.EINVAL, "it is a pipe or a device, not an ordinary file")
    return Path(path).read_bytes()


def read_text(path: str | os.PathLike) -> str:
    """The same as text with its line ends as Python's universal newlines. UnicodeDecodeError if it is not UTF-8."""
    return read_bytes(path).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")


def read_toml(path: str | os.PathLike) -> dict[str, Any]:
    """The values of a TOML file. OSError if it cannot be read, ValueError if it is not TOML."""
    text = read_text(path)
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("its tables or lists are nested too deeply") from None


def from_json(content: bytes) -> Any:
    """The value of a JSON text. ValueError if it is not UTF-8 or not JSON."""
    try:
        return json.loads(content.decode("utf-8"))
    except RecursionError:
        raise ValueError("its lists or tables are nested too deeply") from None


def write_whole(path: str | os.PathLike, content: str | bytes) -> None:
    """Write a file whole: a reader sees the old content or the new, never a part of it.

    str is written as UTF-8 with the line ends it has. Folders above are made as needed.
    """
    with whole(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def whole(path: str | os.PathLike) -> Iterator[IO[bytes]]:
    """A binary file that takes its name only once the block ended without an error."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, since os.replace is atomic only within one file system.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # else a crash after the rename can leave an empty file
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def clear_left(folder: str | os.PathLike, names: str) -> None:
    """Remove what `whole` left of its temporary files where the process was killed.

    Args:
        folder: where the files stand; it need not be there.
        names: of the files that were to be written, as a glob pattern.
    """
    for temporary in Path(folder).glob(f".{names}.*.tmp"):
        temporary.unlink(missing_ok=True)


def check_folder(folder: str | os.PathLike, name: str) -> None:
    """InputError unless a file can be written in this folder. It is made, as are those above.

    Args:
        name: what the person who gave the folder calls it, for the message.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):  # tried, not asked: os.access says yes to root everywhere
            pass
    except OSError as error:
        in_the_way = [str(path) for path in (folder, *folder.parents) if os.path.exists(path) and not path.is_dir()]
        reason = f"{in_the_way[0]} is not a folder" if in_the_way else error.strerror
        raise InputError(f"{name}: got {folder}, which cannot be written ({reason}); give a folder that can") from None


def _writable(folder: Path) -> bool:
    try:
        check_folder(folder, "")
    except InputError:
        return False
    return True


def _user_cache() -> Path:
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"])
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    if os.name == "nt":
        return Path(os.environ.get("LOCALAPPDATA", Path.home()))
    return Path.home() / ".cache"
