"""How every picture of the lab looks: one colour and marker an optimizer, light ground, units, room for a legend.

Nothing here touches matplotlib's rcParams and nothing uses pyplot: widgets draw in threads, and a style that is
global would race; a figure that pyplot knows would stay in memory.
"""

import math
from itertools import cycle
from typing import NamedTuple

import numpy as np
import seaborn as sns
from matplotlib import colors as mcolors
from matplotlib import patheffects, ticker
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

DPI = 100
WIDTH = 9.0  # inches of a figure: 900 pixels
GROUND, INK, QUIET, GRID = "#ffffff", "#1f1f1f", "#5f5f5f", "#e6e6e6"
THRESHOLD = 100  # the max attention logit that the paper marks
_BLUE, _ORANGE, _GREEN, _RED, _PINK, _BROWN, _, _GREY, _, _SKY = (
    mcolors.to_hex(c) for c in sns.color_palette("colorblind")
)


class Look(NamedTuple):
    """Colour and marker of an optimizer, the same in every picture."""

    color: str
    marker: str


LOOKS = {
    "AdamW": Look(_BLUE, "o"),
    "LAMB": Look(_ORANGE, "s"),
    "MERIT": Look(_GREEN, "^"),
    "LAMB without bias correction": Look(_BROWN, "D"),
    "maxLAMB": Look(_RED, "v"),
    "+ element-wise": Look(_PINK, "P"),
    "+ bound": Look(_SKY, "<"),
    "+ clip": Look(_GREEN, "^"),  # is MERIT
    "MERIT without clip": Look(_SKY, "<"),  # is "+ bound"
    "MERIT without bound": Look(_GREY, "p"),
    "MERIT without element-wise": Look("#7a5195", "h"),
    "MERIT row only": Look("#8c564b", ">"),
    "MERIT column only": Look("#003f5c", "d"),
    "MERIT l2": Look("#a05a00", "*"),
    "MERIT paper variant": Look("#2f6b2f", "H"),
    # Variants, as evidence.variant names them: a marker a change, a shade of the optimizer's colour.
    "AdamW + QK-norm": Look("#6fb3d9", "D"),
    "LAMB + QK-norm": Look("#f2b45a", "D"),
    "MERIT + QK-norm": Look("#5fcfb0", "D"),
    "AdamW + QK-clip": Look("#014a73", "v"),
    "LAMB + fused QKV": Look("#8f5d00", "8"),
    "MERIT + fused QKV": Look("#015f48", "8"),
}
# What decided an element's trust ratio; the shares of the first four add up to 1. Not the optimizers' colours.
PARTS = {
    "row": Look("#332288", "o"),
    "column": Look("#88ccee", "s"),
    "bound": Look("#ddcc77", "^"),
    "guarded": Look("#999999", "D"),
    "clipped": Look("#cc3311", "v"),
}
# For lines and bars that belong to no optimizer. Not the optimizers' colours either: blue would be read as AdamW.
PLAIN = (
    Look("#332288", "D"), Look("#cc6677", "v"), Look("#1f1f1f", "p"),
    Look("#6699cc", ">"), Look("#882255", "h"), Look("#88842b", "<"),
)  # fmt: skip
LINES = ("-", "--", ":", "-.")  # runs of the same optimizer, in turn


def look(optimizer: str | None) -> Look:
    """Colour and marker of an optimizer or rung; an unknown name gets grey."""
    return LOOKS.get(optimizer, Look(_GREY, "X"))


def optimizer_in(label: str) -> str | None:
    """The optimizer, rung or variant that a label is or begins with: MERIT of "MERIT, too fast", none of "bound"."""
    for name in sorted(LOOKS, key=len, reverse=True):  # "MERIT l2" before "MERIT"
        if label.startswith(name) and not label[len(name) :][:1].isalnum():
            return name
    return None


def looks(labels) -> dict[str, Look]:
    """A look for each label: an optimizer's own where the label names one, else the next of PLAIN."""
    plain, found = cycle(PLAIN), {}
    for label in labels:
        name = optimizer_in(label)
        found[label] = next(plain) if name is None else look(name)
    return found


# -- numbers in words --------------------------------------------------------------------------------------------


