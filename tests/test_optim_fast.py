"""The fused step against the readable one: C, Triton's interpreter where it is, and torch's tiles."""

import copy
import math
import warnings

import pytest
import torch
from helpers import COMPILER, HYPER, needs_compiler, parameter, random, take
from hypothesis import given, settings
from hypothesis import strategies as st
from test_optim_agreement import assert_golden, golden_cases, tensor

from merit_lab import LAMB, MERIT, AdamW
from merit_lab.optim import ABLATIONS, LADDER, build, fast, fast_c, fast_tiles
from merit_lab.probes import traffic

NAMES = [name for name in ABLATIONS | LADDER if name != "AdamW"]
LAMBS = [
    {},
    {"bias_correction": False, "max_weight_norm": 1.0},
    {"always_adapt": False},
    {"decay_in_ratio": False},
    {"decay_in_ratio": False, "always_adapt": False, "weight_decay": 0.0},
]
SHAPES = [(5, 4), (1, 7), (7, 1), (3,), (1,), (), (4, 3, 2, 2), (0, 3), (3, 0), (70, 40), (3000,)]
CLOSE = {torch.float64: 1e-12, torch.float32: 1e-5}  # of a tensor's largest element


@pytest.fixture(params=["C", "tiles", "small tiles"])
def kernels(request, monkeypatch):
    """The fused step's writings, one after the other."""
    if request.param == "C":
        if not COMPILER:
            pytest.skip("needs a C compiler: apt install gcc")
        assert fast_c.library(torch.float32) is not None
        return fast_c
    monkeypatch.setattr(fast_c, "library", lambda dtype: None)
    if request.param == "small tiles":
        monkeypatch.setattr(fast_tiles, "ELEMENTS", 8)
    return fast_tiles


def both(name, weights, grads, **arguments):
    """Parameters and optimizer after these gradients, by the readable and by the fused step."""
    results = []
    for fused in (False, True):
        parameters = [parameter(w) for w in weights]
        optimizer = build(name, parameters, **HYPER | arguments, fused=fused)
        take(optimizer, copy.deepcopy(grads))
        results.append((parameters, optimizer))
    return results


def assert_close(a, b):
    assert a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.isnan(), b.isnan())
    if a.numel() and a.dtype in CLOSE:
        a, b = a.nan_to_num(), b.nan_to_num()
        assert (a - b).abs().max() <= CLOSE[a.dtype] * a.abs().max()
    else:
        assert torch.equal(a, b)


def assert_alike(results):
    (readable, ours), (fused, theirs) = results
    for a, b in zip(readable, fused, strict=True):
        assert_close(a.detach(), b.detach())
        assert ours.state[a].keys() == theirs.state[b].keys()
        for key, value in ours.state[a].items():
            assert_close(value, theirs.state[b][key])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_equals_the_readable_step(kernels, name, dtype):
    weights = [random(*shape, seed=i).to(dtype) for i, shape in enumerate(SHAPES)]
    weights[0][1], weights[0][:, 2] = 0, 0  # a zero row and a zero column: guards
    grads = [[random(*shape, seed=10 * t + i).to(dtype) for i, shape in enumerate(SHAPES)] for t in range(1, 5)]
    for step in grads:
        step[9][3], step[9][:, 5] = 0, 0
    assert_alike(both(name, weights, grads))
    assert_alike(both(name, weights, grads, eps=0.0, weight_decay=0.0, lr=0.5, maximize=True))


@pytest.mark.parametrize("switches", LAMBS, ids=str)
def test_equals_the_readable_lamb_with_every_switch(kernels, switches):
    weights = [random(*shape, seed=i) for i, shape in enumerate(SHAPES)]
    weights[0].zero_()
    grads = [[random(*shape, seed=10 * t + i) for i, shape in enumerate(SHAPES)] for t in range(1, 5)]
    assert_alike(both("LAMB", weights, grads, **switches))



@pytest.mark.parametrize("name, case", [*golden_cases()])
def test_equals_the_recorded_steps_of_published_code(kernels, name, case):
    assert_golden(name, case, fused=True)


@pytest.mark.parametrize("name, case", [*golden_cases()])
def test_equals_the_readable_step_in_float32_on_the_recorded_steps(kernels, name, case):
    weights = [tensor(w).float() for w in case["weights"]]
    grads = [[tensor(g).float() for g in step] for step in case["grads"]]
    arguments = case["hyper"] | {"betas": tuple(case["hyper"]["betas"])}
    if name == "lamb":
        arguments |= {"bias_correction": False, "max_weight_norm": 10.0}
    assert_alike(both(name.upper(), weights, grads, **arguments))


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["MERIT", "MERIT column only", "LAMB"])
def test_threads_change_not_a_bit(name, dtype):
    if not fast_c.library(dtype).parallel:
        pytest.skip("the compiler has no OpenMP")
    shapes = [(300, 400), (2, 40_000), (40_000, 2), (70_001,)]  # many rows, fewer than threads, and none
    assert all(math.prod(shape) >= fast_c.PARALLEL_FROM for shape in shapes)
    weights = [random(*shape, seed=i).to(dtype) for i, shape in enumerate(shapes)]
    grads = [[random(*shape, seed=10 * t + i).to(dtype) for i, shape in enumerate(shapes)] for t in range(1, 4)]
    threads, results = torch.get_num_threads(), {}
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results[count] = both(name, weights, grads)
    finally:
        torch.set_num_threads(threads)
    for count in (2, 3):
        assert_alike(results[count])
        for one, several in zip(results[1][1][0], results[count][1][0], strict=True):
            assert torch.equal(one, several)


