"""LAMB (You et al. 2020, arXiv 1904.00962, Algorithm 2), from equation to class.

    line 1   m ← β₁ m + (1 - β₁) g
    line 2   v ← β₂ v + (1 - β₂) g²
    line 3   m̂ ← m / (1 - β₁ᵗ),  v̂ ← v / (1 - β₂ᵗ)     in version 5 of the paper; version 3 leaves it out
    line 4   u ← m̂ / (√v̂ + ε) + λ w                    the direction, decay inside
    line 5   b ← φ(‖w‖₂) / ‖u‖₂                         one trust ratio a tensor; 1 where either norm is 0
    line 6   w ← w - η b u

Published implementations differ; each difference is a switch here:

    bias_correction   line 3 (paper v5, timm, apex: on; paper v3, pytorch-lamb: off)
    max_weight_norm   φ: None is the identity; 10.0 bounds ‖w‖₂ by 10 (pytorch-lamb)
    always_adapt      True: every tensor has a ratio (pytorch-lamb); False: only where λ ≠ 0 (timm, apex)
    decay_in_ratio    True: λ w is part of u; False: the ratio scales Adam's direction alone, decay beside it
"""

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from .ratios import l2_norm, quotient, trust_ratio
from .traced import Traced, check_bool, check_fused, check_positive_or_none


class LAMBStep(NamedTuple):
    """Every named quantity of one LAMB step."""

    exp_avg: Tensor  # m after this step, of the weight's shape
    exp_avg_sq: Tensor  # v after this step
    direction: Tensor  # u
    weight_norm: Tensor  # φ(‖w‖₂), 0-D
    direction_norm: Tensor  # ‖u‖₂, 0-D
    weight_ratio: Tensor  # b, 0-D: the factor that multiplies u
    guarded: Tensor  # bool, 0-D: a norm was 0, so b is 1
    update: Tensor  # b u: the step per unit of learning rate
    weight: Tensor  # w after this step


def lamb_step(
    weight,
    grad,
    exp_avg,
    exp_avg_sq,
    *,
    step,
    lr,
    betas,
    eps,
    weight_decay,
    bias_correction=True,
    max_weight_norm=None,
    always_adapt=True,
    decay_in_ratio=True,
) -> LAMBStep:
    """One LAMB step as a pure function: no argument is changed.

    Args:
        weight, grad, exp_avg, exp_avg_sq: tensors of one shape; the moments start at zero.
        step: number of this step, from 1 (int or 0-D tensor).
        lr: learning rate η (float or 0-D tensor).
        betas: (β₁, β₂), eps: ε, weight_decay: λ.
        bias_correction, max_weight_norm, always_adapt, decay_in_ratio: see the top of this file.
    """
    beta1, beta2 = betas
    exp_avg = beta1 * exp_avg + (1 - beta1) * grad  # line 1
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad.square()  # line 2
    if bias_correction:
        exp_avg_hat, exp_avg_sq_hat = exp_avg / (1 - beta1**step), exp_avg_sq / (1 - beta2**step)  # line 3
    else:
        exp_avg_hat, exp_avg_sq_hat = exp_avg, exp_avg_sq
    direction = quotient(exp_avg_hat, exp_avg_sq_hat.sqrt() + eps)
    decay = weight_decay * weight
    if decay_in_ratio:
        direction = direction + decay  # line 4
    weight_norm, direction_norm = l2_norm(weight), l2_norm(direction)
    if max_weight_norm is not None:
        weight_norm = weight_norm.clamp(max=max_weight_norm)  # φ
    weight_ratio, guarded = trust_ratio(weight_norm, direction_norm)  # line 5
    if not always_adapt and weight_decay == 0:
        weight_ratio, guarded = torch.ones_like(weight_ratio), torch.zeros_like(guarded)
    update = weight_ratio * direction if decay_in_ratio else weight_ratio * direction + decay
    return LAMBStep(
        exp_avg,
        exp_avg_sq,
        direction,
        weight_norm,
        direction_norm,
        weight_ratio,
        guarded,
        update,
        weight - lr * update,  # line 6
    )


class LAMB(Traced):
    """LAMB as a `torch.optim.Optimizer`. With `bias_correction=False, max_weight_norm=10.0` it is pytorch-lamb.

    Args:
        params: parameters or parameter groups; a group may have its own value of every argument.
        lr: learning rate η, a float or a 0-D tensor, ≥ 0.
        betas: (β₁, β₂), each in [0, 1).
        eps: ε ≥ 0.
        weight_decay: λ ≥ 0.
        bias_correction, max_weight_norm, always_adapt, decay_in_ratio: see the top of this file.
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
        weight_decay=0.01,
        bias_correction=True,
        max_weight_norm=None,
        *,
        always_adapt=True,
        decay_in_ratio=True,
        fused="auto",
        maximize=False,
        skip_nonfinite=False,
    ):
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "max_weight_norm": max_weight_norm,
            "always_adapt": always_adapt,
            "decay_in_ratio": decay_in_ratio,
            "fused": fused,
        }
        super().__init__(params, defaults, maximize=maximize, skip_nonfinite=skip_nonfinite)

    step_function = staticmethod(lamb_step)
    checks: ClassVar = {
        "bias_correction": check_bool,
        "max_weight_norm": check_positive_or_none,
        "always_adapt": check_bool,
        "decay_in_ratio": check_bool,
        "fused": check_fused,
    }
    fused_form = "lamb"
