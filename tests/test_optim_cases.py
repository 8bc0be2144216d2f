"""Small inputs that broke other people's optimizers, one section a kind.

Two more kinds stand in test_optim_agreement.py: decay put into the gradient, and more than two dimensions.
"""

import copy
import io
import pickle
import re

import pytest
import torch
from helpers import HYPER, OPTIMIZERS, parameter, random, same, state_bits, stepped, take, tensor
from torch import nn

from merit_lab import LAMB, MERIT, AdamW
from merit_lab.optim import ABLATIONS, LADDER, build
from merit_lab.training import clip_gradients

NAMES = list(ABLATIONS | LADDER)
each_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS)
each_name = pytest.mark.parametrize("name", NAMES)
PLAIN = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.0}


# -- zeros and empty tensors ---------------------------------------------------------------------------------------


def test_zero_weights_learn():
    after = stepped(MERIT, tensor([0.0, 0.0]), [1.0, -2.0], **PLAIN)
    torch.testing.assert_close(after, tensor([-0.0044721, 0.0044721]), rtol=0, atol=5e-8)


@each_name
@pytest.mark.parametrize("shape", [(2,), (3, 4), ()], ids=str)
def test_zero_weights_move_under_every_name_but_as_printed(name, shape):
    after = stepped(name, torch.zeros(shape, dtype=torch.float64), random(*shape), **PLAIN)
    if name == "MERIT paper variant" and len(shape) == 2:
        assert (after == 0).all()  # Algorithm 1 as printed: every ratio has a 0 on top
    else:
        assert (after != 0).all()


@each_name
@pytest.mark.parametrize("eps", [0.0, 1e-6])
@pytest.mark.parametrize("shape", [(3,), (3, 4), (3, 2, 2), ()], ids=str)
def test_zero_over_zero(name, eps, shape):
    zeros = torch.zeros(shape, dtype=torch.float64)
    assert torch.equal(stepped(name, zeros, zeros, zeros, **PLAIN, eps=eps), zeros)


@each_name
@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0,)], ids=str)
def test_empty_tensor_beside_others(name, shape):
    empty, other, alone = parameter(torch.zeros(shape)), parameter(random(3, 4)), parameter(random(3, 4))
    optimizer = build(name, [empty, other], **PLAIN)
    take(optimizer, [[torch.zeros(shape), random(3, 4, seed=t)] for t in (1, 2)])
    take(build(name, [alone], **PLAIN), [[random(3, 4, seed=t)] for t in (1, 2)])
    assert empty.shape == shape and torch.equal(other, alone)


@each_optimizer
def test_parameter_without_a_gradient_is_left_alone(optimizer):
    a, b = parameter(random(3, 4)), parameter(random(3, 4))
    a.grad = random(3, 4, seed=1)
    optimizer([a, b], lr=0.1).step()
    assert torch.equal(b, random(3, 4)) and not torch.equal(a, b)


# -- norms and bias correction -------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit, move", [(None, -0.01), (10.0, -0.001)])
def test_norm_clamped_at_ten(limit, move):
    ones = torch.ones(100, 100, dtype=torch.float64)
    after = stepped(LAMB, ones, ones, **PLAIN, max_weight_norm=limit)
    torch.testing.assert_close(after - ones, move * ones)


def test_bias_correction_cancels_in_lamb_without_decay():
    w, grads = random(4, 5), [random(4, 5, seed=t) for t in range(1, 6)]

    def lamb(bias_correction, decay):
        return stepped(LAMB, w, *grads, **PLAIN | {"weight_decay": decay}, eps=0.0, bias_correction=bias_correction)

    torch.testing.assert_close(lamb(True, 0.0), lamb(False, 0.0), rtol=1e-12, atol=1e-12)
    assert (lamb(True, 0.1) - lamb(False, 0.1)).abs().max() > 1e-4


@each_name
def test_tiny_rate(name):
    w = random(3, 4).float() + 2
    after = stepped(name, w, *[random(3, 4, seed=t).float() for t in range(3)], **PLAIN | {"lr": 1e-20})
    assert torch.equal(after, w)


# -- gradients that are not finite ---------------------------------------------------------------------------------


