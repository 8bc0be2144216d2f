"""GPT-2: sizes, agreement with transformers and with a plain loop, causality, initialisation, errors."""

import copy
import json
import math
import pickle
from dataclasses import asdict

import numpy as np
import pytest
import torch

from merit_lab.errors import InputError
from merit_lab.models import GPT2, SIZES, GPT2Config, fuse_qkv, load_transformers_weights, split_qkv

SMALL = dict(n_layer=3, n_head=4, n_embd=32, block_size=16, vocab_size=50)


def small(seed=0, dtype=torch.float32, spread=False, **overrides):
    """A small model; spread=True also moves biases and gains off 0 and 1, so that none can be forgotten."""
    torch.manual_seed(seed)
    model = GPT2(GPT2Config(**{**SMALL, **overrides})).to(dtype)
    if spread:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def random_tokens(batch=2, length=16, vocab_size=50, seed=1):
    return torch.randint(vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


# --- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, count", [("gpt2", 124_439_808), ("gpt2-medium", 354_823_168), ("gpt2-large", 774_030_080)]
)
@pytest.mark.parametrize("fused_qkv", [False, True])
def test_gpt2s_own_parameter_counts(name, count, fused_qkv):
    with torch.device("meta"):
        model = GPT2(GPT2Config.named(name, fused_qkv=fused_qkv))
    assert model.count_parameters() == count


@pytest.mark.parametrize(
    "name, millions", [("nano", (0.1, 0.12)), ("micro", (0.34, 0.37)), ("mini", (10, 11)), ("base", (29, 33))]
)
def test_small_sizes(name, millions):
    with torch.device("meta"):
        count = GPT2(GPT2Config.named(name)).count_parameters()
    assert millions[0] <= count / 1e6 <= millions[1]


def test_every_size_is_tested():
    assert list(SIZES) == ["nano", "micro", "mini", "base", "gpt2", "gpt2-medium", "gpt2-large"]


def test_defaults_are_the_smallest_gpt2():
    assert GPT2Config() == GPT2Config.named("gpt2")


def test_named_takes_overrides():
    config = GPT2Config.named("nano", vocab_size=99, qk_norm=True)
    assert (config.n_layer, config.n_head, config.n_embd) == (2, 2, 64)
    assert (config.vocab_size, config.qk_norm, config.d_head) == (99, True, 32)


def test_numpy_sizes_become_ints_that_json_takes():
    config = GPT2Config.named("nano", vocab_size=np.int64(65))
    assert json.loads(json.dumps(asdict(config)))["vocab_size"] == 65


def test_untied_head_counts_twice():
    tied, untied = small(), small(tie_weights=False)
    assert untied.count_parameters() - tied.count_parameters() == 50 * 32


def test_without_biases():
    model = small(bias=False)
    assert not [name for name, _ in model.named_parameters() if name.endswith("bias")]
    assert model(random_tokens())[0].isfinite().all()


# --- the same numbers as others -------------------------------------------------------------------


def transformers_model(seed=0, **overrides):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    sizes = dict(n_layer=3, n_head=4, n_embd=32, n_positions=16, vocab_size=50, initializer_range=0.2)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**sizes, **overrides})).eval()
    with torch.no_grad():  # its biases start at 0 and its gains at 1, where a mix-up would not show
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.float64, 1e-10)])
@pytest.mark.parametrize("fused_qkv", [False, True])
def test_logits_and_loss_agree_with_transformers(dtype, tolerance, fused_qkv):
    theirs = transformers_model().to(dtype)
    ours = small(dtype=dtype, fused_qkv=fused_qkv)
    load_transformers_weights(ours, theirs.state_dict())
    tokens = random_tokens()
    with torch.no_grad():
        expected = theirs(tokens, labels=tokens)
        logits, loss = ours(tokens[:, :-1], targets=tokens[:, 1:])
    assert expected.logits.std() > 0.5
    torch.testing.assert_close(logits, expected.logits[:, :-1], atol=tolerance, rtol=0)
    assert loss.dtype == dtype
    torch.testing.assert_close(loss.float(), expected.loss, atol=1e-5, rtol=1e-5)  # theirs is float32 always
    chosen = logits.log_softmax(dim=-1).gather(-1, tokens[:, 1:, None])
    torch.testing.assert_close(loss, -chosen.mean(), atol=tolerance, rtol=0)


