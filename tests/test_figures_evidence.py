"""The figures of the evidence: they draw what the runs and the claims say, and tell it in words."""

import json
import math
import re

import fakes
import numpy as np
import pytest

from merit_lab import figures
from merit_lab.errors import InputError
from merit_lab.figures import style
from merit_lab.files import data_dir

THREE = ("AdamW", "LAMB", "MERIT")
CLAIMS = {c["id"]: c for c in json.loads((data_dir() / "claims.json").read_text(encoding="utf-8"))["claims"]}
PAPER = CLAIMS["batch-sweep-small"], CLAIMS["peak-mal"]
MODEL = {"SGD": {4: 0.2, 16: 0.3, 64: 0.8}, "Newton": {4: 0.2, 16: 0.2, 64: 0.2}}


def some_runs(diverge=(), **changes):
    """Three optimizers, three batches, two seeds, all at one rate."""
    return [
        fakes.run(name, n_steps=960 // batch, batch_size=batch, seed=seed, **changes,
                  diverge_at=6 if (name, batch, seed) in diverge else None)
        for name in THREE for batch in (16, 32, 64) for seed in (1, 2)
    ]  # fmt: skip


def noise_row(step, gradient_sq, trace):
    return {"tokens": 1000 * step, "noise_gradient_sq": gradient_sq, "noise_trace": trace}


@pytest.fixture(scope="module")
def sizes():
    return {"nano": some_runs(diverge=[("AdamW", 64, 2)]), "micro": some_runs()}


def xy(figure, panel, key):
    """What a line of a panel joins."""
    line = figure.drawing.panels[panel]._artists[key]
    return np.asarray(line.get_xdata(), float), np.asarray(line.get_ydata(), float)


def ends(runs, name, quantity):
    """batch -> the values of the runs that did not diverge."""
    found = {}
    for run in runs:
        if run.recipe.optimizer == name and not run.diverged:
            get = {"val_loss": lambda r: r.final_val_loss, "peak_logit": lambda r: r.peak_logit}[quantity]
            found.setdefault(run.recipe.batch_size, []).append(get(run))
    return found


# -- against batch size ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantity", ["val_loss", "peak_logit"])
def test_each_size_is_drawn_with_means_and_the_paper_beside(sizes, quantity):
    figure = figures.batch_curves(sizes, PAPER)
    row = 3 * (quantity == "peak_logit")
    for column, runs in enumerate(sizes.values()):
        for name in THREE:
            x, y = xy(figure, row + column, name)
            wanted = ends(runs, name, quantity)
            assert list(x) == [16, 32, 64]
            assert y == pytest.approx([np.mean(wanted[batch]) for batch in (16, 32, 64)])
    claim = PAPER[quantity == "peak_logit"]
    for name in THREE:
        x, y = xy(figure, row + 2, name)
        assert list(x) == claim["columns"] and list(y) == claim["values"][name]


def test_a_diverged_seed_is_a_cross_in_its_own_panel_alone(sizes):
    figure = figures.batch_curves(sizes)
    lost = [("AdamW", "lost") in panel._artists for panel in figure.drawing.panels]
    assert lost == [True, False, False, False]


def test_the_sizes_share_their_scales_and_the_paper_has_its_own(sizes):
    small = [run for run in sizes["micro"] if run.recipe.batch_size < 64]
    axes = figures.batch_curves({"nano": small, "micro": sizes["micro"]}, PAPER).axes
    assert axes[1].get_ylim() == axes[0].get_ylim() != axes[2].get_ylim()
    assert axes[4].get_ylim() == axes[3].get_ylim() != axes[5].get_ylim()


def test_the_words_have_the_measured_and_the_papers_numbers(sizes):
    figure = figures.batch_curves(sizes, PAPER)
    for claim in PAPER:
        assert style.say(claim["values"]["MERIT"][-1]) in figure.alt
    for name in THREE:
        assert style.say(np.mean(ends(sizes["micro"], name, "val_loss")[64])) in figure.alt
    assert not re.search(r"\d\.\d", figure.what)


def test_the_best_rate_is_taken():
    runs = some_runs() + some_runs(lr=0.03)  # a rate away from .01 ends higher
    assert xy(figures.batch_curves({"nano": runs}), 0, "MERIT")[1] == pytest.approx(
        xy(figures.batch_curves({"nano": some_runs()}), 0, "MERIT")[1]
    )


@pytest.mark.parametrize("paper", [PAPER[:1], (*PAPER, PAPER[0])])
def test_two_claims_or_none(sizes, paper):
    with pytest.raises(InputError, match="expected none or two"):
        figures.batch_curves(sizes, paper)
    with pytest.raises(InputError, match="sizes: got none"):
        figures.batch_curves({})


# -- what is inherent --------------------------------------------------------------------------------------------


