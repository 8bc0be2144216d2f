"""The fused step: LAMB and MERIT in two passes over memory, without a temporary of the weight's size.

The readable step (merit.py, lamb.py) writes every quantity it names to memory and reads it back. Here only the four
tensors that must be touched are: a weight's trust ratios need norms of the whole direction u before any element may
move, so u is computed twice and never stored.

    pass 1   read w, g, m, v   write m, v   lines 1 to 3, and the norms of lines 4 to 6      24 bytes a weight
    between  ratios from the norms: vectors as long as a row and a column
    pass 2   read w, m, v      write w      line 3 once more, lines 7 to 9                   16 bytes a weight

In float32 that is 40 bytes a weight; AdamW, which needs no norm, gets by with 28. It is written three times, as
`measure` (pass 1), `ratio` (between) and `apply` (pass 2):

    fast_c.py        C, compiled when it is first needed, for the CPU; MERIT's three in one call where a weight is whole
    fast_triton.py   Triton, for CUDA
    fast_tiles.py    torch, some rows at a time: where neither is there

Sharded tensors (DTensors) are measured shard by shard, and what must be known of the others travels in one packed
all-reduce for each dimension of the mesh, whatever the number of tensors.

The numbers are those of the readable step, up to rounding: a test holds them equal to 1e-12 of their size in float64
and 1e-5 in float32. Weights that somebody watches take the readable step, since they are to be looked at.
"""

import math
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import fast_c, fast_tiles
from .fast_tiles import Sizes
from .sharded import exchange, local

AUTO_FROM = 1 << 16  # fused="auto" fuses tensors of so many elements: below, calling costs more than memory does


class Direction(NamedTuple):
    """How u comes of m, v and w: u = (m / correction1) / (√(v / correction2) + ε) + decay · w."""

    betas: tuple[float, float]
    eps: float
    decay: float  # λ where it is part of u, else 0
    corrections: tuple[float, float]  # LAMB's 1 - β₁ᵗ and 1 - β₂ᵗ; 1 for MERIT
    sign: float  # of the gradient: -1 climbs


class Factors(NamedTuple):
    """What multiplies u in pass 2: s_ij = max(row_i, column_j), 1 where that is infinite (a guard)."""

    row: Tensor  # (n, 1) or (1, 1)
    column: Tensor | None  # (1, k); None: the row's alone
    clip: bool  # whether |s u| goes no further than 1
    beside: float  # λ where decay is no part of u


class Started(NamedTuple):
    """A parameter between its two passes."""

    parameter: Tensor
    weight: Tensor  # what is computed with: the parameter's own memory or its float32 copy, as a matrix
    exp_avg: Tensor  # in the state's memory, as a matrix
    exp_avg_sq: Tensor
    state: dict[str, Any]
    group: dict[str, Any]
    how: Direction
    sizes: Sizes
    squares: bool
    kernels: ModuleType


def takes(parameter: Tensor, group: dict[str, Any], form: str | None) -> bool:
    """Whether this parameter takes the fused step.

    Never: AdamW (torch.optim.AdamW has a fused one), MERIT with ℓ2 norms, MERIT's official variant on more than two
    dimensions (its rows and columns are no rows and columns of a matrix), and weights that do not lie contiguously.
    fused="auto" also leaves small tensors to the readable step.
    """
    wanted = group.get("fused", "auto")  # a state saved by an older version has no such key
    if form is None or wanted is False or (wanted == "auto" and parameter.numel() < AUTO_FROM):
        return False
    if form == "merit" and (group["norm"] != "max" or (parameter.ndim > 2 and group["variant"] == "official")):
        return False
    shard, grad = local(parameter), parameter.grad
    alike = getattr(parameter, "placements", None) == getattr(grad, "placements", None)
    return shard is not None and shard.is_contiguous() and alike


def start(parameter: Tensor, state: dict[str, Any], group: dict[str, Any], form: str) -> Started | None:
    """Pass 1: the moments move on; returns the norms of this rank's part. None where the step was taken at once."""
    squares = form == "lamb"
    how = _direction(group, state, squares)
    weight = state.get("master_weight", parameter)
    if weight is not parameter:
        _take_over(parameter, weight)
    for name in ("exp_avg", "exp_avg_sq"):  # a loaded state may lie otherwise than the weight
        state[name] = state[name].contiguous()
    weight, exp_avg, exp_avg_sq = (_matrix(x) for x in (weight, state["exp_avg"], state["exp_avg_sq"]))
    grad = _matrix(parameter.grad)
    kernels, lines = _kernels(weight), False
    if not squares:
        guards, by_row, by_column = line_7(group, parameter.ndim)
        lines = by_row or by_column
        if kernels is fast_c and grad.dtype == weight.dtype and not hasattr(parameter, "placements"):
            fast_c.merit(
                weight, grad, exp_avg, exp_avg_sq, how, float(group["lr"]),
                guards=guards, by_row=by_row, by_column=by_column, bound=group["bound"], clip=group["clip"],
            )  # fmt: skip
            _write_back(parameter, state)
            return None
    sizes = kernels.measure(weight, grad, exp_avg, exp_avg_sq, how, squares=squares, lines=lines)
    return Started(parameter, weight, exp_avg, exp_avg_sq, state, group, how, sizes, squares, kernels)


