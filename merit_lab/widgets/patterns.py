"""Rows and columns of W_Q and W_K, against the same values in a shuffled order.

    WeightPatterns(training)                 a live Training: its weights and moments as they are now
    WeightPatterns(read("run.jsonl"))        a Run recorded with keep_weights=True
    WeightPatterns(model)                    a GPT2
    WeightPatterns({"query": W_Q, "key": W_K}, n_head=4)

Where MERIT's ratio s differs from the one ratio b of the whole matrix depends on the direction u as well as on w.
A live Training has moments, so u is known and s / b is shown. Weights alone do not tell u; then only the part of
the ratios that the weights make up is shown, and the sentence says so.
"""

import html
from typing import Any, NamedTuple

import ipywidgets
import torch
from torch import Tensor

from .. import optim, probes
from ..errors import InputError
from ..figures import matrices
from ..figures.style import join
from ..probes.weights import QueryKey, query_key_weights
from .base import LabWidget


class Look(NamedTuple):
    """What is shown of one matrix."""

    name: str  # "W_Q" or "W_K"
    weight: Tensor  # (n_embd, n_embd)
    pattern: probes.MatrixPattern
    control: Tensor  # the same values, shuffled
    control_pattern: probes.MatrixPattern
    ratio: Tensor | None  # s / b, where a direction is known
    share: Tensor  # (n_embd, n_embd): larger of ‖w_i,:‖_m and ‖w_:,j‖_m, over ‖w‖_m


class WeightPatterns(LabWidget):
    """W_Q and W_K of a layer as images with their heads, and the profiles of their rows and columns.

    Args:
        run: a live Training, a Run that kept weights, a GPT2, or a table of tensors (see query_key_weights).
        layer: the one to begin with, from 0 as in all figures and in `model.blocks`.
        n_head: heads a layer, for a table of tensors, which does not say.

    Raises InputError for a run without weights, or a layer that is not there.
    """

    def __init__(self, run, layer: int = 0, *, n_head: int | None = None):
        self.run, self.n_head = run, n_head
        self._pairs = query_key_weights(run, n_head)
        n_layer = len(self._pairs)
        if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < n_layer:
            raise InputError(f"layer: got {layer!r}, expected a whole number from 0 to {n_layer - 1}")
        narrow = {"description_width": "initial"}
        self.layer = ipywidgets.IntSlider(
            value=layer, min=0, max=n_layer - 1, description="Layer", continuous_update=False, style=narrow
        )
        self.seed = ipywidgets.BoundedIntText(
            value=0, min=0, max=2**31 - 1, description="Shuffle", style=narrow, layout={"width": "150px"}
        )
        self.again = ipywidgets.Button(
            description="Read weights again", tooltip="the weights of a live run as they are now"
        )
        self.table = ipywidgets.HTML()
        row = ipywidgets.HBox([self.layer, self.seed, self.again], layout={"flex_flow": "row wrap"})
        super().__init__([row], [self.table])
        self.on_change(self.layer, self.refresh)
        self.on_change(self.seed, self.refresh)
        self.on_click(self.again, self._read_again)
        self.refresh()
        if self.error is not None:
            error = self.error
            self.close()
            raise error

    def _read_again(self):
        self._pairs = query_key_weights(self.run, self.n_head)
        self.refresh()

    def looks(self) -> list[Look]:
        """What is shown of W_Q and of W_K in the layer chosen."""
        pair = self._pairs[self.layer.value]
        ratios = ratio_over_bound(self.run, self.layer.value) or (None, None)
        return [
            _look(name, weight, pair, self.seed.value, ratio)
            for name, weight, ratio in zip(("W_Q", "W_K"), (pair.query, pair.key), ratios, strict=True)
        ]

    def draw(self):
        looks = self.looks()
        n_head = self._pairs[0].n_head
        pictures = [
            matrices.PatternPicture(
                look.name,
                look.weight.numpy(),
                look.control.numpy(),
                look.pattern,
                look.control_pattern,
                (look.share if look.ratio is None else look.ratio).numpy(),
                look.ratio is not None,
            )
            for look in looks
        ]
        rows = looks[0].weight.shape[0]
        heads = f"{n_head} heads of {rows // n_head} rows" if n_head > 1 else "1 head"
        title = f"layer {self.layer.value} (of {len(self._pairs)}, counted from 0), {heads}"
        about = [f"Layer {self.layer.value}, {heads}.", "Similarity of |w|, 0 is chance, 1 is equal:"]
        about += [*map(_sentence, looks), _ratios_sentence(looks)]
        figure = matrices.pattern_maps(pictures, title=title, about=" ".join(about))
        self.table.value = _table(looks)
        return figure

    def close(self):
        self.run, self._pairs = None, []
        super().close()


def _look(name: str, weight: Tensor, pair: QueryKey, seed: int, ratio: Tensor | None) -> Look:
    control = probes.shuffled(weight, seed)
    pattern, control_pattern = probes.pattern(weight, pair.n_head), probes.pattern(control, pair.n_head)
    rows, columns = optim.max_norm(weight, dim=1), optim.max_norm(weight, dim=0)  # (n, 1), (1, k)
    share = optim.quotient(torch.maximum(rows, columns), optim.max_norm(weight))
    return Look(name, weight, pattern, control, control_pattern, ratio, share)


