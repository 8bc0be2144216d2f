"""Matrices as heatmaps: one optimizer step in all its parts, and the rows and columns of weight matrices.

The widgets redraw these while a slider moves, so they must be quick. A page of 18 matrices of 8 x 8 is a thousand
cells with a number each; as matplotlib axes, images and texts it would take seconds. Here a `Sheet` collects
rectangles and words in inches, and draws all rectangles as one collection and all words in one go.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib import colors as mcolors
from matplotlib.artist import Artist
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.image import BboxImage
from matplotlib.transforms import Bbox, TransformedBbox
from PIL import ImageFont

from ..errors import InputError
from ..probes.weights import MatrixPattern
from .style import DPI, GROUND, INK, PARTS, QUIET, WIDTH, join, look

MOST_CELLS = 16  # rows or columns of a matrix that are shown cell by cell
MOST_NUMBERS = 8  # up to this size each cell has its number
SIGNED = matplotlib.colormaps["RdBu_r"]  # blue is negative, red positive, white 0: told apart by the colour-blind
SIZES = matplotlib.colormaps["YlGnBu"]  # light is small, dark is large
QUANTITIES = {
    "w": "w, weight",
    "g": "g, gradient",
    "u": "u, direction",
    "s": "s (r left, c above)",
    "decided": "s decided by",
    "update": "Δ, update",
}
_PLAIN = {
    "w": "the weight",
    "g": "the gradient",
    "u": "the direction",
    "s": "the trust ratios",
    "decided": "which ratio decided",
    "update": "the update",
}
DECIDERS = {"row": "r", "column": "c", "bound": "b", "guarded": "1"}  # with the letter in the cell


# -- a page ------------------------------------------------------------------------------------------------------


class Sheet:
    """A page in inches, x to the right and y down from the top left corner."""

    def __init__(self, width: float, height: float):
        self.figure = Figure(figsize=(width, height), dpi=DPI, facecolor=GROUND)
        self.height = height
        self._boxes, self._fills = [], []
        self._polygons, self._polygon_fills = [], []
        self._lines, self._inks, self._widths = [], [], []
        self._words = []

    def cells(self, x, y, fills, cell):
        """A matrix of squares: fills (n, k, 4) RGBA."""
        n, k = fills.shape[:2]
        left, top = np.meshgrid(x + cell * np.arange(k), y + cell * np.arange(n))  # (n, k)
        self.boxes(left.ravel(), top.ravel(), cell, cell, fills.reshape(-1, 4))

    def boxes(self, x, y, width, height, fills):
        """Filled rectangles; x, y, width, height each a number or (m,), fills (m, 4) or a colour."""
        x, y, width, height = np.broadcast_arrays(*np.atleast_1d(x, y, width, height))
        self._boxes.append(np.stack([x, y, x + width, y + height], axis=-1))  # (m, 4)
        self._fills.append(np.broadcast_to(mcolors.to_rgba_array(fills), (len(x), 4)))

    def polygon(self, points, fill):
        """A filled polygon through points (m, 2)."""
        self._polygons.append(np.asarray(points) * (1, -1) + (0, self.height))
        self._polygon_fills.append(fill)

    def line(self, points, ink=INK, width=0.8):
        """A line through points (m, 2)."""
        self._lines.append(np.asarray(points, float) * (1, -1) + (0, self.height))
        self._inks.append(ink)
        self._widths.append(width)

    def frame(self, x, y, width, height, ink=INK, line=0.8):
        """The outline of a rectangle."""
        right, bottom = x + width, y + height
        self.line([(x, y), (right, y), (right, bottom), (x, bottom), (x, y)], ink, line)

    def text(self, x, y, words, size=8.0, ink=INK, align="left", bold=False):
        """One line of text; y is its baseline. size in points."""
        self._words.append((x, self.height - y, str(words), float(size), ink, align, bold))

    def image(self, x, y, width, height, rgba):
        """A picture (n, k, 4) of many cells, averaged where they are smaller than a pixel."""
        box = Bbox.from_bounds(x, self.height - y - height, width, height)
        picture = BboxImage(TransformedBbox(box, self.figure.dpi_scale_trans), interpolation="nearest")
        picture.set_data(rgba)
        self.figure.add_artist(picture)

    def finish(self, what: str, numbers: str = "") -> Figure:
        """The figure with everything on it, and its alternative text: what it shows, then what the data says."""
        inches = self.figure.dpi_scale_trans
        if self._boxes:
            self.figure.add_artist(_Boxes(np.concatenate(self._boxes), np.concatenate(self._fills), self.height))
        if self._polygons:
            self.figure.add_artist(
                PolyCollection(self._polygons, facecolors=self._polygon_fills, linewidths=0, transform=inches)
            )
        if self._lines:
            self.figure.add_artist(
                LineCollection(self._lines, colors=self._inks, linewidths=self._widths, transform=inches)
            )
        self.figure.add_artist(_Words(self._words))
        self.figure.what = what
        self.figure.alt = f"{what} {numbers}".strip()
        return self.figure


class _Boxes(Artist):
    """Many filled rectangles, whole pixels each on Agg: quick, and without seams between neighbours.

    Args:
        boxes: (m, 4) left, top, right, bottom in inches from the top left corner.
        fills: (m, 4) opaque RGBA.
        height: of the page, in inches.
    """

    def __init__(self, boxes, fills, height):
        super().__init__()
        self.boxes, self.fills, self.page_height = boxes, fills, height

    def draw(self, renderer):
        if hasattr(renderer, "buffer_rgba"):
            page = np.asarray(renderer.buffer_rgba())
            edges = np.rint(self.boxes * renderer.dpi).astype(int).clip(0).tolist()
            for (left, top, right, bottom), fill in zip(edges, (self.fills * 255).astype(np.uint8), strict=True):
                page[top:bottom, left:right] = fill
            return
        left, top, right, bottom = self.boxes.T
        corners = [(left, top), (right, top), (right, bottom), (left, bottom)]
        quads = np.stack([np.stack([x, self.page_height - y], axis=-1) for x, y in corners], axis=1)  # (m, 4, 2)
        polygons = PolyCollection(quads, facecolors=self.fills, linewidths=0)
        polygons.set_figure(self.get_figure())
        polygons.set_transform(self.get_figure().dpi_scale_trans)
        polygons.draw(renderer)


class _Words(Artist):
    """Many short texts. On Agg they are copied letter mask by letter mask: matplotlib's own text takes about half
    a millisecond apiece, which a thousand numbers cannot afford. Other backends get real text.
    """

    def __init__(self, words):
        super().__init__()
        self.words = words
        self.set_zorder(5)  # over the rectangles

    def draw(self, renderer):
        if hasattr(renderer, "buffer_rgba"):
            self._copy(renderer)
        else:
            self._write(renderer)

    def _copy(self, renderer):
        page = np.asarray(renderer.buffer_rgba())
        scale = renderer.dpi / 72
        planes = {}  # ink -> how much of each pixel it covers
        for x, y, words, size, ink, align, bold in self.words:
            if ink not in planes:
                planes[ink] = np.zeros(page.shape[:2], np.uint8)
            mask, (left, top) = _mask(words, size * scale, align, bold)
            x0 = max(0, round(x * renderer.dpi) + left)
            y0 = max(0, page.shape[0] - round(y * renderer.dpi) + top)
            under = planes[ink][y0 : y0 + mask.shape[0], x0 : x0 + mask.shape[1]]
            np.maximum(under, mask[: under.shape[0], : under.shape[1]], out=under)
        for ink, plane in planes.items():
            pixels = plane.nonzero()
            cover = plane[pixels][:, None].astype(np.uint16)
            page[*pixels, :3] = (page[*pixels, :3] * (255 - cover) + _rgb(ink) * cover) // 255

    def _write(self, renderer):
        context = renderer.new_gc()
        high = renderer.get_canvas_width_height()[1]
        per_inch = renderer.points_to_pixels(72)
        for x, y, words, size, ink, align, bold in self.words:
            context.set_foreground(ink)
            font = FontProperties(family="DejaVu Sans", size=size, weight="bold" if bold else "normal")
            width = renderer.get_text_width_height_descent(words, font, False)[0]
            x = x * per_inch - {"left": 0, "center": width / 2, "right": width}[align]
            y = y * per_inch
            renderer.draw_text(context, x, high - y if renderer.flipy() else y, words, font, 0)
        context.restore()


@lru_cache(maxsize=8192)
def _mask(words, pixels, align, bold):
    """(high, wide) coverage 0…255 of a text, and where it lies from its anchor on the baseline."""
    anchor = {"left": "ls", "center": "ms", "right": "rs"}[align]
    mask, (left, top) = _font(pixels, bold).getmask2(words, "L", anchor=anchor)
    wide, high = mask.size
    return np.frombuffer(bytes(mask), np.uint8).reshape(high, wide), (round(left), round(top))


@lru_cache(maxsize=64)
def _font(pixels, bold):
    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    path = f"{matplotlib.get_data_path()}/fonts/ttf/{name}"
    return ImageFont.truetype(path, pixels, layout_engine=ImageFont.Layout.BASIC)


@lru_cache(maxsize=64)
def _rgb(ink):
    return (np.array(mcolors.to_rgb(ink)) * 255).astype(np.uint16)


# -- numbers and colours -----------------------------------------------------------------------------------------


def short(value: float, digits: int = 2) -> str:
    """A number that fits a cell: .45, -.045, .005, 5e-4, 12, 1e3; 0 is only ever an exact 0."""
    if not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if value == 0:
        return "0"
    size = abs(float(f"{value:.{digits}g}"))
    if 0.01 <= size < 10 ** (digits + 1):
        words = f"{value:.{digits}g}" if size < 10**digits else f"{value:.0f}"
        return words.replace("0.", ".", 1) if size < 1 else words
    if 0.001 <= size < 0.01:
        return f"{value:.{digits - 1}g}".replace("0.", ".", 1)
    mantissa, exponent = f"{value:.{digits - 2}e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def signed_colors(values: np.ndarray, largest: float) -> np.ndarray:
    """RGBA of signed values, white at 0, full colour at ±largest; grey where not finite."""
    return _map(SIGNED, 0.5 + 0.42 * values / (largest or 1.0), values)  # not to the darkest ends: numbers stand there


def ratio_colors(values: np.ndarray, low: float, high: float) -> np.ndarray:
    """RGBA of ratios on a log scale from low to high; 0 and below as the lowest; grey where not finite."""
    if not low < high:
        return _map(SIZES, np.full(values.shape, 0.3), values)
    place = np.log(np.clip(values, low, high) / low) / np.log(high / low)
    return _map(SIZES, 0.05 + 0.85 * place, values)


def size_colors(values: np.ndarray, largest: float) -> np.ndarray:
    """RGBA of sizes |w| ≥ 0 from 0 to largest."""
    return _map(SIZES, np.clip(values / (largest or 1.0), 0, 1), values)


def _map(colours, place, values):
    rgba = colours(np.nan_to_num(place, nan=0.5))
    rgba[~np.isfinite(values)] = mcolors.to_rgba("#bbbbbb")
    return rgba


def _ink_on(rgba) -> list[str]:
    """Black or white, whichever is read more easily, for each of (m, 4) colours."""
    light = np.asarray(rgba)[..., :3] @ [0.299, 0.587, 0.114]
    return [INK if bright > 0.55 else "#ffffff" for bright in light.ravel()]


# -- one optimizer step ------------------------------------------------------------------------------------------


class StepPicture(NamedTuple):
    """One optimizer's step on a matrix, the part that is shown: arrays (n, k) unless said otherwise."""

    name: str
    w: np.ndarray  # before the step
    g: np.ndarray
    u: np.ndarray
    update: np.ndarray
    s: np.ndarray | None = None  # None: no trust ratio (AdamW)
    b: float | None = None
    r: np.ndarray | None = None  # (n,); None: no row ratios (LAMB)
    c: np.ndarray | None = None  # (k,)
    decided: np.ndarray | None = None  # keys of DECIDERS
    clipped: np.ndarray | None = None  # bool


