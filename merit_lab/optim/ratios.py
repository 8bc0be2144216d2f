"""Norms and trust ratios: what LAMB and MERIT share.

A trust ratio divides the size of the weights by the size of the step about to be taken, so that a step is
measured against what it changes. The optimizers differ in the norm (ℓ2 or the largest element) and in what
one ratio covers (the whole tensor, a row, a column).

Nothing here asks a tensor for its value on the host (no `.item()`, no `if` on a tensor): the same lines run
under torch.compile and on DTensors.
"""

import torch
from torch import Tensor

from .sharded import met, without_empty_shards


def max_norm(x: Tensor, dim: int | tuple[int, ...] | None = None) -> Tensor:
    """‖x‖_m, the largest absolute element: of the whole tensor (0-D), or along `dim`, which stays with size 1.

    It is a vector norm of the flattened tensor, not the matrix norm that numpy and torch call `inf`.
    """
    x = without_empty_shards(x)
    return met(x.abs().amax() if dim is None else x.abs().amax(dim=dim, keepdim=True))


def l2_norm(x: Tensor, dim: int | tuple[int, ...] | None = None) -> Tensor:
    """‖x‖₂, the root of the sum of squares: of the whole tensor (0-D), or along `dim`, which stays with size 1.

    In float32 the squares of elements above 1e19 overflow and of those below 1e-23 vanish: a limit of LAMB's, not
    of the max-norm's.
    """
    return met(torch.linalg.vector_norm(x, 2, dim=dim, keepdim=dim is not None))


NORMS = {"max": max_norm, "l2": l2_norm}


def quotient(numerator: Tensor, denominator: Tensor) -> Tensor:
    """numerator / denominator; 0 where the denominator is 0, and the largest number where the quotient exceeds it.

    So the division itself never makes an inf or a NaN: an infinite ratio times a direction of 0 would be one.
    """
    divides = denominator != 0
    largest = torch.finfo(numerator.dtype).max
    return torch.where(divides, numerator / torch.where(divides, denominator, 1.0), 0.0).clamp(-largest, largest)


def trust_ratio(weight_norm: Tensor, direction_norm: Tensor) -> tuple[Tensor, Tensor]:
    """LAMB's trust ratio ‖w‖ / ‖u‖ with its guard: 1 where either norm is 0 (You et al. 2020, Algorithm 2).

    Without the guard a zero-initialised weight would get ratio 0 and never leave zero.

    Returns:
        ratio: of the norms' shape.
        guarded: bool, True where the guard spoke.
    """
    guarded = (weight_norm == 0) | (direction_norm == 0)
    return torch.where(guarded, 1.0, quotient(weight_norm, direction_norm)), guarded
