"""What must hold on a CUDA device. `make gpu` runs these; elsewhere they are skipped."""

import dataclasses
import math

import pytest
import torch

from merit_lab import GPT2, GPT2Config, Recipe, optim, probes, train
from merit_lab.qk_clip import qk_clip

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
RUN = Recipe(
    model={"named": "nano", "n_embd": 32, "block_size": 16}, text="synthetic", batch_size=12, tokens=12 * 16 * 8,
    eval_sequences=8, lr=2e-2, device=DEVICE, precision="fp32",
)  # fmt: skip


def pair():
    """The same model on the CPU and on the device, and tokens for each."""
    torch.manual_seed(0)
    here = GPT2(GPT2Config(block_size=32, vocab_size=50, n_layer=2, n_head=2, n_embd=32))
    there = GPT2(here.config)
    there.load_state_dict(here.state_dict())
    tokens = torch.randint(0, 50, (16, 33))
    return here, there.to(DEVICE), tokens, tokens.to(DEVICE)


@pytest.mark.parametrize("name", optim.OPTIMIZERS)
def test_a_step_is_the_cpus(name):
    generator = torch.Generator().manual_seed(0)
    here = torch.nn.Parameter(torch.randn(24, 40, generator=generator))
    there = torch.nn.Parameter(here.detach().to(DEVICE, copy=True))
    pairs = [(here, optim.build(name, [here], 0.01)), (there, optim.build(name, [there], 0.01))]
    for _ in range(5):
        grad = torch.randn(24, 40, generator=generator)
        for parameter, optimizer in pairs:
            parameter.grad = grad.to(parameter.device)
            optimizer.step()
    torch.testing.assert_close(there.cpu(), here, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("optimizer", ["AdamW", "LAMB", "MERIT"])
def test_a_run_in_float32_is_near_the_cpus(optimizer):
    there = list(train(RUN.replace(optimizer=optimizer, lr=3e-3)))
    here = list(train(RUN.replace(optimizer=optimizer, lr=3e-3, device="cpu")))
    for a, b in zip(there, here, strict=True):
        assert a.train_loss == pytest.approx(b.train_loss, rel=1e-3)
    assert there[-1].peak_logit == pytest.approx(here[-1].peak_logit, rel=0.05)
    assert there[-1].val_loss < there[0].train_loss


def test_the_same_recipe_gives_nearly_the_same_numbers_again():
    first, second = ([r.train_loss for r in train(RUN)] for _ in range(2))
    assert first == pytest.approx(second, rel=1e-4)  # not bit for bit: the embedding's gradient is summed in any order


def test_everything_in_bf16_stays_finite():
    recipe = RUN.replace(precision="bf16", qk_clip=0.05, noise_every=4, probe_every=1, eval_every=1)
    training = train(recipe)
    records = list(training)
    assert all(math.isfinite(r.val_loss) and math.isfinite(r.noise_scale["trace"]) for r in records if r.noise_scale)
    assert sum(r.clipped_heads for r in records) > 0
    assert all(p.dtype == torch.float32 and p.device.type == DEVICE for p in training.model.parameters())
    assert len(records) == recipe.n_steps and all(r.peak_logit for r in records)


def test_measuring_changes_a_run_no_more_than_repeating_it():
    plain = [r.train_loss for r in train(RUN)]
    watched = [r.train_loss for r in train(RUN.replace(noise_every=1, probe_every=1, eval_every=1))]
    assert plain == pytest.approx(watched, rel=1e-4)


def test_probes_are_the_cpus():
    here, there, tokens, moved = pair()
    for parameter, other in zip(here.parameters(), there.parameters(), strict=True):
        parameter.data.mul_(4)
        other.data.mul_(4)
    ours, theirs = probes.attention(there, moved[:, :-1]), probes.attention(here, tokens[:, :-1])
    for a, b in zip(ours[:3], theirs[:3], strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-3, atol=1e-3)
    found = probes.noise_scale(there, moved[:, :-1], moved[:, 1:], piece=4)
    expected = probes.noise_scale(here, tokens[:, :-1], tokens[:, 1:], piece=4)
    assert found.trace == pytest.approx(expected.trace, rel=1e-2)
    assert probes.mean_loss(there, moved[:, :-1], moved[:, 1:]) == pytest.approx(
        probes.mean_loss(here, tokens[:, :-1], tokens[:, 1:]), rel=1e-3
    )


def test_qk_clip_holds_on_the_device():
    _, there, _, moved = pair()
    with torch.no_grad():
        for block in there.blocks:
            block.attention.query.weight.mul_(30)
    before = qk_clip(there, moved[:, :-1], 0.5)
    assert (before > 0.5).any()
    assert (probes.attention(there, moved[:, :-1]).max_logit <= 0.5 * (1 + 1e-3)).all()


def test_a_recorded_recipe_runs_on_the_other_device():
    assert dataclasses.replace(RUN, device="cpu").to_dict() | {"device": DEVICE} == RUN.to_dict()