def test_checkpoint_files_without_prefix_head_and_with_masks_load_too():
    theirs = transformers_model()
    state = {name.removeprefix("transformer."): t for name, t in theirs.state_dict().items()}
    del state["lm_head.weight"]
    for layer in range(3):
        state[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 16, 16).tril()
        state[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    for tie_weights in (True, False):
        ours = small(tie_weights=tie_weights)
        load_transformers_weights(ours, state)
        with torch.no_grad():
            torch.testing.assert_close(
                ours(random_tokens())[0], theirs(random_tokens()).logits, atol=1e-4, rtol=0
            )


def test_untied_checkpoint_needs_an_untied_model():
    theirs = transformers_model(tie_word_embeddings=False)
    with pytest.raises(InputError, match="tie_weights=False"):
        load_transformers_weights(small(), theirs.state_dict())
    ours = small(tie_weights=False)
    load_transformers_weights(ours, theirs.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(
            ours(random_tokens())[0], theirs(random_tokens()).logits, atol=1e-4, rtol=0
        )


@pytest.mark.parametrize(
    "overrides, message",
    [
        (dict(n_layer=2), r"no place for: h\.2\.attn\.c_attn\.bias"),
        (dict(n_layer=4), r"lacks tensors: h\.3\.attn\.c_attn\.bias"),
        (dict(bias=False), r"no place for: blocks\.0\.attention\.key\.bias"),
        (dict(qk_norm=True), r"lacks tensors: blocks\.0\.attention\.key_norm\.weight"),
        (dict(block_size=8), r"another shape: position_embedding\.weight \(16, 32\), here \(8, 32\)"),
        (dict(n_embd=48), r"another shape: token_embedding\.weight \(50, 32\), here \(50, 48\); .* more\."),
    ],
)
def test_foreign_checkpoints_are_refused_and_change_nothing(overrides, message):
    model = small(**overrides)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(InputError, match=message):
        load_transformers_weights(model, transformers_model().state_dict())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("fused_qkv", [False, True])
def test_attention_against_a_plain_loop(fused_qkv, qk_norm):
    heads, d_head, width = 2, 3, 6
    model = small(
        n_layer=1,
        n_head=heads,
        n_embd=width,
        dtype=torch.float64,
        spread=True,
        fused_qkv=fused_qkv,
        qk_norm=qk_norm,
    )
    attention = model.blocks[0].attention
    inputs = torch.randn(2, 5, width, dtype=torch.float64)
    with torch.no_grad():
        actual = attention(inputs)

    weights = {name: tensor.tolist() for name, tensor in split_qkv(model.state_dict()).items()}

    def linear(part, vector):
        weight, bias = (weights[f"blocks.0.attention.{part}.{kind}"] for kind in ("weight", "bias"))
        return [bias[i] + sum(weight[i][j] * vector[j] for j in range(width)) for i in range(width)]

    def one_head(part, vector, head):
        values = linear(part, vector)[head * d_head : (head + 1) * d_head]
        if qk_norm and part != "value":
            gain = weights[f"blocks.0.attention.{part}_norm.weight"]
            root = math.sqrt(sum(value**2 for value in values) / d_head + 1e-5)
            values = [value / root * gain[i] for i, value in enumerate(values)]
        return values

    for b, sequence in enumerate(inputs.tolist()):
        for i in range(len(sequence)):
            mixed = []
            for head in range(heads):
                q = one_head("query", sequence[i], head)
                logits = [
                    sum(x * y for x, y in zip(q, one_head("key", sequence[j], head), strict=True))
                    / math.sqrt(d_head)
                    for j in range(i + 1)
                ]
                total = sum(math.exp(logit) for logit in logits)
                shares = [math.exp(logit) / total for logit in logits]
                values = [one_head("value", sequence[j], head) for j in range(i + 1)]
                mixed += [
                    sum(share * value[d] for share, value in zip(shares, values, strict=True))
                    for d in range(d_head)
                ]
            expected = torch.tensor(linear("project", mixed), dtype=torch.float64)
            torch.testing.assert_close(actual[b, i], expected, atol=1e-12, rtol=0)


def test_queries_and_keys_give_the_logits_that_attention_uses():
    attention = small(dtype=torch.float64, spread=True).blocks[1].attention
    x = torch.randn(2, 7, 32, dtype=torch.float64)
    with torch.no_grad():
        q, k, v = attention.queries_keys_values(x)
        assert q.shape == k.shape == v.shape == (2, 4, 7, 8)
        assert attention.scale == 1 / math.sqrt(8)
        z = q @ k.transpose(-2, -1) * attention.scale
        z = z.masked_fill(torch.ones(7, 7, dtype=torch.bool).triu(1), -math.inf)
        mixed = (z.softmax(dim=-1) @ v).transpose(1, 2).reshape(2, 7, 32)
        torch.testing.assert_close(attention(x), attention.project(mixed), atol=1e-12, rtol=0)


# --- what the model must be ----------------------------------------------------------------------


@pytest.mark.parametrize("qk_norm", [False, True])
def test_a_later_token_changes_no_earlier_logit(qk_norm):
    model = small(dtype=torch.float64, spread=True, qk_norm=qk_norm)
    tokens = random_tokens()
    for position in (1, 9, 15):
        changed = tokens.clone()
        changed[:, position] = (changed[:, position] + 1) % 50
        with torch.no_grad():
            difference = (model(changed)[0] - model(tokens)[0]).abs().amax(dim=(0, 2))  # (T,)
        assert difference[:position].max() < 1e-12
        assert difference[position:].min() > 1e-3


def test_head_and_embedding_are_one_tensor_with_both_gradients():
    model = small(dtype=torch.float64)
    assert model.head.weight is model.token_embedding.weight
    tokens = random_tokens()
    model(tokens[:, :-1], tokens[:, 1:])[1].backward()
    untied = small(dtype=torch.float64, tie_weights=False)
    untied.load_state_dict(model.state_dict())
    untied(tokens[:, :-1], tokens[:, 1:])[1].backward()
    torch.testing.assert_close(
        model.head.weight.grad,
        untied.head.weight.grad + untied.token_embedding.weight.grad,
        atol=1e-14,
        rtol=0,
    )


def test_every_parameter_gets_a_gradient():
    model = small(qk_norm=True)
    tokens = random_tokens()
    model(tokens[:, :-1], tokens[:, 1:])[1].backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


@pytest.mark.parametrize("fused_qkv", [False, True])
def test_initialisation(fused_qkv):
    torch.manual_seed(0)
    model = GPT2(
        GPT2Config(
            n_layer=8,
            n_head=4,
            n_embd=128,
            block_size=128,
            vocab_size=200,
            fused_qkv=fused_qkv,
            qk_norm=True,
            tie_weights=False,
        )
    )
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert (parameter == 0).all(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        else:
            std = 0.02 / math.sqrt(2 * 8) if "project" in name else 0.02
            assert abs(parameter.mean()) < 4 * std / math.sqrt(parameter.numel()), name
            assert parameter.std().item() == pytest.approx(std, rel=4 / math.sqrt(2 * parameter.numel())), (
                name
            )


def test_initial_loss_is_that_of_guessing():
    model = GPT2(GPT2Config.named("nano"))
    tokens = random_tokens(4, 64, 78)
    assert model(tokens[:, :-1], tokens[:, 1:])[1].item() == pytest.approx(math.log(78), abs=0.1)


def test_the_seed_decides_the_start_and_initialise_draws_anew():
    first, again, other = small(seed=3), small(seed=3), small(seed=4)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.blocks[0].mlp.expand.weight, other.blocks[0].mlp.expand.weight)
    torch.manual_seed(3)
    other.initialise()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))


