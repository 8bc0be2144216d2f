"""MERIT (Luo et al. 2025, arXiv 2508.20577, Algorithm 1), from equation to class.

For a weight matrix w with rows i and columns j, and ‖·‖_m the largest absolute element:

    line 1   m ← β₁ m + (1 - β₁) g
    line 2   v ← β₂ v + (1 - β₂) g²
    line 3   u ← m / (√v + ε) + λ w                      the direction; no bias correction
    line 4   b ← ‖w‖_m / ‖u‖_m                           weight-wise ratio: one number
    line 5   r_i ← ‖w_i,:‖_m / ‖u_i,:‖_m                 row-wise ratio
    line 6   c_j ← ‖w_:,j‖_m / ‖u_:,j‖_m                 column-wise ratio
    line 7   s_ij ← max(max(r_i, c_j), b)                element-wise ratio; b is its lower bound
    line 8   Δ ← clip(s ⊙ u, 1)                          no element of the step exceeds 1
    line 9   w ← w - η Δ

The lines are Algorithm 1's, in its order, numbered as they are used in this project.

The authors' code and the algorithm as printed differ where a norm is 0 (`variant`):

    "official"   the authors' code: s_ij = 1 wherever the row or the column of w or of u is all zero
    "paper"      as printed; only a zero denominator is guarded: that ratio is left out of the maximum, and
                 where every denominator is 0 the direction is 0 too, so nothing moves

and for tensors of more than two dimensions: "official" takes rows and columns over the first two dimensions
alone (a convolution of shape (4, 3, 2, 2) has 4·2·2 rows and 3·2·2 columns); "paper" flattens all but the
first, so that a row is an output channel. A 1-D tensor has the weight-wise ratio alone, guarded to 1 where
either norm is 0, then the clip.

Four switches take MERIT apart (see ladder.py):

    norm    "max" or "l2"
    ratio   which ratios enter line 7: "element" (r and c), "row", "column", or "weight" (b alone)
    bound   whether b enters line 7 beside them
    clip    whether line 8 clips
"""

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from .ratios import NORMS, quotient, trust_ratio
from .traced import Traced, check_bool, check_fused, check_one_of

VARIANTS = ("official", "paper")
RATIOS = ("element", "row", "column", "weight")


class MeritStep(NamedTuple):
    """Every named quantity of Algorithm 1, for a weight of shape (n, k)."""

    exp_avg: Tensor  # m after this step, (n, k)
    exp_avg_sq: Tensor  # v after this step, (n, k)
    direction: Tensor  # u, (n, k)
    weight_ratio: Tensor  # b, 0-D
    row_ratio: Tensor | None  # r, (n, 1); None for a 1-D weight
    column_ratio: Tensor | None  # c, (1, k); None for a 1-D weight
    element_ratio: Tensor  # s, (n, k): the factor that multiplies u
    guarded: Tensor  # bool, (n, k): a zero norm decided this element's s
    clipped: Tensor  # bool, (n, k): |s u| exceeded 1 and was cut
    update: Tensor  # clip(s ⊙ u, 1), (n, k): the step per unit of learning rate
    weight: Tensor  # w after this step, (n, k)


def merit_step(
    weight,
    grad,
    exp_avg,
    exp_avg_sq,
    *,
    lr,
    betas,
    eps,
    weight_decay,
    variant="official",
    norm="max",
    ratio="element",
    bound=True,
    clip=True,
) -> MeritStep:
    """One MERIT step as a pure function: no argument is changed.

    Args:
        weight, grad, exp_avg, exp_avg_sq: tensors of one shape; the moments start at zero.
        lr: learning rate η (float or 0-D tensor).
        betas: (β₁, β₂), eps: ε, weight_decay: λ.
        variant, norm, ratio, bound, clip: see the top of this file.

    Row and column ratios that do not enter line 7 are computed and returned all the same, to be looked at.
    For more than two dimensions row_ratio and column_ratio keep size 1 along the dimensions they reduce.
    """
    beta1, beta2 = betas
    exp_avg = beta1 * exp_avg + (1 - beta1) * grad  # line 1
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad.square()  # line 2
    direction = quotient(exp_avg, exp_avg_sq.sqrt() + eps) + weight_decay * weight  # line 3
    weight_ratio, row_ratio, column_ratio, element_ratio, guarded = merit_ratios(
        weight, direction, variant=variant, norm=norm, ratio=ratio, bound=bound
    )  # lines 4 to 7
    scaled = element_ratio * direction
    clipped = scaled.abs() > 1 if clip else torch.zeros_like(scaled, dtype=torch.bool)
    update = scaled.clamp(-1, 1) if clip else scaled  # line 8
    return MeritStep(
        exp_avg,
        exp_avg_sq,
        direction,
        weight_ratio,
        row_ratio,
        column_ratio,
        element_ratio,
        guarded,
        clipped,
        update,
        weight - lr * update,  # line 9
    )


