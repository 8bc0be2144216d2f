"""The gradient noise scale: how large a batch must be before averaging over more sequences stops helping.

The gradient of a batch of B sequences is G + noise: its mean is the true gradient G, its covariance Σ / B, where Σ is
the covariance of one sequence's gradient. Hence, for any B,

    E|G_B|² = |G|² + tr Σ / B

and the gradient norms at two batch sizes b < B give both unknowns, without bias:

    |G|²  ≈ (B |G_B|² - b |G_b|²) / (B - b)
    tr Σ  ≈ (|G_b|² - |G_B|²) / (1/b - 1/B)

The simple noise scale is B_noise = tr Σ / |G|², in sequences. At B = B_noise signal and noise are equal in size; well
below it doubling the batch halves the steps that are needed, well above it doubling does next to nothing.

The ratio of two unbiased estimates is not unbiased, and near |G|² = 0 it is wild: a single measurement of |G|² may be
negative. So average |G|² and tr Σ over several measurements, nearby steps or seeds, and take the ratio last (their
appendix A.1 averages each along the run): `average_noise_scale`.

Source: McCandlish, Kaplan, Amodei, "An Empirical Model of Large-Batch Training", arXiv 1812.06162, appendix A.1.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import InputError
from .attention import evaluating


class NoiseScale(NamedTuple):
    """The two halves of the noise scale, and their ratio."""

    noise_scale: float  # tr Σ / |G|², sequences; inf where |G|² came out at or below 0, NaN where tr Σ did so too
    gradient_sq: float  # |G|², unbiased
    trace: float  # tr Σ, the covariance of one sequence's gradient, unbiased
    small: int  # sequences in a piece
    large: int  # sequences in all pieces together


def noise_scale(model, x: Tensor, y: Tensor, *, piece: int = 8) -> NoiseScale:
    """The noise scale of a GPT2's mean cross-entropy, in all its weights, from N pieces and their mean.

    Args:
        model: left as it was; gradients that its parameters hold are not touched.
        x, y: sequences and their targets, (n, T) int64, drawn independently of each other as a batch is. Those left
            over after n // piece pieces are not used.
        piece: sequences a piece.

    Raises:
        InputError: fewer than two pieces.
    """
    if isinstance(piece, bool) or not isinstance(piece, int) or piece < 1:
        raise InputError(f"piece: got {piece!r}, expected a whole number ≥ 1")
    count = len(x) // piece
    if count < 2:
        raise InputError(f"piece: got {piece} of {len(x)} sequences, expected at least two pieces; give more sequences")
    parameters = [p for p in model.parameters() if p.requires_grad]
    total = [torch.zeros_like(p) for p in parameters]
    small_sq = 0.0
    with evaluating(model), torch.enable_grad():
        for part in range(count):
            rows = slice(part * piece, (part + 1) * piece)
            loss = model(x[rows], y[rows])[1]
            grads = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
            small_sq += _norm_sq(grads) / count
            torch._foreach_add_(total, grads)
    large_sq = _norm_sq(total) / count**2
    return noise_from_norms(small_sq, large_sq, piece, count * piece)


def noise_from_norms(small_sq: float, large_sq: float, small: int, large: int) -> NoiseScale:
    """The noise scale from squared gradient norms at two batch sizes.

    Args:
        small_sq: |G_b|² at b = `small` sequences; its mean over several batches, for a steadier figure.
        large_sq: |G_B|² at B = `large` sequences. It may be the gradient of the same sequences together.
    """
    if not 0 < small < large:
        raise InputError(f"small, large: got {small!r} and {large!r}, expected 0 < small < large")
    gradient_sq = (large * large_sq - small * small_sq) / (large - small)
    trace = (small_sq - large_sq) / (1 / small - 1 / large)
    return NoiseScale(_ratio(trace, gradient_sq), gradient_sq, trace, small, large)


def average_noise_scale(measured: Iterable[Any]) -> float:
    """tr Σ / |G|² in sequences, numerator and denominator averaged over the measurements before the division.

    Args:
        measured: NoiseScales, StepRecords (those without a measurement are passed over) or their `noise_scale` tables.

    Returns:
        NaN where nothing was measured, inf where the averaged |G|² is at or below 0: too few measurements.
    """
    pairs = [pair for item in measured if (pair := _pair(item)) is not None]
    if not pairs:
        return math.nan
    gradient_sq, trace = (math.fsum(values) / len(pairs) for values in zip(*pairs, strict=True))
    return _ratio(trace, gradient_sq)


def _pair(item) -> tuple[float, float] | None:
    """(|G|², tr Σ) of one measurement."""
    if isinstance(item, NoiseScale):
        return item.gradient_sq, item.trace
    table = item if isinstance(item, Mapping) else item.noise_scale
    return None if table is None else (table["gradient_sq"], table["trace"])


def _ratio(trace, gradient_sq) -> float:
    if gradient_sq > 0:
        return trace / gradient_sq
    return math.inf if trace > 0 else math.nan


def _norm_sq(tensors) -> float:
    return torch.stack(torch._foreach_norm(list(tensors), 2)).double().square().sum().item()
