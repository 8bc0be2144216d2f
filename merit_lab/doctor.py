"""Is this environment fit? `python -m merit_lab doctor` prints a line a check: [ok], or [!!] and what to do.

Nothing that may be missing or broken, torch included, is imported before the check that says so.
"""

import importlib.metadata
import os
import platform
import re
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from .errors import InputError
from .files import cache_dir

BROWSERS = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
)
FREE_GIB = 2  # prepared texts, recorded runs and figures take far less
AGAIN = "run make setup, or: pip install -c constraints.txt -e '.[lab]'"


class Check(NamedTuple):
    ok: bool
    what: str  # as it was found
    advice: str = ""  # what to do if not ok
    essential: bool = True  # without it neither training nor the command line works


def checks() -> list[Check]:
    """Everything looked at, in the order to mend it."""
    return [*machine(), *packages(), *torch_and_device(), *fused_step(), *lab(), *places(), browser()]


def report() -> int:
    """Print a line a check. Returns the exit code: 1 if something essential is missing."""
    found = checks()
    for check in found:
        print(f"[ok] {check.what}" if check.ok else f"[!!] {check.what} -> {check.advice}")
    return int(any(check.essential and not check.ok for check in found))


main = report


def verdict() -> None:
    """Print what is the same on every machine that is fit: for notebooks, whose outputs are compared.

    What is not fit is printed below it, as report() does.
    """
    groups = {
        "Python, packages and PyTorch": [*machine(), *packages(), *torch_and_device()],
        "JupyterLab, kernel and widgets": list(lab()),
        "text and folders": list(places()),
    }
    for name, found in groups.items():
        print(f"{name}: {all(check.ok for check in found)}")
    wrong = [check for found in groups.values() for check in found if not check.ok]
    print(f"environment is ready: {not wrong}")
    for check in wrong:
        print(f"[!!] {check.what} -> {check.advice}")


def machine() -> Iterator[Check]:
    yield Check(
        sys.version_info >= (3, 11),
        f"Python {platform.python_version()} at {sys.executable}",
        "install Python 3.11 or newer; then make PYTHON=/path/to/python setup",
    )
    system = f"{platform.system()} {platform.release()} on {platform.machine()}"
    yield Check(True, f"{system}, {processors()} processors")


