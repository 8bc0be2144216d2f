"""The two passes of fast.py in Triton, for CUDA: one kernel a pass, compiled when it is first needed.

CUDA builds of torch bring Triton along; without it fast.py goes on in torch. A program works on one block of the
matrix. Names and lines are those of merit.py. Every product, sum, quotient and root is rounded by itself, as the
readable step rounds it. Scalars come in float64, since a float32 weight's are rounded once and a float64 weight's
never. TRITON_INTERPRET=1 runs the kernels on the CPU, slowly: so they are tested where there is no GPU.
"""

from __future__ import annotations  # the kernels' annotations name Triton, which may not be there

import warnings
from functools import cache

import torch

from . import fast_tiles
from .fast import Direction, Factors, Sizes

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

ELEMENTS = 1 << 12  # of a block: 16 a thread
LAUNCH = {"num_warps": 8, "enable_fp_fusion": False}  # no fusion: a * b + c is rounded twice, as in torch
jit = triton.jit if triton else lambda function: function


@cache
def available() -> bool:
    """Whether the kernels run here: on all devices of compute capability 7.0 or more, or in Triton's interpreter.

    The first call compiles a kernel, to see whether that works (about a second).
    """
    if triton is None:
        return False
    if not isinstance(_measure, triton.JITFunction):
        return True  # the interpreter
    devices = range(torch.cuda.device_count())
    if not devices or min(map(torch.cuda.get_device_capability, devices)) < (7, 0):
        return False
    try:
        nothing = torch.zeros(4, 1, 1, device="cuda")
        measure(*nothing, Direction((0.0, 0.0), 0.0, 0.0, (1.0, 1.0), 1.0), squares=False, lines=False)
    except Exception as error:  # Triton's own, its compiler's, the linker's
        warnings.warn(
            f"MERIT and LAMB take their fused step in torch, which is slower: Triton failed: {error}. It needs a C "
            "compiler and Python's headers (Debian: apt install gcc python3-dev).",
            stacklevel=2,
        )
        return False
    return True


def measure(weight, grad, exp_avg, exp_avg_sq, how, *, squares: bool, lines: bool) -> Sizes:
    """Pass 1, as fast_tiles.measure."""
    if not weight.numel():
        return fast_tiles.measure(weight, grad, exp_avg, exp_avg_sq, how, squares=squares, lines=lines)
    n, k = weight.shape if lines else (1, weight.numel())
    programs, cut = _cut(n, k)
    bits = torch.int32 if weight.dtype == torch.float32 else torch.int64
    if lines:
        found = weight.new_zeros(2, n + k, dtype=bits)
    else:
        found = weight.new_empty(2, programs, dtype=torch.float64 if squares else bits)
    beta1, beta2 = how.betas
    with torch.cuda.device_of(weight):  # Triton launches on the current device
        _measure[(programs,)](
            weight, grad, exp_avg, exp_avg_sq, found, n, k, found.shape[1],
            beta1, 1 - beta1, beta2, 1 - beta2, how.sign, *_line_3(how, weight.dtype),
            SQUARES=squares, LINES=lines, MAGNITUDE=torch.iinfo(bits).max, **cut, **LAUNCH,
        )  # fmt: skip
    fast_tiles.tell("pass 1", (weight, grad, exp_avg, exp_avg_sq), (exp_avg, exp_avg_sq))
    if squares:
        return Sizes(*found.sum(1))
    found = found.view(weight.dtype)
    if not lines:
        return Sizes(*found.amax(1))
    rows, columns = found[:, :n], found[:, n:]
    return Sizes(*rows.amax(1), *rows.unsqueeze(2), *columns.unsqueeze(1))


def ratio(weight_norm, direction_norm, guards: bool, least=None) -> torch.Tensor:
    """Lines 4 to 6, as fast_tiles.ratio, in one launch: in torch it would be a dozen."""
    weight_norm, direction_norm = weight_norm.contiguous(), direction_norm.contiguous()
    out, n = torch.empty_like(weight_norm), weight_norm.numel()
    if n:
        with torch.cuda.device_of(out):
            _ratios[(triton.cdiv(n, 1024),)](
                weight_norm, direction_norm, least, out, n, torch.finfo(out.dtype).max, GUARDS=guards, BLOCK=1024
            )
    return out


