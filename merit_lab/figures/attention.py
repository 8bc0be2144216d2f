"""Attention weights of a head as images: a row a query, a column a key."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

from ..errors import InputError
from .style import INK, QUIET, WIDTH, drawing, join, say

ONE_HOT = 0.9  # a row counts as one-hot where one key gets this much of the attention


def attention_maps(panels: Mapping[str, Sequence], *, figure: Figure | None = None) -> Figure:
    """Attention weights side by side, at most four: white is 0, dark is 1, on a square-root scale, so that a row that
    is spread over many keys is still seen.

    Args:
        panels: title -> (T, T) attention weights of one sequence; every row adds up to 1.
    """
    tables = {title: np.asarray(table, float) for title, table in panels.items()}
    if not 1 <= len(tables) <= 4:
        raise InputError(f"panels: got {len(tables)} of them, expected 1 to 4")
    for title, table in tables.items():
        if table.ndim != 2 or not np.allclose(table.sum(-1), 1, atol=1e-3):
            raise InputError(f"panels: {title!r}, of shape {table.shape}, is not a matrix whose rows add up to 1")
    gap, right = 0.32, 1.0
    side = (WIDTH - 0.72 - right - gap * 3) / 4
    width = 0.72 + right + side * len(tables) + gap * (len(tables) - 1)
    page = drawing(figure, "attention maps", 1, len(tables), size=(width, side + 0.84), right=right, wspace=gap)
    for i, (panel, (title, table)) in enumerate(zip(page.panels, tables.items(), strict=True)):
        ax = panel.ax
        image = panel.keep("map", ax.imshow(table, cmap="Blues", norm=PowerNorm(0.5, 0, 1), aspect="auto"))
        panel.words(title, "key position j", "query position i" if i == 0 else "")
        ax.set(xlim=(-0.5, table.shape[1] - 0.5), ylim=(len(table) - 0.5, -0.5))
        if i:
            ax.set_yticklabels([])
    if getattr(page, "bar", None) is None:
        box, inches = ax.get_position(), page.figure.get_size_inches()[0]
        page.bar = page.figure.colorbar(image, cax=page.figure.add_axes(
            [box.x1 + 0.18 / inches, box.y0, 0.14 / inches, box.height]
        ), ticks=[0, 0.1, 0.5, 1])  # fmt: skip
        page.bar.outline.set_visible(False)
        page.bar.ax.tick_params(labelsize=9, color=QUIET, labelcolor=INK)
        page.bar.ax.set_ylabel("attention weight", fontsize=9, color=INK)
    shares = [f"{title}: {say(100 * (table.max(-1) >= ONE_HOT).mean(), 2)} %" for title, table in tables.items()]
    return page.describe(
        f"Attention weights of one head as images, query by key, for {join(tables)}.",
        f"Rows in which one key gets {ONE_HOT:.0%} or more: {'; '.join(shares)}.",
    )
