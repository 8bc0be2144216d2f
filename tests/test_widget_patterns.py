"""Weight patterns: what is shown of W_Q and W_K, from every source, and what is said where no step is known."""

import base64
from types import SimpleNamespace

import ipywidgets
import numpy as np
import pytest
import torch

from merit_lab import Recipe, optim, probes, train
from merit_lab.errors import InputError
from merit_lab.figures import matrices
from merit_lab.models import GPT2, GPT2Config
from merit_lab.runs import read, record_to
from merit_lab.widgets import WeightPatterns
from merit_lab.widgets import patterns as module


@pytest.fixture
def drawn(monkeypatch):
    """What was given to be drawn, the latest last: lists of PatternPicture."""
    calls = []
    real = matrices.pattern_maps

    def spy(pictures, **how):
        calls.append(list(pictures))
        return real(pictures, **how)

    monkeypatch.setattr(matrices, "pattern_maps", spy)
    return calls


def striped_model(fused=False):
    """Two layers, two heads; in layer 1 row 3 and column 12 of W_Q stand out."""
    torch.manual_seed(0)
    model = GPT2(GPT2Config(block_size=8, vocab_size=7, n_layer=2, n_head=2, n_embd=24, fused_qkv=fused))
    with torch.no_grad():
        query = model.blocks[1].attention.query_key_value_weights()[0]
        query[2] *= 8
        query[:, 11] *= 12
    return model


@pytest.fixture(scope="module")
def training():
    made = train(Recipe.named("tiny", text="synthetic", optimizer="LAMB", batch_size=2, tokens=1024, eval_sequences=2))
    yield made
    made.close()


def test_a_model_is_shown_with_its_control(drawn):
    model = striped_model()
    widget = WeightPatterns(model, layer=1)
    query, key = drawn[-1]
    attention = model.blocks[1].attention
    np.testing.assert_array_equal(query.weight, attention.query.weight.detach())
    np.testing.assert_array_equal(key.weight, attention.key.weight.detach())
    assert query.control.tolist() == probes.shuffled(attention.query.weight, 0).tolist()
    assert query.pattern.head_boundaries == [12]
    assert query.pattern.columns.outliers == [11]
    assert query.pattern.rows.similarity == probes.similarity(attention.query.weight)
    assert query.control_pattern.rows.similarity == probes.similarity(torch.from_numpy(query.control))
    assert "Layer 1, 2 heads of 12 rows." in widget.alt
    assert "outlier column 12" in widget.alt
    assert "W_K: " in widget.alt
    assert f"{query.pattern.columns.similarity:.2f} within columns" in widget.alt
    widget.close()


def test_without_a_step_the_ratios_are_not_claimed(drawn):
    widget = WeightPatterns(striped_model())
    assert "These weights come without a step, so the ratios s themselves are not known." in widget.alt
    assert "exceeds" not in widget.alt
    query = drawn[-1][0]
    w = np.abs(query.weight)
    expected = np.maximum(w.max(1, keepdims=True), w.max(0, keepdims=True)) / w.max()
    np.testing.assert_allclose(query.contrast, expected, rtol=1e-6)
    assert not query.ratios
    widget.close()


def test_controls(drawn):
    widget = WeightPatterns(striped_model())
    assert widget.layer.value == 0
    first = drawn[-1][0]
    widget.layer.value = 1
    assert widget.frames == 2
    assert drawn[-1][0].weight.max() > first.weight.max() * 5
    control = drawn[-1][0].control
    widget.seed.value = 3
    assert drawn[-1][0].control.tolist() == probes.shuffled(torch.from_numpy(drawn[-1][0].weight), 3).tolist()
    assert drawn[-1][0].control.tolist() != control.tolist()
    for control in (widget.layer, widget.seed, widget.again):
        assert control.description
    assert not widget.layer.continuous_update
    widget.close()


def test_the_table_holds_the_probes_numbers():
    model = striped_model()
    widget = WeightPatterns(model, layer=1)
    found = probes.pattern(model.blocks[1].attention.query.weight, 2)
    for words in (f"{found.norm_gap:.3f}", f"{found.rows.similarity:.2f}", f"{found.rows.max.max():.4g}", ">12<"):
        assert words in widget.table.value
    assert "W_K shuffled" in widget.table.value
    widget.close()


def test_a_live_training_shows_where_s_exceeds_b(training, drawn):
    widget = WeightPatterns(training)
    assert "come without a step" in widget.alt  # before the first step there are no moments
    next(training)
    next(training)
    widget.again.click()
    query = drawn[-1][0]
    parameter = training.model.blocks[0].attention.query.weight
    state = training.optimizer.state[parameter]
    direction = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + 1e-6) + 0.1 * parameter.detach()
    b, _, _, s, guarded = optim.merit_ratios(parameter.detach(), direction)
    assert not guarded.any()
    np.testing.assert_allclose(query.contrast, s / b, rtol=1e-5)
    assert query.ratios
    assert query.contrast.min() >= 1 - 1e-6
    above = 100 * (s / b > 1.001).float().mean().item()
    assert (
        f"MERIT's s exceeds the whole matrix's b on {above:.0f} % of W_Q, at most {(s / b).max():.3g} times"
        in widget.alt
    )
    assert torch.equal(torch.from_numpy(query.weight), parameter)  # read again
    widget.close()


