"""Notebook 10: an input that separates two programs."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..optim import max_norm, merit_ratios
from .judge import RIGHT, YOUR_TURN, Mistake

ROUNDING = 1e-12  # in float64 two orders of the same arithmetic agree to a relative 1e-15; this is far above


def last_word(w: Tensor, u: Tensor) -> Tensor:
    """Lines 4 to 8 with the authors' guard: s = 1 where the row or column of w or u is all zero."""
    s = merit_ratios(w, u)[3]
    return (s * u).clamp(-1, 1)


def each_its_own(w: Tensor, u: Tensor) -> Tensor:
    """Lines 4 to 8 with LAMB's guard: b, r and c are each 1 where one of their own norms is 0."""
    candidates = []
    for dim in (None, 1, 0):  # the whole matrix, its rows, its columns
        of_w, of_u = max_norm(w, dim), max_norm(u, dim)
        guarded = (of_w == 0) | (of_u == 0)
        of_w, of_u = torch.where(guarded, 1.0, of_w), torch.where(guarded, 1.0, of_u)
        candidates.append(u / of_u * of_w)  # u first: one division less, other last digits
    b, r, c = candidates
    largest = torch.maximum(torch.maximum(r.abs(), c.abs()), b.abs())
    return (u.sign() * largest).clamp(-1, 1)


def differs(a: Tensor, b: Tensor, tolerance: float = 0.0) -> Tensor:
    """Where a and b differ by more than `tolerance`, relative to the larger."""
    return (a - b).abs() > tolerance * torch.maximum(a.abs(), b.abs())


def check_separates(answer: Callable[[], tuple[Tensor, Tensor]]) -> None:
    """Print the verdict on a function () -> (w, u): a weight and a direction, two matrices of one shape, on which
    `last_word` and `each_its_own` differ by more than rounding.
    """
    print(verdict(answer))


def verdict(answer) -> str:
    """What `check_separates` prints."""
    try:
        given = answer()
    except NotImplementedError:
        return YOUR_TURN
    except Exception as error:  # the reader's code may raise anything
        return f"not yet: your function raised {type(error).__name__}: {error}"
    said = _form(given)
    if said:
        return f"not yet: {said}"
    w, u = (x.detach().clone() for x in given)
    exact = last_word(w.double(), u.double()), each_its_own(w.double(), u.double())
    if differs(*exact, ROUNDING).any():
        return RIGHT
    if w.dtype != u.dtype:
        return f"not yet: w is {w.dtype}, u is {u.dtype}; give both the same precision"
    noise = differs(last_word(w, u), each_its_own(w, u)).any()
    return f"not yet: {MISTAKES['float noise' if noise else _why_they_agree(w.double(), u.double())].says}"


def _form(given) -> str | None:
    if not isinstance(given, tuple | list) or len(given) != 2:
        return f"your function returned {type(given).__name__}, expected two tensors: return w, u"
    for name, x in zip("wu", given, strict=True):
        if not isinstance(x, torch.Tensor):
            return f"{name} is {type(x).__name__}, expected a tensor: torch.tensor([[…], […]])"
        if not x.is_floating_point():
            return f"{name} holds {x.dtype}, expected floats: write 1.0 for 1"
        if x.ndim != 2 or x.numel() == 0:
            return f"{name} has the shape {tuple(x.shape)}, expected a matrix such as (2, 2)"
    if given[0].shape != given[1].shape:
        return f"w is {tuple(given[0].shape)} and u is {tuple(given[1].shape)}, expected the same shape"
    if not all(torch.isfinite(x).all() for x in given):
        return MISTAKES["not finite"].says
    return None


def _why_they_agree(w, u) -> str:
    guarded = (max_norm(w, 1) == 0) | (max_norm(w, 0) == 0)  # (n, k): where w decides that the guard speaks
    if not guarded.any():
        zero_u = (max_norm(u, 1) == 0).any() or (max_norm(u, 0) == 0).any()
        return "a zero line in u" if zero_u else "an ordinary matrix"
    b, r, c, _, _ = merit_ratios(w, u)
    larger = guarded & (torch.maximum(torch.maximum(r, c), b) > 1)
    if not larger.any():
        return "no other ratio above 1"
    return "hidden by the clip" if (u != 0)[larger].any() else "u is 0 there"


def _matrices(w, u):
    return lambda: (torch.tensor(w), torch.tensor(u))


def _random():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, 8, generator=generator), torch.randn(8, 8, generator=generator)


MISTAKES = {
    "float noise": Mistake(
        _random,
        "that is rounding: the last digits differ because one program multiplies before it divides. In float64 the "
        "difference all but vanishes; a difference of the algorithms would stay",
    ),
    "an ordinary matrix": Mistake(
        _matrices([[1.0, 0.5], [0.25, 2.0]], [[0.5, 1.0], [1.0, 0.5]]),
        "on this input they agree to the last digit: nothing in it is all zero, so no guard speaks. Where do the two "
        "programs part?",
    ),
    "a zero line in u": Mistake(
        _matrices([[1.0, 2.0], [3.0, 4.0]], [[0.0, 0.0], [0.5, 0.25]]),
        "on this input they agree: a row or column of u is zero, and whatever s is there, s times 0 is 0. Try a zero "
        "in w",
    ),
    "no other ratio above 1": Mistake(
        _matrices([[0.0, 0.0], [0.1, 0.2]], [[0.447, 0.447], [0.447, 0.447]]),
        "on this input they agree: w has a zero row or column, so both guards speak, but no other ratio there is above "
        "1, and the maximum is the guard's 1 all the same",
    ),
    "hidden by the clip": Mistake(
        _matrices([[0.0, 0.0], [4.0, 8.0]], [[1.0, -1.0], [1.0, 1.0]]),
        "on this input they agree: the ratios differ, but line 8 cuts both steps at 1. Make u smaller",
    ),
    "u is 0 there": Mistake(
        _matrices([[0.0, 0.0], [4.0, 8.0]], [[0.0, 0.0], [1.0, 1.0]]),
        "on this input they agree: the ratios differ, but only where u is 0, so nothing moves there",
    ),
    "not finite": Mistake(
        _matrices([[float("nan"), 1.0], [1.0, 1.0]], [[1.0, 1.0], [1.0, 1.0]]),
        "w or u holds a nan or an inf; a nan differs from everything, even from itself, and shows nothing",
    ),
}
