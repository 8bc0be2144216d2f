"""Hessian eigenvalues and trace, against Hessians that are written out."""

import math

import pytest
import torch
from torch import nn

from merit_lab.errors import InputError
from merit_lab.models import GPT2, GPT2Config
from merit_lab.probes import curvature, hessian_vector_product, model_curvature


def test_exact_on_the_parabola():
    x, y = (torch.tensor(value, requires_grad=True) for value in (0.7, -2.0))
    measured = curvature(lambda: (3 * x**2 + y**2) / 2, [x, y])
    assert measured.top == pytest.approx(3, rel=1e-6)
    assert measured.bottom == pytest.approx(1, rel=1e-6)
    assert measured.trace == pytest.approx(4, rel=1e-6)
    assert measured.n_parameters == 2


def test_the_largest_eigenvalue_is_the_largest_not_the_largest_in_size():
    x, y = (torch.tensor(1.0, requires_grad=True) for _ in range(2))
    measured = curvature(lambda: x**2 - 5 * y**2, [x, y])
    assert (measured.top, measured.bottom) == (pytest.approx(2, rel=1e-6), pytest.approx(-10, rel=1e-6))
    assert measured.trace == pytest.approx(-8, rel=1e-6)


def _written_out(loss, parameters):
    """The Hessian column by column, by central differences of the gradient: no second derivative of torch's."""
    columns = []
    for parameter in parameters:
        for index in range(parameter.numel()):
            ends = []
            for sign in (1, -1):
                with torch.no_grad():
                    parameter.view(-1)[index] += sign * 1e-5
                ends.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss(), parameters)]))
                with torch.no_grad():
                    parameter.view(-1)[index] -= sign * 1e-5
            columns.append((ends[0] - ends[1]) / 2e-5)
    hessian = torch.stack(columns)
    assert torch.allclose(hessian, hessian.T, atol=1e-7)
    return hessian


def _tiny_network():
    torch.manual_seed(0)
    x, y = torch.randn(16, 3, dtype=torch.float64), torch.randn(16, 2, dtype=torch.float64)
    shapes = [(4, 3), (4,), (2, 4), (2,)]
    parameters = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]

    def loss(p=parameters):
        return (torch.tanh(x @ p[0].T + p[1]) @ p[2].T + p[3] - y).square().mean()

    return loss, parameters


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_within_one_percent_of_a_hessian_that_is_written_out(dtype):
    loss, parameters = _tiny_network()
    eigenvalues = torch.linalg.eigvalsh(_written_out(loss, parameters))
    assert eigenvalues[0] < 0 < eigenvalues[-1]  # a Hessian of both signs: otherwise the test shows less
    cast = [p.detach().to(dtype).requires_grad_() for p in parameters]
    measured = curvature(lambda: loss([p.double() for p in cast]), cast, iterations=26, samples=25, tolerance=0)
    assert measured.top == pytest.approx(eigenvalues[-1].item(), rel=0.01)
    assert measured.bottom == pytest.approx(eigenvalues[0].item(), rel=0.01)
    assert measured.trace == pytest.approx(eigenvalues.sum().item(), rel=0.01)


def test_the_trace_is_estimated_where_lanczos_does_not_see_everything():
    torch.manual_seed(1)
    root = torch.randn(500, 500, dtype=torch.float64) / 500**0.5
    hessian = root @ root.T
    w = torch.zeros(500, dtype=torch.float64, requires_grad=True)
    measured = curvature(lambda: w @ hessian @ w / 2, [w], iterations=5, samples=400, tolerance=0)
    assert measured.iterations == 5
    assert measured.trace_error > 0
    assert abs(measured.trace - hessian.trace().item()) < 5 * measured.trace_error
    assert measured.trace == pytest.approx(hessian.trace().item(), rel=0.01)


