"""The fused step against the readable one: C, Triton's interpreter where it is, and torch's tiles."""

import copy
import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers import HYPER, parameter, random, take
from hypothesis import given, settings
from hypothesis import strategies as st

from merit_lab import LAMB, MERIT
from merit_lab.optim import ABLATIONS, LADDER, build, fast, fast_c, fast_tiles, fast_triton

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
COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


@pytest.fixture(params=["C", "tiles", "small tiles"])
def kernels(request, monkeypatch):
    """The fused step's writings, one after the other."""
    if request.param == "C":
        if not COMPILER:
            pytest.skip("needs a C compiler: apt install gcc")
        assert fast_c.library(torch.float32) is not None, fast_c.reason()
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
