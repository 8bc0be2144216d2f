"""The exercise of notebook 05: the solution passes, each typical wrong answer is told what is wrong with it."""

import math

import pytest
import torch
from lessons import solution_of

from merit_lab import GPT2, GPT2Config
from merit_lab.exercises import check_max_logit
from merit_lab.exercises.attention import MISTAKES, right, verdict
from merit_lab.probes import attention


def test_the_solution_in_the_notebook_is_right(capsys):
    check_max_logit(solution_of("05_attention_logits", "max_logit"))
    assert capsys.readouterr().out == "right\n"


def test_untouched_it_is_your_turn(capsys):
    def untouched(q, k):
        raise NotImplementedError("your turn")

    check_max_logit(untouched)
    assert capsys.readouterr().out.startswith("your turn")


@pytest.mark.parametrize("name", MISTAKES)
def test_each_typical_mistake_is_named(name):
    assert verdict(MISTAKES[name].function) == f"not yet: {MISTAKES[name].says}"


def test_the_messages_differ():
    assert len({mistake.says for mistake in MISTAKES.values()}) == len(MISTAKES) >= 4


def by_loop(q, k, start, scale=True):
    """The largest logit as a loop with a running maximum."""
    top = start
    for i in range(len(q)):
        for j in range(i + 1):
            top = max(top, (q[i] @ k[j]).item() / (math.sqrt(q.shape[1]) if scale else 1.0))
    return top


def masked(q, k):
    z = q @ k.mT / math.sqrt(q.shape[1])
    return z.masked_fill(torch.ones_like(z).triu(1).bool(), -math.inf)


# As a reader would write them, not as attention.py has them.
@pytest.mark.parametrize(
    "answer, says",
    [
        (lambda q, k: (q @ k.mT / math.sqrt(q.shape[1])).max(), "causal mask is missing"),
        (lambda q, k: by_loop(q, k, -math.inf, scale=False), "scale is missing"),
        (lambda q, k: by_loop(q, k, 0.0), "starts at 0"),
        (lambda q, k: masked(q, k).softmax(-1).max(), "probabilities"),
        (lambda q, k: (q @ k.mT / math.sqrt(q.shape[1])).tril().max(), "filled with 0"),
        (lambda q, k: masked(q, k)[torch.ones(len(q), len(q)).tril().bool()].abs().max(), "absolute value"),
    ],
    ids=["mask forgotten", "scale forgotten", "maximum started at 0", "probabilities", "tril", "absolute"],
)
def test_the_mistakes_of_the_syllabus(answer, says):
    assert says in verdict(lambda q, k: answer(q, k))


@pytest.mark.parametrize(
    "answer, says",
    [
        (lambda q, k: right(q, k) + 1, "not yet: for q="),
        (lambda q, k: masked(q, k).amax(-1), "expected"),
        (lambda q, k: masked(q, k).min(), "not yet"),
        (lambda q, k: None, "returned None"),
        (lambda q, k: q @ torch.zeros(99, dtype=q.dtype), "raised RuntimeError"),
    ],
)
def test_any_other_wrong_answer_is_refused(answer, says):
    assert says in verdict(answer)


def test_a_running_maximum_from_minus_infinity_is_right_too():
    assert verdict(lambda q, k: by_loop(q, k, -math.inf)) == "right"


def test_the_right_answer_is_the_probes():
    torch.manual_seed(0)
    model = GPT2(GPT2Config.named("nano"))
    tokens = torch.randint(78, (1, 20))
    x = model.token_embedding(tokens) + model.position_embedding(torch.arange(20))
    for block, expected in zip(model.blocks, attention(model, tokens).max_logit_signed, strict=True):
        q, k, _ = block.attention.queries_keys_values(block.norm1(x))
        found = [right(q[0, head], k[0, head]).item() for head in range(block.attention.n_head)]
        assert found == pytest.approx(expected.tolist(), rel=1e-4)
        x = block(x)
