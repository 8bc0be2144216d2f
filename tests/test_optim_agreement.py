"""The step functions against torch, the authors' code, a loop-by-loop oracle, and each other."""

import inspect
import json
from itertools import pairwise
from pathlib import Path

import oracle
import pytest
import torch
from helpers import HYPER, OPTIMIZERS, first_step, parameter, random, stepped, take, tensor

from merit_lab.errors import InputError
from merit_lab.optim import (
    ABLATIONS,
    LADDER,
    LAMB,
    MERIT,
    AdamW,
    build,
    lamb_step,
    merit_ratios,
    merit_step,
    named,
    step_function,
)

GOLDEN = Path(__file__).parent / "golden"


def close(a, b, tolerance=1e-12):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# -- torch ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "hyper",
    [
        {},
        {"lr": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.1},
        {"lr": 1e-3, "betas": (0.0, 0.99), "eps": 1e-3, "weight_decay": 0.0},
        {"lr": 1e-3, "maximize": True},
    ],
    ids=str,
)
def test_adamw_is_torch_adamw(hyper):
    shapes = [(3, 4), (5,), (), (2, 3, 2), (1, 1)]
    ours, theirs = ([parameter(random(*s, seed=i)) for i, s in enumerate(shapes)] for _ in range(2))
    hyper = {"lr": 1e-2} | hyper
    optimizers = []
    for optimizer, parameters in ((AdamW, ours), (torch.optim.AdamW, theirs)):
        groups = [{"params": parameters[:2]}, {"params": parameters[2:], "weight_decay": 0.3, "lr": 0.02}]
        optimizers.append(optimizer(groups, **hyper))
    for t in range(100):
        grads = [[random(*s, seed=1000 * t + i) * 10.0 ** (i - 2) for i, s in enumerate(shapes)]]
        for optimizer in optimizers:
            take(optimizer, grads)
        for mine, reference in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, reference, rtol=1e-12, atol=1e-14)


# -- the authors' code ---------------------------------------------------------------------------------------------


def golden_cases():
    for name in ("lamb", "merit"):
        for case in json.loads((GOLDEN / f"{name}.json").read_text())["cases"]:
            yield pytest.param(name, case, id=f"{name}: {case['name']}")


@pytest.mark.parametrize("name, case", [*golden_cases()])
def test_golden(name, case):
    assert_golden(name, case, fused=False)


def assert_golden(name, case, fused):
    parameters = [parameter(w) for w in case["weights"]]
    hyper = case["hyper"] | {"betas": tuple(case["hyper"]["betas"])}
    if name == "lamb":
        optimizer = LAMB(parameters, **hyper, bias_correction=False, max_weight_norm=10.0, fused=fused)
    else:
        optimizer = MERIT(parameters, **hyper, fused=fused)
    for grads, after in zip(case["grads"], case["after"], strict=True):
        take(optimizer, [[tensor(g) for g in grads]])
        for p, expected in zip(parameters, after, strict=True):
            close(p.detach(), tensor(expected))


# -- the oracle ----------------------------------------------------------------------------------------------------


def awkward(*shape):
    """A weight and five gradients with zero rows and columns, tiny rows, and weights above 1."""
    w, grads = 3 * random(*shape, seed=1), [random(*shape, seed=t) for t in range(2, 7)]
    if len(shape) > 1:
        w[0] = 0
        w[:, -1] = 0
        w[-1] *= 1e-3
        for g in grads:
            g[1] = 0
            g[:, 1] = 0
            g[2] *= 1e-9
    return w, grads


def agrees_with_the_oracle(optimizer, reference, weight, grads, hyper=HYPER, **arguments):
    p = parameter(weight)
    expected = reference(oracle.elements(weight), [oracle.elements(g) for g in grads], **hyper, **arguments)
    ours = optimizer([p])
    for grad, after in zip(grads, expected, strict=True):
        take(ours, [[grad]])
        close(p.detach().flatten(), tensor(list(after.values())))