class _Layout(NamedTuple):
    cell: float  # inches
    a_row: int  # matrices beside each other
    quantities: tuple[str, ...]

    def line(self, number):
        """The quantities of this line of matrices."""
        return self.quantities[number * self.a_row : (number + 1) * self.a_row]


# inches
_LEFT, _RIGHT, _GAP, _TITLE, _BAR, _TOP, _STRIP_GAP = 0.34, 0.12, 0.24, 0.26, 0.3, 0.42, 0.06


def step_maps(
    steps: Sequence[StepPicture],
    *,
    chosen: tuple[int, int] | None = None,
    origin: tuple[int, int] = (0, 0),
    quantities: Sequence[str] = tuple(QUANTITIES),
    title: str = "",
    about: str = "",
) -> Figure:
    """Every part of one step as a heatmap, an optimizer a row of matrices, so that like stands under like.

    Args:
        steps: one to three optimizers, all on matrices of one shape, at most 16 x 16.
        chosen: (row, column) of an element to outline, counted within the matrices from 0.
        origin: (row, column) of the first element in the whole matrix, from 0; labels count from 1.
        quantities: which of QUANTITIES, in this order.
        title: a line above all.
        about: put into the alternative text after what is shown.

    A colour means the same in every optimizer's row: signed quantities share a scale around 0, ratios a log scale.
    """
    steps = list(steps)
    if not steps:
        raise InputError("steps: got none, expected one optimizer's step at least")
    n, k = steps[0].w.shape
    if max(n, k) > MOST_CELLS:
        most = f"{MOST_CELLS} x {MOST_CELLS}"
        raise InputError(f"steps: got a {n} x {k} matrix, expected at most {most}; pass a part of it")
    for name in quantities:
        if name not in QUANTITIES:
            raise InputError(f"quantities: got {name!r}, expected some of {', '.join(QUANTITIES)}")
    layout = _layout(n, k, len(steps), tuple(quantities))
    numbers = max(n, k) <= MOST_NUMBERS
    bar = 0 if numbers else _BAR
    lines = math.ceil(len(layout.quantities) / layout.a_row)
    # In a line with s all matrices stand lower by the strip of c, so that a row is one row all across the line.
    strip = layout.cell + _STRIP_GAP
    drops = [[strip * (step.s is not None and "s" in layout.line(i)) for i in range(lines)] for step in steps]
    heights = [[_TITLE + drop + n * layout.cell + bar + 0.2 for drop in line] for line in drops]
    sheet = Sheet(WIDTH, _TOP + sum(0.24 + sum(line) for line in heights))
    scales = _scales(steps)
    _legend(sheet, title, steps)
    top = _TOP
    for step, drop, height in zip(steps, drops, heights, strict=True):
        sheet.boxes(_LEFT, top - 0.02, 0.11, 0.11, look(step.name).color)
        sheet.text(_LEFT + 0.18, top + 0.08, step.name, 10, bold=True)
        for place, quantity in enumerate(layout.quantities):
            line, column = divmod(place, layout.a_row)
            x = _LEFT + sum(_width(q, k, layout.cell) + _GAP for q in layout.line(line)[:column])
            y = top + 0.24 + sum(height[:line]) + _TITLE - 0.1 + drop[line]
            if quantity == "s":
                x += layout.cell + _STRIP_GAP
            _one_map(sheet, step, quantity, x, y, layout.cell, scales, numbers, chosen, origin, column == 0)
        top += 0.24 + sum(height)
    return sheet.finish(f"Heatmaps of {join(_PLAIN[q] for q in quantities)} under {_names(steps)}.", about)


