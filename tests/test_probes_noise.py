"""The gradient noise scale: exact where the covariance is known, unbiased, and no trace in the run."""

import dataclasses
import json
import math

import pytest
import torch
from torch import nn

from merit_lab import GPT2, GPT2Config, Recipe, probes, runs, train
from merit_lab.errors import InputError

RUN = Recipe(
    model={"named": "nano", "n_embd": 32, "block_size": 16}, text="synthetic", batch_size=12, tokens=12 * 16 * 8,
    eval_sequences=8, device="cpu",
)  # fmt: skip


class Linear(nn.Module):
    """A model whose loss is the mean of <w, x>: a sequence's gradient is that sequence, whatever w is."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, dtype=torch.float64))
        self.unused = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x, y):
        return None, (x @ self.weight).mean()


def measure(x, piece):
    return probes.noise_scale(Linear(x.shape[1]), x, x, piece=piece)


def test_pieces_of_one_give_the_sample_covariance():
    """With pieces of one sequence, tr Σ is the trace of the unbiased sample covariance, to rounding."""
    x = torch.randn(40, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.7
    found = measure(x, 1)
    trace = x.var(dim=0, correction=1).sum().item()
    gradient_sq = x.mean(0).square().sum().item() - trace / 40
    assert found.trace == pytest.approx(trace, rel=1e-6)
    assert found.gradient_sq == pytest.approx(gradient_sq, rel=1e-6)
    assert found.noise_scale == pytest.approx(trace / gradient_sq, rel=1e-6)
    assert (found.small, found.large) == (1, 40)


def test_without_noise_the_noise_scale_is_zero():
    found = measure(torch.tensor([[3.0, 4.0]], dtype=torch.float64).repeat(12, 1), 4)
    assert found.gradient_sq == pytest.approx(25) and found.trace == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("piece", [1, 4, 8])
def test_both_halves_are_unbiased_at_every_piece_size(piece):
    """|G|² = .5 and tr Σ = 10, so that the noise scale is 20; single measurements of |G|² scatter around 0."""
    generator = torch.Generator().manual_seed(piece)
    mean = torch.full((10,), math.sqrt(0.05), dtype=torch.float64)
    measured = []
    for _ in range(1500):
        x = mean + torch.randn(32, 10, dtype=torch.float64, generator=generator)
        measured.append(measure(x, piece))
    for values, truth in (([m.gradient_sq for m in measured], 0.5), ([m.trace for m in measured], 10.0)):
        values = torch.tensor(values)
        error = (values.std() / math.sqrt(len(values))).item()
        assert abs(values.mean().item() - truth) < 4 * error
        assert error < 0.02 * truth + 0.01  # else the line above could not fail
    assert probes.average_noise_scale(measured) == pytest.approx(20, rel=0.1)


def test_the_average_divides_last():
    """A ratio a measurement would give inf here: its |G|² is below 0."""
    pairs = [{"gradient_sq": -0.5, "trace": 8.0}, {"gradient_sq": 1.5, "trace": 12.0}]
    assert probes.average_noise_scale(pairs) == 20.0
    assert probes.average_noise_scale(pairs[:1]) == math.inf
    assert math.isnan(probes.average_noise_scale([]))
    assert math.isnan(probes.average_noise_scale([{"gradient_sq": -1.0, "trace": -1.0}]))


def test_a_gpt2_by_hand_and_left_as_it_was():
    torch.manual_seed(0)
    model = GPT2(GPT2Config(block_size=8, vocab_size=7, n_layer=1, n_head=2, n_embd=8)).double()
    tokens = torch.randint(0, 7, (7, 9))
    x, y = tokens[:, :-1], tokens[:, 1:]
    model(x, y)[1].backward()  # a gradient that somebody else needs
    kept = [p.grad.clone() for p in model.parameters()]
    weights = [p.detach().clone() for p in model.parameters()]

    def gradient(rows):
        grads = torch.autograd.grad(model(x[rows], y[rows])[1], list(model.parameters()))
        return torch.cat([g.flatten() for g in grads])

    pieces = [gradient(slice(0, 2)), gradient(slice(2, 4)), gradient(slice(4, 6))]
    small_sq = sum(g.square().sum().item() for g in pieces) / 3
    whole = gradient(slice(0, 6)).square().sum().item()
    with torch.no_grad():  # as a caller in evaluation might have it
        found = probes.noise_scale(model, x, y, piece=2)  # the seventh sequence is left over
    assert found.gradient_sq == pytest.approx((6 * whole - 2 * small_sq) / 4, rel=1e-9)
    assert found.trace == pytest.approx((small_sq - whole) / (1 / 2 - 1 / 6), rel=1e-9)
    assert model.training
    assert all(torch.equal(p.grad, k) for p, k in zip(model.parameters(), kept, strict=True))
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))


def test_under_bf16_it_is_near_the_same():
    torch.manual_seed(0)
    model = GPT2(GPT2Config.named("nano"))
    tokens = torch.randint(0, 78, (32, 65))
    x, y = tokens[:, :-1], tokens[:, 1:]
    exact = probes.noise_scale(model, x, y, piece=4)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = probes.noise_scale(model, x, y, piece=4)
    assert rounded.trace == pytest.approx(exact.trace, rel=0.05)
    assert rounded.gradient_sq == pytest.approx(exact.gradient_sq, rel=0.05)


@pytest.mark.parametrize(
    "call, says",
    [
        (lambda x: measure(x, 0), "piece: got 0, expected a whole number ≥ 1"),
        (lambda x: measure(x, 3), "piece: got 3 of 5 sequences, expected at least two pieces"),
        (lambda x: probes.noise_from_norms(1.0, 1.0, 8, 8), "got 8 and 8, expected 0 < small < large"),
    ],
)
def test_bad_sizes_are_named(call, says):
    with pytest.raises(InputError, match=says):
        call(torch.zeros(5, 2, dtype=torch.float64))


# -- in a run ----------------------------------------------------------------------------------------------------


def test_measuring_changes_no_bit_of_the_run():
    plain, measured = list(train(RUN)), list(train(RUN.replace(noise_every=3)))
    assert [r.step for r in measured if r.noise_scale] == [1, 3, 6, 8]
    assert all(r.noise_scale is None for r in plain)
    without = [dataclasses.replace(r, noise_scale=None, seconds=0.0) for r in measured]
    assert without == [dataclasses.replace(r, seconds=0.0) for r in plain]


def test_a_record_keeps_what_was_measured_before_its_step(tmp_path):
    training = train(RUN.replace(noise_every=1))
    expected = training.noise_scale()  # of the first weights
    records = list(runs.record_to(tmp_path / "r.jsonl", training))
    first = records[0].noise_scale
    assert first["gradient_sq"] == pytest.approx(expected.gradient_sq, rel=1e-5)
    assert first["trace"] == pytest.approx(expected.trace, rel=1e-5)
    assert (expected.small, expected.large) == (8, 256)
    read = runs.read(tmp_path / "r.jsonl")
    assert list(read) == records
    assert probes.average_noise_scale(read) == probes.average_noise_scale(records) > 0
    json.dumps(first)


def test_the_interval_is_checked():
    with pytest.raises(InputError, match="noise_every: got 0, expected a whole number ≥ 1 or None"):
        RUN.replace(noise_every=0)
