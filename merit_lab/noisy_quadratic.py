"""The noisy quadratic model: what a larger batch costs at a fixed number of examples, exactly, without training.

    loss  L(θ) = ½ Σ h_i θ_i²          curvatures h_i, by default 1/i
    gradient   g = H θ + noise,        noise of covariance c H / B at batch size B: steep directions are noisy ones
    step       θ ← θ - α_t H^-p m,     m ← β m + g;  p preconditions: 0 is SGD, ½ is like Adam, 1 is Newton's method

Nothing is drawn at random. Every direction is on its own, and what is expected of θ_i² obeys a recursion. Without
momentum, with a = α_t h^-p,

    E θ² ← (1 - a h)² E θ² + a² c h / B

At a fixed number of examples, examples = steps · B, the best loss over all learning rates is flat up to a critical
batch size and rises beyond it. Below it a batch twice as large, half as many steps and twice the rate give about the
same; above it the rate is at its limit, 2 / h_1 for SGD, and the flat directions get too few steps. Preconditioning
makes the directions alike, and the critical batch larger.

What that says and what it does not. The model's examples carry no less in a large batch: with the best rate for every
direction and step the loss depends on the number of examples alone (`floor`), and Newton's method is there in few
steps. So what a large batch loses, in this model, is lost by the optimizer, for want of steps in directions that its
preconditioner has not evened out. It is inherent to a given preconditioner and momentum, whatever the rate; it is not
inherent to the data.

Source: Zhang et al., "Which Algorithmic Choices Matter at Which Batch Sizes? Insights From a Noisy Quadratic Model",
arXiv 1907.04164, sections 3 and 4. As there: h_i = 1/i, noise covariance H, θ_i of variance 1 at the start. They have
10,000 dimensions and count steps to a target loss; the default here is 1,000, and examples are what is fixed.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from .errors import InputError
from .schedule import learning_rate

DIMENSIONS = 1000
Schedule = Callable[[int, int], float]  # (step from 1, steps) -> share of the peak rate


class Best(NamedTuple):
    """The lowest expected loss over the learning rates that were tried."""

    loss: float
    lr: float  # its peak rate
    steps: int
    at_edge: bool  # the best rate is the lowest or highest tried: widen the search


def spectrum(dimensions: int = DIMENSIONS) -> np.ndarray:
    """Curvatures h_i = 1/i, i = 1 … dimensions: (dimensions,) float64."""
    _check_count("dimensions", dimensions)
    return 1 / np.arange(1, dimensions + 1)


def cosine(step: int, steps: int) -> float:
    """The lab's schedule: 2 % of the steps warm up, then a cosine down to a tenth."""
    return learning_rate(step, steps, 1.0)


def constant(step: int, steps: int) -> float:
    """No schedule."""
    return 1.0


def expected_loss(
    lr,
    *,
    steps: int,
    batch_size: float,
    curvature: np.ndarray | None = None,
    precondition: float = 0.0,
    momentum: float = 0.0,
    noise: float = 1.0,
    schedule: Schedule = constant,
) -> np.ndarray:
    """Expected loss after `steps` steps from θ of variance 1, exactly (up to rounding).

    Args:
        lr: peak learning rate α, a number or an array of any shape.
        steps: optimizer steps T.
        batch_size: examples a step.
        curvature: h, (d,), positive; None: `spectrum()`.
        precondition: p, 0 to 1.
        momentum: β, at least 0 and below 1. The buffer is not scaled by 1 - β, so that rates are 1 - β times SGD's.
        noise: c, the covariance of one example's gradient noise over H.
        schedule: share of α at each step: `constant`, `cosine`, or a function of (step, steps).

    Returns:
        Losses of lr's shape; inf where the iteration blew up.
    """
    h = _check(curvature, precondition, momentum, noise)
    _check_count("steps", steps)
    if not 0 < batch_size < math.inf:
        raise InputError(f"batch_size: got {batch_size!r}, expected a finite number > 0")
    rates = np.asarray(lr, dtype=np.float64)
    peak = rates.reshape(-1, 1) * h**-precondition  # (rates, d): each direction's own rate
    variance = noise * h / batch_size  # of the gradient, (d,)
    shares = [schedule(step, steps) for step in range(1, steps + 1)]
    with np.errstate(over="ignore", invalid="ignore"):
        iterate = _with_momentum if momentum else _plain
        loss = 0.5 * iterate(peak, shares, h, variance, momentum) @ h
    return np.where(np.isfinite(loss), loss, math.inf).reshape(rates.shape)


def _plain(peak, shares, h, variance, momentum) -> np.ndarray:
    """E θ² after the steps, (rates, d), without momentum. In place: this loop is what the time goes to."""
    along, spread = peak * h, peak**2 * variance
    square, work = np.ones_like(peak), np.empty_like(peak)
    for share in shares:
        np.multiply(along, share, out=work)
        work -= 1
        work *= work
        square *= work  # (1 - a h)² E θ²
        np.multiply(spread, share**2, out=work)
        square += work
    return square


