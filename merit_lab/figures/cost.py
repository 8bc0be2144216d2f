"""What a step costs: bytes operation by operation, and a roofline of implementations."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.figure import Figure

from ..errors import InputError
from . import style
from .style import GROUND, INK, QUIET, WIDTH, Look, drawing, handle, join, patch, say

# Implementations of a step. AdamW and MERIT as everywhere; MERIT's others have a shade of its green and a marker each.
IMPLEMENTATIONS = {
    "AdamW, fused": style.look("AdamW"),
    "MERIT, authors' formula": Look("#8c9a2f", "D"),
    "MERIT, readable": Look("#5fcfb0", "h"),
    "MERIT, in tiles": Look("#015f48", "P"),
    "MERIT, fused in C": style.look("MERIT"),
}
READ, WRITTEN = "#9fb8d1", "#2f4a66"
SMALL = 0.5  # bytes a weight: operations below stand together in one bar, since they work on rows, columns or less


class Timed(NamedTuple):
    """An implementation of a step, a weight."""

    flops: float
    bytes: float  # between memory and processor
    nanoseconds: float
    bytes_without_cache: float | None = None  # where temporaries stay in cache: what it would be if they did not


def operations(
    panels: Mapping[str, Sequence[tuple[str, int, int]]], weights: int, *, figure: Figure | None = None
) -> Figure:
    """A bar an operation, in order from the top: bytes read and written a weight. The sum stands in the title.

    Args:
        panels: title -> (operation, bytes read, bytes written), as `probes.traffic` lists them in `calls`.
        weights: how many weights the step moves.
    """
    if not panels or not all(panels.values()):
        raise InputError("panels: got none or an empty one, expected title -> operations")
    if weights < 1:
        raise InputError(f"weights: got {weights}, expected how many weights were stepped, 1 or more")
    bars = {title: _bars(calls, weights) for title, calls in panels.items()}
    most = max(map(len, bars.values()))
    page = drawing(
        figure, f"operations {most}", 1, len(panels), size=(WIDTH, 0.9 + 0.17 * most), left=1.25, wspace=1.35,
        legend=[("read", patch(READ)), ("written", patch(WRITTEN))],
    )  # fmt: skip
    sums = []
    for panel, (title, rows) in zip(page.panels, bars.items(), strict=True):
        ax, total = panel.ax, sum(read + written for _, read, written in rows)
        for y, (_, read, written) in enumerate(rows):
            panel.keep((y, "read"), ax.barh(-y, read, 0.74, color=READ)[0])
            panel.keep((y, "written"), ax.barh(-y, written, 0.74, left=read, color=WRITTEN)[0])
        panel.see([0, max(read + written for each in bars.values() for _, read, written in each)], [])
        panel.words(f"{title}: {say(total)}", "bytes a weight", "")
        panel.finish(y_from=0.6 - most, y_to=0.6)
        ax.set_yticks([-y for y in range(len(rows))], [name for name, _, _ in rows], fontsize=7.5)
        ax.grid(False, axis="y")
        ax.grid(True, axis="x", color=style.GRID, linewidth=0.8)
        ax.tick_params(axis="y", length=0)
        ax.set_xlim(left=0)
        sums.append(f"{title} {say(total)}")
    return page.describe(
        f"Bars, one an operation: bytes read and written a weight, for {join(panels)}.", f"In all: {join(sums)}."
    )


def _bars(calls, weights) -> list[tuple[str, float, float]]:
    """(name, read, written) a weight; what is small stands together in the last one."""
    rows = [(name, read / weights, written / weights) for name, read, written in calls if read or written]
    large = [row for row in rows if row[1] + row[2] >= SMALL]
    small = [row for row in rows if row[1] + row[2] < SMALL]
    if small:
        large.append((f"{len(small)} small ones", sum(r[1] for r in small), sum(r[2] for r in small)))
    return large


def roofline(
    points: Mapping[str, Timed], bandwidth: float, peak: float | None = None, *, figure: Figure | None = None
) -> Figure:
    """Speed against arithmetic intensity, a point an implementation, under the roof that memory and processor make.

    Args:
        points: name -> `Timed`. A second, hollow marker stands where a point would be without a cache.
        bandwidth: of memory, in GB a second.
        peak: the processor's most GFLOP a second; None leaves the flat part of the roof away.
    """
    if not points:
        raise InputError("points: got none, expected name -> Timed")
    if not bandwidth > 0 or (peak is not None and not peak > 0):
        raise InputError(f"bandwidth, peak: got {bandwidth} and {peak}, expected numbers above 0")
    looks = {name: IMPLEMENTATIONS.get(name, style.look(name)) for name in points}
    page = drawing(
        figure, "roofline", size=(WIDTH, 4.2), left=0.8,
        legend=[(name, handle(look.color, look.marker, "", size=8)) for name, look in looks.items()],
    )  # fmt: skip
    panel = page.panels[0]
    at = {name: (p.flops / p.bytes, p.flops / p.nanoseconds) for name, p in points.items()}  # GFLOP/s: flops a ns
    hollow = {n: (p.flops / p.bytes_without_cache, at[n][1]) for n, p in points.items() if p.bytes_without_cache}
    places = [*at.values(), *hollow.values()]
    low, high = 0.6 * min(x for x, _ in places), 2 * max(x for x, _ in places)
    if peak is not None:
        high = max(high, 4 * peak / bandwidth)
    ridge = high if peak is None else min(peak / bandwidth, high)
    panel.line("memory", [low, ridge], [bandwidth * low, bandwidth * ridge], color=INK, linewidth=2)
    if peak is not None:
        panel.line("processor", [ridge, high], [peak, peak], color=INK, linewidth=2, linestyle="--")
        _say(panel, "peak", f"processor: {say(peak)} GFLOP/s", (high, peak), (-2, 4), "right")
    middle = (low * ridge) ** 0.5
    _say(panel, "slope", f"memory: {say(bandwidth)} GB/s", (middle, bandwidth * middle), (-6, 6), "right")
    for name, (x, y) in at.items():
        look = looks[name]
        panel.line((name, "to the roof"), [x, x], [y, min(bandwidth * x, peak or bandwidth * x)], color=look.color,
                   linewidth=1, linestyle=":", zorder=2)  # fmt: skip
        if name in hollow:
            panel.line((name, "spared"), [hollow[name][0], x], [y, y], color=look.color, linewidth=1, zorder=2)
            panel.line((name, "hollow"), [hollow[name][0]], [y], color=look.color, marker=look.marker, markersize=9,
                       markerfacecolor=GROUND, linestyle="", zorder=3)  # fmt: skip
        panel.line(name, [x], [y], color=look.color, marker=look.marker, markersize=10, linestyle="",
                   markeredgecolor="white", zorder=4)  # fmt: skip
    panel.words("dotted: how far below the roof" + ("; hollow: without a cache" if hollow else ""),
                "arithmetic intensity (flops a byte)", "speed (GFLOP/s)")  # fmt: skip
    panel.finish(x="log", y="log")
    shares = [
        f"{name} {say(at[name][0], 2)} flops a byte and {say(at[name][1], 2)} GFLOP/s, "
        f"{say(100 * at[name][1] / min(bandwidth * at[name][0], peak or float('inf')), 2)} % of the roof"
        for name in points
    ]
    return page.describe(
        # No names: an implementation that needs a compiler is not there on every machine.
        "A roofline: speed against flops a byte, implementations of a step below the roof of memory bandwidth"
        + (" and of the processor." if peak is not None else "."),
        f"Memory gives {say(bandwidth)} GB/s. {'; '.join(shares)}.",
    )


def _say(panel, key, text, place, offset, side):
    panel.keep(key, panel.ax.annotate(text, place, offset, textcoords="offset points", ha=side, va="bottom",
                                      fontsize=9, color=QUIET))  # fmt: skip
