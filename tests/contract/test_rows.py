"""The cases: small inputs that broke other people's optimizers, one function each. See the package's docstring.

PLAIN is what a case uses where it names nothing else. With ε = 0 and no decay the first direction of Adam's is exactly
±1 where moments are corrected for their start at 0, and ±(1-β₁)/√(1-β₂) = ±.44721 where they are not.
"""

import copy
import io
import pickle
import re
import sys

import oracle
import pytest
import torch
from helpers import parameter, random, same, state_bits, take, tensor
from torch import nn

from contract.subject import DTYPES, FUSED, SUBJECTS, Subject, combinations, row
from merit_lab.schedule import learning_rate
from merit_lab.training import clip_gradients

PLAIN = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 0.0, "weight_decay": 0.0}
HYPER = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}
HALF = (torch.bfloat16, torch.float16)
# Of a weight near 1: a bfloat16 has 8 bits.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
SHAPES = [(3,), (3, 4), (3, 2, 2), ()]


def weights(*shape, dtype, seed=0):
    return random(*shape, seed=seed).to(dtype)


def grads_of(parameters, steps):
    """A gradient for each parameter, for each of these steps."""
    return [[weights(*p.shape, dtype=p.dtype, seed=10 * t + i + 1) for i, p in enumerate(parameters)] for t in steps]


def run(subject, dtype, weight, *grads, **arguments):
    """A parameter and its optimizer after a step for each gradient."""
    p = parameter(tensor(weight, dtype) if isinstance(weight, list | float) else weight.to(dtype))
    optimizer = subject.make([p], **PLAIN | arguments)
    take(optimizer, [[tensor(g, dtype) if isinstance(g, list | float) else g.to(dtype)] for g in grads])
    return p, optimizer


def precise(p, optimizer):
    """The weight as the optimizer knows it: a half-precision parameter may have a float32 copy."""
    return optimizer.state[p].get("master_weight", p).detach()


def close(weight, expected, tolerance=None):
    expected = torch.as_tensor(expected, dtype=torch.float64).expand_as(weight)
    tolerance = tolerance or TOLERANCE[weight.dtype]
    torch.testing.assert_close(weight.double(), expected, rtol=tolerance, atol=tolerance / 100)


def agrees(p, optimizer, expected, tolerance=None):
    """The weight is what is expected: numbers, or one for all elements. The parameter is that, rounded."""
    weight = precise(p, optimizer)
    close(weight, expected, tolerance)
    assert torch.equal(p, weight.to(p.dtype))


def moments(p, optimizer):
    """What is kept of the gradients: the state of the parameter's shape."""
    state = {name: x for name, x in optimizer.state[p].items() if name not in ("step", "master_weight")}
    return {name: x for name, x in state.items() if isinstance(x, torch.Tensor) and x.shape == p.shape}


def shrunk(subject, lr, steps):
    """A weight of 1 after steps against a gradient of 1: plain steps subtract the rate, a ratio makes it relative."""
    w = 1.0
    for _ in range(steps):
        w -= lr if subject.rule == "plain" else lr * w
    return w


# -- zeros and empty tensors ---------------------------------------------------------------------------------------


@row("zero-initialised weights never learn")
def test_zero_weights_learn(subject, dtype):
    p, optimizer = run(subject, dtype, [0.0, 0.0], [1.0, -2.0])
    if subject.rule:
        move = 0.01 if subject.corrected else 0.0044721359549996
        agrees(p, optimizer, [-move, move])
    assert p[0] < 0 < p[1]


@row("zero-initialised weights never learn")
def test_a_matrix_of_zeros_learns(subject, dtype):
    for shape in SHAPES:
        grad = weights(*shape, dtype=dtype, seed=1)
        p, _ = run(subject, dtype, torch.zeros(shape), grad)
        if subject.leaves_zero or len(shape) < 2:
            assert (p * grad < 0).all()
        else:
            assert (p == 0).all()


@row("0/0")
def test_zero_over_zero(subject, dtype):
    for shape in SHAPES:
        for eps in (0.0, 1e-6):
            zeros = torch.zeros(shape)
            p, _ = run(subject, dtype, zeros, zeros, zeros, eps=eps)
            if eps or subject.keeps("zero over zero"):
                assert torch.equal(p, zeros.to(dtype))
            else:
                assert p.isnan().all()


@row("empty tensor")
def test_empty_tensor_beside_others(subject, dtype):
    for shape in [(0, 3), (3, 0), (0,)]:
        empty, other, alone = (parameter(w.to(dtype)) for w in (torch.zeros(shape), random(3, 4), random(3, 4)))
        both, one = subject.make([empty, other], **PLAIN), subject.make([alone], **PLAIN)
        for t in (1, 2):
            grad = weights(3, 4, dtype=dtype, seed=t)
            take(both, [[torch.zeros(shape, dtype=dtype), grad]])
            take(one, [[grad]])
        assert empty.shape == shape and torch.equal(other, alone) and not torch.equal(other, random(3, 4).to(dtype))


