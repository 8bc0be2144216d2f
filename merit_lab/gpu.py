"""On a CUDA machine, without a network, in eight minutes: python -m merit_lab.gpu (make gpu).

    tests       the tests marked gpu
    benchmark   the optimizers' steps as in `make bench`, with their targets; tokens a second of the larger models
    runs        the recipe `mini` with AdamW, LAMB and MERIT: an equal search of the rate, then the best with 3 seeds

It keeps the deadline by itself: each part has its share, the runs are made as short as they must be for all of them to
fit, a round of runs begins only if it can end, and what was measured is on disk at once. Four files are left:

    report.json       what was run, on what, how it went, and the result in short
    benchmark.json    a row a measurement
    runs.jsonl        a row a run, curves.jsonl a row a probed step: columns as of a sweep's tables (data/README.md)
"""

import argparse
import itertools
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

try:
    import torch

    from . import __version__, sweep, text
    from .bench import steps
    from .errors import InputError
    from .files import data_dir, repo_root, write_whole
    from .models import GPT2
    from .recipe import RECIPES, Recipe, flops_a_token
    from .runs import machine
    from .training import LARGEST_MICRO_BATCH, autocast, train
except ModuleNotFoundError as error:
    print(f"error: {error.name} is not installed; needed are torch >= 2.11 built for CUDA, numpy and einops")
    sys.exit(2)

MINUTES = 8.0
RESERVE = 15.0  # seconds at the end that nothing is planned in
TESTS_SHARE, BENCHMARK_SHARE = 0.2, 0.15  # of the time, at most; the runs have the rest
TORCH = (2, 11)
NAMES = ("AdamW", "LAMB", "MERIT")
FACTORS = (1.0, 0.5, 2.0)  # of the recipe's rate: three rates for each optimizer
SEEDS = (1, 2, 3)  # the rates are searched with seed 0
LEAST_STEPS = 60  # a shorter run says nothing
SAFETY = 0.95  # share of the time that the runs are cut to fit
FILES = ("report.json", "benchmark.json", "runs.jsonl", "curves.jsonl")


class OutOfTime(Exception):
    """The deadline has come."""


