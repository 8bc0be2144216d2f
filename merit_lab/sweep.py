"""Many runs from one file: optimizer × learning rate × batch size × seed, and any other field of a recipe.

    python -m merit_lab sweep data/sweeps/batch.toml

A sweep file, in TOML:

    purpose = "one sentence"
    recipe = "tiny"                 # optional: a named recipe to start from

    [fields]                        # fields of the recipe that are the same in every run
    tokens = 1_000_000

    [grid]                          # fields that vary: every combination is a cell ([[grid]] more than once: a union)
    optimizer = ["AdamW", "MERIT"]
    batch_size = [32, 128]
    "model.qk_norm" = [false, true] # one entry of a table

    [search]                        # every cell gets its own learning rate. Without [search]: `lr` in fields or grid,
                                    # or lr_from = "batch", the best rate of the sweep in batch.toml beside this file,
                                    # of its cell with the same optimizer, batch size and model size
    seed = 0
    widen = 4                       # at most so many rates are added while the best is at an edge
    refine = true                   # then one rate more on either side of the best, halfway on a log scale
    lr.AdamW = [1e-3, 2e-3, 4e-3]
    lr.default = [1e-2, 2e-2, 4e-2] # for any other optimizer

    [report]                        # then the cell's best rate is run with other seeds, and these are reported
    seeds = [1, 2, 3]
    measure = ["curvature"]         # optional: what else to measure at the end of these runs

Each run is a process of its own and leaves one file when it is complete, named after its recipe; what is there is not
run again, whichever sweep asked for it. So a sweep that was killed goes on where it was, and two sweeps share what
they have in common. Which runs are needed follows from the file and the results alone.
"""

import hashlib
import itertools
import json
import math
import multiprocessing
import os
import re
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

from . import files
from .errors import InputError, shown
from .recipe import LARGEST_COUNT, RECIPES, Recipe

MEASURES = ("curvature",)
MOST_CELLS = 10_000  # combinations of a sweep
MOST_WIDENED = 100  # rates that a search may be widened by
RATES = (1e-30, 1e30)  # of a search: the rates between and beyond them are numbers too
END_SEQUENCES = 256  # a run's training loss at its end is taken over so many sequences of the training text
CURVATURE_SEQUENCES = 32
BOUND_SEQUENCES = 8

COLUMNS = {  # of a sweep's table, one row a run
    "run": "the run's name: the same recipe has the same name",
    "stage": "`search` (for a learning rate) or `report` (the seeds that results are stated over)",
    "cell": "the values of the grid that this run belongs to",
    "optimizer": "as `python -m merit_lab optimizers` lists them",
    "lr": "peak learning rate",
    "batch_size": "sequences a step",
    "seed": "of the first weights and the order of the data",
    "steps": "optimizer steps of the whole run",
    "tokens": "token budget",
    "parameters": "weights of the model",
    "diverged": "whether the loss stopped being finite",
    "val_loss": "nats a token at the end, on held-out text; null if it diverged",
    "train_loss": f"nats a token at the end, on {END_SEQUENCES} sequences of the training text; null if it diverged",
    "peak_logit": "largest absolute attention logit of all layers, heads and probed steps",
    "peak_logit_layers": "the same, a layer",
    "final_logit_layers": "largest absolute attention logit at the end, a layer",
    "entropy_min": "lowest mean attention entropy of a head at the end, nats",
    "clipped_layers": "largest share of elements cut to 1 at a probed step, a layer's matrices; null for AdamW",
    "norm_gap": "(‖w‖₂ - ‖w‖_m) / ‖w‖₂ at the end, mean over W_Q and W_K of all layers",
    "largest_weight": "largest |w| at the end in W_Q and W_K of all layers",
    "row_similarity": "share of the variance of |w| between rows beyond chance, mean over W_Q and W_K; 0 if shuffled",
    "column_similarity": "the same between columns",
    "head_similarity": "the same between whole heads",
    "bound_over_logit": "√d·‖W_Q‖_m·‖W_K‖_m·C_X² over the true max attention logit at the end, smallest layer",
    "top_eigenvalue": "largest eigenvalue of the Hessian of the loss at the end, if measured",
    "trace": "its trace, if measured",
    "trace_error": "standard error of that estimate",
    "noise_scale": "gradient noise scale over the run, sequences, if measured",
    "seconds": "of the run, measuring included",
    "recipe": "the whole recipe",
    "versions": "of merit_lab, torch and Python",
    "machine": "its kind",
    "text": "name and sha256 of the tokens",
    "date": "UTC",
}
AT_THE_END = (  # columns that only a run which did not diverge has
    "norm_gap", "largest_weight", "row_similarity", "column_similarity", "head_similarity", "bound_over_logit",
)  # fmt: skip
CURVE_COLUMNS = {  # of its curves, one row a probed step of a reported run
    "run": "as in the table",
    "step": "from 1",
    "tokens": "seen so far",
    "train_loss": "nats a token on this step's batch",
    "val_loss": "nats a token on held-out text, at the steps where it was taken",
    "logit_layers": "largest absolute attention logit, a layer",
    "entropy_min": "lowest mean attention entropy of a head, nats",
    "clipped_layers": "share of elements whose step was cut to 1, a layer's matrices; null for AdamW",
    "bound_layers": "share of elements whose ratio is the weight-wise bound, a layer's matrices; null for AdamW",
    "noise_gradient_sq": "|G|² of the gradient noise scale, if measured",
    "noise_trace": "tr Σ of the gradient noise scale, if measured",
}


