"""LiveTraining without a browser: traits, clicks, threads, frames."""

import base64
import gc
import re
import threading
import time
from html import escape, unescape
from itertools import pairwise

import fakes
import ipywidgets
import pytest
from matplotlib.figure import Figure

from merit_lab import figures
from merit_lab.errors import InputError
from merit_lab.widgets import LiveTraining, live

THREE = ("AdamW", "LAMB", "MERIT")


@pytest.fixture
def trainings(monkeypatch):
    """Fake trainings in place of real ones. They are kept in .made, and a test sets seconds and fail_at."""

    class Training(fakes.Training):
        def __init__(self, recipe, corpus=None):
            super().__init__(recipe, corpus)
            self.made.append(self)

    Training.made = []
    monkeypatch.setattr(live, "train", Training)
    return Training


@pytest.fixture(autouse=True)
def quick_pictures(request, monkeypatch):
    """Small pictures that say what they were asked to show: matplotlib is slow. Not in tests marked real_pictures."""

    def dashboard(runs, *, tensor=None, until=None, live=False, figure=None):
        figure = figure or Figure(figsize=(0.5, 0.5))
        shown = [(r.recipe.optimizer, r.recipe.lr, len(r.records), r.records[-1:]) for r in runs]
        figure.alt = f"{shown}, {tensor}, until {until}".replace("'", "")
        figure.set_facecolor((hash(figure.alt) % 256 / 255, hash(figure.alt) // 256 % 256 / 255, 0))
        return figure

    if "real_pictures" not in request.fixturenames:
        monkeypatch.setattr(live.figures, "dashboard", dashboard)


@pytest.fixture
def real_pictures():
    """For a test that needs the dashboard's own pictures."""


@pytest.fixture
def dashboard(trainings):
    """Makes dashboards, and closes them after the test."""
    made = []

    def make(n_steps=60, names=THREE, **changes):
        made.append(LiveTraining([fakes.recipe(name, n_steps, **changes) for name in names]))
        return made[-1]

    yield make
    for widget in made:
        widget.close()


def replayed(n_steps=60, **changes):
    return LiveTraining([fakes.run(name, n_steps, **changes) for name in THREE])


def until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.005)


def lab_threads():
    return [t for t in threading.enumerate() if t.name.startswith("merit_lab")]


def figures_alive():
    gc.collect()
    return sum(type(x) is Figure for x in gc.get_objects())


def widgets_open():
    return len(ipywidgets.widgets.widget._instances)


def words(html):
    return unescape(re.sub("<[^>]+>", "", html.value))


def steps(widget):
    return [len(lane.records) for lane in widget.runs]


# -- buttons and sliders -----------------------------------------------------------------------------------------


def test_run_goes_to_the_end_with_the_records_of_the_trainings(dashboard):
    widget = dashboard()
    widget.run_button.click()
    assert widget.wait(20)
    assert widget.state == "done" and steps(widget) == [60, 60, 60]
    assert [r.to_dict() for r in widget.runs[2]] == [r.to_dict() for r in fakes.run("MERIT")]
    assert "Done: step 60 of 60" in words(widget.status)


def test_the_picture_is_that_of_the_same_runs_recorded(dashboard, real_pictures):
    widget = dashboard()
    widget.run_button.click()
    assert widget.wait(20)
    recorded = figures.dashboard([fakes.run(name) for name in THREE], until=60)
    assert widget.alt == recorded.alt
    assert figures.png(figures.dashboard(widget.runs, until=60)) == figures.png(recorded)


def test_step_takes_one_step_of_each(dashboard, trainings):
    widget = dashboard()
    for count in (1, 2, 3):
        widget.step_button.click()
        assert widget.wait(20)
        assert steps(widget) == [count] * 3 and widget.state == "paused"
    assert len(trainings.made) == 3  # the same trainings went on


def test_optimizers_go_in_lockstep(dashboard, trainings):
    widget, order = dashboard(n_steps=5), []
    trainings.stepped = staticmethod(lambda t: order.append((t.at, t.recipe.optimizer)))
    widget.run_button.click()
    assert widget.wait(20)
    assert order == [(step, name) for step in range(1, 6) for name in THREE]


def test_pause_rests_and_run_goes_on(dashboard, trainings):
    trainings.seconds = 0.005
    widget = dashboard(n_steps=40)
    widget.run_button.click()
    until(lambda: steps(widget)[2] >= 3)
    widget.pause_button.click()
    assert widget.wait(20)
    paused = steps(widget)
    assert widget.state == "paused" and len(set(paused)) == 1 and paused[0] < 40
    assert "Paused at step" in words(widget.status)
    picture = widget.picture.value
    time.sleep(0.1)
    assert steps(widget) == paused and widget.picture.value == picture
    widget.run_button.click()
    assert widget.wait(20)
    assert steps(widget) == [40] * 3 and len(trainings.made) == 3


def test_stop_takes_effect_within_one_step(dashboard, trainings):
    trainings.seconds = 0.05
    widget, order = dashboard(), []
    trainings.stepped = staticmethod(lambda t: order.append(t.at))
    widget.run_button.click()
    until(lambda: len(order) >= 4)
    widget.stop()
    at = len(order)
    assert widget.wait(20)
    assert len(order) <= at + 1
    assert widget.state == "stopped" and trainings.open == 0
    assert "Stopped at step" in words(widget.status) and widget.png is not None


def test_run_after_stop_starts_anew(dashboard, trainings):
    trainings.seconds = 0.002
    widget = dashboard(n_steps=30)
    widget.run_button.click()
    until(lambda: steps(widget)[2] >= 2)
    widget.stop_button.click()
    widget.run_button.click()
    assert widget.wait(20)
    assert steps(widget) == [30] * 3 and len(trainings.made) == 6 and trainings.open == 0


def test_stop_while_paused(dashboard, trainings):
    widget = dashboard()
    widget.step_button.click()
    assert widget.wait(20)
    widget.stop_button.click()
    assert widget.state == "stopped" and trainings.open == 0 and steps(widget) == [1] * 3


def test_a_second_run_leaves_one_worker(dashboard, trainings):
    trainings.seconds = 0.02
    widget = dashboard()
    for _ in range(3):
        widget.run()
        widget.run_button.click()
    workers = [t for t in lab_threads() if "renderer" not in t.name]
    assert len(workers) == 1 and len(trainings.made) == 3
    widget.halt()
    for training in trainings.made:
        assert len(training.threads) <= 1


def test_reset_clears_and_sets_sliders_back(dashboard):
    widget = dashboard()
    before = widget.alt
    widget.rates[0].value, widget.batch.value = 0.05, 32
    widget.run_button.click()
    assert widget.wait(20)
    assert widget.alt != before
    widget.reset_button.click()
    assert widget.state == "ready" and steps(widget) == [0, 0, 0] and widget.alt == before
    assert widget.rates[0].value == 0.01 and widget.batch.value == 16


def test_sliders_decide_the_next_run_and_rest_while_it_runs(dashboard, trainings):
    widget = dashboard(n_steps=40)
    sliders = [*widget.rates, widget.batch]
    assert not any(s.disabled for s in sliders) and not any(s.continuous_update for s in sliders)
    widget.rates[1].value = 0.0421
    widget.batch.value = 32
    assert "Next run: 20 steps of 32 sequences; AdamW at lr 0.01, LAMB at lr 0.0421" in words(widget.progress)
    widget.step_button.click()
    assert widget.wait(20)
    assert all(s.disabled for s in sliders)
    made = [(t.recipe.lr, t.recipe.batch_size) for t in trainings.made]
    assert made == [(0.01, 32), (0.0421, 32), (0.01, 32)]
    widget.stop_button.click()
    assert not any(s.disabled for s in sliders)


def test_buttons_that_would_do_nothing_are_disabled(dashboard, trainings):
    trainings.seconds = 0.02
    widget = dashboard()
    buttons = (widget.run_button, widget.pause_button, widget.step_button, widget.stop_button, widget.reset_button)
    assert [b.disabled for b in buttons] == [False, True, False, True, False]
    widget.run_button.click()
    assert [b.disabled for b in buttons] == [True, False, True, False, False]
    widget.pause_button.click()
    assert widget.wait(20)
    assert [b.disabled for b in buttons] == [False, True, False, False, False]


def test_the_tensor_is_chosen_once_ratios_are_known(dashboard, real_pictures):
    widget = dashboard()
    assert [label for label, _ in widget.tensor.options] == ["all tensors"] and widget.tensor.label == "all tensors"
    widget.run_button.click()
    assert widget.wait(20)
    before = widget.png
    widget.tensor.value = "blocks.1.attention.key.weight"
    assert widget.wait(20)
    assert ("layer 1 · W_K", "blocks.1.attention.key.weight") in widget.tensor.options
    assert widget.png != before


def test_a_run_that_diverges_waits_for_the_others(dashboard, trainings, real_pictures):
    class Diverging(trainings):
        def __next__(self):
            record = super().__next__()
            if self.recipe.optimizer == "AdamW" and self.at == 10:
                record.diverged, record.train_loss = True, float("nan")
                self.close()
            return record

    live.train = Diverging
    widget = dashboard(n_steps=30)
    widget.run_button.click()
    assert widget.wait(20)
    assert steps(widget) == [10, 30, 30] and widget.state == "done"
    assert "AdamW diverged at step 10" in widget.alt


def test_time_left_is_told(dashboard, trainings):
    trainings.seconds = 0.01
    widget = dashboard()
    widget.run_button.click()
    until(lambda: "left" in words(widget.progress))
    assert re.fullmatch(r"Step \d+ of 60; [\d.]+ s a step of all; about [\d.]+ s left\.", words(widget.progress))


# -- frames, threads, figures ------------------------------------------------------------------------------------


def test_at_most_four_frames_a_second(dashboard, trainings, real_pictures):
    trainings.seconds = 0.003
    widget = dashboard(n_steps=100_000, names=("MERIT",))
    widget.budget = 1.0  # so that the rate alone holds it back
    draw, began = widget.renderer.draw, []
    widget.renderer.draw = lambda: (began.append(time.monotonic()), draw())
    before = widget.frames
    widget.run_button.click()
    until(lambda: len(began) >= 6, 150)
    widget.halt()
    assert len(widget.runs[0].records) > 6 * 8  # it was asked far more often
    assert widget.frames - before <= len(began) + 1  # the last one, at the end
    assert min(b - a for a, b in pairwise(began)) > 0.249


@pytest.mark.parametrize(("cost", "fewest", "most"), [(0.02, 50, 70), (0.1, 12, 17), (1.0, 2, 4)])
def test_pictures_take_a_small_share_of_the_run(dashboard, trainings, monkeypatch, cost, fewest, most):
    """40 seconds of training in steps of a tenth: 3 % are 1.2 seconds. Every 3 seconds there is one, up to 4 %."""
    clock, drawn = [0.0], []
    monkeypatch.setattr(live, "_now", lambda: clock[0])

    def tick(training):
        clock[0] += 0.1

    def slow():
        drawn.append(clock[0])
        clock[0] += cost
        return draw()

    trainings.stepped = staticmethod(tick)
    widget = dashboard(n_steps=400, names=("MERIT",))
    widget.request = widget.refresh  # at once, in the worker: the real clock plays no part
    draw, widget.draw = widget.draw, slow
    widget.run_button.click()
    assert widget.wait(20) and widget.state == "done"
    assert drawn[-1] == clock[0] - cost  # at rest there is one in any case
    assert fewest <= len(drawn) <= most and (len(drawn) - 2) * cost <= 0.04 * clock[0]
    assert drawn[0] < 0.2  # the first is not waited for
    assert max(b - a for a, b in pairwise(drawn)) < max(widget.patience, cost / 0.04) + 0.3
    assert sum(at >= 20 for at in drawn) >= fewest // 2  # not all at the start


def test_what_a_picture_takes_is_counted(dashboard, real_pictures):
    widget = dashboard()
    before = widget._spent
    began = time.monotonic()
    widget.refresh()
    assert 0 < widget._spent - before <= time.monotonic() - began


def test_no_step_is_taken_while_a_picture_is_drawn(dashboard):
    widget, seen = dashboard(n_steps=10**6), []
    widget.budget = 1.0
    draw = widget.draw

    def slow():
        before = steps(widget)
        time.sleep(0.05)
        seen.append(steps(widget) == before)
        return draw()

    widget.draw = slow
    widget.run_button.click()
    until(lambda: len(seen) >= 3)
    widget.halt()
    assert all(seen[:3])


def test_progress_is_told_between_pictures(dashboard, trainings):
    trainings.seconds = 0.005
    widget, told = dashboard(n_steps=10**4), set()
    widget.budget = widget.limit = 0.0  # the first picture, and no other
    before = widget.frames
    widget.run_button.click()
    until(lambda: told.add(words(widget.progress)) or sum("a step of all" in text for text in told) >= 3)
    assert widget.frames == before + 1
    widget.halt()


def test_twenty_cycles_leave_no_thread_and_no_figure(dashboard, trainings, real_pictures):
    trainings.seconds = 0.001
    widget = dashboard()
    widget.step_button.click()
    assert widget.wait(20)
    until(lambda: not lab_threads())
    alive, children = figures_alive(), widgets_open()
    for _ in range(20):
        widget.run_button.click()
        widget.stop_button.click()
    assert widget.wait(20)
    until(lambda: not lab_threads())
    assert figures_alive() == alive and widgets_open() == children and trainings.open == 0


def test_close_ends_everything(trainings):
    trainings.seconds = 0.01
    before, widgets = figures_alive(), widgets_open()
    widget = LiveTraining([fakes.recipe("MERIT", 1000)])
    widget.run_button.click()
    until(lambda: steps(widget)[0] >= 2)
    widget.close()
    until(lambda: not lab_threads())
    taken = steps(widget)
    assert trainings.open == 0 and widgets_open() == widgets
    time.sleep(0.05)
    assert steps(widget) == taken
    widget.close()  # again does nothing
    widget = None
    assert figures_alive() == before


# -- errors ------------------------------------------------------------------------------------------------------


def test_an_error_is_shown_whole_and_the_last_picture_stays(dashboard, trainings):
    trainings.fail_at = 12
    widget = dashboard()
    widget.run_button.click()
    assert widget.wait(20)
    assert widget.state == "failed" and trainings.open == 0
    assert "RuntimeError: the step <12> failed & so on" in words(widget.status)
    assert "__next__" in widget.status.value  # where
    assert 'role="status"' in widget.status.value  # read out politely
    assert steps(widget) == [11, 11, 11] and "AdamW" in widget.alt and widget.png is not None
    trainings.fail_at = None
    widget.run_button.click()
    assert widget.wait(20)
    assert widget.state == "done" and widget.error is None


def test_an_error_while_it_starts(dashboard, monkeypatch):
    def refuse(recipe, corpus=None):
        raise InputError("text: cannot be had")

    monkeypatch.setattr(live, "train", refuse)
    widget = dashboard()
    widget.run_button.click()
    assert widget.wait(20)
    assert widget.state == "failed" and "Error: text: cannot be had" in words(widget.status)
    assert not widget.run_button.disabled


@pytest.mark.parametrize(
    ("recipes", "message"),
    [
        ([], "got 0, expected one to 4"),
        (["MERIT"], "got 'MERIT', expected Recipes or recorded Runs"),
        (lambda: [fakes.recipe() for _ in range(5)], "got 5, expected one to 4"),
        (lambda: [fakes.recipe(), fakes.recipe(seed=1)], "different values of seed"),
        (lambda: [fakes.recipe(), fakes.recipe(batch_size=32)], "different values of batch_size"),
    ],
)
def test_what_cannot_be_shown_is_refused(recipes, message):
    with pytest.raises(InputError, match=message):
        LiveTraining(recipes() if callable(recipes) else recipes)


# -- replay ------------------------------------------------------------------------------------------------------


def test_recorded_runs_are_shown_whole_at_first(real_pictures):
    widget = replayed()
    try:
        assert widget.alt == figures.dashboard([fakes.run(name) for name in THREE], until=60).alt
        assert widget.rates == [] and widget.batch is None and widget.time.value == 60
    finally:
        widget.close()


def test_the_time_slider_shows_what_was_known_then(real_pictures):
    widget = replayed()
    try:
        widget.time.value = 24
        assert widget.wait(20)
        runs = [fakes.run(name) for name in THREE]
        for run in runs:
            run.records = run.records[:24]
        assert widget.alt == figures.dashboard(runs, until=60).alt
        assert "Showing step 24 of 60" in words(widget.progress)
        widget.step_button.click()
        assert widget.wait(20)
        assert widget.position == widget.time.value == 25
    finally:
        widget.close()


def test_replay_runs_pauses_stops_and_ends(monkeypatch):
    monkeypatch.setattr(live, "REPLAY_SECONDS", 0.8)
    widget = replayed(n_steps=64)
    try:
        whole = widget.alt
        widget.run_button.click()
        until(lambda: widget.position >= 6)
        widget.pause_button.click()
        assert widget.wait(20)
        assert widget.state == "paused" and 6 <= widget.position < 64 and widget.time.value == widget.position
        widget.run_button.click()
        assert widget.wait(20)
        assert widget.state == "done" and widget.alt == whole
        widget.run_button.click()  # from the start again
        until(lambda: 0 < widget.position < 64)
        widget.stop_button.click()
        assert widget.state == "stopped" and widget.position < 64
        widget.reset_button.click()
        assert widget.position == widget.time.value == 0
        until(lambda: not lab_threads())
    finally:
        widget.close()


def test_play_and_slider_are_linked_in_the_browser():
    widget = replayed()
    try:
        assert widget._link.source == (widget.play, "value") and widget._link.target == (widget.time, "value")
        assert (widget.play.min, widget.play.max) == (widget.time.min, widget.time.max) == (0, 60)
        assert widget.play.interval >= 250  # no more than 4 pictures a second
    finally:
        widget.close()


def test_live_beside_recorded(trainings):
    widget = LiveTraining([fakes.run("AdamW", 20), fakes.recipe("MERIT", 30)])
    try:
        widget.run_button.click()
        assert widget.wait(20)
        assert steps(widget) == [20, 30] and len(trainings.made) == 1 and widget.time is None
    finally:
        widget.close()


# -- real trainings ----------------------------------------------------------------------------------------------


def test_all_start_from_the_same_weights_and_see_the_same_batches():
    model = {key: value for key, value in fakes.MODEL.items() if key != "vocab_size"}
    widget = LiveTraining([fakes.recipe(name, 3, model=model) for name in THREE])
    try:
        widget.step_button.click()
        assert widget.wait(60), widget.status.value
        corpora = {id(lane.corpus) for lane in widget.runs}
        widget.run_button.click()
        assert widget.wait(60) and widget.state == "done", widget.status.value
        first = {lane.records[0].train_loss for lane in widget.runs}
        last = {lane.records[-1].train_loss for lane in widget.runs}
        assert len(first) == 1 and len(last) == 3
        assert len(corpora) == 1  # the text is read once
    finally:
        widget.close()


# -- display -----------------------------------------------------------------------------------------------------


def test_a_saved_notebook_holds_the_picture(dashboard, real_pictures):
    bundle = dashboard()._repr_mimebundle_()
    data = bundle[0] if isinstance(bundle, tuple) else bundle
    picture = data["image/png"]
    picture = base64.b64decode(picture) if isinstance(picture, str) else picture
    assert picture.startswith(b"\x89PNG") and "0x" not in data["text/plain"]


def test_every_control_has_a_name(dashboard):
    for widget in (dashboard(), replayed()):
        for button in (widget.run_button, widget.pause_button, widget.step_button, widget.stop_button):
            assert button.description and button.tooltip
        for control in (*widget.rates, widget.tensor, widget.batch, widget.time):
            assert control is None or control.description
        assert f'alt="{escape(widget.alt)}"' in widget.picture.value and words(widget.sentence) == widget.alt
        widget.close()


def test_one_line_is_enough(trainings):
    widget = LiveTraining()
    assert [lane.recipe.optimizer for lane in widget.runs] == list(THREE)
    widget.close()
