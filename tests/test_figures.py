"""Figures: what they draw is what the records say, whole, and described."""

import io
import math
import re
import subprocess
import sys
from itertools import pairwise

import fakes
import numpy as np
import pytest
from matplotlib.colors import to_hex
from PIL import Image

from merit_lab import figures
from merit_lab.errors import InputError
from merit_lab.evidence import variant
from merit_lab.figures import style
from merit_lab.figures.curves import _outline, short, some_tensors
from merit_lab.optim import ABLATIONS, LADDER

THREE = ("AdamW", "LAMB", "MERIT")


@pytest.fixture(scope="module")
def runs():
    """Three runs; AdamW diverges at step 50."""
    return [fakes.run("AdamW", diverge_at=50), fakes.run("LAMB"), fakes.run("MERIT")]


@pytest.fixture(scope="module")
def sweep():
    """Two seeds, four rates; AdamW diverges at the largest rate, LAMB there with one seed."""
    return [
        fakes.run(name, seed=seed, lr=lr, diverge_at=40 if lr == 0.05 and (name, seed) in LOST else None)
        for name in THREE
        for seed in (0, 1)
        for lr in (0.002, 0.01, 0.02, 0.05)
    ]


LOST = [("AdamW", 0), ("AdamW", 1), ("LAMB", 1)]
OVER_TIME = [
    figures.loss_and_logit, figures.loss_curves, figures.logit_by_layer, figures.ratio_over_time,
    figures.shares_over_time, figures.entropy_over_time, figures.seeds_band, figures.dashboard,
]  # fmt: skip
MANY = [figures.sweep_lr, figures.sweep_batch, figures.ladder, figures.loss_against_logit]


def artists(figure, panel=0):
    return figure.drawing.panels[panel]._artists


def pixels(figure, fast=False):
    return np.asarray(Image.open(io.BytesIO(figures.png(figure, fast=fast))))


# -- all of them -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def drawn(runs, sweep):
    """Every figure, drawn once: function -> Figure."""
    figures_ = {draw: draw(sweep if draw in MANY else runs) for draw in (*OVER_TIME, *MANY)}
    for figure in figures_.values():
        figures.png(figure)
    return figures_


every_figure = pytest.mark.parametrize("draw", [*OVER_TIME, *MANY], ids=lambda f: f.__name__)


@every_figure
def test_figures_are_described(draw, drawn):
    figure = drawn[draw]
    assert figure.alt.startswith(figure.what) and len(figure.alt) > len(figure.what) + 20
    assert all(name in figure.alt for name in ("LAMB", "MERIT"))
    assert not re.search(r"\d\.\d", figure.what)  # no measured number: notebooks compare it


@pytest.mark.parametrize("draw", [figures.dashboard, figures.ratio_over_time, figures.seeds_band])
def test_a_figure_drawn_again_is_the_same(draw, runs, drawn):
    figure = draw(runs)
    assert draw(runs, figure=figure) is figure
    assert np.array_equal(pixels(figure), pixels(drawn[draw]))


@every_figure
def test_axes_are_named_and_the_ground_is_light(draw, drawn):
    figure = drawn[draw]
    assert to_hex(figure.get_facecolor()) == "#ffffff"
    for panel in figure.drawing.panels:
        assert to_hex(panel.ax.get_facecolor()) == "#ffffff"
    left, bottom = figure.drawing.panels[0].ax, figure.drawing.panels[-1].ax
    assert left.get_ylabel() or draw is figures.ladder  # whose rows are named by their ticks
    assert bottom.get_xlabel() or any(panel.ax.get_xlabel() for panel in figure.drawing.panels)


@every_figure
def test_legends_stand_above_the_panels(draw, drawn):
    figure = drawn[draw]
    for legend in figure.legends:
        box = legend.get_window_extent()
        assert box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1 + 1
        for panel in figure.drawing.panels:
            assert not box.overlaps(panel.ax.get_window_extent())
            title = panel.ax._left_title
            assert not title.get_text() or not box.overlaps(title.get_window_extent())