def apply(weight, exp_avg, exp_avg_sq, how, factors: Factors, lr: float) -> None:
    """Pass 2, as fast_tiles.apply."""
    if not weight.numel():
        return
    row, column = (None if x is None else x.to(weight.dtype).contiguous() for x in factors[:2])
    by_row = len(row) > 1
    n, k = weight.shape if by_row or column is not None else (1, weight.numel())
    programs, cut = _cut(n, k)
    with torch.cuda.device_of(weight):
        _apply[(programs,)](
            weight, exp_avg, exp_avg_sq, row, column, n, k,
            *_line_3(how, weight.dtype), float(lr), float(factors.beside),
            ROW_STRIDE=int(by_row), CLIP=factors.clip, **cut, **LAUNCH,
        )  # fmt: skip
    fast_tiles.tell("pass 2", (weight, exp_avg, exp_avg_sq), (weight,))


def _cut(n: int, k: int) -> tuple[int, dict[str, int]]:
    """How many programs work on n rows of k columns, and what they must know of it; block sizes are powers of 2."""
    rows = min(triton.next_power_of_2(n), 32)
    columns = min(triton.next_power_of_2(k), ELEMENTS // rows)
    rows = min(triton.next_power_of_2(n), ELEMENTS // columns)
    across = triton.cdiv(k, columns)
    return triton.cdiv(n, rows) * across, {"across": across, "ROWS": rows, "COLUMNS": columns}


def _line_3(how: Direction, dtype: torch.dtype) -> tuple[float, ...]:
    one, two = how.corrections
    return 1 / one, 1 / two, how.eps, how.decay, torch.finfo(dtype).max


# -- the kernels -------------------------------------------------------------------------------------------------


@jit
def _place(n, k, across, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows and columns of this program's block, where its elements lie, and which of them exist."""
    program = tl.program_id(0).to(tl.int64)  # n k may exceed 2³¹
    i = program // across * ROWS + tl.arange(0, ROWS)[:, None]
    j = program % across * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return i, j, i * k + j, (i < n) & (j < k)


@jit
def _direction(w, m, v, scale1, scale2, eps, decay, largest):
    """Line 3: u = m / (√v + ε) + λ w; 0 where the denominator is 0, no quotient beyond the largest number."""
    m *= tl.full((), scale1, w.dtype)  # LAMB's bias correction; 1 for MERIT
    v *= tl.full((), scale2, w.dtype)
    if w.dtype == tl.float32:
        below = tl.sqrt_rn(v) + tl.full((), eps, w.dtype)
        u = tl.div_rn(m, tl.where(below != 0, below, 1.0))
    else:
        below = tl.sqrt(v) + tl.full((), eps, w.dtype)
        u = m / tl.where(below != 0, below, 1.0)
    u = tl.where(below != 0, u, 0.0)
    u = _cut_at(u, tl.full((), largest, w.dtype))
    return u + tl.full((), decay, w.dtype) * w


@jit
def _cut_at(x, limit):
    x = tl.where(x > limit, limit, x)  # a NaN stays
    return tl.where(x < -limit, -limit, x)


@jit
def _measure(
    weight, grad, exp_avg, exp_avg_sq, found, n, k, length,
    beta1: tl.float64, rest1: tl.float64, beta2: tl.float64, rest2: tl.float64, sign: tl.float64,
    scale1: tl.float64, scale2: tl.float64, eps: tl.float64, decay: tl.float64, largest: tl.float64,
    across, SQUARES: tl.constexpr, LINES: tl.constexpr, MAGNITUDE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Lines 1 to 3 and the norms of a block. found: (2, length), of w and of u: rows, then columns; else programs."""
    i, j, at, inside = _place(n, k, across, ROWS, COLUMNS)
    w = tl.load(weight + at, mask=inside, other=0.0)
    g = tl.load(grad + at, mask=inside, other=0.0).to(w.dtype) * tl.full((), sign, w.dtype)
    m = tl.load(exp_avg + at, mask=inside, other=0.0)
    v = tl.load(exp_avg_sq + at, mask=inside, other=0.0)
    m = tl.full((), beta1, w.dtype) * m + tl.full((), rest1, w.dtype) * g  # line 1
    v = tl.full((), beta2, w.dtype) * v + tl.full((), rest2, w.dtype) * (g * g)  # line 2
    tl.store(exp_avg + at, m, mask=inside)
    tl.store(exp_avg_sq + at, v, mask=inside)
    u = _direction(w, m, v, scale1, scale2, eps, decay, largest)  # 0 outside the matrix
    _note(w, found, i, j, n, k, SQUARES, LINES, MAGNITUDE)
    _note(u, found + length, i, j, n, k, SQUARES, LINES, MAGNITUDE)


@jit
def _note(x, found, i, j, n, k, SQUARES: tl.constexpr, LINES: tl.constexpr, MAGNITUDE: tl.constexpr):
    """The norms of this block of w or u. |x| orders as its bits do, NaN above all, so maxima of bits keep a NaN."""
    if SQUARES:
        x = x.to(tl.float64)
        tl.store(found + tl.program_id(0), tl.sum(x * x))
    else:
        bits = x.to(found.dtype.element_ty, bitcast=True) & MAGNITUDE
        if LINES:
            of_rows, of_columns = tl.max(bits, 1, keep_dims=True), tl.max(bits, 0, keep_dims=True)
            tl.atomic_max(found + i, of_rows, mask=i < n, sem="relaxed")
            tl.atomic_max(found + n + j, of_columns, mask=j < k, sem="relaxed")
        else:
            tl.store(found + tl.program_id(0), tl.max(bits))


@jit
def _ratios(
    weight_norm, direction_norm, least, out, n, largest: tl.float64, GUARDS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Lines 4 to 6: ratios of norms, none below `least`; infinite where a norm is 0, if that guards."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    w = tl.load(weight_norm + at, mask=at < n, other=0.0)
    u = tl.load(direction_norm + at, mask=at < n, other=0.0)
    below = tl.where(u != 0, u, 1.0)
    s = tl.where(u != 0, tl.div_rn(w, below) if w.dtype == tl.float32 else w / below, 0.0)
    s = _cut_at(s, tl.full((), largest, w.dtype))
    if least is not None:
        b = tl.load(least + at * 0, mask=at < n, other=0.0)
        s = tl.where((b > s) | (b != b), b, s)
    if GUARDS:
        s = tl.where((w == 0) | (u == 0), float("inf"), s)
    tl.store(out + at, s, mask=at < n)


@jit
def _apply(
    weight, exp_avg, exp_avg_sq, row, column, n, k,
    scale1: tl.float64, scale2: tl.float64, eps: tl.float64, decay: tl.float64, largest: tl.float64,
    lr: tl.float64, beside: tl.float64, across,
    ROW_STRIDE: tl.constexpr, CLIP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Lines 7 to 9 of a block."""
    i, j, at, inside = _place(n, k, across, ROWS, COLUMNS)
    w = tl.load(weight + at, mask=inside, other=0.0)
    m = tl.load(exp_avg + at, mask=inside, other=0.0)
    v = tl.load(exp_avg_sq + at, mask=inside, other=0.0)
    s = tl.load(row + i * ROW_STRIDE, mask=i < n, other=0.0)
    guarded = s == float("inf")
    if column is not None:
        c = tl.load(column + j, mask=j < k, other=0.0)
        guarded = guarded | (c == float("inf"))
        s = tl.where((c > s) | (c != c), c, s)  # a NaN wins, as in torch.maximum
    s = tl.where(guarded, 1.0, s)  # line 7
    step = s * _direction(w, m, v, scale1, scale2, eps, decay, largest)
    if CLIP:
        step = _cut_at(step, 1.0)  # line 8
    step += tl.full((), beside, w.dtype) * w
    tl.store(weight + at, w - tl.full((), lr, w.dtype) * step, mask=inside)  # line 9
