"""Curvature of a loss: the extreme eigenvalues and the trace of its Hessian, without writing the Hessian down.

All that is needed is the Hessian times a vector, the gradient of ⟨∇L, v⟩, which costs about two more backward
passes (Pearlmutter 1994). On it stand

    top, bottom   Lanczos: the Hessian seen from the directions v, Hv, H²v, …, a small tridiagonal matrix T whose
                  extreme eigenvalues are those of H after few steps (Golub & Van Loan, chapter 10)
    trace         Hutchinson: E[vᵀ H v] over random signs v is the trace. The Lanczos directions' part of it is
                  known already, exactly tr T, so that only the rest is estimated (Meyer et al. 2021, Hutch++).
                  Where there are as many samples as parameters, unit vectors give the trace itself
"""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..errors import InputError
from .attention import evaluating


class Curvature(NamedTuple):
    """What is known of the Hessian of a loss."""

    top: float  # largest eigenvalue
    bottom: float  # smallest eigenvalue; the less certain of the two, where it lies in the bulk
    trace: float  # sum of the eigenvalues
    trace_error: float  # standard error of `trace`; 0 where it is exact, NaN for a single sample
    top_error: float  # an eigenvalue of H lies this close to `top`: the Lanczos residual
    iterations: int  # Lanczos steps taken
    n_parameters: int


def curvature(
    loss: Callable[[], Tensor],
    parameters: Iterable[Tensor],
    *,
    iterations: int = 40,
    samples: int = 20,
    tolerance: float = 1e-4,
    seed: int = 0,
) -> Curvature:
    """Extreme eigenvalues and trace of the Hessian of a loss.

    Args:
        loss: called once without arguments; returns the loss, a scalar tensor that can be differentiated twice.
        parameters: the tensors it is differentiated by. One that does not enter the loss counts as rows and
            columns of zeros; one without requires_grad is left out.
        iterations: Lanczos steps, at most. A vector of the parameters' size is kept for each.
        samples: random vectors for the trace; 0 leaves it out (NaN). No fewer than the parameters: the exact sum.
        tolerance: Lanczos ends early where the relative error of the top eigenvalue is below it.
        seed: decides the random vectors. The same seed on the same machine gives the same numbers.

    Raises:
        InputError: no parameters, counts below 1, or a loss that is not finite or no scalar.
    """
    parameters = [p for p in parameters if p.requires_grad]
    for name, value, low in (("iterations", iterations, 1), ("samples", samples, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise InputError(f"{name}: got {value!r}, expected a whole number ≥ {low}")
    if not parameters:
        raise InputError("parameters: got none that requires a gradient, expected at least one tensor")
    product = hessian_vector_product(loss, parameters)
    n = sum(p.numel() for p in parameters)
    generator = torch.Generator().manual_seed(seed)  # on the CPU: the same vectors on every device
    device, dtype = parameters[0].device, parameters[0].dtype

    def signs():
        return (torch.randint(0, 2, (n,), generator=generator) * 2 - 1).to(device, dtype)

    start = torch.randn(n, generator=generator, dtype=torch.float64).to(device, dtype)
    basis, tridiagonal, top_error = _lanczos(product, start, min(iterations, n), tolerance)
    eigenvalues = torch.linalg.eigvalsh(tridiagonal)
    if samples >= n:
        units = torch.eye(n, device=device, dtype=dtype)
        trace, error = sum(product(unit)[i].double().item() for i, unit in enumerate(units)), 0.0
    else:
        rest = [_outside(basis, signs()) for _ in range(samples)]
        trace, error = _mean([torch.dot(v, product(v)).double().item() for v in rest])
        trace += tridiagonal.trace().item()
    return Curvature(eigenvalues[-1].item(), eigenvalues[0].item(), trace, error, top_error, len(basis), n)


def model_curvature(model, x: Tensor, y: Tensor, **arguments) -> Curvature:
    """`curvature` of a GPT2's mean cross-entropy on sequences x with targets y, both (B, T), in all its weights.

    The model is left as it was; gradients that its parameters hold are not touched.
    """
    with evaluating(model):
        return curvature(lambda: model(x, y)[1], model.parameters(), **arguments)


def hessian_vector_product(loss: Callable[[], Tensor], parameters: Iterable[Tensor]) -> Callable[[Tensor], Tensor]:
    """The function v -> H v for the Hessian H of the loss, v a flat vector over all parameters in order.

    The loss is evaluated once, here; its graph is kept as long as the function is. Attention is computed by torch's
    plain formula, since its fused kernels have no second derivative.
    """
    parameters = list(parameters)
    with torch.enable_grad():
        with sdpa_kernel(SDPBackend.MATH):
            value = loss()
        if not isinstance(value, Tensor) or value.numel() != 1:
            what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise InputError(f"loss: got {what}, expected a scalar tensor")
        if not torch.isfinite(value):
            raise InputError(f"loss: got {value.item()}, expected a finite one; take weights from before it diverged")
        grads = _grad(value, parameters, create_graph=True) if value.requires_grad else []
    # A gradient that depends on no parameter has a zero derivative, and nothing to differentiate.
    sloped = [(i, g) for i, g in enumerate(grads) if g.requires_grad]
    sizes = [p.numel() for p in parameters]

    def product(vector: Tensor) -> Tensor:
        pieces = [v.view_as(p) for v, p in zip(vector.split(sizes), parameters, strict=True)]
        if not sloped:
            return torch.zeros_like(vector)
        with torch.enable_grad():
            along = sum((g * pieces[i]).sum() for i, g in sloped)  # ⟨∇L, v⟩
            rows = _grad(along, parameters, retain_graph=True)
        return torch.cat([row.flatten() for row in rows])

    return product


def _grad(value, parameters, **how):
    return torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True, **how)


def _lanczos(product, start, iterations, tolerance):
    """Orthonormal directions (m, n), the tridiagonal matrix H is among them (m, m), the residual of its top value.

    Every new direction is made orthogonal to all before it, twice: without that, rounding brings found eigenvalues
    back as copies.
    """
    basis, diagonal, beside = [start / start.norm()], [], []
    while True:
        image = product(basis[-1])
        diagonal.append(torch.dot(basis[-1], image).double().item())
        stack = torch.stack(basis)
        rest = _outside(stack, image)
        beta = rest.norm().double().item()
        tridiagonal = _tridiagonal(diagonal, beside)
        values, vectors = torch.linalg.eigh(tridiagonal)
        error = beta * abs(vectors[-1, -1].item())
        size = values.abs().max().item()
        exhausted = beta <= 10 * torch.finfo(start.dtype).eps * max(size, torch.finfo(start.dtype).tiny)
        if len(basis) == iterations or exhausted or error <= tolerance * size:
            return stack, tridiagonal, error
        beside.append(beta)
        basis.append(rest / beta)


def _mean(values: list[float]) -> tuple[float, float]:
    """Mean and its standard error; NaN where there are too few values."""
    n = len(values)
    mean = sum(values) / n if n else math.nan
    spread = sum((value - mean) ** 2 for value in values)
    return mean, math.sqrt(spread / (n - 1) / n) if n > 1 else math.nan


def _outside(basis: Tensor, vector: Tensor) -> Tensor:
    """The part of a vector (n,) that is orthogonal to the orthonormal rows of basis (m, n)."""
    for _ in range(2):
        vector = vector - basis.T @ (basis @ vector)
    return vector


def _tridiagonal(diagonal, beside) -> Tensor:
    off = torch.tensor(beside, dtype=torch.float64)
    return torch.diag(torch.tensor(diagonal, dtype=torch.float64)) + torch.diag(off, 1) + torch.diag(off, -1)
