"""Small figures of worked examples: a few numbers as lines, as heatmaps or as text, no run behind them.

    lines({"constant gradient": {"β₂ = .95": [0.4, 0.6], "β₂ = .999": [3.2, 4.2]}}, y="step / η")
    heatmaps({"m": rows_by_steps, "v": rows_by_steps}, rows=["steady", "late"], columns=range(1, 6))
    print(side_by_side({"w": weight, "g": grad}))
"""

import math
import unicodedata
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from ..errors import InputError
from . import style
from .style import GROUND, INK, QUIET, WIDTH, drawing, handle, join

# Of the first, second, … line. They tell two lines of one optimizer apart, and lines that lie upon each other are all
# seen: the later one is thinner.
_DASHES = ("-", (0, (6, 2)), (0, (2, 1.5)), (0, (6, 2, 1.5, 2)), (0, (1, 1)), (0, (10, 3)))
_WIDTHS = (3.2, 2.6, 2.2, 1.8, 1.5, 1.2)


def lines(
    panels: Mapping[str, Mapping[str, Sequence]],
    *,
    x: str = "step",
    y: str | Sequence[str] = "",
    x_scale: str = "linear",
    y_scale: str | Sequence[str] = "linear",
    x_ticks: Sequence[float] | None = None,
    y_from: float | None = None,
    same_y: bool = False,
    levels: Mapping[str, float] | None = None,
    across: int = 3,
    what: str | None = None,
    numbers: str = "",
    height: float = 3.2,
    figure: Figure | None = None,
) -> Figure:
    """Lines in panels, `across` of them a row. A label has one colour, marker and dash in all panels: the look of an
    optimizer where it is or begins with the optimizer's name, and none of theirs where it does not.

    Args:
        panels: title -> label -> values at 1, 2, 3, …, or a pair (x values, y values).
        x, y: axis labels with units; y is one for all panels or a list, one a panel.
        x_scale, y_scale: "linear" or "log"; y_scale also "auto", and a list where panels differ.
        x_ticks: where the x axis has its numbers; round ones by default.
        y_from: the y axis starts here.
        same_y: one y range for all panels, so that they can be compared.
        levels: name -> height of a dashed line across every panel.
        across: panels side by side.
        what: the alternative text's first sentence, without measured numbers; made from the labels by default.
        numbers: the alternative text's second part: what the data says.
        height: of a row of panels, in inches.
    """
    if not panels or not all(panels.values()):
        raise InputError("panels: got none or an empty one, expected title -> label -> values")
    labels = list(dict.fromkeys(label for curves in panels.values() for label in curves))
    if len(labels) > len(_DASHES):
        raise InputError(f"panels: got {len(labels)} different lines, expected at most {len(_DASHES)}")
    looks = style.looks(labels)
    columns = min(len(panels), across)
    rows = math.ceil(len(panels) / columns)
    legend = [(label, handle(*looks[label], _DASHES[i])) for i, label in enumerate(labels)]
    page = drawing(figure, f"lines {x} {y}", rows, columns, size=(WIDTH, height * rows), legend=legend,
                   wspace=0.62 if isinstance(y, str) else 0.8, hspace=0.75)  # fmt: skip
    points = {
        title: {
            label: values if isinstance(values, tuple) else (range(1, len(values) + 1), values)
            for label, values in curves.items()
        }
        for title, curves in panels.items()
    }
    for i, (panel, (title, curves)) in enumerate(zip(page.panels, points.items(), strict=False)):
        for label, (at, values) in curves.items():
            k = labels.index(label)
            panel.line(label, at, values, **looks[label]._asdict(), linestyle=_DASHES[k],
                       linewidth=_WIDTHS[k], markersize=6 - 0.5 * k, markevery=max(1, len(values) // 12),
                       markeredgecolor="white", markeredgewidth=0.5, zorder=3 + 0.1 * k)  # fmt: skip
        for name, level in (levels or {}).items():
            panel.level(name, level, name if i == 0 else "")
        if same_y:
            panel.see([], [v for others in points.values() for _, values in others.values() for v in values])
        shared = isinstance(y, str)
        bottom = i + columns >= len(panels)
        panel.words(title, x if bottom else "", (y if i % columns == 0 else "") if shared else y[i])
        panel.finish(x=x_scale, y=y_scale if isinstance(y_scale, str) else y_scale[i], y_from=y_from,
                     x_ticks=x_ticks)
    for panel in page.panels[len(panels):]:
        panel.ax.set_visible(False)
    titles = join(panels) if len(panels) > 1 else next(iter(panels))
    return page.describe(what or f"Lines over {x} for {join(labels)}: {titles}.", numbers)


def heatmaps(
    panels: Mapping[str, Sequence],
    *,
    rows: Sequence,
    columns: Sequence,
    x: str = "step",
    across: int = 2,
    what: str | None = None,
    numbers: str = "",
    figure: Figure | None = None,
) -> Figure:
    """Small heatmaps, the number in each cell, one colour scale a heatmap: red and blue about 0 where there are
    negative numbers, else white to blue.

    Args:
        panels: title -> a table of numbers, one row a name in `rows` and one column a name in `columns`.
        x: what the columns are.
        across: heatmaps side by side.
        what: the alternative text's first sentence, without measured numbers.
        numbers: its second part.
    """
    if not panels:
        raise InputError("panels: got none, expected title -> table")
    tables = {title: np.asarray(table, float) for title, table in panels.items()}
    for title, table in tables.items():
        if table.shape != (len(rows), len(columns)):
            raise InputError(
                f"panels: {title!r} is of shape {table.shape}, expected {(len(rows), len(columns))} for "
                f"{len(rows)} rows and {len(columns)} columns"
            )
    down = math.ceil(len(tables) / across)
    left = 0.25 + 0.08 * max(len(str(row)) for row in rows)
    page = drawing(figure, f"heatmaps {x}", down, across, size=(WIDTH, 0.3 + (0.95 + 0.31 * len(rows)) * down),
                   left=left, wspace=0.3, hspace=0.75)  # fmt: skip
    for i, (panel, (title, table)) in enumerate(zip(page.panels, tables.items(), strict=False)):
        ax = panel.ax
        top = np.abs(table[np.isfinite(table)]).max(initial=0) or 1.0
        signed = (table < 0).any()
        panel.keep("cells", ax.imshow(table, cmap="RdBu_r" if signed else "Blues", aspect="auto",
                                      vmin=-1.25 * top if signed else 0, vmax=1.25 * top))  # fmt: skip
        for (row, column), value in np.ndenumerate(table):
            panel.keep((row, column), ax.text(
                column, row, cell(value), ha="center", va="center", fontsize=9.5,
                color="white" if abs(value) > 0.72 * top else INK,
            ))  # fmt: skip
        panel.words(title, x if i + across >= len(tables) else "", "")
        ax.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(rows) - 0.5, -0.5), facecolor=GROUND)
        ax.set_xticks(range(len(columns)), columns)
        ax.set_yticks(range(len(rows)), rows if i % across == 0 else [""] * len(rows))
        ax.set_xticks(np.arange(1, len(columns)) - 0.5, minor=True)
        ax.set_yticks(np.arange(1, len(rows)) - 0.5, minor=True)
        ax.grid(True, which="minor", color="white", linewidth=1.5)
        ax.tick_params(which="both", length=0, color=QUIET, labelcolor=INK)
    for panel in page.panels[len(tables):]:
        panel.ax.set_visible(False)
    size = f"{len(rows)} rows by {len(columns)} columns"
    return page.describe(what or f"Heatmaps with numbers, {size} each: {join(tables)}.", numbers)