@row("no gradient")
def test_parameter_without_a_gradient_is_left_alone(subject, dtype):
    a, b = (parameter(weights(3, 4, dtype=dtype)) for _ in range(2))
    a.grad = weights(3, 4, dtype=dtype, seed=1)
    subject.make([a, b], **HYPER).step()
    assert torch.equal(b, weights(3, 4, dtype=dtype)) and not torch.equal(a, b)


# -- norms, signs and bias correction ------------------------------------------------------------------------------


@row("norm clamped at 10")
def test_norm_clamped_at_ten(subject, dtype):
    ones = torch.ones(100, 100)
    p, optimizer = run(subject, dtype, ones, ones)
    if subject.rule:
        agrees(p, optimizer, 0.999 if subject.largest_norm else 0.99)
    else:
        assert (p == p[0, 0]).all() and p[0, 0] < 1


@row("decay put into the gradient")
def test_decay_alone(subject, dtype):
    w = [[1.0, -0.5], [0.25, 2.0]]
    zeros = torch.zeros(2, 2)
    p, optimizer = run(subject, dtype, w, zeros, **HYPER)
    if subject.rule == "plain":
        agrees(p, optimizer, [[0.999, -0.4995], [0.24975, 1.998]])
    elif subject.rule:
        agrees(p, optimizer, [[0.99, -0.495], [0.2475, 1.99 if subject.clips else 1.98]])
    elif subject.keeps("decoupled decay"):
        kept = precise(p, optimizer).double() / tensor(w)
        assert ((kept > 0) & (kept < 1)).all()
        assert all((m == 0).all() for m in moments(p, optimizer).values())
    else:  # λ w in the gradient's place
        q, other = run(subject, dtype, w, 0.1 * tensor(w), **HYPER | {"weight_decay": 0.0})
        agrees(p, optimizer, precise(q, other))


@row("bias correction missing from the norm", where=lambda subject: "bias_correction" in subject.takes)
def test_bias_correction_cancels_without_decay(subject, dtype):
    grads = [weights(4, 5, dtype=dtype, seed=t) for t in range(1, 6)]

    def after(bias_correction, decay):
        p, optimizer = run(subject, dtype, random(4, 5), *grads, weight_decay=decay, bias_correction=bias_correction)
        return precise(p, optimizer)

    tolerance = TOLERANCE[after(True, 0.0).dtype]
    torch.testing.assert_close(after(True, 0.0), after(False, 0.0), rtol=tolerance, atol=tolerance)
    assert (after(True, 0.1) - after(False, 0.1)).abs().max() > 1e-4


@row("a maximum that starts at 0")
def test_negative_weights_count_as_much_as_positive_ones(subject, dtype):
    w, grads = 3 * random(3, 4).abs(), [weights(3, 4, dtype=dtype, seed=t) for t in (1, 2, 3)]
    up, _ = run(subject, dtype, w, *grads, **HYPER)
    down, _ = run(subject, dtype, -w, *(-g for g in grads), **HYPER)
    assert torch.equal(up, -down)


@row("max never reset", where=lambda subject: subject.rule is not None)
def test_no_norm_is_carried_to_the_next_step(subject, dtype):
    """Without memory (β = 0) a step depends on the weights now; those changed by hand count at once."""
    hyper = {"lr": 0.1, "betas": (0.0, 0.0)}
    ones = torch.ones(3, 4, dtype=dtype)
    p, optimizer = run(subject, dtype, 0.75 * ones, 9 * ones, **hyper)
    agrees(p, optimizer, 0.65 if subject.rule == "plain" else 0.675)
    with torch.no_grad():
        p.fill_(0.25)
    take(optimizer, [[3 * ones]])
    agrees(p, optimizer, 0.15 if subject.rule == "plain" else 0.225)


@row("fused QKV", where=lambda subject: subject.rule is not None)
def test_query_key_and_value_in_one_matrix_share_their_columns(subject, dtype):
    n = 3
    blocks = [torch.full((n, n), size, dtype=dtype) for size in (0.1, 0.1, 1.0)]  # Q, K, V
    ones = torch.ones(n, n)
    query = blocks[0].double()  # .1 in this precision
    together, one = run(subject, dtype, torch.cat(blocks), torch.cat([ones] * 3))
    apart, other = run(subject, dtype, query, ones)
    # V's 1 decides for all three: as the largest of a column, or as a third of its squares.
    size = {"plain": 1.0, "max": 1.0, "l2": ((2 * query[0, 0] ** 2 + 1) / 3).sqrt()}[subject.rule]
    close(precise(together, one)[:n], query - 0.01 * size)
    close(precise(apart, other), query - 0.01 * (1 if subject.rule == "plain" else query))