def say(value: float | None, digits: int = 3) -> str:
    """A number as people write it: 3 significant digits, 42,100, 0.0031, 2e-05."""
    if value is None or math.isnan(value):
        return "not measured"
    if math.isinf(value):
        return "infinite"
    if value == 0:
        return "0"
    rounded = float(f"{value:.{digits}g}")
    if abs(rounded) >= 1e7 or abs(rounded) < 1e-4:
        return f"{rounded:.{digits - 1}e}".replace("e+0", "e+").replace("e-0", "e-")
    if abs(rounded) >= 10 ** (digits - 1):
        return f"{rounded:,.0f}"
    return f"{rounded:.{digits}g}"


def join(words) -> str:
    """a; a and b; a, b and c."""
    words = list(words)
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1] if words else ""


def plain(value: float, _position=None) -> str:
    """A tick's label without powers of ten where it is short: 0.001, 10, 10,000, 1e6."""
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e5:
        return f"{value:,.10g}"
    return f"{value:.3g}".replace("e+0", "e").replace("e-0", "e-")


# -- a drawing that can be drawn again ---------------------------------------------------------------------------


class Panel:
    """One axes of a drawing. Artists are kept under a key, so that a live picture only changes their data.

    Lines, bands and the names of levels are "animated" in matplotlib's sense: `Drawing.paint` puts them on a ground
    of axes, ticks and words, which it draws anew only where that has changed.
    """

    def __init__(self, ax, frame=True):
        self.ax, self._artists, self._used = ax, {}, set()
        self.version = 0  # counts the changes of what belongs to the ground
        self._shown, self._finished, self._headroom = {}, False, False
        self._settled = {}  # "x" and "y" -> what _axis has set
        self._reset()
        ax.set_facecolor(GROUND)
        for side, spine in ax.spines.items():
            spine.set_visible(frame or side in ("left", "bottom"))
            spine.set_color(QUIET)
            spine.set_linewidth(0.8)
        ax.tick_params(which="both", labelsize=9, color=QUIET, labelcolor=INK, width=0.8)

    def _reset(self):
        self._used.clear()
        self._x, self._y = [math.inf, -math.inf, math.inf], [math.inf, -math.inf, math.inf]  # min, max, min > 0

    def ground(self):
        """What the ground shows; while it stays the same the ground need not be drawn again."""
        ax = self.ax
        return (
            ax.get_visible(), self.version, ax.get_title(loc="left"), ax.get_xlabel(), ax.get_ylabel(), ax.get_xlim(),
            ax.get_ylim(), tuple(ax.get_xticks()), tuple(ax.get_yticks()), ax.get_xscale(), ax.get_yscale(),
        )  # fmt: skip

    def moving(self):
        """What stands on the ground, from back to front."""
        found = [artist for artist in self._artists.values() if artist.get_animated() and artist.get_visible()]
        return sorted(found, key=lambda artist: artist.get_zorder()) if self.ax.get_visible() else []

    def words(self, title="", x="", y=""):
        """Title and axis labels."""
        ax = self.ax
        if (ax.get_title(loc="left"), ax.get_xlabel(), ax.get_ylabel()) == (title, x, y):
            return
        # At fixed places: to find places for them takes matplotlib a quarter of the time to draw a figure.
        width, height = ax.get_position().size * ax.figure.get_size_inches()
        ax.set_title(title, loc="left", fontsize=10, color=INK, pad=6, y=1)
        for axis, text, at in ((ax.xaxis, x, (0.5, -0.27 / height)), (ax.yaxis, y, (-0.48 / width, 0.5))):
            axis.set_label_text(text, fontsize=9.5, color=INK)
            axis.set_label_coords(*at)

    def line(self, key, x, y, in_view=True, **how):
        """A line through the finite points of (x, y); many points are thinned, peaks stay."""
        x, y = thin(x, y)
        if in_view:
            self.see(x, y)
        artist = self._artists.get(key)
        if artist is None:
            (artist,) = self.ax.plot(x, y, animated=True, **how)
            self._artists[key] = artist
        else:
            artist.set_data(x, y)
            artist.set_markevery(how.get("markevery"))
        self._used.add(key)
        return artist

    def band(self, key, x, low, high, **how):
        """The area between low and high."""
        self.drop(key)
        good = np.isfinite(low) & np.isfinite(high)
        x, low, high = (np.asarray(v, float)[good] for v in (x, low, high))
        self.see(x, low)
        self.see(x, high)
        how = {"linewidth": 0, "alpha": 0.18} | how
        self._artists[key] = self.ax.fill_between(x, low, high, animated=True, **how)
        self._used.add(key)

    def level(self, key, y, text="", **how):
        """A horizontal line across, with its name above its left end."""
        if key not in self._artists:
            how = {"color": INK, "linewidth": 1, "linestyle": (0, (5, 3)), "zorder": 1.5} | how
            self._artists[key] = self.ax.axhline(y, animated=True, **how)
            if text:
                self._artists[key, "text"] = self.ax.annotate(
                    text, (0, y), (4, 2), xycoords=("axes fraction", "data"), textcoords="offset points",
                    ha="left", va="bottom", fontsize=8.5, color=how["color"], zorder=4,
                    animated=True,
                )  # fmt: skip
                halo = [patheffects.withStroke(linewidth=2.5, foreground=GROUND)]  # readable where curves cross
                self._artists[key, "text"].set_path_effects(halo)
            self._headroom = bool(text)
        self._used |= {key, (key, "text")}
        self.see([], [y])

    def keep(self, key, artist):
        """Any other artist under this key, as part of the ground; the one before it goes."""
        self.drop(key)
        self.version += 1
        self._artists[key] = artist
        self._used.add(key)
        return artist

    def shows(self, content, *keys) -> bool:
        """Whether these artists already show this content; then they stay. Otherwise draw and keep() them."""
        if self._shown.get(keys) == content and all(key in self._artists for key in keys):
            self._used |= set(keys)
            return True
        self._shown[keys] = content
        return False

    def drop(self, key):
        """Take the artist of this key away, if there is one."""
        artist = self._artists.pop(key, None)
        if artist is not None:
            artist.remove()

    def see(self, x, y):
        """Widen the view to these values."""
        for bounds, values in ((self._x, x), (self._y, y)):
            values = np.asarray(values, float)
            values = values[np.isfinite(values)]
            if values.size:
                bounds[:2] = min(bounds[0], values.min()), max(bounds[1], values.max())
                bounds[2] = min(bounds[2], values[values > 0].min(initial=math.inf))

    def finish(self, x="linear", y="linear", y_from=None, y_to=None, x_ticks=None, calm=False):
        """Take away what was not drawn this time; set scales, limits and ticks.

        Args:
            y: "auto" is a log scale where the values span more than a factor of 20.
            y_from, y_to: fixed ends of the y axis.
            calm: keep the limits there are while they suit, so that a live picture does not jump.
        """
        for key in [k for k in self._artists if k not in self._used]:
            self.drop(key)
        if y == "auto":
            y = "log" if self._y[0] > 0 and self._y[1] / self._y[0] > 20 else "linear"
        self._axis(self.ax.xaxis, x, self._x, 0.02, x_ticks, (None, None), False)
        self._axis(self.ax.yaxis, y, self._y, 0.06, None, (y_from, y_to), calm and self._finished)
        self._finished = True
        self._reset()

    def _axis(self, axis, scale, bounds, margin, ticks, fixed, calm):
        log = scale == "log"
        to, back = (math.log10, lambda v: 10**v) if log else (float, float)
        low, high = (bounds[2], bounds[1]) if log else bounds[:2]
        if not low <= high:
            low, high = (0.1, 1.0) if log else (0.0, 1.0)
        low, high = to(low if fixed[0] is None else fixed[0]), to(high if fixed[1] is None else fixed[1])
        room = (high - low) * margin or abs(high) * margin or 1.0
        if log:
            room = max(room, 0.04)
        above = room * (1 + (self._headroom and axis.axis_name == "y"))  # the name of a level may be topmost
        limits = [low - room if fixed[0] is None else low, high + above if fixed[1] is None else high]
        if calm and axis.get_scale() == scale:
            was = [to(v) for v in self.ax.get_ylim()]
            slack = 1e-9 * (was[1] - was[0])  # rounding is no reason to move
            below, above = limits[0] < was[0] - slack, limits[1] > was[1] + slack
            if below or above:  # it grows: some room for what comes
                extra = 0.3 * (max(limits[1], was[1]) - min(limits[0], was[0]))
                limits = [limits[0] - extra if below else was[0], limits[1] + extra if above else was[1]]
            elif limits[1] - limits[0] > 0.6 * (was[1] - was[0]):
                limits = was
        now = axis.get_view_interval().tolist()
        if self._settled.get(axis.axis_name) == (scale, *limits, ticks, now):
            return  # setting limits and ticks anew is a quarter of the time that a live picture takes
        if axis.get_scale() != scale:
            (self.ax.set_xscale if axis.axis_name == "x" else self.ax.set_yscale)(scale)
        low, high = back(limits[0]), back(limits[1])
        self.ax.set(**{f"{axis.axis_name}lim": (low, high)})
        _ticks(axis, scale, low, high, ticks)
        if axis.axis_name == "y":
            axis.grid(True, color=GRID, linewidth=0.8)
            self.ax.set_axisbelow(True)
        self._settled[axis.axis_name] = (scale, *limits, ticks, axis.get_view_interval().tolist())


