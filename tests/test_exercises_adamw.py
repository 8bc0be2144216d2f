"""The exercise of notebook 01: the solution passes, each typical wrong answer is told what is wrong with it."""

import pytest
import torch
from lessons import exercise_cell, solution_of, solution_text

from merit_lab.exercises import check_adamw
from merit_lab.exercises.adamw import MISTAKES, right, verdict

NOTEBOOK = "01_adamw_by_hand"
TYPICAL = ("no bias correction", "ε under the root", "decay inside the gradient", "t from 0")
# How a reader would come by each mistake: lines of the notebook's solution, and what stands there instead.
SLIPS = {
    "no bias correction": {"m_hat = m / (1 - beta1**t)": "m_hat = m", "v_hat = v / (1 - beta2**t)": "v_hat = v"},
    "ε under the root": {"(v_hat.sqrt() + eps)": "(v_hat + eps).sqrt()"},
    "decay inside the gradient": {
        "m = beta1 * m": "g = g + weight_decay * w\n        m = beta1 * m",
        "(d + weight_decay * w)": "d",
    },
    "t from 0": {"enumerate(grads, start=1)": "enumerate(grads)"},
    "no decay": {"(d + weight_decay * w)": "d"},
    "no root": {"(v_hat.sqrt() + eps)": "(v_hat + eps)"},
    "uphill": {"w = w - lr": "w = w + lr"},
    "moments reset": {"m = beta1 * m": "m, v = 0 * w, 0 * w\n        m = beta1 * m"},
}


def slipped(name):
    text = solution_text(NOTEBOOK, "my_adamw")
    for line, instead in SLIPS[name].items():
        assert line in text
        text = text.replace(line, instead)
    names = {"torch": torch}
    exec(text, names)
    return names["my_adamw"]


def test_the_solution_in_the_notebook_is_right(capsys):
    check_adamw(solution_of(NOTEBOOK, "my_adamw"))
    assert capsys.readouterr().out == "right\n"


def test_untouched_it_is_your_turn(capsys):
    exec(exercise_cell(NOTEBOOK), {"check_adamw": check_adamw})
    assert capsys.readouterr().out.startswith("your turn")


@pytest.mark.parametrize("name", MISTAKES)
def test_each_typical_mistake_is_named(name):
    assert verdict(slipped(name)) == verdict(MISTAKES[name].function) == f"not yet: {MISTAKES[name].says}"


def test_the_messages_differ():
    assert set(TYPICAL) <= set(MISTAKES)
    assert len({mistake.says for mistake in MISTAKES.values()}) == len(MISTAKES)


def test_t_from_0_in_plain_numbers_is_named_too():
    def answer(w, grads, lr, beta1, beta2, eps, weight_decay):
        return w - sum(lr / (1 - beta1**t) * g for t, g in enumerate(grads))

    assert verdict(answer) == f"not yet: {MISTAKES['t from 0'].says}"


def test_torch_passes():
    def by_torch(w, grads, lr, beta1, beta2, eps, weight_decay):
        p = torch.nn.Parameter(w)
        optimizer = torch.optim.AdamW([p], lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay)
        for p.grad in grads:
            optimizer.step()
        return p.detach()

    assert verdict(by_torch) == "right"


@pytest.mark.parametrize(
    "answer, says",
    [
        (lambda **a: right(**a) * 1.001, "expected"),
        (lambda **a: right(**a)[0], "expected"),
        (lambda **a: right(**a | {"beta1": a["beta2"], "beta2": a["beta1"]}), "expected"),
        (lambda w, **_: w, "expected"),
        (lambda **_: None, "returned None"),
        (lambda w, **_: w @ w, "raised RuntimeError"),
    ],
)
def test_any_other_wrong_answer_is_refused(answer, says):
    assert verdict(answer).startswith("not yet") and says in verdict(answer)
