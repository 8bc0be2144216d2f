"""The small figures of worked examples: what they draw, say and refuse."""

import pytest
import torch

from merit_lab import figures
from merit_lab.errors import InputError

PANELS = {"a": {"x": [1.0, 2.0, 3.0], "y": ([2, 4], [5.0, 7.0])}, "b": {"y": [0.1, 0.2]}}


def drawn(figure, panel):
    """Label-less: the (x, y) of each line in a panel, in order."""
    lines = [line for line in figure.axes[panel].get_lines() if len(set(line.get_ydata())) > 1]
    return [(list(line.get_xdata()), list(line.get_ydata())) for line in lines]


def test_lines_draw_what_they_are_given():
    figure = figures.lines(PANELS, y="u")
    assert drawn(figure, 0) == [([1, 2, 3], [1, 2, 3]), ([2, 4], [5, 7])]
    assert drawn(figure, 1) == [([1, 2], [0.1, 0.2])]
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["a", "b"]


def test_the_x_axis_has_its_numbers_where_it_is_told():
    figure = figures.lines({"a": {"x": ([512, 4096], [1.0, 2.0])}}, x_scale="log", x_ticks=[512, 4096])
    (ax,) = (ax for ax in figure.axes if ax.get_visible())
    assert list(ax.get_xticks()) == [512, 4096]


def test_a_label_looks_the_same_in_all_panels_and_no_two_labels_alike():
    figure = figures.lines(PANELS)
    (x, y), (again,) = (ax.get_lines() for ax in figure.axes)
    look = lambda line: (line.get_color(), line.get_marker())  # noqa: E731
    assert look(y) == look(again)
    assert x.get_color() != y.get_color() and x.get_marker() != y.get_marker()


def test_a_line_wears_the_look_of_the_optimizer_it_names_and_else_of_none():
    labels = ["LAMB", "maxLAMB", "AdamW, too fast", "bound", "paper v5", "AdamW"]  # in no order of the looks
    figure = figures.lines({"a": {label: [1.0, 2.0] for label in labels}})
    drawn = dict(zip(labels, figure.axes[0].get_lines(), strict=True))
    look = {label: (line.get_color(), line.get_marker()) for label, line in drawn.items()}
    named = {"LAMB": "LAMB", "maxLAMB": "maxLAMB", "AdamW, too fast": "AdamW", "AdamW": "AdamW"}
    assert {label: look[label] for label in named} == {label: figures.look(name) for label, name in named.items()}
    assert not {look["bound"], look["paper v5"]} & set(figures.LOOKS.values()) and look["bound"] != look["paper v5"]
    assert drawn["AdamW"]._unscaled_dash_pattern != drawn["AdamW, too fast"]._unscaled_dash_pattern
    shown = [(line.get_color(), line.get_marker()) for line in figure.legends[0].get_lines()]
    assert shown == list(look.values())


def test_lines_have_an_alternative_text_and_units():
    figure = figures.lines(PANELS, x="step", y=["loss (nats)", "b"], numbers="It grows.")
    assert figures.alt_of(figure) == "Lines over step for x and y: a and b. It grows."
    assert [ax.get_ylabel() for ax in figure.axes] == ["loss (nats)", "b"]
    assert figure.axes[0].get_xlabel() == "step"


def test_the_same_y_range_where_asked():
    apart, together = figures.lines(PANELS), figures.lines(PANELS, same_y=True)
    assert apart.axes[0].get_ylim() != apart.axes[1].get_ylim()
    assert together.axes[0].get_ylim() == together.axes[1].get_ylim()


@pytest.mark.parametrize("panels", [{}, {"a": {}}, {"a": {str(i): [1, 2] for i in range(9)}}])
def test_lines_refuse_too_few_and_too_many(panels):
    with pytest.raises(InputError, match="panels"):
        figures.lines(panels)


def test_heatmaps_write_each_number():
    figure = figures.heatmaps({"m": [[0.5, -0.25], [0, 0.0123]]}, rows=["r", "s"], columns=[1, 2])
    assert [text.get_text() for text in figure.axes[0].texts] == ["0.50", "−0.25", "0", "0.012"]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["r", "s"]
    assert "2 rows by 2 columns" in figures.alt_of(figure)


def test_heatmaps_refuse_a_table_of_another_shape():
    with pytest.raises(InputError, match=r"'m' is of shape \(1, 2\), expected \(2, 2\)"):
        figures.heatmaps({"m": [[1, 2]]}, rows=["r", "s"], columns=[1, 2])


def test_side_by_side_lines_up():
    text = figures.side_by_side({"w": torch.tensor([[1.0, -2.0], [0.5, -0.0]]), "m̂": [[10], [-1e-9]]}, digits=1)
    rows = text.splitlines()[1:]
    assert len({row.index("|") for row in rows}) == 1 and len({len(row) for row in rows}) == 1
    assert "-0.0" not in rows[1]


def test_side_by_side_refuses_matrices_of_different_heights():
    with pytest.raises(InputError, match="number of rows"):
        figures.side_by_side({"a": [[1], [2]], "b": [[1]]})


def test_the_picture_can_be_stored(tmp_path):
    picture, _ = figures.save(figures.lines(PANELS), tmp_path / "lines")
    assert picture.read_bytes()[:4] == b"\x89PNG"
