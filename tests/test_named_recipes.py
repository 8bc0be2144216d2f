"""The named recipes: what they say of their time and memory is what follows from them."""

import re

import pytest
import torch

from merit_lab import GPT2, GPT2Config, Recipe
from merit_lab.recipe import A100, RECIPES, flops_a_token, seconds_at

UNITS = {"s": 1, "min": 60, "h": 3600, "days": 86400}


def on_paper(config):
    """The model without its memory."""
    with torch.device("meta"):
        return GPT2(config)


@pytest.mark.parametrize("name", RECIPES)
def test_a_computed_time_is_the_one_that_follows(name):
    said = RECIPES[name].time
    if "computed" not in said:
        assert said.endswith("measured")
        return
    number, unit, share = re.fullmatch(r"(\d+) (\w+) on an A100, computed at (\d+) % of its peak", said).groups()
    recipe = Recipe.named(name)
    parameters = on_paper(recipe.model_config()).count_parameters()
    expected = seconds_at(recipe, parameters, A100 * int(share) / 100)
    assert int(number) * UNITS[unit] == pytest.approx(expected, rel=0.1)


def test_the_operations_of_a_token_by_hand():
    # 2 per weight forward, twice as many backward; and for each token 2 · 2 · T · width forward a layer in attention.
    config = GPT2Config(block_size=8, vocab_size=5, n_layer=3, n_head=2, n_embd=4)
    assert flops_a_token(config, 100) == 3 * (2 * 100 + 3 * (2 * 2 * 8 * 4))


@pytest.mark.parametrize("name", ["gpt2", "gpt2-medium", "gpt2-large"])
def test_the_papers_runs_have_the_papers_settings(name):
    recipe = Recipe.named(name)
    batch, tokens = {"gpt2": (1024, 2e9), "gpt2-medium": (4096, 8e9), "gpt2-large": (8192, 16e9)}[name]
    assert (recipe.batch_size, recipe.tokens, recipe.block_size) == (batch, tokens, 1024)
    assert recipe.n_steps == pytest.approx(1950, rel=0.03)
    assert recipe.optimizer_args == {"betas": (0.9, 0.95), "weight_decay": 0.1}
    assert (recipe.warmup, recipe.final_lr, recipe.grad_clip, recipe.lr) == (0.02, 0.1, 1.0, 9e-3)


@pytest.mark.parametrize("name", [name for name in RECIPES if "computed" in RECIPES[name].time])
def test_a_micro_batch_fits_80_gb(name):
    """Counted in float32 with attention's whole matrices, which is more than a GPU keeps."""
    recipe = Recipe.named(name)
    model = on_paper(recipe.model_config())
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage  # held, so that no two have the same address
        return tensor

    tokens = torch.zeros(recipe.micro_batch_size, recipe.block_size, dtype=torch.int64, device="meta")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits, _ = model(tokens, tokens)
    for_backward = sum(storage.nbytes() for storage in kept.values())
    weights = 4 * model.count_parameters()
    # for_backward holds the weights already; beside them a gradient, two moments, and the gradient of the logits
    assert for_backward > weights
    assert for_backward + 3 * weights + 4 * logits.numel() < 75e9


def test_every_recipe_says_where_its_rates_come_from():
    assert all(preset.lr_from and preset.purpose and preset.lr.keys() >= {"MERIT"} for preset in RECIPES.values())
    assert "paper's best" in RECIPES["gpt2"].lr_from and "guess" in RECIPES["gpt2"].lr_from
