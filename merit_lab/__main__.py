"""The command line: python -m merit_lab. The other modules do the work; here it is asked for and shown.

torch takes seconds to load and is not needed for --help: what stands on it is imported inside the commands.
"""

import os
import re
import sys
import textwrap
import tomllib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

from . import __version__
from .errors import InputError, RankError

try:
    import typer
    from rich import box
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn
    from rich.table import Table
    from typer.core import TyperGroup
except ModuleNotFoundError as error:  # in an environment that is not set up, where no doctor can run either
    from .doctor import AGAIN

    sys.exit(f"error: {error.name} is not installed; {AGAIN}")

if TYPE_CHECKING:
    from .recipe import Recipe
    from .runs import Run
    from .training import StepRecord, Training

FAILED, WRONG_INPUT, STOPPED = 1, 2, 130  # exit codes
RANK = int(os.environ.get("RANK", 0)) if "MASTER_ADDR" in os.environ else 0  # among torchrun's processes
FIGURE_PACKAGES = ("matplotlib", "seaborn", "pandas", "PIL")


def examples(*commands: str) -> str:
    """The end of a command's help."""
    return "\n\n".join(["Examples:", *(f"- `python -m merit_lab {command}`" for command in commands)])


class Commands(TyperGroup):
    """Turns what a person can mend into one line on stderr, and Ctrl-C into exit code 130."""

    def invoke(self, ctx):
        """Run the command that was asked for."""
        with warnings.catch_warnings():
            if RANK:
                warnings.simplefilter("ignore")  # rank 0 says it
            warnings.showwarning = lambda message, *_, **__: say(f"note: {message}")
            try:
                return super().invoke(ctx)
            except InputError as error:
                say(f"error: {error}")
                raise typer.Exit(WRONG_INPUT) from None
            except RankError as error:
                say(f"error: {error}")
                raise typer.Exit(FAILED) from None
            except KeyboardInterrupt:
                stop("stopped")
            except BrokenPipeError:
                raise  # whoever read our output has left, as `| head` does
            except OSError as error:
                say(f"error: {error}")
                raise typer.Exit(FAILED) from None
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                say(f"error: out of memory ({error})")
                say("Lower --micro-batch-size or --batch-size, or take a smaller --model.")
                raise typer.Exit(FAILED) from None


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="markdown",
    epilog=examples(
        "compare",
        "train --recipe tiny --optimizer LAMB --out results/lamb.jsonl",
        "COMMAND --help",
    ),
)


def _print_version(wanted: bool):
    if wanted:
        typer.echo(f"merit_lab {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
):
    """AdamW, LAMB and MERIT step by step: what a large batch does to a GPT-2."""


def whole(value: str) -> int:
    """A whole number. Which ones a field allows is for the recipe to say."""
    try:
        return int(value)
    except ValueError:
        raise typer.BadParameter(f"got {value!r}, expected a whole number") from None


def number(value: str) -> float:
    """A number."""
    try:
        return float(value)
    except ValueError:
        raise typer.BadParameter(f"got {value!r}, expected a number") from None


def count(value: str) -> int:
    """A whole number from 0."""
    if whole(value) < 0:
        raise typer.BadParameter(f"got {value!r}, expected a whole number ≥ 0")
    return whole(value)


# -- options that several commands share ---------------------------------------------------------------------

