"""Row and column patterns, norms, and the bound on attention logits."""

import math
from types import SimpleNamespace

import pytest
import torch

from merit_lab import probes
from merit_lab.errors import InputError
from merit_lab.models import GPT2, GPT2Config
from merit_lab.models.gpt2 import fuse_qkv
from merit_lab.probes import logit_bound, norm_gap, outliers, pattern, query_key_weights, shuffled, similarity


def test_rows_and_columns_of_a_matrix_by_hand():
    w = torch.tensor([[1.0, -3.0], [0.5, 0.25], [-2.0, 2.0], [0.0, 4.0]])
    found = pattern(w, n_head=2)
    assert found.rows.max.tolist() == [3, 0.5, 2, 4]
    assert found.rows.mean.tolist() == [2, 0.375, 2, 2]
    assert found.columns.max.tolist() == [2, 4]
    assert found.columns.mean.tolist() == [0.875, 2.3125]
    assert found.head_boundaries == [2]
    assert pattern(w).head_boundaries == []
    assert pattern(w, n_head=4).head_boundaries == [1, 2, 3]


def test_similarity_is_one_for_stripes_and_sees_magnitude_alone():
    stripes = torch.tensor([1.0, 2.0, 5.0])[:, None] * torch.tensor([1.0, -1.0, 1.0, 1.0])
    assert similarity(stripes) == pytest.approx(1)
    assert similarity(stripes.T) == pytest.approx(-3 / 8)  # η² is 0, chance e = 3/11: -e / (1 - e)


@pytest.mark.parametrize("shape", [(3, 40), (40, 3), (12, 12)])
def test_a_shuffled_matrix_scores_zero_on_average(shape):
    torch.manual_seed(0)
    rows = torch.rand(shape[0], 1) ** 3
    w = rows * torch.randn(shape) * 0.1 + rows  # strong rows, so that the control has something to lose
    scores = torch.tensor([similarity(shuffled(w, seed)) for seed in range(400)])
    assert similarity(w) > 0.5
    assert scores.mean().abs() < 4 * scores.std() / 20
    assert scores.std() < 0.2


def test_shuffled_keeps_the_values_and_follows_its_seed():
    w = torch.arange(12.0).view(3, 4)
    assert shuffled(w, 1).flatten().sort().values.tolist() == w.flatten().tolist()
    assert torch.equal(shuffled(w, 1), shuffled(w, 1))
    assert not torch.equal(shuffled(w, 1), shuffled(w, 2))


def test_similarity_of_matrices_without_a_pattern_to_find():
    assert similarity(torch.full((3, 3), 0.1)) == 0  # 0.1 is not exact: rounding must not look like a pattern
    assert similarity(torch.zeros(2, 2)) == 0
    assert similarity(torch.randn(1, 5)) == 0
    assert similarity(torch.randn(5, 1)) == 0


def test_outlier_dimensions():
    torch.manual_seed(0)
    w = torch.randn(64, 64) * 0.02
    assert pattern(w).columns.outliers == [] == pattern(w).rows.outliers
    w[:, 7] *= 8
    w[:, 40] *= 20
    assert pattern(w).columns.outliers == [40, 7]
    assert pattern(w).rows.outliers == []
    assert pattern(shuffled(w)).columns.outliers == []
    assert outliers(torch.tensor([1.0, 1.0, 1.0, 2.0])) == [3]  # no spread among the rest
    assert outliers(torch.ones(4)) == []


def test_norm_gap():
    assert norm_gap(torch.ones(4, 4)).item() == pytest.approx(1 - 1 / 4)  # 1 - 1/√16
    assert norm_gap(torch.tensor([[0.0, -5.0]])).item() == 0
    assert norm_gap(torch.zeros(3)).item() == 0
    by_row = norm_gap(torch.tensor([[3.0, 4.0], [0.0, 0.0]]), dim=1)
    assert by_row.tolist() == pytest.approx([(5 - 4) / 5, 0])
    assert pattern(torch.ones(4, 4)).norm_gap == pytest.approx(0.75)
    assert pattern(torch.ones(2, 9)).row_norm_gap.tolist() == pytest.approx([2 / 3] * 2)
    assert pattern(torch.ones(2, 9)).column_norm_gap.tolist() == pytest.approx([1 - 0.5**0.5] * 9)


def _model(seed=0, **config):
    torch.manual_seed(seed)
    sizes = {"block_size": 8, "vocab_size": 11, "n_layer": 2, "n_head": 2, "n_embd": 8} | config
    model = GPT2(GPT2Config(**sizes))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p))
    return model, torch.randint(0, 11, (3, 8))