def _ticks(axis, scale, low, high, ticks):
    along = int(axis.axis_name == "y")
    length = axis.axes.get_position().size[along] * axis.axes.figure.get_size_inches()[along]  # inches
    most = max(3, min(7, int(length / (0.62 if axis.axis_name == "x" else 0.32))))
    axis.set_minor_locator(ticker.NullLocator())
    axis.set_major_formatter(ticker.FuncFormatter(plain))
    if ticks is None and scale != "linear":
        ticks = _log_ticks(low, high, most)
    if ticks is not None:
        axis.set_major_locator(ticker.FixedLocator(ticks))
    else:
        axis.set_major_locator(ticker.MaxNLocator(most, steps=[1, 2, 2.5, 5, 10] if along == 0 else [1, 2, 5, 10]))


def _log_ticks(low, high, most) -> list[float] | None:
    """Round values between low and high, from the coarsest set that has three; None for less than a factor of 1.3,
    which linear ticks serve better.
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for within in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7)):
        ticks = [m * 10.0**e for e in range(first, last + 1) for m in within]
        ticks = [round(t, 12 - first) for t in ticks if low <= t <= high]
        if len(ticks) >= 3:
            return ticks[:: math.ceil(len(ticks) / most)]
    return None


class Drawing:
    """A figure's panels and legend. `drawing(...)` gives back the one a figure already has, where it fits."""

    def __init__(self, figure, kind, panels):
        self.figure, self.kind, self.panels = figure, kind, panels
        self._canvas, self._layers, self._ground = None, {}, None

    def paint(self, canvas, again: bool = False) -> None:
        """Draw everything on an Agg canvas. again: reuse what the ground of the last time has in common with this."""
        if again:
            self._lay_ground(canvas)
        else:
            canvas.draw()
        for panel in self.panels:
            for artist in panel.moving():
                panel.ax.draw_artist(artist)

    def _lay_ground(self, canvas):
        """Put the ground on the canvas. Each panel's part, and what belongs to none, is kept as a picture of its own:
        mostly one panel changes, and words are slow. Together they are the darkest of each pixel: all is ink on white.
        """
        if self._canvas is not canvas:
            self._canvas, self._layers, self._ground = canvas, {}, None
        renderer = canvas.get_renderer()
        page = np.asarray(renderer.buffer_rgba())  # (height, width, 4)
        axes = {panel.ax: panel.ground() for panel in self.panels}
        parts = [([ax], state) for ax, state in axes.items()]
        ground = {self.figure.patch, *axes}
        parts.append(([part for part in self.figure.get_children() if part not in ground], None))
        for key, (artists, state) in enumerate(parts):
            if key in self._layers and self._layers[key][0] == state:
                continue
            page[:] = 255
            for artist in sorted(artists, key=lambda artist: artist.get_zorder()):
                artist.draw(renderer)
            self._layers[key] = (state, page.copy())
            self._ground = None
        if self._ground is None:
            self._ground = np.minimum.reduce([picture for _, picture in self._layers.values()])
        page[:] = self._ground

    def describe(self, what: str, numbers: str = "") -> Figure:
        """Give the figure its alternative text: what it shows, then what the data says. Returns the figure.

        `what` alone, which holds no measured number, is what a notebook's stored output compares.
        """
        self.figure.what = what
        self.figure.alt = f"{what} {numbers}".strip()
        return self.figure


