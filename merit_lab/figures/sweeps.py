"""Figures of many finished runs: final loss and peak logit against learning rate, batch size, or rung."""

import math

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ..errors import InputError
from . import style
from .curves import CROSS, LOSS, curves
from .style import INK, QUIET, THRESHOLD, WIDTH, drawing, handle, join, say


def table(runs) -> pd.DataFrame:
    """A row a run: optimizer, lr, batch_size, seed, val_loss (the last; inf if diverged), peak_logit, diverged."""
    rows = []
    for curve in curves(runs):
        if curve.recipe is None:
            raise InputError(f"run {curve.label}: a sweep needs runs with a recipe; read them with merit_lab.runs")
        _, val = curve.series("val_loss")
        _, peak = curve.series("peak_logit")
        lost = curve.diverged or not val or not math.isfinite(val[-1])
        rows.append({
            "optimizer": curve.optimizer,
            "lr": curve.recipe.lr,
            "batch_size": curve.recipe.batch_size,
            "seed": curve.recipe.seed,
            "val_loss": math.inf if lost else val[-1],
            "peak_logit": max((p for p in peak if math.isfinite(p)), default=math.nan),
            "diverged": lost,
        })  # fmt: skip
    return pd.DataFrame(rows)


def best_of_each(data: pd.DataFrame) -> pd.DataFrame:
    """Of a `table`: for each optimizer at each batch size the runs at the learning rate with the best mean over its
    seeds; all of them where every rate lost a seed.
    """
    chosen = []
    for _, group in data.groupby(["optimizer", "batch_size"], sort=False):
        means = group.groupby("lr").val_loss.mean()
        chosen.append(group[group.lr == means.idxmin()] if np.isfinite(means.min()) else group)
    return pd.concat(chosen)


def sweep_lr(runs, *, loss_to: float | None = None, figure: Figure | None = None) -> Figure:
    """Final validation loss and peak attention logit against learning rate, a colour an optimizer, a column of
    panels a batch size. Seeds: mean, range as a band. Diverged runs stand as crosses at the top; the best rate of
    each optimizer is ringed.

    Args:
        loss_to: where the loss axis ends, for runs so far above the others that these could not be told apart; what
            ends above leaves the picture, and the alternative text counts it.
    """
    data = table(runs)
    batches = sorted(data.batch_size.unique())
    side_by_side = len(batches) == 1
    rows, columns = (1, 2) if side_by_side else (2, len(batches))
    names = list(dict.fromkeys(data.optimizer))
    seen, top = data, None
    if loss_to is not None:
        seen = data[data.diverged | (data.val_loss <= loss_to)]
        if seen.diverged.all():
            raise InputError(f"loss_to: got {loss_to!r}, below the loss of every run; give a larger one or None")
        if len(seen) < len(data):  # room for the crosses above
            low = seen.val_loss.min()
            top = loss_to + (0.2 * (loss_to - low) if data.diverged.any() else 0)
    page = drawing(figure, "sweep lr", rows, columns, size=(WIDTH, 3.6 if side_by_side else 5.6),
                   legend=_legend(names, data, "best rate"), wspace=0.75 if side_by_side else 0.6)  # fmt: skip
    words = []
    for i, batch in enumerate(batches):
        part = data[data.batch_size == batch]
        panels = page.panels[i], page.panels[columns * (rows - 1) + i + side_by_side]
        best = _against(panels, part, names, "lr", ring=True, of=seen, name_threshold=side_by_side or i == 0)
        title = f"batch of {batch} sequences"
        panels[0].words(f"final validation loss, {title}" if side_by_side else title,
                        "learning rate" if side_by_side else "", LOSS if i == 0 else "")  # fmt: skip
        panels[1].words("peak max attention logit" if side_by_side else "", "learning rate",
                        "peak |q·k / √d|" if i == 0 else "")  # fmt: skip
        panels[0].see(data.lr, seen.val_loss)  # one scale for every batch size
        panels[1].see([], data.peak_logit)
        panels[0].finish(x="log", y="auto" if top is None else "linear", y_to=top)
        panels[1].finish(x="log", y="log")
        words.append(f"Best at batch {batch}: {join(best)}.")
    return page.describe(
        f"Final validation loss and peak attention logit against learning rate for {join(names)}; diverged runs are "
        "crosses at the top.",
        f"{' '.join(words)} {_lost(data)}{_above(data, loss_to)}",
    )


