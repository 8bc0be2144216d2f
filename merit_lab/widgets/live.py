"""Live training: one to four optimizers in lockstep, or recorded runs replayed, on one dashboard.

    LiveTraining([Recipe.named("tiny", optimizer=name) for name in ("AdamW", "LAMB", "MERIT")])
    LiveTraining(runs.read_many("data/runs"))

A worker thread takes a step of each, in turn, and only keeps the records. The renderer of LabWidget draws what there
is, a few times a second at most, and the worker waits for it: matplotlib holds Python's lock while it draws, and a
step that has to fight for the lock takes longer than the picture. Pause is not taking the next step: the thread ends,
and Run starts another that goes on. Stop ends the trainings and leaves the picture.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Iterable
from functools import partial
from html import escape

import ipywidgets
from matplotlib.figure import Figure

from .. import figures
from ..errors import InputError
from ..figures.curves import short
from ..recipe import Recipe
from ..runs import Run
from ..training import StepRecord, train
from .base import JOIN_SECONDS, LabWidget

MOST = 4  # optimizers side by side
SAME = ("model", "text", "seed", "batch_size", "block_size", "tokens")  # else it is not the same weights and batches
REPLAY_SECONDS = 8.0  # that Run takes for a recorded run
READY, RUNNING, PAUSED, STOPPED, DONE, FAILED = "ready", "running", "paused", "stopped", "done", "failed"
_ALL = ("all tensors", "")  # "" and not None, which a Dropdown takes for no choice
_ROW = {"flex_flow": "row wrap", "width": "100%"}


class Lane:
    """One run of a dashboard: what it is made from, and its records so far. Figures take it as a run.

    Attributes:
        source: the Recipe or the recorded Run.
        recipe: what is run, once sliders are taken into account.
        records: list of StepRecord; one thread appends, others copy.
    """

    def __init__(self, source: Recipe | Run):
        self.source = source
        self.recorded = isinstance(source, Run)
        self.recipe = source.recipe if self.recorded else source
        self.records: list[StepRecord] = []
        self.corpus = None
        self._steps = None

    def __iter__(self):
        return iter(self.records[:])

    @property
    def n_steps(self) -> int:
        """How many steps there will be."""
        return max((r.step for r in self.source.records), default=0) if self.recorded else self.recipe.n_steps

    def open(self, recipe: Recipe, corpus=None) -> None:
        """Start anew."""
        self.close()
        self.recipe, self.records = recipe, []
        self._steps = iter(self.source.records) if self.recorded else train(recipe, corpus)
        self.corpus = getattr(self._steps, "corpus", corpus)

    def step(self) -> bool:
        """Take one step; False where there is none left."""
        record = next(self._steps, None)
        if record is None:
            return False
        self.records.append(record)
        return True

    def close(self) -> None:
        """Let go of model and optimizer; the records stay."""
        if hasattr(self._steps, "close"):
            self._steps.close()
        self._steps = self.corpus = None


class LiveTraining(LabWidget):
    """A dashboard for one to four optimizers: loss, max attention logit a layer, trust ratios, clip share.

    Args:
        recipes: Recipes, trained from the same weights on the same batches, or recorded Runs, or both. By default
            the "tiny" recipe with AdamW, LAMB and MERIT.

    Recipes must agree in model, text, seed, batch size and tokens (InputError otherwise). Recorded runs alone are
    shown whole at first, and a time slider goes through them.

    Attributes:
        runs: what the dashboard shows, as figures take it: `figures.loss_and_logit(widget.runs)`.
        state: "ready", "running", "paused", "stopped", "done" or "failed".
    """

    budget, limit = 0.03, 0.04  # share of a run's time that its pictures may take, after the first; the larger one
    patience = 3.0  # where there was none for so many seconds

    def __init__(self, recipes: Iterable[Recipe | Run] | Recipe | Run | None = None):
        self.runs = [Lane(source) for source in _checked(recipes)]
        self.replay = all(lane.recorded for lane in self.runs)
        self.state = READY
        self.figure: Figure | None = None
        self.position = 0  # the step that is shown
        self._started = False  # whether the lanes are open
        self._stop, self._pause = threading.Event(), threading.Event()
        self._rounds: deque[float] = deque(maxlen=20)  # seconds of the latest steps
        self._began, self._spent = 0.0, 0.0  # when this stretch of running began; seconds of its pictures
        self._drawn = self._told = -math.inf  # when the latest picture and the latest line of progress were made
        self._sent = None  # what the renderer has put into the time slider
        self._link = None
        super().__init__(self._controls())
        for button, handler in self._buttons.items():
            self.on_click(button, handler)
        for control in (*self.rates, *([self.batch] if self.batch else [])):
            self.on_change(control, self._show_plan)
        self.on_change(self.tensor, self.request)
        if self.replay:
            self.on_change(self.time, self._to_chosen_time)
            self.position = self.n_steps
        self._enter(READY)
        self.refresh()

    # -- controls ------------------------------------------------------------------------------------------------

    def _controls(self):
        def button(text, tooltip):  # without an icon: its glyph would be part of the button's name
            return ipywidgets.Button(description=text, tooltip=tooltip, layout={"width": "6.5em"})

        self.run_button = button("Run", "Start, or go on after a pause")
        self.pause_button = button("Pause", "Pause after this step")
        self.step_button = button("Step", "Take one step of each")
        self.stop_button = button("Stop", "End the run; the picture stays")
        self.reset_button = button("Reset", "End the run, clear the picture, set the sliders back")
        self._buttons = {
            self.run_button: self.run, self.pause_button: self.pause, self.step_button: self.step,
            self.stop_button: self.halt, self.reset_button: self.reset,
        }  # fmt: skip
        live = [lane for lane in self.runs if not lane.recorded]
        labels = [curve.label for curve in figures.curves(self.runs)]
        # One width for the names of all sliders, so that these stand in line where there is room for one a row.
        aligned = _wide(f"{0.55 * (len('lr ') + max(map(len, labels))) + 0.6:.1f}em")
        self.rates = [
            ipywidgets.FloatLogSlider(
                value=lane.recipe.lr, base=10, min=_log10(lane.recipe.lr) - 2, max=_log10(lane.recipe.lr) + 2,
                step=0.05, description=f"lr {label}", continuous_update=False, readout_format=".2g", **aligned,
            )
            for lane, label in zip(self.runs, labels, strict=True)
            if not lane.recorded
        ]  # fmt: skip
        self.batch = None
        if live and not any(lane.recorded for lane in self.runs):
            self.batch = ipywidgets.SelectionSlider(
                options=_batch_sizes(live[0].recipe), value=live[0].recipe.batch_size, description="batch",
                continuous_update=False, **aligned,
            )  # fmt: skip
        self.tensor = ipywidgets.Dropdown(options=[_ALL], description="ratios of", **_wide())
        self.progress = ipywidgets.HTML(layout={"width": "100%", "margin": "2px 0"})
        rows = [ipywidgets.HBox(list(self._buttons), layout=_ROW)]
        sliders = [*self.rates, *([self.batch] if self.batch else [])]
        if sliders:
            rows.append(ipywidgets.HBox(sliders, layout=_ROW))
        choices = [self.tensor]
        self.time = self.play = None
        if self.replay:
            n = self.n_steps
            self.time = ipywidgets.IntSlider(
                value=n, min=0, max=n, description="step", continuous_update=False, **_wide()
            )
            self.play = ipywidgets.Play(value=n, min=0, max=n, step=_stride(n), interval=250, show_repeat=False)
            self._link = ipywidgets.jslink((self.play, "value"), (self.time, "value"))
            choices += [self.time, self.play]
        return [*rows, ipywidgets.HBox(choices, layout=_ROW), self.progress]

    @property
    def n_steps(self) -> int:
        """Steps of the longest run."""
        return max(lane.n_steps for lane in self.runs)

    def plan(self) -> list[Recipe]:
        """What Run would start: each lane's recipe with the sliders' values. InputError where they do not fit."""
        planned, rates = [], iter(self.rates)
        for lane in self.runs:
            if lane.recorded:
                planned.append(lane.recipe)
                continue
            slider = next(rates)
            lr = lane.source.lr if slider.value == lane.source.lr else float(f"{slider.value:.3g}")
            size = self.batch.value if self.batch else lane.source.batch_size
            planned.append(lane.source.replace(lr=lr, batch_size=size))
        return planned

    # -- buttons -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Start, or go on after a pause. Does nothing while it runs."""
        self._go(None)

    def step(self) -> None:
        """One step of each, then pause."""
        self._go(1)

    def pause(self) -> None:
        """Pause after the step that is being taken."""
        if self.state == RUNNING:
            self._pause.set()

    def halt(self) -> None:
        """End the run: within one step of one optimizer. The picture stays."""
        self.stop()
        if self._finished_working() and self.state in (RUNNING, PAUSED):
            self._end(STOPPED)

    def stop(self) -> None:
        """Make the worker end soon."""
        self._stop.set()

    def reset(self) -> None:
        """End the run, clear the picture, set the sliders back."""
        self.stop()
        if not self._finished_working():
            self.say("The last step is still being taken; press Reset again when it is done.")
            return
        for lane in self.runs:
            lane.close()
            lane.records = []
            lane.recipe = lane.source.recipe if lane.recorded else lane.source
        live = [lane for lane in self.runs if not lane.recorded]
        for slider, lane in zip(self.rates, live, strict=True):
            slider.value = lane.source.lr
        if self.batch:
            self.batch.value = live[0].source.batch_size
        self._started, self.position, self.figure = False, 0, None
        self._rounds.clear()
        self._enter(READY)
        self.refresh()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the worker rests and its last picture is drawn, for at most `timeout` seconds. Did it?"""
        worker = self.worker
        if worker is not None:
            worker.join(timeout)
            if worker.is_alive():
                return False
        return self.renderer.flush()

    def close(self) -> None:
        """End threads, close every widget inside."""
        if getattr(self, "_link", None) is not None:
            self._link.close()
            self._link = None
        super().close()
        for lane in getattr(self, "runs", ()):
            lane.close()
        self.figure = None

    # -- the worker ----------------------------------------------------------------------------------------------

    def _go(self, limit):
        if self.state == RUNNING and not self._stop.is_set():
            return
        if not self._finished_working():
            self.say("The last step is still being taken; press again when it is done.")
            return
        if self.replay:
            if self.position >= self.n_steps:
                self.position = 0
            function = partial(self._replay, limit)
        else:
            function = partial(self._train, None if self._started else self.plan(), limit)
        self._stop.clear()
        self._pause.clear()
        before, self._began, self._spent, self._drawn = self.state, _now(), 0.0, -math.inf
        self._enter(RUNNING)
        if not self.work(function):
            self._enter(before)

    def _finished_working(self):
        """Whether no worker is alive, after a moment for one that has been told to stop."""
        if self.worker is not None and (self._stop.is_set() or self._pause.is_set() or self.state != RUNNING):
            self.worker.join(JOIN_SECONDS)
        return self.worker is None or not self.worker.is_alive()

    def _train(self, plan, limit):
        state = FAILED
        try:
            if plan is not None:
                self._open(plan)
            state = self._rounds_until(limit)
        finally:
            if state == PAUSED:
                self._rest(PAUSED)
            else:
                self._end(state)

    def _open(self, plan):
        self.say("Getting the text, building the models …")
        self.position = 0
        self._rounds.clear()
        corpora = {}
        self._started = True
        for lane, recipe in zip(self.runs, plan, strict=True):
            lane.open(recipe, corpora.get(recipe.text))
            corpora[recipe.text] = lane.corpus
            if self._stop.is_set():
                return
        made_up = any(getattr(corpus, "synthetic", False) for corpus in corpora.values())
        self.say("Running, on a made-up text: it says nothing about real ones." if made_up else "Running.")

    def _rounds_until(self, limit) -> str:
        """Steps of every lane in turn until told otherwise; returns the state that this leads to."""
        taken = 0
        while not self._stop.is_set():
            if self._pause.is_set() or taken == limit:
                return PAUSED
            started, moved = _now(), False
            for lane in self.runs:
                if self._stop.is_set():
                    return STOPPED
                moved = lane.step() or moved  # one that diverged or is over waits for the others
            if not moved:
                return DONE
            taken += 1
            self.position += 1
            self._rounds.append(_now() - started)
            if self.position >= self.n_steps:
                return DONE
            if taken != limit and not self._pause.is_set():  # the end of a stretch is drawn by _rest
                self._show_now_and_then()
        return STOPPED

    def _show_now_and_then(self):
        """Between two steps: a picture if one is due, and in any case how far it is, a few times a second."""
        now = _now()
        share = self.budget if now - self._drawn < self.patience else self.limit
        if self._spent <= share * (now - self._began) and self.renderer.ready():
            self.request()
            self.renderer.flush()
        elif now - self._told >= 1 / self.rate:
            self._told = now
            self._tell(self._time_left(self.position))

    def _replay(self, limit):
        state, stride = STOPPED, limit or _stride(self.n_steps)
        try:
            while not self._stop.is_set():
                self.position = min(self.position + stride, self.n_steps)
                state = DONE if self.position == self.n_steps else PAUSED if limit else RUNNING
                if state != RUNNING:
                    return
                self.request()
                if self._pause.wait(REPLAY_SECONDS / 32) or self._stop.is_set():
                    state = PAUSED if self._pause.is_set() and not self._stop.is_set() else STOPPED
                    return
            state = STOPPED
        finally:
            self._rest(state)

    def _end(self, state):
        """The trainings are over, their records stay."""
        for lane in self.runs:
            lane.close()
        self._started = False
        self._rest(state)

    def _rest(self, state):
        self._enter(state)
        self.refresh()  # now: the renderer may still be waiting for its turn

    # -- what is shown -------------------------------------------------------------------------------------------

    def _enter(self, state):
        self.state = state
        busy, under_way = state == RUNNING, state in (RUNNING, PAUSED)
        self.run_button.disabled = self.step_button.disabled = busy
        self.pause_button.disabled = not busy
        self.stop_button.disabled = not under_way
        for control in (*self.rates, *([self.batch] if self.batch else [])):
            control.disabled = under_way
        at = f"step {self.position:,} of {self.n_steps:,}"
        words = {RUNNING: "Running.", PAUSED: f"Paused at {at}.", STOPPED: f"Stopped at {at}.", DONE: f"Done: {at}."}
        words[READY] = "Ready. Press Run, or move the step slider." if self.replay else "Ready. Press Run."
        if state in words:  # after a failure the error stays
            self.say(words[state])
        if not self.replay and state in (READY, STOPPED, DONE):
            self._show_plan()

    def _show_plan(self):
        if self.state in (RUNNING, PAUSED):
            return
        plan = self.plan()
        rates = ", ".join(f"{recipe.optimizer} at lr {recipe.lr:g}" for recipe in plan)
        self._tell(f"Next run: {plan[0].n_steps:,} steps of {plan[0].batch_size} sequences; {rates}.")

    def _to_chosen_time(self):
        if self.time.value != self._sent:
            self.position = self._sent = self.time.value
            self.request()

    def _tell(self, text):
        self.progress.value = f'<div style="line-height: 1.45; min-height: 1.45em">{escape(text)}</div>'

    def refresh(self) -> None:
        """Draw now and show it. What it takes counts against the budget of the run that goes on."""
        began = self._drawn = _now()
        super().refresh()
        self._spent += _now() - began

    def draw(self) -> Figure:
        """The dashboard as it is now."""
        position = self.position
        if self.replay:
            shown = [_View(lane.recipe, _until(lane.source.records, position)) for lane in self.runs]
            if self.time.value != position:
                self._sent = position
                self.time.value = position
            self._tell(f"Showing step {position:,} of {self.n_steps:,}.")
        else:
            shown = [_View(lane.recipe, lane.records[:]) for lane in self.runs]
            if self.state in (RUNNING, PAUSED):
                self._tell(self._time_left(position))
        self._offer_tensors(shown)
        self.figure = figures.dashboard(
            shown, tensor=self.tensor.value or None, until=self.n_steps, live=self.state == RUNNING, figure=self.figure
        )
        return self.figure

    def _time_left(self, position):
        text = f"Step {position:,} of {self.n_steps:,}"
        rounds = list(self._rounds)
        if not rounds:
            return text + "."
        a_step = sum(rounds) / len(rounds)
        return f"{text}; {_seconds(a_step)} a step of all; about {_seconds(a_step * (self.n_steps - position))} left."

    def _offer_tensors(self, shown):
        if len(self.tensor.options) == 1:
            names = figures.ratio_tensors(shown)
            if names:
                self.tensor.options = [_ALL, *((short(name), name) for name in names)]


class _View:
    """What a picture shows of a lane: fixed while the worker goes on."""

    def __init__(self, recipe, records):
        self.recipe, self.records = recipe, records


def _checked(recipes) -> list[Recipe | Run]:
    if recipes is None:
        recipes = [Recipe.named("tiny", optimizer=name) for name in ("AdamW", "LAMB", "MERIT")]
    sources = [recipes] if isinstance(recipes, Recipe | Run) else list(recipes)
    for source in sources:
        if not isinstance(source, Recipe | Run):
            raise InputError(
                f"recipes: got {source!r}, expected Recipes or recorded Runs (merit_lab.runs.read reads a file)"
            )
    if not 1 <= len(sources) <= MOST:
        raise InputError(f"recipes: got {len(sources)}, expected one to {MOST}")
    live = [source for source in sources if isinstance(source, Recipe)]
    for field in SAME:
        values = {repr(getattr(recipe, field)) for recipe in live}
        if len(values) > 1:
            raise InputError(
                f"recipes: got different values of {field} ({', '.join(sorted(values))}); side by side they need the "
                "same, so that weights and batches are the same"
            )
    return sources


def _until(records, position):
    return [record for record in records if record.step <= position]


def _batch_sizes(recipe: Recipe) -> list[int]:
    """Powers of two around the recipe's batch size that leave at least 8 steps, and itself."""
    most = recipe.tokens // recipe.block_size // 8
    sizes = {2**i for i in range(2, 13) if 2**i <= most and recipe.batch_size / 20 < 2**i < recipe.batch_size * 20}
    return sorted(sizes | {recipe.batch_size})


def _stride(n_steps):
    """Steps that replay takes at once: 32 pictures a run."""
    return max(1, -(-n_steps // 32))


def _log10(lr):
    return math.floor(math.log10(lr)) if lr > 0 else -6


def _seconds(seconds):
    if seconds < 1:
        return f"{seconds:.2g} s"
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def _now():
    """Seconds on a clock."""
    return time.monotonic()


def _wide(name="initial"):
    return {"style": {"description_width": name}, "layout": {"width": "330px", "max_width": "100%"}}