@every_figure
def test_no_words_are_cut_off_or_overlap_a_neighbour(draw, drawn):
    figure, texts = drawn[draw], []
    for panel in figure.drawing.panels:
        ax = panel.ax
        if ax.get_visible():
            texts += [t for t in (ax._left_title, ax.xaxis.label, ax.yaxis.label) if t.get_text()]
            texts += [t for t in (*ax.get_xticklabels(), *ax.get_yticklabels()) if t.get_text() and _inside(t, ax)]
    boxes = [(t.get_text(), t.get_window_extent()) for t in texts]
    for text, box in boxes:
        assert box.x0 >= -1 and box.y0 >= -1 and box.x1 <= figure.bbox.x1 + 1 and box.y1 <= figure.bbox.y1 + 1, text
    for i, (text, box) in enumerate(boxes):
        for other, second in boxes[i + 1 :]:
            assert not box.padded(-1).overlaps(second.padded(-1)), (text, other)


def _inside(tick, ax):
    x, y = tick.get_position()
    low, high = ax.get_xlim() if tick in ax.get_xticklabels() else ax.get_ylim()
    value = x if tick in ax.get_xticklabels() else y
    return low <= value <= high


def test_nothing_registers_with_pyplot(drawn):
    from matplotlib import pyplot

    assert len(drawn) == 12 and pyplot.get_fignums() == []


def test_the_lab_imports_without_matplotlib():
    code = "import sys, merit_lab, merit_lab.runs, merit_lab.widgets; print('matplotlib' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


# -- looks -------------------------------------------------------------------------------------------------------


def test_every_optimizer_has_its_own_colour_and_marker():
    names = list(LADDER) + list(ABLATIONS)
    assert set(names) <= set(style.LOOKS)
    same = {frozenset({"MERIT", "+ clip"}), frozenset({"+ bound", "MERIT without clip"})}  # the same optimizer
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            if a != b:
                equal = style.look(a) == style.look(b)
                assert equal == (frozenset({a, b}) in same), (a, b)
                assert equal or style.look(a).marker != style.look(b).marker


def test_the_main_three_are_told_apart_without_red_or_green_cones():
    # Viénot, Brettel and Mollon 1999: what a protanope and a deuteranope see, in linear RGB.
    protan = np.array([[0.11238, 0.88762, 0], [0.11238, 0.88762, 0], [0.00401, -0.00401, 1]])
    deutan = np.array([[0.29275, 0.70725, 0], [0.29275, 0.70725, 0], [-0.02234, 0.02234, 1]])
    rgb = {n: np.array([int(style.look(n).color[i : i + 2], 16) / 255 for i in (1, 3, 5)]) ** 2.2 for n in THREE}
    for kind in (protan, deutan):
        seen = {name: np.clip(kind @ color, 0, 1) ** (1 / 2.2) for name, color in rgb.items()}
        for a, b in (("AdamW", "LAMB"), ("AdamW", "MERIT"), ("LAMB", "MERIT")):
            assert np.linalg.norm(seen[a] - seen[b]) > 0.2, (a, b)


def test_an_optimizer_looks_the_same_in_every_figure(runs, sweep):
    for figure in (figures.loss_and_logit(runs), figures.dashboard(runs[2]), figures.sweep_lr(sweep)):
        [line] = [a for key, a in artists(figure).items() if key == "MERIT" or key == ("MERIT", "val")]
        assert (line.get_color(), line.get_marker()) == style.look("MERIT")


@pytest.mark.parametrize(
    ("label", "optimizer"),
    [("MERIT", "MERIT"), ("MERIT, too fast", "MERIT"), ("MERIT l2", "MERIT l2"), ("MERIT l2 (lr 0.1)", "MERIT l2"),
     ("AdamW + QK-norm", "AdamW + QK-norm"), ("AdamW (seed 1)", "AdamW"), ("maxLAMB", "maxLAMB"), ("LAMBDA", None),
     ("paper v5", None), ("bound", None), ("faster than MERIT", None), ("", None)],
)  # fmt: skip
def test_a_label_names_the_optimizer_that_it_begins_with(label, optimizer):
    assert style.optimizer_in(label) == optimizer


def test_no_optimizer_looks_like_a_line_of_none():
    assert not {look.color for look in style.PLAIN} & {look.color for look in style.LOOKS.values()}
    assert len({look.color for look in style.PLAIN}) == len({look.marker for look in style.PLAIN}) == 6