def drawing(figure, name, rows=1, columns=1, *, size, legend=(), share_y=False, right=0.15, **grid) -> Drawing:
    """Panels in a figure, ready to be drawn on.

    Args:
        figure: one to draw into, or None for a new one. What it holds is kept if it is the same kind of drawing.
        name: the kind of drawing.
        size: (width, height) in inches of a new figure, legend not counted; an existing one keeps its size.
        legend: (label, handle) pairs; they stand in a strip above the panels, where they cover no data.
        right: inches free at the right.
        grid: hspace and wspace, in inches; left, bottom in inches.
    """
    labels = tuple(label for label, _ in legend)
    kind = (name, rows, columns, labels)
    known = getattr(figure, "drawing", None)
    if known is not None and known.kind == kind:
        for panel in known.panels:
            panel._reset()
        return known
    width = size[0] if figure is None else figure.get_size_inches()[0]
    columns_of_legend, lines = _legend_shape(labels, width)
    strip = 0.05 + 0.21 * lines if lines else 0.0
    if figure is None:
        figure = Figure(figsize=(size[0], size[1] + strip), dpi=DPI)
    figure.clear()
    figure.set_facecolor(GROUND)
    height = figure.get_size_inches()[1]
    left, bottom = grid.get("left", 0.72), grid.get("bottom", 0.5)
    hspace, wspace = grid.get("hspace", 0.62), grid.get("wspace", 0.75)
    inner_w = (width - left - right - wspace * (columns - 1)) / columns
    inner_h = (height - bottom - 0.34 - strip - hspace * (rows - 1)) / rows
    axes = []
    for index in range(rows * columns):
        row, column = divmod(index, columns)
        x, y = left + column * (inner_w + wspace), bottom + (rows - 1 - row) * (inner_h + hspace)
        box = [x / width, y / height, inner_w / width, inner_h / height]
        axes.append(figure.add_axes(box, sharey=axes[0] if share_y and axes else None))
    if lines:
        figure.legend(
            [handle for _, handle in legend], labels, loc="upper left", bbox_to_anchor=(0.06, 1),
            ncols=columns_of_legend, frameon=False, fontsize=9.5, handlelength=2.2, columnspacing=1.4,
            borderaxespad=0.2, labelcolor=INK,
        )  # fmt: skip
    figure.drawing = Drawing(figure, kind, [Panel(ax, frame=False) for ax in axes])
    return figure.drawing


