"""Figures of runs over time, each one function, drawn from StepRecords alone.

    loss_and_logit([runs.read("a.jsonl"), runs.read("b.jsonl")])
    loss_and_logit([("AdamW", records), ("MERIT", more_records)])

Every function takes a run or several, live or recorded, as

    a Run or anything else with `.recipe` and records to iterate over (a Training is run to its end),
    a pair (label, run or list of StepRecord), or a dict of them, label -> run,

and returns the matplotlib Figure, its alternative text in `figure.alt`. `figure=` draws into a figure that is there:
if the same function drew it, only what changed is drawn anew, which is what live pictures do.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib import ticker
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from ..errors import InputError
from ..training import StepRecord
from . import style
from .style import INK, QUIET, THRESHOLD, WIDTH, drawing, handle, join, patch, say

QUANTITIES = {
    "val_loss": ("validation loss", "nats a token"),
    "train_loss": ("train loss", "nats a token"),
    "peak_logit": ("max attention logit", ""),
    "grad_norm": ("gradient norm", "global ℓ2"),
}
EVERY_STEP = ("train_loss", "grad_norm")
LOSS = "loss (nats a token)"
OVER = "#35e0d0"  # the outline of what exceeds the threshold
SPREAD = ("range", "sd")


class Curve(NamedTuple):
    """One run as a figure sees it."""

    label: str
    records: Sequence[StepRecord]
    optimizer: str | None
    recipe: object | None
    measured: Sequence[StepRecord]  # those records that measured more than the step itself
    line: str = "-"  # one of style.LINES: tells runs of the same optimizer apart

    @property
    def look(self) -> style.Look:
        """Colour and marker."""
        return style.look(self.optimizer)

    @property
    def diverged(self) -> bool:
        """Whether the loss stopped being finite."""
        return bool(self.records) and self.records[-1].diverged

    def series(self, quantity) -> tuple[list[StepRecord], list[float]]:
        """The records that hold a quantity (a field's name or a function of a record), and its values."""
        if quantity in EVERY_STEP:
            return self.records, [getattr(record, quantity) for record in self.records]
        get = quantity if callable(quantity) else lambda record: getattr(record, quantity)
        pairs = [(record, value) for record in self.measured if (value := get(record)) is not None]
        return [record for record, _ in pairs], [value for _, value in pairs]


def curves(runs) -> list[Curve]:
    """Any of the forms that figures take, as Curves with labels that tell them apart."""
    if isinstance(runs, dict):
        runs = list(runs.items())
    elif isinstance(runs, Curve) or _is_run(runs) or _is_pair(runs):
        runs = [runs]
    elif isinstance(runs, str) or not isinstance(runs, Iterable):
        raise InputError(f"runs: got {runs!r}, expected a run or several; read files with merit_lab.runs.read")
    else:
        runs = list(runs)
        if runs and isinstance(runs[0], StepRecord):
            runs = [("run", runs)]
    if not runs:
        raise InputError("runs: got none, expected at least one run")
    found = [_curve(run) for run in runs]
    names = _labels(found)
    seen, result = Counter(), []
    for curve, label in zip(found, names, strict=True):
        key = curve.look
        result.append(curve._replace(label=label, line=style.LINES[seen[key] % len(style.LINES)]))
        seen[key] += 1
    return result


def _is_run(x):
    return hasattr(x, "recipe") and not isinstance(x, Curve)


def _is_pair(x):
    return isinstance(x, tuple) and not isinstance(x, Curve) and len(x) == 2 and isinstance(x[0], str)


def _curve(run) -> Curve:
    if isinstance(run, Curve):
        return run
    label = None
    if _is_pair(run):
        label, run = run
    recipe = getattr(run, "recipe", None)
    try:
        records = getattr(run, "records", None)
        records = list(run) if records is None else records
    except TypeError:
        raise InputError(f"runs: got {run!r}, expected a run, or a pair (label, list of StepRecord)") from None
    if records and not isinstance(records[0], StepRecord):
        raise InputError(f"runs: got a list of {type(records[0]).__name__}, expected StepRecords")
    if label in style.LOOKS or recipe is None:  # a variant ("AdamW + QK-norm") counts as an optimizer of its own
        optimizer = style.optimizer_in(label or "")
    else:
        optimizer = recipe.optimizer
    measured = [r for r in records if r.val_loss is not None or r.max_attention_logit or r.ratios is not None]
    return Curve(label or "", records, optimizer, recipe, measured)


def _labels(found: list[Curve]) -> list[str]:
    """Optimizer names, and where one comes more than once what differs between its runs."""
    names = []
    for curve in found:
        if curve.label or curve.recipe is None:
            names.append(curve.label or "run")
            continue
        peers = [c.recipe for c in found if c.recipe is not None and c.optimizer == curve.optimizer]
        parts = []
        for field, word in (("model", ""), ("text", ""), ("lr", "lr "), ("batch_size", "batch "), ("seed", "seed ")):
            value = getattr(curve.recipe, field)
            if any(getattr(peer, field) != value for peer in peers):
                parts.append(word + (f"{value:g}" if isinstance(value, float) else str(value)))
        names.append(curve.optimizer + (f" ({', '.join(parts)})" if parts else ""))
    total, count = Counter(names), Counter()
    for i, name in enumerate(names):
        if total[name] > 1:
            count[name] += 1
            names[i] = f"{name} ({count[name]})"
    return names


class _Time(NamedTuple):
    """The time axis that suits these runs: steps where a step means the same in all, else tokens."""

    label: str
    tokens: bool

    def __call__(self, records):
        return [r.tokens / 1e6 for r in records] if self.tokens else [r.step for r in records]


def _time(found: list[Curve]) -> _Time:
    a_step = {c.records[0].tokens / c.records[0].step for c in found if c.records}
    if len(a_step) > 1:
        return _Time("tokens (million)", True)
    return _Time(f"step ({a_step.pop():,.0f} tokens each)" if a_step else "step", False)


# -- loss and logit ----------------------------------------------------------------------------------------------


def loss_and_logit(runs, *, figure: Figure | None = None) -> Figure:
    """Two panels: train loss (thin) with validation loss (marked), and the max attention logit, log scale, with the
    paper's threshold at 100.
    """
    found = curves(runs)
    page = drawing(figure, "loss and logit", 1, 2, size=(WIDTH, 3.5), legend=_legend(found, train=True))
    time = _time(found)
    _loss(page.panels[0], found, time)
    page.panels[0].finish(y="auto")
    _logit(page.panels[1], found, time)
    page.panels[1].finish(y="log")
    return page.describe(
        f"Two panels over {_over(time)} for {_named(found)}: loss, and max attention logit on a log scale with a "
        f"line at {THRESHOLD}.",
        f"{_loss_words(found)} {_logit_words(found)}",
    )


def loss_curves(runs, *, figure: Figure | None = None) -> Figure:
    """Train loss (thin) and validation loss (marked) over time."""
    found = curves(runs)
    page = drawing(figure, "loss", size=(WIDTH, 3.6), legend=_legend(found, train=True))
    time = _time(found)
    _loss(page.panels[0], found, time)
    page.panels[0].finish(y="auto")
    return page.describe(f"Loss over {_over(time)} for {_named(found)}.", _loss_words(found))


def logit_by_layer(runs, *, figure: Figure | None = None) -> Figure:
    """The max attention logit over time, a panel a layer, log scale, one scale for all panels."""
    found = curves(runs)
    n_layer = max((len(r.max_attention_logit) for c in found for r in c.records if r.max_attention_logit), default=0)
    if not n_layer:
        raise InputError("runs: none of them has measured attention logits; record them with probe_every set")
    columns = min(n_layer, 4 if n_layer <= 16 else 6)
    rows = math.ceil(n_layer / columns)
    page = drawing(
        figure, "logit by layer", rows, columns, size=(WIDTH, 0.5 + 2.1 * rows), legend=_legend(found),
        share_y=True, wspace=0.5, hspace=0.72,
    )  # fmt: skip
    time, peaks = _time(found), []
    values = [[m for m in c.series("max_attention_logit")[1]] for c in found]
    every = [x for rows_ in values for table in rows_ for heads in table for x in heads if 0 < x < math.inf]
    for layer, panel in enumerate(page.panels):
        if layer >= n_layer:
            panel.ax.set_visible(False)
            continue
        for curve in found:
            records, y = curve.series(lambda r, i=layer: _of_layer(r, i))
            panel.line(curve.label, time(records), y, **_marked(curve, len(y)))
            peaks.append((max(y, default=-math.inf), layer, curve.label))
        panel.level("threshold", THRESHOLD, str(THRESHOLD) if layer == 0 else "")
        panel.see([], every)
        first, last = layer % columns == 0, layer + columns >= n_layer
        panel.words(f"layer {layer}", time.label if last and first else "", "max attention logit" if first else "")
        panel.finish(y="log")
    peak, layer, label = max(peaks)
    return page.describe(
        f"Max attention logit over {_over(time)}, a panel for each of {n_layer} layers, for {_named(found)}, log "
        f"scale with a line at {THRESHOLD}.",
        f"The largest is {say(peak)}, in layer {layer} of {label}.",
    )


def _of_layer(record, layer):
    table = record.max_attention_logit
    return max(table[layer]) if table and layer < len(table) else None


def _loss(panel, found, time):
    for curve in found:
        records, y = curve.series("train_loss")
        panel.line((curve.label, "train"), time(records), y, color=curve.look.color, linewidth=0.9, alpha=0.55,
                   linestyle=curve.line)  # fmt: skip
        if curve.diverged:
            _mark_end(panel, curve, time(records), y)
        records, y = curve.series("val_loss")
        panel.line((curve.label, "val"), time(records), y, **_marked(curve, len(y)))
    panel.words("loss (thin: train; marked: validation)", time.label, LOSS)


def _logit(panel, found, time, by_layer=False):
    """The largest |logit| of each run; with by_layer also every layer's, thin."""
    for curve in found:
        records, y = curve.series("peak_logit")
        x = time(records)
        if by_layer:
            for layer in range(max((len(r.max_attention_logit) for r in records), default=0)):
                panel.line((curve.label, layer), x, [_of_layer(r, layer) or math.nan for r in records],
                           color=curve.look.color, linewidth=0.8, alpha=0.6, linestyle=curve.line)  # fmt: skip
        panel.line(curve.label, x, y, **_marked(curve, len(y)))
        if curve.diverged:
            _mark_end(panel, curve, x, y)
    panel.level("threshold", THRESHOLD, f"{THRESHOLD}, as in the paper")
    title = "max attention logit" + (" (thin: each layer)" if by_layer else "")
    panel.words(title, time.label, "largest |q·k / √d|")


def _marked(curve, n_points):
    """A curve with markers: all of few points, some of many."""
    return {
        "color": curve.look.color, "marker": curve.look.marker, "linestyle": curve.line, "linewidth": 1.7,
        "markersize": 5, "markevery": max(1, n_points // 30), "markeredgecolor": "white", "markeredgewidth": 0.5,
        "zorder": 3,
    }  # fmt: skip


def _mark_end(panel, curve, x, y):
    """A cross where a run diverged: at its last finite point."""
    finite = [(a, b) for a, b in zip(x, y, strict=True) if math.isfinite(b)]
    if finite:
        panel.line((curve.label, "diverged"), *zip(finite[-1], strict=True), **CROSS | {"color": curve.look.color})


CROSS = {"marker": "X", "markersize": 10, "markeredgecolor": INK, "markeredgewidth": 1, "linestyle": "", "zorder": 5}


def _legend(found, train=False):
    items = [(c.label, handle(c.look.color, c.look.marker, c.line)) for c in found]
    if any(c.diverged for c in found):
        items.append(("diverged here", handle("white", "X", "", size=9, markeredgecolor=INK)))
    return items


# -- layers x time -----------------------------------------------------------------------------------------------


def logit_growth(
    run, *, per_head: bool = False, at: int | None = None, row: bool = False, figure: Figure | None = None
) -> Figure:
    """Layers x time as a heatmap of the max attention logit |z|, log colours; what exceeds 100 is outlined.

    Args:
        run: one run.
        per_head: a row a head in place of a row a layer.
        at: a step to mark.
        row: below it, the attention row of the largest logit at that step (the last, if none is named): of the
            largest z, sign included, since that is what softmax turns one-hot. Where the largest |z| is of another,
            negative logit the sentence says so.
    """
    (curve,) = _one(run)
    records = [r for r in curve.records if r.max_attention_logit]
    if not records:
        raise InputError(f"run {curve.label}: it has measured no attention logits yet")
    tables = np.array([r.max_attention_logit for r in records], float)  # (n_probes, n_layer, n_head)
    n_layer, n_head = tables.shape[1:]
    if per_head:
        values = tables.reshape(len(records), -1).T  # (n_layer * n_head, n_probes)
    else:
        values = tables.max(2).T  # (n_layer, n_probes)
    finite = values[np.isfinite(values) & (values > 0)]
    low = 10.0 ** math.floor(math.log10(finite.min())) if finite.size else 0.1
    high = 10.0 ** math.ceil(math.log10(max(finite.max(initial=0), 2 * THRESHOLD)))
    page = drawing(
        figure, f"growth {low} {high} {values.shape[0]} {row}", 2 if row else 1, 1,
        size=(WIDTH, 5.4 if row else 3.4), right=1.15, hspace=0.95,
    )  # fmt: skip
    panel = page.panels[0]
    edges_x, edges_y = _edges([r.step for r in records]), np.arange(len(values) + 1) - 0.5
    if not panel.shows((curve.label, values.tobytes(), edges_x.tobytes()), "mesh", "outline"):
        shown = np.ma.masked_invalid(values)
        how = {"norm": LogNorm(low, high), "cmap": "magma"}
        panel.keep("mesh", panel.ax.pcolormesh(edges_x, edges_y, shown, rasterized=True, **how))
        outline = _outline(values >= THRESHOLD, edges_x, edges_y)
        panel.keep("outline", panel.ax.add_collection(LineCollection(outline, colors=OVER, linewidths=1.8)))
        _colour_bar(page, panel, how)
    panel.see(edges_x, edges_y)
    if at is not None:
        panel.line("at", [at, at], [edges_y[0], edges_y[-1]], color="white", linewidth=2.6, solid_capstyle="butt")
        panel.line("at 2", [at, at], [edges_y[0], edges_y[-1]], color=INK, linewidth=1, linestyle=(0, (3, 2)))
    panel.words(f"{curve.label}: max attention logit |z|; outlined where it is {THRESHOLD} or more",
                _time([curve]).label, "layer.head" if per_head else "layer")  # fmt: skip
    panel.finish()
    _name_rows(panel.ax, n_layer, n_head if per_head else 0)
    panel.ax.set(xlim=(edges_x[0], edges_x[-1]), ylim=(edges_y[0], edges_y[-1]))
    panel.ax.yaxis.grid(False)
    kind = "head" if per_head else "layer"
    numbers = _growth_words(records, values, n_head if per_head else 0)
    what = f"Heatmap of the max attention logit |z|, {len(values)} {kind}s by time, for {curve.label}, log colours."
    if row:
        chosen = [r for r in records if at is None or r.step <= at] or records[:1]
        numbers += " " + _softmax_bars(page.panels[1], chosen[-1])
        what += " Below it the attention row of the largest z, sign included, at the chosen step."
    return page.describe(what, numbers)


def _one(run) -> list[Curve]:
    found = curves(run)
    if len(found) != 1:
        raise InputError(f"run: got {len(found)} runs, expected one")
    return found


def _edges(x):
    """Edges of cells around these positions, half way between neighbours."""
    x = np.asarray(x, float)
    if len(x) == 1:
        return np.array([x[0] - 0.5, x[0] + 0.5])
    middle = (x[1:] + x[:-1]) / 2
    return np.concatenate([[x[0] - (middle[0] - x[0])], middle, [x[-1] + (x[-1] - middle[-1])]])


def _outline(mask, x, y):
    """The borders between cells inside and outside a mask (rows, columns), as line segments."""
    padded = np.pad(mask, 1)
    segments = []
    for row, column in zip(*np.nonzero(padded[1:-1, 1:] != padded[1:-1, :-1]), strict=True):
        segments.append([(x[column], y[row]), (x[column], y[row + 1])])
    for row, column in zip(*np.nonzero(padded[1:, 1:-1] != padded[:-1, 1:-1]), strict=True):
        segments.append([(x[column], y[row]), (x[column + 1], y[row])])
    return segments


def _colour_bar(page, panel, how):
    if hasattr(page, "bar"):
        return  # the drawing's name holds the limits, so that they are the same
    box = panel.ax.get_position()
    width = page.figure.get_size_inches()[0]
    axes = page.figure.add_axes([box.x1 + 0.18 / width, box.y0, 0.16 / width, box.height])
    page.bar = page.figure.colorbar(ScalarMappable(**how), cax=axes)
    page.bar.outline.set_visible(False)
    axes.tick_params(labelsize=9, color=QUIET, labelcolor=INK)
    axes.set_ylabel("max attention logit |z|", fontsize=9, color=INK)
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(style.plain))
    axes.yaxis.set_minor_locator(ticker.NullLocator())
    axes.axhline(THRESHOLD, color=OVER, linewidth=1.8)


def _name_rows(axes, n_layer, n_head):
    n = n_layer * max(n_head, 1)
    every = math.ceil(n / 16)
    if n_head and every > 1:  # whole layers apart, so that the names stay regular
        every = math.ceil(every / n_head) * n_head
    rows = range(0, n, every)
    axes.yaxis.set_major_locator(ticker.FixedLocator(list(rows)))
    axes.yaxis.set_major_formatter(
        ticker.FuncFormatter(lambda i, _: f"{int(i) // n_head}.{int(i) % n_head}" if n_head else f"{int(i)}")
    )


def _growth_words(records, values, n_head):
    clean = np.where(np.isfinite(values), values, -np.inf)
    row, column = np.unravel_index(clean.argmax(), clean.shape)
    place = f"layer {row // n_head}, head {row % n_head}" if n_head else f"layer {row}"
    words = f"|z| is largest in {place} at step {records[column].step}: {say(clean[row, column])}."
    over = np.nonzero((values >= THRESHOLD).any(0))[0]
    if over.size:
        return f"{words} {THRESHOLD} is first passed at step {records[over[0]].step}."
    return f"{words} It stays below {THRESHOLD}."


def softmax_row(record: StepRecord, *, figure: Figure | None = None) -> Figure:
    """The attention weights of the row that the largest z, sign included, belongs to, as bars over the key positions.
    """
    if record.largest_logit is None:
        raise InputError(f"record of step {record.step}: attention was not measured here; take a probe step")
    page = drawing(figure, "softmax row", size=(WIDTH, 2.8))
    return page.describe(
        "Bars: the attention weights of the row that holds the largest logit z, sign included.",
        _softmax_bars(page.panels[0], record),
    )


def _softmax_bars(panel, record) -> str:
    """Draw the bars; returns the sentence that says what they show."""
    if record.largest_logit is None:
        panel.words(f"step {record.step}: attention was not measured")
        panel.finish()
        return f"At step {record.step} attention was not measured."
    top = record.largest_logit
    weights = np.asarray(top["softmax"], float)
    # One outline in place of a rectangle a key: a context of 1024 draws as fast as one of 8.
    corners = (np.arange(len(weights))[:, None] + np.array([-0.4, -0.4, 0.4, 0.4])).ravel()
    heights = (weights[:, None] * np.array([0, 1, 1, 0])).ravel()
    panel.band("bars", corners, 0 * heights, heights, color=style.PLAIN[0].color, alpha=1)
    panel.line("key", [top["key"]], [weights[top["key"]]], marker="v", color=style.PLAIN[1].color, markersize=8,
               markeredgecolor=INK, markeredgewidth=0.6, linestyle="")  # fmt: skip
    panel.see([-0.6, max(len(weights) - 0.4, 4)], [0, 1])
    place = f"layer {top['layer']}, head {top['head']}"
    panel.words(
        f"step {record.step}: attention of query {top['query']} in {place}; the largest z, "
        f"{say(top['logit'])}, is at key {top['key']}",
        "key position", "attention weight",
    )  # fmt: skip
    panel.finish(y_from=0, y_to=1.08)
    entropy, most = float(-sum(p * math.log(p) for p in weights if p > 0)), math.log(max(len(weights), 1))
    size, other = record.peak_logit, ""
    # Above the largest z by more than the rounding of records. A large negative logit turns no row one-hot.
    if size is not None and size > max(top["logit"], 0) * 1.001:
        other = f" The largest |z| then, {say(size)}, is of a negative logit elsewhere."
    return (
        f"At step {record.step} the largest z, sign included, is {say(top['logit'])} ({place}, query {top['query']}, "
        f"key {top['key']}); that key gets {say(100 * weights[top['key']], 2)} % of the attention, and the row's "
        f"entropy is {say(entropy, 2)} of at most {say(most, 2)} nats.{other}"
    )


def entropy_over_time(runs, *, figure: Figure | None = None) -> Figure:
    """Attention entropy over time: the lowest head marked, the mean of all heads thin, uniform attention dashed."""
    found = curves(runs)
    page = drawing(figure, "entropy", size=(WIDTH, 3.6), legend=_legend(found))
    panel, time = page.panels[0], _time(found)
    words = []
    for curve in found:
        records, tables = curve.series("attention_entropy")
        x, lowest = time(records), [min(map(min, t)) for t in tables]
        mean = [sum(map(sum, t)) / sum(map(len, t)) for t in tables]
        panel.line((curve.label, "mean"), x, mean, color=curve.look.color, linewidth=0.9, alpha=0.6,
                   linestyle=curve.line)  # fmt: skip
        panel.line(curve.label, x, lowest, **_marked(curve, len(x)))
        if curve.diverged:
            _mark_end(panel, curve, x, lowest)
        if lowest:
            words.append(f"{curve.label} from {say(lowest[0])} to {say(lowest[-1])}")
    lengths = {c.recipe.block_size for c in found if c.recipe is not None}
    if len(lengths) == 1:
        length = lengths.pop()  # row i of uniform causal attention has entropy ln(i + 1)
        panel.level("uniform", math.lgamma(length + 1) / length, "uniform attention", linestyle=":")
    panel.words("attention entropy (marked: lowest head; thin: mean of all)", time.label, "entropy (nats)")
    panel.finish(y_from=0)
    return page.describe(
        f"Attention entropy over {_over(time)} for {_named(found)}: the lowest head and the mean of all.",
        f"The lowest head goes {join(words)} nats." if words else "Nothing was measured yet.",
    )


# -- trust ratios ------------------------------------------------------------------------------------------------


def ratio_tensors(runs) -> list[str]:
    """The names of all tensors that have trust ratios in these runs, in the model's order."""
    names = {}
    for curve in curves(runs):
        for record in curve.records:
            if record.ratios:
                names |= dict.fromkeys(record.ratios)
                break
    return list(names)


def some_tensors(names: Sequence[str], limit: int = 6) -> list[str]:
    """A choice that fits on a page: queries, keys and the MLP's first matrix of the first and the last layer."""
    matrices = [n for n in names if n.endswith(".weight") and "norm" not in n]
    layers = sorted({int(n.split(".")[1]) for n in matrices if n.startswith("blocks.")})
    ends = [layers[0], layers[-1]] if len(layers) > 1 else layers
    wanted = ("attention.query", "attention.key", "attention.qkv", "mlp.expand")
    chosen = [n for n in matrices for i in ends for w in wanted if n == f"blocks.{i}.{w}.weight"]
    return (chosen or matrices or list(names))[:limit]


def short(tensor: str) -> str:
    """A parameter's name for people: "layer 0 · W_Q"."""
    names = {"query": "W_Q", "key": "W_K", "value": "W_V", "qkv": "W_QKV", "project": "W_O",
             "mlp.expand": "MLP in", "mlp.project": "MLP out"}  # fmt: skip
    parts = tensor.split(".")
    if parts[0] != "blocks" or len(parts) < 5:
        return tensor.removesuffix(".weight").replace("_", " ")
    part = names.get(f"{parts[2]}.{parts[3]}") or names.get(parts[3]) or f"{parts[2]} {parts[3]}"
    return f"layer {parts[1]} · {part}" + ("" if parts[4] == "weight" else f" {parts[4]}")


def ratio_over_time(runs, tensors: Sequence[str] | None = None, *, figure: Figure | None = None) -> Figure:
    """Trust ratios over time, a panel a tensor: the median, and the quarter of the elements above and below it.

    Args:
        tensors: parameter names; by default queries, keys and MLP of the first and the last layer.
    """
    found = curves(runs)
    names = ratio_tensors(found)
    tensors = _known_tensors(tensors, names) if tensors else some_tensors(names)
    if not tensors:
        raise InputError("runs: none of them has trust ratios (AdamW has none); take a run of LAMB or MERIT")
    with_ratio = [c for c in found if any(r.ratios for r in c.records)]
    columns = min(len(tensors), 3)
    rows = math.ceil(len(tensors) / columns)
    page = drawing(figure, "ratios", rows, columns, size=(WIDTH, 0.5 + 2.3 * rows), legend=_legend(with_ratio),
                   wspace=0.7, hspace=0.72)  # fmt: skip
    time, words = _time(found), []
    for i, panel in enumerate(page.panels):
        if i >= len(tensors):
            panel.ax.set_visible(False)
            continue
        for curve in with_ratio:
            records, q = curve.series(lambda r, name=tensors[i]: (r.ratios or {}).get(name, {}).get("quantiles"))
            _quartiles(panel, curve, time(records), np.array(q, float).reshape(-1, 5))
            if q and not words:
                words.append(f"In {short(tensors[i])} the median of {curve.label} goes from {say(q[0][2])} to "
                             f"{say(q[-1][2])}.")  # fmt: skip
        first, last = i % columns == 0, i + columns >= len(tensors)
        panel.words(short(tensors[i]), time.label if last and first else "", "trust ratio" if first else "")
        panel.finish(y="log")
    return page.describe(
        f"Trust ratios over {_over(time)} of {len(tensors)} tensors for {_named(with_ratio)}, log scale: median, and "
        "quartiles as a band.",
        " ".join(words),
    )


def _known_tensors(tensors, names):
    for name in tensors:
        if name not in names:
            raise InputError(f"tensors: got {name!r}, expected some of {', '.join(names) or 'none: no ratios here'}")
    return list(tensors)


def _quartiles(panel, curve, x, q):
    """Median line and quartile band. q: (n, 5), minimum, quartiles, maximum."""
    if not len(q):
        return
    q = np.where(q > 0, q, np.nan)  # a ratio of 0 has no place on a log scale
    panel.band((curve.label, "band"), x, q[:, 1], q[:, 3], color=curve.look.color)
    panel.line(curve.label, x, q[:, 2], **_marked(curve, len(x)))


def shares_over_time(runs, tensor: str | None = None, *, figure: Figure | None = None) -> Figure:
    """What decided the trust ratios, a panel a run: shares of row, column, bound and zero guard, stacked to 1, and
    the share of elements whose step was clipped as a line.

    Args:
        tensor: one parameter's name; by default the mean over all tensors, each counted alike.
    """
    found = [c for c in curves(runs) if any(r.ratios for r in c.records)]
    if not found:
        raise InputError("runs: none of them has trust ratios (AdamW has none); take a run of LAMB or MERIT")
    if tensor is not None:
        _known_tensors([tensor], ratio_tensors(found))
    names = {"row": "row ratio", "column": "column ratio", "bound": "bound b", "guarded": "zero guard"}
    legend = [(text, patch(style.PARTS[part].color, 0.75)) for part, text in names.items()]
    legend.append(("clipped", handle(INK, style.PARTS["clipped"].marker)))
    columns = min(len(found), 3)
    rows = math.ceil(len(found) / columns)
    page = drawing(figure, "shares", rows, columns, size=(WIDTH, 0.5 + 2.6 * rows), legend=legend, hspace=0.72)
    time, words = _time(found), []
    for panel, curve in zip(page.panels, found, strict=False):
        records, shares = curve.series(lambda r: mean_shares(r, tensor))
        x, shares = time(records), np.array(shares, float).reshape(-1, 5)
        base = np.zeros(len(x))
        for i, part in enumerate(names):
            panel.band(part, x, base, base + shares[:, i], color=style.PARTS[part].color, alpha=0.75,
                       edgecolor="white", linewidth=0.6)  # fmt: skip
            base = base + shares[:, i]
        panel.line("clipped", x, shares[:, 4], color=INK, marker=style.PARTS["clipped"].marker, markersize=5,
                   linewidth=1.6, markevery=max(1, len(x) // 20), markeredgecolor="white")  # fmt: skip
        panel.words(curve.label, time.label, "share of elements" if panel is page.panels[0] else "")
        panel.finish(y_from=0, y_to=1)
        if len(shares):
            end = dict(zip(style.PARTS, shares[-1], strict=True))
            words.append(
                f"{curve.label} ends with "
                + join(f"{say(100 * end[part], 2)} % {text}" for part, text in names.items() if end[part] > 0)
                + f", {say(100 * end['clipped'], 2)} % clipped"
            )
    for panel in page.panels[len(found) :]:
        panel.ax.set_visible(False)
    where = short(tensor) if tensor else "all tensors on average"
    return page.describe(
        f"What decided the trust ratios over {_over(time)} in {where}, for {_named(found)}: stacked shares of row, "
        "column, bound and zero guard, and the clipped share as a line.",
        "; ".join(words) + "." if words else "",
    )


def mean_shares(record: StepRecord, tensor: str | None = None) -> list[float] | None:
    """Shares (row, column, bound, guarded, clipped) at a record, of a tensor or as the mean over all of them."""
    if not record.ratios:
        return None
    rows = [record.ratios[tensor]] if tensor in record.ratios else record.ratios.values()
    if tensor is not None and tensor not in record.ratios:
        return None
    keys = ("won_row", "won_column", "won_bound", "guarded", "clipped")
    return [sum(row[key] for row in rows) / len(rows) for key in keys]


# -- live --------------------------------------------------------------------------------------------------------


def dashboard(
    runs,
    *,
    tensor: str | None = None,
    until: int | None = None,
    at: int | None = None,
    live: bool = False,
    figure: Figure | None = None,
) -> Figure:
    """Four panels for runs side by side: loss; max attention logit, a thin line a layer; trust ratios; clip share.

    Args:
        tensor: whose trust ratios and clip share; by default the median over tensors of their quartiles and median,
            and the mean clip share.
        until: the last step of the time axis, for runs that are still going.
        at: a step to mark, in replay.
        live: keep the axes of the picture before while they suit.
    """
    found = curves(runs)
    page = drawing(figure, "dashboard", 2, 2, size=(WIDTH, 5.4), legend=_legend(found), hspace=0.8)
    time, words, with_ratio = _time(found), [], []
    loss, logit, ratio, clip = page.panels
    _loss(loss, found, time)
    _logit(logit, found, time, by_layer=True)
    for curve in found:
        records, q = curve.series(lambda r: _typical(r, tensor))
        if not q:
            continue
        with_ratio.append(curve)
        x = time(records)
        _quartiles(ratio, curve, x, np.array(q, float))
        clipped = [mean_shares(r, tensor)[4] for r in records]
        clip.line(curve.label, x, clipped, **_marked(curve, len(x)))
        words.append(f"{curve.label} {say(q[-1][2])} and {say(100 * clipped[-1], 2)} %")
    where = short(tensor) if tensor else "all tensors"
    if not with_ratio:
        where = "none so far" if any(not c.records for c in found) else "none here"
    ratio.words(f"trust ratio: median, quartiles ({where})", time.label, "trust ratio")
    clip.words(f"clipped ({where})", time.label, "share of elements")
    clip.see([], [0, 0.02])
    first = next((c.records[0] for c in found if c.records), None)
    a_step = first.tokens / first.step / 1e6 if first and time.tokens else 1
    ends = [0, (until or max((c.records[-1].step for c in found if c.records), default=1)) * a_step]
    for panel in page.panels:
        panel.see(ends, [])
        if at is not None:
            panel.line("at", [at * a_step] * 2, [0, 1], in_view=False, transform=panel.ax.get_xaxis_transform(),
                       color=QUIET, linewidth=1, linestyle=(0, (3, 2)), zorder=1.4)  # fmt: skip
    loss.finish(y="auto", calm=live)
    logit.finish(y="log", calm=live)
    ratio.finish(y="log", calm=live)
    clip.finish(y_from=0, calm=live)
    numbers = f"{_loss_words(found)} {_logit_words(found)}"
    if words:
        numbers += f" Median trust ratio and clipped share now: {join(words)}."
    return page.describe(
        f"Four panels over {_over(time)} for {_named(found)}: loss, max attention logit, trust ratio, clipped share.",
        numbers,
    )


def _typical(record, tensor):
    if not record.ratios:
        return None
    if tensor is not None:
        return record.ratios.get(tensor, {}).get("quantiles")
    return np.median([summary["quantiles"] for summary in record.ratios.values()], axis=0)


# -- seeds -------------------------------------------------------------------------------------------------------


def seeds_band(
    runs, quantity: str = "val_loss", *, spread: str = "range", figure: Figure | None = None
) -> Figure:
    """Runs that differ in their seed alone as one curve: the mean, and a band around it.

    Args:
        quantity: "val_loss", "train_loss", "peak_logit" or "grad_norm".
        spread: what the band is: "range" (lowest to highest seed) or "sd" (mean ± one standard deviation).

    Where a seed has diverged the mean goes on over the others, and a cross marks where it was lost.
    """
    if quantity not in QUANTITIES:
        raise InputError(f"quantity: got {quantity!r}, expected one of {', '.join(QUANTITIES)}")
    if spread not in SPREAD:
        raise InputError(f"spread: got {spread!r}, expected one of {', '.join(SPREAD)}")
    found = curves(runs)
    time, groups = _time(found), {}
    for curve in found:
        groups.setdefault(_without_seed(curve), []).append(curve)
    leaders = [group[0]._replace(label="") for group in groups.values()]
    names = _labels([c._replace(recipe=c.recipe and c.recipe.replace(seed=0)) for c in leaders])
    seen, shown = Counter(), []
    for leader, name, group in zip(leaders, names, groups.values(), strict=True):
        plural = f"{len(group)} seeds" if len(group) > 1 else "1 seed"
        line = style.LINES[seen[leader.look] % len(style.LINES)]
        seen[leader.look] += 1
        shown.append((leader._replace(label=f"{name} ({plural})", line=line), group))
    name, unit = QUANTITIES[quantity]
    page = drawing(figure, f"seeds {quantity}", size=(WIDTH, 3.6),
                   legend=_legend([c._replace(records=next((g.records for g in group if g.diverged), c.records))
                                   for c, group in shown]))  # fmt: skip
    panel, words = page.panels[0], []
    for leader, group in shown:
        at, lost = {}, 0
        for curve in group:
            records, y = curve.series(quantity)
            for x, value in zip(time(records), y, strict=True):
                if math.isfinite(value):
                    at.setdefault(x, []).append(value)
            if curve.diverged:
                lost += 1
                _mark_end(panel, curve._replace(label=curve.label or str(id(curve))), time(records), y)
        x = np.array(sorted(at))
        mean = np.array([np.mean(at[i]) for i in x])
        if spread == "range":
            low, high = np.array([min(at[i]) for i in x]), np.array([max(at[i]) for i in x])
        else:
            sd = np.array([np.std(at[i], ddof=1) if len(at[i]) > 1 else 0.0 for i in x])
            low, high = mean - sd, mean + sd
        panel.band((leader.label, "band"), x, low, high, color=leader.look.color, alpha=0.22)
        panel.line(leader.label, x, mean, **_marked(leader, len(x)))
        if len(x):
            words.append(f"{leader.label} {say(mean[-1])} ({say(low[-1])} to {say(high[-1])})"
                         + (f", {lost} diverged" if lost else ""))  # fmt: skip
    if quantity == "peak_logit":
        panel.level("threshold", THRESHOLD, f"{THRESHOLD}, as in the paper")
    band = "lowest to highest seed" if spread == "range" else "± one standard deviation"
    panel.words(f"{name}: mean over seeds; band: {band}", time.label, f"{name} ({unit})" if unit else name)
    panel.finish(y="log" if quantity == "peak_logit" else "auto")
    return page.describe(
        f"{name.capitalize()} over {_over(time)}, mean over seeds with a band ({band}), for "
        f"{join(c.label for c, _ in shown)}.",
        f"At the end: {join(words)}." if words else "",
    )


def _without_seed(curve):
    if curve.recipe is None:
        return curve.optimizer or curve.label
    return repr(sorted((curve.recipe.to_dict() | {"seed": 0}).items(), key=lambda item: item[0]))


# -- words -------------------------------------------------------------------------------------------------------


def _named(found):
    labels = [c.label for c in found]
    return join(labels) if len(labels) <= 6 else f"{len(labels)} runs"


def _over(time):
    return "tokens" if time.tokens else "steps"


def _loss_words(found):
    words = []
    for curve in found:
        if curve.diverged:
            words.append(f"{curve.label} diverged at step {curve.records[-1].step}")
            continue
        _, y = curve.series("val_loss")
        if y:
            words.append(f"{curve.label} {say(y[-1])}")
        elif curve.records:
            words.append(f"{curve.label} {say(curve.records[-1].train_loss)} (train)")
    return f"Latest validation loss: {join(words)}." if words else "Nothing was measured yet."


def _logit_words(found):
    words = []
    for curve in found:
        records, y = curve.series("peak_logit")
        finite = [v for v in y if math.isfinite(v)]
        if finite:
            over = next((r.step for r, v in zip(records, y, strict=True) if v >= THRESHOLD), None)
            words.append(f"{curve.label} {say(max(finite))}"
                         + (f" ({THRESHOLD} passed at step {over})" if over else ""))  # fmt: skip
    return f"Largest attention logit: {join(words)}." if words else ""