def _layout(n, k, n_steps, quantities):
    """The largest cells that fit: all matrices beside each other, or three a line where numbers need the room."""

    def cell(a_row):
        lines = [quantities[i : i + a_row] for i in range(0, len(quantities), a_row)]
        room = [WIDTH - _LEFT - _RIGHT - _GAP * (len(line) - 1) - _STRIP_GAP * ("s" in line) for line in lines]
        widest = min(r / (len(line) * k + ("s" in line)) for r, line in zip(room, lines, strict=True))
        return min(0.5, widest, 3.0 / n)

    wide = cell(len(quantities))
    three = min(3, len(quantities))
    crowded = wide < 0.27 and max(n, k) <= MOST_NUMBERS
    if crowded or (n_steps == 1 and wide < 0.45):
        return _Layout(cell(three), three, quantities)
    return _Layout(wide, len(quantities), quantities)


def _width(quantity, k, cell):
    return k * cell + (cell + _STRIP_GAP) * (quantity == "s")


def _scales(steps):
    """Largest size of each signed quantity, and lowest and highest ratio, over all optimizers."""
    scales = {}
    for name in ("w", "g", "u", "update"):
        values = np.abs(np.concatenate([getattr(step, name).ravel() for step in steps]))
        scales[name] = max(values[np.isfinite(values)], default=0.0)
    ratios = [np.ravel(v) for s in steps for v in (s.s, s.r, s.c, s.b) if v is not None]
    ratios = np.concatenate(ratios) if ratios else np.ones(1)
    ratios = ratios[np.isfinite(ratios) & (ratios > 0)]
    scales["s"] = (ratios.min(), ratios.max()) if ratios.size else (1.0, 1.0)
    return scales