def _legend_shape(labels, width):
    """Columns and lines of a legend that fits the width (an estimate: 0.078 inches a letter)."""
    for columns in range(len(labels), 0, -1):
        lines = math.ceil(len(labels) / columns)
        longest = [max(map(len, labels[i : i + lines])) for i in range(0, len(labels), lines)]
        if columns == 1 or sum(0.6 + 0.078 * n for n in longest) <= width - 0.9:
            return math.ceil(len(labels) / lines), lines  # no more columns than were measured
    return 0, 0


def handle(color=INK, marker="", line="-", width=1.8, size=5, **more) -> Line2D:
    """A line for a legend."""
    return Line2D([], [], color=color, marker=marker, linestyle=line, linewidth=width, markersize=size, **more)


def patch(color, alpha=1.0) -> Patch:
    """A filled box for a legend."""
    return Patch(facecolor=color, alpha=alpha, linewidth=0)


def thin(x, y, limit: int = 600):
    """The finite points of (x, y), at most about `limit` of them: of each stretch its lowest and highest point stay,
    so that no peak is lost.
    """
    x, y = np.asarray(x, float), np.asarray(y, float)
    good = np.isfinite(x) & np.isfinite(y)
    x, y = x[good], y[good]
    if len(x) <= limit:
        return x, y
    kept = {0, len(x) - 1}
    for piece in np.array_split(np.arange(len(x)), limit // 2):
        kept |= {piece[np.argmin(y[piece])], piece[np.argmax(y[piece])]}
    kept = sorted(kept)
    return x[kept], y[kept]