@settings(max_examples=60)
@given(
    shape=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    name=st.sampled_from(["LAMB", *(n for n in NAMES if n != "LAMB")]),
    seed=st.integers(0, 99),
    dtype=st.sampled_from(list(CLOSE)),
    scale=st.sampled_from([1e-6, 1.0, 100.0]),
    holes=st.booleans(),
    hyper=st.fixed_dictionaries(
        {"eps": st.sampled_from([0.0, 1e-6]), "weight_decay": st.sampled_from([0.0, 0.3]), "lr": st.floats(0, 0.3)}
    ),
)
def test_equals_the_readable_step_on_random_tensors(shape, name, seed, dtype, scale, holes, hyper):
    weight = scale * random(*shape, seed=seed).to(dtype)
    grads = [[random(*shape, seed=seed + t).to(dtype)] for t in range(1, 4)]
    if holes:
        weight, grads = weight.clamp(min=0), [[g.clamp(min=0.5) - 0.5] for (g,) in grads]
    for library in (fast_c.library, lambda dtype: None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fast_c, "library", library)
            assert_alike(both(name, [weight], grads, **hyper))


@pytest.mark.parametrize("name", ["MERIT", "LAMB", "MERIT without bound", "MERIT paper variant"])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_nan_spreads_as_in_the_readable_step(kernels, name, poison):
    weights = [random(6, 5), random(7), random(6, 5)]
    grads = [[random(*w.shape, seed=10 * t + i) for i, w in enumerate(weights)] for t in range(3)]
    grads[1][0][2, 3] = grads[1][1][4] = poison
    assert_alike(both(name, weights, grads))


@pytest.mark.parametrize("name", ["MERIT", "LAMB"])
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("elements", [None, 8])  # of a piece in which the gradient is widened
def test_half_precision(kernels, monkeypatch, name, half, elements):
    if elements:
        monkeypatch.setattr(fast_tiles, "ELEMENTS", elements)
    weights = [random(*shape, seed=i).to(half) for i, shape in enumerate(SHAPES)]
    grads = [[random(*shape, seed=10 * t + i).to(half) for i, shape in enumerate(SHAPES)] for t in range(1, 5)]
    (readable, ours), (fused, theirs) = both(name, weights, grads)
    for a, b in zip(readable, fused, strict=True):
        assert b.dtype == half
        if a.numel():
            assert_close(ours.state[a]["master_weight"], theirs.state[b]["master_weight"])
            assert torch.equal(b, theirs.state[b]["master_weight"].to(half))
    with torch.no_grad():  # weights changed by hand count
        readable[0].fill_(3.0), fused[0].fill_(3.0)
    for optimizer in (ours, theirs):
        take(optimizer, copy.deepcopy(grads[:1]))
    assert_close(ours.state[readable[0]]["master_weight"], theirs.state[fused[0]]["master_weight"])
    assert (theirs.state[fused[0]]["master_weight"] - 3).abs().max() < 0.1


@pytest.mark.parametrize("shape", [(3, 0), (0, 3), (0, 0)], ids=str)
def test_passes_over_an_empty_shard(kernels, shape):
    """A rank may have rows or columns of a tensor, and no element in them; their norms are 0."""
    empty = torch.zeros(shape)
    how = fast.Direction((0.9, 0.95), 1e-6, 0.1, (1.0, 1.0), 1.0)
    for squares in (False, True):
        sizes = kernels.measure(empty, empty, empty, empty, how, squares=squares, lines=not squares)
        assert sizes.weight == sizes.direction == 0
    sizes = kernels.measure(empty, empty, empty, empty, how, squares=False, lines=True)
    assert sizes.direction_row.tolist() == [[0.0]] * shape[0] and sizes.weight_column.tolist() == [[0.0] * shape[1]]
    factors = fast.Factors(torch.ones(shape[0], 1), torch.ones(1, shape[1]), True, 0.0)
    kernels.apply(empty, empty, empty, how, factors, 0.1)


# -- which step is taken -------------------------------------------------------------------------------------------


@pytest.fixture
def fused_calls(monkeypatch):
    """The shapes of the tensors that took the fused step."""
    shapes, start = [], fast.start

    def counted(parameter, *arguments):
        shapes.append(tuple(parameter.shape))
        return start(parameter, *arguments)

    monkeypatch.setattr(fast, "start", counted)
    return shapes