@each_optimizer
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("before", [0, 2], ids=["first step", "third step"])
def test_skip_nonfinite(optimizer, poison, before):
    parameters = [parameter(random(3, 4)), parameter(random(5))]
    ours = optimizer(parameters, lr=0.1, skip_nonfinite=True)
    good = [[random(3, 4, seed=t), random(5, seed=t)] for t in range(1, 4)]
    take(ours, good[:before])
    weights, state = [p.detach().clone() for p in parameters], copy.deepcopy(ours.state_dict()["state"])
    bad = [random(3, 4, seed=9), random(5, seed=9)]
    bad[1][2] = poison
    take(ours, [bad])
    assert ours.skipped_steps == 1
    assert all(map(torch.equal, parameters, weights))
    after = ours.state_dict()["state"]
    assert after.keys() == state.keys()
    assert all(torch.equal(after[i][name], state[i][name]) for i in state for name in state[i])
    take(ours, good[before:])
    assert ours.skipped_steps == 1 and all(p.isfinite().all() for p in parameters)


@each_optimizer
def test_by_default_a_nan_reaches_its_own_parameter(optimizer):
    bad, other, alone = parameter(random(5)), parameter(random(3, 4)), parameter(random(3, 4))
    grad = random(5, seed=1)
    grad[2] = torch.nan
    ours = optimizer([bad, other], lr=0.1)
    take(ours, [[grad, random(3, 4, seed=2)]])
    take(optimizer([alone], lr=0.1), [[random(3, 4, seed=2)]])
    assert bad.isnan().any() and torch.equal(other, alone) and ours.skipped_steps == 0


# -- hyper-parameters ----------------------------------------------------------------------------------------------

BAD = [
    ("lr", -0.1, "-0.1", "finite number ≥ 0"),
    ("lr", float("nan"), "nan", "finite number ≥ 0"),
    ("lr", float("inf"), "inf", "finite number ≥ 0"),
    ("lr", torch.tensor(-1.0), "-1.0", "finite number ≥ 0"),
    ("lr", torch.ones(2), "shape (2,)", "0-D tensor"),
    ("lr", "0.1", "'0.1'", "number ≥ 0"),
    ("weight_decay", -0.1, "-0.1", "finite number ≥ 0"),
    ("weight_decay", float("nan"), "nan", "finite number ≥ 0"),
    ("eps", -1e-8, "-1e-08", "finite number ≥ 0"),
    ("betas", (0.9, 1.0), "[1]: got 1.0", "[0, 1)"),
    ("betas", (-0.1, 0.9), "[0]: got -0.1", "[0, 1)"),
    ("betas", (0.9, float("nan")), "[1]: got nan", "[0, 1)"),
    ("betas", (0.9,), "(0.9,)", "two numbers"),
    ("betas", 0.9, "0.9", "two numbers"),
    ("maximize", "no", "'no'", "True or False"),
]
BAD_FOR_ONE = [
    (MERIT, "variant", "fast", "'fast'", "one of 'official', 'paper'"),
    (MERIT, "norm", "l1", "'l1'", "one of 'max', 'l2'"),
    (MERIT, "ratio", None, "None", "one of 'element', 'row', 'column', 'weight'"),
    (MERIT, "bound", "no", "'no'", "True or False"),
    (MERIT, "clip", 1, "1", "True or False"),
    (LAMB, "max_weight_norm", 0, "0", "None or a finite number > 0"),
    (LAMB, "max_weight_norm", float("nan"), "nan", "None or a finite number > 0"),
    (LAMB, "bias_correction", 0, "0", "True or False"),
    (LAMB, "always_adapt", "no", "'no'", "True or False"),
    (LAMB, "decay_in_ratio", None, "None", "True or False"),
]


@pytest.mark.parametrize(
    "optimizer, name, value, came, allowed",
    [(optimizer, *bad) for optimizer in OPTIMIZERS for bad in BAD] + BAD_FOR_ONE,
)
def test_hyper_parameters_are_checked(optimizer, name, value, came, allowed):
    message = f"^{re.escape(name)}.*{re.escape(came)}.*expected.*{re.escape(allowed)}"
    with pytest.raises(ValueError, match=message):
        optimizer([parameter(1.0)], **{"lr": 0.1} | {name: value})
    with pytest.raises(ValueError, match=message):
        optimizer([{"params": [parameter(1.0)]}, {"params": [parameter(1.0)], name: value}], lr=0.1)
    ours = optimizer([parameter(1.0)], lr=0.1)
    with pytest.raises(ValueError, match=message):
        ours.add_param_group({"params": [parameter(1.0)], name: value})
    assert len(ours.param_groups) == 1


