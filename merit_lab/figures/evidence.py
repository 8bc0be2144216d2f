"""Figures of the recorded sweeps: loss and logit against batch size beside the paper's, what of a loss is inherent."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from ..errors import InputError
from ..probes import average_noise_scale
from . import style
from .curves import LOSS
from .lessons import _DASHES
from .style import INK, QUIET, WIDTH, drawing, handle, join, say
from .sweeps import _against, _legend, best_of_each, table

LOGIT = "peak |q·k / √d|"


def batch_curves(
    sizes: Mapping[str, Iterable],
    paper: Sequence[Mapping[str, Any]] = (),
    *,
    figure: Figure | None = None,
) -> Figure:
    """Final validation loss (top) and peak attention logit (bottom) against batch size: a column a model size, and the
    paper's figures beside. Of each optimizer at each batch the learning rate with the best mean is taken; seeds are the
    mean, with their range as a band.

    Args:
        sizes: name of a model size -> its runs, as every figure takes them (`sweep.read_runs`).
        paper: none, or two claims of data/claims.json by batch size: one of losses, one of logits.
    """
    if not sizes:
        raise InputError("sizes: got none, expected name -> runs")
    if len(paper) not in (0, 2):
        raise InputError(f"paper: got {len(paper)} claims, expected none or two, one of losses and one of logits")
    tables = {size: best_of_each(table(runs)) for size, runs in sizes.items()}
    names = list(dict.fromkeys(name for data in tables.values() for name in data.optimizer))
    columns = len(tables) + bool(paper)
    any_lost = next((data for data in tables.values() if data.diverged.any()), next(iter(tables.values())))
    page = drawing(figure, "batch curves", 2, columns, size=(WIDTH, 5.8), legend=_legend(names, any_lost, None),
                   wspace=0.62, hspace=0.75)  # fmt: skip
    words = []
    for i, (size, data) in enumerate(tables.items()):
        panels = page.panels[i], page.panels[columns + i]
        _against(panels, data, names, "batch_size", ring=False, name_threshold=i == 0)
        panels[0].words(size, "", LOSS if i == 0 else "")
        panels[1].words(size, "batch (sequences)", LOGIT if i == 0 else "")
        for other in tables.values():  # one scale for every size
            finite = other[~other.diverged]
            panels[0].see([], finite.val_loss)
            panels[1].see([], finite.peak_logit)
        ticks = sorted(float(batch) for batch in data.batch_size.unique())
        panels[0].finish(x="log", y="auto", x_ticks=ticks)
        panels[1].finish(x="log", y="log", x_ticks=ticks)
        words.append(f"{size}: {_ends(data, names)}.")
    for panel, claim, label in zip(page.panels[columns - 1 :: columns], paper, (LOSS, LOGIT), strict=False):
        batches = claim["columns"]
        for name, values in claim["values"].items():
            look = style.look(name)
            known = [math.nan if value is None else value for value in values]
            panel.line(name, batches, known, color=look.color, marker=look.marker, markersize=6, linewidth=1.7,
                       linestyle="--", markeredgecolor="white")  # fmt: skip
        panel.words("the paper: " + claim["text"].split(":")[0].split(",")[0],
                    "batch (sequences)" if label == LOGIT else "", "")  # fmt: skip
        if label == LOGIT:
            panel.level("threshold", style.THRESHOLD)
        panel.finish(x="log", y="log" if label == LOGIT else "auto", x_ticks=batches)
        words.append(f"The paper, {claim['text']}: {_paper(claim)}.")
    beside = ", the paper's figures beside" if paper else ""
    return page.describe(
        f"Final validation loss and peak attention logit against batch size for {join(names)}, mean over seeds with "
        f"their range as a band: {join(tables)}{beside}.",
        " ".join(words),
    )


def inherent(
    runs: Iterable,
    model: Mapping[str, Mapping[int, float]],
    scales: Mapping[str, float] | None = None,
    predicted: Mapping[str, Mapping[int, float]] | None = None,
    *,
    figure: Figure | None = None,
) -> Figure:
    """What a larger batch costs at a fixed budget, measured and in the noisy quadratic model.

    Left: final validation loss above the optimizer's own lowest, each at its best rate. Right: the model's loss over
    its own lowest, log scale.

    Args:
        runs: of one model size, several batches.
        model: label -> batch size -> expected loss.
        scales: label -> a noise scale in sequences, a vertical line in the left panel.
        predicted: label -> batch size -> nats, thin lines in the left panel.
    """
    data = best_of_each(table(runs))
    if not model or not all(model.values()):
        raise InputError("model: got none or an empty one, expected label -> batch size -> loss")
    names = list(dict.fromkeys(data.optimizer))
    batches = sorted(float(batch) for batch in data.batch_size.unique())
    legend = _legend(names, data, None)
    legend += [(name, handle(INK, "", _DASHES[1 + i], 1.2)) for i, name in enumerate(predicted or {})]
    looks = style.looks(model)
    legend += [(name, handle(*looks[name], _DASHES[i])) for i, name in enumerate(model)]
    page = drawing(figure, "inherent", 1, 2, size=(WIDTH, 3.9), legend=legend)
    measured, quadratic = page.panels
    words = []
    for name in names:
        part, look = data[(data.optimizer == name) & ~data.diverged], style.look(name)
        stats = part.groupby("batch_size").val_loss.agg(["mean", "min", "max"])
        if stats.empty:
            continue
        lowest, x = stats["mean"].min(), stats.index.to_numpy(float)
        measured.band((name, "band"), x, stats["min"] - lowest, stats["max"] - lowest, color=look.color, alpha=0.2)
        measured.line(name, x, stats["mean"] - lowest, color=look.color, marker=look.marker, markersize=6,
                      linewidth=1.7, markeredgecolor="white", zorder=3)  # fmt: skip
        words.append(f"{name} {say(stats['mean'].iloc[-1] - lowest)} nats at batch {x[-1]:g}")
    for i, (label, rises) in enumerate((predicted or {}).items()):
        measured.line(label, sorted(rises), [rises[batch] for batch in sorted(rises)], color=INK, linewidth=1.2,
                      linestyle=_DASHES[1 + i], zorder=2)  # fmt: skip
        words.append(f"{label} {say(rises[max(rises)])} nats at batch {max(rises)}")
    for i, (label, scale) in enumerate((scales or {}).items()):
        if math.isfinite(scale):
            room = {"ha": "right", "xytext": (-4, 0)}
            if scale < math.sqrt(batches[0] * batches[-1]):  # then there is more of it at the right
                room = {"ha": "left", "xytext": (4, 0)}
            measured.keep(label, measured.ax.axvline(scale, color=INK, linewidth=1.2, linestyle=style.LINES[1 + i % 3]))
            measured.keep((label, "text"), measured.ax.annotate(
                f"{label}: {say(scale, 2)}", (scale, 0.97 - 0.08 * i), xycoords=("data", "axes fraction"),
                textcoords="offset points", va="top", fontsize=8.5, color=INK, **room,
            ))  # fmt: skip
            measured.see([scale], [])
    for i, (label, losses) in enumerate(model.items()):
        x = sorted(losses)
        rise = [losses[batch] / min(losses.values()) for batch in x]
        quadratic.line(label, x, rise, **looks[label]._asdict(), linestyle=_DASHES[i], linewidth=1.8, markersize=6,
                       markeredgecolor="white")  # fmt: skip
        words.append(f"{label} {say(rise[-1])} times its lowest at batch {x[-1]:g}")
    measured.words("measured, each at its best rate", "batch (sequences)", "loss above its lowest (nats)")
    quadratic.words("noisy quadratic, each at its best rate", "batch (examples)", "loss over its lowest")
    measured.finish(x="log", x_ticks=batches)
    quadratic.finish(x="log", y="log", x_ticks=sorted({float(batch) for losses in model.values() for batch in losses}))
    lines = f" Vertical lines: {join(f'{k} {say(v)} sequences' for k, v in scales.items())}." if scales else ""
    return page.describe(
        f"Two panels against batch size at a fixed budget: the loss that {join(names)} lose, and what a noisy "
        f"quadratic model loses: {join(model)}.",
        f"{'; '.join(words)}.{lines}",
    )


def noise_along(
    curves: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]],
    levels: Mapping[str, float] | None = None,
    *,
    figure: Figure | None = None,
) -> Figure:
    """The gradient noise scale along a run, log scale: |G|² and tr Σ averaged over seeds at each measured step, then
    divided. Each seed's own is a thin line, without the points where its |G|² came out at or below 0.

    Args:
        curves: optimizer -> its runs, each the rows of a sweep's curves (`evidence.Sweeps.curve`).
        levels: name -> sequences, a dashed line across: the batches, say.
    """
    found = {
        name: [[row for row in run if row["noise_trace"] is not None] for run in runs] for name, runs in curves.items()
    }
    if not found or not all(runs and all(runs) for runs in found.values()):
        raise InputError("curves: a run has no measured noise; expected runs of a recipe with noise_every")
    legend = [(name, handle(style.look(name).color, style.look(name).marker)) for name in found]
    page = drawing(figure, "noise along", size=(WIDTH, 3.6), legend=legend)
    panel, words = page.panels[0], []
    for name, level in (levels or {}).items():
        panel.level(name, level, name, color=QUIET)
    for name, runs in found.items():
        look, at = style.look(name), {}
        for seed, run in enumerate(runs):
            scales = [_scale([row]) for row in run]
            panel.line((name, seed), [row["tokens"] / 1e6 for row in run], scales, color=look.color, linewidth=0.8,
                       alpha=0.5)  # fmt: skip
            for row in run:
                at.setdefault(row["tokens"] / 1e6, []).append(row)
        x = sorted(at)
        scales = [_scale(at[tokens]) for tokens in x]
        panel.line(name, x, scales, color=look.color, marker=look.marker, markersize=6, linewidth=1.8,
                   markeredgecolor="white", zorder=3)  # fmt: skip
        finite = [(tokens, scale) for tokens, scale in zip(x, scales, strict=True) if math.isfinite(scale)]
        if finite:
            (first, low), (last, high) = finite[0], finite[-1]
            words.append(f"{name} {say(low)} at {first:.2g} million tokens, {say(high)} at {last:.2g} million")
    panel.words("each seed thin; thick: |G|² and tr Σ averaged over seeds, then divided", "tokens (million)",
                "tr Σ / |G|² (sequences)")  # fmt: skip
    panel.finish(y="log")
    return page.describe(
        f"The gradient noise scale over tokens, log scale, for {join(found)}, each seed and all together.",
        f"{'; '.join(words)}." if words else "",
    )


def _scale(rows) -> float:
    """tr Σ / |G|² over these rows; NaN where it has no sense: lines leave it out."""
    scale = average_noise_scale({"gradient_sq": r["noise_gradient_sq"], "trace": r["noise_trace"]} for r in rows)
    return scale if math.isfinite(scale) and scale > 0 else math.nan


def _ends(data, names) -> str:
    """Loss and logit at the smallest and at the largest batch, in words."""
    words = []
    for name in names:
        means = data[(data.optimizer == name) & ~data.diverged].groupby("batch_size")[["val_loss", "peak_logit"]].mean()
        if len(means):
            first, last = means.iloc[0], means.iloc[-1]
            words.append(
                f"{name} loss {say(first.val_loss)} at batch {means.index[0]} and {say(last.val_loss)} at "
                f"{means.index[-1]}, logit {say(first.peak_logit)} and {say(last.peak_logit)}"
            )
    return "; ".join(words)


def _paper(claim) -> str:
    """First and last of each row."""
    columns = claim["columns"]
    return "; ".join(
        f"{name} {say(values[0])} at batch {columns[0]} and {say(values[-1])} at {columns[-1]}"
        for name, values in claim["values"].items()
    )
