"""Recipes, the schedule, training, probes of attention and ratios, and recorded runs."""

import dataclasses
import itertools
import json
import math

import fakes
import pytest
import torch

from merit_lab import Recipe, optim, probes, runs, text, train
from merit_lab.errors import InputError
from merit_lab.recipe import RECIPES
from merit_lab.schedule import learning_rate, warmup_steps
from merit_lab.training import StepRecord, build_model, clip_gradients, is_due

BASE = {"model": {"named": "nano", "n_layer": 2, "n_embd": 32, "block_size": 16}, "text": "synthetic", "batch_size": 12}
SMALL = Recipe(**BASE, tokens=12 * 16 * 8, eval_sequences=8, lr=2e-2, device="cpu")


def numbers(records):
    """Everything but the clock."""
    return [dataclasses.replace(record, seconds=0.0) for record in records]


# -- recipes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "field, value, says",
    [
        ("model", "huge", "'huge'.*nano.*gpt2-large"),
        ("model", 3, "model: got 3, expected a size or a table"),
        ("model", {"named": "nano", "n_heads": 3}, "n_heads.*n_head"),
        ("model", {"named": "nano", "n_embd": 65}, "n_embd=65"),
        ("text", "shakspeare", "'shakspeare'.*shakespeare"),
        ("text", "shakespeare@words", "words.*chars"),
        ("optimizer", "Adam", "optimizer: got 'Adam'.*AdamW.*LAMB.*MERIT"),
        ("optimizer", None, "optimizer: got None"),
        ("optimizer_args", {"momentum": 0.9}, "MERIT takes no 'momentum', only betas, eps"),
        ("optimizer_args", {"eps": -1.0}, r"eps: got -1\.0, expected a finite number ≥ 0"),
        ("optimizer_args", {"betas": [0.9]}, r"betas: got \(0\.9,\)"),
        ("optimizer_args", "lr", "optimizer_args: got 'lr', expected a table"),
        ("lr", -1e-3, r"lr: got -0\.001, expected a finite number ≥ 0"),
        ("lr", math.nan, "lr: got nan"),
        ("lr", "1e-3", "lr: got '1e-3'"),
        ("batch_size", 0, "batch_size: got 0, expected a whole number ≥ 1"),
        ("batch_size", 2.5, "batch_size: got 2.5"),
        ("batch_size", True, "batch_size: got True"),
        ("micro_batch_size", -4, "micro_batch_size: got -4, expected a whole number ≥ 1 or None"),
        ("tokens", 10, "tokens: got 10, less than one batch: 12 sequences of 16 tokens are 192"),
        ("warmup", 1.5, r"warmup: got 1\.5, expected a finite number from 0 to 1"),
        ("final_lr", -0.1, "final_lr: got -0.1"),
        ("grad_clip", 0.0, r"grad_clip: got 0\.0, expected a finite number > 0 or None"),
        ("seed", -1, "seed: got -1"),
        ("seed", 1.5, "seed: got 1.5"),
        ("device", "tpu", "device: got 'tpu', expected one of auto, cpu, cuda, mps"),
        ("precision", "fp8", "precision: got 'fp8', expected one of auto, fp32, bf16"),
        ("block_size", 0, "block_size: got 0"),
        ("probe_every", 0, "probe_every: got 0"),
        ("eval_every", 0.5, "eval_every: got 0.5"),
        ("eval_sequences", 0, "eval_sequences: got 0"),
    ],
)
def test_a_bad_field_is_named_with_its_value_and_what_is_allowed(field, value, says):
    with pytest.raises(InputError, match=says):
        Recipe(**{**BASE, "tokens": 1000, field: value})


def test_an_unknown_field_or_recipe_is_named_with_those_there_are(tmp_path):
    with pytest.raises(InputError, match="unknown field .learning_rate., expected one of model, text"):
        SMALL.replace(learning_rate=1)
    with pytest.raises(InputError, match="unknown field 'x'"):
        Recipe.from_dict({"x": 1})
    with pytest.raises(InputError, match="got 'nope', expected one of tiny, .* or a TOML file"):
        Recipe.named("nope")
    with pytest.raises(InputError, match="cannot read .*missing.toml"):
        Recipe.read(tmp_path / "missing.toml")
    (tmp_path / "bad.toml").write_text("lr = = 1")
    with pytest.raises(InputError, match=r"bad\.toml is not TOML"):
        Recipe.read(tmp_path / "bad.toml")


