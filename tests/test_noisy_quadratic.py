"""The noisy quadratic model: its recursion against a simulation, and what its curves must do."""

import itertools
import math

import numpy as np
import pytest

from merit_lab import noisy_quadratic as nqm
from merit_lab.errors import InputError


def simulated(lr, steps, batch_size, h, precondition, momentum, noise, schedule, samples=40_000):
    """Mean loss of many runs, and its standard error."""
    random = np.random.default_rng(0)
    theta, buffer = random.standard_normal((samples, len(h))), np.zeros((samples, len(h)))
    for step in range(1, steps + 1):
        gradient = h * theta + np.sqrt(noise * h / batch_size) * random.standard_normal(theta.shape)
        buffer = momentum * buffer + gradient
        theta = theta - lr * schedule(step, steps) * h**-precondition * buffer
    losses = 0.5 * (theta**2 @ h)
    return losses.mean(), losses.std() / math.sqrt(samples)


@pytest.mark.parametrize("schedule", [nqm.constant, nqm.cosine])
@pytest.mark.parametrize("momentum", [0.0, 0.8])
@pytest.mark.parametrize("precondition", [0.0, 0.5, 1.0])
def test_the_recursion_is_the_mean_of_many_runs(schedule, momentum, precondition):
    h = np.array([2.0, 0.5, 0.1])
    model = {"precondition": precondition, "momentum": momentum, "noise": 3.0, "schedule": schedule}
    exact = nqm.expected_loss(0.2, steps=25, batch_size=4, curvature=h, **model)
    mean, error = simulated(0.2, 25, 4, h, **model)
    assert abs(mean - exact) < 4 * error
    assert error < 0.01 * exact  # else the line above says little


def test_one_direction_by_hand():
    # s = 1 -> (1 - .5 · 2)² · 1 + .25 · 2 / 4 = .125 -> 0 · .125 + .125; the loss is ½ · 2 · s
    assert nqm.expected_loss(0.5, steps=2, batch_size=4, curvature=[2.0]) == pytest.approx(0.125)


def test_many_rates_are_as_many_single_ones():
    rates = np.array([[0.1, 0.5], [1.0, 1.5]])
    together = nqm.expected_loss(rates, steps=9, batch_size=8, schedule=nqm.cosine)
    assert together.shape == (2, 2)
    for index in np.ndindex(2, 2):
        alone = nqm.expected_loss(rates[index], steps=9, batch_size=8, schedule=nqm.cosine)
        assert alone == pytest.approx(together[index])


def test_without_noise_the_loss_falls_at_the_known_rate():
    loss = nqm.expected_loss(0.1, steps=30, batch_size=1, curvature=[1.0], noise=1e-300)
    assert loss == pytest.approx(0.5 * 0.9**60)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_rate_that_blows_up_is_inf(momentum):
    assert nqm.expected_loss(50.0, steps=500, batch_size=1, momentum=momentum) == math.inf


def test_more_steps_at_the_same_batch_never_hurt():
    losses = [nqm.best_loss(64 * n, 64, curvature=nqm.spectrum(50)).loss for n in (1, 2, 4, 8, 16, 32)]
    assert all(a > b for a, b in itertools.pairwise(losses))


@pytest.mark.parametrize("schedule", [nqm.constant, nqm.cosine])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_curve_is_flat_and_then_rises_and_never_passes_the_floor(schedule, momentum):
    budget, model = 4096, {"curvature": nqm.spectrum(200), "schedule": schedule, "momentum": momentum}
    curve = [nqm.best_loss(budget, 2**k, **model) for k in range(13)]
    losses = [best.loss for best in curve]
    assert max(losses[:4]) < 1.1 * min(losses[:4])  # flat, within the grid of rates
    assert all(a < b for a, b in itertools.pairwise(losses[6:]))  # rising
    assert losses[-1] > 5 * losses[0]
    assert min(losses) > nqm.floor(budget, curvature=nqm.spectrum(200))
    assert not any(best.at_edge for best in curve)
    assert [best.steps for best in curve] == [budget >> k for k in range(13)]


def test_the_critical_batch_grows_with_preconditioning_and_with_momentum():
    model = {"curvature": nqm.spectrum(200), "schedule": nqm.cosine, "smallest": 8}
    sizes = [nqm.critical_batch(4096, precondition=p, **model) for p in (0.0, 0.25, 0.5, 1.0)]
    assert all(a * 1.5 < b for a, b in itertools.pairwise(sizes))
    assert nqm.critical_batch(16384, momentum=0.9, **model) > 1.5 * nqm.critical_batch(16384, **model)


def test_the_critical_batch_is_where_the_loss_has_risen_by_the_tolerance():
    model = {"curvature": nqm.spectrum(200)}
    reference = nqm.best_loss(4096, 8, **model).loss
    size = nqm.critical_batch(4096, smallest=8, tolerance=0.5, **model)
    assert nqm.best_loss(4096, math.floor(size * 0.8), **model).loss < 1.5 * reference
    assert nqm.best_loss(4096, math.ceil(size * 1.25), **model).loss > 1.5 * reference
    assert nqm.critical_batch(4096, smallest=8, tolerance=1e6, **model) == math.inf


@pytest.mark.parametrize("batch", [1, 10, 100])
def test_the_floor_is_reached_by_the_best_rate_for_a_single_direction_however_the_examples_are_divided(batch):
    """1/s' = 1/s + B h / c, with the rate h s / (h² s + c h / B) that minimises the next s."""
    h, noise, square = 0.7, 2.0, 1.0
    for _ in range(100 // batch):
        variance = noise * h / batch
        rate = h * square / (h**2 * square + variance)
        square = (1 - rate * h) ** 2 * square + rate**2 * variance
    assert 0.5 * h * square == pytest.approx(nqm.floor(100, curvature=[h], noise=noise))


def test_newtons_method_loses_almost_nothing_at_a_large_batch():
    model = {"curvature": nqm.spectrum(200), "schedule": nqm.cosine}
    floor = nqm.floor(4096, curvature=model["curvature"])
    assert nqm.best_loss(4096, 256, precondition=1.0, **model).loss < 1.5 * floor
    assert nqm.best_loss(4096, 256, precondition=0.0, **model).loss > 10 * floor


@pytest.mark.parametrize(
    "call, says",
    [
        (lambda: nqm.spectrum(0), "dimensions: got 0, expected a whole number ≥ 1"),
        (lambda: nqm.best_loss(10, 20), "batch_size: got 20, expected at most examples = 10"),
        (lambda: nqm.best_loss(10, 0), "batch_size: got 0"),
        (lambda: nqm.expected_loss(0.1, steps=2.5, batch_size=1), "steps: got 2.5, expected a whole number"),
        (lambda: nqm.expected_loss(0.1, steps=2, batch_size=0), "batch_size: got 0, expected a finite number > 0"),
        (lambda: nqm.best_loss(10, 1, precondition=1.5), r"precondition: got 1\.5, expected a number from 0"),
        (lambda: nqm.best_loss(10, 1, momentum=1.0), r"momentum: got 1\.0, expected a number ≥ 0 and < 1"),
        (lambda: nqm.best_loss(10, 1, noise=0.0), r"noise: got 0\.0"),
        (lambda: nqm.best_loss(10, 1, curvature=[1.0, -1.0]), r"curvature: got an array of shape \(2,\)"),
        (lambda: nqm.critical_batch(10, tolerance=0), "tolerance: got 0"),
    ],
)
def test_bad_arguments_are_named(call, says):
    with pytest.raises(InputError, match=says):
        call()
