"""Attention weights as images."""

import pytest
import torch

from merit_lab import figures
from merit_lab.errors import InputError

SPREAD = torch.ones(6, 6).tril() / torch.arange(1, 7)[:, None]
ONE_HOT = torch.eye(6)


def test_a_panel_a_moment_and_the_share_of_one_hot_rows_in_words():
    figure = figures.attention_maps({"step 1": SPREAD, "step 9": ONE_HOT})
    maps = [panel.ax.images[0].get_array() for panel in figure.drawing.panels]
    assert [m.shape for m in maps] == [(6, 6), (6, 6)]
    assert maps[1].tolist() == ONE_HOT.tolist()
    assert [panel.ax.get_title(loc="left") for panel in figure.drawing.panels] == ["step 1", "step 9"]
    assert "step 1: 17 %; step 9: 100 %" in figure.alt  # one row of six has one key alone
    assert "17" not in figure.what  # nbval compares it on every machine
    assert figures.png(figure)[:4] == b"\x89PNG"


def test_it_is_drawn_again_into_the_same_figure():
    figure = figures.attention_maps({"now": SPREAD})
    axes = len(figure.axes)
    before = figures.png(figure)
    assert figures.attention_maps({"now": ONE_HOT}, figure=figure) is figure
    assert len(figure.axes) == axes
    assert figures.png(figure) != before


@pytest.mark.parametrize(
    "panels, says",
    [
        ({}, "got 0"),
        ({str(i): SPREAD for i in range(5)}, "got 5"),
        ({"logits": 3 * SPREAD}, "'logits', of shape \\(6, 6\\), is not a matrix whose rows add up to 1"),
        ({"row": SPREAD[0]}, "of shape \\(6,\\)"),
    ],
)
def test_what_are_no_attention_weights_is_refused(panels, says):
    with pytest.raises(InputError, match=says):
        figures.attention_maps(panels)
