"""What looking costs: python -m merit_lab.bench (make bench) measures it and writes data/bench/looking.json.

Each figure is a ratio, or the time of one thing a reader waits for, taken in one process. What is compared is run in
turn, A B A B, so that a machine whose speed drifts slows both.
"""

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import torch

from . import __version__
from .files import data_dir, write_whole
from .recipe import Recipe
from .runs import machine
from .training import train

PAIRS = 5  # runs of each of the two things compared
NAMES = ("AdamW", "LAMB", "MERIT")


def main(path: Path | None = None) -> dict:
    """Measure, print, and write the results to `path` (default data/bench/looking.json)."""
    results = {
        "machine": machine(torch.device("cpu")),
        "cores": os.cpu_count(),
        "versions": {"merit_lab": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "figures": [xray(), dashboard(), probes()],
    }
    for row in results["figures"]:
        met = "met" if row["met"] else "missed"
        print(f"{row['what']}: {row['value']:.3g} {row['unit']} (target {row['target']}: {met})")
    path = path or data_dir() / "bench" / "looking.json"
    write_whole(path, json.dumps(results, indent=1) + "\n")
    print(f"written: {os.path.relpath(path)}")
    return results


def xray() -> dict:
    """From moving a slider to the new picture of the X-ray on an 8 × 8 matrix."""
    from .widgets.xray import benchmark_xray

    median = statistics.median(benchmark_xray(size=8)) * 1000
    return _row("X-ray, slider to picture, 8 × 8, median", median, "ms", "under 200 ms", median < 200)


def dashboard() -> dict:
    """How much longer three runs in lockstep take under LiveTraining."""
    from .widgets import LiveTraining

    recipes = [Recipe.named("tiny", optimizer=name, device="cpu", tokens=16 * 64 * 100) for name in NAMES]
    corpus = train(recipes[0]).corpus

    def bare():
        for _ in zip(*(train(recipe, corpus) for recipe in recipes), strict=True):
            pass

    def shown():
        widget = LiveTraining(recipes)
        widget.run()
        widget.wait()
        widget.close()

    slower = 100 * (_ratio(shown, bare) - 1)
    return _row("dashboard, longer than the bare runs, median of pairs", slower, "%", "under 5 %", slower < 5)


def probes() -> dict:
    """The speed of a run with probes at their default interval, as a share of its speed without."""
    base = Recipe.named("compare", tokens=256 * 64 * 30, eval_every=10**6, device="cpu")
    corpus = train(base).corpus

    def run(probe_every):
        for _ in train(base.replace(probe_every=probe_every), corpus):
            pass

    # Of the full run's 61 steps every second is probed (30 in a run): here too.
    share = 100 / _ratio(lambda: run(2), lambda: run(10**6))
    return _row("speed with probes, of the speed without, median of pairs", share, "%", "at least 97 %", share >= 97)


def _ratio(a: Callable[[], None], b: Callable[[], None]) -> float:
    """Median over pairs of a's time divided by b's, after one run of each that does not count."""
    _seconds(a), _seconds(b)
    return statistics.median(_seconds(a) / _seconds(b) for _ in range(PAIRS))


def _seconds(f: Callable[[], None]) -> float:
    started = time.perf_counter()
    f()
    return time.perf_counter() - started


def _row(what, value, unit, target, met) -> dict:
    return {"what": what, "value": float(f"{value:.4g}"), "unit": unit, "target": target, "met": bool(met)}


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
