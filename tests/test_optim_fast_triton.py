"""The fused step in Triton: in its interpreter where the package is, and on a CUDA device."""

import importlib.util
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import HYPER, parameter, random, take

from merit_lab.files import repo_root
from merit_lab.optim import build, fast, fast_tiles, fast_triton
from merit_lab.probes import traffic

CLOSE = {torch.float64: {"rtol": 1e-12, "atol": 1e-13}, torch.float32: {"rtol": 1e-5, "atol": 1e-6}}


def assert_close(ours, theirs, dtype=None):
    """Within what rounding in this dtype (None: their own) may do."""
    near = CLOSE.get(dtype or theirs.dtype, {"rtol": 1e-2, "atol": 1e-2})
    torch.testing.assert_close(ours, theirs, equal_nan=True, **near)


# -- in the interpreter: a process of its own, since Triton looks at TRITON_INTERPRET when it is imported -----------


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs the package triton: pip install triton")
def test_in_the_interpreter_it_equals_tiles_and_the_readable_step():
    code = "from test_optim_fast_triton import *; compare_passes(); compare_steps(); compare_traffic(); print('done')"
    paths = os.pathsep.join(filter(None, [str(repo_root()), str(repo_root() / "tests"), os.environ.get("PYTHONPATH")]))
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, timeout=250, env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": paths},
    )  # fmt: skip
    assert ran.stdout == "done\n", ran.stderr


def compare_passes():
    """Both passes against those of fast_tiles, on whatever device runs them, hard numbers among the easy ones."""
    assert fast_triton.available()
    fast_triton.ELEMENTS = 2048  # several programs for one matrix
    for dtype, grad_dtype in ((torch.float64, torch.float64), (torch.float32, torch.bfloat16)):
        for shape in ((40, 70), (1, 7), (0, 3)):
            for squares, lines in ((True, False), (False, True), (False, False)):
                compare_pass(shape, dtype, grad_dtype, squares, lines)


