"""What must hold for every input: the properties of the three optimizers, on generated matrices."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from helpers import HYPER, first_step, random, tensor
from hypothesis import example, settings
from hypothesis.extra.numpy import array_shapes, arrays

from merit_lab.optim import max_norm, merit_step, quotient, step_function

# Sixty-fourths: exact in binary, with zeros, and far from where squares overflow or vanish.
moderate = st.integers(-640, 640).map(lambda i: i / 64)


def given(*strategies, **named):
    """hypothesis.given with fewer examples: a step takes a millisecond, and there are many properties."""
    return lambda test: settings(max_examples=25)(hypothesis.given(*strategies, **named)(test))


variants = pytest.mark.parametrize("variant", ["official", "paper"])


@st.composite
def runs(draw, elements=moderate, dims=(2, 2), dtype=np.float64, weight_elements=None):
    """A weight and one to three gradients of its shape."""
    shape = draw(array_shapes(min_dims=dims[0], max_dims=dims[1], max_side=5))
    weight = draw(arrays(dtype, shape, elements=elements if weight_elements is None else weight_elements))
    grads = draw(st.lists(arrays(dtype, shape, elements=elements), min_size=1, max_size=3))
    return torch.from_numpy(weight), [torch.from_numpy(g) for g in grads]


def walk(function, weight, grads, **hyper):
    """(weight before, its step) for each gradient, the moments starting at zero."""
    exp_avg = exp_avg_sq = torch.zeros_like(weight)
    for t, grad in enumerate(grads, start=1):
        step = function(weight, grad, exp_avg, exp_avg_sq, step=t, **HYPER | hyper)
        yield weight, step
        weight, exp_avg, exp_avg_sq = step.weight, step.exp_avg, step.exp_avg_sq


def merit(weight, grad, exp_avg, exp_avg_sq, *, step, **hyper):
    return merit_step(weight, grad, exp_avg, exp_avg_sq, **hyper)


hypers = st.fixed_dictionaries({"eps": st.sampled_from([0.0, 1e-6]), "weight_decay": st.sampled_from([0.0, 0.1, 1.0])})


# -- MERIT's ratios ------------------------------------------------------------------------------------------------


@variants
@given(run=runs(dims=(1, 4)), hyper=hypers)
def test_element_ratio_is_at_least_the_weight_ratio(variant, run, hyper):
    for _, step in walk(merit, *run, variant=variant, **hyper):
        above = step.element_ratio >= step.weight_ratio
        assert above.all() if variant == "paper" else above[~step.guarded].all()


def test_only_the_official_guard_goes_below_the_weight_ratio():
    w, grad = tensor([[0.0, 0.0], [8.0, 8.0]]), torch.ones(2, 2, dtype=torch.float64)
    official, paper = (first_step(n, w, grad, weight_decay=0.0) for n in ("MERIT", "MERIT paper variant"))
    assert official.element_ratio[0, 0] == 1 < official.weight_ratio
    assert paper.element_ratio[0, 0] >= paper.weight_ratio


@variants
@given(run=runs(), hyper=hypers)
def test_transpose(variant, run, hyper):
    w, grads = run
    upright = walk(merit, w, grads, variant=variant, **hyper)
    lying = walk(merit, w.T, [g.T for g in grads], variant=variant, **hyper)
    for (_, a), (_, b) in zip(upright, lying, strict=True):
        assert torch.equal(a.weight, b.weight.T)
        assert torch.equal(a.row_ratio, b.column_ratio.T) and torch.equal(a.column_ratio, b.row_ratio.T)


@variants
@given(run=runs(dims=(1, 4)), hyper=hypers)
def test_step_is_bounded_by_the_rate_and_the_largest_weight(variant, run, hyper):
    for before, step in walk(merit, *run, variant=variant, **hyper):
        bound = HYPER["lr"] * before.abs().max().clamp(max=1)
        moved = (step.weight - before).abs()
        rounding = 1e-15 * (1 + before.abs().max())
        assert (moved <= bound + rounding)[~step.guarded].all()
        assert (moved <= HYPER["lr"] + rounding).all()  # the clip holds under a guard too


@variants
@given(run=runs(dims=(1, 4)), hyper=hypers)
def test_without_a_guard_only_weights_above_one_are_clipped(variant, run, hyper):
    for before, step in walk(merit, *run, variant=variant, **hyper):
        if before.abs().max() < 0.999:
            assert not step.clipped[~step.guarded].any()


def test_clip_does_something():
    w, grad = tensor([[4.0, 4.0]]), tensor([[1.0, 1.0]])
    assert first_step("MERIT", w, grad).clipped.all()
    assert first_step("MERIT", w, grad).update.tolist() == [[1.0, 1.0]]


@given(run=runs(dims=(1, 3)), cuts=st.lists(st.integers(0, 5), max_size=3))
def test_largest_elements_do_not_depend_on_how_rows_are_sharded(run, cuts):
    w, _ = run
    shards = [s for s in w.tensor_split(sorted(cuts)) if s.numel()]
    assert torch.equal(torch.stack([max_norm(s) for s in shards]).amax(), max_norm(w))
    assert torch.equal(torch.stack([max_norm(s, dim=0) for s in shards]).amax(dim=0), max_norm(w, dim=0))
    if w.ndim > 1:
        assert torch.equal(torch.cat([max_norm(s, dim=1) for s in shards]), max_norm(w, dim=1))


def test_l2_norms_do_depend_on_it():
    def by_shards(w):
        return torch.stack([s.norm().square() for s in w.split(3)]).sum().sqrt()

    matrices = [random(7, 5, seed=seed) for seed in range(20)]
    assert any(by_shards(w) != w.norm() for w in matrices)


# -- directions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["AdamW", "LAMB", "MERIT", "MERIT paper variant", "maxLAMB", "MERIT l2"])
@given(run=runs(dims=(1, 3)), exponent=st.integers(-60, 60))
def test_scale_of_the_gradient_does_not_matter(name, run, exponent):
    w, grads = run
    scaled = [g * 2.0**exponent for g in grads]  # a power of two: the moments scale without rounding
    function, hyper = step_function(name), {"eps": 0.0, "weight_decay": 0.0}
    for (_, a), (_, b) in zip(walk(function, w, grads, **hyper), walk(function, w, scaled, **hyper), strict=True):
        assert torch.equal(a.weight, b.weight)


@pytest.mark.parametrize("name", ["LAMB", "MERIT"])
def test_an_almost_dead_tensor_takes_a_full_size_step(name):
    w, grad = 0.5 * random(4, 5).sign(), random(4, 5, seed=1).sign()
    dead = first_step(name, w, 1e-30 * grad, eps=0.0, weight_decay=0.0)
    torch.testing.assert_close(dead.update, 0.5 * grad)  # as large as the weights themselves
    with_eps = first_step("AdamW", w, 1e-30 * grad, weight_decay=0.0)
    assert with_eps.update.abs().max() < 1e-20


@pytest.mark.parametrize(
    "name, update",
    [
        ("AdamW", lambda w, decay: decay * w),
        ("LAMB", lambda w, decay: w),
        ("MERIT", lambda w, decay: w.clamp(-1, 1)),
        ("MERIT paper variant", lambda w, decay: w.clamp(-1, 1)),
        ("MERIT without clip", lambda w, decay: w),
        ("maxLAMB", lambda w, decay: w),
    ],
)
@given(run=runs(dims=(1, 3)), decay=st.sampled_from([1e-3, 0.1, 1.0]))
def test_decay_alone_inside_a_ratio_forgets_its_size(name, update, run, decay):
    w, grads = run
    still = [torch.zeros_like(w) for _ in grads]
    for before, step in walk(step_function(name), w, still, weight_decay=decay):
        torch.testing.assert_close(step.update, update(before, decay), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("betas, size", [((0.9, 0.95), 0.447), ((0.9, 0.999), 3.16)], ids=str)
@given(run=runs(elements=moderate.filter(bool), dims=(1, 3)))
def test_size_of_the_first_direction(betas, size, run):
    w, grads = run
    hyper = {"betas": betas, "eps": 0.0, "weight_decay": 0.0}
    expected = (1 - betas[0]) / (1 - betas[1]) ** 0.5
    assert expected == pytest.approx(size, abs=3e-3)
    u = first_step("MERIT", w, grads[0], **hyper).direction
    torch.testing.assert_close(u, expected * grads[0].sign(), rtol=1e-12, atol=0)
    corrected = first_step("AdamW", w, grads[0], **hyper).direction
    torch.testing.assert_close(corrected, grads[0].sign(), rtol=1e-12, atol=0)


# -- finite in, finite out -----------------------------------------------------------------------------------------

LARGE = float(np.float32(1e38))
finite = st.floats(-LARGE, LARGE, width=32) | st.sampled_from([0.0, 1e-45, -1e-44, 1e-38, 1e-30, 1.0, 1e30])
at_most_1e15 = st.floats(-(2.0**50), 2.0**50, width=32)  # ℓ2 norms square: from 1.8e19 on they overflow float32


@pytest.mark.parametrize("name", ["AdamW", "LAMB", "MERIT", "MERIT paper variant", "maxLAMB", "MERIT without clip"])
@given(data=st.data(), hyper=hypers)
@example(data=None, hyper={"eps": 1e-6, "weight_decay": 0.0})
def test_finite_inputs_give_finite_steps(name, data, hyper):
    if data is None:  # 1 / 1.4e-39 exceeds float32, and infinity times the 0 beside it would be NaN
        run = tensor([[1.0, 1.0]], torch.float32), [tensor([[1e-44, 0.0]], torch.float32)]
    else:
        run = data.draw(runs(finite, (1, 3), np.float32, at_most_1e15 if name == "LAMB" else finite))
    for _, step in walk(step_function(name), *run, **hyper):
        assert step.update.isfinite().all() and step.weight.isfinite().all()
        assert getattr(step, "element_ratio", step.update).isfinite().all()


@given(st.tuples(finite, finite))
def test_quotient_is_finite(pair):
    a, b = tensor(pair, torch.float32)
    q = quotient(a, b)
    assert q.isfinite()
    if b == 0:
        assert q == 0
    elif (a / b).isfinite():
        assert q == a / b


# -- pure ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["AdamW", "LAMB", "MERIT", "MERIT paper variant"])
@given(run=runs(dims=(1, 4)))
def test_step_functions_change_no_argument(name, run):
    w, grads = run
    arguments = [w, grads[0], 0.1 * grads[-1], grads[-1].square()]
    versions, copies = [x._version for x in arguments], [x.clone() for x in arguments]
    step = step_function(name)(*arguments, step=1, **HYPER)
    assert [x._version for x in arguments] == versions
    assert all(torch.equal(x, copy) for x, copy in zip(arguments, copies, strict=True))
    mine = {x.data_ptr() for x in arguments}
    assert not mine & {x.data_ptr() for x in step if x is not None}