@pytest.mark.parametrize(
    ("value", "words"),
    [(2.0684, "2.07"), (42071.3, "42,100"), (1e-5, "1.00e-5"), (0.00312, "0.00312"), (math.inf, "infinite"),
     (math.nan, "not measured"), (None, "not measured"), (0.0, "0"), (100.0, "100"), (-3.14159, "-3.14")],
)  # fmt: skip
def test_numbers_in_words(value, words):
    assert style.say(value) == words


def test_thinning_keeps_ends_and_peaks():
    y = np.zeros(10_000)
    y[4321], y[7654] = 99, -99
    x, thin = style.thin(np.arange(10_000), y)
    assert len(x) < 700 and {0, 4321, 7654, 9999} <= set(x.astype(int)) and thin.max() == 99 and thin.min() == -99
    x, thin = style.thin([1, 2, 3], [1, math.nan, 3])
    assert list(x) == [1, 3]


@pytest.mark.parametrize(("low", "high"), [(1, 2), (0.3, 200), (0.002, 0.1), (1e-4, 1e6), (95, 105), (8, 1100)])
def test_log_axes_have_enough_ticks_and_not_too_many(low, high):
    figure = style.drawing(None, "test", size=(4, 3)).figure
    panel = figure.drawing.panels[0]
    panel.line("a", [0, 1], [low, high])
    panel.finish(y="log")
    ticks = [t for t in panel.ax.get_yticks() if panel.ax.get_ylim()[0] <= t <= panel.ax.get_ylim()[1]]
    assert 2 <= len(ticks) <= 8


# -- content -----------------------------------------------------------------------------------------------------


def test_loss_and_logit_show_whole_curves(runs):
    figure = figures.loss_and_logit(runs)
    loss, logit = artists(figure), artists(figure, 1)
    for name, run in zip(THREE, runs, strict=True):
        good = [r for r in run.records if math.isfinite(r.train_loss)]
        assert np.allclose(loss[name, "train"].get_ydata(), [r.train_loss for r in good])
        assert np.allclose(loss[name, "train"].get_xdata(), [r.step for r in good])
        val = [r for r in run.records if r.val_loss is not None]
        assert np.allclose(loss[name, "val"].get_ydata(), [r.val_loss for r in val])
        peaks = [r.peak_logit for r in run.records if r.peak_logit is not None]
        assert np.allclose(logit[name].get_ydata(), peaks)
    ax = figure.drawing.panels[1].ax
    assert ax.get_yscale() == "log" and ax.get_ylim()[1] > 100
    assert logit["threshold"].get_ydata()[0] == 100
    for panel in figure.drawing.panels:
        assert panel.ax.get_xlim()[0] < 1 and panel.ax.get_xlim()[1] > 60


def test_divergence_is_marked_where_it_was_last_seen_and_told(runs):
    figure = figures.loss_and_logit(runs)
    cross = artists(figure)["AdamW", "diverged"]
    assert list(cross.get_xdata()) == [49] and cross.get_marker() == "X"
    assert ("LAMB", "diverged") not in artists(figure)
    assert "AdamW diverged at step 50" in figure.alt
    assert "diverged here" in [t.get_text() for t in figure.legends[0].get_texts()]


def test_alternative_text_holds_the_numbers(runs):
    alt = figures.loss_and_logit(runs).alt
    assert f"MERIT {runs[2].final_val_loss:.2f}" in alt and f"MERIT {runs[2].peak_logit:.0f}." in alt
    assert "100 passed at step 42" in alt


def test_runs_of_other_batch_sizes_share_a_token_axis():
    figure = figures.loss_curves([fakes.run("MERIT", 64, batch_size=16), fakes.run("MERIT", 32, batch_size=32)])
    assert figure.axes[0].get_xlabel() == "tokens (million)"
    ends = [a.get_xdata()[-1] for key, a in artists(figure).items() if key[1] == "train"]
    assert ends == pytest.approx([64 * 16 * 32 / 1e6] * 2)
    texts = [t.get_text() for t in figure.legends[0].get_texts()]
    assert texts == ["MERIT (batch 16)", "MERIT (batch 32)"]


