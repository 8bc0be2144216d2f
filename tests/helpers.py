"""Shared by the optimizer tests."""

import shutil

import pytest
import torch
from torch import nn

from merit_lab import LAMB, MERIT, AdamW
from merit_lab.optim import step_function

OPTIMIZERS = (AdamW, LAMB, MERIT)
COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
needs_compiler = pytest.mark.skipif(not COMPILER, reason="needs a C compiler: apt install gcc")
HYPER = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def tensor(values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


def random(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def parameter(values, dtype=torch.float64):
    value = values.clone() if isinstance(values, torch.Tensor) else tensor(values, dtype)
    return nn.Parameter(value)


def take(optimizer, grads_by_step):
    """Step through the gradients: for each step, one gradient a parameter."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for grads in grads_by_step:
        for p, grad in zip(parameters, grads, strict=True):
            p.grad = grad.clone()
        optimizer.step()


def stepped(name_or_class, weight, *grads, **arguments):
    """The weight after one step a gradient, by a class or by the name of a rung."""
    p = parameter(weight)
    if isinstance(name_or_class, str):
        from merit_lab.optim import build

        optimizer = build(name_or_class, [p], **arguments)
    else:
        optimizer = name_or_class([p], **arguments)
    take(optimizer, [[tensor(g, p.dtype) if isinstance(g, list) else g] for g in grads])
    return p.detach()


def first_step(name, weight, grad, **hyper):
    """All quantities of a first step, from zero moments, by the pure function of this name."""
    zeros = torch.zeros_like(weight)
    return step_function(name)(weight, grad, zeros, zeros, step=1, **HYPER | hyper)


def state_bits(optimizer):
    """Everything an optimizer carries from step to step, to compare with torch.equal."""
    return [
        (name, value)
        for group in optimizer.param_groups
        for p in group["params"]
        for name, value in sorted(optimizer.state[p].items())
    ]


def same(a, b):
    """Bit for bit, types and shapes included."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
