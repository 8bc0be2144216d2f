"""A run on disk is the same iterable as a live one.

    for record in record_to("results/merit.jsonl", train(recipe)):   # trains, and writes
        ...
    for record in read("results/merit.jsonl"):                       # reads: the same StepRecords
        ...

A file is JSON lines: a header (recipe, hash of the text, versions, machine, date), then a line a record. Weights
that were kept stand beside it in a .npz. While a run is being recorded its lines go to NAME.partial, so that a run
that is broken off leaves what it had; the file itself appears whole at the end.
"""

import json
import os
import platform
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from glob import escape
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from . import __version__, files
from .errors import InputError, shown
from .files import clear_left, whole
from .recipe import Recipe
from .training import StepRecord, Training

FORMAT = 1


class Run:
    """A recorded run: iterate over it as over `train(recipe)`.

    Attributes:
        recipe: its Recipe.
        header: recipe, text (name, hash), versions, machine, date as they were written.
        records: list of StepRecord.
        path: where it was read from, or None.
        complete: False for a run that was broken off.
    """

    def __init__(self, header: dict[str, Any], records: list[StepRecord], path: Path | None = None):
        self.header, self.records, self.path = header, records, path
        self.recipe = Recipe.from_dict(header["recipe"])

    @property
    def name(self) -> str:
        """The file's name without its ending, or the optimizer's name."""
        return self.path.name.split(".")[0] if self.path else self.recipe.optimizer

    @property
    def complete(self) -> bool:
        """Whether the run went to its end (or diverged, which is an end)."""
        return bool(self.records) and (self.diverged or self.records[-1].step == self.recipe.n_steps)

    @property
    def diverged(self) -> bool:
        """Whether the loss stopped being finite."""
        return bool(self.records) and self.records[-1].diverged

    @property
    def final_val_loss(self) -> float:
        """The last validation loss, nats a token; inf for a run that diverged or has none."""
        losses = [r.val_loss for r in self.records if r.val_loss is not None]
        return losses[-1] if losses and not self.diverged else float("inf")

    @property
    def peak_logit(self) -> float:
        """The largest |attention logit| at any probe, layer and head; NaN if never measured."""
        return max((r.peak_logit for r in self.records if r.peak_logit is not None), default=float("nan"))

    def __iter__(self) -> Iterator[StepRecord]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)

    def __repr__(self) -> str:
        state = "diverged" if self.diverged else "complete" if self.complete else "broken off"
        return f"Run({self.name}: {self.recipe.optimizer}, lr {self.recipe.lr:g}, {len(self)} steps, {state})"

    def weights(self) -> dict[str, Tensor]:
        """The weights kept beside the run: parameter name -> float32 tensor. InputError if none were kept."""
        path = weights_path(self.path) if self.path else None
        if path is None or not path.is_file():
            raise InputError(f"run {self.name}: no weights were kept with it; record it with keep_weights=True")
        try:
            with np.load(path, allow_pickle=False) as arrays:
                return {name: torch.from_numpy(arrays[name].astype(np.float32)) for name in arrays.files}
        except Exception as error:  # zipfile, zlib and numpy raise a dozen kinds, all of them about this file
            raise InputError(
                f"run {self.name}: {path} holds no weights that can be read ({error}); record the run again"
            ) from None


def read(path: str | os.PathLike) -> Run:
    """Read a recorded run; also a NAME.partial of one that was broken off, up to its last whole line.

    Raises InputError for a file that is missing or is not a recorded run.
    """
    path = Path(path)
    try:
        content = files.read_bytes(path)
    except OSError as error:
        raise InputError(f"run: cannot read {path} ({error.strerror}); give a .jsonl file that the lab wrote") from None
    unfinished = path.suffix == ".partial"
    # Not str.splitlines, which also cuts at signs such as U+2028 that may stand in the name of a text.
    lines = content.removesuffix(b"\n").split(b"\n")
    number = 1
    try:
        run = Run(_header(lines[0]), [], path)
        for number, line in enumerate(lines[1:], 2):
            try:
                values = files.from_json(line)
            except ValueError:
                if unfinished and number == len(lines):
                    break  # the line that was being written when the run was broken off
                raise
            run.records.append(_checked(StepRecord.from_dict(values), run))
        return run
    except UnicodeDecodeError:
        raise InputError(f"run: {path} is not text in line {number}; give a .jsonl file that the lab wrote") from None
    except ValueError as error:
        raise InputError(
            f"run: {path} is not a recorded run (line {number}: {error}); record it again or remove the file"
        ) from None


def _header(line: bytes) -> dict[str, Any]:
    header = files.from_json(line)
    if not isinstance(header, dict):
        raise ValueError(f"the header is {shown(header)}, expected a table")
    if header.get("merit_lab_run") != FORMAT:
        raise ValueError(f"its format is {shown(header.get('merit_lab_run'))}, this version reads {FORMAT}")
    if "recipe" not in header:
        raise ValueError("the header has no recipe")
    return header