# -- the file ------------------------------------------------------------------------------------------------------


class Run(NamedTuple):
    """One run that a sweep asks for."""

    recipe: Recipe
    measures: tuple[str, ...]
    stage: str  # "search" or "report"
    cell: "Cell"

    @property
    def name(self) -> str:
        """Readable, and the same for the same recipe: optimizer, batch, rate, seed and a hash of everything."""
        return run_name(self.recipe, self.measures)


@dataclass(frozen=True)
class Cell:
    """One combination of the grid: its values, the rates to begin with, and the runs it needs."""

    values: dict[str, Any]
    base: dict[str, Any]  # the recipe's fields but lr and seed
    rates: tuple[float, ...]
    search: bool
    widen: int
    refine: bool
    search_seed: int
    seeds: tuple[int, ...]
    measures: tuple[str, ...]
    source: "Cell | None" = None  # whose best rate is taken

    def size(self, widened: bool) -> int:
        """How many runs this cell comes to, the search widened as far as it may be or not at all."""
        if self.source is not None:
            return len(self.seeds)
        if not self.search:
            return len(self.rates) * len(self.seeds)
        return len(self.rates) + 2 * self.refine + self.widen * widened + len(self.seeds)

    def recipe(self, lr: float, seed: int) -> Recipe:
        """The recipe of one run."""
        return Recipe.from_dict(self.base | {"lr": lr, "seed": seed})

    def run(self, stage: str, lr: float, seed: int) -> Run:
        """One run of this cell."""
        return Run(self.recipe(lr, seed), self.measures if stage == "report" else (), stage, self)

    def plan(self, done: Callable[[str], dict | None]) -> tuple[list[Run], bool]:
        """The runs this cell needs as far as the results tell, in order, and whether that is all of them.

        Args:
            done: run name -> its row, or None if it has not been run.
        """
        rates = self.rates
        if self.source is not None:
            runs, whole = self.source.plan(done)
            if not whole:
                return runs, False
            rates = sorted({run.recipe.lr for run in runs if run.stage == "report"})  # none may train
        if not self.search:
            return [self.run("report", lr, seed) for lr in rates for seed in self.seeds], True
        rates = sorted(self.rates)
        widened, refined = 0, not self.refine
        while True:
            runs = [self.run("search", lr, self.search_seed) for lr in rates]
            losses = [_loss(row) if (row := done(run.name)) else None for run in runs]
            if None in losses:
                return runs, False
            best = min(range(len(rates)), key=losses.__getitem__)  # the lowest, if every rate diverged
            inside = 0 < best < len(rates) - 1
            if not inside and widened < self.widen and not (self.refine and refined):
                widened += 1
                rates = [_beyond(rates), *rates] if best == 0 else [*rates, _beyond(rates[::-1])]
            elif not refined and math.isfinite(losses[best]):
                refined = True
                rates = sorted({*rates, *(_between(rates[best], rates[i]) for i in _beside(best, len(rates)))})
            else:
                break
        if not math.isfinite(losses[best]):
            return runs, True  # nothing to report: no rate trains
        return runs + [self.run("report", rates[best], seed) for seed in self.seeds], True