def merit_ratios(weight, direction, *, variant="official", norm="max", ratio="element", bound=True):
    """Lines 4 to 7 of Algorithm 1: the ratios of a weight w and a direction u of the same shape.

    Returns:
        b, r, c, s and the mask of guarded elements, shaped as in `MeritStep`.
    """
    size = NORMS[norm]
    if weight.ndim < 2:
        b, guarded = trust_ratio(size(weight), size(direction))
        return b, None, None, b.expand_as(weight), guarded.expand_as(weight)

    guard = trust_ratio if variant == "official" else _leave_out
    b, b_guarded = guard(size(weight), size(direction))  # line 4
    along = tuple(range(1, weight.ndim)) if variant == "paper" else 1  # as if flattened: a row is an output channel
    r, r_guarded = guard(size(weight, dim=along), size(direction, dim=along))  # line 5
    c, c_guarded = guard(size(weight, dim=0), size(direction, dim=0))  # line 6

    if ratio == "element":
        s, guarded = torch.maximum(r, c), r_guarded | c_guarded
    elif ratio == "row":
        s, guarded = r.expand_as(weight), r_guarded.expand_as(weight)
    elif ratio == "column":
        s, guarded = c.expand_as(weight), c_guarded.expand_as(weight)
    else:
        s, guarded = b.expand_as(weight), b_guarded.expand_as(weight)
    if bound:
        s = torch.maximum(s, b)  # line 7
    if variant == "official":
        s = torch.where(guarded, 1.0, s)  # the guard has the last word, over the bound too
    return b, r, c, s, guarded


def _leave_out(weight_norm, direction_norm):
    """Algorithm 1 as printed has no guard but needs one where it would divide by 0: 0 never wins a maximum."""
    return quotient(weight_norm, direction_norm), direction_norm == 0


class MERIT(Traced):
    """MERIT as a `torch.optim.Optimizer`.

    Args:
        params: parameters or parameter groups; a group may have its own value of every argument.
        lr: learning rate η, a float or a 0-D tensor, ≥ 0 (the paper's best for GPT-2 small is 9e-3).
        betas: (β₁, β₂), each in [0, 1).
        eps: ε ≥ 0.
        weight_decay: λ ≥ 0. Inside the ratios it acts at rate η whatever its size: with g = 0, w shrinks by η w.
        variant: "official" or "paper", see the top of this file.
        norm, ratio, bound, clip: switches that take MERIT apart, see the top of this file.
        fused: take the fused step (fast.py): the same numbers up to rounding, several times faster. "auto" takes it for
            tensors that are large enough to gain, True for small ones too, False never; see `fast.takes`.
        maximize: climb instead of descend.
        skip_nonfinite: leave out a step whose gradients hold a NaN or an infinity (see `Traced`).
    """

    def __init__(
        self,
        params,
        lr,
        betas=(0.9, 0.999),
        eps=1e-6,
        weight_decay=0.0,
        variant="official",
        *,
        norm="max",
        ratio="element",
        bound=True,
        clip=True,
        fused="auto",
        maximize=False,
        skip_nonfinite=False,
    ):
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "variant": variant,
            "norm": norm,
            "ratio": ratio,
            "bound": bound,
            "clip": clip,
            "fused": fused,
        }
        super().__init__(params, defaults, maximize=maximize, skip_nonfinite=skip_nonfinite)

    step_function = staticmethod(merit_step)
    counts_steps = False  # no bias correction: MERIT's step does not depend on t
    checks: ClassVar = {
        "variant": check_one_of(*VARIANTS),
        "norm": check_one_of(*NORMS),
        "ratio": check_one_of(*RATIOS),
        "bound": check_bool,
        "clip": check_bool,
        "fused": check_fused,
    }
    fused_form = "merit"