def compare_pass(shape, dtype, grad_dtype, squares, lines, device="cpu"):
    w, g, m, v = (random(*shape, seed=i).to(dtype) for i in range(4))
    g, v = g.to(grad_dtype), v.abs()
    if len(w) > 9:
        g[3], m[3], v[3] = 0, 0, 0  # without ε, the denominator is 0
        w[4], w[:, 5] = 0, 0
        if not squares:  # their squares are beyond all numbers
            w[0, 1], g[1, 3], m[2, 6] = torch.nan, torch.nan, -torch.inf
            m[5, 7], v[5, 7] = torch.finfo(dtype).max / 4, torch.finfo(dtype).tiny  # their quotient too
    how = fast.Direction((0.9, 0.95), 1e-6 if len(w) < 9 else 0.0, 0.1, (0.3, 0.4) if squares else (1.0, 1.0), -1.0)
    ours, theirs = ([x.to(device, copy=True) for x in (w, g, m, v)] for _ in range(2))
    found = fast_triton.measure(*ours, how, squares=squares, lines=lines)
    expected = fast_tiles.measure(*theirs, how, squares=squares, lines=lines)
    for a, b in zip([*found, *ours], [*expected, *theirs], strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert_close(a, b, dtype)
    if not squares:
        norms = [random(70, seed=seed).abs().to(device, dtype) for seed in (1, 2)]
        norms[0][:3], norms[1][2:5] = torch.tensor([0.0, torch.nan, 1.0]), torch.tensor([0.0, torch.nan, 1e-300])
        for guards, least in ((True, None), (True, norms[0][9:10]), (False, norms[0][1:2]), (False, None)):
            found, expected = (kernels.ratio(*norms, guards, least) for kernels in (fast_triton, fast_tiles))
            assert_close(found, expected)
    rows, columns = random(len(w), 1).abs().to(w), random(1, w.shape[1], seed=1).abs().to(w)
    if len(w) > 9:
        rows[1], rows[2], columns[0, 1], columns[0, 2] = torch.inf, torch.nan, torch.inf, torch.nan
    for row, column in ((torch.ones_like(w[:1, :1]), None), (rows, None), (rows, columns), (rows[:1], columns)):
        row, column = row.to(device), None if column is None else column.to(device)
        factors = fast.Factors(row, column, clip=not squares, beside=0.3 if squares else 0.0)
        fast_triton.apply(ours[0], ours[2], ours[3], how, factors, 0.1)
        fast_tiles.apply(theirs[0], theirs[2], theirs[3], how, factors, 0.1)
        assert_close(ours[0], theirs[0])


def compare_traffic(device="cpu"):
    """A step moves 40 bytes a float32 weight, in two passes."""
    kernels, fast._kernels = fast._kernels, lambda weight: fast_triton
    try:
        weight = parameter(random(40, 70).to(device, torch.float32))
        optimizer = build("MERIT", [weight], **HYPER, fused=True)
        take(optimizer, [[torch.ones_like(weight)]])
        with traffic() as moved:
            optimizer.step()
    finally:
        fast._kernels = kernels
    passes = {name: read + written for name, read, written in moved.calls if name.startswith("pass")}
    assert passes == {"pass 1": 24 * weight.numel(), "pass 2": 16 * weight.numel()}


def compare_steps(device="cpu", dtypes=(torch.float64, torch.float32, torch.bfloat16), shapes=((9, 5),)):
    """Whole steps against the readable ones."""
    kernels, fast._kernels = fast._kernels, lambda weight: fast_triton
    try:
        for dtype in dtypes:
            for name, arguments in (
                ("LAMB", {"decay_in_ratio": False}),
                ("MERIT", {}),
                ("MERIT", {"variant": "paper", "ratio": "column"}),
            ):
                results = []
                for fused in (False, True):
                    weights = [parameter(random(*shape).to(device, dtype)) for shape in shapes]
                    with torch.no_grad():
                        weights[0][1], weights[0][:, 2] = 0, 0  # guards
                    optimizer = build(name, weights, **HYPER | arguments, fused=fused)
                    grads = [[random(*shape, seed=t).to(device, dtype) for shape in shapes] for t in (1, 2)]
                    take(optimizer, grads)
                    results.append([x for w in weights for x in (w.detach(), *optimizer.state[w].values())])
                for a, b in zip(*results, strict=True):
                    assert_close(a, b)
    finally:
        fast._kernels = kernels


# -- where it does not run -----------------------------------------------------------------------------------------


def test_without_triton_or_without_a_device_it_is_not_taken(monkeypatch):
    available = fast_triton.available.__wrapped__
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(fast_triton, "triton", SimpleNamespace(JITFunction=object))
    assert available() is False
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9 - 3 * device, 1))
    assert available() is False  # one of them is too old
    monkeypatch.setattr(fast_triton, "triton", None)
    assert available() is False


def test_a_triton_that_fails_is_told_of_and_not_taken(monkeypatch):
    def fail(*tensors, **keywords):
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(fast_triton, "triton", SimpleNamespace(JITFunction=object))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(fast_triton.torch, "zeros", lambda *size, device: torch.empty(size))
    monkeypatch.setattr(fast_triton, "measure", fail)
    with pytest.warns(UserWarning, match="Triton failed: Failed to find C compiler. It needs a C compiler"):
        assert fast_triton.available.__wrapped__() is False


def test_the_package_does_not_load_it_before_it_is_needed():
    code = "import sys, merit_lab; merit_lab.MERIT; print('merit_lab.optim.fast_triton' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=repo_root())
    assert ran.stdout == "False\n", ran.stderr


# -- on a device ---------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_on_cuda_it_equals_tiles_and_the_readable_step():
    assert fast_triton.available()
    for squares, lines in ((True, False), (False, True), (False, False)):
        for dtype in (torch.float64, torch.float32):
            compare_pass((700, 400), dtype, dtype, squares, lines, "cuda")
        compare_pass((130, 77), torch.float32, torch.bfloat16, squares, lines, "cuda")
    compare_steps("cuda", shapes=((300, 500), (1, 7), (3000,)))
    compare_traffic("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["LAMB", "MERIT"])
def test_on_cuda_it_needs_little_memory_and_waits_for_nothing(name):
    weight = torch.nn.Parameter(torch.randn(4096, 4096, device="cuda"))
    optimizer = build(name, [weight], **HYPER, fused=True)
    weight.grad = torch.randn_like(weight)
    optimizer.step()  # compiles, and makes the state
    assert fast._kernels(weight) is fast_triton
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.max_memory_allocated() - before < weight.numel() * weight.element_size() / 100