def test_a_recipe_survives_json_and_toml(tmp_path):
    recipe = SMALL.replace(optimizer="LAMB", optimizer_args={"betas": (0.8, 0.9), "bias_correction": False})
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
    (tmp_path / "r.toml").write_text('model = "nano"\ntext = "synthetic"\nlr = 0.02\noptimizer_args = {eps = 1e-7}\n')
    read = Recipe.read(tmp_path / "r.toml", seed=3)
    assert (read.lr, read.seed, read.optimizer_args["eps"]) == (0.02, 3, 1e-7)
    assert read.optimizer_args["weight_decay"] == 0.1  # the paper's settings stay where nothing else is said


def test_a_recipe_fills_in_what_follows():
    assert SMALL.block_size == 16 and SMALL.tokens_per_step == 192 and SMALL.n_steps == 8
    assert Recipe(model="micro").replace(model="nano", block_size=32).block_size == 32
    assert Recipe(model={"named": "nano", "block_size": 32}).replace(model="nano").block_size == 64


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("optimizer", ["AdamW", "LAMB", "MERIT", "maxLAMB"])
def test_every_named_recipe_is_valid_for_every_optimizer(name, optimizer):
    recipe = Recipe.named(name, optimizer=optimizer)
    assert recipe.optimizer == optimizer and recipe.n_steps >= 1


def test_the_lr_of_a_named_recipe_follows_the_optimizer_unless_given():
    assert Recipe.named("compare", optimizer="AdamW").lr == RECIPES["compare"].lr["AdamW"]
    assert Recipe.named("compare", optimizer="AdamW", lr=0.5).lr == 0.5


# -- schedule ----------------------------------------------------------------------------------------------------


def test_warm_up_starts_above_zero_and_ends_at_the_peak():
    rates = [learning_rate(step, 100, 1.0, warmup=0.04) for step in range(1, 101)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] < 1.0 and all(a > b for a, b in itertools.pairwise(rates[3:]))
    assert rates[-1] == pytest.approx(0.1)
    assert rates[51] == pytest.approx(0.1 + 0.9 / 2)  # half-way down the cosine


@pytest.mark.parametrize("n_steps", [1, 2, 50])
def test_a_warm_up_as_long_as_the_run_ends_at_the_peak(n_steps):
    assert learning_rate(n_steps, n_steps, 3.0, warmup=1.0) == 3.0


@pytest.mark.parametrize(
    "n_steps, share, steps", [(50, 0.02, 1), (100, 0.02, 2), (61, 0.02, 2), (10, 0.0, 0), (1, 1.0, 1)]
)
def test_warmup_steps(n_steps, share, steps):
    assert warmup_steps(n_steps, share) == steps


def test_a_run_without_warm_up_starts_near_its_peak():
    assert learning_rate(1, 1000, 1.0, warmup=0.0) == pytest.approx(1.0, abs=1e-4)
    with pytest.raises(ValueError, match="step: got 0, expected 1 to n_steps = 10"):
        learning_rate(0, 10, 1.0)


# -- training ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["AdamW", "LAMB", "MERIT"])
def test_a_run_learns_and_records(optimizer):
    recipe = SMALL.replace(optimizer=optimizer, lr=3e-3 if optimizer == "AdamW" else 3e-2, tokens=12 * 16 * 30)
    records = list(train(recipe))
    assert [r.step for r in records] == list(range(1, 31))
    assert records[-1].tokens == recipe.tokens and records[-1].val_loss < records[0].val_loss - 0.3
    for record in (records[0], records[-1]):
        assert len(record.max_attention_logit) == 2 and len(record.max_attention_logit[0]) == 2
        assert record.largest_logit["softmax"] and sum(record.largest_logit["softmax"]) == pytest.approx(1, abs=1e-2)
        has_ratios = optimizer != "AdamW"
        assert ("blocks.0.attention.query.weight" in record.ratios) is has_ratios
    assert all(a.seconds <= b.seconds for a, b in itertools.pairwise(records))


def test_the_same_recipe_gives_the_same_numbers():
    torch.manual_seed(1)
    first = numbers(train(SMALL))
    torch.manual_seed(2)  # what was drawn before must not matter
    assert numbers(train(SMALL)) == first
    assert numbers(train(SMALL.replace(seed=1))) != first