def test_runs_of_one_optimizer_differ_in_their_line_and_name():
    figure = figures.loss_curves([fakes.run("MERIT", lr=0.01), fakes.run("MERIT", lr=0.05), fakes.run("LAMB")])
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["MERIT (lr 0.01)", "MERIT (lr 0.05)", "LAMB"]
    a, b = (artists(figure)[f"MERIT (lr {lr})", "val"] for lr in ("0.01", "0.05"))
    assert a.get_color() == b.get_color() and a.get_linestyle() != b.get_linestyle()


def test_a_log_axis_survives_values_that_have_no_logarithm():
    run = fakes.run("MERIT")
    for record in run.records[10:40]:
        if record.max_attention_logit:
            record.max_attention_logit = [[0.0] * 2] * 3
    run.records[-1].max_attention_logit = [[math.inf] * 2] * 3
    low, high = figures.loss_and_logit(run).drawing.panels[1].ax.get_ylim()
    assert low > 0.1 and high < 1e4
    figures.png(figures.logit_growth(run))


def test_growth_shows_layers_or_heads_and_outlines_the_threshold():
    run = fakes.run("AdamW")
    probed = [r for r in run.records if r.max_attention_logit]
    by_layer, by_head = figures.logit_growth(run), figures.logit_growth(run, per_head=True)
    mesh = artists(by_layer)["mesh"].get_array()
    assert np.allclose(mesh, np.array([r.max_attention_logit for r in probed]).max(2).T)
    assert artists(by_head)["mesh"].get_array().shape == (6, len(probed))
    assert len(artists(by_layer)["outline"].get_segments()) > 0
    assert "It stays below 100" in figures.logit_growth(fakes.run("MERIT")).alt
    assert "100 is first passed at step 42" in by_layer.alt


def test_the_outline_encloses_the_mask():
    mask = np.array([[True, False], [True, True]])
    lines = {tuple(sorted(line)) for line in _outline(mask, [0, 1, 2], [0, 1, 2])}
    assert len(lines) == 8 and ((1, 0), (1, 1)) in lines and ((1, 1), (1, 2)) not in lines


def test_the_time_mark_moves_without_a_new_heatmap():
    run = fakes.run("AdamW")
    figure = figures.logit_growth(run, at=3, row=True)
    mesh, first = artists(figure)["mesh"], figure.alt
    figures.logit_growth(run, at=30, row=True, figure=figure)
    assert artists(figure)["mesh"] is mesh and figure.alt != first
    assert list(artists(figure)["at"].get_xdata()) == [30, 30]
    assert np.array_equal(pixels(figure, fast=True), pixels(figures.logit_growth(run, at=30, row=True)))


def test_another_heatmap_replaces_the_first_in_a_live_picture():
    run, other = fakes.run("AdamW"), fakes.run("AdamW")
    for record in other.records:
        if record.max_attention_logit:
            record.max_attention_logit = [[0.9 * z for z in heads] for heads in record.max_attention_logit]
    figure = figures.logit_growth(run)
    first = pixels(figure, fast=True)
    figures.logit_growth(other, figure=figure)
    second = pixels(figure, fast=True)
    assert not np.array_equal(second, first) and np.array_equal(second, pixels(figures.logit_growth(other)))


def test_softmax_row_names_the_place_and_the_weight():
    record = [r for r in fakes.run("AdamW").records if r.largest_logit][-1]
    figure = figures.softmax_row(record)
    share = 100 * record.largest_logit["softmax"][7]
    assert "key 7" in figure.alt and f"that key gets {share:.2g} % of the attention" in figure.alt
    with pytest.raises(InputError, match="not measured"):
        figures.softmax_row(fakes.run("AdamW").records[1])