RecipeOption = Annotated[
    str,
    typer.Option(metavar="NAME|FILE.toml", help="A named recipe (see `recipes`) or a TOML file of its fields."),
]
Model = Annotated[
    str | None, typer.Option(metavar="SIZE", help="nano, micro, mini, base, gpt2, gpt2-medium or gpt2-large.")
]
Text = Annotated[
    str | None,
    typer.Option(metavar="SPEC", help="What to train on: shakespeare, file:PATH, … (see `text --help`)."),
]
BatchSize = Annotated[int | None, typer.Option(parser=whole, metavar="N", help="Sequences in a batch.")]
MicroBatchSize = Annotated[
    int | None, typer.Option(parser=whole, metavar="N", help="Sequences in a forward pass: fewer need less memory.")
]
Tokens = Annotated[
    int | None, typer.Option(parser=whole, metavar="N", help="Tokens to train on; the number of steps follows.")
]
Seed = Annotated[
    int | None, typer.Option(parser=whole, metavar="N", help="Decides the first weights and the order of the text.")
]
Device = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="auto (CUDA if there is one, else the CPU), cpu, cuda or mps."),
]
Precision = Annotated[
    str | None, typer.Option(metavar="NAME", help="auto (bf16 on CUDA that has it, else fp32), fp32 or bf16.")
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        help="Any other field of the recipe, as often as needed; the value as TOML writes it, or none. "
        "optimizer_args.NAME=VALUE and model.NAME=VALUE set one entry.",
    ),
]
Checkpoint = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Keep checkpoints here, and go on from the newest one that is there."),
]
CheckpointEvery = Annotated[
    int | None, typer.Option(parser=whole, metavar="N", help="Steps between checkpoints; else ten in a run.")
]
Keep = Annotated[int | None, typer.Option(parser=whole, metavar="K", help="How many checkpoints are kept; else 2.")]
Parallel = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Under torchrun: ddp (each rank holds the whole model, the default) or fsdp (each holds a share of it).",
    ),
]
KeepWeights = Annotated[
    bool, typer.Option("--keep-weights", help="Keep the last query and key weights beside the run, as .npz.")
]


# -- commands ------------------------------------------------------------------------------------------------


@app.command(
    epilog=examples(
        "compare",
        "compare --lr MERIT=0.02 --lr LAMB=0.03 --seed 1 --out results/seed1",
        'compare --optimizers "LAMB,maxLAMB,+ element-wise,+ bound,MERIT"',
    )
)
def compare(
    recipe: RecipeOption = "compare",
    optimizers: Annotated[
        str,
        typer.Option(metavar="NAME,NAME,…", help="What to compare, of the names that `optimizers` lists."),
    ] = "AdamW,LAMB,MERIT",
    lr: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=RATE", help="An optimizer's peak learning rate; else the recipe's. Repeatable."),
    ] = None,
    model: Model = None,
    text: Text = None,
    batch_size: BatchSize = None,
    micro_batch_size: MicroBatchSize = None,
    tokens: Tokens = None,
    seed: Seed = None,
    device: Device = None,
    precision: Precision = None,
    assignments: Set = None,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the runs and the figure go.")] = Path(
        "results/compare"
    ),
    keep_weights: KeepWeights = False,
    checkpoint: Checkpoint = None,
    checkpoint_every: CheckpointEvery = None,
    keep: Keep = None,
):
    """Train the same GPT-2 with several optimizers at a large batch, and compare.

    One after the other, from the same first weights, on the same batches. Ends with a table, a figure
    (PNG and PDF) and the recorded runs in a folder. Runs of the same name that are there already are
    replaced, each when its new run is complete. Ctrl-C stops at once and keeps what was recorded.
    With --checkpoint the same command then goes on where it was, also after a kill.
    """
    fields = given(
        assignments,
        model=model,
        text=text,
        batch_size=batch_size,
        micro_batch_size=micro_batch_size,
        tokens=tokens,
        seed=seed,
        device=device,
        precision=precision,
    )
    rates = learning_rates(lr or [])
    names = [name.strip() for name in optimizers.split(",") if name.strip()]
    checkpoints = checkpoint_options(checkpoint, checkpoint_every, keep)
    refuse_ranks("compare")

    from . import compare as comparing
    from . import text as texts

    entries = comparing.plan(recipe, names, rates, **fields)
    first = entries[0].recipe
    for entry in entries:
        comparing.check_writable(entry.path(out))
    comparing.check_writable(out / "comparison.png")
    corpus = texts.load(first.text, block_size=first.block_size)
    steps: dict[str, int] = {}
    try:
        say(f"{', '.join(names)}: {describe(first, corpus)}")
        replaced = [str(path) for entry in entries if (path := entry.path(out)).exists()]
        if replaced:
            say(f"there already, replaced when the new run is complete: {', '.join(replaced)}")
        with progress([entry.recipe for entry in entries]) as show:
            for entry, record in comparing.run(entries, out, corpus, keep_weights, **checkpoints):
                steps[entry.optimizer] = record.step
                show(entry.recipe, record)
    except KeyboardInterrupt:
        again = [f"the same command goes on from the checkpoints in {checkpoint}"] if checkpoint else []
        stop("stopped", *comparing.kept(entries, out, steps), *again)
    runs = comparing.read(entries, out)
    table(
        ["optimizer", "lr", "val loss", "peak max attention logit", "seconds", "diverged"],
        [[run.recipe.optimizer, f"{run.recipe.lr:g}", *results(run), ending(run)] for run in runs],
        numbers=4,
    )
    typer.echo(comparing.provenance(entries))
    if corpus.synthetic:
        typer.echo("The text is made up: these numbers say nothing about real text.")
    typer.echo("\nWritten:")
    for run in runs:
        typer.echo(f"  {run.path}")
    for line in drawn(runs, out / "comparison"):  # last: what goes wrong here takes nothing else with it
        typer.echo(f"  {line}")