def test_fused_and_separate_start_and_compute_the_same():
    # An odd width: torch's vectorised normal draws blocks of 16, and three draws are not one long draw.
    sizes = dict(n_head=3, n_embd=21, dtype=torch.float64)
    apart, fused = small(**sizes), small(**sizes, fused_qkv=True)
    apart_state, fused_state = apart.state_dict(), fused.state_dict()
    assert fuse_qkv(apart_state).keys() == fused_state.keys()
    assert split_qkv(fused_state).keys() == apart_state.keys()
    assert all(torch.equal(tensor, fused_state[name]) for name, tensor in fuse_qkv(apart_state).items())
    assert all(torch.equal(tensor, apart_state[name]) for name, tensor in split_qkv(fused_state).items())
    assert list(fused_state["blocks.0.attention.qkv.weight"].shape) == [63, 21]
    for a, b in zip(
        apart.blocks[1].attention.query_key_value_weights(),
        fused.blocks[1].attention.query_key_value_weights(),
        strict=True,
    ):
        assert torch.equal(a, b)

    moved = small(**sizes, spread=True)
    fused.load_state_dict(fuse_qkv(moved.state_dict()))
    tokens = random_tokens()
    with torch.no_grad():
        torch.testing.assert_close(fused(tokens)[0], moved(tokens)[0], atol=1e-12, rtol=0)


