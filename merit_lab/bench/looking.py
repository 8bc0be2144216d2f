"""What looking costs: the X-ray's answer to a slider, the dashboard, the probes."""

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

from .. import training
from ..recipe import Recipe
from . import rows

PAIRS = 3  # runs with probes and without
NEVER = 10**7  # steps between probes
DASHBOARD_PAIRS, ROUNDS = 7, 60  # and steps of each optimizer in one of them: some six seconds
NAMES = ("AdamW", "LAMB", "MERIT")


def measure() -> dict[str, Any]:
    """Everything."""
    return {"figures": [xray(), *dashboard(), probes()]}


def xray() -> dict:
    """From moving a slider to the new picture of the X-ray on an 8 × 8 matrix."""
    from ..widgets.xray import benchmark_xray

    median = statistics.median(benchmark_xray(size=8)) * 1000
    return rows.figure("X-ray, slider to picture, 8 × 8, median", median, "ms", "under 200 ms", median < 200)


def dashboard() -> list[dict]:
    """How much slower three runs in lockstep are under LiveTraining.

    Compared are steps a second from the first record to the last, by the records' own clock: the widget's steps,
    pictures and lines of progress against the same runs in a bare thread. Not in it is what is there once however
    long a run is: making the widget, opening the text and the models, the picture at rest and closing. That has a row
    of its own. There is no notebook here: what the kernel takes to send a picture, and the browser to show it, is in
    neither row. Torch is slower in a second thread than in the main one, widget or not: the last row says by how much.
    """
    from ..widgets import LiveTraining

    recipes = [Recipe.named("tiny", optimizer=name, device="cpu", tokens=16 * 64 * ROUNDS) for name in NAMES]
    corpus = training.train(recipes[0]).corpus
    fixed, pictures = [], []

    def bare() -> float:
        lanes = [training.train(recipe, corpus) for recipe in recipes]
        return _pace([records[-1] for records in zip(*lanes, strict=True)])

    def threaded() -> float:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(bare).result()

    def shown() -> float:
        started = time.perf_counter()
        widget = LiveTraining(recipes)
        widget.run()
        widget.wait()
        records, frames = widget.runs[-1].records, widget.frames
        widget.close()
        fixed.append(time.perf_counter() - started - (records[-1].seconds - records[0].seconds))
        pictures.append(frames / records[-1].seconds)
        return _pace(records)

    threaded(), shown()  # does not count: the first of anything is slower
    fixed.clear(), pictures.clear()
    rounds = [(threaded(), shown(), bare()) for _ in range(DASHBOARD_PAIRS)]
    slower = 100 * (statistics.median(a / b for a, b, _ in rounds) - 1)
    thread = 100 * (statistics.median(c / a for a, _, c in rounds) - 1)
    return [
        rows.figure("dashboard, slower than the same runs in a thread, median", slower, "%", "under 5 %", slower < 5),
        rows.figure("dashboard, until the first record and after the last, median", statistics.median(fixed), "s"),
        rows.figure("dashboard, pictures a second, median", statistics.median(pictures), ""),
        rows.figure("the same runs in a thread, slower than in the main thread, median", thread, "%"),
    ]


def _pace(records) -> float:
    """Steps a second from the first record to the last."""
    return (records[-1].step - records[0].step) / (records[-1].seconds - records[0].seconds)


def probes() -> dict:
    """The speed of a run with probes at their default interval, as a share of its speed with none at all."""
    # Of the full run's 61 steps 32 are probed, every second and the ends: of 30, 16.
    base = Recipe.named("compare", tokens=256 * 64 * 30, probe_every=2, eval_every=10**6, device="cpu")
    corpus = training.train(base).corpus

    def run(recipe):
        for _ in training.train(recipe, corpus):
            pass

    def without():  # a recipe has probes at its first and last step at the least
        due = training.is_due
        with mock.patch.object(training, "is_due", lambda step, every, n: every != NEVER and due(step, every, n)):
            run(base.replace(probe_every=NEVER))

    seconds = rows.in_turn({"with": lambda: run(base), "without": without}, PAIRS)
    share = 100 / rows.ratio(seconds["with"], seconds["without"])
    return rows.figure("speed with probes, of the speed without any, median", share, "%", "at least 97 %", share >= 97)
