"""QK-clip: what it scales, what it leaves alone, and what it does in a run."""

import dataclasses
import math

import pytest
import torch

from merit_lab import GPT2, GPT2Config, Recipe, probes, text, train
from merit_lab.errors import InputError
from merit_lab.models.gpt2 import fuse_qkv
from merit_lab.probes.attention import attention_inputs
from merit_lab.qk_clip import qk_clip
from merit_lab.training import QK_CLIP_SEQUENCES

MODEL = {"named": "nano", "n_layer": 3, "n_head": 4, "n_embd": 32, "block_size": 16}
RUN = Recipe(
    model=MODEL, text="synthetic", batch_size=12, tokens=12 * 16 * 8, eval_sequences=8, optimizer="AdamW", lr=5e-2,
    device="cpu",
)  # fmt: skip


def hot_model(fused=False, bias=True, seed=0):
    """A model whose heads have logits of very different sizes, with biases that are not 0."""
    torch.manual_seed(seed)
    config = {k: v for k, v in MODEL.items() if k != "named"} | {"vocab_size": 11, "bias": bias}
    model = GPT2(GPT2Config(**config))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "query" in name or "key" in name:
                sizes = torch.linspace(1, 12, 4).repeat_interleave(8)  # a head has 8 rows
                noise = torch.randn_like(parameter) * (0.1 if name.endswith("bias") else 0.05)
                parameter.copy_(noise * (sizes if parameter.ndim == 1 else sizes[:, None]))
    if not fused:
        return model
    other = GPT2(GPT2Config(**config, fused_qkv=True))
    other.load_state_dict(fuse_qkv(model.state_dict()))
    return other


def tokens(n=5, seed=1):
    return torch.randint(0, 11, (n, 16), generator=torch.Generator().manual_seed(seed))


def head_rows(model, layer, head):
    """Copies of what makes a head's q and k."""
    attention, rows = model.blocks[layer].attention, slice(8 * head, 8 * head + 8)
    names = ("query", "key") if not attention.fused else ("qkv",)
    found = []
    for name in names:
        for p in (getattr(attention, name).weight, getattr(attention, name).bias):
            if p is not None:
                found += [part[rows].detach().clone() for part in (p.chunk(3)[:2] if attention.fused else [p])]
    return found


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_afterwards_no_head_is_above_the_threshold_and_a_clipped_one_stands_at_it(fused, bias):
    model, x = hot_model(fused, bias), tokens()
    threshold = probes.attention(model, x).max_logit.median().item()
    before = qk_clip(model, x, threshold)
    assert 3 <= (before > threshold).sum() <= 9  # some heads, and not all
    after = probes.attention(model, x).max_logit
    assert (after <= threshold * (1 + 1e-5)).all()
    clipped = before > threshold
    torch.testing.assert_close(after[clipped], torch.full_like(after[clipped], threshold))
    torch.testing.assert_close(after[~clipped], before[~clipped])
    torch.testing.assert_close(qk_clip(model, x, 1e9), after)  # it returns what the probe measures


@pytest.mark.parametrize("fused", [False, True])
def test_a_head_below_the_threshold_keeps_its_bits_and_nothing_but_queries_and_keys_changes(fused):
    model, x = hot_model(fused), tokens()
    rows = {(layer, head): head_rows(model, layer, head) for layer in range(3) for head in range(4)}
    others = {n: p.clone() for n, p in model.state_dict().items() if not any(k in n for k in ("query", "key", "qkv"))}
    values = [block.attention.query_key_value_weights()[2].clone() for block in model.blocks]
    threshold = 1.5
    above = qk_clip(model, x, threshold) > threshold
    assert above.any() and not above.all()
    for (layer, head), before in rows.items():
        after = head_rows(model, layer, head)
        kept = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert kept is not bool(above[layer, head])
    assert all(torch.equal(p, model.state_dict()[n]) for n, p in others.items())
    assert all(
        torch.equal(v, b.attention.query_key_value_weights()[2]) for v, b in zip(values, model.blocks, strict=True)
    )