def test_measuring_does_not_change_the_run():
    plain = list(train(SMALL.replace(probe_every=1000, eval_every=1000)))
    probed = list(train(SMALL.replace(probe_every=1, eval_every=1)))
    assert [r.train_loss for r in plain] == [r.train_loss for r in probed]
    assert all(r.max_attention_logit and r.val_loss for r in probed)
    assert [r.val_loss is not None for r in plain] == [True] + [False] * 6 + [True]


@pytest.mark.parametrize("micro", [1, 5, 12, 64])
def test_accumulated_gradients_are_those_of_the_whole_batch(micro):
    """5 leaves a last micro-batch of 2: each sequence must count the same."""
    recipe = SMALL.replace(micro_batch_size=micro)
    training = train(recipe)
    training.model.double()
    loss = training._accumulate_gradients(step=1)
    whole = build_model(recipe, training.corpus).double()
    x, y = text.batch(training.corpus.train, 16, 12, seed=recipe.seed, step=1)
    expected = whole(x, y)[1]
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-6)
    for ours, theirs in zip(training.model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-12)


def test_two_optimizers_start_alike_and_see_the_same_batches():
    a, b = train(SMALL.replace(optimizer="AdamW")), train(SMALL.replace(optimizer="MERIT"))
    for ours, theirs in zip(a.model.parameters(), b.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert next(a).train_loss == next(b).train_loss  # lockstep
    assert next(a).train_loss != next(b).train_loss  # the first step differed


def test_a_loss_that_is_not_finite_ends_the_run_as_diverged():
    training = train(SMALL)
    next(training)
    with torch.no_grad():
        training.model.final_norm.weight.fill_(math.nan)
    records = list(training)
    assert len(records) == 1 and records[0].diverged and records[0].step == 2
    assert not math.isfinite(records[0].train_loss)


def test_an_enormous_rate_ends_as_diverged_or_stays_finite_but_never_hides_it():
    records = list(train(SMALL.replace(optimizer="AdamW", lr=1e30, grad_clip=None)))
    assert records[-1].diverged and len(records) < SMALL.n_steps


def test_a_gradient_that_is_not_finite_leaves_the_step_out(monkeypatch):
    training = train(SMALL)
    before = [p.detach().clone() for p in training.model.parameters()]
    original = training._accumulate_gradients

    def poisoned(step):
        loss = original(step)
        next(training.model.parameters()).grad[0, 0] = math.inf
        return loss

    monkeypatch.setattr(training, "_accumulate_gradients", poisoned)
    record = next(training)
    assert record.grad_norm == math.inf and not record.diverged and record.ratios == {}
    assert all(torch.equal(a, b) for a, b in zip(before, training.model.parameters(), strict=True))


def test_close_ends_a_run():
    training = train(SMALL)
    assert next(training).step == 1 and training.last.step == 1 and len(training) == 8
    training.close()
    assert list(training) == []


def test_matrices_decay_and_vectors_do_not():
    groups = train(SMALL).optimizer.param_groups
    assert [g["weight_decay"] for g in groups] == [0.1, 0.0]
    assert all(p.ndim >= 2 for p in groups[0]["params"]) and all(p.ndim == 1 for p in groups[1]["params"])


def test_a_device_that_is_not_there_is_an_input_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="device: got 'cuda', but this machine has cpu"):
        train(SMALL.replace(device="cuda"))


def test_bf16_on_the_cpu_keeps_fp32_weights():
    training = train(SMALL.replace(precision="bf16", tokens=12 * 16))
    assert math.isfinite(next(training).train_loss)
    assert all(p.dtype == torch.float32 for p in training.model.parameters())


@pytest.mark.parametrize("step, due", [(1, True), (2, False), (3, True), (4, False), (6, True), (7, True)])
def test_is_due(step, due):
    assert is_due(step, every=3, n_steps=7) is due


def test_clipping_scales_to_the_largest_norm_and_only_measures_without_one():
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    assert clip_gradients([parameter], None) == 5.0 and parameter.grad.tolist() == [3.0, 4.0]
    assert clip_gradients([parameter], 10.0) == 5.0 and parameter.grad.tolist() == [3.0, 4.0]
    assert clip_gradients([parameter], 1.0) == 5.0
    torch.testing.assert_close(parameter.grad, torch.tensor([0.6, 0.8]))
    assert clip_gradients([torch.nn.Parameter(torch.zeros(1))], 1.0) == 0.0  # no gradient at all