@row("tiny lr")
def test_tiny_rate(subject, dtype):
    w = (random(3, 4) + 4).to(dtype)
    p, optimizer = run(subject, dtype, w, *(random(3, 4, seed=t) for t in range(3)), lr=1e-20)
    assert torch.equal(p, w) and torch.equal(precise(p, optimizer).to(dtype), w)


# -- gradients that are not finite ---------------------------------------------------------------------------------


@row("one NaN or Inf in a gradient")
def test_skip_nonfinite(subject, dtype):
    if not subject.keeps("skip_nonfinite"):
        assert "skip_nonfinite" not in subject.takes
        return
    for before in (0, 2):
        for poison in (torch.nan, torch.inf, -torch.inf):
            parameters = [parameter(weights(*shape, dtype=dtype)) for shape in [(3, 4), (5,)]]
            optimizer = subject.make(parameters, **HYPER, skip_nonfinite=True)
            good = grads_of(parameters, range(3))
            take(optimizer, good[:before])
            untouched = [p.detach().clone() for p in parameters]
            state = copy.deepcopy(optimizer.state_dict()["state"])
            (bad,) = grads_of(parameters, [9])
            bad[1][2] = poison
            take(optimizer, [bad])
            assert optimizer.skipped_steps == 1 and all(map(torch.equal, parameters, untouched))
            after = optimizer.state_dict()["state"]
            assert after.keys() == state.keys()
            assert all(torch.equal(after[i][name], state[i][name]) for i in state for name in state[i])
            take(optimizer, good[before:])
            assert optimizer.skipped_steps == 1 and all(p.isfinite().all() for p in parameters)


@row("one NaN or Inf in a gradient")
def test_by_default_a_nan_reaches_its_own_parameter(subject, dtype):
    bad, other, alone = (parameter(weights(*shape, dtype=dtype)) for shape in [(5,), (3, 4), (3, 4)])
    grad = weights(5, dtype=dtype, seed=1)
    grad[2] = torch.nan
    optimizer = subject.make([bad, other], **HYPER)
    take(optimizer, [[grad, weights(3, 4, dtype=dtype, seed=2)]])
    take(subject.make([alone], **HYPER), [[weights(3, 4, dtype=dtype, seed=2)]])
    assert bad[2].isnan() and torch.equal(other, alone)
    assert getattr(optimizer, "skipped_steps", 0) == 0