@app.command(
    epilog=examples(
        "train --recipe tiny --sample 300",
        "train --recipe compare --optimizer LAMB --lr 0.02 --out results/lamb.jsonl",
        "train --text file:my.txt --set model.qk_norm=true --set optimizer_args.clip=false",
        "train --recipe compare --out results/merit.jsonl --checkpoint results/merit --checkpoint-every 10",
    )
    + "\n\n- `torchrun --nproc-per-node 2 -m merit_lab train --recipe tiny --parallel fsdp`"
)
def train(
    recipe: RecipeOption = "tiny",
    optimizer: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="AdamW, LAMB, MERIT or another name that `optimizers` lists."),
    ] = None,
    lr: Annotated[
        float | None,
        typer.Option(parser=number, metavar="RATE", help="Peak learning rate; else the recipe's for the optimizer."),
    ] = None,
    model: Model = None,
    text: Text = None,
    batch_size: BatchSize = None,
    micro_batch_size: MicroBatchSize = None,
    tokens: Tokens = None,
    seed: Seed = None,
    device: Device = None,
    precision: Precision = None,
    assignments: Set = None,
    parallel: Parallel = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="RUN.jsonl", help="Record the run to this file; else it is only shown."),
    ] = None,
    keep_weights: KeepWeights = False,
    checkpoint: Checkpoint = None,
    checkpoint_every: CheckpointEvery = None,
    keep: Keep = None,
    sample: Annotated[
        int, typer.Option(parser=count, metavar="N", help="Characters to let the model write when it is trained.")
    ] = 0,
):
    """Train one GPT-2 with one optimizer, and record the run.

    While it runs, lines go to RUN.jsonl.partial; RUN.jsonl appears, or is replaced, when the run is complete.
    Ctrl-C stops at once and keeps the partial file. With --checkpoint the same command then goes on where
    it was, also after a kill, and the recorded run holds every step once.

    torchrun starts several processes of it that train together; the batch is the batch of all of them.
    """
    fields = given(
        assignments,
        optimizer=optimizer,
        lr=lr,
        model=model,
        text=text,
        batch_size=batch_size,
        micro_batch_size=micro_batch_size,
        tokens=tokens,
        seed=seed,
        device=device,
        precision=precision,
    )
    if out is None and keep_weights:
        raise InputError("keep-weights: the weights are kept beside a recorded run; give --out RUN.jsonl too")
    if out is not None and out.suffix != ".jsonl":
        raise InputError(f"out: got {str(out)!r}, expected a name that ends in .jsonl")
    checkpoints = checkpoint_options(checkpoint, checkpoint_every, keep)

    from . import compare as comparing
    from . import distributed, runs
    from . import text as texts
    from .training import train as start

    entry = comparing.resolve(recipe, **fields)
    if out is not None:
        comparing.check_writable(out)
    chosen = entry.recipe
    with distributed.one_at_a_time():
        corpus = texts.load(chosen.text, block_size=chosen.block_size)
    step, training = 0, None
    try:
        training = start(chosen, corpus, parallel, **checkpoints)
        distributed.end_on_sigterm(training.ranks)
        if training.ranks.rank > 0:  # it computes; rank 0 speaks
            for _ in training if out is None else runs.record_to(out, training, keep_weights):
                pass
            if sample and not training.last.diverged:
                written_by(training, sample)
            distributed.leave()
            return
        say(f"{chosen.optimizer} at lr {chosen.lr:g} ({entry.lr_from}): {describe(chosen, corpus)}")
        if out is not None and out.exists():
            say(f"there already, replaced when the new run is complete: {out}")
        if training.resumed:
            say(f"going on after step {training.resumed} of {chosen.n_steps}, kept in {checkpoint}")
        records = training if out is None else runs.record_to(out, training, keep_weights)
        seen = []
        with progress([chosen]) as show:
            for record in records:
                step = record.step
                seen.append(record)
                show(chosen, record)
    except KeyboardInterrupt:
        what = f"{step} of {chosen.n_steps} steps"
        latest = training and training.checkpoints.latest
        again = f"; the same command goes on after step {latest}, kept in {checkpoint}" if latest else ""
        partial = out and out.with_name(out.name + ".partial")
        if partial and step and partial.exists():
            stop(f"stopped after {what}, kept in {partial}{again}")
        elif partial and step:
            stop(f"stopped after {what}, kept in {out}")
        elif again:
            stop(f"stopped after {what}{again}")
        stop(f"stopped after {what}; nothing is kept" + (" without --out" if out is None else ""))
    run = runs.Run(runs.header_of(training), seen, out)
    loss, logit, seconds = results(run)
    typer.echo(
        f"Diverged {ending(run)}: the loss was not finite."
        if run.diverged
        else f"Validation loss {loss} nats a token, peak max attention logit {logit}, {seconds} seconds."
    )
    if sample:
        typer.echo(
            "No sample: the weights are of a run that diverged." if run.diverged else written_by(training, sample)
        )
    typer.echo(f"Written: {out}" if out else "Not recorded; --out RUN.jsonl records a run.")
    distributed.leave()