@each_optimizer
def test_skip_nonfinite_is_checked(optimizer):
    with pytest.raises(ValueError, match="skip_nonfinite: got 1, expected True or False"):
        optimizer([parameter(1.0)], lr=0.1, skip_nonfinite=1)


@each_optimizer
def test_the_ends_of_the_ranges_are_allowed(optimizer):
    optimizer([parameter(1.0)], lr=0, betas=(0.0, 0.0), eps=0, weight_decay=0)


# -- parameters that cannot be stepped -----------------------------------------------------------------------------


@each_optimizer
@pytest.mark.parametrize(
    "bad, message",
    [
        (torch.zeros(2, dtype=torch.complex64), r"complex64.*\(2,\).*view_as_real"),
        (torch.zeros(2, dtype=torch.int64), r"int64.*\(2,\).*floating-point"),
        ("weight", "got str, expected tensors"),
    ],
)
def test_complex_and_integer_parameters(optimizer, bad, message):
    with pytest.raises(TypeError, match=message):
        optimizer([parameter(1.0), bad], lr=0.1)


@each_optimizer
@pytest.mark.parametrize("skip_nonfinite", [False, True])
def test_sparse_gradient(optimizer, skip_nonfinite):
    dense, embedding = parameter(random(2, 2)), parameter(random(7, 3))
    ours = optimizer([dense, embedding], lr=0.1, skip_nonfinite=skip_nonfinite)
    dense.grad, embedding.grad = random(2, 2), random(7, 3).to_sparse()
    with pytest.raises(RuntimeError, match=rf"\(7, 3\) is sparse.*{optimizer.__name__}.*sparse=False"):
        ours.step()
    assert torch.equal(dense, random(2, 2)) and not ours.state  # nothing moved, not even what came before it


@each_optimizer
def test_the_same_parameter_twice(optimizer):
    p = parameter(random(3, 4))
    with pytest.raises(ValueError, match=r"\(3, 4\) is given twice"):
        optimizer([p, p], lr=0.1)
    with pytest.raises(ValueError, match=r"\(3, 4\) is given twice"):
        optimizer([{"params": [p]}, {"params": [p]}], lr=0.1)


# -- gradients and closures ----------------------------------------------------------------------------------------


@each_optimizer
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("maximize", [False, True])
def test_gradient_is_only_read(optimizer, maximize, dtype):
    p, grad = parameter(random(3, 4).to(dtype)), random(3, 4, seed=1).to(dtype)
    p.grad = grad
    version, copied = grad._version, grad.clone()
    optimizer([p], lr=0.1, weight_decay=0.1, maximize=maximize).step()
    assert p.grad is grad and grad._version == version and same(grad, copied)


@each_optimizer
def test_maximize_climbs(optimizer):
    w, grad = random(3, 4), random(3, 4, seed=1)
    up = stepped(optimizer, w, grad, **PLAIN, maximize=True)
    assert torch.equal(up, stepped(optimizer, w, -grad, **PLAIN))
    assert ((up - w) * grad > 0).all()


def test_closure_runs_with_gradients():
    p = parameter(1.0)
    optimizer = AdamW([p], lr=0.1, weight_decay=0.0)

    def closure():
        optimizer.zero_grad()
        loss = p.square()
        loss.backward()
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert loss.item() == 1.0 and p.item() == pytest.approx(0.9, abs=1e-6)


# -- half precision ------------------------------------------------------------------------------------------------


@each_optimizer
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_adds_up(optimizer, dtype):
    p, full = parameter(1.0, dtype), parameter(1.0, torch.float32)
    for q in (p, full):
        take(optimizer([q], lr=1e-3, weight_decay=0.0), [[torch.ones((), dtype=q.dtype)]] * 50)
    assert full < 0.97 and torch.equal(p, full.to(dtype))  # bfloat16 alone would stay at 1: its grid there is 1/256


@each_optimizer
def test_half_precision_moments_are_float32(optimizer):
    p = parameter(random(3, 4).bfloat16())
    ours = optimizer([p], lr=0.1)
    take(ours, [[random(3, 4, seed=1).bfloat16()]])
    assert all(ours.state[p][name].dtype == torch.float32 for name in ("exp_avg", "exp_avg_sq", "master_weight"))
    assert p.dtype == torch.bfloat16