def test_the_global_norm_is_float32_whatever_the_gradients_are():
    parameters = [torch.nn.Parameter(torch.zeros(4, dtype=d)) for d in (torch.float64, torch.float16, torch.float32)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 0.5)
    norm = clip_gradients(parameters, None)
    assert norm.item() == pytest.approx(3**0.5) and norm.dtype == torch.float32 and norm.ndim == 0


# -- attention probe ---------------------------------------------------------------------------------------------


def attention_by_hand(model, tokens):
    """Every causal logit and every row's entropy, in plain loops."""
    inputs = []
    hooks = [b.attention.register_forward_pre_hook(lambda m, a: inputs.append((m, a[0]))) for b in model.blocks]
    model(tokens)
    for hook in hooks:
        hook.remove()
    table = {}
    for layer, (module, x) in enumerate(inputs):
        q, k, _ = module.queries_keys_values(x)
        for head in range(q.shape[1]):
            logits, entropies = [], []
            for b in range(q.shape[0]):
                for i in range(q.shape[2]):
                    row = [float(q[b, head, i] @ k[b, head, j]) * module.scale for j in range(i + 1)]
                    weights = torch.tensor(row).softmax(0)
                    entropies.append(-sum(w * math.log(w) for w in weights.tolist() if w > 0))
                    logits += row
            table[layer, head] = (max(map(abs, logits)), max(logits), sum(entropies) / len(entropies))
    return table


@torch.no_grad()
@pytest.mark.parametrize("chunk", [1, 40, 1 << 22])
@pytest.mark.parametrize("changes", [{}, {"qk_norm": True}, {"fused_qkv": True}])
def test_attention_probe_equals_plain_loops(chunk, changes):
    recipe = SMALL.replace(model=BASE["model"] | {"block_size": 7} | changes)
    training = train(recipe)
    for block in training.model.blocks:  # larger weights, so that the logits are not all near 0
        for weight in block.attention.query_key_value_weights():
            weight.mul_(20)
    tokens, _ = training.held_out(3)
    probe = probes.attention(training.model, tokens, chunk=chunk)
    for (layer, head), (largest, signed, entropy) in attention_by_hand(training.model, tokens).items():
        assert probe.max_logit[layer, head] == pytest.approx(largest, rel=1e-4)
        assert probe.max_logit_signed[layer, head] == pytest.approx(signed, rel=1e-4)
        assert probe.entropy[layer, head] == pytest.approx(entropy, rel=1e-4)
    place = probe.largest
    assert place.logit == pytest.approx(probe.max_logit_signed.max().item())
    assert place.logit == pytest.approx(probe.max_logit_signed[place.layer, place.head].item())
    assert len(place.softmax) == place.query + 1 and place.key <= place.query
    assert max(place.softmax) == place.softmax[place.key]


class OneHead(torch.nn.Module):
    """An attention module of one head whose q and k are given."""

    scale = 1.0

    def __init__(self, q, k):
        super().__init__()
        self.q, self.k = torch.tensor(q), torch.tensor(k)

    def queries_keys_values(self, x):
        return self.q[None, None], self.k[None, None], None

    def forward(self, x):
        return x


class Given(torch.nn.Module):
    """A model of that one layer: the smallest thing the probe can look at."""

    def __init__(self, q, k):
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.ModuleDict({"attention": OneHead(q, k)})])
        self.blocks[0].attention = self.blocks[0]["attention"]

    def forward(self, tokens):
        return self.blocks[0].attention(tokens)


def probe_given(q, k):
    return probes.attention(Given(q, k), torch.zeros(1, len(q), dtype=torch.long))


def test_a_negative_logit_is_not_hidden_by_a_maximum_that_starts_at_zero():
    probe = probe_given([[1.0, 0.0]], [[-3.0, 0.0]])
    assert probe.max_logit_signed.item() == -3.0 and probe.max_logit.item() == 3.0
    assert probe.entropy.item() == 0.0


def test_a_maximum_is_not_carried_from_one_probe_to_the_next():
    for value in (9.0, 3.0):
        probe = probe_given([[value]], [[1.0]])
        assert probe.max_logit.item() == value


