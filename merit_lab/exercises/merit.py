"""Notebook 03: the element-wise ratio."""

import torch

from ..optim import max_norm, merit_ratios
from .judge import Mistake, judge


def right(w, u):
    """s of Algorithm 1, line 7, guarded as in the authors' code."""
    return merit_ratios(w, u)[3]


def _parts(w, u):
    b, r, c, _, guarded = merit_ratios(w, u)
    return b, r, c, guarded


def _min_for_max(w, u):
    b, r, c, guarded = _parts(w, u)
    return torch.where(guarded, 1.0, torch.maximum(torch.minimum(r, c), b))


def _exchanged(w, u):
    # the maximum over dim 0 taken for the rows and over dim 1 for the columns, laid out as rows and columns
    if w.shape[0] != w.shape[1]:
        raise ValueError("not square")
    b, r, c, _ = _parts(w, u)
    guard = ((max_norm(w, 0) == 0) | (max_norm(u, 0) == 0)).mT | ((max_norm(w, 1) == 0) | (max_norm(u, 1) == 0)).mT
    return torch.where(guard, 1.0, torch.maximum(torch.maximum(c.mT, r.mT), b))


def _ceiling(w, u):
    b, r, c, guarded = _parts(w, u)
    return torch.where(guarded, 1.0, torch.minimum(torch.maximum(r, c), b))


def _no_bound(w, u):
    return merit_ratios(w, u, bound=False)[3]


def _no_guard(w, u):
    rows, columns = max_norm(w, 1) / max_norm(u, 1), max_norm(w, 0) / max_norm(u, 0)
    return torch.maximum(torch.maximum(rows, columns), max_norm(w) / max_norm(u))


def _own_guards(w, u):
    b, r, c, _ = _parts(w, u)  # each ratio is 1 where one of its norms is 0, and the maximum is taken all the same
    return torch.maximum(torch.maximum(r, c), b)


def _signs_kept(w, u):
    rows = w.amax(1, keepdim=True) / u.amax(1, keepdim=True)
    columns = w.amax(0, keepdim=True) / u.amax(0, keepdim=True)
    return torch.maximum(torch.maximum(rows, columns), w.amax() / u.amax())


def _l2(w, u):
    return merit_ratios(w, u, norm="l2")[3]


MISTAKES = {
    "min for max": Mistake(
        _min_for_max, "you take the smaller of r and c; line 7 takes the larger, so that either can lift an element"
    ),
    "rows and columns exchanged": Mistake(
        _exchanged, "rows and columns are exchanged: amax(dim=1) is one number a row, amax(dim=0) one a column"
    ),
    "bound as a ceiling": Mistake(_ceiling, "b is a lower bound of s: take the maximum with it, not the minimum"),
    "bound forgotten": Mistake(_no_bound, "the weight-wise ratio b is missing from the maximum"),
    "guard left out": Mistake(
        _no_guard, "a zero row or column is not guarded: put s = 1 where the row or column of w or u is all zero"
    ),
    "guard for each ratio alone": Mistake(
        _own_guards, "the guard has the last word: s is 1 there, even where another ratio is larger"
    ),
    "signs kept": Mistake(_signs_kept, "the max-norm is of absolute values: take abs() before the maximum"),
    "l2": Mistake(_l2, "these are ℓ2 norms; MERIT takes the largest absolute element"),
}

_W = torch.tensor([[0.8, -0.1, 0.2], [0.1, 0.2, -0.1], [-0.2, 0.1, -0.3]])
_U = torch.tensor([[2.0, -1.0, 0.5], [0.25, 0.2, 0.1], [-1.0, 0.5, -0.5]])
SQUARE = [{"w": _W, "u": _U}, {"w": _W.mT.contiguous(), "u": _U}]
ZEROS = [
    {"w": torch.tensor([[0.0, 0.0], [0.1, 0.2]]), "u": torch.tensor([[0.4, 0.1], [0.4, 0.4]])},
    {"w": torch.tensor([[3.0, 4.0], [1.0, 2.0]]), "u": torch.tensor([[0.0, 0.4], [0.0, 0.1]])},
]
OBLONG = [{"w": _W[:2], "u": _U[1:]}]


def check_element_ratio(answer) -> None:
    """Print the verdict on a function (w, u) -> s."""
    print(verdict(answer))


def verdict(answer) -> str:
    """Judged in rounds, since a mistake in one place must not hide behind an error in another."""
    for inputs in (SQUARE, OBLONG, ZEROS):
        mistakes = [m for m in MISTAKES.values() if _applies(m, inputs)]
        said = judge(answer, right, inputs, mistakes)
        if said != "right":
            return said
    return "right"


def _applies(mistake, inputs) -> bool:
    """Whether this mistake shows on these inputs: it is defined there and differs from the right answer."""
    try:
        return judge(mistake.function, right, inputs) != "right"
    except ValueError:
        return False
