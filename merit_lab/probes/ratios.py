"""How the trust ratios of one optimizer step are spread, and which of row, column and bound decided them."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .rounding import round_

QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)


class RatioSummary(NamedTuple):
    """How one step's trust ratios are spread over a tensor, and what decided the factor s on the direction u.

    Quantiles are five numbers: minimum, quartiles and maximum. Records of before row_quantiles and column_quantiles
    were measured lack both.
    """

    quantiles: list[float]  # of s, over elements
    weight_ratio: float  # b, the weight-wise ratio
    won_row: float  # share of elements whose s is their row's ratio
    won_column: float  # share whose s is their column's ratio
    won_bound: float  # share whose s is the weight-wise ratio
    guarded: float  # share where a zero norm decided
    clipped: float  # share whose step was cut to 1
    row_quantiles: list[float] | None = None  # of r, over rows; None for LAMB and for a vector, which have none
    column_quantiles: list[float] | None = None  # of c, over columns; None as above


@torch.no_grad()
def ratios(step, *, ratio: str = "element", bound: bool = True) -> RatioSummary | None:
    """Summarise the trust ratios of what `optimizer.explain` returned; None for AdamW, which has none.

    Args:
        step: a MeritStep or LAMBStep.
        ratio, bound: the switches of MERIT that the step was taken with: what does not enter s cannot win.

    The four shares won_row, won_column, won_bound and guarded add up to 1. A tie goes to the bound, then to the
    row. LAMB's one ratio counts as the bound. Row and column ratios are summarised whether or not they enter s.
    """
    if not hasattr(step, "weight_ratio"):
        return None
    b = step.weight_ratio
    if not hasattr(step, "element_ratio"):  # LAMB
        guard = float(step.guarded)
        return RatioSummary([round_(b)] * 5, round_(b), 0.0, 0.0, 1.0 - guard, guard, 0.0)
    s = step.element_ratio
    left = ~step.guarded
    won = {}
    for name, value, enters in (
        ("bound", b, bound or ratio == "weight" or step.row_ratio is None),
        ("row", step.row_ratio, ratio in ("element", "row")),
        ("column", step.column_ratio, ratio in ("element", "column")),
    ):
        won[name] = left & (s == value) if enters and value is not None else torch.zeros_like(left)
        left = left & ~won[name]
    shares = [round_(m.float().mean()) for m in (won["row"], won["column"], won["bound"], step.guarded, step.clipped)]
    return RatioSummary(_quantiles(s), round_(b), *shares, _quantiles(step.row_ratio), _quantiles(step.column_ratio))


def _quantiles(x: Tensor | None) -> list[float] | None:
    if x is None:
        return None
    x = x.flatten().float()  # torch.quantile refuses more than 16 million elements
    places = [round(q * (len(x) - 1)) for q in QUANTILES]
    if x.device.type == "cpu":  # several times as fast as to sort
        return [round_(q) for q in np.partition(x.numpy(), places)[places].tolist()]
    return [round_(q) for q in x.sort().values[places].tolist()]  # one wait for a GPU, not five