@pytest.mark.parametrize("fused_qkv", [False, True])
def test_qk_norm_bounds_the_attention_logits(fused_qkv):
    for qk_norm in (False, True):
        attention = small(qk_norm=qk_norm, fused_qkv=fused_qkv, dtype=torch.float64).blocks[0].attention
        with torch.no_grad():
            for weight in attention.query_key_value_weights():
                weight.mul_(1e3)
            q, k, _ = attention.queries_keys_values(torch.randn(2, 9, 32, dtype=torch.float64))
        largest = (q @ k.transpose(-2, -1) * attention.scale).abs().max().item()
        if qk_norm:
            assert 1 < largest <= math.sqrt(8)
        else:
            assert largest > 1e3


def test_qk_norm_reaches_the_output():
    plain, normed = small(), small(qk_norm=True)
    assert normed.count_parameters() - plain.count_parameters() == 3 * 2 * 8
    normed.load_state_dict({**normed.state_dict(), **plain.state_dict()})
    with torch.no_grad():
        assert (plain(random_tokens())[0] - normed(random_tokens())[0]).abs().max() > 1e-4


def test_targets_of_minus_100_do_not_count():
    model = small()
    tokens = random_tokens(1, 8)
    targets = torch.full_like(tokens, -100)
    targets[0, 2] = 7
    with torch.no_grad():
        logits, loss = model(tokens, targets)
    torch.testing.assert_close(loss, -logits[0, 2].log_softmax(dim=-1)[7])


@pytest.mark.filterwarnings("error")
def test_runs_under_bf16_autocast():
    model = small(qk_norm=True, spread=True)
    tokens = random_tokens()
    with torch.no_grad():
        exact, exact_loss = model(tokens, tokens)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits, loss = model(tokens, tokens)
    assert logits.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    assert not torch.equal(logits.float(), exact)
    torch.testing.assert_close(logits.float(), exact, atol=0.1, rtol=0.1)
    torch.testing.assert_close(loss, exact_loss, atol=0.05, rtol=0)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_compute_the_same_and_stay_tied(duplicate):
    model = small(qk_norm=True, spread=True)
    twin = duplicate(model)
    assert twin.head.weight is twin.token_embedding.weight
    assert twin.head.weight is not model.head.weight
    assert twin.config == model.config
    with torch.no_grad():
        assert torch.equal(twin(random_tokens())[0], model(random_tokens())[0])