def _one_map(sheet, step, quantity, x, y, cell, scales, numbers, chosen, origin, labelled):
    n, k = step.w.shape
    title = QUANTITIES[quantity]
    if quantity == "u" and step.s is None:
        title = "d, direction"  # AdamW's line 5, without the decay
    values = step.decided if quantity == "decided" else getattr(step, quantity)
    over = 0
    if quantity == "s":
        title = "s (none)" if values is None else "s (b in the corner)" if step.r is None else title
        over = cell + _STRIP_GAP if values is not None else 0
    sheet.text(x - over, y - over - 0.07, title, 8, QUIET)
    if values is None:
        sheet.frame(x, y, k * cell, n * cell, "#c8c8c8")
        sheet.text(x + k * cell / 2, y + n * cell / 2 + 0.04, "no ratio", 8, QUIET, "center")
        return
    if quantity == "decided":
        _decided(sheet, step, x, y, cell)
    else:
        paint = _painter(quantity, scales)
        _matrix(sheet, x, y, values, paint, cell, numbers)
        if quantity == "s":
            _ratio_strips(sheet, step, x, y, paint, cell, numbers)
        if not numbers:
            _scale_bar(sheet, quantity, scales, x, y + n * cell + 0.16, k * cell)
    if step.clipped is not None and quantity in ("decided", "update"):
        for row, column in np.argwhere(step.clipped):
            right, top, size = x + (column + 1) * cell, y + row * cell, min(0.11, cell / 2)
            sheet.polygon([(right - size, top), (right, top), (right, top + size)], PARTS["clipped"].color)
    sheet.frame(x, y, k * cell, n * cell, "#8a8a8a", 0.6)
    if chosen is not None:
        row, column = chosen
        sheet.frame(x + column * cell, y + row * cell, cell, cell, "#ffffff", 3.4)
        sheet.frame(x + column * cell, y + row * cell, cell, cell, "#000000", 1.6)
    if labelled:
        every = 1 if cell > 0.12 else 5
        for row in range(n):
            if (row + origin[0] + 1) % every == 0:
                middle = y + (row + 0.5) * cell + 0.035
                sheet.text(x - over - 0.05, middle, row + origin[0] + 1, 6.5, QUIET, "right")
        for column in range(k):
            if (column + origin[1] + 1) % every == 0:
                middle = x + (column + 0.5) * cell
                sheet.text(middle, y + n * cell + 0.1, column + origin[1] + 1, 6.5, QUIET, "center")


