"""Several optimizers on the same recipe: the same first weights, the same batches in the same order.

    entries = plan("compare", ["AdamW", "LAMB", "MERIT"], {"MERIT": 2e-2}, seed=1)
    for entry, record in run(entries, "results/compare"):
        print(entry.optimizer, record.step, record.train_loss)
    runs = read(entries, "results/compare")

One optimizer is trained after the other, each recorded to a file of its own. Who iterates decides what to
show: there is no terminal code here.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from . import optim, runs, text
from .errors import InputError
from .files import check_folder
from .recipe import RECIPES, Recipe
from .training import StepRecord, train


class Entry(NamedTuple):
    """One optimizer of a comparison."""

    recipe: Recipe
    lr_from: str  # where its learning rate comes from, in words

    @property
    def optimizer(self) -> str:
        """The optimizer's name."""
        return self.recipe.optimizer

    def path(self, folder: str | os.PathLike) -> Path:
        """Its run's file in this folder."""
        return Path(folder) / f"{file_name(self.optimizer)}.jsonl"


def resolve(source: str, **changes: Any) -> Entry:
    """The recipe of this name, or in this TOML file, with other values.

    Args:
        source: a key of RECIPES, or the path of a TOML file.
        changes: fields to set otherwise. A table for `model` or `optimizer_args` is laid over the recipe's.

    Raises:
        InputError: a field that is wrong; or another optimizer than the file's without a learning rate of its
            own, since one optimizer's rate says nothing about another's.
    """
    if source in RECIPES or not (source.endswith(".toml") or Path(source).exists()):
        base = Recipe.named(source)  # which lists the names there are
        changes = _laid_over(base, changes)
        recipe = Recipe.named(source, **changes)
        found = recipe.optimizer in RECIPES[source].lr
        lr_from = f"recipe {source}" if found else f"MERIT's in recipe {source}"
    else:
        base = Recipe.read(source)
        optimizer = changes.get("optimizer", base.optimizer)
        if optimizer != base.optimizer and "lr" not in changes:
            optim.named(optimizer)
            raise InputError(f"lr: {source} has a learning rate for {base.optimizer} alone; give {optimizer} its own")
        recipe = base.replace(**_laid_over(base, changes))
        lr_from = source
    return Entry(recipe, "given" if "lr" in changes else lr_from)


def plan(source: str, optimizers: Iterable[str], lr: Mapping[str, float], **changes: Any) -> list[Entry]:
    """The entries of a comparison, checked.

    Args:
        source: as `resolve` takes it.
        optimizers: names that `optim.build` knows, in the order they are to be trained in.
        lr: learning rates of some of them; the others take the recipe's.
        changes: fields to set otherwise for all of them.
    """
    optimizers = list(optimizers)
    for name in optimizers:
        optim.named(name)
        if optimizers.count(name) > 1:
            raise InputError(f"optimizers: {name!r} is named {optimizers.count(name)} times; name each once")
    if not optimizers:
        raise InputError("optimizers: got none, expected at least one name such as 'MERIT'")
    for name in lr:
        if name not in optimizers:
            raise InputError(f"lr: got a rate for {name!r}, which is not compared; expected {', '.join(optimizers)}")
    return [
        resolve(source, **changes, optimizer=name, **({"lr": lr[name]} if name in lr else {})) for name in optimizers
    ]


def run(
    entries: Iterable[Entry],
    folder: str | os.PathLike,
    corpus: text.Corpus | None = None,
    keep_weights: bool = False,
    checkpoint: str | os.PathLike | None = None,
    **checkpoints: Any,
) -> Iterator[tuple[Entry, StepRecord]]:
    """Train and record one entry after the other. Each file is replaced when its new run is complete.

    Args:
        entries: what `plan` returned.
        folder: where the runs go.
        corpus: the recipes' text, if it is loaded already.
        keep_weights: as `runs.record_to` takes it.
        checkpoint: a folder for checkpoints, in which each optimizer has one of its own. Runs that are complete there
            are not trained again, and one that was broken off goes on.
        checkpoints: `checkpoint_every` and `keep`, as `train` takes them.
    """
    for entry in entries:
        corpus = corpus or text.load(entry.recipe.text, block_size=entry.recipe.block_size)
        if checkpoint is not None:
            checkpoints["checkpoint"] = Path(checkpoint) / file_name(entry.optimizer)
        training = train(entry.recipe, corpus, **checkpoints)
        for record in runs.record_to(entry.path(folder), training, keep_weights):
            yield entry, record


def read(entries: Iterable[Entry], folder: str | os.PathLike) -> list[runs.Run]:
    """The recorded runs of these entries, in their order."""
    return [runs.read(entry.path(folder)) for entry in entries]


def provenance(entries: list[Entry]) -> str:
    """One line: what a comparison rests on, for whoever reads its numbers."""
    sources: dict[str, list[str]] = {}
    for entry in entries:
        sources.setdefault(entry.lr_from, []).append(entry.optimizer)
    rates = "; ".join(f"{lr_from} ({', '.join(names)})" for lr_from, names in sources.items())
    seed = entries[0].recipe.seed
    return f"One run each, one seed ({seed}): small differences may be chance. Learning rates: {rates}."


def kept(entries: Iterable[Entry], folder: str | os.PathLike, steps: Mapping[str, int]) -> list[str]:
    """What is left of a comparison that was broken off, a line an entry.

    Args:
        steps: optimizer -> steps it took.
    """
    lines = []
    for entry in entries:
        path, taken = entry.path(folder), steps.get(entry.optimizer, 0)
        partial = path.with_name(path.name + ".partial")
        if not taken:
            lines.append(f"{entry.optimizer}: not trained")
        elif partial.exists():
            lines.append(f"{entry.optimizer}: {taken} of {entry.recipe.n_steps} steps, kept in {partial}")
        else:
            lines.append(f"{entry.optimizer}: complete, in {path}")
    return lines


def check_writable(path: str | os.PathLike) -> None:
    """InputError unless a file can be written here. The folders above are made."""
    path = Path(path)
    check_folder(path.parent, "out")
    if path.is_dir():
        raise InputError(f"out: got {path}, which is a folder; expected the name of a file")


def file_name(optimizer: str) -> str:
    """An optimizer's name as a file's: "+ bound" -> "plus-bound"."""
    return re.sub(r"[^A-Za-z0-9]+", "-", optimizer.replace("+", "plus")).strip("-")


def _laid_over(base: Recipe, changes: dict[str, Any]) -> dict[str, Any]:
    changes = dict(changes)
    if isinstance(changes.get("optimizer_args"), dict):
        changes["optimizer_args"] = base.optimizer_args | changes["optimizer_args"]
    if isinstance(changes.get("model"), dict):
        old = base.model if isinstance(base.model, dict) else {"named": base.model}
        if not {"named", "block_size"} & changes["model"].keys():
            changes.setdefault("block_size", base.block_size)
        changes["model"] = old | changes["model"]
    return changes