@app.command(
    epilog=examples(
        "sweep data/sweeps/first.toml --dry-run",
        "sweep data/sweeps/first.toml --workers 2",
        "sweep my.toml --engine ray --address auto",
    )
)
def sweep(
    files: Annotated[list[Path], typer.Argument(metavar="SWEEP.toml…", help="What to run; see data/README.md.")],
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Where the runs are kept (in FOLDER/pool) and the tables go.")
    ] = Path("results/sweeps"),
    workers: Annotated[
        int | None, typer.Option(parser=count, metavar="N", help="Runs at a time; else the CPU cores, on CUDA one.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say how many runs, and how long, and end.")] = False,
    engine: Annotated[
        str, typer.Option(metavar="NAME", help="local, or ray: the machines of a Ray cluster.")
    ] = "local",
    address: Annotated[
        str, typer.Option(metavar="ADDRESS", help="The Ray cluster's; `auto`: the one this machine is part of.")
    ] = "auto",
    gpus: Annotated[
        float, typer.Option(parser=number, metavar="N", help="GPUs a run needs on the Ray cluster; .5: two share one.")
    ] = 0.0,
):
    """Make the runs of a sweep file, each in a process of its own, and write one table.

    A run that is complete is never made again: after Ctrl-C, a kill or a crash the same command goes on where it was.
    FOLDER/NAME.jsonl has a row a run, FOLDER/NAME.curves.jsonl a row a probed step: data/README.md has the columns.
    """
    from . import sweep as sweeps
    from . import text as texts
    from .training import pick_device

    refuse_ranks("sweep")
    if engine not in ("local", "ray"):
        raise InputError(f"engine: got {engine!r}, expected local or ray")
    if workers == 0:
        raise InputError("workers: got 0, expected a whole number ≥ 1")
    asked = [sweeps.Sweep.read(path) for path in files]
    recipes = [cell.recipe(cell.rates[0], 0) for one in asked for cell in one.cells]
    cuda = any(pick_device(recipe.device).type == "cuda" for recipe in recipes)
    workers = workers or (None if engine == "ray" else 1 if cuda else os.cpu_count() or 1)
    for spec, block_size in sorted({(recipe.text, recipe.block_size) for recipe in recipes}):
        texts.load(spec, block_size=block_size)  # fetched and prepared once, not by every worker
    pool = sweeps.Pool(out / "pool")
    if dry_run:
        rows = []
        for one in asked:
            planned, _ = one.plan(pool.row)
            done = sum(pool.row(run.name) is not None for run in planned)
            with sweeps.one_thread_each(workers or 1):
                seconds, measured = sweeps.estimate(one, pool, workers or 1)
            told = "finished runs" if measured else "a few steps"
            rows.append([one.name, f"{one.least()} to {one.most()}", str(done), clock(seconds), told])
        table(["sweep", "runs", "done", "time left", "told by"], rows, numbers=3)
        typer.echo(f"Time for {workers or 1} at a time, no search widened. Sweeps share the runs they have in common.")
        return
    failed = 0
    for one in asked:
        say(f"{one.name}: {one.purpose}" if one.purpose else one.name)
        runner = sweeps.Ray(address, workers, gpus) if engine == "ray" else sweeps.Processes(workers)
        try:
            with sweep_progress(one.name) as show:
                for state in sweeps.work(one, pool, runner):
                    failed += state.error is not None
                    show(state)
        except KeyboardInterrupt:
            sweeps.write_tables(one, pool, out)
            stop(f"stopped; {out / 'pool'} has every run that is complete: the same command goes on from there")
        for path in sweeps.write_tables(one, pool, out):
            typer.echo(f"Written: {path}")
        show_cells(one, pool)
    if failed:
        say(f"{failed} runs failed; {out / 'pool'}/*.failed.txt say why. The same command tries them again.")
        raise typer.Exit(FAILED)