def _matrix(sheet, x, y, values, paint, cell, numbers):
    fills = paint(values)
    sheet.cells(x, y, fills, cell)
    if numbers:
        _numbers(sheet, x, y, values, fills, cell)


def _numbers(sheet, x, y, values, fills, cell):
    words = [short(value, 3 if cell > 0.42 else 2) for value in values.ravel().tolist()]
    size = min(9.0, cell * 72 / (0.62 * max(3, *map(len, words))))  # a digit is about .62 of its size wide
    inks = _ink_on(fills)
    for index, word in enumerate(words):
        row, column = divmod(index, values.shape[1])
        middle = y + (row + 0.5) * cell + size * 0.36 / 72  # and .73 high
        sheet.text(x + (column + 0.5) * cell, middle, word, size, inks[index], "center")


def _ratio_strips(sheet, step, x, y, paint, cell, numbers):
    """r as a column left of s, c as a row above it, b in the corner: where they stand is what they cover."""
    n, k = step.s.shape
    left, above = x - cell - _STRIP_GAP, y - cell - _STRIP_GAP
    strips = [(left, above, step.b, (1, 1))]
    if step.r is not None:
        strips += [(left, y, step.r, (n, 1)), (x, above, step.c, (1, k))]
    for across, down, values, shape in strips:
        if values is not None:
            _matrix(sheet, across, down, np.reshape(values, shape), paint, cell, numbers)
            sheet.frame(across, down, shape[1] * cell, shape[0] * cell, "#8a8a8a", 0.6)


