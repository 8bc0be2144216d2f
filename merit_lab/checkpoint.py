"""A run's state on disk: a run that was killed goes on where it was, and ends bit for bit as if it had not been.

    for record in train(recipe, checkpoint="results/merit"):   # killed at some step, whichever
        ...
    for record in train(recipe, checkpoint="results/merit"):   # the steps that were kept, at once; then the others
        ...

What a run carries from one step to the next are its weights and its optimizer's moments and counts. The learning rate
and the batch are pure functions of the step, so nothing else has to be kept but the records so far.

A checkpoint is one file, step-000025.checkpoint, in three parts:

    {"merit_lab_checkpoint": 1, "sha256": "…"}            format, and checksum of all that follows this line
    {"step": 25, "recipe": {…}, "text": {…}, …}           what it is of, and what wrote it
    weights, optimizer state, records                     as torch.save writes them

`head -n 2` shows what it is, `tail -n +2 FILE | sha256sum` checks it, and loading it runs no code that is in it.

- It appears whole or not at all: a temporary file, fsync, then its name.
- An older one is deleted only after the newer one is on disk, so that `keep` + 1 of them must fit.
- One that is damaged is said, and the one before is taken.
- One of another recipe or text is refused: the numbers would be of no recipe at all. `device` alone may differ, for a
  run may have to move. `micro_batch_size`, `eval_every` and their like may not: the first changes sums in their last
  digits, and the others what the records hold. `precision` counts as what it comes to on the device.

One run a folder, and one process at a time: a second one clears away what it takes for a dead one's temporary files.
Where weights and moments are spread over ranks (DTensors), a checkpoint holds them whole: all ranks gather, the first
one writes, and each takes its own rows of what it reads. So they must all see the folder: where they find different
steps the run is refused.
"""

import errno
import hashlib
import json
import os
import pickle
import re
import warnings
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from . import __version__
from .distributed import from_all, place
from .errors import InputError, shown
from .files import check_folder, clear_left, from_json, whole

FORMAT = 1  # to be raised whenever the file, the names of the weights or the optimizers' states change
NAME = re.compile(r"step-(\d{6,})\.checkpoint")
MAY_DIFFER = ("device",)  # fields of the recipe


class Damaged(Exception):
    """Why a file is no checkpoint that could be used."""