def test_the_future_does_not_count():
    q, k = [[1.0], [1.0]], [[1.0], [50.0]]  # position 0 must not see key 1
    probe = probe_given(q, k)
    assert probe.max_logit.item() == 50.0 and probe.largest.query == 1
    q = [[1.0], [0.1]]
    probe = probe_given(q, k)
    assert probe.max_logit.item() == 5.0


# -- ratio probe -------------------------------------------------------------------------------------------------

HYPER = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 0.0, "weight_decay": 0.0}


@pytest.mark.parametrize(
    "ratio, bound, shares",
    [  # shares won by row, column, bound
        ("element", True, (0.25, 0.5, 0.25)),
        ("element", False, (0.5, 0.5, 0.0)),
        ("row", True, (0.5, 0.0, 0.5)),
        ("row", False, (1.0, 0.0, 0.0)),
        ("column", True, (0.0, 0.5, 0.5)),
        ("column", False, (0.0, 1.0, 0.0)),
        ("weight", True, (0.0, 0.0, 1.0)),
        ("weight", False, (0.0, 0.0, 1.0)),
    ],
)
def test_ratio_shares_say_which_ratio_won(ratio, bound, shares):
    # b = 8 / 8 = 1, r = (1, 8), c = (1, 16), so that s = [[1, 16], [8, 16]] while no part is left out
    weight, direction = torch.tensor([[8.0, 1.0], [1.0, 8.0]]), torch.tensor([[8.0, 0.5], [1.0, 0.5]])
    b, r, c, s, guarded = optim.merit_ratios(weight, direction, ratio=ratio, bound=bound)
    step = optim.MeritStep(None, None, direction, b, r, c, s, guarded, torch.zeros(2, 2), None, None)
    summary = probes.ratios(step, ratio=ratio, bound=bound)
    assert (summary.won_row, summary.won_column, summary.won_bound) == shares and summary.guarded == 0.0


def test_ratio_probe_counts_guards_and_clips():
    weight = torch.tensor([[0.0, 0.0], [3.0, 3.0]])
    grad = torch.ones(2, 2)
    step = optim.merit_step(weight, grad, *torch.zeros(2, 2, 2), **HYPER | {"betas": (0.9, 0.999)})
    summary = probes.ratios(step)
    assert summary.guarded == 0.5 and summary.clipped == 1.0  # |u| is 3.16 where s = 1, and b |u| = 3
    assert summary.quantiles[0] <= summary.quantiles[2] <= summary.quantiles[4]


def test_ratio_probe_spreads_rows_columns_and_elements():
    # b = 4 / 4 = 1; r = 1/1, 4/4, 2/4, 3/2, 3/1; c = 4/4, 3/2; s is the largest of an element's three
    weight = torch.tensor([[1.0, 1.0], [4.0, 1.0], [2.0, 1.0], [1.0, 3.0], [3.0, 1.0]])
    direction = torch.tensor([[1.0, 1.0], [4.0, 1.0], [4.0, 1.0], [1.0, 2.0], [1.0, 1.0]])
    b, r, c, s, guarded = optim.merit_ratios(weight, direction)
    step = optim.MeritStep(None, None, direction, b, r, c, s, guarded, torch.zeros(5, 2), None, None)
    summary = probes.ratios(step)
    assert summary.weight_ratio == 1.0
    assert summary.row_quantiles == [0.5, 1.0, 1.0, 1.5, 3.0]
    assert summary.column_quantiles == [1.0, 1.0, 1.0, 1.5, 1.5]  # of two, the nearer one; half way the lower
    assert summary.quantiles == [1.0, 1.0, 1.5, 1.5, 3.0]  # of 1 1 1 1.5 1.5 1.5 1.5 1.5 3 3


def test_ratio_probe_of_lamb_adamw_and_vectors():
    tensors = torch.ones(2, 2), torch.ones(2, 2), torch.zeros(2, 2), torch.zeros(2, 2)
    lamb = probes.ratios(optim.lamb_step(*tensors, step=1, **HYPER))
    assert lamb.won_bound == 1.0 and lamb.quantiles == [lamb.weight_ratio] * 5
    assert lamb.row_quantiles is None and lamb.column_quantiles is None
    assert probes.ratios(optim.adamw_step(*tensors, step=1, **HYPER)) is None
    vector = [t[0] for t in tensors]
    vector = probes.ratios(optim.merit_step(*vector, **HYPER))
    assert vector.won_bound == 1.0 and vector.row_quantiles is None and vector.column_quantiles is None