@each_optimizer
def test_half_precision_weights_changed_by_hand_count(optimizer):
    p, fresh = parameter(1.0, torch.bfloat16), parameter(3.0, torch.bfloat16)
    grad = torch.ones((), dtype=torch.bfloat16)
    ours, other = (optimizer([q], lr=0.1, betas=(0.0, 0.0)) for q in (p, fresh))
    take(ours, [[grad]])
    with torch.no_grad():
        p.fill_(3.0)
    take(ours, [[grad]])
    take(other, [[grad]])
    assert torch.equal(p, fresh)


# -- clipping and loss scales --------------------------------------------------------------------------------------


def with_gradients(*grads):
    parameters = [nn.Parameter(torch.zeros_like(g)) for g in grads]
    for p, g in zip(parameters, grads, strict=True):
        p.grad = g.clone()
    return parameters


def test_mixed_dtypes_in_one_global_norm():
    piece = torch.full((128,), 1 / 64)
    grads = [piece.bfloat16(), piece]
    parameters = with_gradients(*grads)
    assert clip_gradients(parameters, 1.0).item() == pytest.approx(0.25)
    assert all(same(p.grad, g) for p, g in zip(parameters, grads, strict=True))
    assert clip_gradients(parameters, 0.125).item() == pytest.approx(0.25)
    for p, g in zip(parameters, grads, strict=True):
        torch.testing.assert_close(p.grad, g / 2)


def test_global_norm_of_every_floating_dtype():
    parameters = with_gradients(
        *(torch.full((4,), 0.5, dtype=d) for d in (torch.float64, torch.float16, torch.float32))
    )
    norm = clip_gradients(parameters, None)
    assert norm.item() == pytest.approx(3**0.5) and norm.dtype == torch.float32 and norm.ndim == 0


@each_optimizer
def test_clipping_with_an_infinite_norm(optimizer):
    grad = torch.tensor([torch.inf, 1.0, 2.0])
    (p,) = with_gradients(grad)
    norm = clip_gradients([p], 1.0)
    assert norm.isinf() and norm.dtype == torch.float32 and torch.equal(p.grad, grad)
    ours = optimizer([p], lr=0.1, skip_nonfinite=True)
    ours.step()
    assert ours.skipped_steps == 1 and torch.equal(p, torch.zeros(3))