@pytest.mark.parametrize(
    "config", [{}, {"bias": False}, {"n_head": 1}, {"n_head": 8}, {"fused_qkv": True}, {"qk_norm": True}]
)
@pytest.mark.parametrize("seed", range(5))
def test_no_logit_exceeds_the_bound(config, seed):
    model, tokens = _model(seed, **config)
    found = logit_bound(model, tokens)
    assert found.bound.shape == (2,)
    assert found.head_bound.shape == found.max_logit.shape == (2, config.get("n_head", 2))
    assert (found.max_logit <= found.head_bound * (1 + 1e-6)).all()
    assert (found.head_bound <= found.bound[:, None] * (1 + 1e-6)).all()
    assert torch.equal(found.max_logit, probes.attention(model, tokens).max_logit)


def test_the_bound_is_the_papers_with_d_the_width_of_a_head():
    model, tokens = _model(bias=False)
    with torch.no_grad():
        for block in model.blocks:
            block.attention.query.weight.clamp_(-0.5, 0.5)
            block.attention.key.weight.clamp_(-0.25, 0.25)
    found = logit_bound(model, tokens)
    x = model.blocks[0].norm1(model.token_embedding(tokens) + model.position_embedding(torch.arange(8)))
    assert found.input_l1[0].item() == pytest.approx(x.abs().sum(-1).max().item(), rel=1e-6)
    assert (found.query_max.tolist(), found.key_max.tolist()) == ([0.5, 0.5], [0.25, 0.25])
    expected = 4**0.5 * 0.5 * 0.25 * found.input_l1**2  # d_head = 8 / 2
    assert found.bound.tolist() == pytest.approx(expected.tolist())


def test_the_bound_is_reached():
    """One token, weights of one size whose signs follow the input: nothing is lost, so a smaller d would fail."""
    model, tokens = _model(n_layer=1, bias=False)
    tokens = tokens[:1, :1]
    attention = model.blocks[0].attention
    with torch.no_grad():
        x = model.blocks[0].norm1(model.token_embedding(tokens) + model.position_embedding.weight[:1])
        attention.query.weight.copy_(0.5 * x.flatten().sign().expand(8, 8))
        attention.key.weight.copy_(0.25 * x.flatten().sign().expand(8, 8))
    found = logit_bound(model, tokens)
    assert found.max_logit[0].tolist() == pytest.approx([found.bound.item()] * 2, rel=1e-5)


def test_biases_enter_the_bound():
    model, tokens = _model(n_layer=1)
    attention = model.blocks[0].attention
    with torch.no_grad():
        for layer in (attention.query, attention.key):
            layer.weight.zero_()
            layer.bias.fill_(3.0)
    found = logit_bound(model, tokens)
    assert found.max_logit[0].tolist() == pytest.approx([4 * 9 / 2] * 2)  # four dimensions, 3 · 3, over √4
    assert found.bound.item() == pytest.approx(18)


def test_query_and_key_from_every_source():
    model, _ = _model(fused_qkv=False)
    names = [block.attention for block in model.blocks]
    by_model = query_key_weights(model)
    assert len(by_model) == 2
    assert by_model[0].n_head == 2
    for layer, found in enumerate(by_model):
        assert torch.equal(found.query, names[layer].query.weight)
        assert torch.equal(found.key, names[layer].key.weight)
        assert not found.query.requires_grad
    state = model.state_dict()
    run = SimpleNamespace(weights=lambda: state, header={"n_head": 2})
    for source, heads in ((SimpleNamespace(model=model), 2), (state, 1), (fuse_qkv(state), 1), (run, 2)):
        again = query_key_weights(source)
        assert [pair.n_head for pair in again] == [heads, heads]
        assert all(
            torch.equal(a.query, b.query) and torch.equal(a.key, b.key) for a, b in zip(again, by_model, strict=True)
        )
    by_hand = query_key_weights({"query": torch.ones(4, 3), "key": torch.zeros(4, 3)}, n_head=2)
    assert [(p.query.shape, p.key.sum().item(), p.n_head) for p in by_hand] == [((4, 3), 0, 2)]
    before = by_model[0].query.clone()
    with torch.no_grad():
        names[0].query.weight.add_(1)
    assert torch.equal(by_model[0].query, before)  # a copy: training goes on, what was looked at stays


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: pattern(torch.ones(4)), r"shape \(4,\)"),
        (lambda: pattern(torch.ones(4, 0)), r"shape \(4, 0\)"),
        (lambda: pattern(torch.tensor([[math.nan, 1.0]])), "NaN"),
        (lambda: pattern("abc"), "got str"),
        (lambda: pattern(torch.ones(4, 4), n_head=3), "n_head: got 3.*4 rows"),
        (lambda: query_key_weights({"a": torch.ones(2, 2)}), "names a"),
        (lambda: query_key_weights({}), r"\(none\)"),
        (lambda: query_key_weights(3), "got int"),
        (lambda: query_key_weights({"query": torch.ones(3, 3), "key": torch.ones(3, 3)}, n_head=2), "got 2"),
    ],
)
def test_what_is_refused(call, words):
    with pytest.raises(InputError, match=words):
        call()