class Deadline:
    """Seconds that are left.

    Args:
        seconds: from now.
        clock: seconds since any moment.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic):
        self.clock, self.started = clock, clock()
        self.end = self.started + seconds

    @property
    def left(self) -> float:
        """Seconds until the end; below 0 after it."""
        return self.end - self.clock()

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return self.clock() - self.started

    def check(self) -> None:
        """Raise OutOfTime if nothing is left."""
        if self.left <= 0:
            raise OutOfTime

    def part(self, seconds: float) -> "Deadline":
        """A deadline within this one."""
        return Deadline(min(seconds, self.left), self.clock)


def main(arguments: list[str] | None = None) -> int:
    """Run everything. Returns the exit code: 0; 1 if a test or a run failed; 2 where there is nothing to run it on."""
    parser = argparse.ArgumentParser(prog="python -m merit_lab.gpu", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=data_dir() / "runs" / "gpu", metavar="FOLDER")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for all of it (default 8)")
    given = parser.parse_args(arguments)
    if not 0 < given.minutes < math.inf:
        parser.error(f"minutes: got {given.minutes}, expected a finite number > 0")
    lack = missing()
    if lack:
        print(f"make gpu needs a CUDA device and torch >= {TORCH[0]}.{TORCH[1]} built for CUDA. Here {lack}.")
        return 2
    report = run(given.out, seconds=60 * given.minutes)
    return 1 if report["failed"] else 0


def missing() -> str | None:
    """What this machine lacks, or None."""
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < TORCH:
        return f"torch is {torch.__version__}"
    if not torch.cuda.is_available():
        built = "without CUDA" if torch.version.cuda is None else f"for CUDA {torch.version.cuda}"
        return f"torch {torch.__version__} ({built}) finds no CUDA device"
    return None


def run(
    out: Path,
    *,
    seconds: float,
    device: str = "cuda",
    recipe: str = "mini",
    benchmarked: tuple[str, ...] = ("mini", "base", "gpt2"),
    tests: list[Path] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> dict:
    """All parts, one after the other, within `seconds`. Returns the report, which stands in out/report.json too.

    Args:
        out: the folder that FILES go to; those that stand there from before are removed first.
        device, recipe, benchmarked, tests, clock: other than the defaults to try this out where there is no GPU.
            `benchmarked` and `recipe` name recipes; `tests` are files, None: those of tests/ that name the gpu marker.
    """
    deadline = Deadline(max(seconds - RESERVE, seconds / 2), clock)
    chosen = torch.device(device)
    for name in FILES:
        (out / name).unlink(missing_ok=True)
    report = {
        "merit_lab_gpu": 1,
        "machine": machine(chosen),
        "versions": {"merit_lab": __version__, "torch": torch.__version__, "cuda": torch.version.cuda},
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "seconds_allowed": seconds,
        "seconds": 0.0,
        "failed": [],
        "parts": {},
    }

    def keep(part, result):
        report["parts"][part] = result
        report["seconds"] = round(deadline.spent, 1)
        report["failed"] = [name for name, result in report["parts"].items() if result["state"] == "failed"]
        write_whole(out / "report.json", json.dumps(report, indent=1, ensure_ascii=False) + "\n")

    say(f"{report['machine']}, torch {torch.__version__}: {seconds:.0f} s for everything")
    keep("tests", run_tests(deadline.part(TESTS_SHARE * seconds), tests))
    say(f"tests: {_words(report['parts']['tests'])}")
    keep("benchmark", benchmark(out, deadline.part(BENCHMARK_SHARE * seconds), chosen, benchmarked))
    say(f"benchmark: {_words(report['parts']['benchmark'])}")
    for result in compare(out, deadline, device, recipe):
        keep("runs", result)
    say(f"runs: {_words(report['parts']['runs'])}")
    say(f"{report['seconds']:.0f} s. Written: {out}")
    return report


# -- the tests ---------------------------------------------------------------------------------------------------


def run_tests(deadline: Deadline, paths: list[Path] | None = None) -> dict:
    """pytest on the tests marked gpu, in a process of its own that is ended at the deadline."""
    root = repo_root()
    if paths is None:
        if root is None:
            return {"state": "left out", "why": "there are no tests beside an installed package"}
        # These files alone: others may import what a machine without Jupyter lacks.
        paths = [path for path in sorted((root / "tests").rglob("test_*.py")) if "pytest.mark.gpu" in path.read_text()]
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        # Without plugins, and without the project's options, which need some.
        alone = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-o", "addopts=", "-p", "no:cacheprovider"]
        command += [f"--junitxml={results}", *map(str, paths)]
        with open(Path(folder) / "output.txt", "w+b") as output:
            process = subprocess.Popen(
                command, cwd=root, env=alone, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                process.wait(max(deadline.left, 0.0))
            except subprocess.TimeoutExpired:
                return {"state": "failed", "why": f"not done after {deadline.spent:.0f} s"}
            finally:
                _end(process)
            output.seek(0)
            said = output.read().decode(errors="replace").strip()
        if not results.exists():
            return {"state": "failed", "why": said[-1500:]}
        suites = list(ElementTree.parse(results).getroot().iter("testsuite"))
    ran, failures, errors, skipped = (
        sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "failures", "errors", "skipped")
    )
    counts = {"passed": ran - failures - errors - skipped, "failed": failures + errors, "skipped": skipped}
    if process.returncode or not counts["passed"]:
        return {"state": "failed", **counts, "why": said[-1500:]}
    return {"state": "done", **counts}


def _end(process):
    """End a process and all it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


# -- the benchmark -----------------------------------------------------------------------------------------------


