"""The exercise of notebook 04: the solution passes, each typical wrong answer is told what is wrong with it."""

import math

import pytest
import torch
from lessons import solution_of

from merit_lab import GPT2, GPT2Config
from merit_lab.exercises import check_logit_bound
from merit_lab.exercises.bounds import MISTAKES, inputs, right, verdict
from merit_lab.probes import logit_bound


def test_the_solution_in_the_notebook_is_right(capsys):
    check_logit_bound(solution_of("04_why_max_norm", "logit_bound"))
    assert capsys.readouterr().out == "right\n"


def test_untouched_it_is_your_turn(capsys):
    def untouched(w_q, w_k, x, n_head):
        raise NotImplementedError("your turn")

    check_logit_bound(untouched)
    assert capsys.readouterr().out.startswith("your turn")


@pytest.mark.parametrize("name", MISTAKES)
def test_each_typical_mistake_is_named(name):
    assert verdict(MISTAKES[name].function) == f"not yet: {MISTAKES[name].says}"


def test_the_messages_differ():
    assert len({mistake.says for mistake in MISTAKES.values()}) == len(MISTAKES) >= 5


def largest(w):
    return w.abs().max()


def lengths(x):
    return x.abs().sum(dim=1)


# As a reader would write them, not as bounds.py has them.
@pytest.mark.parametrize(
    "answer, says",
    [
        (lambda q, k, x, d: d**0.5 * largest(q) * largest(k) * x.norm(dim=1).max() ** 2, "C_X is an ℓ2 norm"),
        (lambda q, k, x, d: d**0.5 * q.norm() * k.norm() * lengths(x).max() ** 2, "weights are ℓ2"),
        (lambda q, k, x, d: largest(q) * largest(k) * lengths(x).max() ** 2, "√d is missing"),
        (lambda q, k, x, d: len(q) ** 0.5 * largest(q) * largest(k) * lengths(x).max() ** 2, "heads are ignored"),
        (lambda q, k, x, d: d**0.5 * largest(q) * largest(k) * lengths(x).mean() ** 2, "mean over the tokens"),
    ],
    ids=["1-norm and 2-norm confused", "2-norm of the weights", "√d forgotten", "heads ignored", "C_X as a mean"],
)
def test_the_mistakes_of_the_syllabus(answer, says):
    assert says in verdict(lambda w_q, w_k, x, n_head: answer(w_q, w_k, x, len(w_q) / n_head))


@pytest.mark.parametrize(
    "answer, says",
    [
        (lambda w_q, w_k, x, n_head: 2 * right(w_q, w_k, x, n_head), "not yet: for w_q="),
        (lambda w_q, w_k, x, n_head: right(w_q, w_k, x, n_head).expand(n_head), "expected"),
        (lambda w_q, w_k, x, n_head: torch.tensor(0.0), "expected"),
        (lambda w_q, w_k, x, n_head: None, "returned None"),
        (lambda w_q, w_k, x, n_head: w_q @ torch.zeros(99), "raised RuntimeError"),
    ],
)
def test_any_other_wrong_answer_is_refused(answer, says):
    assert says in verdict(answer)


def test_the_right_answer_is_the_probes_bound():
    torch.manual_seed(0)
    model = GPT2(GPT2Config.named("nano", bias=False)).double()
    tokens = torch.randint(78, (3, 20))
    x = model.token_embedding(tokens) + model.position_embedding(torch.arange(20))
    for block, expected in zip(model.blocks, logit_bound(model, tokens).bound, strict=True):
        attention = block.attention
        found = right(attention.query.weight, attention.key.weight, block.norm1(x), attention.n_head)
        assert found.item() == pytest.approx(expected.item(), rel=1e-9)
        x = block(x)


def test_the_right_answer_bounds_every_logit_of_its_inputs():
    for call in inputs():
        q, k = call["x"] @ call["w_q"].mT, call["x"] @ call["w_k"].mT  # (T, n_embd)
        d = q.shape[1] // call["n_head"]
        logits = [(a @ b.mT / math.sqrt(d)).abs().max() for a, b in zip(q.split(d, 1), k.split(d, 1), strict=True)]
        assert 0 < max(logits) <= right(**call)