# the last: with a row of zeros, every gradient and no decay, every denominator of some elements is 0
SHAPES = [(4, 5), (6,), (), (3, 4, 2), (3, 1), (1, 3)]
WITH_AND_WITHOUT_DECAY = pytest.mark.parametrize("decay", [0.1, 0.0])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@WITH_AND_WITHOUT_DECAY
@pytest.mark.parametrize("variant", ["official", "paper"])
def test_merit_agrees_with_the_oracle(variant, decay, shape):
    hyper = HYPER | {"weight_decay": decay}
    w, grads = awkward(*shape) if min(shape, default=1) > 2 else (random(*shape), [random(*shape, seed=9)] * 3)
    agrees_with_the_oracle(
        lambda params: MERIT(params, variant=variant, **hyper), oracle.merit, w, grads, hyper, variant=variant
    )


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("bound", [True, False])
@pytest.mark.parametrize("ratio", ["element", "row", "column", "weight"])
@pytest.mark.parametrize("norm", ["max", "l2"])
@pytest.mark.parametrize("variant", ["official", "paper"])
def test_every_switch_agrees_with_the_oracle(variant, norm, ratio, bound, clip):
    switches = {"variant": variant, "norm": norm, "ratio": ratio, "bound": bound, "clip": clip}
    w, grads = awkward(4, 5)
    agrees_with_the_oracle(lambda params: MERIT(params, **HYPER, **switches), oracle.merit, w, grads, **switches)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("corrected", [True, False], ids=["v5", "v3"])