def _decided(sheet, step, x, y, cell):
    table = {name: mcolors.to_rgba(PARTS[name].color) for name in DECIDERS}
    fills = np.array([[table[name] for name in row] for row in step.decided])
    sheet.cells(x, y, fills, cell)
    if cell >= 0.16:
        inks = _ink_on(fills)
        size = min(9.0, cell * 72 * 0.5)
        for index, name in enumerate(step.decided.ravel()):
            row, column = divmod(index, step.decided.shape[1])
            middle = y + (row + 0.5) * cell + size * 0.3 / 72
            sheet.text(x + (column + 0.5) * cell, middle, DECIDERS[name], size, inks[index], "center")


def _painter(quantity, scales):
    if quantity == "s":
        return lambda values: ratio_colors(values, *scales["s"])
    return lambda values: signed_colors(values, scales[quantity])


def _scale_bar(sheet, quantity, scales, x, y, width):
    """What the colours mean, where no number stands in the cells."""
    if quantity == "s":
        ends = scales["s"]
        values = np.geomspace(*ends, 48) if ends[0] < ends[1] else np.full(48, ends[0])
    else:
        ends = (-scales[quantity], scales[quantity])
        values = np.linspace(*ends, 48)
    _bar(sheet, x, y, width, _painter(quantity, scales)(values), ends)


def _bar(sheet, x, y, width, fills, ends):
    """A strip of colours, the numbers of its ends below."""
    each = width / len(fills)
    left = x + each * np.arange(len(fills))
    sheet.boxes(left, y, np.minimum(1.5 * each, x + width - left), 0.06, fills)  # overlapping: no seams
    sheet.text(x, y + 0.17, short(ends[0]), 6.5, QUIET)
    sheet.text(x + width, y + 0.17, short(ends[1]), 6.5, QUIET, "right")


def _legend(sheet, title, steps):
    sheet.text(_LEFT, 0.2, title, 9, QUIET)
    if all(step.decided is None for step in steps):
        return
    words = {
        "row": "r row ratio",
        "column": "c column ratio",
        "bound": "b whole matrix",
        "guarded": "1 guard",
        "clipped": "clipped",
    }
    x = WIDTH - _RIGHT
    for name, label in reversed(words.items()):
        x -= 0.062 * len(label)
        sheet.text(x, 0.2, label, 8)
        x -= 0.16
        if name == "clipped":
            sheet.polygon([(x, 0.1), (x + 0.11, 0.1), (x + 0.11, 0.21)], PARTS[name].color)
        else:
            sheet.boxes(x, 0.1, 0.11, 0.11, PARTS[name].color)
        x -= 0.14


