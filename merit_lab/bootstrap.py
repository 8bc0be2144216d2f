"""Sets up .venv for make: run as a plain script by any Python >= 3.11, before anything is installed.

Nothing is done, in a fraction of a second, where .venv fits pyproject.toml, constraints.txt and the Python
that was asked for. An environment that was left half made, was moved, or does not run is made anew.
"""

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

EXTRAS = "lab,test"
# JupyterLab's defaults in .venv: else its first start asks whether to fetch news, over the first notebook.
LAB_SETTINGS = {"@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False}}
# What pip prints where it cannot reach its index.
NO_NETWORK = (
    "NewConnectionError",
    "ConnectTimeoutError",
    "ReadTimeoutError",
    "ProxyError",
    "name resolution",
    "Network is unreachable",
    "(from versions: none)",
)


def main() -> int:
    root = Path(__file__).resolve().parent.parent
    # One set-up at a time. pip inherits the lock: if this process is killed and pip lives on, the next
    # set-up waits until pip has ended too.
    lock = os.open(root, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say("another set-up is running in this folder; waiting for it")
        fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        set_up(root, lock)
    except SetUpError as error:
        say(str(error))
        return 1
    return 0


class SetUpError(Exception):
    """What went wrong and what to do, for the person who typed make."""


def set_up(root: Path, lock: int) -> None:
    """Make root/.venv fit. SetUpError if that failed; the next call then starts afresh."""
    venv = root / ".venv"
    stamp = venv / ".ready"
    wanted = f"{venv}\n{fingerprint(root)}\n"
    fault = what_is_wrong(venv)
    if fault is None and stamp.is_file() and stamp.read_text() == wanted:
        return
    if fault:
        make_venv(venv, fault, lock)
    else:
        say("bringing .venv up to date")
    stamp.unlink(missing_ok=True)
    install(root, venv, lock)
    settings = venv / "share" / "jupyter" / "lab" / "settings"
    settings.mkdir(parents=True, exist_ok=True)
    (settings / "overrides.json").write_text(json.dumps(LAB_SETTINGS))
    stamp.write_text(wanted)
    (venv / ".incomplete").unlink(missing_ok=True)
    say("done")


def fingerprint(root: Path) -> str:
    """A digest of everything that decides what gets installed."""
    digest = hashlib.sha256(EXTRAS.encode() + json.dumps(LAB_SETTINGS).encode())
    for name in ("pyproject.toml", "constraints.txt"):
        digest.update((root / name).read_bytes())
    return digest.hexdigest()


def what_is_wrong(venv: Path) -> str | None:
    """Why this environment cannot be used or updated; None if it can."""
    if not venv.is_dir():
        return "there is none yet"
    if (venv / ".incomplete").exists():
        return "the last set-up was broken off"
    stamp = venv / ".ready"
    if stamp.is_file() and stamp.read_text().splitlines()[:1] != [str(venv)]:
        return "it was made in another folder"  # its scripts would start a Python that is elsewhere
    ask = "import sys, pip; print('{0}.{1}'.format(*sys.version_info))"
    try:
        reply = subprocess.run([venv / "bin" / "python", "-c", ask], capture_output=True, text=True)
    except OSError:
        return "its Python does not run"
    if reply.returncode:
        return "its Python does not run"
    if reply.stdout.strip() != here():
        return f"it has Python {reply.stdout.strip()}, this is {here()}"
    return None


def make_venv(venv: Path, fault: str, lock: int) -> None:
    if not importlib.util.find_spec("venv") or not importlib.util.find_spec("ensurepip"):
        raise SetUpError(
            f"{sys.executable} cannot make virtual environments.\n"
            f"On Debian and Ubuntu: apt install python3-venv (or python{here()}-venv). Then run make again."
        )
    say(f"making .venv with Python {here()} ({fault}); this takes some minutes and needs the network")
    venv.mkdir(exist_ok=True)
    unfinished = venv / ".incomplete"
    unfinished.touch()  # first of all: whatever ends us from here on, the next call will see it
    for old in venv.iterdir():
        if old.is_dir() and not old.is_symlink():
            shutil.rmtree(old)
        elif old != unfinished:
            old.unlink()
    made = subprocess.run(
        [sys.executable, "-m", "venv", venv], pass_fds=[lock], capture_output=True, text=True
    )
    if made.returncode:
        raise SetUpError(f"python -m venv failed:\n{(made.stdout + made.stderr).strip()}")


def install(root: Path, venv: Path, lock: int) -> None:
    # Python compiles what is imported when it is first imported: a small part, and sooner than all of it here.
    command = [venv / "bin" / "python", "-m", "pip", "install", "--disable-pip-version-check", "--no-compile"]
    command += ["-c", "constraints.txt", "-e", f".[{EXTRAS}]"]
    lines = []
    with (
        open(venv / "setup.log", "w") as log,
        subprocess.Popen(
            command, cwd=root, pass_fds=[lock], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as pip,
    ):
        for line in pip.stdout:
            log.write(line)
            lines.append(line.rstrip())
            show_progress(line)
            if line.startswith("Installing collected packages"):
                (venv / ".incomplete").touch()  # until here pip only looked and fetched: nothing to repair
    if sys.stdout.isatty():
        print("\r\033[K", end="")
    if pip.returncode == 0:
        return
    message = "\n".join([line for line in lines if line.startswith("ERROR")] or lines[-10:])
    if any(sign in line for line in lines for sign in NO_NETWORK):
        message += (
            "\nIt looks as if the package index could not be reached. The first set-up needs the network; "
            "later runs do not.\nConnect (or point pip to a mirror) and run make again."
        )
    raise SetUpError(f"pip could not install the packages (everything it said: .venv/setup.log)\n{message}")


def show_progress(line: str) -> None:
    """On a terminal, one line that says what pip is at; in a log, nothing."""
    steps = ("Collecting", "Downloading", "Installing", "Building")
    if sys.stdout.isatty() and line.lstrip().startswith(steps):
        width = shutil.get_terminal_size().columns - 1
        print("\r\033[K" + line.strip()[:width], end="", flush=True)


def here() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def say(message: str) -> None:
    print(f"set-up: {message}", flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        say("broken off; run make again to start afresh")
        sys.exit(130)