@dataclass(frozen=True)
class Sweep:
    """A sweep file, read and checked.

    Attributes:
        name: the file's name without its ending.
        purpose: why it is run.
        cells: its combinations, in the order of the file.
    """

    name: str
    purpose: str
    cells: list[Cell] = field(repr=False)

    @classmethod
    def read(cls, path: str | os.PathLike, _from: tuple[str, ...] = ()) -> "Sweep":
        """Read a sweep file. InputError, naming the place, for whatever is wrong with it."""
        # _from: the sweeps that asked for the rates of this one, lest they ask in a circle.
        path = Path(path)
        try:
            values = files.read_toml(path)
        except OSError as error:
            raise InputError(f"sweep: cannot read {path} ({error.strerror}); give a TOML file") from None
        except ValueError as error:  # also that of a number too long for Python, which tomllib lets through
            raise InputError(f"sweep: {path} is not TOML: {error}") from None
        try:
            source = values.pop("lr_from", None)
            if source is not None:
                is_name = isinstance(source, str) and re.fullmatch(r"[\w.+-]+", source)
                if not is_name or source in (path.stem, *_from):
                    raise InputError(f"lr_from: got {shown(source)}, expected the name of another sweep file here")
                source = cls.read(path.with_name(f"{source}.toml"), (path.stem, *_from))
            return cls.from_dict(path.stem, values, source)
        except InputError as error:
            raise InputError(f"sweep: {path.name}: {error}") from None

    @classmethod
    def from_dict(cls, name: str, values: dict[str, Any], source: "Sweep | None" = None) -> "Sweep":
        """The sweep of a file's values, with the rates that `source` found best if it is given."""
        _known(values, ("purpose", "recipe", "lr_from", "fields", "grid", "search", "report"), "the file")
        base = _table(values, "fields")
        named = values.get("recipe")
        preset = {}
        if named is not None:
            if not isinstance(named, str) or named not in RECIPES:
                raise InputError(f"recipe: got {shown(named)}, expected one of {', '.join(RECIPES)}")
            preset = RECIPES[named].fields
        grids = values.get("grid", {})
        grids = grids if isinstance(grids, list) else [grids]
        if not all(isinstance(grid, dict) for grid in grids):
            raise InputError(f"grid: got {shown(values['grid'])}, expected field = [values]")
        report = _table(values, "report")
        _known(report, ("seeds", "measure"), "report")
        search = _table(values, "search") if "search" in values else None
        for key in report:
            if not isinstance(report[key], list):
                raise InputError(f"report.{key}: got {shown(report[key])}, expected a list")
        if "seeds" in report and not report["seeds"]:
            raise InputError("report.seeds: got [], expected at least one whole number ≥ 0")
        measures = tuple(report.get("measure", ()))
        for measure in measures:
            if measure not in MEASURES:
                raise InputError(f"report.measure: got {shown(measure)}, expected one of {', '.join(MEASURES)}")
        cells = []
        combinations = sum(math.prod(len(v) for v in grid.values() if isinstance(v, list)) for grid in grids)
        if combinations > MOST_CELLS:
            raise InputError(f"grid: it has {combinations:,} combinations, expected at most {MOST_CELLS:,}")
        for grid in grids:
            for combination in _combinations(grid):
                cells.append(_cell(preset | base, combination, search, report, measures, source))
        _refuse_twice(cells)
        return cls(name, str(values.get("purpose", "")), cells)

    def plan(self, done: Callable[[str], dict | None]) -> tuple[list[Run], bool]:
        """The runs the sweep needs as far as the results tell, and whether that is all of them."""
        runs, whole = [], True
        for cell in self.cells:
            more, complete = cell.plan(done)
            runs += more
            whole &= complete
        return runs, whole

    def least(self) -> int:
        """How many runs it comes to if no search has to be widened."""
        return sum(cell.size(widened=False) for cell in self.cells)

    def most(self) -> int:
        """How many runs it can come to: every search widened as far as it may be."""
        return sum(cell.size(widened=True) for cell in self.cells)


def _cell(base, combination, search, report, measures, source) -> Cell:
    values = dict(base)
    for name, value in combination.items():
        table, dot, entry = name.partition(".")
        if dot:
            held = values.get(table, {})
            held = {"named": held} if table == "model" and isinstance(held, str) else held
            if not isinstance(held, dict):
                raise InputError(f"grid: {name}: {table} is {shown(held)} and has no entries")
            values[table] = held | {entry: value}
        else:
            values[table] = value
    optimizer = values.get("optimizer", "MERIT")
    if not isinstance(optimizer, str):
        raise InputError(f"optimizer: got {shown(optimizer)}, expected a name such as 'MERIT'")
    seeds = report.get("seeds", [values.pop("seed", 0)])
    if "seed" in combination:
        seeds = [combination["seed"]]
    values.pop("seed", None)
    lr = values.pop("lr", None)
    found = None
    if source is not None:
        if lr is not None or search is not None:
            raise InputError("lr_from: the rate stands in [search], fields or grid too; leave one out")
        found = _matching(source, values)
        rates = found.rates
    elif search is not None:
        _known(search, ("seed", "widen", "refine", "lr"), "search")
        if lr is not None:
            raise InputError("lr stands both in [search] and in fields or grid; leave one out")
        tables = search.get("lr")
        if not isinstance(tables, dict) or not all(isinstance(rates, list) for rates in tables.values()):
            raise InputError(f"search.lr: got {shown(tables)}, expected optimizer = [rates], and default = [rates]")
        rates = tables.get(optimizer, tables.get("default"))
        if rates is None:
            raise InputError(f"search.lr: no rates for {optimizer!r}, only for {', '.join(tables)}; add default = […]")
        usable = all(type(rate) in (int, float) and RATES[0] <= rate <= RATES[1] for rate in rates)
        if len(rates) < 3 or not usable or sorted(set(rates)) != rates:
            raise InputError(
                f"search.lr: got {shown(rates)} for {optimizer}, expected three rates or more, rising, "
                f"from {RATES[0]:g} to {RATES[1]:g}"
            )
        if not isinstance(search.get("refine", False), bool):
            raise InputError(f"search.refine: got {shown(search['refine'])}, expected true or false")
    else:
        if lr is None:
            raise InputError("no learning rate: give lr in fields or grid, a [search], or lr_from")
        rates = [lr]
    cell = Cell(
        values=dict(combination),
        base=values,
        rates=tuple(rates),
        search=search is not None,
        widen=(search or {}).get("widen", 0),
        refine=(search or {}).get("refine", False),
        search_seed=(search or {}).get("seed", 0),
        seeds=tuple(seeds),
        measures=measures,
        source=found,
    )
    for number in (cell.search_seed, cell.widen, *cell.seeds):
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 2**63:
            raise InputError(f"seed, seeds and widen: got {shown(number)}, expected whole numbers ≥ 0, below 2^63")
    if len(set(cell.seeds)) < len(cell.seeds):
        raise InputError(f"report.seeds: got {shown(seeds)}, where a seed comes twice; give each once")
    if cell.widen > MOST_WIDENED:
        raise InputError(f"search.widen: got {cell.widen}, expected at most {MOST_WIDENED}")
    for rate in cell.rates:
        cell.recipe(rate, 0)  # checks every field
    return cell