def _names(steps):
    return join(step.name for step in steps)


# -- rows and columns of W_Q and W_K -----------------------------------------------------------------------------


class PatternPicture(NamedTuple):
    """One weight matrix, its shuffled control, and a third map of the same shape."""

    name: str
    weight: np.ndarray  # (n, k)
    control: np.ndarray  # (n, k): the same values, shuffled
    pattern: MatrixPattern  # of the weight
    control_pattern: MatrixPattern
    contrast: np.ndarray  # (n, k): s / b where a direction u is known, else the weights' part of it
    ratios: bool  # whether contrast is s / b


_MAP, _SIDE, _PITCH = 1.98, 0.44, 2.9


def pattern_maps(pictures: Sequence[PatternPicture], title: str = "", about: str = "") -> Figure:
    """|w| of weight matrices beside the same values shuffled, with the profile of their rows and columns.

    Args:
        pictures: a matrix a row, usually W_Q and W_K of one layer.
        title: a line above all.
        about: put into the alternative text after what is shown.

    Left the weight, in the middle its control, right where a row's or column's trust ratio exceeds the matrix's.
    Profiles: dark is the mean of |w|, light the largest |w|. Lines are the borders of heads, red marks outliers.
    """
    sheet = Sheet(WIDTH, 0.5 + len(pictures) * (_SIDE + _MAP + 0.78))
    sheet.text(_LEFT, 0.2, title, 9, QUIET)
    x = WIDTH - 3.9
    for label, ink, width in (("mean |w|", _MEAN, 0.72), ("largest |w|", _LARGEST, 0.86)):
        sheet.boxes(x, 0.1, 0.11, 0.11, ink)
        sheet.text(x + 0.16, 0.2, label, 8)
        x += 0.2 + width
    sheet.polygon(_mark(x + 0.05, 0.1), PARTS["clipped"].color)
    sheet.text(x + 0.16, 0.2, "outlier row or column", 8)
    for index, picture in enumerate(pictures):
        y = 0.5 + index * (_SIDE + _MAP + 0.78)
        _pattern_row(sheet, picture, y)
    names = join(picture.name for picture in pictures)
    return sheet.finish(f"Sizes of the weights of {names}, the same values shuffled, and a map of ratios.", about)


_MEAN, _LARGEST = SIZES(0.85), SIZES(0.35)


def _pattern_row(sheet, picture, y):
    sizes = np.abs(picture.weight)
    largest = float(np.quantile(sizes, 0.99)) or float(sizes.max())  # a few huge elements must not pale the rest
    both = (picture.pattern, picture.control_pattern)
    tops = np.concatenate([np.asarray(lines.max) for found in both for lines in (found.rows, found.columns)])
    top = 1.1 * float(np.quantile(tops, 0.97))  # longer ones are cut there: an outlier must not flatten the rest
    columns = [
        (f"{picture.name}, |w|", picture.weight, picture.pattern),
        ("the same values, shuffled", picture.control, picture.control_pattern),
    ]
    for place, (title, values, pattern) in enumerate(columns):
        x = _LEFT + 0.12 + place * _PITCH
        _heat(sheet, x, y, size_colors(_pooled(np.abs(values)), largest), title, values.shape, picture)
        _profiles(sheet, x, y + 0.24, pattern, top)
        rows, columns_ = (f"{lines.similarity:.2f}".replace("-0.00", "0.00") for lines in pattern[:2])
        sheet.text(x, y + 0.24 + _SIDE + _MAP + 0.28, f"similarity: rows {rows}, columns {columns_}", 8)
    x = _LEFT + 0.12 + 2 * _PITCH
    values = _pooled(picture.contrast)
    if picture.ratios:
        ends = (1.0, max(float(picture.contrast.max()), 1.0))
        fills, title = ratio_colors(values, *ends), "s / b: row or column above matrix"
    else:
        ends = (0.0, 1.0)
        fills, title = size_colors(values, 1.0), "largest |w| of row or column / of all"
    _heat(sheet, x, y, fills, title, picture.weight.shape, picture, title_drop=_SIDE)
    steps = np.geomspace(*ends, 48) if picture.ratios else np.linspace(*ends, 48)
    bar = ratio_colors(steps, *ends) if picture.ratios else size_colors(steps, 1.0)
    _bar(sheet, x, y + 0.24 + _SIDE + _MAP + 0.16, _MAP, bar, ends)