@app.command(epilog=examples("recipes", "train --recipe gpt2 --text folder:my_texts@gpt2 --out results/small.jsonl"))
def recipes():
    """List the named recipes: what each is for, its size, how long a run takes, its learning rates."""
    from .recipe import A100, RECIPES, Recipe

    rows = []
    for name, preset in RECIPES.items():
        recipe = Recipe.named(name)
        size = f"{recipe.model}\n{parameters(recipe) / 1e6:.2f} M"
        batch = f"{recipe.batch_size} × {recipe.block_size}"
        purpose, time = (textwrap.fill(words, width) for words, width in ((preset.purpose, 15), (preset.time, 13)))
        rows.append([name, purpose, size, batch, str(recipe.n_steps), time])
    table(["recipe", "purpose", "model", "batch", "steps", "a run takes"], rows)
    typer.echo("A batch is sequences × tokens. Sizes up to base are counted with the 78 characters of Shakespeare.")
    typer.echo(f"Computed times: an A100's peak is {A100 / 1e12:g} TFLOP/s in bf16.\n")
    for name, preset in RECIPES.items():
        rates = ", ".join(f"{optimizer} {rate:g}" for optimizer, rate in preset.lr.items())
        typer.echo(f"{name}: lr {rates} ({preset.lr_from})")