@pytest.mark.parametrize("limit", [None, 2.0])
def test_lamb_agrees_with_the_oracle(corrected, limit, shape):
    agrees_with_the_oracle(
        lambda params: LAMB(params, **HYPER, bias_correction=corrected, max_weight_norm=limit),
        oracle.lamb,
        3 * random(*shape),
        [random(*shape, seed=t) for t in range(1, 6)],
        corrected=corrected,
        max_weight_norm=limit or float("inf"),
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_adamw_agrees_with_the_oracle(shape):
    grads = [random(*shape, seed=t) for t in range(1, 6)]
    agrees_with_the_oracle(lambda params: AdamW(params, **HYPER), oracle.adamw, random(*shape), grads)


# -- worked by hand ------------------------------------------------------------------------------------------------


def test_adamw_worked_case():
    p = parameter(1.0)
    optimizer = AdamW([p], lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for grad, expected in [(1.0, 0.8900000), (-2.0, 0.9174374), (0.5, 0.9219854)]:
        take(optimizer, [[tensor(grad)]])
        assert p.item() == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("variant, move", [("official", -0.0044721), ("paper", -0.002)])
def test_merit_worked_case_zero_row(variant, move):
    w = tensor([[0.0, 0.0], [0.1, 0.2]])
    after = stepped(MERIT, w, torch.ones_like(w), lr=0.01, betas=(0.9, 0.95), variant=variant)
    torch.testing.assert_close(after[0], tensor([move, move]), rtol=0, atol=5e-8)


@pytest.mark.parametrize("variant", ["official", "paper"])
def test_merit_worked_case_dead_column(variant):
    w = tensor([[0.3, 0.4], [0.1, 0.2]])
    after = stepped(MERIT, w, [[0.0, 1.0], [0.0, 1.0]], lr=0.01, betas=(0.9, 0.95), variant=variant)
    assert torch.equal(after[:, 0], w[:, 0])
    assert after.isfinite().all() and (after[:, 1] < w[:, 1]).all()


def test_lamb_switches_change_what_they_say():
    w, grad = 20 * random(4, 3), random(4, 3, seed=1)
    zeros = torch.zeros_like(w)

    def step(weight_decay=0.1, **switches):
        return lamb_step(w, grad, zeros, zeros, step=1, **HYPER | {"weight_decay": weight_decay}, **switches)

    whole = step()
    assert whole.weight_ratio == whole.weight_norm / whole.direction_norm
    assert step(max_weight_norm=10.0).weight_norm == 10 < whole.weight_norm
    assert step(0.0, always_adapt=False).weight_ratio == 1 != step(0.0).weight_ratio
    assert step(0.1, always_adapt=False).weight_ratio == whole.weight_ratio
    beside = step(decay_in_ratio=False)
    close(beside.update, beside.weight_ratio * step(0.0).direction + 0.1 * w)
    assert not torch.allclose(beside.update, whole.update)


# -- the optimizers to each other ----------------------------------------------------------------------------------

L2_WEIGHT_WISE = {"norm": "l2", "ratio": "weight", "bound": False, "clip": False}


@pytest.mark.parametrize("zero", [None, "weight", "gradient"])
@pytest.mark.parametrize("shape", [(4, 5), (6,), (3, 2, 2)], ids=str)
def test_l2_weight_wise_merit_is_lamb_without_bias_correction(shape, zero):
    w, grads = random(*shape) * (zero != "weight"), [random(*shape, seed=t) * (zero != "gradient") for t in (1, 2, 3)]
    as_merit = stepped(MERIT, w, *grads, **HYPER, **L2_WEIGHT_WISE)
    as_lamb = stepped(LAMB, w, *grads, **HYPER, bias_correction=False)
    assert torch.equal(as_merit, as_lamb)


def test_maxlamb_is_lamb_with_another_norm():
    w, grad = random(4, 5), random(4, 5, seed=1)
    maxlamb, lamb = first_step("maxLAMB", w, grad), first_step("LAMB without bias correction", w, grad)
    assert torch.equal(maxlamb.direction, lamb.direction)
    close(maxlamb.update, w.abs().max() / maxlamb.direction.abs().max() * maxlamb.direction)
    close(lamb.update, w.norm() / lamb.direction.norm() * lamb.direction)


def test_where_all_elements_are_alike_the_norm_does_not_matter():
    w, grad = 0.3 * random(4, 5).sign(), random(4, 5, seed=1).sign()
    close(*(first_step(name, w, grad, weight_decay=0.0).update for name in ("MERIT", "MERIT l2")))
    close(*(first_step(name, w, grad, weight_decay=0.0).update for name in ("MERIT", "maxLAMB")))


# -- the ladder ----------------------------------------------------------------------------------------------------


def switches_of(rung):
    """Every switch of a rung, those left at their default included."""
    defaults = {n: p.default for n, p in inspect.signature(rung.optimizer).parameters.items()}
    common = {"params", "lr", "betas", "eps", "weight_decay", "maximize", "skip_nonfinite"}
    return {n: v for n, v in (defaults | rung.switches).items() if n not in common}


def neighbours():
    rungs = list(LADDER.values())
    yield from pairwise(rungs)
    yield from ((ABLATIONS["MERIT"], ABLATIONS[name]) for name in ABLATIONS if name != "MERIT")


@pytest.mark.parametrize("before, after", [pytest.param(a, b, id=b.name) for a, b in neighbours()])
def test_each_rung_changes_something(before, after):
    def difference(w):
        a, b = (first_step(rung.name, w, random(5, 5, seed=1)).weight for rung in (before, after))
        return (a - b).abs().max()

    w = awkward(5, 5)[0]
    # The variants differ on a zero row, the clip on weights above 1, the norms on those below.
    assert max(difference(w), difference(0.1 * w)) > 1e-4


@pytest.mark.parametrize("before, after", [pytest.param(a, b, id=b.name) for a, b in neighbours()])
def test_each_rung_is_one_switch_from_its_neighbour(before, after):
    if before.optimizer is after.optimizer:
        a, b = switches_of(before), switches_of(after)
        assert len([n for n in a if a[n] != b[n]]) == 1
        return
    w, grad = random(4, 5), random(4, 5, seed=1)
    first, second = (first_step(rung.name, w, grad) for rung in (before, after))
    if after.name == "LAMB":  # one factor on AdamW's whole update
        assert torch.equal(second.direction, first.update)
        assert torch.equal(second.update, second.weight_ratio * first.update)
    else:  # the same optimizer in MERIT's terms, bias correction off
        assert after.name == "LAMB without bias correction" and before.switches == {}
        assert after.switches == L2_WEIGHT_WISE


def test_the_ladder_leads_from_adamw_to_merit():
    assert list(LADDER) == [
        "AdamW",
        "LAMB",
        "LAMB without bias correction",
        "maxLAMB",
        "+ element-wise",
        "+ bound",
        "+ clip",
    ]
    assert switches_of(LADDER["+ clip"]) == switches_of(ABLATIONS["MERIT"])
    assert all(rung.name == name and rung.switch for name, rung in (LADDER | ABLATIONS).items())


@pytest.mark.parametrize("name", LADDER | ABLATIONS)
def test_built_optimizer_and_step_function_of_a_name_agree(name):
    w, grad = random(4, 5), random(4, 5, seed=1)
    assert isinstance(build(name, [parameter(w)], 0.01), named(name).optimizer)
    assert torch.equal(stepped(name, w, grad, **HYPER), first_step(name, w, grad).weight)


def test_arguments_of_build_reach_the_optimizer():
    optimizer = build("MERIT row only", [parameter(1.0)], 0.3, weight_decay=0.2, norm="l2")
    group = optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["norm"], group["ratio"]) == (0.3, 0.2, "l2", "row")


@pytest.mark.parametrize(
    "name, arguments, message",
    [
        ("Adam", {}, r"optimizer: got 'Adam', expected one of .*'AdamW'.*'maxLAMB'"),
        ("AdamW", {"variant": "paper"}, r"AdamW takes no 'variant', only betas, eps"),
        ("maxLAMB", {"norm": "l2"}, r"'maxLAMB' is MERIT with norm='max', got 'l2'"),
    ],
)
def test_build_refuses(name, arguments, message):
    with pytest.raises(InputError, match=message):
        build(name, [parameter(1.0)], 0.01, **arguments)


def test_unknown_names_everywhere():
    for function in (named, step_function):
        with pytest.raises(InputError, match="'Sophia', expected one of"):
            function("Sophia")


# -- quantities ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape, variant, row, column",
    [
        ((4, 5), "official", (4, 1), (1, 5)),
        ((4, 5), "paper", (4, 1), (1, 5)),
        ((4, 3, 2, 2), "official", (4, 1, 2, 2), (1, 3, 2, 2)),
        ((4, 3, 2, 2), "paper", (4, 1, 1, 1), (1, 3, 2, 2)),
        ((6,), "official", None, None),
        ((), "paper", None, None),
    ],
    ids=str,
)
def test_shapes_of_merits_quantities(shape, variant, row, column):
    w, zeros = random(*shape), torch.zeros(shape, dtype=torch.float64)
    step = merit_step(w, random(*shape, seed=1), zeros, zeros, variant=variant, **HYPER)
    shapes = {name: None if value is None else tuple(value.shape) for name, value in step._asdict().items()}
    assert shapes.pop("weight_ratio") == ()
    assert (shapes.pop("row_ratio"), shapes.pop("column_ratio")) == (row, column)
    assert set(shapes.values()) == {shape}
    assert step.guarded.dtype == step.clipped.dtype == torch.bool