def test_ratios_recorded_before_rows_and_columns_were_summarised_are_read():
    values = fakes.record(fakes.recipe("MERIT"), 60).to_dict()
    summary = values["ratios"]["token_embedding.weight"]
    assert "row_quantiles" not in summary and StepRecord.from_dict(values).ratios == values["ratios"]
    for good in (None, [0.1] * 5):
        summary["row_quantiles"] = good
        assert StepRecord.from_dict(values).ratios == values["ratios"]
    for bad in ([0.1] * 4, 0.1, ["0.1"] * 5):
        summary["row_quantiles"] = bad
        with pytest.raises(InputError, match="ratios: got"):
            StepRecord.from_dict(values)


# -- runs --------------------------------------------------------------------------------------------------------


def test_a_recorded_run_is_the_same_iterable(tmp_path):
    path = tmp_path / "deep" / "run.jsonl"
    training = train(SMALL)
    live = list(runs.record_to(path, training, keep_weights=True))
    run = runs.read(path)
    assert list(run) == live  # to the last digit, the clock included
    assert run.recipe == SMALL and run.complete and not run.diverged and run.name == "run"
    assert run.header["text"]["sha256"] == training.corpus.sha256 and run.header["versions"]["torch"]
    assert run.final_val_loss == live[-1].val_loss and run.peak_logit == max(r.peak_logit for r in live if r.peak_logit)
    assert not list(path.parent.glob("*.partial"))
    weights = run.weights()
    kept = weights["blocks.1.attention.key.weight"]
    torch.testing.assert_close(kept, training.model.blocks[1].attention.key.weight.detach(), rtol=1e-3, atol=1e-5)
    assert [r.name for r in runs.read_many(tmp_path / "deep")] == ["run"]


def test_a_diverged_run_is_kept_and_readable(tmp_path):
    recipe = SMALL.replace(optimizer="AdamW", lr=1e30, grad_clip=None)
    list(runs.record_to(tmp_path / "r.jsonl", train(recipe)))
    run = runs.read(tmp_path / "r.jsonl")
    assert run.diverged and run.complete and run.final_val_loss == math.inf and "diverged" in repr(run)


def test_a_run_broken_off_leaves_what_it_had(tmp_path):
    path = tmp_path / "r.jsonl"
    recording = runs.record_to(path, train(SMALL))
    next(recording), next(recording)
    recording.close()
    assert not path.exists()
    partial = path.with_name("r.jsonl.partial")
    assert [r.step for r in runs.read(partial)] == [1, 2] and not runs.read(partial).complete
    partial.write_bytes(partial.read_bytes()[:-20])  # the machine died in the middle of a line
    assert [r.step for r in runs.read(partial)] == [1]


@pytest.mark.parametrize(
    "content, says",
    [
        (b"", "is not a recorded run"),
        (b"hello", "is not a recorded run"),
        (b"\xff\xfe\x00", "is not text"),
        (b"[1]\n", "is not a recorded run"),
        (b'{"merit_lab_run": 99}\n', "its format is 99, this version reads 1"),
        (b'{"merit_lab_run": 1}\n', "is not a recorded run"),
    ],
)
def test_a_file_that_is_no_run_is_refused(tmp_path, content, says):
    (tmp_path / "x.jsonl").write_bytes(content)
    with pytest.raises(InputError, match=says):
        runs.read(tmp_path / "x.jsonl")


def test_a_damaged_line_is_named(tmp_path):
    path = tmp_path / "r.jsonl"
    list(runs.record_to(path, train(SMALL)))
    lines = path.read_bytes().splitlines(keepends=True)
    lines[3] = b'{"step": 3, "nonsense": 1}\n'
    path.write_bytes(b"".join(lines))
    with pytest.raises(InputError, match="line 4"):
        runs.read(path)
    with pytest.raises(InputError, match="cannot read .*gone.jsonl"):
        runs.read(tmp_path / "gone.jsonl")
    with pytest.raises(InputError, match="no weights were kept"):
        runs.Run({"recipe": SMALL.to_dict()}, []).weights()
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="no .jsonl file in"):
        runs.read_many(tmp_path / "empty")