@app.command(epilog=examples("optimizers"))
def optimizers():
    """List the optimizers: from AdamW to MERIT one switch a rung, and MERIT with one part taken away."""
    from . import optim

    for title, rungs in (
        ("From AdamW to MERIT", optim.LADDER),
        ("MERIT with one part changed", optim.ABLATIONS),
    ):
        rows = []
        for rung in rungs.values():
            switches = ", ".join(f"{name}={value!r}" for name, value in rung.switches.items())
            rows.append([rung.name, rung.switch, f"{rung.optimizer.__name__}({switches})"])
        table(["name", "what changes", "as code"], rows, title=title)


@app.command(
    epilog=examples(
        "text shakespeare",
        "text shakespeare@gpt2",
        "text file:my.txt",
    )
)
def text(
    spec: Annotated[
        str,
        typer.Argument(
            metavar="SPEC",
            help="shakespeare, addresses, synthetic, file:PATH, folder:PATH or hf:NAME; "
            "followed by @chars (a token a character, the default) or @gpt2 (GPT-2's tokens).",
        ),
    ],
):
    """Fetch and prepare a text, and describe it.

    The network is needed the first time at most. MERIT_LAB_DATA names another folder for texts;
    MERIT_LAB_OFFLINE=1 forbids the network.
    """
    from . import text as texts

    corpus = texts.load(spec)
    typer.echo(corpus.describe())
    typer.echo(f"licence: {corpus.licence}")


@app.command(epilog=examples("doctor"))
def doctor():
    """Check the environment: a line a check, and what to do where one fails.

    Exit code 1 if something is missing that training or the command line needs.
    """
    from .doctor import report

    raise typer.Exit(report())


# -- what was typed ------------------------------------------------------------------------------------------


def given(assignments: list[str] | None, **options: Any) -> dict[str, Any]:
    """The fields that were given, by their own option or by --set."""
    fields = {name: value for name, value in options.items() if value is not None}
    for assignment in assignments or []:
        name, equals, value = assignment.partition("=")
        table, *entry = name.strip().split(".")
        if not equals or not table or len(entry) > 1:
            raise InputError(f"set: got {assignment!r}, expected FIELD=VALUE such as warmup=0.1 or model.qk_norm=true")
        if entry:
            if isinstance(fields.get(table), str):  # --model nano --set model.qk_norm=true
                fields[table] = {"named": fields[table]}
            fields.setdefault(table, {})
            if not isinstance(fields[table], dict):
                raise InputError(f"set: got {assignment!r}, but {table} is {fields[table]!r} and has no entries")
            fields[table][entry[0]] = toml_value(value)
        elif table in fields:
            raise InputError(f"set: got {assignment!r}, but {table} is given already; give it once")
        else:
            fields[table] = toml_value(value)
    return fields


def checkpoint_options(folder: Path | None, every: int | None, keep: int | None) -> dict[str, Any]:
    """What was given of `train`'s arguments for checkpoints."""
    options = {"checkpoint": folder, "checkpoint_every": every, "keep": keep}
    options = {name: value for name, value in options.items() if value is not None}
    if options and folder is None:
        name, value = next(iter(options.items()))
        raise InputError(
            f"{name.replace('_', '-')}: got {value} without a folder for checkpoints; give --checkpoint FOLDER too"
        )
    return options


def toml_value(value: str) -> Any:
    """What a value means as TOML; `none` is None, and what is no TOML is a number such as .5 or a string."""
    value = value.strip()
    if value.lower() == "none":
        return None
    try:
        return tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        pass
    try:
        return float(value)
    except ValueError:
        return value


def learning_rates(pairs: list[str]) -> dict[str, float]:
    """["MERIT=0.02", …] as a table."""
    rates: dict[str, float] = {}
    for pair in pairs:
        name, _, rate = pair.rpartition("=")
        name = name.strip()
        try:
            value = float(rate)
        except ValueError:
            name = ""
        if not name:
            raise InputError(f"lr: got {pair!r}, expected NAME=RATE such as MERIT=0.02")
        if name in rates:
            raise InputError(f"lr: got {pair!r}, but {name} has {rates[name]:g} already; give it once")
        rates[name] = value
    return rates