def test_top_error_bounds_the_distance_to_an_eigenvalue():
    torch.manual_seed(2)
    root = torch.randn(40, 40, dtype=torch.float64)
    hessian = root + root.T
    w = torch.zeros(40, dtype=torch.float64, requires_grad=True)
    eigenvalues = torch.linalg.eigvalsh(hessian)
    for iterations in (2, 5, 10):
        measured = curvature(lambda: w @ hessian @ w / 2, [w], iterations=iterations, samples=0)
        assert (eigenvalues - measured.top).abs().min() <= measured.top_error + 1e-9
        assert math.isnan(measured.trace)


def _tiny_gpt2():
    torch.manual_seed(3)
    model = GPT2(GPT2Config(block_size=3, vocab_size=3, n_layer=1, n_head=1, n_embd=2))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.5 * torch.randn_like(p))
    tokens = torch.randint(0, 3, (3, 4))
    return model.double(), tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def test_a_small_gpt2_against_its_hessian_written_out():
    model, x, y = _tiny_gpt2()
    eigenvalues = torch.linalg.eigvalsh(_written_out(lambda: model(x, y)[1], list(model.parameters())))
    measured = model_curvature(model, x, y, iterations=40, samples=100, tolerance=1e-8)
    assert measured.n_parameters == len(eigenvalues) == model.count_parameters()
    assert measured.top == pytest.approx(eigenvalues[-1].item(), rel=0.01)
    assert measured.trace == pytest.approx(eigenvalues.sum().item(), rel=0.01)
    assert measured.trace_error == 0
    estimate = model_curvature(model, x, y, iterations=20, samples=40)
    assert estimate.trace_error > 0
    assert abs(estimate.trace - eigenvalues.sum().item()) < 5 * estimate.trace_error


def test_deterministic_given_a_seed_and_leaves_the_model_alone():
    model, x, y = _tiny_gpt2()
    model.train()
    before = [p.clone() for p in model.parameters()]
    first, again = (model_curvature(model, x, y, iterations=5, samples=3, seed=7) for _ in range(2))
    assert first == again
    assert model_curvature(model, x, y, iterations=5, samples=3, seed=8) != first
    assert model.training
    assert all(torch.equal(p, q) and p.grad is None for p, q in zip(model.parameters(), before, strict=True))


def test_parameters_outside_the_loss_are_rows_of_zeros():
    used, unused = nn.Parameter(torch.tensor([1.0, 2.0])), nn.Parameter(torch.ones(3))
    linear, frozen = nn.Parameter(torch.ones(2)), torch.ones(2)
    parameters = [unused, used, linear, frozen]

    def loss():
        return 2 * used.square().sum() + linear.sum() + frozen.sum()

    product = hessian_vector_product(loss, parameters[:3])
    assert product(torch.ones(7)).tolist() == [0, 0, 0, 4, 4, 0, 0]
    measured = curvature(loss, parameters)
    assert measured.n_parameters == 7  # the frozen one is left out
    assert measured.top == pytest.approx(4, rel=1e-5)
    assert measured.bottom == pytest.approx(0, abs=1e-5)
    assert measured.trace == pytest.approx(8, rel=1e-5)


def test_a_loss_without_curvature():
    w = nn.Parameter(torch.ones(4))
    flat = curvature(lambda: w.sum(), [w])
    assert (flat.top, flat.trace) == (0.0, 0.0)
    constant = curvature(lambda: torch.tensor(1.0), [w])
    assert (constant.top, constant.trace) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("loss", "arguments", "words"),
    [
        (lambda w: w, {}, r"shape \(2,\)"),
        (lambda w: 3.0, {}, "float"),
        (lambda w: w.sum() * math.nan, {}, "nan"),
        (lambda w: w.sum(), {"iterations": 0}, "iterations: got 0"),
        (lambda w: w.sum(), {"samples": -1}, "samples: got -1"),
    ],
)
def test_what_is_refused(loss, arguments, words):
    w = nn.Parameter(torch.ones(2))
    with pytest.raises(InputError, match=words):
        curvature(lambda: loss(w), [w], **arguments)
    with pytest.raises(InputError, match="parameters"):
        curvature(lambda: loss(w), [w.detach()])