def _with_momentum(peak, shares, h, variance, momentum) -> np.ndarray:
    """E θ² after the steps, (rates, d): θ' = θ - a m' with m' = β m + h θ + noise."""
    square, cross, buffer = np.ones_like(peak), np.zeros_like(peak), np.zeros_like(peak)  # E θ², E θm, E m²
    for share in shares:
        rate = peak * share
        buffer = momentum**2 * buffer + 2 * momentum * h * cross + h**2 * square + variance
        cross = momentum * cross + h * square  # E θm', of the old θ
        square = square - 2 * rate * cross + rate**2 * buffer
        cross = cross - rate * buffer
    return square


def default_rates(curvature: np.ndarray | None = None, precondition: float = 0.0, momentum: float = 0.0) -> np.ndarray:
    """Five and a half decades of learning rates, eight a decade, up to four times what is stable for ever: (45,).

    A short run with a schedule may peak above the limit 2 (1 + β) / h_1^(1 - p) and gain from it.
    """
    h = _check(curvature, precondition, momentum, 1.0)
    limit = 2 * (1 + momentum) / (h ** (1 - precondition)).max()
    return 4 * limit * 10.0 ** (np.arange(-44, 1) / 8)


def best_loss(examples: int, batch_size: int, *, lr: np.ndarray | None = None, **model) -> Best:
    """The lowest expected loss after examples // batch_size steps, over the learning rates.

    Args:
        examples: the budget, in the unit of batch_size (sequences, say).
        batch_size: examples a step, at most `examples`.
        lr: rates to try; None: `default_rates`.
        model: curvature, precondition, momentum, noise, schedule as `expected_loss` takes them.
    """
    _check_count("examples", examples)
    _check_count("batch_size", batch_size)
    if batch_size > examples:
        raise InputError(f"batch_size: got {batch_size}, expected at most examples = {examples}: not one step is left")
    if lr is None:
        lr = default_rates(*(model.get(name, default) for name, default in _SHAPE.items()))
    rates, steps = np.asarray(lr, dtype=np.float64).ravel(), examples // batch_size
    losses = expected_loss(rates, steps=steps, batch_size=batch_size, **model)
    best = int(losses.argmin())
    at_edge = rates[best] in (rates.min(), rates.max())
    return Best(float(losses[best]), float(rates[best]), steps, bool(at_edge))


def critical_batch(examples: int, *, tolerance: float = 0.1, smallest: int = 1, **model) -> float:
    """The batch size at which the best loss has risen to 1 + tolerance times that of the smallest batch.

    Batches double from `smallest`; between two of them the rise is taken as linear in log B and log loss.

    Args:
        examples: the budget.
        tolerance: how much of a rise counts.
        smallest: the batch to compare with.
        model: as for `best_loss`.

    Returns:
        Examples a step; inf if the loss never rises so far.
    """
    if not 0 < tolerance < math.inf:
        raise InputError(f"tolerance: got {tolerance!r}, expected a finite number > 0")
    below, reference, size = 0.0, best_loss(examples, smallest, **model).loss, smallest
    while (size := size * 2) <= examples:
        rise = math.log(best_loss(examples, size, **model).loss / reference) / math.log1p(tolerance)
        if rise >= 1:
            return size / 2 * 2 ** ((1 - below) / (rise - below))
        below = rise
    return math.inf


def floor(examples: float, *, curvature: np.ndarray | None = None, noise: float = 1.0) -> float:
    """The expected loss of an optimizer that takes the best rate for every direction at every step.

    With E θ² = s the best step leaves 1/s' = 1/s + B h / c: what B examples add does not depend on how they are divided
    into steps, so that ½ Σ h / (1 + examples · h / c) is a bound for every batch size and schedule. It is for steps
    along the gradient in each direction without momentum; as the posterior variance of θ given all the gradients, it
    also bounds every other estimate from them.

    Args:
        examples: the budget.
        curvature, noise: as for `expected_loss`.
    """
    h = _check(curvature, 0.0, 0.0, noise)
    return float(0.5 * (h / (1 + examples * h / noise)).sum())


_SHAPE = {"curvature": None, "precondition": 0.0, "momentum": 0.0}  # what the range of stable rates depends on


def _check(curvature, precondition, momentum, noise) -> np.ndarray:
    """The curvatures; InputError names what is out of range."""
    h = spectrum() if curvature is None else np.asarray(curvature, dtype=np.float64)
    if h.ndim != 1 or not h.size or not np.isfinite(h).all() or h.min() <= 0:
        raise InputError(f"curvature: got an array of shape {h.shape}, expected (d,) of finite numbers > 0")
    if not 0 <= precondition <= 1:
        raise InputError(f"precondition: got {precondition!r}, expected a number from 0 (none) to 1 (Newton)")
    if not 0 <= momentum < 1:
        raise InputError(f"momentum: got {momentum!r}, expected a number ≥ 0 and < 1")
    if not 0 < noise < math.inf:
        raise InputError(f"noise: got {noise!r}, expected a finite number > 0")
    return h


def _check_count(name, value):
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise InputError(f"{name}: got {value!r}, expected a whole number ≥ 1")