def _heat(sheet, x, y, fills, title, shape, picture, title_drop=0.0):
    """One image with its title, the borders of heads and the numbers of the ends of its axes."""
    sheet.text(x, y + 0.1 + title_drop, title, 8.5, INK)
    down = y + 0.24 + _SIDE
    sheet.image(x, down, _MAP, _MAP, fills)
    sheet.frame(x, down, _MAP, _MAP, "#8a8a8a", 0.6)
    borders = [0, *picture.pattern.head_boundaries, shape[0]]
    for row in borders[1:-1]:
        at = down + _MAP * row / shape[0]
        sheet.line([(x - 0.06, at), (x + _MAP, at)], "#4a4a4a", 0.6)
    every = math.ceil((len(borders) - 1) / 12)
    for head, (first, last) in enumerate(pairwise(borders)):
        if len(borders) > 2 and head % every == 0:
            at = down + _MAP * (first + last) / 2 / shape[0] + 0.035
            sheet.text(x - 0.05, at, f"h{head}", 6.5, QUIET, "right")
    sheet.text(x, down + _MAP + 0.11, "1", 6.5, QUIET)
    sheet.text(x + _MAP, down + _MAP + 0.11, shape[1], 6.5, QUIET, "right")


def _profiles(sheet, x, y, pattern, top):
    """Columns' profile above the image, rows' at its right; top is the size that fills them."""
    down, right, room = y + _SIDE, x + _MAP, _SIDE - 0.08
    for lines, across in ((pattern.columns, True), (pattern.rows, False)):
        for values, ink in ((lines.max, _LARGEST), (lines.mean, _MEAN)):
            values = np.asarray(values, float)
            if len(values) > 200:
                values = _chunks(values, 200, np.max if values is lines.max else np.mean)
            length = room * np.minimum(values / (top or 1.0), 1.0)
            edge = np.linspace(0, _MAP, len(values) + 1)
            along, out = np.repeat(edge, 2)[1:-1], np.repeat(length, 2)
            if across:
                points = [(x, down - 0.02), *zip(x + along, down - 0.02 - out, strict=True), (right, down - 0.02)]
            else:
                points = [
                    (right + 0.04, down),
                    *zip(right + 0.04 + out, down + along, strict=True),
                    (right + 0.04, down + _MAP),
                ]
            sheet.polygon(points, ink)
        n = len(lines.max)
        for place in lines.outliers[:40]:
            at = _MAP * (place + 0.5) / n
            spot = _mark(x + at, down - _SIDE) if across else _mark(right + _SIDE + 0.04, down + at - 0.04)
            sheet.polygon(spot, PARTS["clipped"].color)


def _mark(x, y):
    return [(x - 0.045, y), (x + 0.045, y), (x, y + 0.08)]


def _pooled(values: np.ndarray, most: int = 198) -> np.ndarray:
    """Means over blocks, so that no more than `most` rows and columns are left: a pixel each."""
    for axis in (0, 1):
        if values.shape[axis] > most:
            values = np.stack([part.mean(axis) for part in np.array_split(values, most, axis)], axis)
    return values


def _chunks(values, most, summary):
    return np.array([summary(part) for part in np.array_split(values, most)])