def cell(value: float) -> str:
    """A number for a cell of a heatmap: two decimals where they say something, else two digits."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    text = f"{value:.2f}" if abs(value) >= 0.095 else f"{value:.2g}"
    return text.replace("-", "−")


def side_by_side(matrices: Mapping[str, Sequence], digits: int = 4) -> str:
    """Small matrices as text, each under its name, side by side. All have the same number of rows."""
    blocks = []
    for name, matrix in matrices.items():
        table = np.round(np.atleast_2d(np.asarray(matrix, float)), digits) + 0.0  # no -0.0000
        cells = [[f"{value:.{digits}f}" for value in row] for row in table]
        seen = sum(not unicodedata.combining(letter) for letter in name)  # the hat of m̂ takes no column
        each = max(max(len(text) for row in cells for text in row), math.ceil((seen - 2) / table.shape[1])) + 2
        width = each * table.shape[1]
        lines_ = ["".join(text.rjust(each) for text in row) for row in cells]
        blocks.append([" " * (width - seen - (width - seen) // 2) + name + " " * ((width - seen) // 2), *lines_])
    if len({len(block) for block in blocks}) != 1:
        raise InputError("matrices: they differ in their number of rows; print them one below the other")
    return "\n".join("  |".join(parts).rstrip() for parts in zip(*blocks, strict=True))