def test_a_negative_logit_that_is_larger_in_size_is_named_beside_the_row_of_the_largest_z():
    run = fakes.run("AdamW")
    record = [r for r in run.records if r.largest_logit][-1]
    place = record.largest_logit | {"logit": 317.0}
    for size, negative in ((415.0, True), (317.1, False)):  # the second is 317 up to the rounding of records
        record.max_attention_logit = [[size, 1.0], [1.0, 1.0], [1.0, 317.0]]
        record.largest_logit = place
        alt = figures.logit_growth(run, row=True).alt
        assert "is 317 (layer 2, head 1, query 29, key 7)" in alt
        assert ("The largest |z| then, 415, is of a negative logit elsewhere." in alt) == negative
    record.largest_logit, record.max_attention_logit = place | {"logit": -1.0}, [[1.5] * 2] * 3
    assert "The largest |z| then, 1.5, is of a negative logit" in figures.softmax_row(record).alt


def test_long_softmax_rows_are_cheap():
    record = [r for r in fakes.run("AdamW").records if r.largest_logit][-1]
    record.largest_logit["softmax"] = [1 / 1024] * 1024
    figure = figures.softmax_row(record)
    assert len(figure.axes[0].patches) == 0 and len(figure.axes[0].collections) == 1


def test_ratios_show_median_and_quartiles(runs):
    name = "blocks.2.attention.key.weight"
    figure = figures.ratio_over_time(runs, tensors=[name])
    line = artists(figure)["MERIT"]
    expected = [r.ratios[name]["quantiles"] for r in runs[2].records if r.ratios]
    assert np.allclose(line.get_ydata(), [q[2] for q in expected])
    band = artists(figure)["MERIT", "band"].get_paths()[0].vertices
    assert np.isclose(band[:, 1].min(), min(q[1] for q in expected))
    assert np.isclose(band[:, 1].max(), max(q[3] for q in expected))
    assert "AdamW" not in artists(figure) and figure.axes[0].get_title(loc="left") == "layer 2 · W_K"


def test_ratios_of_adamw_or_unknown_tensors_are_refused(runs):
    with pytest.raises(InputError, match="AdamW has none"):
        figures.ratio_over_time(runs[0])
    with pytest.raises(InputError, match=r"got 'nothing', expected some of token_embedding.weight"):
        figures.ratio_over_time(runs, tensors=["nothing"])
    with pytest.raises(InputError, match="AdamW has none"):
        figures.shares_over_time(runs[0])


def test_shares_add_up_to_one(runs):
    figure = figures.shares_over_time(runs[2])
    top = artists(figure)["guarded"].get_paths()[0].vertices[:, 1].max()
    assert top == pytest.approx(1) and figure.axes[0].get_ylim() == (0, 1)
    last = runs[2].records[-1].ratios[fakes.TENSORS[0]]
    assert artists(figure)["clipped"].get_ydata()[-1] == pytest.approx(last["clipped"])
    assert "30 % row ratio, 20 % column ratio and 50 % bound b, 10 % clipped" in figure.alt


def test_a_default_choice_of_tensors():
    assert some_tensors(fakes.TENSORS) == [
        f"blocks.{i}.{part}.weight" for i in (0, 2) for part in ("attention.query", "attention.key", "mlp.expand")
    ]
    assert short("blocks.3.mlp.project.bias") == "layer 3 · MLP out bias"
    assert short("token_embedding.weight") == "token embedding"
    assert some_tensors(["head.weight"]) == ["head.weight"]


def test_entropy_shows_the_lowest_head_and_uniform_attention(runs):
    figure = figures.entropy_over_time(runs)
    tables = [r.attention_entropy for r in runs[2].records if r.attention_entropy]
    assert np.allclose(artists(figure)["MERIT"].get_ydata(), [min(map(min, t)) for t in tables])
    uniform = np.mean(np.log(np.arange(1, fakes.CONTEXT + 1)))
    assert artists(figure)["uniform"].get_ydata()[0] == pytest.approx(uniform)


@pytest.mark.parametrize(("spread", "half"), [("range", 1.0), ("sd", math.sqrt(2))])
def test_seeds_are_a_band(spread, half):
    low, high = fakes.run("MERIT", seed=0), fakes.run("MERIT", seed=1)
    for shift, run in ((-1, low), (1, high)):
        for record in run.records:
            record.val_loss = 5.0 + shift if record.val_loss else None
    figure = figures.seeds_band([low, high], spread=spread)
    assert np.allclose(artists(figure)["MERIT (2 seeds)"].get_ydata(), 5)
    edge = artists(figure)["MERIT (2 seeds)", "band"].get_paths()[0].vertices[:, 1]
    assert edge.min() == pytest.approx(5 - half) and edge.max() == pytest.approx(5 + half)