def sweep_batch(runs, *, figure: Figure | None = None) -> Figure:
    """Final validation loss and peak attention logit against batch size. Of each optimizer at each batch size the
    learning rate with the best mean over its seeds is taken; a rate at which a seed diverged is not the best.
    """
    data = table(runs)
    names = list(dict.fromkeys(data.optimizer))
    part = best_of_each(data)
    page = drawing(figure, "sweep batch", 1, 2, size=(WIDTH, 3.6), legend=_legend(names, part, None))
    _against(page.panels, part, names, "batch_size", ring=False)
    page.panels[0].words("final validation loss, best rate of each", "batch (sequences)", LOSS)
    page.panels[1].words("peak max attention logit at that rate", "batch (sequences)", "peak |q·k / √d|")
    ticks = sorted(data.batch_size.unique())
    for panel in page.panels:
        panel.finish(x="log", y="log" if panel is page.panels[1] else "auto", x_ticks=ticks if len(ticks) < 9 else None)
    words = []
    for name in names:
        means = part[(part.optimizer == name) & ~part.diverged].groupby("batch_size").val_loss.mean()
        if len(means):
            words.append(f"{name} from {say(means.iloc[0])} at batch {means.index[0]} to {say(means.iloc[-1])} at "
                         f"{means.index[-1]}")  # fmt: skip
    return page.describe(
        f"Final validation loss and peak attention logit against batch size, each at its best learning rate, for "
        f"{join(names)}.",
        f"Loss: {join(words)}. {_lost(part)}",
    )


def ladder(runs, *, figure: Figure | None = None) -> Figure:
    """A row an optimizer or rung: final validation loss and peak logit, a dot a seed, the mean as a bar. Of each the
    learning rate with the best mean is taken. Rows stand in the order of the runs, from the top.
    """
    data = table(runs)
    names = list(dict.fromkeys(data.optimizer))
    chosen, words = [], []
    for name in names:
        group = data[data.optimizer == name]
        means = group.groupby("lr").val_loss.mean()
        group = group[group.lr == means.idxmin()] if np.isfinite(means.min()) else group
        chosen.append(group)
        words.append(f"{name} {say(means.min())} at lr {means.idxmin():g}" if np.isfinite(means.min())
                     else f"{name} diverged")  # fmt: skip
    page = drawing(figure, f"ladder {len(names)}", 1, 2, size=(WIDTH, 1.1 + 0.34 * len(names)), left=2.3, wspace=0.3)
    for panel, quantity in zip(page.panels, ("val_loss", "peak_logit"), strict=True):
        for row, (name, group) in enumerate(zip(names, chosen, strict=True)):
            look, values = style.look(name), group[quantity].to_numpy(float)
            values = values[np.isfinite(values)]
            panel.line((name, "seeds"), values, [-row] * len(values), color=look.color, marker=look.marker,
                       linestyle="", markersize=7, alpha=0.85, markeredgecolor="white")  # fmt: skip
            if len(values):
                panel.line((name, "mean"), [values.mean()] * 2, [-row - 0.33, -row + 0.33], color=INK, linewidth=1.6)
        if quantity == "peak_logit":
            panel.keep("threshold", panel.ax.axvline(THRESHOLD, color=INK, linewidth=1, linestyle=(0, (5, 3))))
            panel.see([THRESHOLD], [])
        for row, group in enumerate(chosen):
            if group.diverged.any() and quantity == "val_loss":
                panel.keep((row, "lost"), panel.ax.annotate(
                    f"{int(group.diverged.sum())} of {len(group)} diverged", (0.99, -row),
                    xycoords=("axes fraction", "data"), ha="right", va="center", fontsize=8.5, color=INK,
                ))  # fmt: skip
        panel.see([], [0.6, -len(names) + 0.4])
        panel.words("final validation loss" if quantity == "val_loss" else "peak max attention logit",
                    LOSS if quantity == "val_loss" else f"peak |q·k / √d|; dashed: {THRESHOLD}", "")  # fmt: skip
        panel.finish(x="log" if quantity == "peak_logit" else "linear", y_from=-len(names) + 0.4, y_to=0.6)
        panel.ax.set_yticks([-i for i in range(len(names))], names if panel is page.panels[0] else [""] * len(names))
    return page.describe(
        f"Final validation loss and peak attention logit of {join(names)}, a dot a seed, a bar at the mean.",
        f"Mean loss at the best rate: {join(words)}.",
    )