class Checkpoints:
    """The checkpoints of one run: found, loaded, written and cleared away. Without a folder, none of it.

    Attributes:
        latest: step of the newest whole checkpoint that was loaded or written, or None.
    """

    def __init__(self, folder: str | os.PathLike | None, every: int | None, keep: int, n_steps: int):
        """
        Args:
            folder: where they are kept; it is made. None: no checkpoints.
            every: steps between two; None: ten in a run. The run's last step always has one.
            keep: how many are kept, at least 1.
            n_steps: length of the run.
        """
        _check_count("checkpoint_every", every, or_none=True)
        _check_count("keep", keep)
        if folder is None and every is not None:
            raise InputError(f"checkpoint_every: got {every} without a folder for checkpoints; give `checkpoint` too")
        self.folder = None if folder is None else Path(folder)
        self.every, self.keep, self.n_steps = every or max(1, n_steps // 10), keep, n_steps
        self.latest: int | None = None
        self._lines: list[str] = []  # the records so far, as JSON
        self._damaged: list[Path] = []  # to be cleared away once there is a newer one
        if self.folder is not None:
            check_folder(self.folder, "checkpoint")

    def paths(self) -> list[Path]:
        """The checkpoints that are there, oldest first."""
        found = [path for path in self.folder.iterdir() if NAME.fullmatch(path.name) and path.is_file()]
        return sorted(found, key=_step_of)

    # -- loading -------------------------------------------------------------------------------------------------

    def resume(self, training) -> list[dict]:
        """Put a training run at its newest good checkpoint. Returns the records up to there; [] where there is none.

        Raises:
            InputError: there are checkpoints, but all are damaged; or the newest good one is of another recipe, text
                or format; or several ranks find different steps. On all ranks, also where one alone finds it.
        """
        records, problem = [], None
        try:
            if self.folder is not None:
                records = self._newest(training)
        except InputError as error:
            problem = error
        with training.ranks.naming_failures():
            found = from_all((self.latest, problem and str(problem)))
        if problem is not None:
            raise problem
        for rank, (_, theirs) in enumerate(found):
            if theirs is not None:
                raise InputError(f"rank {rank}: {theirs}")
        steps = [step for step, _ in found]
        if len(set(steps)) > 1:
            each = ", ".join(f"rank {rank} {f'step {step}' if step else 'none'}" for rank, step in enumerate(steps))
            raise InputError(
                f"checkpoint: got {self.folder}, where the ranks find different checkpoints ({each}); "
                "give a folder on a disk that all of them share"
            )
        return records

    def _newest(self, training) -> list[dict]:
        """Put the run at the newest good checkpoint that this rank finds, and return its records."""
        if _is_first_rank():
            clear_left(self.folder, "step-*.checkpoint")
        damaged: dict[Path, Damaged] = {}
        for path in reversed(self.paths()):
            try:
                records = self._go_to(path, training)
            except Damaged as why:
                damaged[path] = why
                continue
            self.latest, self._damaged = _step_of(path), list(damaged)
            self._clear_older(self.latest)  # a process may have been killed before it could
            for other, why in damaged.items():
                warnings.warn(f"checkpoint: {other} cannot be used: {why}. Step {self.latest}'s is.", stacklevel=5)
            return records
        if damaged:
            reasons = "; ".join(f"{path.name}: {why}" for path, why in damaged.items())
            raise InputError(
                f"checkpoint: got {self.folder}, where no checkpoint can be used ({reasons}); "
                "remove them to train from the beginning, or give another folder"
            )
        return []

    def _go_to(self, path: Path, training) -> list[dict]:
        """Put the run where this checkpoint has it, and return its records. Damaged, if it cannot be used."""
        try:
            with open(path, "rb") as file:
                self._refuse_another_run(_read_header(file, path), training)
                with _nothing_but_a_state():
                    state = torch.load(file, map_location="cpu", weights_only=True)
        except OSError as error:
            raise Damaged(f"it cannot be read ({error.strerror or error})") from None
        with _nothing_but_a_state():
            restore(training, state)
            self._lines = state["records"].splitlines()
            return [json.loads(line) for line in self._lines]

    def _refuse_another_run(self, header, training):
        saved = header["recipe"] | {"precision": header["precision"]}
        now = training.recipe.to_dict() | {"precision": training.precision}
        if differing := _differences(saved, now):
            raise InputError(
                f"checkpoint: got {self.folder}, which holds a run of another recipe: {'; '.join(differing)}; "
                "take the recipe as it was to go on with that run, or another folder for this one"
            )
        there, here = header["text"], text_of(training)
        if there["sha256"] != here["sha256"]:
            named = (f"{text['name']} (sha256 {text['sha256'][:12]})" for text in (there, here))
            raise InputError(
                f"checkpoint: got {self.folder}, which holds a run on another text: {' there, '.join(named)} here; "
                "train on the text as it was to go on with that run, or give another folder for this one"
            )
        if header["versions"]["torch"] != torch.__version__:
            warnings.warn(
                f"checkpoint: {self.folder} was written by torch {header['versions']['torch']}, this is "
                f"{torch.__version__}: from here on the last digits may not be those of a run in one go.",
                stacklevel=7,  # at the line that called train()
            )

    # -- saving --------------------------------------------------------------------------------------------------

    def take(self, training, record) -> None:
        """Keep a record, and after it the run's state where a checkpoint is due.

        Raises:
            InputError: it cannot be written. Checkpoints that were there still are.
        """
        if self.folder is None:
            return
        self._lines.append(json.dumps(record.to_dict()))
        if record.diverged or record.step % self.every == 0 or record.step == self.n_steps:
            self._save(training, record.step)

    def _save(self, training, step):
        state = state_of(training)  # by every rank, for each has a part
        if _is_first_rank():
            self._write(training, step, state)
        self.latest, self._damaged = step, []

    def _write(self, training, step, state):
        path = self.folder / f"step-{step:06d}.checkpoint"
        try:
            if not self.folder.is_dir():  # not made again: the disk it was on may be gone
                raise FileNotFoundError(errno.ENOENT, "the folder is gone")
            with whole(path) as file:
                write(file, training, step, state, self._lines)
            _sync(self.folder)
            for useless in self._damaged:
                if useless != path:
                    useless.unlink(missing_ok=True)
            self._clear_older(step)
        except OSError as error:
            again = f"from step {self.latest}" if self.latest else "from the beginning"
            raise InputError(
                f"checkpoint: that of step {step} cannot be written to {self.folder} ({error.strerror or error}); "
                f"make room there, or see that it can be written: the same run then goes on {again}"
            ) from error

    def _clear_older(self, step):
        """Delete the checkpoints before this step's, which is whole, but for the newest keep - 1."""
        if not _is_first_rank():
            return
        older = [path for path in self.paths() if _step_of(path) < step]
        for path in older[: max(0, len(older) + 1 - self.keep)]:
            path.unlink(missing_ok=True)


# -- what a run's state is ---------------------------------------------------------------------------------------
# No other place knows.


def state_of(training) -> dict[str, Any]:
    """The weights, and the optimizer's moments and counts: nested dicts and lists of whole tensors and plain values.

    Where they are spread over ranks, all ranks call this together.
    """
    optimizer = training.optimizer.state_dict()
    moments = {
        index: {name: _gathered(value) for name, value in state.items()} for index, state in optimizer["state"].items()
    }
    weights = {name: _gathered(weight) for name, weight in training.model.state_dict().items()}
    return {"model": weights, "optimizer": optimizer | {"state": moments}}


def restore(training, state: dict[str, Any]) -> None:
    """Put a run where `state_of` found it. The tensors may be on any device, and are spread as the run's own are."""
    own = training.model.state_dict()
    training.model.load_state_dict({name: _spread(weight, own[name]) for name, weight in state["model"].items()})
    parameters = [p for group in training.optimizer.param_groups for p in group["params"]]  # moments go by their order
    moments = {
        index: {name: _spread(value, parameters[index]) for name, value in values.items()}
        for index, values in state["optimizer"]["state"].items()
    }
    training.optimizer.load_state_dict(state["optimizer"] | {"state": moments})


def _gathered(x: Tensor) -> Tensor:
    return x.full_tensor().cpu() if hasattr(x, "full_tensor") else x


def _spread(x: Tensor, like: Tensor) -> Tensor:
    if not hasattr(like, "placements") or x.shape != like.shape:  # a count of steps lies whole on every rank
        return x
    from torch.distributed.tensor import distribute_tensor

    # src_data_rank: each rank cuts out its own part, since each has read the whole
    return distribute_tensor(x, like.device_mesh, like.placements, src_data_rank=None)


def _is_first_rank() -> bool:
    """Whether this process writes: the only one, or the first of those that train together."""
    return place()[0] == 0


@contextmanager
def _nothing_but_a_state():
    """Behind a right checksum a file that somebody made may hold anything; torch and json then raise anything."""
    try:
        yield
    except OSError:
        raise
    except (pickle.UnpicklingError, EOFError, RuntimeError, ValueError, TypeError, LookupError, AttributeError):
        raise Damaged("it holds something else than the state of this run") from None


# -- the file ----------------------------------------------------------------------------------------------------


def write(file: IO[bytes], training, step: int, state: dict[str, Any], lines: list[str]) -> None:
    """Write a checkpoint, tensor by tensor.

    Args:
        file: new, binary and seekable.
        state: what `state_of` returned.
        lines: the records of all steps so far, each as JSON.
    """
    header = {
        "step": step,
        "recipe": training.recipe.to_dict(),
        "precision": training.precision,
        "text": text_of(training),
        "versions": {"merit_lab": __version__, "torch": torch.__version__},
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    hashed = _Hashed(file)
    file.write(_first_line("0" * 64))  # its place, until the checksum is known
    hashed.write(json.dumps(header, ensure_ascii=False).encode() + b"\n")
    # One string of JSON lines: thousands of small dicts would take torch.load far longer.
    torch.save(state | {"records": "\n".join(lines)}, hashed)
    if hashed.error is not None:
        raise hashed.error
    file.seek(0)
    file.write(_first_line(hashed.digest.hexdigest()))


class _Hashed:
    """A file to write to that hashes what passes.

    torch's writer calls it from C++ and would turn an error (a full disk, Ctrl-C) into one of its own that says
    nothing of the cause. So an error is kept, and for the caller to raise.
    """

    def __init__(self, file: IO[bytes]):
        self.file, self.digest, self.error = file, hashlib.sha256(), None

    def write(self, data) -> int:
        if self.error is None:
            try:
                self.file.write(data)
                self.digest.update(data)
            except BaseException as error:
                self.error = error
        return len(data)

    def flush(self) -> None:
        """Left to the file's owner."""


def _first_line(sha256: str) -> bytes:
    return json.dumps({"merit_lab_checkpoint": FORMAT, "sha256": sha256}).encode() + b"\n"


def _read_header(file: IO[bytes], path: Path) -> dict[str, Any]:
    """What a checkpoint says of itself, once its checksum is found right; the file then stands at the state."""
    try:
        first = from_json(file.readline(1000))
        found = first["merit_lab_checkpoint"], first["sha256"]
    except (ValueError, TypeError, KeyError):
        raise Damaged("it is not a checkpoint of merit_lab, or no longer") from None
    if found[0] != FORMAT:
        raise InputError(
            f"checkpoint: {path} has format {found[0]!r}, and this version reads {FORMAT}; "
            "go on with the version of merit_lab that wrote it, or give another folder"
        )
    start = file.tell()
    if hashlib.file_digest(file, "sha256").hexdigest() != found[1]:
        raise Damaged("its checksum is wrong: it was cut short or changed")
    file.seek(start)
    # The checksum says that nothing was changed by accident; what somebody made by hand is looked at no less.
    try:
        header = from_json(file.readline())
        step, _ = header["step"], (header["recipe"] | {}, header["precision"], header["versions"]["torch"])
        text = header["text"]["sha256"], header["text"]["name"]
    except (ValueError, TypeError, KeyError):
        raise Damaged("it does not say what it is of") from None
    if step != _step_of(path) or not all(isinstance(value, str) for value in text):
        raise Damaged(f"it is step {shown(step)}'s under another name")
    return header


def text_of(training) -> dict[str, Any]:
    """What a run is trained on."""
    corpus = training.corpus
    return {"name": corpus.name, "sha256": corpus.sha256, "synthetic": corpus.synthetic}


def _differences(saved: dict[str, Any], now: dict[str, Any], table: str = "") -> list[str]:
    """Each entry that differs, with both values; entries of tables by themselves."""
    found = []
    for name in [*saved, *(name for name in now if name not in saved)]:
        there, here = saved.get(name), now.get(name)
        if isinstance(there, dict) and isinstance(here, dict):
            found += _differences(there, here, f"{table}{name}.")
        elif there != here and name not in MAY_DIFFER:
            said = (repr(values[name]) if name in values else "not set" for values in (saved, now))
            found.append(f"{table}{name} is {' there and '.join(said)} here")
    return found


def _step_of(path: Path) -> int:
    return int(NAME.fullmatch(path.name)[1])


def _sync(folder: Path) -> None:
    """Have the names in a folder on disk, not in memory alone."""
    if os.name == "nt":  # which opens no folder, and has no need to
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_count(name: str, value: Any, or_none: bool = False) -> None:
    if value is None and or_none:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{name}: got {value!r}, expected a whole number ≥ 1{' or None' * or_none}")