def ratio_over_bound(run: Any, layer: int) -> tuple[Tensor, Tensor] | None:
    """MERIT's s / b of W_Q and W_K with the moments a live Training has now; None where there are none.

    The direction is u = m / (√v + ε) + λ w, with the ε and λ of the run's optimizer: what MERIT would make of
    these moments, whichever optimizer gathered them. 1 where b is 0.
    """
    model, optimizer = getattr(run, "model", None), getattr(run, "optimizer", None)
    if optimizer is None or not hasattr(model, "blocks"):
        return None
    attention = model.blocks[layer].attention
    layers = [attention.qkv] if attention.fused else [attention.query, attention.key]
    ratios = []
    for parameter in (module.weight for module in layers):
        state = optimizer.state.get(parameter, {})
        if "exp_avg" not in state:
            return None
        group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
        weight, nothing = parameter.detach(), torch.zeros_like(parameter)
        step = optim.merit_step(  # β = 1 keeps the moments as they are
            weight, nothing, state["exp_avg"], state["exp_avg_sq"], lr=0.0, betas=(1.0, 1.0),
            eps=group["eps"], weight_decay=group["weight_decay"],
        )  # fmt: skip
        b = step.weight_ratio
        ratios.append(torch.where(b > 0, optim.quotient(step.element_ratio, b), 1.0).float().cpu())
    return tuple(ratios[0].chunk(3)[:2]) if attention.fused else tuple(ratios)


# -- in words ------------------------------------------------------------------------------------------------


def _sentence(look: Look) -> str:
    (rows, columns), (r, c) = ((p.rows.similarity, p.columns.similarity) for p in (look.pattern, look.control_pattern))
    words = (
        f"{look.name}: {_index(rows)} within rows and {_index(columns)} within columns, shuffled {_index(r)} and "
        f"{_index(c)}"
    )
    found = []
    for kind, lines in (("row", look.pattern.rows), ("column", look.pattern.columns)):
        if lines.outliers:
            found.append(f"outlier {kind}{'s' * (len(lines.outliers) > 1)} {_places(lines.outliers)}")
    return f"{words}; {join(found) if found else 'no outlier rows or columns'}."


def _ratios_sentence(looks: list[Look]) -> str:
    if looks[0].ratio is None:
        return (
            "These weights come without a step, so the ratios s themselves are not known. On the right is the part "
            "that the weights make up: the largest |w| of an element's row or column, over the largest of all."
        )
    words = []
    for look in looks:
        above = (look.ratio > 1.001).float().mean().item()
        words.append(f"{100 * above:.0f} % of {look.name}, at most {look.ratio.max().item():.3g} times")
    return f"On the right, MERIT's s exceeds the whole matrix's b on {join(words)}."


def _index(value: float) -> str:
    return f"{value:.2f}".replace("-0.00", "0.00").replace("-", "−")


def _places(indices: list[int], most: int = 6) -> str:
    words = [str(i + 1) for i in indices[:most]]
    return join(words) if len(indices) <= most else f"{', '.join(words)} and {len(indices) - most} more"


_CELL = "padding: 1px 16px 1px 0; text-align: left; font-weight: normal; border: none"


def _table(looks: list[Look]) -> str:
    """The numbers behind the picture, a matrix a column."""
    lines = [
        ("largest |w|", lambda p: f"{p.rows.max.max().item():.4g}"),
        ("similarity within rows", lambda p: _index(p.rows.similarity)),
        ("similarity within columns", lambda p: _index(p.columns.similarity)),
        ("(‖w‖₂ − ‖w‖_m) / ‖w‖₂, whole matrix", lambda p: f"{p.norm_gap:.3f}"),
        ("the same, mean over rows", lambda p: f"{p.row_norm_gap.mean().item():.3f}"),
        ("the same, mean over columns", lambda p: f"{p.column_norm_gap.mean().item():.3f}"),
        ("outlier rows", lambda p: _places(p.rows.outliers) or "none"),
        ("outlier columns", lambda p: _places(p.columns.outliers) or "none"),
    ]
    columns = [(look.name, look.pattern) for look in looks]
    columns += [(f"{look.name} shuffled", look.control_pattern) for look in looks]
    head = "".join(f'<th scope="col" style="{_CELL}">{html.escape(name)}</th>' for name, _ in columns)
    body = "".join(
        f'<tr style="background: none"><th scope="row" style="{_CELL}">{html.escape(label)}</th>'
        + "".join(f'<td style="{_CELL}">{html.escape(show(pattern))}</td>' for _, pattern in columns)
        + "</tr>"
        for label, show in lines
    )
    return (
        '<table style="border-collapse: collapse; line-height: 1.35; font-size: 0.92em">'
        f'<thead><tr><th scope="col" style="{_CELL}">measure</th>{head}</tr></thead><tbody>{body}</tbody></table>'
    )
