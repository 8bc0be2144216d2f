"""The two passes of fast.py in torch, some rows at a time, so that every temporary is small and stays in cache.

On any device. Slower than C, since each operation is still a call and a walk through the cache of its own.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from .ratios import quotient

ELEMENTS = 1 << 17  # of a tile: five tiles of float32 fit into a few MB of cache


def tiles(*matrices: Tensor, whole_rows: bool = False) -> Iterator[tuple[Tensor, ...]]:
    """The same rows of each matrix, about ELEMENTS elements at a time; a single row is cut too, unless whole_rows."""
    rows, columns = matrices[0].shape
    if rows == 1 and not whole_rows:
        return zip(*(x.split(ELEMENTS, dim=1) for x in matrices), strict=True)
    return zip(*(x.split(max(1, ELEMENTS // max(columns, 1))) for x in matrices), strict=True)


def direction(weight, exp_avg, exp_avg_sq, how) -> Tensor:
    """Line 3: u."""
    below = (exp_avg_sq / how.corrections[1]).sqrt_().add_(how.eps)
    return quotient(exp_avg / how.corrections[0], below) + how.decay * weight


def measure(weight, grad, exp_avg, exp_avg_sq, how, *, squares: bool, lines: bool):
    """Pass 1: exp_avg and exp_avg_sq move on in place; returns fast.Sizes.

    Args:
        weight, grad, exp_avg, exp_avg_sq: matrices of one shape (n, k).
        how: fast.Direction.
        squares: sums of squares, in float64, in place of maxima.
        lines: the sizes of rows and columns too.
    """
    from .fast import Sizes

    (beta1, beta2), (n, k) = how.betas, weight.shape
    wide = torch.float64 if squares and weight.device.type != "mps" else weight.dtype
    sizes = Sizes(*(weight.new_zeros((), dtype=wide) for _ in range(2)))
    if lines:
        sizes = Sizes(*sizes[:2], *(weight.new_zeros(shape) for shape in ((n, 1), (n, 1), (1, k), (1, k))))
    row = 0
    for w, g, m, v in tiles(weight, grad, exp_avg, exp_avg_sq, whole_rows=lines):
        g = g.to(w.dtype) * how.sign
        m.copy_(beta1 * m + (1 - beta1) * g)  # line 1
        v.copy_(beta2 * v + (1 - beta2) * g.square())  # line 2
        for x, whole, rows, columns in zip(
            (w, direction(w, m, v, how)), sizes[:2], sizes[2:4], sizes[4:], strict=True
        ):
            if squares:
                whole += x.to(wide).square().sum()
                continue
            magnitudes = x.abs()
            if magnitudes.numel():
                torch.maximum(whole, magnitudes.amax(), out=whole)
            if lines and magnitudes.numel():
                rows[row : row + len(x)] = magnitudes.amax(1, keepdim=True)
                torch.maximum(columns, magnitudes.amax(0, keepdim=True), out=columns)
        row += len(w)
    return sizes


def apply(weight, exp_avg, exp_avg_sq, how, factors, lr: float) -> None:
    """Pass 2: weight moves in place.

    Args:
        weight, exp_avg, exp_avg_sq: matrices of one shape (n, k).
        how: fast.Direction. factors: fast.Factors. lr: η.
    """
    row = 0
    lines = len(factors.row) > 1 or factors.column is not None
    for w, m, v in tiles(weight, exp_avg, exp_avg_sq, whole_rows=lines):
        s = factors.row if len(factors.row) == 1 else factors.row[row : row + len(w)]
        guarded = s == torch.inf
        if factors.column is not None:
            s, guarded = torch.maximum(s, factors.column), guarded | (factors.column == torch.inf)
        s = torch.where(guarded, 1.0, s)  # line 7
        step = s * direction(w, m, v, how)
        if factors.clip:
            step.clamp_(-1, 1)  # line 8
        if factors.beside:
            step += factors.beside * w
        w.sub_(lr * step)  # line 9
        row += len(w)