def loss_against_logit(
    runs, *, joined: bool = False, up_to: float | None = None, figure: Figure | None = None
) -> Figure:
    """Every run as a point: peak max attention logit across, final validation loss up. Diverged runs at the top.

    Args:
        joined: join the learning rates of each optimizer, rising, at the means over their seeds: along such a line
            the optimizer is the same, between lines it is not.
        up_to: where the logit's axis ends; the title says how many runs lie beyond.
    """
    data = table(runs)
    names = list(dict.fromkeys(data.optimizer))
    beyond = data[data.peak_logit > up_to] if up_to else data[:0]
    seen = data.drop(beyond.index)
    page = drawing(figure, f"loss against logit {joined}", size=(WIDTH, 4.0),
                   legend=_legend(names, seen, None, line="-" if joined else ""))  # fmt: skip
    panel = page.panels[0]
    for name in names:
        part = data[(data.optimizer == name) & ~data.diverged]
        look = style.look(name)
        panel.line(name, part.peak_logit, part.val_loss, in_view=False, color=look.color, marker=look.marker,
                   linestyle="", markersize=7, markeredgecolor="white", markeredgewidth=0.6, zorder=3)  # fmt: skip
        if joined:
            rates = part[part.peak_logit > 0].assign(peak_logit=lambda rows: np.log(rows.peak_logit)).groupby("lr")
            path = rates[["peak_logit", "val_loss"]].mean()
            panel.line((name, "path"), np.exp(path.peak_logit), path.val_loss, in_view=False, color=look.color,
                       linewidth=1.3, alpha=0.7)  # fmt: skip
    panel.see(seen.peak_logit, seen.val_loss)
    _crosses(panel, seen, names, "peak_logit")
    panel.keep("threshold", panel.ax.axvline(THRESHOLD, color=INK, linewidth=1, linestyle=(0, (5, 3))))
    panel.see([THRESHOLD], [])
    title = "each run a point" + ("; lines join the learning rates of one optimizer" if joined else "")
    panel.words(title + (f"; {len(beyond)} runs lie beyond" if len(beyond) else ""),
                f"peak max attention logit (dashed: {THRESHOLD}, as in the paper)", f"final {LOSS}")  # fmt: skip
    panel.finish(x="log", y="auto")
    good = data[~data.diverged & data.peak_logit.notna()]
    words = ""
    if len(good) > 2:
        rank = good.peak_logit.rank().corr(good.val_loss.rank())
        words = f"Rank correlation of the two over {len(good)} runs: {rank:.2f}. "
    if len(beyond):
        words += f"{len(beyond)} have a logit beyond {say(up_to)} and are not in view. "
    return page.describe(
        f"Final validation loss against peak attention logit, a point a run, for {join(names)}"
        + (", the learning rates of each joined." if joined else "."),
        words + _lost(data),
    )