def test_queries_and_keys_share_the_scaling_equally():
    model, x = hot_model(), tokens()
    before = head_rows(model, 0, 3)
    largest = qk_clip(model, x, 2.0)[0, 3].item()
    for old, new in zip(before, head_rows(model, 0, 3), strict=True):
        torch.testing.assert_close(new, old * math.sqrt(2.0 / largest))


def test_a_logit_that_is_not_finite_changes_nothing():
    model, x = hot_model(), tokens()
    with torch.no_grad():
        model.blocks[2].attention.query.weight[0] = math.inf
        model.blocks[2].attention.key.weight[8] = math.nan
    before = {n: p.clone() for n, p in model.state_dict().items()}
    largest = qk_clip(model, x, 1e9)
    assert not largest[2, :2].isfinite().any() and largest[2, 2:].isfinite().all()
    assert all(torch.equal(p.nan_to_num(7.0), before[n].nan_to_num(7.0)) for n, p in model.state_dict().items())


def test_under_bf16_the_layers_above_see_the_scaled_weights():
    model, x = hot_model(), tokens()
    with torch.autocast("cpu", torch.bfloat16):
        qk_clip(model, x, 1.0)
        assert (probes.attention(model, x).max_logit <= 1.02).all()


@torch.no_grad()
@pytest.mark.parametrize("chunk", [1, 100, 1 << 22])
def test_largest_logits_are_those_of_the_attention_probe(chunk):
    model, x = hot_model(), tokens()
    expected = probes.attention(model, x).max_logit
    inputs = attention_inputs(model, x)
    found = torch.stack([probes.largest_logits(module, inside, chunk) for module, inside in inputs])
    torch.testing.assert_close(found, expected)


# -- in a run ----------------------------------------------------------------------------------------------------


def numbers(recipe):
    return [dataclasses.replace(record, seconds=0.0) for record in train(recipe)]


def test_after_every_step_the_batchs_first_sequences_stay_below_the_threshold():
    training = train(RUN.replace(qk_clip=0.5))
    clipped = []
    for record in training:
        x, _ = text.batch(training.corpus.train, 16, 12, seed=0, step=record.step)
        largest = probes.attention(training.model, x[:QK_CLIP_SEQUENCES]).max_logit
        assert largest.max() <= 0.5 * (1 + 1e-5)
        clipped.append(record.clipped_heads)
    assert max(clipped) > 0
    assert max(r.peak_logit for r in train(RUN) if r.peak_logit) > 1.0  # without it they grow


@pytest.mark.parametrize(
    "changes", [{"batch_size": 3}, {"micro_batch_size": 2}, {"model": MODEL | {"fused_qkv": True}}]
)
def test_it_works_with_small_batches_and_fused_matrices(changes):
    records = numbers(RUN.replace(qk_clip=0.2, **changes))
    assert sum(r.clipped_heads for r in records) > 0 and math.isfinite(records[-1].val_loss)


def test_without_it_nothing_changes_and_a_threshold_nobody_reaches_is_the_same_run():
    plain = numbers(RUN)
    assert all(record.clipped_heads is None for record in plain)
    high = numbers(RUN.replace(qk_clip=1e9))
    assert all(record.clipped_heads == 0 for record in high)
    assert [dataclasses.replace(record, clipped_heads=None) for record in high] == plain


@pytest.mark.parametrize(
    "value, says",
    [
        (0, "qk_clip: got 0, expected a finite number > 0 or None"),
        (-3.0, "qk_clip: got -3.0"),
        (math.inf, "qk_clip: got inf"),
        ("30", "qk_clip: got '30'"),
    ],
)
def test_a_bad_threshold_is_refused(value, says):
    with pytest.raises(InputError, match=says):
        RUN.replace(qk_clip=value)


def test_it_is_refused_where_it_would_do_nothing():
    with pytest.raises(InputError, match="qk_clip: got 30.0 for a model with qk_norm=True.*set qk_clip to None"):
        RUN.replace(model=MODEL | {"qk_norm": True}, qk_clip=30.0)