@each_optimizer
def test_clip_after_unscaling(optimizer):
    p = nn.Parameter(torch.zeros(2))
    ours = optimizer([p], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale((p * torch.tensor([3.0, 4.0])).sum()).backward()
    assert p.grad.norm() == 5 * 1024
    scaler.unscale_(ours)
    assert clip_gradients([p], 1.0).item() == 5.0
    torch.testing.assert_close(p.grad, torch.tensor([0.6, 0.8]))
    assert p.grad.norm() == pytest.approx(1.0)
    scaler.step(ours)
    assert (p < 0).all()


# -- copies and saved states ---------------------------------------------------------------------------------------


def grads_of(parameters, steps):
    return [[random(*p.shape, seed=10 * t + i).to(p.dtype) for i, p in enumerate(parameters)] for t in steps]


def by_deepcopy(parameters, optimizer):
    return copy.deepcopy((parameters, optimizer))


def by_pickle(parameters, optimizer):
    return pickle.loads(pickle.dumps((parameters, optimizer)))


def by_state_dict(parameters, optimizer):
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    copies = [nn.Parameter(p.detach().clone()) for p in parameters]
    again = type(optimizer)([{"params": copies[:1]}, {"params": copies[1:]}], lr=1.0)
    again.load_state_dict(torch.load(file))
    return copies, again


@each_name
@pytest.mark.parametrize("copying", [by_deepcopy, by_pickle, by_state_dict])
def test_a_copy_halfway_goes_on_bit_for_bit(copying, name):
    parameters = [parameter(random(3, 4)), parameter(random(5).bfloat16()), parameter(random(2, 2).float())]
    groups = [{"params": parameters[:1], "lr": 0.02}, {"params": parameters[1:], "weight_decay": 0.3}]
    optimizer = build(name, groups, lr=0.01)
    take(optimizer, grads_of(parameters, range(3)))
    copies, again = copying(parameters, optimizer)
    for ours in (optimizer, again):
        take(ours, grads_of(parameters, range(3, 6)))
    assert all(map(same, parameters, copies))
    for (name_a, a), (name_b, b) in zip(state_bits(optimizer), state_bits(again), strict=True):
        assert name_a == name_b and same(a, b)


@each_optimizer
@pytest.mark.parametrize("saved, loaded", [("bfloat16", "float32"), ("float32", "bfloat16"), ("float64", "float16")])
def test_a_state_of_another_dtype_loads(optimizer, saved, loaded):
    saved, loaded = getattr(torch, saved), getattr(torch, loaded)
    old = parameter(random(3, 4).to(saved))
    first = optimizer([old], lr=0.01)
    take(first, grads_of([old], range(2)))
    new = parameter(old.detach().to(loaded))
    second = optimizer([new], lr=0.01)
    second.load_state_dict(first.state_dict())
    state = second.state[new]
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float32
    torch.testing.assert_close(state["exp_avg"], first.state[old]["exp_avg"].float(), rtol=0, atol=0)
    take(second, grads_of([new], range(2, 4)))
    assert second.state[new]["step"] == 4 and second.state[new]["step"].dtype == torch.float64
    assert new.dtype == loaded and new.isfinite().all()
    if loaded in (torch.bfloat16, torch.float16):
        assert second.state[new]["master_weight"].dtype == torch.float32


@pytest.mark.gpu
@each_optimizer
@pytest.mark.parametrize("there, here", [("cpu", "cuda"), ("cuda", "cpu")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_of_another_device_loads(optimizer, there, here, dtype):
    old = nn.Parameter(random(3, 4).to(there, dtype))
    first = optimizer([old], lr=0.01)
    take(first, [[random(3, 4, seed=1).to(there, dtype)]])
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    new = nn.Parameter(old.detach().to(here))
    second = optimizer([new], lr=0.01)
    second.load_state_dict(torch.load(file, map_location=here))
    grad = random(3, 4, seed=2)
    take(first, [[grad.to(there, dtype)]])
    take(second, [[grad.to(here, dtype)]])
    assert second.state[new]["exp_avg"].device.type == here and second.state[new]["exp_avg"].dtype == torch.float32
    torch.testing.assert_close(new.cpu(), old.cpu())


# -- changes mid-run -----------------------------------------------------------------------------------------------


@each_optimizer
def test_a_group_added_later_takes_part(optimizer):
    a, b, alone = parameter(random(3, 4)), parameter(random(5)), parameter(random(5))
    ours = optimizer([a], lr=0.1)
    take(ours, grads_of([a], [0]))
    ours.add_param_group({"params": b, "lr": 0.3})
    grad = random(5, seed=7)
    take(ours, [[random(3, 4, seed=6), grad]])
    take(optimizer([alone], lr=0.3), [[grad]])
    assert torch.equal(b, alone)


@each_optimizer
@pytest.mark.parametrize("as_tensor", [False, True], ids=["number", "0-D tensor"])
def test_a_changed_rate_takes_effect_at_the_next_step(optimizer, as_tensor):
    def rate(lr):
        return torch.tensor(lr, dtype=torch.float64) if as_tensor else lr

    a, b = parameter(random(3, 4)), parameter(random(3, 4))
    ours, slow = optimizer([a], lr=rate(0.1)), optimizer([b], lr=0.1)
    for t, lr in enumerate((0.1, 0.0, 0.2)):
        before = a.detach().clone()
        if as_tensor:
            ours.param_groups[0]["lr"].fill_(lr)
        else:
            ours.param_groups[0]["lr"] = lr
        slow.param_groups[0]["lr"] = lr
        take(ours, grads_of([a], [t]))
        take(slow, grads_of([b], [t]))
        assert torch.equal(a, b) and torch.equal(a, before) == (lr == 0)


@each_optimizer
@pytest.mark.parametrize(
    "scheduler",
    [
        lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=5, cycle_momentum=False),
    ],
    ids=["StepLR", "OneCycleLR"],
)
def test_torchs_schedulers_keep_their_own_keys_in_a_group(optimizer, scheduler):
    p = parameter(random(3, 4))
    ours = optimizer([{"params": [p], "note": "mine"}], lr=0.1)
    schedule = scheduler(ours)
    for t in range(3):
        before = p.detach().clone()
        take(ours, grads_of([p], [t]))
        schedule.step()
        assert not torch.equal(p, before)


# -- layout --------------------------------------------------------------------------------------------------------


@each_name
def test_non_contiguous_parameter(name):
    lying = nn.Parameter(random(4, 3).t())
    upright = parameter(random(4, 3).t().contiguous())
    assert not lying.is_contiguous() and upright.is_contiguous()
    for p in (lying, upright):
        take(build(name, [p], **HYPER), grads_of([p], range(3)))
    assert not lying.is_contiguous()
    torch.testing.assert_close(lying, upright, rtol=1e-14, atol=0)  # ℓ2 norms add up in another order