def _checked(record: StepRecord, run: Run) -> StepRecord:
    """The record, if it can stand behind the run's other ones; else ValueError."""
    if run.records and record.step <= run.records[-1].step:
        raise ValueError(f"step {record.step} comes after step {run.records[-1].step}")
    if run.diverged:
        raise ValueError(f"step {record.step} comes after the run diverged, which ended it")
    for name in ("max_attention_logit", "max_attention_logit_signed", "attention_entropy"):
        table = getattr(record, name)
        if table is None:
            continue
        config = run.recipe.model_config()
        if (len(table), len(table[0])) != (config.n_layer, config.n_head):
            raise ValueError(
                f"{name} has {len(table)} layers of {len(table[0])} heads, the recipe's model {config.n_layer} of "
                f"{config.n_head}"
            )
    return record


def read_many(place: str | os.PathLike | Iterable) -> list[Run]:
    """All runs of a folder (its .jsonl files, by name), or of a list of paths or Runs."""
    if isinstance(place, str | os.PathLike):
        folder = Path(place)
        if not folder.is_dir():
            return [read(folder)]
        paths = sorted(folder.glob("*.jsonl"))
        if not paths:
            raise InputError(f"run: no .jsonl file in {folder}; record a run there or give another folder")
        return [read(path) for path in paths]
    return [item if isinstance(item, Run) else read(item) for item in place]


def write(path: str | os.PathLike, header: dict[str, Any], records: Iterable[StepRecord]) -> None:
    """Write a run whole: the file appears at once, or not at all."""
    with whole(path) as file:
        file.write(_line(header))
        for record in records:
            file.write(_line(record.to_dict()))


def record_to(path: str | os.PathLike, training: Training, keep_weights: bool = False) -> Iterator[StepRecord]:
    """Iterate over a training run and write it to `path` as it goes.

    A run that goes on from a checkpoint is written from its first step, so that every step stands in the file once.

    Args:
        path: NAME.jsonl. Folders above it are made. While it runs the lines go to NAME.jsonl.partial.
        training: what `train(recipe)` returned.
        keep_weights: keep W_Q and W_K of every layer as they are at the end, as float16, in NAME.npz.

    Raises:
        InputError: the disk is full, say. What was written until then stays.
    """
    if training.ranks.rank > 0:
        yield from training
        if keep_weights:
            _query_key_weights(training)  # under "fsdp" rank 0 needs this rank's share
        return
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    header = header_of(training)
    records = list(islice(training, training.resumed or 0))
    for name in (path.name, weights_path(path).name):
        clear_left(path.parent, escape(name))
    with _naming(partial, partial, training):
        write(partial, header, records)  # whole: what was kept of this run before is not lost on the way
    yield from records
    # Not buffered: what a buffer could not write it would try again when it is closed, and fail anew.
    with open(partial, "ab", buffering=0) as file:
        for record in training:
            with _naming(partial, partial, training):
                _append(file, _line(record.to_dict()))
            records.append(record)
            yield record
    if keep_weights:
        kept = _query_key_weights(training)
        with _naming(weights_path(path), partial, training), whole(weights_path(path)) as file:
            np.savez_compressed(file, **kept)
    with _naming(path, partial, training):
        write(path, header, records)
        partial.unlink()


def _append(file: IO[bytes], line: bytes) -> None:
    while line:  # a disk that is nearly full takes a part
        line = line[file.write(line) :]


@contextmanager
def _naming(path: Path, partial: Path, training: Training) -> Iterator[None]:
    """An OSError as an InputError that says which file could not be written and what is kept of the run."""
    try:
        yield
    except OSError as error:
        kept = f"; the records so far are in {partial}" if partial.exists() else ""
        latest = training.checkpoints.latest
        raise InputError(
            f"run: {path} cannot be written ({error.strerror or error}){kept}; make room there, or see that it can be "
            f"written: the same run then goes on from {f'step {latest}' if latest else 'the beginning'}"
        ) from error


def header_of(training: Training) -> dict[str, Any]:
    """What a recorded run says of itself."""
    corpus = training.corpus
    return {
        "merit_lab_run": FORMAT,
        "recipe": training.recipe.to_dict(),
        "text": {"name": corpus.name, "sha256": corpus.sha256, "synthetic": corpus.synthetic},
        "parameters": training.model.count_parameters(),
        "n_head": training.model.config.n_head,
        "versions": {"merit_lab": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "machine": machine(training.device),
        "ranks": {"size": training.ranks.size, "parallel": training.ranks.mode},
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }


def machine(device: torch.device) -> str:
    """The kind of machine in words, without its name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} {platform.system()}, {torch.get_num_threads()} threads"


def weights_path(path: str | os.PathLike) -> Path:
    """Where the weights of the run at `path` stand."""
    path = Path(path)
    return path.with_name(path.name.split(".")[0] + ".npz")


def _query_key_weights(training: Training) -> dict[str, np.ndarray]:
    kept = {}
    with training.ranks.whole_model() as model:
        for layer, block in enumerate(model.blocks):
            query, key, _ = block.attention.query_key_value_weights()
            kept[f"blocks.{layer}.attention.query.weight"] = query
            kept[f"blocks.{layer}.attention.key.weight"] = key
        return {name: weight.detach().cpu().numpy().astype(np.float16) for name, weight in kept.items()}


def _line(values: dict) -> bytes:
    # NaN and Infinity as Python's json writes and reads them: a run that diverged must be readable.
    written = partial(json.dumps, values, separators=(",", ":"))
    try:
        return written(ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:  # the text is a file whose name is not UTF-8
        return written().encode() + b"\n"