def _matching(source: Sweep, values: dict[str, Any]) -> Cell:
    """The cell of another sweep with the same optimizer, batch size and size of model."""
    kind = _kind_of(values)
    found = [cell for cell in source.cells if _kind_of(cell.base) == kind]
    if len(found) != 1:
        raise InputError(f"lr_from: {source.name} has {len(found)} cells for {kind}, expected one")
    return found[0]


def _kind_of(values: dict[str, Any]) -> tuple:
    model = values.get("model", "nano")
    return values.get("optimizer", "MERIT"), values.get("batch_size", 64), (
        model.get("named") if isinstance(model, dict) else model
    )


def _combinations(grid: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for name, values in grid.items():
        if not isinstance(values, list) or not values:
            raise InputError(f"grid: {name}: got {shown(values)}, expected a list of values")
    for chosen in itertools.product(*grid.values()):
        yield dict(zip(grid, chosen, strict=True))


def _refuse_twice(cells):
    if not cells:
        raise InputError("grid: it is empty; give at least one field = [values]")
    seen = {}
    for cell in cells:
        for lr in cell.rates:
            key = (run_name(cell.recipe(lr, 0)), cell.seeds)
            if key in seen:
                raise InputError(f"grid: {shown(cell.values)} and {shown(seen[key])} ask for the same runs")
            seen[key] = cell.values


def _table(values, name):
    table = values.get(name, {})
    if not isinstance(table, dict):
        raise InputError(f"{name}: got {shown(table)}, expected a table [{name}]")
    return dict(table)


def _known(values, known, where):
    for name in values:
        if name not in known:
            raise InputError(f"{where}: got an unknown key {shown(name)}, expected {', '.join(known)}")


def _beyond(rates: list[float]) -> float:
    """The rate before the first one, on the grid's own spacing, to three digits."""
    return float(f"{rates[0] * rates[0] / rates[1]:.3g}")


def _between(a: float, b: float) -> float:
    """The rate halfway between two on a log scale, to three digits."""
    return float(f"{math.sqrt(a * b):.3g}")


def _beside(place: int, length: int) -> list[int]:
    return [i for i in (place - 1, place + 1) if 0 <= i < length]


def _loss(row: dict) -> float:
    return math.inf if row["val_loss"] is None else row["val_loss"]


def run_name(recipe: Recipe, measures: tuple[str, ...] = ()) -> str:
    """The name of a run: readable, with a hash of its recipe and of what is measured at its end.

    Fields at their default do not enter, so that a field that is added to recipes later changes no name.
    """
    defaults = {f.name: f.default for f in fields(Recipe)}
    values = {k: v for k, v in recipe.to_dict().items() if k not in defaults or v != defaults[k]}
    written = json.dumps([values, list(measures)], sort_keys=True)
    digest = hashlib.sha256(written.encode()).hexdigest()[:10]
    optimizer = re.sub(r"[^A-Za-z0-9]+", "-", recipe.optimizer).strip("-")
    return f"{optimizer}-b{recipe.batch_size}-lr{recipe.lr:g}-s{recipe.seed}-{digest}"


# -- one run -------------------------------------------------------------------------------------------------------


def measure(recipe: Recipe, measures: tuple[str, ...], watch: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Train a recipe and return {"row": …, "curve": […]}: plain values, as COLUMNS and CURVE_COLUMNS describe them.

    Args:
        watch: called after every step; may raise to end the run.
    """
    from . import probes, runs
    from .training import train

    training = train(recipe)
    header = runs.header_of(training)
    sizes = {name: p.numel() for name, p in training.model.named_parameters()}
    n_layer = training.model.config.n_layer
    records, curve = [], []
    for record in training:
        watch()
        records.append(record)
        if record.max_attention_logit is not None or record.noise_scale is not None:
            curve.append(_point(record, n_layer, sizes))
    run = runs.Run(header, records)
    probed = [point for point in curve if point["logit_layers"]]
    clipped = [point["clipped_layers"] for point in probed if point["clipped_layers"]]
    row = {
        "optimizer": recipe.optimizer,
        "lr": recipe.lr,
        "batch_size": recipe.batch_size,
        "seed": recipe.seed,
        "steps": recipe.n_steps,
        "tokens": recipe.tokens,
        "parameters": header["parameters"],
        "diverged": run.diverged,
        "val_loss": None if run.diverged else _digits(run.final_val_loss),
        "train_loss": None,
        "peak_logit": _digits(max(max(point["logit_layers"]) for point in probed)) if probed else None,
        "peak_logit_layers": _columnwise_max([point["logit_layers"] for point in probed]),
        "final_logit_layers": probed[-1]["logit_layers"] if probed else None,
        "entropy_min": probed[-1]["entropy_min"] if probed else None,
        "clipped_layers": _columnwise_max(clipped),
        **dict.fromkeys(AT_THE_END),
        "top_eigenvalue": None,
        "trace": None,
        "trace_error": None,
        "noise_scale": _digits(probes.average_noise_scale(records)),
        "seconds": round(records[-1].seconds, 1),
        "recipe": header["recipe"],
        "versions": header["versions"],
        "machine": header["machine"],
        "text": header["text"],
        "date": header["date"],
    }
    if not run.diverged:
        row["train_loss"] = _digits(training.train_loss(END_SEQUENCES))
        row |= _weights(training)
        if "curvature" in measures:
            held_out = training.held_out(CURVATURE_SEQUENCES)
            found = probes.model_curvature(training.model, *held_out)
            row["top_eigenvalue"] = _digits(found.top)
            row["trace"], row["trace_error"] = _digits(found.trace), _digits(found.trace_error)
    return {"row": row, "curve": curve}


def _weights(training) -> dict[str, float | None]:
    """What the final W_Q and W_K look like."""
    from . import probes

    def mean(values):
        return _digits(sum(values) / len(values))

    n_head = training.model.config.n_head
    weights = [w for layer in probes.query_key_weights(training.model) for w in (layer.query, layer.key)]
    bound = probes.logit_bound(training.model, training.held_out(BOUND_SEQUENCES)[0])
    return {
        "norm_gap": mean([probes.norm_gap(w).item() for w in weights]),
        "largest_weight": _digits(max(w.abs().max().item() for w in weights)),
        "row_similarity": mean([probes.similarity(w) for w in weights]),
        "column_similarity": mean([probes.similarity(w.T) for w in weights]),
        "head_similarity": mean([probes.similarity(w.reshape(n_head, -1)) for w in weights]),
        "bound_over_logit": _digits((bound.bound / bound.max_logit.amax(dim=1)).min().item()),
    }


def _point(record, n_layer, sizes) -> dict[str, Any]:
    logits, noise = record.max_attention_logit, record.noise_scale or {}
    ratios = {n: r for n, r in (record.ratios or {}).items() if n.endswith("weight") and ".norm" not in n}
    return {
        "step": record.step,
        "tokens": record.tokens,
        "train_loss": _digits(record.train_loss),
        "val_loss": _digits(record.val_loss),
        "logit_layers": [_digits(max(layer)) for layer in logits] if logits else None,
        "entropy_min": _digits(min(map(min, record.attention_entropy))) if record.attention_entropy else None,
        "clipped_layers": _layers(ratios, "clipped", n_layer, sizes),
        "bound_layers": _layers(ratios, "won_bound", n_layer, sizes),
        "noise_gradient_sq": _digits(noise.get("gradient_sq")),
        "noise_trace": _digits(noise.get("trace")),
    }


def _layers(ratios: dict[str, dict], share: str, n_layer: int, sizes: dict[str, int]) -> list[float] | None:
    """A share over the elements of each layer's matrices."""
    if not ratios:
        return None
    means = []
    for layer in range(n_layer):
        inside = [(sizes[name], r[share]) for name, r in ratios.items() if name.startswith(f"blocks.{layer}.")]
        means.append(_digits(sum(n * value for n, value in inside) / sum(n for n, _ in inside), 3))
    return means


def _columnwise_max(table: list[list[float]]) -> list[float] | None:
    return [max(column) for column in zip(*table, strict=True)] if table else None


def _digits(value: float | None, digits: int = 5) -> float | None:
    """Rounded to so many significant digits; None stays None, and what is not finite becomes it (JSON has no inf)."""
    return float(f"{value:.{digits}g}") if value is not None and math.isfinite(value) else None


# -- the results ---------------------------------------------------------------------------------------------------


class Pool:
    """A folder of finished runs, one file each. What is in it is never run again.

    A file that cannot be read counts as a run that is missing: a warning says so, and what `keep` would write over is
    set aside.

    Args:
        folder: it is made if it is missing.
    """

    def __init__(self, folder: str | os.PathLike):
        self.folder = Path(folder)
        self._rows: dict[str, dict] = {}
        self._damaged: set[str] = set()

    def path(self, name: str) -> Path:
        """Where the run of this name is, or will be."""
        return self.folder / f"{name}.json"

    def failed(self, name: str) -> Path:
        """Where it is said why the run of this name failed."""
        return self.folder / f"{name}.failed.txt"

    def damaged(self, name: str) -> Path:
        """Where a file of this run that could not be read is set aside."""
        free = (self.folder / f"{name}.damaged{number}" for number in itertools.count(1))
        return next(path for path in free if not os.path.lexists(path))

    def row(self, name: str) -> dict | None:
        """The row of a finished run, else None."""
        if name not in self._rows and name not in self._damaged and os.path.lexists(self.path(name)):
            try:
                self._rows[name] = self.read(name)["row"]
            except InputError as error:
                self._damaged.add(name)
                warnings.warn(f"{error}; the run counts as missing", stacklevel=2)
        return self._rows.get(name)

    def read(self, name: str) -> dict[str, Any]:
        """A finished run: {"row": …, "curve": […]}. InputError where its file is damaged."""
        path = self.path(name)
        try:
            found = files.from_json(files.read_bytes(path))
            _check_result(found, name)
            return {"row": found["row"], "curve": found["curve"]}
        except (OSError, ValueError) as error:
            raise InputError(f"sweep: {path} cannot be read as a finished run ({error})") from None

    def keep(self, name: str, result: dict[str, Any]) -> None:
        """Write a finished run, whole; ValueError for a result that `read` would refuse.

        A damaged file in its place is set aside as NAME.damaged1, 2, …
        """
        _check_result(result, name)  # else it would count as missing, and be made again for ever
        if name in self._damaged:
            os.replace(self.path(name), self.damaged(name))
            self._damaged.remove(name)
        files.write_whole(self.path(name), json.dumps(result, ensure_ascii=False, separators=(",", ":")) + "\n")
        self.failed(name).unlink(missing_ok=True)

    def seconds(self) -> dict[tuple, float]:
        """Seconds a token of the finished runs, by model, batch size and optimizer."""
        spent = {}
        for path in sorted(self.folder.glob("*.json")):
            row = self.row(path.stem)
            if row is None:
                continue
            spent[_kind(Recipe.from_dict(row["recipe"]))] = row["seconds"] / row["tokens"]
        return spent


def _check_result(result: Any, name: str) -> None:
    """ValueError unless a sweep can go on from this result: from its recipe, its loss and how long it took."""
    if not isinstance(result, dict) or not {"row", "curve"} <= result.keys():
        raise ValueError("it has no row and curve")
    if not isinstance(result["curve"], list) or not all(isinstance(point, dict) for point in result["curve"]):
        raise ValueError("its curve is no list of points")
    row = result["row"]
    if not isinstance(row, dict):
        raise ValueError(f"its row is {shown(row)}, expected a table")
    for column, least in (("seconds", 0), ("tokens", 1)):
        value = row.get(column)
        if type(value) not in (int, float) or not least <= value <= LARGEST_COUNT:
            raise ValueError(f"{column} is {shown(value)}, expected a number ≥ {least}")
    loss = row.get("val_loss", "missing")
    if loss is not None and (type(loss) not in (int, float) or not 0 <= loss <= LARGEST_COUNT):
        raise ValueError(f"val_loss is {shown(loss)}, expected a number ≥ 0, or null for a run that diverged")
    recipe = Recipe.from_dict(row.get("recipe"))
    if name not in (run_name(recipe), run_name(recipe, MEASURES)):
        raise ValueError("its recipe is that of another run")


def write_tables(sweep: Sweep, pool: Pool, folder: Path) -> tuple[Path, Path]:
    """Write the sweep's table and its curves as far as its runs are done: NAME.jsonl and NAME.curves.jsonl."""
    planned, _ = sweep.plan(pool.row)
    rows, curves = [], []
    for run in planned:
        row = pool.row(run.name)
        if row is None or run.cell not in sweep.cells:  # the second: runs of the sweep that rates are taken from
            continue
        rows.append({"run": run.name, "stage": run.stage, "cell": run.cell.values} | row)
        if run.stage == "report":
            curves += [{"run": run.name} | point for point in pool.read(run.name)["curve"]]
    paths = folder / f"{sweep.name}.jsonl", folder / f"{sweep.name}.curves.jsonl"
    for path, lines in zip(paths, (rows, curves), strict=True):
        written = [json.dumps(line, ensure_ascii=False, separators=(",", ":")) for line in lines]
        files.write_whole(path, "".join(f"{line}\n" for line in written))
    return paths


def read_rows(path: str | os.PathLike) -> list[dict[str, Any]]:
    """The rows of a table or of its curves. InputError for a file that is not lines of JSON tables."""
    rows = []
    try:
        content = files.read_bytes(path)
        for line in content.removesuffix(b"\n").split(b"\n") if content else ():
            row = files.from_json(line)
            if not isinstance(row, dict):
                raise ValueError(f"it is {shown(row)}, not a table")
            rows.append(row)
    except (OSError, ValueError) as error:
        raise _no_table(path, len(rows) + 1 if isinstance(error, ValueError) else None, error) from None
    return rows


def _no_table(path, line: int | None, why) -> InputError:
    at = f"line {line}: " if line else ""
    return InputError(f"sweep: {path} cannot be read as a sweep's table ({at}{why}); make it with `sweep`")


def read_runs(path: str | os.PathLike, stage: str | None = "report") -> list:
    """The runs of a table as merit_lab.runs.Run: every figure and widget that shows a recorded run shows them.

    Args:
        path: NAME.jsonl; NAME.curves.jsonl beside it gives reported runs their curves. A run of the search has its
            last record alone.
        stage: "report", "search", or None for both.

    Each run's row is in its header["row"].
    """
    path = Path(path)
    points: dict[str, list[dict]] = {}
    for point in read_rows(path.with_name(f"{path.name.removesuffix('.jsonl')}.curves.jsonl")):
        points.setdefault(str(point.get("run")), []).append(point)
    found = []
    for number, row in enumerate(read_rows(path), 1):
        try:
            if stage in (None, row["stage"]):
                found.append(_run_of(row, points, path))
        except KeyError as error:
            raise _no_table(path, number, f"column {error} is missing in it or in its curve") from None
        except (ValueError, TypeError) as error:
            raise _no_table(path, number, error) from None
    return found


def _run_of(row: dict[str, Any], points: dict[str, list[dict]], path: Path):
    """The run of a row, for `read_runs`."""
    from .runs import Run as RecordedRun
    from .training import StepRecord

    if not isinstance(row["run"], str):
        raise ValueError(f"run is {shown(row['run'])}, expected a name")
    last = {"step": row["steps"], "tokens": row["tokens"], "train_loss": row["train_loss"] or math.inf,
            "val_loss": row["val_loss"], "logit_layers": row["peak_logit_layers"]}  # fmt: skip
    records = []
    for point in (points.get(row["run"]) if row["stage"] == "report" else None) or [last]:
        layers = point["logit_layers"]
        records.append(StepRecord.from_dict({
            "step": point["step"], "tokens": point["tokens"], "lr": math.nan, "grad_norm": math.nan,
            "seconds": math.nan, "train_loss": math.nan if point["train_loss"] is None else point["train_loss"],
            "val_loss": point["val_loss"], "max_attention_logit": [[z] for z in layers] if layers else None,
        }))  # fmt: skip
    records[-1] = StepRecord.from_dict(records[-1].to_dict() | {"diverged": row["diverged"]})
    header = {"recipe": row["recipe"], "parameters": row["parameters"], "row": row}
    return RecordedRun(header, records, path.with_name(row["run"]))


def _kind(recipe: Recipe) -> tuple:
    return json.dumps(recipe.model, sort_keys=True), recipe.batch_size, recipe.optimizer


# -- doing it ------------------------------------------------------------------------------------------------------


class Progress(NamedTuple):
    """Where a sweep stands."""

    done: int
    known: int  # runs that are needed as far as is known: a search may be widened yet
    finished: Run | None  # the run that has just ended
    error: str | None  # why it failed, if it did
    seconds_left: float | None


def work(sweep: Sweep, pool: Pool, engine: "Engine") -> Iterator[Progress]:
    """Do the runs that are missing, and say after each where the sweep stands. A run that fails is left out.

    Runs that come to be needed by what others found are added as they do. Leaving the loop stops the runs under way.
    """
    from filelock import FileLock, Timeout

    pool.folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(pool.folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise InputError(f"sweep: another one is at work in {pool.folder}; wait or give another --out") from None
    failed: set[str] = set()
    started, ran = time.monotonic(), 0
    try:
        with engine:
            running: dict[str, Run] = {}
            finished = error = None
            while True:
                planned, _ = sweep.plan(pool.row)
                names = {run.name for run in planned}
                missing = {
                    run.name: run for run in planned if run.name not in failed and pool.row(run.name) is None
                }
                left = None
                if ran:  # as fast as until now
                    left = (time.monotonic() - started) / ran * len(missing)
                yield Progress(len(names) - len(missing) - len(failed), len(names), finished, error, left)
                for name, run in missing.items():
                    if name not in running and len(running) < engine.workers:
                        engine.start(name, run)
                        running[name] = run
                if not running:
                    return
                name, result = engine.next()
                finished, error = running.pop(name), None
                ran += 1
                if isinstance(result, dict):
                    try:
                        pool.keep(name, result)
                    except ValueError as why:
                        result = f"the run came back damaged: {why}"
                if not isinstance(result, dict):
                    error = result
                    failed.add(name)
                    files.write_whole(pool.failed(name), error + "\n")
    finally:
        lock.release()


class Engine:
    """What runs are done on. `with engine:` stops whatever is under way at the end."""

    workers: int

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    def start(self, name: str, run: Run) -> None:
        """Begin a run."""
        raise NotImplementedError

    def next(self) -> tuple[str, dict | str]:
        """Wait for a run to end: its name, and its result or the reason why there is none."""
        raise NotImplementedError

    def stop(self) -> None:
        """End the runs under way."""
        raise NotImplementedError


class Processes(Engine):
    """Runs on this machine, each in a process of its own: one that crashes costs one run.

    Args:
        workers: runs at a time.
        threads: torch threads of each; None: the cores, shared among the workers.
    """

    def __init__(self, workers: int = 1, threads: int | None = None):
        self.workers = workers
        self.threads = threads or max(1, (os.cpu_count() or 1) // workers)
        methods = multiprocessing.get_all_start_methods()
        # A server that has torch loaded already hands out processes in milliseconds.
        self._context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
        if "forkserver" in methods:
            # torch._dynamo: the first optimizer that is made loads it, which takes as long as torch itself.
            preload = ["merit_lab.sweep", "merit_lab.training", "merit_lab.runs", "torch._dynamo"]
            self._context.set_forkserver_preload(preload)
        self._running: dict[str, tuple] = {}

    def start(self, name, run):
        receive, send = self._context.Pipe(duplex=False)
        arguments = (send, run.recipe.to_dict(), run.measures, self.threads)
        process = self._context.Process(target=_in_process, args=arguments, name=name, daemon=True)
        process.start()
        send.close()  # so that the end of the process is the end of the pipe
        self._running[name] = process, receive

    def next(self):
        pipes = {receive: name for name, (_, receive) in self._running.items()}
        name = pipes[wait(list(pipes))[0]]
        process, receive = self._running.pop(name)
        try:
            result = receive.recv()
        except (EOFError, OSError):
            result = None
        receive.close()
        process.join()
        if result is None:
            result = f"the process ended with exit code {process.exitcode} and no result" + (
                " (killed; out of memory?)" if process.exitcode == -9 else ""
            )
        return name, result

    def stop(self):
        for process, receive in self._running.values():
            process.kill()
            process.join()
            receive.close()
        self._running.clear()


def _in_process(send, recipe: dict, measures: tuple[str, ...], threads: int) -> None:
    """What a worker process does: one run."""
    import torch

    torch.set_num_threads(threads)
    parent = multiprocessing.parent_process()

    def watch():
        if not parent.is_alive():  # the sweep was killed: nobody waits for this run
            os._exit(1)

    send.send(_result(recipe, measures, watch))
    send.close()


def _result(recipe: dict, measures: tuple[str, ...], watch=lambda: None) -> dict | str:
    try:
        return measure(Recipe.from_dict(recipe), measures, watch)
    except InputError as error:
        return str(error)
    except Exception:
        return traceback.format_exc()


class Ray(Engine):
    """Runs on the machines of a Ray cluster, which must have merit_lab installed and its texts prepared.

    Args:
        address: the cluster's; "auto": the one this machine belongs to; None: a cluster of this machine alone.
        workers: runs at a time; None: as many as the cluster has CPUs (or GPUs, with gpus).
        gpus: GPUs a run needs; a fraction shares one.
    """

    def __init__(self, address: str | None = "auto", workers: int | None = None, gpus: float = 0):
        try:
            import ray
        except ModuleNotFoundError:
            raise InputError("engine: ray is not installed; pip install 'ray>=2.9', or take --engine local") from None
        self._ray = ray
        try:
            ray.init(address=address, log_to_driver=False, include_dashboard=False)
        except ConnectionError as error:
            raise InputError(f"engine: no Ray cluster at {address!r} ({error}); start one with `ray start`") from None
        there = ray.cluster_resources()
        self.workers = workers or max(1, int(there.get("GPU", 0) / gpus if gpus else there.get("CPU", 1)))
        self._remote = ray.remote(num_gpus=gpus, max_retries=2)(_result)
        self._running: dict[Any, str] = {}

    def start(self, name, run):
        self._running[self._remote.remote(run.recipe.to_dict(), run.measures)] = name

    def next(self):
        (ready,), _ = self._ray.wait(list(self._running), num_returns=1)
        name = self._running.pop(ready)
        try:
            return name, self._ray.get(ready)
        except self._ray.exceptions.RayError as error:
            return name, f"{type(error).__name__}: {error}"

    def stop(self):
        for task in self._running:
            self._ray.cancel(task, force=True)
        self._running.clear()
        self._ray.shutdown()


# -- how long ------------------------------------------------------------------------------------------------------


def estimate(sweep: Sweep, pool: Pool, workers: int) -> tuple[float, bool]:
    """Seconds that the runs still missing will take without widening, and whether finished runs told so.

    Runs of the same model, optimizer and batch tell best; without them a few steps of a run of each kind are timed.
    """
    planned, _ = sweep.plan(pool.row)
    names = {run.name for run in planned}
    # Reported runs are known only once the search is done: count them at the first rate.
    later = [run for cell in sweep.cells if cell.search for run in _reports(cell) if not _reported(cell, planned)]
    missing = [run for run in planned if pool.row(run.name) is None] + [r for r in later if r.name not in names]
    told = pool.seconds()
    measured = all(_kind(run.recipe) in told for run in missing)
    total = 0.0
    for run in missing:
        kind = _kind(run.recipe)
        if kind not in told:
            told[kind] = _time_a_token(run.recipe)
        total += told[kind] * run.recipe.tokens
    return total / workers, measured


def _reports(cell: Cell) -> list[Run]:
    return [cell.run("report", cell.rates[0], seed) for seed in cell.seeds]


def _reported(cell: Cell, planned: list[Run]) -> bool:
    return any(run.cell is cell and run.stage == "report" for run in planned)


def _time_a_token(recipe: Recipe, steps: int = 3) -> float:
    from .training import train

    # A run of few steps does the same work a step; its first step, which warms caches up, does not count.
    short = recipe.replace(model=recipe.model, block_size=recipe.block_size, tokens=steps * recipe.tokens_per_step,
                           eval_every=10**6, probe_every=10**6)
    seconds = [record.seconds for record in train(short)]
    return (seconds[-2] - seconds[0]) / (steps - 2) / recipe.tokens_per_step


@contextmanager
def one_thread_each(workers: int):
    """torch's threads as a worker will have them, for the time of the block."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
    try:
        yield
    finally:
        torch.set_num_threads(before)
