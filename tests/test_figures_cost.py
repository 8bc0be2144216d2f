"""The figures of what a step costs: they draw what was counted and timed, and tell it in words."""

import math

import pytest

from merit_lab import figures
from merit_lab.errors import InputError
from merit_lab.figures import style
from merit_lab.figures.cost import IMPLEMENTATIONS, READ, WRITTEN, Timed

CALLS = {
    "apart": [("mul_", 400, 400), ("view", 0, 0), ("add", 800, 400), ("ne", 4, 1), ("where", 8, 4)],
    "fused": [("pass 1", 1600, 800), ("pass 2", 1200, 400)],
}
POINTS = {
    "AdamW, fused": Timed(14, 28, 2),
    "MERIT, in tiles": Timed(25, 40, 8, 250),
    "MERIT, fused in C": Timed(25, 40, 4),
}


def bars(ax, color):
    """(y, left, width) of the bars of this colour, from the top."""
    found = [p for p in ax.patches if style.mcolors.to_hex(p.get_facecolor()) == color]
    return [(round(p.get_y() + p.get_height() / 2), p.get_x(), p.get_width()) for p in found]


def test_a_bar_an_operation_in_bytes_a_weight():
    apart, fused = figures.operations(CALLS, 100).axes
    assert bars(apart, READ)[:2] == [(0, 0, 4), (-1, 0, 8)]
    assert bars(apart, WRITTEN)[:2] == [(0, 4, 4), (-1, 8, 4)]
    assert bars(fused, READ) == [(0, 0, 16), (-1, 0, 12)]
    assert apart.get_xlabel() == fused.get_xlabel() == "bytes a weight"
    assert apart.get_xlim() == fused.get_xlim() and apart.get_ylim() == fused.get_ylim()


def test_small_operations_stand_together_and_those_that_move_nothing_nowhere():
    apart = figures.operations(CALLS, 100).axes[0]
    assert [label.get_text() for label in apart.get_yticklabels()] == ["mul_", "add", "2 small ones"]
    assert bars(apart, READ)[2][2] == pytest.approx(0.12) and bars(apart, WRITTEN)[2][2] == pytest.approx(0.05)


def test_the_sum_is_in_the_title_and_in_words():
    figure = figures.operations(CALLS, 100)
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["apart: 20.2", "fused: 40"]
    assert "apart 20.2 and fused 40" in figure.alt and "20.2" not in figure.what


@pytest.mark.parametrize("panels, weights, says", [({}, 1, "panels"), ({"a": []}, 1, "panels"), (CALLS, 0, "weights")])
def test_operations_refuse_nothing(panels, weights, says):
    with pytest.raises(InputError, match=says):
        figures.operations(panels, weights)


def artists(figure):
    return figure.drawing.panels[0]._artists


def place(figure, key):
    (x,), (y,) = artists(figure)[key].get_data()
    return x, y


def test_points_lie_at_flops_a_byte_and_flops_a_nanosecond():
    figure = figures.roofline(POINTS, 20, 100)
    assert place(figure, "AdamW, fused") == (0.5, 7)
    assert place(figure, "MERIT, fused in C") == (0.625, 6.25)
    assert place(figure, "MERIT, in tiles") == (0.625, 3.125)
    assert place(figure, ("MERIT, in tiles", "hollow")) == (0.1, 3.125)
    assert ("AdamW, fused", "hollow") not in artists(figure)


def test_the_roof_is_bandwidth_times_intensity_up_to_the_processors_peak():
    figure = figures.roofline(POINTS, 20, 100)
    (low, ridge), (start, end) = artists(figure)["memory"].get_data()
    assert ridge == 5 and end == 100 and start == pytest.approx(20 * low)
    assert list(artists(figure)["processor"].get_ydata()) == [100, 100]
    assert [ax.get_xscale() for ax in figure.axes] == ["log"]
    assert list(artists(figure)["AdamW, fused", "to the roof"].get_ydata()) == [7, 10]
    bounded = figures.roofline({"a": Timed(80, 10, 2)}, 20, 100)  # right of the edge
    assert list(artists(bounded)["a", "to the roof"].get_ydata()) == [40, 100]


def test_without_a_peak_the_roof_is_memory_alone():
    figure = figures.roofline(POINTS, 20)
    assert "processor" not in artists(figure) and "of the processor" not in figure.what


def test_the_words_have_the_share_of_the_roof_and_no_machine_in_what_is_compared():
    figure = figures.roofline(POINTS, 20, 100)
    assert "AdamW, fused 0.5 flops a byte and 7 GFLOP/s, 70 % of the roof" in figure.alt
    fewer = figures.roofline({"AdamW, fused": Timed(14, 28, 3)}, 30, 90)
    assert figure.what == fewer.what
    assert (figure.axes[0].get_xlabel(), figure.axes[0].get_ylabel()) == (
        "arithmetic intensity (flops a byte)", "speed (GFLOP/s)",
    )  # fmt: skip


def test_no_two_implementations_look_alike_and_optimizers_look_as_everywhere():
    looks = IMPLEMENTATIONS.values()
    assert len({look.color for look in looks}) == len({look.marker for look in looks}) == len(looks) == 5
    assert IMPLEMENTATIONS["AdamW, fused"] == style.look("AdamW")
    assert IMPLEMENTATIONS["MERIT, fused in C"] == style.look("MERIT")
    others = {look for name, look in style.LOOKS.items() if name not in ("AdamW", "MERIT", "+ clip")}
    assert not others & set(looks)


@pytest.mark.parametrize("points, bandwidth, peak", [({}, 1, 1), (POINTS, 0, 1), (POINTS, math.nan, 1), (POINTS, 1, 0)])
def test_a_roofline_refuses_what_makes_none(points, bandwidth, peak):
    with pytest.raises(InputError, match="points|bandwidth"):
        figures.roofline(points, bandwidth, peak)


def test_both_can_be_drawn_again_and_stored(tmp_path):
    figure = figures.roofline(POINTS, 20, 100)
    before = figures.png(figure)
    assert figures.roofline(POINTS, 30, 100, figure=figure) is figure
    assert figures.png(figure) != before
    bars_ = figures.operations(CALLS, 100)
    first = figures.png(bars_)
    assert figures.png(figures.operations(CALLS, 100, figure=bars_)) == first
    assert len(bars_.axes[0].patches) == 6
    picture, _ = figures.save(bars_, tmp_path / "operations")
    assert picture.read_bytes()[:4] == b"\x89PNG"