def test_fused_matrices_share_their_ratios(drawn):
    model = striped_model(fused=True)
    optimizer = optim.MERIT(model.parameters(), lr=0.01, weight_decay=0.1)
    tokens = torch.randint(0, 7, (2, 9))
    model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())[1].backward()
    optimizer.step()
    widget = WeightPatterns(SimpleNamespace(model=model, optimizer=optimizer), layer=1)
    weight = model.blocks[1].attention.qkv.weight.detach()
    state = optimizer.state[model.blocks[1].attention.qkv.weight]
    direction = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + 1e-6) + 0.1 * weight
    b, _, _, s, _ = optim.merit_ratios(weight, direction)  # (72, 24): one maximum for Q, K and V
    np.testing.assert_allclose(drawn[-1][0].contrast, (s / b)[:24], rtol=1e-5)
    np.testing.assert_allclose(drawn[-1][1].contrast, (s / b)[24:48], rtol=1e-5)
    widget.close()


def test_a_recorded_run_that_kept_its_weights(training, tmp_path, drawn):
    recipe = training.recipe.replace(tokens=256)
    live = train(recipe, training.corpus)
    for _ in record_to(tmp_path / "run.jsonl", live, keep_weights=True):
        pass
    widget = WeightPatterns(read(tmp_path / "run.jsonl"))
    kept = live.model.blocks[0].attention.query.weight.detach().half().float()
    np.testing.assert_array_equal(drawn[-1][0].weight, kept)
    assert "2 heads of 32 rows" in widget.alt
    assert "come without a step" in widget.alt
    widget.close()


def test_a_table_of_tensors(drawn):
    widget = WeightPatterns({"query": torch.eye(6), "key": torch.ones(6, 4)}, n_head=3)
    assert drawn[-1][0].pattern.head_boundaries == [2, 4]
    assert drawn[-1][1].weight.shape == (6, 4)
    assert widget.layer.max == 0
    widget.close()


@pytest.mark.parametrize("size", [1, 2, 64, 300])
def test_sizes_from_one_to_many(size):
    torch.manual_seed(0)
    widget = WeightPatterns({"query": torch.randn(size, size), "key": torch.zeros(size, size)})
    assert widget.error is None
    assert "W_Q" in widget.alt
    widget.close()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (({"query": torch.ones(2, 2)},), "names query"),
        ((striped_model(), 2), "layer: got 2, expected a whole number from 0 to 1"),
        ((striped_model(), -1), "layer: got -1"),
        ((3,), "got int"),
    ],
)
def test_what_is_refused(arguments, words):
    before = len(ipywidgets.widgets.widget._instances)
    with pytest.raises(InputError, match=words):
        WeightPatterns(*arguments)
    assert len(ipywidgets.widgets.widget._instances) == before


def test_weights_that_diverged_are_named_and_the_last_picture_stays():
    model = striped_model()
    widget = WeightPatterns(model)
    picture = widget.picture.value
    with torch.no_grad():
        model.blocks[0].attention.key.weight[0, 0] = float("nan")
    widget.again.click()
    assert "weights of layer 0: it holds a NaN" in widget.status.value
    assert widget.picture.value == picture
    widget.close()


def test_saved_notebooks_show_the_picture_and_close_leaves_nothing():
    before = len(ipywidgets.widgets.widget._instances)
    widget = WeightPatterns(striped_model())
    bundle, metadata = widget._repr_mimebundle_()
    assert base64.b64decode(bundle["image/png"]) == widget.png
    assert bundle["text/plain"] == "WeightPatterns()"
    assert metadata["image/png"]["alt"] == widget.alt
    widget.close()
    assert len(ipywidgets.widgets.widget._instances) == before
    widget.layer.value = 1
    assert widget.frames == 1


def test_pooling_keeps_the_mean_and_the_place_of_stripes():
    values = np.zeros((400, 300))
    values[100:104] = 1.0
    pooled = matrices._pooled(values, 100)
    assert pooled.shape == (100, 100)
    assert pooled.mean() == pytest.approx(values.mean())
    assert pooled[25].tolist() == [1.0] * 100
    assert matrices._pooled(values[:50, :50], 100).shape == (50, 50)


def test_places_in_words():
    assert module._places([0]) == "1"
    assert module._places([4, 1]) == "5 and 2"
    assert module._places(list(range(8))) == "1, 2, 3, 4, 5, 6 and 2 more"