def benchmark(out: Path, deadline: Deadline, device: torch.device, names: tuple[str, ...]) -> dict:
    """Measure, and write benchmark.json after each row; what there is no time for is left out."""
    config = Recipe.named(names[-1]).model_config()
    jobs = [
        (f"optimizer steps, {part}", lambda part=part: steps.compare(part, device, config=config))
        for part in ("block", "embedding")
    ]
    jobs += [(f"tokens a second of {name}", lambda name=name: [throughput(name, device)]) for name in names]
    rows, left_out = [], []
    write_whole(out / "benchmark.json", "[]\n")
    for what, job in jobs:
        if deadline.left <= 0:
            left_out.append(what)
            continue
        try:
            rows += job()
        except (RuntimeError, MemoryError) as error:  # torch says out of memory so
            rows.append({"what": what, "error": str(error).splitlines()[0][:300]})
        write_whole(out / "benchmark.json", json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
    state = "failed" if any("error" in row for row in rows) else "cut short" if left_out else "done"
    targets = steps.verdicts([row for row in rows if "optimizer" in row])
    return {"state": state, "rows": len(rows), "left_out": left_out, "targets": targets}


def throughput(name: str, device: torch.device, repeats: int = 5) -> dict:
    """Forward and backward pass of one micro-batch of random tokens, without an optimizer step, as in training."""
    recipe = Recipe.named(name)
    config = recipe.model_config()
    micro = recipe.micro_batch_size or min(recipe.batch_size, LARGEST_MICRO_BATCH)
    torch.manual_seed(0)
    model = GPT2(config).to(device)
    tokens = torch.randint(0, config.vocab_size, (micro, config.block_size), device=device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)

    def pass_():
        model.zero_grad(set_to_none=True)
        with autocast(device, "auto"):
            _, loss = model(tokens, tokens)
        loss.backward()

    median = statistics.median(_times(pass_, device, repeats))
    a_second = tokens.numel() / median
    parameters = model.count_parameters()
    return {
        "what": "forward and backward pass",
        "model": recipe.model,
        "parameters": parameters,
        "micro_batch": f"{micro} × {config.block_size}",
        "tokens_a_second": _digits(a_second),
        "teraflops": _digits(a_second * flops_a_token(config, parameters) / 1e12),
        "peak_gb": _digits(torch.cuda.max_memory_allocated(device) / 1e9) if device.type == "cuda" else None,
    }


def _times(call: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """Seconds of each call, after three that do not count. On CUDA, by the device's clock."""
    times = []
    for _ in range(3 + repeats):
        if device.type == "cuda":
            started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize(device)
            started.record()
            call()
            ended.record()
            ended.synchronize()
            times.append(started.elapsed_time(ended) / 1e3)
        else:
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
    return times[3:]


# -- the runs ----------------------------------------------------------------------------------------------------


def compare(out: Path, deadline: Deadline, device: str, name: str) -> Iterator[dict]:
    """The optimizers on one recipe; yields what is to be reported, after each round.

    A round is one run of each optimizer: at each of three rates with seed 0, then at the best of them with each of
    three other seeds. So whenever the time is over, each has had the same search.
    """
    recipe = Recipe.named(name)
    result = {"state": "failed", "recipe": name}
    try:
        deadline.check()
        spec, result["text"] = available_text(recipe.text)
        base = {"text": spec, "device": device}
        step_seconds, rest = _calibrate(Recipe.named(name, **base), deadline)
    except OutOfTime:
        yield result | {"state": "cut short", "why": "no time for a run"}
        return
    except Exception as error:  # whatever it is, the report must say so
        yield result | {"why": _why(error)}
        return
    n_runs = len(NAMES) * (len(FACTORS) + len(SEEDS))
    fits = int((SAFETY * deadline.left / n_runs - rest) / step_seconds)
    steps = min(recipe.n_steps, max(fits, LEAST_STEPS))
    base["tokens"] = steps * recipe.tokens_per_step
    result |= {"steps": steps, "steps_of_the_recipe": recipe.n_steps, "state": "cut short", "failures": []}
    rows, curves, longest = [], [], steps * step_seconds + rest
    rounds = [("search", 0, factor) for factor in FACTORS] + [("report", seed, None) for seed in SEEDS]
    for done, (stage, seed, factor) in enumerate(rounds):
        if deadline.left < len(NAMES) * longest:
            yield result | {"rounds_left_out": len(rounds) - done, "results": _results(rows)}
            return
        for optimizer in NAMES:
            rates = RECIPES[name].lr
            lr = factor * rates[optimizer] if factor else _best_rate(rows, optimizer)
            if lr is None:  # none of its searches came to an end
                continue
            one = Recipe.named(name, **base, optimizer=optimizer, lr=lr, seed=seed)
            before = deadline.spent
            try:
                measured = sweep.measure(one, (), deadline.check)
            except OutOfTime:
                yield result | {"rounds_left_out": len(rounds) - done, "results": _results(rows)}
                return
            except Exception as error:
                result["failures"].append(f"{optimizer}, lr {lr:g}, seed {seed}: {_why(error)}")
                continue
            longest = max(longest, deadline.spent - before)
            key = {"run": sweep.run_name(one), "stage": stage, "cell": {"optimizer": optimizer}}
            rows.append(key | measured["row"])
            curves += [{"run": key["run"]} | point for point in measured["curve"]]
            for file, lines in (("runs.jsonl", rows), ("curves.jsonl", curves)):
                write_whole(out / file, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
            loss = rows[-1]["val_loss"]
            say(f"  {key['run']}: val loss {'none, diverged' if loss is None else loss}")
        yield result | {"rounds_left_out": len(rounds) - done - 1, "results": _results(rows)}
    state = "failed" if result["failures"] else "done"
    yield result | {"state": state, "rounds_left_out": 0, "results": _results(rows)}


def available_text(wanted: str) -> tuple[str, str]:
    """The text to train on without a network, and what is to be said of it."""
    for spec in dict.fromkeys((wanted, "addresses", "shakespeare")):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it takes the made-up text instead; said below
            try:
                corpus = text.load(spec, offline=True)
            except InputError:
                continue
        if not corpus.synthetic:
            return spec, corpus.describe()
    return "synthetic", "made up: neither addresses nor Shakespeare were prepared, so the losses say nothing of text"


def _calibrate(recipe: Recipe, deadline: Deadline) -> tuple[float, float]:
    """Seconds a step without probes, and what a run takes beside: its start, 30 probes, 10 validations, its end.

    By MERIT, which computes most. A run of 30 steps has as many probes and validations as a longer one.
    """
    a_step = _seconds_a_step(recipe, deadline.check)
    short = recipe.replace(tokens=min(30, recipe.n_steps) * recipe.tokens_per_step)
    before = deadline.spent
    sweep.measure(short, (), deadline.check)
    return a_step, max(0.0, deadline.spent - before - short.n_steps * a_step)


def _seconds_a_step(recipe: Recipe, watch: Callable[[], None]) -> float:
    """Median of some steps after the first, which are slower, and probed."""
    training, ends = train(recipe.replace(probe_every=10**9, eval_every=10**9)), []
    for record in itertools.islice(training, 8):
        watch()
        ends.append(record.seconds)
    return statistics.median(b - a for a, b in itertools.pairwise(ends[2:] if len(ends) > 4 else [0.0, *ends]))


def _best_rate(rows, optimizer) -> float | None:
    searched = [r for r in rows if r["optimizer"] == optimizer and r["stage"] == "search"]
    return min(searched, key=_loss)["lr"] if searched else None


def _results(rows) -> dict:
    """An optimizer each: its best rate, and losses and logits over the seeds."""
    found = {}
    for optimizer in NAMES:
        best, mine = _best_rate(rows, optimizer), [r for r in rows if r["optimizer"] == optimizer]
        if best is None:
            continue
        rates = sorted(r["lr"] for r in mine if r["stage"] == "search")
        reported = [r for r in mine if r["stage"] == "report"]
        found[optimizer] = {
            "lr": best,
            "lr_searched": rates,
            "lr_at_edge": best in (rates[0], rates[-1]),
            "search_val_loss": [r["val_loss"] for r in sorted(mine, key=lambda r: r["lr"]) if r["stage"] == "search"],
            "val_loss": [r["val_loss"] for r in reported],
            "train_loss": [r["train_loss"] for r in reported],
            "peak_logit": [r["peak_logit"] for r in reported],
        }
    return found


def _loss(row) -> float:
    return math.inf if row["val_loss"] is None else row["val_loss"]


# -- what is said ------------------------------------------------------------------------------------------------


def say(line: str) -> None:
    """A line of progress, at once: whoever watches may see it through a pipe."""
    print(line, flush=True)


def _words(part: dict) -> str:
    counts = ("passed", "failed", "skipped", "rows", "steps")
    said = [part["state"], *(f"{part[name]} {name}" for name in counts if name in part)]
    if part.get("rounds_left_out"):
        said.append(f"{part['rounds_left_out']} rounds left out")
    if "why" in part:
        said.append(part["why"])
    return ", ".join(said + part.get("failures", []))


def _why(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]


def _digits(value: float) -> float:
    return float(f"{value:.4g}")


if __name__ == "__main__":
    sys.exit(main())