def test_seeds_that_diverged_are_counted():
    runs = [fakes.run("AdamW", seed=s, diverge_at=30 if s else None) for s in (0, 1)]
    figure = figures.seeds_band(runs)
    assert "1 diverged" in figure.alt
    assert [key for key in artists(figure) if key[1] == "diverged"]
    with pytest.raises(InputError, match="got 'loss', expected one of val_loss"):
        figures.seeds_band(runs, "loss")
    with pytest.raises(InputError, match="got 'all', expected one of range, sd"):
        figures.seeds_band(runs, spread="all")


def test_a_sweep_keeps_diverged_runs_at_the_top(sweep):
    figure = figures.sweep_lr(sweep)
    loss = artists(figure)
    top = max(loss[name].get_ydata().max() for name in THREE)
    assert len(loss["AdamW", "lost"].get_xdata()) == 2 and len(loss["LAMB", "lost"].get_xdata()) == 1
    assert min(loss["AdamW", "lost"].get_ydata()) > top and figure.axes[0].get_ylim()[1] > top
    assert "Diverged: 2 of AdamW and 1 of LAMB." in figure.alt
    assert figure.axes[0].get_xscale() == "log"


def test_a_sweep_rings_the_best_rate_and_says_when_it_stands_at_the_edge(sweep):
    figure = figures.sweep_lr(sweep)
    assert list(artists(figure)["MERIT", "best"].get_xdata()) == [0.01]
    assert "MERIT 2.13 at lr 0.01" in figure.alt and "edge" not in figure.alt
    edge = figures.sweep_lr([run for run in sweep if run.recipe.lr >= 0.01])
    assert "at lr 0.01, the edge of its grid" in edge.alt


def test_a_rate_at_which_a_seed_diverged_is_not_the_best():
    runs = [fakes.run("MERIT", seed=s, lr=lr, diverge_at=9 if (s, lr) == (1, 0.01) else None)
            for s in (0, 1) for lr in (0.005, 0.01)]  # fmt: skip
    assert "at lr 0.005" in figures.sweep_lr(runs).alt
    assert "at lr 0.005" in figures.ladder(runs).alt