def refuse_ranks(command: str) -> None:
    """InputError where torchrun started several processes of a command that is one."""
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and "MASTER_ADDR" in os.environ:
        raise InputError(f"{command} is one process: start it without torchrun, which is for the command train")


# -- what is shown -------------------------------------------------------------------------------------------


def say(*lines: str) -> None:
    """Lines on stderr: stdout is for results."""
    for line in lines:
        typer.echo(line, err=True)


def stop(*lines: str) -> NoReturn:
    """Say what became of an interrupted command, and exit."""
    if not RANK:
        say(*lines)
    raise typer.Exit(STOPPED) from None


def is_out_of_memory(error: Exception) -> bool:
    """Whether this is Python's, numpy's or torch's way to say so."""
    said = type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)
    return isinstance(error, MemoryError) or said


def table(columns: list[str], rows: list[list[str]], title: str | None = None, numbers: int = 0) -> None:
    """A table on stdout; `numbers` columns after the first are aligned to the right."""
    made = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        made.add_column(column, justify="right" if 1 <= index <= numbers else "left", overflow="fold")
    for row in rows:
        made.add_row(*row)
    Console(markup=False, highlight=False, emoji=False).print(made)


@contextmanager
def progress(recipes: list["Recipe"]) -> Iterator[Callable[["Recipe", "StepRecord"], None]]:
    """Yields a function to be told each record: a bar a recipe on a terminal, else a line now and then."""
    console = Console(stderr=True, markup=False, highlight=False)
    if not sys.stderr.isatty() or console.is_dumb_terminal:
        yield show_line
        return
    width = max(len(recipe.optimizer) for recipe in recipes)
    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[state]}", markup=False),
        console=console,
        expand=True,
    ) as bars:
        tasks = {
            recipe.optimizer: bars.add_task(recipe.optimizer.ljust(width), total=recipe.n_steps, state="waiting")
            for recipe in recipes
        }

        def show(recipe, record):
            state = f"{record.step}/{recipe.n_steps}  loss {record.train_loss:.3f}  {time_left(recipe, record)}"
            bars.update(tasks[recipe.optimizer], completed=record.step, state=state)

        yield show


@contextmanager
def sweep_progress(name: str) -> Iterator[Callable[[Any], None]]:
    """Yields a function to be told where a sweep stands: a bar on a terminal, else a line a run."""
    console = Console(stderr=True, markup=False, highlight=False)

    def line(state):
        left = "" if state.seconds_left is None else f", {clock(state.seconds_left)} left"
        return f"{state.done}/{state.known} runs{left}"

    def ended(state):
        if state.error is not None:
            say(f"failed: {state.finished.name}: {state.error.strip().splitlines()[-1]}")

    if not sys.stderr.isatty() or console.is_dumb_terminal:

        def show(state):
            ended(state)
            last = f"  {state.finished.name}" if state.finished else ""
            say(f"{name}: {line(state)}{last}")

        yield show
        return
    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[state]}", markup=False),
        console=console,
        expand=True,
    ) as bars:
        task = bars.add_task(name, total=None, state="")

        def show(state):
            ended(state)
            bars.update(task, completed=state.done, total=state.known, state=line(state))

        yield show


def show_cells(sweep: Any, pool: Any) -> None:
    """A sweep's result a cell: the best rate, and the reported seeds' mean and spread."""
    from .evidence import mean_and_spread

    rows = []
    planned, _ = sweep.plan(pool.row)
    for cell in sweep.cells:
        reported = [(run, pool.row(run.name)) for run in planned if run.cell is cell and run.stage == "report"]
        reported = [(run, row) for run, row in reported if row is not None]
        for lr in sorted({row["lr"] for _, row in reported}):
            there = [row for _, row in reported if row["lr"] == lr]
            logit = max(row["peak_logit"] or 0 for row in there)
            name = ", ".join(f"{k} {v}" for k, v in cell.values.items() if k != "lr")
            loss = mean_and_spread([row["val_loss"] for row in there])
            rows.append([name, f"{lr:g}", loss, f"{logit:.1f}", str(len(there))])
    if rows:
        table(["cell", "lr", "val loss", "peak logit", "seeds"], rows)