@pytest.mark.parametrize("ratio", ["row", "column", "weight"])
def test_parts_that_do_not_enter_are_still_returned(ratio):
    w, grad, zeros = random(4, 5), random(4, 5, seed=1), torch.zeros(4, 5, dtype=torch.float64)
    whole, part = (merit_step(w, grad, zeros, zeros, ratio=r, **HYPER) for r in ("element", ratio))
    for name in ("weight_ratio", "row_ratio", "column_ratio"):
        assert torch.equal(getattr(part, name), getattr(whole, name))


def test_guarded_and_clipped_say_where():
    w, grad = tensor([[0.0, 0.0, 0.0], [0.5, 1.5, 0.0], [0.1, 0.2, 0.0]]), torch.ones(3, 3, dtype=torch.float64)
    step = first_step("MERIT", w, grad, weight_decay=0.0)
    assert step.guarded.tolist() == [[True] * 3, [False, False, True], [False, False, True]]
    unclipped = step.element_ratio * step.direction
    assert torch.equal(step.clipped, unclipped.abs() > 1) and step.clipped[1, 1] and not step.clipped[0, 0]
    assert not first_step("MERIT without clip", w, grad).clipped.any()


@pytest.mark.parametrize("zero", ["weight", "direction"])
@pytest.mark.parametrize("variant", ["official", "paper"])
def test_element_ratio_agrees_with_the_oracle(variant, zero):
    w, u = random(4, 5), random(4, 5, seed=1)
    empty = w if zero == "weight" else u
    empty[1], empty[:, 2] = 0, 0
    _, _, _, s, guarded = merit_ratios(w, u, variant=variant)
    expected = oracle.merit_factors(oracle.elements(w), oracle.elements(u), variant, oracle.largest, "element", True)
    close(s.flatten(), tensor(list(expected.values())))
    if variant == "official":
        assert torch.equal(guarded, empty == 0) and (s[guarded] == 1).all()
    else:
        assert torch.equal(guarded, (empty == 0) & (zero == "direction"))


@pytest.mark.parametrize("shape", [(), (3,), (3, 4)], ids=str)
@pytest.mark.parametrize("zero", ["weight", "direction", None])
def test_lambs_guard_says_where(shape, zero):
    w, grad = random(*shape) * (zero != "weight"), random(*shape, seed=1) * (zero != "direction")
    step = first_step("LAMB", w, grad, weight_decay=0.0)
    assert step.guarded.item() == (zero is not None)
    assert (step.weight_ratio == 1) == (zero is not None)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_update_is_the_step_per_unit_of_learning_rate(optimizer):
    w, grad = random(4, 5), random(4, 5, seed=1)
    step = first_step(optimizer.__name__, w, grad, lr=0.3)
    assert torch.equal(step.weight, w - 0.3 * step.update)
    assert torch.equal(step.exp_avg, 0.9 * torch.zeros_like(w) + (1 - 0.9) * grad)