def processors() -> int:
    """Those that this process may use; a container or batch job often has fewer than the machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def packages() -> Iterator[Check]:
    """Each dependency of the core, and of the lab, against the least version pyproject.toml names."""
    try:
        required = importlib.metadata.requires("merit-lab") or []
    except importlib.metadata.PackageNotFoundError:
        yield Check(False, "merit-lab itself is not installed", AGAIN)
        return
    for line in required:
        name, least, extra = parsed(line)
        if extra not in (None, "lab"):
            continue
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            purpose = " (for the notebooks)" if extra else ""
            yield Check(False, f"{name} is not installed{purpose}", AGAIN, essential=not extra)
            continue
        fits = numbers(version) >= numbers(least)
        what = f"{name} {version}" + ("" if fits else f" is older than {least}")
        yield Check(fits, what, AGAIN, essential=not extra)


def parsed(requirement: str) -> tuple[str, str, str | None]:
    """'torch>=2.11; extra == "lab"' -> ("torch", "2.11", "lab"). Only the forms that pyproject.toml uses."""
    name = re.match(r"[\w.-]+", requirement)[0]
    least = re.search(r">=\s*([\w.]+)", requirement)
    extra = re.search(r"extra\s*==\s*['\"](\w+)", requirement)
    return name, least[1] if least else "0", extra[1] if extra else None


def numbers(version: str) -> tuple[int, ...]:
    """'2.13.0+cpu' -> (2, 13, 0), which compares as versions do."""
    return tuple(int(part) for part in re.match(r"\d+(\.\d+)*", version)[0].split("."))


def torch_and_device() -> Iterator[Check]:
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: one of its libraries does not load
        yield Check(False, f"torch does not import: {error}", AGAIN)
        return
    if torch.cuda.is_available():
        bf16 = "bf16 autocast" if torch.cuda.is_bf16_supported() else "no bf16, so fp32"
        yield Check(True, f"training runs on {torch.cuda.get_device_name()}, {bf16}")
    else:
        other = "; Apple's GPU is used with device='mps' only" if torch.backends.mps.is_available() else ""
        yield Check(True, f"training runs on the CPU in fp32: no CUDA device{other}")
    threads = torch.get_num_threads()
    yield Check(
        threads <= processors(),
        f"torch computes with {threads} threads",
        f"more threads than the {processors()} processors are slow: unset OMP_NUM_THREADS, or set it lower",
        essential=False,
    )


def fused_step() -> Iterator[Check]:
    """Whether LAMB's and MERIT's fused step is compiled on this machine. Compiles it, the first time."""
    try:
        import torch

        from .optim import fast_c
    except (ImportError, OSError):
        return  # torch_and_device has said so
    with warnings.catch_warnings(action="ignore"):  # the check says it
        compiled = fast_c.library(torch.float32) is not None
    yield Check(
        compiled,
        f"LAMB and MERIT take their fused step in {'C' if compiled else 'torch'}",
        "it is slower there; install gcc or clang (Debian: apt install gcc)",
        essential=False,
    )


def lab() -> Iterator[Check]:
    """What only the notebooks need."""
    try:
        widgets = importlib.metadata.version("jupyterlab_widgets")
        ipywidgets = importlib.metadata.version("ipywidgets")
        from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel
        from jupyter_core.paths import jupyter_path
    except ImportError as error:  # PackageNotFoundError is one
        yield Check(False, f"no JupyterLab: {error.name} is missing", AGAIN, essential=False)
        return
    # ipywidgets 8 speaks the protocol of jupyterlab_widgets 3; each major version moved both by one.
    yield Check(
        numbers(widgets)[0] == numbers(ipywidgets)[0] - 5,
        f"ipywidgets {ipywidgets} with jupyterlab_widgets {widgets}",
        "the two do not fit together, widgets would stay blank: pip install -U ipywidgets jupyterlab_widgets",
        essential=False,
    )
    manager = Path("@jupyter-widgets", "jupyterlab-manager", "package.json")
    yield Check(
        any((Path(folder) / manager).is_file() for folder in jupyter_path("labextensions")),
        "JupyterLab's widget extension",
        "widgets would stay blank: pip install --force-reinstall jupyterlab_widgets",
        essential=False,
    )
    try:
        program = KernelSpecManager().get_kernel_spec("python3").argv[0]
    except NoSuchKernel:
        program = "none"
    # A bare "python" is replaced by the Python that starts the kernel.
    here = program in ("python", "python3") or Path(program).absolute() == Path(sys.executable).absolute()
    yield Check(
        here,
        "the kernel 'python3' runs this Python" if here else f"the kernel 'python3' runs {program}",
        f"make it run this one: {sys.executable} -m ipykernel install --sys-prefix",
        essential=False,
    )


def places() -> Iterator[Check]:
    try:
        folder = cache_dir()
    except InputError as error:
        yield Check(False, "no folder for texts can be written", str(error))
        return
    yield Check(True, f"texts are kept in {folder}")
    free = shutil.disk_usage(folder).free / 2**30
    yield Check(
        free >= FREE_GIB,
        f"{free:.1f} GiB free there",
        f"make room: {FREE_GIB} GiB are enough; or set MERIT_LAB_DATA to a folder on another disk",
        essential=False,
    )
    try:
        from . import text

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # load() says there what the check says here
            corpus = text.load("shakespeare", offline=True)
    except (InputError, ImportError, OSError) as error:
        yield Check(False, "Shakespeare cannot be prepared", str(error), essential=False)
        return
    yield Check(
        not corpus.synthetic,
        "Shakespeare is not prepared" if corpus.synthetic else f"Shakespeare: {len(corpus.train):,} tokens",
        "with a network, once: python -m merit_lab text shakespeare (until then a synthetic text is used)",
        essential=False,
    )


def browser() -> Check:
    found = find_browser()
    return Check(
        found is not None,
        f"{found} for the browser tests" if found else "no Chromium, so the browser tests are skipped",
        "only developers need it: apt install chromium, or set MERIT_LAB_BROWSER to one",
        essential=False,
    )


def find_browser() -> str | None:
    """Path of a Chromium or Chrome that Playwright can drive; MERIT_LAB_BROWSER names one."""
    named = os.environ.get("MERIT_LAB_BROWSER")
    candidates = [named] if named else BROWSERS
    return next((path for path in map(shutil.which, candidates) if path), None)
