"""The two passes of fast.py in torch, some rows at a time, so that every temporary is small and stays in cache.

On any device. Slower than C, since each operation is still a call and a walk through the cache of its own; and
its scratch, some three tiles of 1 MB, is more than 1 % of a small model.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .ratios import quotient

ELEMENTS = 1 << 18  # of a tile: 1 MB in float32. Larger ones leave the cache, smaller ones are all calls


observers: list = []  # whoever counts memory traffic (merit_lab.probes.traffic): its add() is told of compiled passes


def tell(name: str, read: tuple[Tensor, ...], written: tuple[Tensor, ...]) -> None:
    """Tell the observers that a compiled pass, of which torch sees nothing, has read and written these tensors."""
    for observer in observers:
        observer.add(name, *(sum(t.numel() * t.element_size() for t in tensors) for tensors in (read, written)))


class Sizes(NamedTuple):
    """Norms of w and of u after pass 1: maxima of magnitudes, or sums of squares in float64 (`squares`)."""

    weight: Tensor  # 0-D
    direction: Tensor  # 0-D
    weight_row: Tensor | None = None  # (n, 1)
    direction_row: Tensor | None = None
    weight_column: Tensor | None = None  # (1, k)
    direction_column: Tensor | None = None


def tiles(*matrices: Tensor, whole_rows: bool = False) -> Iterator[tuple[Tensor, ...]]:
    """The same rows of each matrix, about ELEMENTS elements at a time; a single row is cut too, unless whole_rows."""
    rows, columns = matrices[0].shape
    if rows == 1 and not whole_rows:
        return zip(*(x.split(ELEMENTS, dim=1) for x in matrices), strict=True)
    return zip(*(x.split(max(1, ELEMENTS // max(columns, 1))) for x in matrices), strict=True)


def direction(weight, exp_avg, exp_avg_sq, how, out: Tensor) -> Tensor:
    """Line 3: u, into `out`."""
    one, two = how.corrections
    torch.sqrt(exp_avg_sq if two == 1 else torch.div(exp_avg_sq, two, out=out), out=out).add_(how.eps)
    if how.eps == 0:
        out.copy_(quotient(exp_avg / one, out))
    else:
        torch.div(exp_avg, out.mul_(one) if one != 1 else out, out=out)
        largest = torch.finfo(out.dtype).max
        out.clamp_(-largest, largest)
    return out.add_(weight, alpha=how.decay) if how.decay else out


def measure(weight, grad, exp_avg, exp_avg_sq, how, *, squares: bool, lines: bool):
    """Pass 1: exp_avg and exp_avg_sq move on in place; returns the norms.

    Args:
        weight, grad, exp_avg, exp_avg_sq: matrices of one shape (n, k).
        how: fast.Direction.
        squares: sums of squares, in float64, in place of maxima.
        lines: the sizes of rows and columns too.
    """
    (beta1, beta2), (n, k) = how.betas, weight.shape
    wide = torch.float64 if squares and weight.device.type != "mps" else weight.dtype
    sizes = Sizes(*(weight.new_zeros((), dtype=wide) for _ in range(2)))
    if lines:
        sizes = Sizes(*sizes[:2], *(weight.new_zeros(shape) for shape in ((n, 1), (n, 1), (1, k), (1, k))))
    row = 0
    for w, g, m, v in tiles(weight, grad, exp_avg, exp_avg_sq, whole_rows=lines):
        g = g.to(w.dtype)
        m.mul_(beta1).add_(g, alpha=how.sign * (1 - beta1))  # line 1
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)  # line 2
        scratch = torch.empty_like(w)
        # u second: it is read from the same scratch that |w| has been in
        for index, x in ((0, w), (1, None)):
            magnitudes = torch.abs(w, out=scratch) if x is w else direction(w, m, v, how, out=scratch).abs_()
            if squares:
                sizes[index].add_(torch.linalg.vector_norm(magnitudes, dtype=wide).square())
            elif magnitudes.numel():
                if lines:
                    of_rows = torch.amax(magnitudes, 1, keepdim=True)
                    sizes[2 + index][row : row + len(w)] = of_rows
                    torch.maximum(sizes[4 + index], magnitudes.amax(0, keepdim=True), out=sizes[4 + index])
                torch.maximum(sizes[index], (of_rows if lines else magnitudes).amax(), out=sizes[index])
        row += len(w)
    return sizes


def ratio(weight_norm, direction_norm, guards: bool, least: Tensor | None = None) -> Tensor:
    """Lines 4 to 6: ratios of norms of one shape, none below `least`; infinite where a norm is 0, if that guards."""
    ratios = quotient(weight_norm, direction_norm)
    if least is not None:
        ratios = torch.maximum(ratios, least)
    return torch.where((weight_norm == 0) | (direction_norm == 0), torch.inf, ratios) if guards else ratios


def apply(weight, exp_avg, exp_avg_sq, how, factors, lr: float) -> None:
    """Pass 2: weight moves in place.

    Args:
        weight, exp_avg, exp_avg_sq: matrices of one shape (n, k).
        how: fast.Direction. factors: fast.Factors. lr: η.
    """
    row, column = factors.row, factors.column
    lines = len(row) > 1 or column is not None
    at = 0
    for w, m, v in tiles(weight, exp_avg, exp_avg_sq, whole_rows=lines):
        here = slice(at, at + len(w)) if len(row) > 1 else slice(None)
        step = direction(w, m, v, how, out=torch.empty_like(w))
        s, guarded = row[here], row[here] == torch.inf
        if column is not None:
            s, guarded = torch.maximum(s, column), guarded | (column == torch.inf)
        step.mul_(s.masked_fill_(guarded, 1.0) if column is not None else s.masked_fill(guarded, 1.0))  # line 7
        if factors.clip:
            step.clamp_(-1, 1)  # line 8
        if factors.beside:
            step.add_(w, alpha=factors.beside)
        w.sub_(step, alpha=lr)  # line 9
        at += len(w)
