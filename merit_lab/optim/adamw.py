"""AdamW (Loshchilov & Hutter 2019, Algorithm 2), from equation to class.

    line 1   m ← β₁ m + (1 - β₁) g               a running mean of the gradient
    line 2   v ← β₂ v + (1 - β₂) g²              a running mean of its square
    line 3   m̂ ← m / (1 - β₁ᵗ)                   both start at 0, so early means are too small:
    line 4   v̂ ← v / (1 - β₂ᵗ)                   the bias correction
    line 5   d ← m̂ / (√v̂ + ε)                    the direction
    line 6   w ← w - η (d + λ w)                 decoupled decay: λ w never enters m or v

The lines are numbered as they are used in this project; t counts steps from 1.
"""

from typing import NamedTuple

from torch import Tensor

from .ratios import quotient
from .traced import Traced


class AdamWStep(NamedTuple):
    """Every named quantity of one AdamW step. All tensors have the weight's shape."""

    exp_avg: Tensor  # m after this step
    exp_avg_sq: Tensor  # v after this step
    exp_avg_hat: Tensor  # m̂
    exp_avg_sq_hat: Tensor  # v̂
    direction: Tensor  # m̂ / (√v̂ + ε), without the decay
    update: Tensor  # direction + λ w: the step per unit of learning rate
    weight: Tensor  # w after this step: w - η · update


def adamw_step(weight, grad, exp_avg, exp_avg_sq, *, step, lr, betas, eps, weight_decay) -> AdamWStep:
    """One AdamW step as a pure function: no argument is changed.

    Args:
        weight, grad, exp_avg, exp_avg_sq: tensors of one shape; the moments start at zero.
        step: number of this step, from 1 (int or 0-D tensor).
        lr: learning rate η (float or 0-D tensor).
        betas: (β₁, β₂), eps: ε, weight_decay: λ.

    Where v̂ and ε are both 0 the direction is 0 (torch.optim.AdamW divides 0 by 0 there).
    """
    beta1, beta2 = betas
    exp_avg = beta1 * exp_avg + (1 - beta1) * grad  # line 1
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad.square()  # line 2
    exp_avg_hat = exp_avg / (1 - beta1**step)  # line 3
    exp_avg_sq_hat = exp_avg_sq / (1 - beta2**step)  # line 4
    direction = quotient(exp_avg_hat, exp_avg_sq_hat.sqrt() + eps)  # line 5: ε outside the root
    update = direction + weight_decay * weight  # line 6
    return AdamWStep(
        exp_avg, exp_avg_sq, exp_avg_hat, exp_avg_sq_hat, direction, update, weight - lr * update
    )


class AdamW(Traced):
    """AdamW as a `torch.optim.Optimizer`; agrees with `torch.optim.AdamW`.

    Args:
        params: parameters or parameter groups.
        lr: learning rate η, a float or a 0-D tensor, ≥ 0.
        betas: (β₁, β₂), each in [0, 1).
        eps: ε ≥ 0.
        weight_decay: λ ≥ 0.
        maximize: climb instead of descend.
        skip_nonfinite: leave out a step whose gradients hold a NaN or an infinity (see `Traced`).
    """

    def __init__(
        self, params, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, *, maximize=False, skip_nonfinite=False
    ):
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, maximize=maximize, skip_nonfinite=skip_nonfinite)

    step_function = staticmethod(adamw_step)