@row("clipping with an infinite norm")
def test_clipping_with_an_infinite_norm(subject, dtype):
    grad = torch.tensor([torch.inf, 1.0, 2.0], dtype=dtype)
    options = {"skip_nonfinite": True} if subject.keeps("skip_nonfinite") else {}
    p = nn.Parameter(torch.zeros(3, dtype=dtype))
    optimizer = subject.make([p], **PLAIN, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale((p * grad).sum()).backward()
    scaler.unscale_(optimizer)
    norm = clip_gradients([p], 1.0)
    assert norm.isinf() and norm.dtype == torch.float32 and torch.equal(p.grad, grad)  # scaled it would be 0 and NaN
    scaler.step(optimizer)
    assert torch.equal(p, torch.zeros(3, dtype=dtype)) and not optimizer.state[p]
    if options:
        optimizer.step()
        assert optimizer.skipped_steps == 1 and torch.equal(p, torch.zeros(3, dtype=dtype))


@row("clip before unscaling")
def test_clip_after_unscaling(subject, dtype):
    p = nn.Parameter(torch.zeros(2, dtype=dtype))
    optimizer = subject.make([p], **PLAIN)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale((p * torch.tensor([3.0, 4.0], dtype=dtype)).sum()).backward()
    assert p.grad.norm() == 5 * 1024
    scaler.unscale_(optimizer)
    assert clip_gradients([p], 1.0).item() == 5.0
    torch.testing.assert_close(p.grad, torch.tensor([0.6, 0.8], dtype=dtype))
    assert p.grad.norm().item() == pytest.approx(1.0, rel=max(1e-6, TOLERANCE[dtype]))  # a float32 norm
    scaler.step(optimizer)
    assert (p < 0).all()


@row("mixed dtypes in one global norm")
def test_mixed_dtypes_in_one_global_norm(subject, dtype):
    half, other = (nn.Parameter(torch.ones(128, dtype=d)) for d in (torch.bfloat16, dtype))
    optimizer = subject.make([half, other], **PLAIN)
    for p in (half, other):
        p.grad = torch.full_like(p, 1 / 64)
    for limit in (1.0, 0.125):  # the second clips
        assert clip_gradients([half, other], limit).item() == pytest.approx(0.25)
        for p in (half, other):
            torch.testing.assert_close(p.grad, torch.full_like(p, min(limit, 0.25) / 16), rtol=1e-6, atol=0)
    optimizer.step()
    assert (half.dtype, other.dtype) == (torch.bfloat16, dtype)
    torch.testing.assert_close(half.double(), other.double(), rtol=2**-8, atol=0)
    assert (other < 1).all() or not subject.keeps("float32 inside")


# -- hyper-parameters ----------------------------------------------------------------------------------------------

BAD = [  # argument, value, how the message says it, the range it names
    ("lr", -0.1, "-0.1", "finite number ≥ 0"),
    ("lr", float("nan"), "nan", "finite number ≥ 0"),
    ("weight_decay", -0.1, "-0.1", "finite number ≥ 0"),
    ("weight_decay", float("nan"), "nan", "finite number ≥ 0"),
    ("eps", -1e-8, "-1e-08", "finite number ≥ 0"),
    ("betas", (0.9, 1.0), "[1]: got 1.0", "[0, 1)"),
    ("betas", (-0.1, 0.9), "[0]: got -0.1", "[0, 1)"),
    ("betas", (0.9, float("nan")), "[1]: got nan", "[0, 1)"),
]
BAD_IN_KIND = [
    ("lr", float("inf"), "inf", "finite number ≥ 0"),
    ("lr", torch.tensor(-1.0), "-1.0", "finite number ≥ 0"),
    ("lr", torch.ones(2), "shape (2,)", "0-D tensor"),
    ("lr", "0.1", "'0.1'", "number ≥ 0"),
    ("betas", (0.9,), "(0.9,)", "two numbers"),
    ("betas", 0.9, "0.9", "two numbers"),
    ("maximize", "no", "'no'", "True or False"),
    ("variant", "fast", "'fast'", "one of 'official', 'paper'"),
    ("norm", "l1", "'l1'", "one of 'max', 'l2'"),
    ("ratio", None, "None", "one of 'element', 'row', 'column', 'weight'"),
    ("bound", "no", "'no'", "True or False"),
    ("clip", 1, "1", "True or False"),
    ("max_weight_norm", 0, "0", "None or a finite number > 0"),
    ("max_weight_norm", float("nan"), "nan", "None or a finite number > 0"),
    ("bias_correction", 0, "0", "True or False"),
    ("always_adapt", "no", "'no'", "True or False"),
    ("decay_in_ratio", None, "None", "True or False"),
]


@row("hyper-parameters never checked")
def test_hyper_parameters_are_checked(subject, dtype):
    def one():
        return [parameter(1.0, dtype)]

    thorough = subject.keeps("checks all")
    for name, value, came, allowed in BAD + BAD_IN_KIND * thorough:
        if name not in subject.takes:
            continue
        groups = [{"params": one()}, {"params": one(), name: value}]
        if not subject.keeps("checks"):
            assert subject.make(one(), **{"lr": 0.1} | {name: value}).param_groups[0][name] is value
            continue
        message = re.escape(came.rpartition("got ")[2])
        if thorough:
            message = f"^{re.escape(name)}.*{re.escape(came)}.*expected.*{re.escape(allowed)}"
        with pytest.raises(ValueError, match=message):
            subject.make(one(), **{"lr": 0.1} | {name: value})
        if not thorough:
            assert subject.make(groups, lr=0.1).param_groups[1][name] is value
            continue
        with pytest.raises(ValueError, match=message):
            subject.make(groups, lr=0.1)
        optimizer = subject.make(one(), lr=0.1)
        with pytest.raises(ValueError, match=message):
            optimizer.add_param_group(groups[1])
        assert len(optimizer.param_groups) == 1
    if thorough and subject.keeps("skip_nonfinite"):
        with pytest.raises(ValueError, match="skip_nonfinite: got 1, expected True or False"):
            subject.make(one(), lr=0.1, skip_nonfinite=1)


@row("hyper-parameters never checked")
def test_the_ends_of_the_ranges_are_allowed(subject, dtype):
    p = parameter(weights(3, 4, dtype=dtype))
    optimizer = subject.make([p], lr=0, betas=(0.0, 0.0), eps=0, weight_decay=0)
    take(optimizer, grads_of([p], range(2)))
    assert torch.equal(p, weights(3, 4, dtype=dtype))


# -- parameters and gradients that cannot be stepped ---------------------------------------------------------------


@row("complex or sparse")
def test_complex_and_integer_parameters(subject, dtype):
    for bad, message in [
        (torch.zeros(2, dtype=torch.complex64), r"complex64.*\(2,\).*view_as_real"),
        (torch.zeros(2, dtype=torch.int64), r"int64.*\(2,\).*floating-point"),
        ("weight", "got str, expected tensors"),
    ]:
        params = [parameter(1.0, dtype), bad]
        if subject.keeps("real") or bad == "weight":
            with pytest.raises(TypeError, match=message if subject.keeps("real") else "str"):
                subject.make(params, lr=0.1)
        else:
            assert subject.make(params, lr=0.1).param_groups[0]["params"][1] is bad
    if not subject.keeps("real"):
        z = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        take(subject.make([z], lr=0.1), [[torch.ones_like(z)]])
        assert (z.real < 1).all() and (z.imag == 0).all()


@row("complex or sparse")
def test_sparse_gradient(subject, dtype):
    for options in [{}, {"skip_nonfinite": True}] if subject.keeps("skip_nonfinite") else [{}]:
        dense, embedding = (parameter(weights(*shape, dtype=dtype)) for shape in [(2, 2), (7, 3)])
        optimizer = subject.make([dense, embedding], lr=0.1, **options)
        dense.grad, embedding.grad = (weights(*p.shape, dtype=dtype, seed=1) for p in (dense, embedding))
        embedding.grad = embedding.grad.to_sparse()
        message = r"\(7, 3\).*sparse" if subject.keeps("sparse") else "sparse"
        with pytest.raises(RuntimeError, match=message):
            optimizer.step()
        for p in (dense, embedding):  # nothing has moved, not even what came before it
            assert torch.equal(p, weights(*p.shape, dtype=dtype)) and not optimizer.state[p].get("step")


@row("the same parameter twice")
def test_the_same_parameter_twice(subject, dtype):
    p = parameter(weights(3, 4, dtype=dtype))
    with pytest.raises(ValueError, match=r"\(3, 4\) is given twice" if subject.keeps("once") else "more than one"):
        subject.make([{"params": [p]}, {"params": [p]}], lr=0.1)
    if subject.keeps("once"):
        with pytest.raises(ValueError, match=r"\(3, 4\) is given twice"):
            subject.make([p, p], lr=0.1)
        return
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = subject.make([p, p], lr=0.1)
    take(optimizer, [[torch.ones_like(p)] * 2])
    assert optimizer.state[p]["step"] == 2


@row("gradient mutated")
def test_gradient_is_only_read(subject, dtype):
    for options in [{}, {"maximize": True}] if subject.keeps("maximize") else [{}]:
        p, grad = (parameter(weights(3, 4, dtype=dtype, seed=seed)) for seed in (0, 1))
        p.grad = grad.detach()
        version, copied = p.grad._version, grad.detach().clone()
        optimizer = subject.make([p], **HYPER, **options)
        optimizer.step()
        optimizer.step()
        assert p.grad is not None and p.grad._version == version and same(p.grad, copied)
        assert not torch.equal(p, weights(3, 4, dtype=dtype))


@row("gradient mutated", where=lambda subject: subject.keeps("maximize"))
def test_maximize_climbs(subject, dtype):
    w, grad = weights(3, 4, dtype=dtype), weights(3, 4, dtype=dtype, seed=1)
    up, optimizer = run(subject, dtype, w, grad, maximize=True)
    assert torch.equal(up, run(subject, dtype, w, -grad)[0])
    moved = precise(up, optimizer).double() - w.double()
    assert (moved * grad >= 0).all() and (moved * grad).sum() > 0


@row("closure without grad")
def test_closure_runs_with_gradients(subject, dtype):
    p = parameter(1.0, dtype)
    optimizer = subject.make([p], **PLAIN | {"lr": 0.1})

    def closure():
        optimizer.zero_grad()
        loss = p.square()
        loss.backward()
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert loss.item() == 1.0 and p < 1
    if subject.rule:
        agrees(p, optimizer, 0.9)


# -- precision, copies and saved states ----------------------------------------------------------------------------


@row("fp16/bf16 parameters")
def test_small_steps_add_up(subject, dtype):
    for precision in HALF if dtype in HALF else [dtype]:
        p, optimizer = run(subject, precision, [1.0], *[[1.0]] * 50, lr=1e-3)
        if precision in HALF and not subject.keeps("float32 inside"):
            # The grid below 1 is 1/256 in bfloat16 and 1/2048 in float16: the one keeps 1, the other adds up coarsely.
            assert p == 1 if precision == torch.bfloat16 else p < 1
            assert {m.dtype for m in moments(p, optimizer).values()} == {precision}
            continue
        assert p < 0.99
        kept = torch.float32 if precision in HALF else precision
        assert all(m.dtype == kept for m in moments(p, optimizer).values())
        if subject.rule:
            agrees(p, optimizer, shrunk(subject, 1e-3, 50), 50 * TOLERANCE[precise(p, optimizer).dtype])


@row("wrong device or dtype after loading a state")
def test_a_state_of_another_dtype_loads(subject, dtype):
    for saved, loaded in {
        torch.float32: [(torch.bfloat16, torch.float32)],
        torch.float64: [(torch.float32, torch.float64)],
        torch.bfloat16: [(torch.float32, torch.bfloat16), (torch.float64, torch.float16)],
    }[dtype]:
        old = parameter(weights(3, 4, dtype=saved))
        first = subject.make([old], **HYPER)
        take(first, grads_of([old], range(2)))
        new = parameter(old.detach().to(loaded))
        second = subject.make([new], **HYPER)
        second.load_state_dict(first.state_dict())
        kept = torch.float32 if loaded in HALF and subject.keeps("float32 inside") else loaded
        before = moments(old, first)
        assert before.keys() == moments(new, second).keys()
        for name, moment in moments(new, second).items():
            assert same(moment, before[name].to(kept)), name
        take(second, grads_of([new], range(2, 4)))
        assert second.state[new].get("step", 4) == 4
        assert all(m.dtype == kept for m in moments(new, second).values())
        assert new.dtype == loaded and new.isfinite().all() and not torch.equal(new, old.detach().to(loaded))


@pytest.mark.gpu
@row("wrong device or dtype after loading a state")
def test_a_state_of_another_device_loads(subject, dtype):
    for there, here in [("cpu", "cuda"), ("cuda", "cpu")]:
        old = nn.Parameter(random(3, 4).to(there, dtype))
        first = subject.make([old], **HYPER)
        take(first, [[random(3, 4, seed=1).to(there, dtype)]])
        file = io.BytesIO()
        torch.save(first.state_dict(), file)
        file.seek(0)
        new = nn.Parameter(old.detach().to(here))
        second = subject.make([new], **HYPER)
        second.load_state_dict(torch.load(file, map_location=here))
        grad = random(3, 4, seed=2)
        take(first, [[grad.to(there, dtype)]])
        take(second, [[grad.to(here, dtype)]])
        dtypes = {name: m.dtype for name, m in moments(old, first).items()}
        for name, moment in moments(new, second).items():
            assert (moment.device.type, moment.dtype) == (here, dtypes[name])
        torch.testing.assert_close(new.cpu(), old.cpu(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def by_deepcopy(subject, parameters, optimizer):
    return copy.deepcopy((parameters, optimizer))


def by_pickle(subject, parameters, optimizer):
    return pickle.loads(pickle.dumps((parameters, optimizer)))


def by_state_dict(subject, parameters, optimizer):
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    copies = [nn.Parameter(p.detach().clone()) for p in parameters]
    again = subject.make([{"params": copies[:1]}, {"params": copies[1:]}], lr=1.0)
    again.load_state_dict(torch.load(file))
    return copies, again


@row("deepcopy, pickle, state_dict")
def test_a_copy_halfway_goes_on_bit_for_bit(subject, dtype):
    parameters = [parameter(weights(3, 4, dtype=dtype)), parameter(random(5).bfloat16()), parameter(random(2, 2))]
    groups = [{"params": parameters[:1], "lr": 0.02}, {"params": parameters[1:], "weight_decay": 0.3}]
    optimizer = subject.make(groups, lr=0.01)
    take(optimizer, grads_of(parameters, range(3)))
    copies = [copying(subject, parameters, optimizer) for copying in (by_deepcopy, by_pickle, by_state_dict)]
    take(optimizer, grads_of(parameters, range(3, 6)))
    for copied, again in copies:
        take(again, grads_of(parameters, range(3, 6)))
        assert all(map(same, parameters, copied))
        for (name_a, a), (name_b, b) in zip(state_bits(optimizer), state_bits(again), strict=True):
            assert name_a == name_b and same(a, b)


# -- rates and groups ----------------------------------------------------------------------------------------------


@row("parameter group added later, changed lr, lr as a 0-D tensor")
def test_a_group_added_later_takes_part(subject, dtype):
    a, b, alone = (parameter(weights(*shape, dtype=dtype)) for shape in [(3, 4), (5,), (5,)])
    optimizer = subject.make([a], lr=0.1)
    take(optimizer, grads_of([a], [0]))
    optimizer.add_param_group({"params": b, "lr": 0.3})
    grad = weights(5, dtype=dtype, seed=7)
    take(optimizer, [[weights(3, 4, dtype=dtype, seed=6), grad]])
    take(subject.make([alone], lr=0.3), [[grad]])
    assert torch.equal(b, alone) and not torch.equal(b, weights(5, dtype=dtype))


@row("parameter group added later, changed lr, lr as a 0-D tensor")
def test_a_changed_rate_takes_effect_at_the_next_step(subject, dtype):
    number, a, b = (parameter(weights(3, 4, dtype=dtype)) for _ in range(3))
    plain, tensors = subject.make([number], lr=0.1), subject.make([a], lr=torch.tensor(0.1, dtype=torch.float64))
    single = subject.make([b], lr=torch.tensor(0.1))  # float32, as people write it
    for t, lr in enumerate((0.1, 0.0, 0.2)):
        before = number.detach().clone()
        plain.param_groups[0]["lr"] = lr
        for optimizer in (tensors, single):
            optimizer.param_groups[0]["lr"].fill_(lr)
        for p, optimizer in ((number, plain), (a, tensors), (b, single)):
            take(optimizer, grads_of([p], [t]))
        assert torch.equal(number, before) == (lr == 0)
        assert torch.equal(a, number)
        torch.testing.assert_close(b, number, rtol=max(1e-6, TOLERANCE[dtype]), atol=1e-6)


@row("parameter group added later, changed lr, lr as a 0-D tensor")
def test_torchs_schedulers_keep_their_own_keys_in_a_group(subject, dtype):
    for scheduler in (
        lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=5, cycle_momentum=False),
    ):
        p = parameter(weights(3, 4, dtype=dtype))
        optimizer = subject.make([{"params": [p], "note": "mine"}], lr=0.1)
        schedule = scheduler(optimizer)
        for t in range(3):
            before = p.detach().clone()
            take(optimizer, grads_of([p], [t]))
            schedule.step()
            assert not torch.equal(p, before)
        assert optimizer.param_groups[0]["note"] == "mine"


@row("first step at rate 0")
def test_a_warm_up_as_long_as_the_run_starts_above_zero(subject, dtype):
    ones = torch.ones(3, 4, dtype=dtype)
    p, optimizer = run(subject, dtype, ones)
    expected = 1.0
    for step, rate in enumerate((0.025, 0.05, 0.075, 0.1), start=1):
        optimizer.param_groups[0]["lr"] = learning_rate(step, 4, 0.1, warmup=1.0)
        before = p.detach().clone()
        take(optimizer, [[ones]])
        assert (p < before).all()
        expected -= rate if subject.rule == "plain" else rate * expected
        if subject.rule:
            agrees(p, optimizer, expected, 4 * TOLERANCE[precise(p, optimizer).dtype])


@row("resumed schedule starts wrong")
def test_a_resumed_run_is_the_uninterrupted_one(subject, dtype):
    def go_on(optimizer, parameters, steps):
        for step in steps:
            optimizer.param_groups[0]["lr"] = learning_rate(step, 8, 0.1, warmup=0.25)
            take(optimizer, grads_of(parameters, [step]))

    whole, first = ([parameter(weights(3, 4, dtype=dtype)), parameter(weights(5, dtype=dtype))] for _ in range(2))
    go_on(subject.make(whole, **HYPER), whole, range(1, 9))
    before = subject.make(first, **HYPER)
    go_on(before, first, range(1, 4))
    second = [parameter(p.detach()) for p in first]
    resumed = subject.make(second, **HYPER | {"lr": 1.0})
    resumed.load_state_dict(before.state_dict())
    go_on(resumed, second, range(4, 9))
    assert all(map(same, whole, second))


# -- layout --------------------------------------------------------------------------------------------------------


@row("non-contiguous parameter")
def test_non_contiguous_parameter(subject, dtype):
    lying = nn.Parameter(weights(4, 3, dtype=dtype).t())
    upright = parameter(weights(4, 3, dtype=dtype).t().contiguous())
    assert not lying.is_contiguous() and upright.is_contiguous()
    for p in (lying, upright):
        take(subject.make([p], **HYPER), grads_of([p], range(3)))
    assert not lying.is_contiguous() and not torch.equal(lying, weights(4, 3, dtype=dtype).t())
    # ℓ2 norms add up in another order
    torch.testing.assert_close(lying, upright, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] / 100)


@row("more than two dimensions")
def test_a_convolution(subject, dtype):
    w = (3 * random(4, 3, 2, 2)).to(dtype)
    w[0] = 0
    w[:, 1] *= 0.5**10
    grads = [weights(4, 3, 2, 2, dtype=dtype, seed=t) for t in (1, 2, 3)]
    p, optimizer = run(subject, dtype, w, *grads, **HYPER)
    assert p.shape == w.shape and p.isfinite().all() and not torch.equal(p, w)
    if subject.reference:
        expected = subject.reference(oracle.elements(w), [oracle.elements(g) for g in grads], **HYPER)[-1]
        tolerance = 10 * TOLERANCE[precise(p, optimizer).dtype]
        agrees(p, optimizer, tensor(list(expected.values())).reshape(w.shape), tolerance)


# -- looking inside ------------------------------------------------------------------------------------------------


@row("explain", where=lambda subject: hasattr(subject.make([parameter(1.0)], lr=0.1), "explain"))
def test_what_is_watched_is_explained_and_steps_as_before(subject, dtype):
    """The readable step is what explain() shows, also of an optimizer that takes a faster one where nobody looks."""
    shapes = [(3, 4), (5,)]
    (a, b), (c, d), (e, f) = ([parameter(weights(*s, dtype=dtype)) for s in shapes] for _ in range(3))
    watched, unwatched = subject.make([a, b], **HYPER), subject.make([c, d], **HYPER)
    readable = subject.make([e, f], **HYPER, **{"fused": False} if "fused" in subject.takes else {})
    watched.watch(a)
    readable.watch()
    for t in range(3):
        before = precise(a, watched).clone()
        for optimizer in (watched, unwatched, readable):
            take(optimizer, grads_of([a, b], [t]))
        step = watched.explain(a)
        assert type(step) is type(readable.explain(e)) and torch.equal(step.weight, precise(a, watched))
        tolerance = TOLERANCE[step.weight.dtype]
        torch.testing.assert_close(before - HYPER["lr"] * step.update, step.weight, rtol=tolerance, atol=tolerance)
        for mine, theirs in zip(step, readable.explain(e), strict=True):
            assert (mine is None) == (theirs is None)
            if mine is not None:
                torch.testing.assert_close(mine, theirs, rtol=20 * tolerance, atol=tolerance)
        with pytest.raises(ValueError, match=r"the parameter of shape \(5,\) is not watched"):
            watched.explain(b)
    for p, q in ((a, c), (b, d), (a, e), (b, f)):
        torch.testing.assert_close(p, q, rtol=10 * TOLERANCE[dtype], atol=TOLERANCE[dtype])
    watched.unwatch()
    take(watched, grads_of([a, b], [3]))
    with pytest.raises(ValueError, match="not watched"):
        watched.explain(a)


# -- the suite itself ----------------------------------------------------------------------------------------------


KINDS = {
    "zero-initialised weights never learn",
    "norm clamped at 10",
    "decay put into the gradient",
    "bias correction missing from the norm",
    "0/0",
    "empty tensor",
    "no gradient",
    "one NaN or Inf in a gradient",
    "hyper-parameters never checked",
    "tiny lr",
    "wrong device or dtype after loading a state",
    "gradient mutated",
    "complex or sparse",
    "closure without grad",
    "the same parameter twice",
    "fp16/bf16 parameters",
    "mixed dtypes in one global norm",
    "clipping with an infinite norm",
    "clip before unscaling",
    "deepcopy, pickle, state_dict",
    "parameter group added later, changed lr, lr as a 0-D tensor",
    "non-contiguous parameter",
    "more than two dimensions",
    "first step at rate 0",
    "resumed schedule starts wrong",
    "max never reset",
    "a maximum that starts at 0",
    "fused QKV",
    "explain",
}
OF_SOME = {"bias correction missing from the norm": 2, "explain": 14}  # the others have no such thing


def test_every_kind_is_asked_of_every_subject_in_every_precision():
    """A floor under how many cases there are; that none of them is skipped is seen to in conftest.py."""
    runs = [
        (test.kind, subject.name, dtype)
        for test in vars(sys.modules[__name__]).values()
        if hasattr(test, "kind")
        for subject, dtype in combinations(test, SUBJECTS)
    ]
    assert {kind for kind, _, _ in runs} == KINDS and len(runs) >= 1600
    for kind in KINDS:
        asked = {(name, dtype) for k, name, dtype in runs if k == kind}
        assert {dtype for _, dtype in asked} == DTYPES.keys()
        assert len(asked) >= OF_SOME.get(kind, len(SUBJECTS)) * len(DTYPES), kind
    assert {"AdamW", "LAMB", "MERIT", "MERIT paper variant", "maxLAMB", "torch.optim.AdamW"} <= names()
    assert {name.removesuffix(", fused") for name in names()} == {s for s in names() if not s.endswith(", fused")}
    assert any(name.endswith(", fused") for name in names()) == FUSED


def test_a_difference_is_said_in_words():
    for subject in SUBJECTS:
        assert all(len(words.split()) > 3 for words in subject.differs.values())
    with pytest.raises(ValueError, match="differs: got speed, expected some of decoupled decay"):
        Subject("mine", torch.optim.SGD, {"speed": "it is slower"})


def names():
    return {subject.name for subject in SUBJECTS}