def step_once(optimizer_class, weights, **arguments):
    parameters = [torch.nn.Parameter(w) for w in weights]
    optimizer = optimizer_class(parameters, lr=0.1, **arguments)
    take(optimizer, [[torch.ones_like(w) for w in weights]])
    return optimizer


def test_auto_fuses_large_tensors_alone(fused_calls):
    large = torch.ones(256, 256)
    assert large.numel() == fast.AUTO_FROM
    step_once(MERIT, [large, large[1:].clone()])
    step_once(LAMB, [large.clone()])
    assert fused_calls == [(256, 256), (256, 256)]


@pytest.mark.parametrize("fused, taken", [(True, [(2, 3), (3,)]), (False, [])])
def test_true_fuses_small_ones_too_and_false_none(fused_calls, fused, taken):
    step_once(MERIT, [torch.ones(2, 3), torch.ones(3)], fused=fused)
    assert fused_calls == taken


def test_what_is_never_fused(fused_calls):
    step_once(MERIT, [torch.ones(3, 2).t()], fused=True)
    step_once(MERIT, [torch.ones(2, 2)], fused=True, norm="l2")
    step_once(MERIT, [torch.ones(2, 2, 2)], fused=True)
    step_once(AdamW, [torch.ones(256, 256)])
    assert fused_calls == []
    step_once(MERIT, [torch.ones(2, 2, 2)], fused=True, variant="paper")
    assert fused_calls == [(2, 2, 2)]


def test_each_group_has_its_own(fused_calls):
    groups = [{"params": [parameter(random(2, 2))], "fused": True}, {"params": [parameter(random(3, 3))]}]
    take(MERIT(groups, lr=0.1), [[random(2, 2), random(3, 3)]])
    assert fused_calls == [(2, 2)]


def test_watched_weights_take_the_readable_step(fused_calls):
    a, b = parameter(random(3, 4)), parameter(random(5, 4))
    optimizer = MERIT([a, b], lr=0.1, fused=True)
    optimizer.watch(a)
    take(optimizer, [[random(3, 4, seed=1), random(5, 4, seed=2)]])
    assert fused_calls == [(5, 4)] and optimizer.explain(a).element_ratio.shape == (3, 4)
    optimizer.unwatch()
    take(optimizer, [[random(3, 4, seed=1), random(5, 4, seed=2)]])
    assert fused_calls == [(5, 4), (3, 4), (5, 4)]


@pytest.mark.parametrize("value", ["yes", None, 1])
def test_a_fused_that_is_none_of_three(value):
    with pytest.raises(ValueError, match="fused: got .*, expected True, False or 'auto'"):
        MERIT([parameter(1.0)], lr=0.1, fused=value)


def test_a_state_saved_before_there_was_a_fused_step_loads():
    p = parameter(random(3, 4))
    optimizer = LAMB([p], lr=0.1, fused=True)
    state = optimizer.state_dict()
    del state["param_groups"][0]["fused"]
    optimizer.load_state_dict(state)
    take(optimizer, [[random(3, 4, seed=1)]])
    assert optimizer.state[p]["step"] == 1


# -- memory and compilers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer_class", [MERIT, LAMB])
@needs_compiler
def test_temporaries_are_small(optimizer_class):
    def peak(fused):
        weights = [torch.nn.Parameter(torch.ones(shape)) for shape in ((768, 768), (768, 768), (3072, 768))]
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer = optimizer_class(weights, lr=0.1, fused=fused)
        optimizer.step()
        with traffic() as moved:
            optimizer.step()
        return moved.peak / sum(4 * weight.numel() for weight in weights)

    assert peak(True) < 0.01 and peak(False) > 3


def test_without_a_compiler_it_goes_on_in_torch_and_says_so_once(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    fast_c.library.cache_clear()
    try:
        with pytest.warns(UserWarning, match="no C compiler was found. Install gcc or clang .*fused=False"):
            optimizer = step_once(MERIT, [random(3, 4)], fused=True)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            step_once(MERIT, [random(3, 4)], fused=True)
    finally:
        fast_c.library.cache_clear()
    readable = step_once(MERIT, [random(3, 4)], fused=False)
    assert_close(readable.param_groups[0]["params"][0].detach(), optimizer.param_groups[0]["params"][0].detach())


@needs_compiler
def test_a_compiler_that_fails_is_quoted(monkeypatch, tmp_path):
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'fast.c: no such luck' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    monkeypatch.setenv("MERIT_LAB_DATA", str(tmp_path))
    with pytest.raises(OSError, match="cc failed: fast.c: no such luck"):
        fast_c._load(torch.float32)
    assert not list(tmp_path.rglob("*.so"))


@needs_compiler
def test_it_is_compiled_once(monkeypatch, tmp_path):
    monkeypatch.setenv("MERIT_LAB_DATA", str(tmp_path))
    fast_c._load(torch.float64)
    (compiled,) = tmp_path.rglob("*.so")
    monkeypatch.setattr(fast_c, "_compile", lambda *_: pytest.fail("compiled again"))
    assert fast_c._load(torch.float64).measure_max
    assert list(tmp_path.rglob("*.*")) == [compiled]