def meet(waiting: list[Started]) -> list[Started]:
    """The same parameters with the norms of their whole tensors: the ranks that share them exchange what they lack."""
    sizes = exchange([(s.parameter, s.sizes._asdict(), s.squares) for s in waiting])
    return [s._replace(sizes=Sizes(**whole)) for s, whole in zip(waiting, sizes, strict=True)]


def finish(started: Started) -> None:
    """Pass 2: the weight moves."""
    parameter, weight, exp_avg, exp_avg_sq, state, group, how, sizes, squares, kernels = started
    if squares:
        factors = lamb_factors(sizes, group, weight.dtype, kernels)
    else:
        factors = merit_factors(sizes, group, parameter.ndim, kernels)
    kernels.apply(weight, exp_avg, exp_avg_sq, how, factors, float(group["lr"]))
    _write_back(parameter, state)


def lamb_factors(sizes: Sizes, group: dict[str, Any], dtype: torch.dtype, kernels: ModuleType) -> Factors:
    """LAMB's line 5 from sums of squares, in the weight's dtype."""
    beside = 0.0 if group["decay_in_ratio"] else float(group["weight_decay"])
    weight_norm, direction_norm = sizes.weight.sqrt().to(dtype), sizes.direction.sqrt().to(dtype)
    if group["max_weight_norm"] is not None:
        weight_norm = weight_norm.clamp(max=group["max_weight_norm"])
    if group["always_adapt"] or group["weight_decay"] != 0:
        ratio = kernels.ratio(weight_norm, direction_norm, guards=True)
    else:
        ratio = torch.ones_like(weight_norm)
    return Factors(ratio.reshape(1, 1), None, False, beside)


def merit_factors(sizes: Sizes, group: dict[str, Any], ndim: int, kernels: ModuleType) -> Factors:
    """MERIT's lines 4 to 7 from the norms, with the guards of merit.py; an infinite factor stands for a guard.

    A guarded b means that every row and column is guarded: then b, infinite, makes every factor so.
    """
    guards, by_row, by_column = line_7(group, ndim)
    b = kernels.ratio(sizes.weight, sizes.direction, guards).reshape(1, 1)
    least = b if group["bound"] else None
    if not (by_row or by_column):
        return Factors(b, None, group["clip"], 0.0)
    row, column = torch.zeros_like(b) if least is None else b, None
    if by_row:
        row = kernels.ratio(sizes.weight_row, sizes.direction_row, guards, least)
    if by_column:
        column = kernels.ratio(sizes.weight_column, sizes.direction_column, guards)
    return Factors(row, column, group["clip"], 0.0)


def line_7(group: dict[str, Any], ndim: int) -> tuple[bool, bool, bool]:
    """Whether a norm of 0 guards (makes s 1), and whether row and column ratios enter line 7."""
    official, ratio = group["variant"] == "official", group["ratio"]
    return official or ndim < 2, ndim > 1 and ratio in ("element", "row"), ndim > 1 and ratio in ("element", "column")


def _write_back(parameter: Tensor, state: dict[str, Any]) -> None:
    if "master_weight" in state:
        local(parameter).copy_(local(state["master_weight"]))


def _direction(group, state, bias_correction_possible) -> Direction:
    beta1, beta2 = group["betas"]
    decay = float(group["weight_decay"]) if group.get("decay_in_ratio", True) else 0.0
    corrections = (1.0, 1.0)
    if bias_correction_possible and group["bias_correction"]:
        step = float(state["step"])
        corrections = (1 - beta1**step, 1 - beta2**step)
    return Direction((beta1, beta2), float(group["eps"]), decay, corrections, -1.0 if group["maximize"] else 1.0)


def _matrix(x: Tensor) -> Tensor:
    """This rank's part of x as rows and columns in the same memory; a gradient that does not lie so is copied."""
    x = local(x)
    if x.ndim != 2:
        x = x.reshape(x.shape[0], math.prod(x.shape[1:])) if x.ndim > 1 else x.reshape(1, -1)
    return x if x.is_contiguous() else x.contiguous()


def _take_over(parameter, master) -> None:
    """Where somebody has changed the half-precision parameter since the last step, it is right, not its copy."""
    here, copy = _matrix(parameter), _matrix(master)
    for piece, kept in fast_tiles.tiles(here, copy):
        kept.copy_(torch.where(kept.to(piece.dtype) == piece, kept, piece.to(kept.dtype)))


def _kernels(weight: Tensor) -> ModuleType:
    """The module that computes on this tensor's device."""
    if weight.device.type == "cpu":
        return fast_c if fast_c.library(weight.dtype) is not None else fast_tiles
    if weight.device.type == "cuda":
        from . import fast_triton

        return fast_triton if fast_triton.available() else fast_tiles
    return fast_tiles