# --- generate ------------------------------------------------------------------------------------


def test_greedy_takes_the_likeliest_and_crops_to_block_size():
    model = small(spread=True, tie_weights=False)  # a tied model this small repeats one token
    prompt = random_tokens(2, 3)
    written = model.generate(prompt, 20, temperature=0)
    assert written.shape == (2, 23)
    assert written[:, 16:].unique().numel() > 4
    assert written.dtype == torch.int64
    expected = prompt
    for _ in range(20):
        with torch.no_grad():
            logits, _ = model(expected[:, -16:])
        expected = torch.cat([expected, logits[:, -1:].argmax(dim=-1)], dim=1)
    assert torch.equal(written, expected)
    assert torch.equal(model.generate(prompt, 20, top_k=1), expected)
    assert torch.equal(model.generate(prompt, 20, temperature=1e-30), expected)
    assert torch.equal(model.generate(prompt, 0), prompt)


def test_a_prompt_longer_than_block_size_is_cropped():
    model = small(spread=True, tie_weights=False)
    prompt = random_tokens(1, 40)
    written = model.generate(prompt, 4, temperature=0)
    assert torch.equal(written[:, :40], prompt)
    assert not torch.equal(written[:, 40:], model.generate(prompt[:, :16], 4, temperature=0)[:, 16:])
    assert torch.equal(written[:, 40:], model.generate(prompt[:, -16:], 4, temperature=0)[:, 16:])


def test_a_seeded_generator_repeats_itself_and_leaves_torchs_own_alone():
    model = small()

    def draw(seed):
        return model.generate(random_tokens(), 12, generator=torch.Generator().manual_seed(seed))

    state = torch.get_rng_state()
    assert torch.equal(draw(5), draw(5))
    assert not torch.equal(draw(5), draw(6))
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(5)
    first = model.generate(random_tokens(), 12)
    torch.manual_seed(5)
    assert torch.equal(first, model.generate(random_tokens(), 12))


def test_draws_follow_the_softmax_temperature_and_top_k():
    model = small(spread=True)
    prompt = random_tokens(1, 4).expand(5_000, 4)
    with torch.no_grad():
        last = model(prompt[:1])[0][0, -1]
    generator = torch.Generator().manual_seed(0)
    for temperature, top_k in ((1.0, None), (0.5, None), (2.0, 3), (1.0, 500)):
        drawn = model.generate(prompt, 1, temperature=temperature, top_k=top_k, generator=generator)[:, -1]
        shares = torch.bincount(drawn, minlength=50) / len(drawn)
        likeliest = last.argsort(descending=True)[: top_k or 50]
        expected = torch.zeros(50)
        expected[likeliest] = (last[likeliest] / temperature).softmax(dim=0)
        assert (shares - expected).abs().max() < 0.035  # five standard deviations of a share
        assert (shares[expected == 0] == 0).all()


def test_generate_builds_no_graph():
    model = small()
    model.generate(random_tokens(), 2)
    assert model(random_tokens())[0].requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(n_layer=0), r"n_layer=0: n_layer must be a whole number, 1 or more"),
        (dict(n_embd=-4), r"n_embd=-4: n_embd must be"),
        (dict(n_head="4"), r"n_head='4': n_head must be"),
        (dict(block_size=8.0), r"block_size=8\.0: block_size must be"),
        (dict(block_size=None), r"block_size=None: block_size must be"),
        (dict(vocab_size=True), r"vocab_size=True: vocab_size must be"),
        (dict(qk_norm="yes"), r"qk_norm='yes': qk_norm must be True or False"),
        (dict(fused_qkv=1), r"fused_qkv=1: fused_qkv must be"),
        (dict(tie_weights=None), r"tie_weights=None: tie_weights must be"),
        (dict(bias=0), r"bias=0: bias must be"),
        (dict(n_embd=70, n_head=4), r"n_embd=70, n_head=4: .*multiple of n_head \(for example 68\)"),
        (dict(n_embd=3, n_head=4), r"n_embd=3, n_head=4: .*multiple of n_head \(for example 4\)"),
    ],
)
def test_bad_configurations(arguments, message):
    with pytest.raises(InputError, match=message):
        GPT2Config(**arguments)