def test_inherent_draws_what_is_lost_from_the_best_on(sizes):
    figure = figures.inherent(sizes["micro"], MODEL, {"noise scale": 40.0}, {"told by it": {64: 0.3, 16: 0.1}})
    assert [list(values) for values in xy(figure, 0, "told by it")] == [[16, 64], [0.1, 0.3]]
    for name in THREE:
        means = [np.mean(losses) for _, losses in sorted(ends(sizes["micro"], name, "val_loss").items())]
        assert xy(figure, 0, name)[1] == pytest.approx(np.array(means) - min(means))
    assert xy(figure, 1, "SGD")[1] == pytest.approx([1, 1.5, 4])
    assert xy(figure, 1, "Newton")[1] == pytest.approx([1, 1, 1])
    assert figure.drawing.panels[0]._artists["noise scale"].get_xdata()[0] == 40
    assert "noise scale 40 sequences" in figure.alt and "told by it 0.3 nats at batch 64" in figure.alt
    assert "SGD 4 times its lowest at batch 64" in figure.alt


def test_a_noise_scale_that_is_not_known_is_not_drawn(sizes):
    figure = figures.inherent(sizes["micro"], MODEL, {"noise scale": math.inf})
    assert "noise scale" not in figure.drawing.panels[0]._artists
    figures.png(figures.inherent(sizes["micro"], MODEL))


@pytest.mark.parametrize("model", [{}, {"SGD": {}}])
def test_inherent_needs_a_model(sizes, model):
    with pytest.raises(InputError, match="model: got none"):
        figures.inherent(sizes["micro"], model)


def test_noise_is_averaged_before_it_is_divided():
    runs = [[noise_row(1, 2.0, 8.0), noise_row(2, 1.0, 9.0)], [noise_row(1, 0.0, 4.0), noise_row(2, -0.5, 3.0)]]
    figure = figures.noise_along({"MERIT": runs}, {"batch 16": 16})
    x, y = xy(figure, 0, "MERIT")
    assert list(x) == [0.001, 0.002] and y == pytest.approx([12 / 2, 12 / 0.5])
    assert list(xy(figure, 0, ("MERIT", 0))[1]) == [4, 9]
    assert list(xy(figure, 0, ("MERIT", 1))[1]) == []  # |G|² at or below 0 twice: no scale of its own
    assert "MERIT 6 at 0.001 million tokens, 24 at 0.002 million" in figure.alt


def test_a_row_without_a_measurement_is_passed_over():
    rows = [noise_row(1, 2.0, 8.0), noise_row(2, None, None)]
    assert list(xy(figures.noise_along({"MERIT": [rows]}), 0, "MERIT")[0]) == [0.001]


@pytest.mark.parametrize("curves", [{}, {"MERIT": []}, {"MERIT": [[noise_row(1, None, None)]]}])
def test_runs_without_noise_are_refused(curves):
    with pytest.raises(InputError, match="no measured noise"):
        figures.noise_along(curves)


# -- against the rate --------------------------------------------------------------------------------------------


def test_what_ends_above_loss_to_leaves_the_picture_and_is_counted():
    runs = [fakes.run("MERIT", lr=lr) for lr in (0.005, 0.01, 0.02)]
    runs[2].records[-1].val_loss = 70.0
    whole, cut = figures.sweep_lr(runs), figures.sweep_lr(runs, loss_to=4.4)
    assert whole.axes[0].get_ylim()[1] > 70 and "out of the picture" not in whole.alt
    assert cut.axes[0].get_ylim()[1] == 4.4 and cut.alt.endswith("Above 4.4 and out of the picture: 1 of MERIT.")
    assert list(xy(cut, 0, "MERIT")[1])[2] == 70  # the line leads there
    inside = figures.sweep_lr(runs[:2], loss_to=4.4)
    assert inside.axes[0].get_ylim()[1] < 4.4 and "out of the picture" not in inside.alt


def test_crosses_stay_in_the_picture_that_ends_at_loss_to():
    runs = [fakes.run("MERIT", lr=lr, diverge_at=30 if lr == 0.04 else None) for lr in (0.005, 0.01, 0.02, 0.04)]
    runs[2].records[-1].val_loss = 70.0
    figure = figures.sweep_lr(runs, loss_to=4.4)
    assert 2.2 < xy(figure, 0, ("MERIT", "lost"))[1][0] < figure.axes[0].get_ylim()[1] < 6


def test_loss_to_below_every_run_is_refused():
    with pytest.raises(InputError, match="loss_to: got 1, below the loss of every run"):
        figures.sweep_lr([fakes.run("MERIT")], loss_to=1)


# -- as pictures -------------------------------------------------------------------------------------------------


def test_words_stand_inside_and_legends_above(sizes):
    for figure in (
        figures.batch_curves(sizes, PAPER),
        figures.inherent(sizes["nano"], MODEL, {"noise scale": 40.0}),
        figures.noise_along({"AdamW": [[noise_row(1, 1, 1)]], "MERIT": [[noise_row(1, 2, 1)]]}, {"batch 1": 1}),
    ):
        figures.png(figure)
        for panel in figure.drawing.panels:
            for text in (panel.ax._left_title, panel.ax.xaxis.label, panel.ax.yaxis.label):
                box = text.get_window_extent()
                assert not text.get_text() or (box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 + 1)
            boxes = [legend.get_window_extent() for legend in figure.legends]
            assert boxes and not any(box.overlaps(panel.ax.get_window_extent()) for box in boxes)