def test_batches_are_compared_each_at_its_best_rate():
    runs = [fakes.run(name, 640 // batch, lr=lr, batch_size=batch)
            for name in THREE for lr in (0.003, 0.01) for batch in (16, 32, 64)]  # fmt: skip
    figure = figures.sweep_batch(runs)
    data = figures.table(runs)
    best = data[(data.optimizer == "MERIT") & (data.lr == 0.01)]
    assert np.allclose(artists(figure)["MERIT"].get_ydata(), best.val_loss)
    assert list(artists(figure)["MERIT"].get_xdata()) == [16, 32, 64]
    several = figures.sweep_lr(runs)
    assert len(several.drawing.panels) == 6
    assert len({panel.ax.get_ylim() for panel in several.drawing.panels[:3]}) == 1  # one scale


def test_table_says_what_the_runs_say(sweep):
    data = figures.table(sweep)
    assert len(data) == len(sweep) and data.diverged.sum() == 3
    assert np.isinf(data.val_loss[data.diverged]).all()
    assert data.val_loss[0] == sweep[0].final_val_loss and data.peak_logit[0] == sweep[0].peak_logit


def test_every_run_is_a_point_of_loss_against_logit(sweep):
    figure = figures.loss_against_logit(sweep)
    points = sum(len(a.get_xdata()) for key, a in artists(figure).items() if key in THREE or key[-1] == "lost")
    assert points == len(sweep) and "over 21 runs" in figure.alt


def test_joined_points_go_from_rate_to_rate_at_the_mean_over_seeds(sweep):
    data = figures.table(sweep)
    path = artists(figures.loss_against_logit(sweep, joined=True))["MERIT", "path"]
    means = data[data.optimizer == "MERIT"].groupby("lr").val_loss.mean()  # rising rates
    assert len(means) == 4 and np.allclose(path.get_ydata(), means)
    assert ("MERIT", "path") not in artists(figures.loss_against_logit(sweep))


def test_runs_beyond_the_end_of_the_axis_are_counted(sweep):
    data = figures.table(sweep)
    beyond = int((data.peak_logit > 200).sum())
    figure = figures.loss_against_logit(sweep, up_to=200)
    assert 0 < beyond < len(data) and f"{beyond} runs lie beyond" in figure.axes[0].get_title(loc="left")
    assert figure.axes[0].get_xlim()[1] < data.peak_logit.max() and f"{beyond} have a logit beyond 200" in figure.alt
    assert "beyond" not in figures.loss_against_logit(sweep, up_to=1e9).alt


VARIANTS = ["AdamW + QK-norm", "LAMB + QK-norm", "MERIT + QK-norm", "AdamW + QK-clip", "LAMB + fused QKV",
            "MERIT + fused QKV"]  # fmt: skip


def test_a_variant_is_an_optimizer_of_its_own():
    pairs = [(name, fakes.run("AdamW", seed=seed)) for name in ("AdamW", *VARIANTS) for seed in (0, 1)]
    assert list(dict.fromkeys(figures.table(pairs).optimizer)) == ["AdamW", *VARIANTS]
    for figure in (figures.ladder(pairs), figures.loss_against_logit(pairs)):
        lines = [artist for artist in artists(figure).values() if hasattr(artist, "get_marker")]
        drawn = {(line.get_color(), line.get_marker()) for line in lines}
        assert {style.look(name) for name in VARIANTS} <= drawn
        assert all(name in figure.alt for name in VARIANTS)
    [other] = figures.curves([("the same, called otherwise", fakes.run("LAMB"))])
    assert other.optimizer == "LAMB"  # a label that names no optimizer changes nothing


def test_variants_are_named_as_the_evidence_names_them():
    recipes = [fakes.recipe(name, model=fakes.MODEL | {"qk_norm": True}) for name in THREE]
    recipes += [fakes.recipe("AdamW", qk_clip=5.0)]
    recipes += [fakes.recipe(name, model=fakes.MODEL | {"fused_qkv": True}) for name in ("LAMB", "MERIT")]
    assert [variant({"optimizer": r.optimizer, "recipe": r.to_dict()}) for r in recipes] == VARIANTS
    assert len({style.look(name) for name in style.LOOKS}) == len(style.LOOKS) - 2  # + clip, + bound: two names each


# -- what figures take -------------------------------------------------------------------------------------------


def test_runs_are_taken_in_every_form(runs):
    run = runs[2]
    expected = figures.loss_curves(run).alt
    for form in ([run], (run,), [("MERIT", run.records)], {"MERIT": run}, ("MERIT", run), iter([run])):
        assert figures.loss_curves(form).alt == expected
    assert figures.curves(run.records)[0].label == "run"
    [curve] = figures.curves([("MERIT without clip, again", run.records)])
    assert curve.optimizer == "MERIT without clip"
    assert figures.curves(figures.curves(run)[0])[0].label == "MERIT"


@pytest.mark.parametrize(
    ("form", "message"),
    [([], "got none"), ("a.jsonl", "got 'a.jsonl'"), ([3], "got 3"), (None, "got None"), ([("a", [1])], "list of int")],
)
def test_what_is_no_run_is_refused(form, message):
    with pytest.raises(InputError, match=message):
        figures.loss_curves(form)


def test_a_run_with_no_record_yet_can_be_drawn():
    run = fakes.run("MERIT")
    run.records = []
    for draw in (figures.loss_and_logit, figures.dashboard, figures.entropy_over_time, figures.loss_curves):
        figure = draw(run)
        figures.png(figure)
        assert "Nothing was measured yet" in figure.alt
    with pytest.raises(InputError, match="no attention logits"):
        figures.logit_growth(run)


# -- live --------------------------------------------------------------------------------------------------------


def test_a_live_picture_is_the_same_as_one_drawn_at_once():
    whole = [fakes.run(name, diverge_at=50 if name == "AdamW" else None) for name in THREE]
    figure = None
    for at in (0, 1, 30, 45, 60):
        views = [(name, run.records[:at]) for name, run in zip(THREE, whole, strict=True)]
        figure = figures.dashboard(views, until=60, live=True, figure=figure)
        live, alone = figures.png(figure, fast=True), figures.png(figure)
        assert np.array_equal(*(np.asarray(Image.open(io.BytesIO(p))) for p in (live, alone))), at
    assert figure.alt == figures.dashboard([(n, r.records) for n, r in zip(THREE, whole, strict=True)]).alt


def test_a_live_picture_keeps_its_axes_while_they_suit():
    run, limits, figure = fakes.run("MERIT", 200), [], None
    for at in range(4, 201, 4):
        figure = figures.dashboard(("MERIT", run.records[:at]), until=200, live=True, figure=figure)
        panels = figure.drawing.panels
        limits.append([panel.ax.get_ylim() for panel in panels] + [panel.ax.get_xlim() for panel in panels])
        for panel in panels[:2]:
            for line in panel.moving():
                if hasattr(line, "get_ydata") and len(line.get_xdata()) > 2:
                    low, high = panel.ax.get_ylim()
                    assert low <= min(line.get_ydata()) and max(line.get_ydata()) <= high
    changes = sum(a != b for a, b in pairwise(limits))
    assert changes <= 15 and len({tuple(map(tuple, now[4:])) for now in limits}) == 1


def test_redrawing_does_not_pile_up_artists(runs):
    figure = figures.dashboard(runs)
    count = [len(panel.ax.get_children()) for panel in figure.drawing.panels]
    for _ in range(5):
        figures.dashboard(runs, figure=figure)
    assert [len(panel.ax.get_children()) for panel in figure.drawing.panels] == count
    growth, another = figures.logit_growth(runs[0], at=3, row=True), fakes.run("AdamW", seed=1)
    count = [len(ax.get_children()) for ax in growth.axes]
    for run, at in ((runs[0], 6), (another, 9), (runs[0], 12)):
        figures.logit_growth(run, at=at, row=True, figure=growth)
    assert [len(ax.get_children()) for ax in growth.axes] == count


# -- output ------------------------------------------------------------------------------------------------------


def test_show_displays_a_png_with_alternative_text(runs, monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda *args, **kwargs: shown.append((args, kwargs)))
    figure = figures.loss_and_logit(runs)
    assert figures.show(figure) is None
    figures.show(figure, alt="my own words, as long as I like")
    (data,), how = shown[0]
    assert how["raw"] is True and how["metadata"] == {"image/png": {"alt": figure.alt}}
    assert set(data) == {"image/png", "text/plain"}
    assert data["image/png"].startswith(b"\x89PNG") and data["text/plain"] == figure.what
    assert shown[1][1]["metadata"]["image/png"]["alt"] == "my own words, as long as I like"


def test_a_figure_without_alternative_text_is_not_shown():
    from matplotlib.figure import Figure

    with pytest.raises(InputError, match="alternative text"):
        figures.show(Figure())


def test_save_writes_the_same_png_and_pdf_each_time(tmp_path, runs):
    first = figures.save(figures.logit_growth(runs[0], row=True), tmp_path / "a" / "growth_lr0.05")
    second = figures.save(figures.logit_growth(runs[0], row=True), tmp_path / "b.png")
    assert [p.name for p in first] == ["growth_lr0.05.png", "growth_lr0.05.pdf"]
    assert [p.name for p in second] == ["b.png", "b.pdf"]
    for a, b in zip(first, second, strict=True):
        assert a.read_bytes() == b.read_bytes()
    assert first[1].read_bytes().startswith(b"%PDF") and b"CreationDate" not in first[1].read_bytes()
    assert len(list((tmp_path / "a").iterdir())) == 2  # no temporary file stays


def test_a_saved_pdf_holds_the_curves(tmp_path, runs):
    """What live pictures draw apart, on top of the rest, must not be missing on paper."""
    figure = figures.loss_curves(runs)
    _, whole = figures.save(figure, tmp_path / "whole")
    for line in figure.drawing.panels[0].moving():
        line.set_visible(False)
    _, empty = figures.save(figure, tmp_path / "empty")
    assert len(whole.read_bytes()) > len(empty.read_bytes()) + 500