@pytest.mark.parametrize("name", ["gpt3", "", None, ["nano"]])
def test_unknown_names_list_the_known_ones(name):
    with pytest.raises(
        InputError, match="choose one of nano, micro, mini, base, gpt2, gpt2-medium, gpt2-large"
    ):
        GPT2Config.named(name)


def test_unknown_fields_list_the_known_ones():
    with pytest.raises(
        InputError, match=r"dropout=0\.1: GPT-2 has no dropout; its fields are block_size, vocab_size"
    ):
        GPT2Config.named("nano", dropout=0.1)


def test_the_model_wants_a_config():
    with pytest.raises(InputError, match=r"GPT2\('nano'\): expected a GPT2Config"):
        GPT2("nano")


@pytest.mark.parametrize(
    "tokens, message",
    [
        ([[1, 2]], r"tokens is a list: expected a torch tensor"),
        (torch.zeros(2, 4), r"tokens of dtype torch\.float32: expected torch\.int64; tokens\.long\(\)"),
        (torch.zeros(2, 4, dtype=torch.int32), r"tokens of dtype torch\.int32"),
        (torch.zeros(4, dtype=torch.int64), r"tokens of shape \(4,\): expected \(B, T\).*tokens\[None\]"),
        (torch.zeros(2, 0, dtype=torch.int64), r"tokens of shape \(2, 0\): expected \(B, T\)"),
    ],
)
def test_bad_tokens(tokens, message):
    model = small()
    with pytest.raises(InputError, match=message):
        model(tokens)
    with pytest.raises(InputError, match=message):
        model.generate(tokens, 3)


def test_sequences_longer_than_block_size():
    with pytest.raises(
        InputError, match=r"shape \(2, 17\): a sequence of 17 tokens is longer than block_size=16"
    ):
        small()(random_tokens(2, 17))


@pytest.mark.parametrize(
    "targets, message",
    [
        (torch.zeros(2, 15, dtype=torch.int64), r"targets of shape \(2, 15\) for tokens of shape \(2, 16\)"),
        (torch.zeros(2, 16), r"targets of dtype torch\.float32"),
    ],
)
def test_bad_targets(targets, message):
    with pytest.raises(InputError, match=message):
        small()(random_tokens(), targets)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(max_new_tokens=-1), r"max_new_tokens=-1: must be a whole number, 0 or more"),
        (dict(max_new_tokens=2.5), r"max_new_tokens=2\.5"),
        (dict(temperature=-0.1), r"temperature=-0\.1: must be a finite number, 0"),
        (dict(temperature=math.nan), r"temperature=nan"),
        (dict(temperature=math.inf), r"temperature=inf"),
        (dict(temperature="hot"), r"temperature='hot'"),
        (dict(top_k=0), r"top_k=0: must be a whole number, 1 or more, or None"),
        (dict(top_k=1.5), r"top_k=1\.5"),
        (dict(tokens=torch.tensor([[3, 50]])), r"the id 50: this model's vocabulary has the ids 0 to 49"),
        (dict(tokens=torch.tensor([[-1, 3]])), r"the id -1"),
    ],
)
def test_bad_arguments_of_generate(arguments, message):
    with pytest.raises(InputError, match=message):
        small().generate(**{"tokens": random_tokens(), "max_new_tokens": 1, **arguments})


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_diverged_model_writes_nothing(temperature):
    model = small()
    with torch.no_grad():
        model.blocks[1].mlp.expand.weight[3, 4] = math.nan
    with pytest.raises(InputError, match=r"logits are not finite.*diverged"):
        model.generate(random_tokens(), 1, temperature=temperature)
