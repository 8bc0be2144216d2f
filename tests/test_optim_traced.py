"""Looking inside a step: watch, explain, unwatch; and what the class adds to torch's Optimizer."""

import copy

import pytest
import torch
from helpers import HYPER, OPTIMIZERS, first_step, parameter, random, take, tensor
from torch import nn

from merit_lab import MERIT
from merit_lab.optim import AdamWStep, LAMBStep, MeritStep, Traced

each_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS)
STEPS = {"AdamW": AdamWStep, "LAMB": LAMBStep, "MERIT": MeritStep}


def two(optimizer, **arguments):
    a, b = parameter(random(3, 4)), parameter(random(5))
    return a, b, optimizer([a, b], **HYPER | arguments)


GRADS = [random(3, 4, seed=1), random(5, seed=2)]


@each_optimizer
@pytest.mark.parametrize("watched", ["all", "one", "list"])
def test_explain_returns_the_latest_step(optimizer, watched):
    a, b, ours = two(optimizer)
    ours.watch({"all": None, "one": a, "list": [a]}[watched])
    take(ours, [GRADS])
    explained, expected = ours.explain(a), first_step(optimizer.__name__, random(3, 4), GRADS[0])
    assert type(explained) is STEPS[optimizer.__name__]
    for x, y in zip(explained, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-15, atol=0)
    assert torch.equal(explained.weight, a)
    take(ours, [GRADS])
    assert ours.explain(a) is not explained and torch.equal(ours.explain(a).weight, a)
    if watched == "all":
        assert torch.equal(ours.explain(b).weight, b)
    else:
        with pytest.raises(ValueError, match=r"explain: the parameter of shape \(5,\) is not watched; call watch\(\)"):
            ours.explain(b)


@each_optimizer
def test_what_was_explained_stays_as_it_was(optimizer):
    a, _, ours = two(optimizer)
    ours.watch()
    take(ours, [GRADS])
    explained = ours.explain(a)
    copies = [None if x is None else x.clone() for x in explained]
    take(ours, [GRADS, GRADS])
    assert all(x is y is None or torch.equal(x, y) for x, y in zip(explained, copies, strict=True))
    assert not any(x.requires_grad for x in explained if x is not None)


@each_optimizer
def test_watching_changes_no_number(optimizer):
    (a, _, ours), (c, _, other) = two(optimizer), two(optimizer)
    ours.watch()
    for o in (ours, other):
        take(o, [GRADS] * 3)
    assert torch.equal(a, c)


def test_explain_says_what_to_do():
    a, _, ours = two(MERIT)
    take(ours, [GRADS])
    with pytest.raises(ValueError, match=r"\(3, 4\) is not watched; call watch\(\) before step\(\)"):
        ours.explain(a)
    ours.watch(a)
    with pytest.raises(ValueError, match=r"no step of the parameter of shape \(3, 4\) since watch\(\)"):
        ours.explain(a)
    with pytest.raises(ValueError, match=r"watch: the tensor of shape \(2,\) is not a parameter of mine"):
        ours.watch(parameter([1.0, 2.0]))


@pytest.mark.parametrize("which", [None, "a"])
def test_unwatch_lets_go(which):
    a, _, ours = two(MERIT)
    ours.watch(which and a)
    take(ours, [GRADS])
    ours.unwatch()
    with pytest.raises(ValueError, match="not watched"):
        ours.explain(a)
    take(ours, [GRADS])
    with pytest.raises(ValueError, match="not watched"):
        ours.explain(a)


@pytest.mark.parametrize("which", [None, "a"])
def test_a_copy_watches_its_own_parameters(which):
    a, b, ours = two(MERIT)
    ours.watch(which and a)
    take(ours, [GRADS])
    (c, _), again = copy.deepcopy(((a, b), ours))
    with pytest.raises(ValueError, match="no step"):
        again.explain(c)
    take(again, [GRADS])
    assert torch.equal(again.explain(c).weight, c) and not torch.equal(ours.explain(a).weight, c)


def test_half_precision_is_explained_in_float32():
    p = parameter(random(3, 4).bfloat16())
    ours = MERIT([p], **HYPER)
    ours.watch()
    take(ours, [[GRADS[0].bfloat16()]])
    assert ours.explain(p).weight.dtype == torch.float32
    assert torch.equal(ours.explain(p).weight.bfloat16(), p)


def test_skipped_steps_are_saved():
    _, _, ours = two(MERIT, skip_nonfinite=True)
    take(ours, [GRADS, [GRADS[0] * torch.nan, GRADS[1]]])
    assert ours.skipped_steps == ours.state_dict()["skipped_steps"] == 1
    _, _, again = two(MERIT)
    again.load_state_dict(ours.state_dict())
    assert again.skipped_steps == 1
    assert copy.deepcopy(ours).skip_nonfinite and copy.deepcopy(ours).skipped_steps == 1


@each_optimizer
def test_a_state_with_a_bad_argument_is_refused(optimizer):
    _, _, ours = two(optimizer)
    state = copy.deepcopy(ours.state_dict())
    state["param_groups"][0]["lr"] = -1
    with pytest.raises(ValueError, match="lr: got -1"):
        ours.load_state_dict(state)


@each_optimizer
def test_it_is_a_torch_optimizer(optimizer):
    layer = nn.Linear(3, 2)
    ours = optimizer(layer.named_parameters(), lr=0.1)
    assert isinstance(ours, torch.optim.Optimizer) and isinstance(ours, Traced)
    layer(torch.ones(1, 3)).sum().backward()
    before = layer.bias.detach().clone()
    ours.step()
    assert not torch.equal(layer.bias, before)
    ours.zero_grad()
    assert layer.weight.grad is None
    with pytest.raises(ValueError, match="empty parameter list"):
        optimizer([], lr=0.1)


@each_optimizer
def test_argument_names(optimizer):
    names = optimizer.argument_names()
    assert names[:3] == ["betas", "eps", "weight_decay"] and {"maximize", "skip_nonfinite"} < set(names)
    assert "lr" not in names and "params" not in names


@each_optimizer
def test_groups_keep_their_own_arguments(optimizer):
    a, b = parameter([1.0]), parameter([1.0])
    take(
        optimizer([{"params": [a], "lr": 0.5, "weight_decay": 0.0}, {"params": [b]}], lr=0.1, weight_decay=0.0),
        [[tensor([1.0])] * 2],
    )
    assert (1 - a.item()) == pytest.approx(5 * (1 - b.item()))