def _against(panels, data, names, key, ring, of=None, name_threshold=True) -> list[str]:
    """Loss and logit against a column of the table; returns what is best of each optimizer, in words.

    of: the table whose losses decide where the top is.
    """
    words = []
    for name in names:
        part, look = data[data.optimizer == name], style.look(name)
        if part.empty:
            continue
        for panel, quantity in zip(panels, ("val_loss", "peak_logit"), strict=True):
            good = part[~part.diverged & np.isfinite(part[quantity].to_numpy(float))]
            stats = good.groupby(key)[quantity].agg(["mean", "min", "max"])
            x = stats.index.to_numpy(float)
            panel.band((name, "band"), x, stats["min"], stats["max"], color=look.color, alpha=0.2)
            panel.line(name, x, stats["mean"], color=look.color, marker=look.marker, markersize=6, linewidth=1.7,
                       markeredgecolor="white", zorder=3)  # fmt: skip
            if ring and quantity == "val_loss":
                words.append(_ring(panel, part, name, key, look))
    _crosses(panels[0], data, names, key, of)
    panels[1].level("threshold", THRESHOLD, f"{THRESHOLD}, as in the paper" if name_threshold else f"{THRESHOLD}")
    return words


def _ring(panel, part, name, key, look) -> str:
    means = part.groupby(key).val_loss.mean()
    if not np.isfinite(means.min()):
        return f"{name} diverged at every rate"
    best = means.idxmin()
    panel.line((name, "best"), [best], [means[best]], marker="o", markersize=13, markerfacecolor="none",
               markeredgecolor=look.color, markeredgewidth=1.6, linestyle="", zorder=4)  # fmt: skip
    edge = ", the edge of its grid" if len(means) > 1 and best in (means.index[0], means.index[-1]) else ""
    return f"{name} {say(means[best])} at lr {best:g}{edge}"


def _crosses(panel, data, names, key, of=None):
    """Diverged runs at the top of a panel: they belong to the picture, though they have no loss."""
    lost = data[data.diverged & data[key].notna()]
    of = data if of is None else of
    if not (of.diverged & of[key].notna()).any():
        return
    values = of.val_loss[np.isfinite(of.val_loss)]
    low, high = (values.min(), values.max()) if len(values) else (0.0, 1.0)
    top = high + 0.14 * ((high - low) or 1)
    for i, name in enumerate(names):
        x = lost[lost.optimizer == name][key].to_numpy(float)
        if len(x):  # side by side, where several optimizers diverged at the same place
            x = x * 1.05 ** (i - (len(names) - 1) / 2)
            panel.line((name, "lost"), x, [top] * len(x), **CROSS | {"color": style.look(name).color})
    line = high + 0.07 * ((high - low) or 1)
    panel.level("lost", line, color=QUIET, linewidth=0.8, linestyle=":")
    panel.see([], [top])


def _legend(names, data, ring, line="-"):
    items = [(name, handle(style.look(name).color, style.look(name).marker, line)) for name in names]
    if ring:
        items.append((ring, handle("none", "o", "", size=11, markerfacecolor="none", markeredgecolor=INK)))
    if data.diverged.any():
        items.append(("diverged (at the top)", handle("white", "X", "", size=9, markeredgecolor=INK)))
    return items


def _above(data, loss_to) -> str:
    """How many runs end above the picture, in words."""
    out = data[~data.diverged & (data.val_loss > loss_to)] if loss_to is not None else data[:0]
    if out.empty:
        return ""
    count = out.groupby("optimizer", sort=False).size()
    return f" Above {say(loss_to)} and out of the picture: {join(f'{n} of {name}' for name, n in count.items())}."


def _lost(data):
    lost = data[data.diverged]
    if lost.empty:
        return "No run diverged."
    count = lost.groupby("optimizer", sort=False).size()
    return f"Diverged: {join(f'{n} of {name}' for name, n in count.items())}."