def show_line(recipe: "Recipe", record: "StepRecord") -> None:
    """A record as a line, ten times in a run."""
    from .training import is_due

    if not record.diverged and not is_due(record.step, max(1, recipe.n_steps // 10), recipe.n_steps):
        return
    parts = [f"{recipe.optimizer}: step {record.step}/{recipe.n_steps}", f"loss {record.train_loss:.3f}"]
    if record.val_loss is not None:
        parts.append(f"val loss {record.val_loss:.3f}")
    say(", ".join([*parts, time_left(recipe, record)]))


def time_left(recipe: "Recipe", record: "StepRecord") -> str:
    """How long a run will take yet, or how it ended."""
    if record.diverged:
        return "diverged"
    if record.step == recipe.n_steps:
        return f"done in {clock(record.seconds)}"
    return f"{clock(record.seconds / record.step * (recipe.n_steps - record.step))} left"


def clock(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def describe(recipe: "Recipe", corpus) -> str:
    """What is trained on what, in a line."""
    model = recipe.model if isinstance(recipe.model, str) else recipe.model.get("named", "its own")
    return (
        f"{model} model ({parameters(recipe, corpus.vocab_size) / 1e6:.2f} M parameters) on {corpus.name}, "
        f"{recipe.n_steps} steps of {recipe.batch_size} × {recipe.block_size} tokens, seed {recipe.seed}"
    )


def parameters(recipe: "Recipe", vocab_size: int | None = None) -> int:
    """How many parameters the recipe's model has. Nothing is allocated."""
    import torch

    from .models import GPT2

    with torch.device("meta"):
        return GPT2(recipe.model_config(vocab_size)).count_parameters()


def results(run: "Run") -> tuple[str, str, str]:
    """A run's validation loss, peak max attention logit and seconds."""
    loss, logit = (
        f"{value:.{digits}f}" if isfinite(value) else "-"
        for value, digits in ((run.final_val_loss, 3), (run.peak_logit, 1))
    )
    return loss, logit, f"{run.records[-1].seconds:.1f}"


def ending(run: "Run") -> str:
    """Whether a run diverged, and where."""
    return f"at step {run.records[-1].step}" if run.diverged else "no"


def drawn(runs: list["Run"], stem: Path) -> list[str]:
    """The paths of the figure that was drawn; or, without a plotting library, what to do about it."""
    from .doctor import AGAIN

    try:
        from . import figures
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in FIGURE_PACKAGES:
            raise
        return [f"no figure: {missing} is not installed; {AGAIN}"]
    return [str(path) for path in figures.save(figures.loss_and_logit(runs), stem)]


def written_by(training: "Training", characters: int) -> str:
    """Text the trained model writes, the same for the same recipe."""
    import torch

    corpus = training.corpus
    generator = torch.Generator(training.device).manual_seed(training.recipe.seed)
    tokens = torch.tensor([[int(corpus.val[0])]], device=training.device)  # (1, 1)
    sample = ""
    with training.ranks.whole_model() as model:
        while len(sample) < characters:
            # GPT-2's tokens have some four characters each, ours one.
            missing = characters - len(sample)
            more = missing if corpus.tokenizer == "chars" else missing // 4 + 1
            tokens = model.generate(tokens, more, temperature=0.8, generator=generator)  # (1, 1 + n)
            sample = corpus.decode(tokens[0, 1:])
    return "\n" + re.sub(r"[^\S\n]", " ", "".join(map(printable, sample[:characters]))) + "\n"


def printable(character: str) -> str:
    """The character, or a mark for one that would steer the terminal."""
    return character if character.isprintable() or character.isspace() else "\N{REPLACEMENT CHARACTER}"


if __name__ == "__main__":
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # a terminal without ≥ or × shows ? in its place
    app(prog_name="python -m merit_lab")
