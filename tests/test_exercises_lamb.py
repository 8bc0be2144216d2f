"""The exercise of notebook 02: the solution passes, each typical wrong answer is told what is wrong with it."""

import pytest
import torch
from lessons import exercise_cell, solution_of, solution_text

from merit_lab.exercises import check_trust_ratio
from merit_lab.exercises.lamb import MISTAKES, right, verdict

NOTEBOOK = "02_lamb"
TYPICAL = ("norm of the gradient", "no guard", "bound on the ratio", "decay left out")
GUARD = "    if weight_norm == 0 or direction_norm == 0:  # the guard\n        return torch.ones_like(weight_norm)\n"
# How a reader would come by each mistake: lines of the notebook's solution, and what stands there instead.
SLIPS = {
    "norm of the gradient": {"u.norm()": "g.norm()"},
    "no guard": {GUARD: ""},
    "bound on the ratio": {
        "w.norm().clamp(max=max_weight_norm)": "w.norm()",
        "weight_norm / direction_norm": "(weight_norm / direction_norm).clamp(max=max_weight_norm)",
    },
    "decay left out": {"u = d + weight_decay * w": "u = d"},
    "guard on w alone": {" or direction_norm == 0": ""},
    "guard on u alone": {"weight_norm == 0 or ": ""},
    "no bound": {".clamp(max=max_weight_norm)": ""},
    "upside down": {"return weight_norm / direction_norm": "return direction_norm / weight_norm"},
    "max-norms": {"w.norm()": "w.abs().max()", "u.norm()": "u.abs().max()"},
    "mean sizes": {"w.norm()": "w.abs().mean()", "u.norm()": "u.abs().mean()"},
}


def slipped(name):
    text = solution_text(NOTEBOOK, "my_trust_ratio")
    for line, instead in SLIPS[name].items():
        assert line in text
        text = text.replace(line, instead)
    names = {"torch": torch}
    exec(text, names)
    return names["my_trust_ratio"]


def test_the_solution_in_the_notebook_is_right(capsys):
    check_trust_ratio(solution_of(NOTEBOOK, "my_trust_ratio"))
    assert capsys.readouterr().out == "right\n"


def test_untouched_it_is_your_turn(capsys):
    exec(exercise_cell(NOTEBOOK), {"check_trust_ratio": check_trust_ratio})
    assert capsys.readouterr().out.startswith("your turn")


@pytest.mark.parametrize("name", MISTAKES)
def test_each_typical_mistake_is_named(name):
    assert verdict(slipped(name)) == verdict(MISTAKES[name].function) == f"not yet: {MISTAKES[name].says}"


def test_the_messages_differ():
    assert set(TYPICAL) <= set(MISTAKES)
    assert len({mistake.says for mistake in MISTAKES.values()}) == len(MISTAKES)


def test_plain_numbers_do_as_well_as_tensors():
    def ratio(w, d, g, weight_decay, max_weight_norm, guard):
        above, below = min(w.norm().item(), max_weight_norm), (d + weight_decay * w).norm().item()
        return 1.0 if guard and 0 in (above, below) else above / below

    assert verdict(lambda **a: ratio(**a, guard=True)) == "right"
    assert verdict(lambda **a: ratio(**a, guard=False)) == f"not yet: {MISTAKES['no guard'].says}"


@pytest.mark.parametrize(
    "answer, says",
    [
        (lambda **a: right(**a) + 0.001, "expected"),
        (lambda w, **a: right(w=w, **a) * torch.ones_like(w), "expected"),
        (lambda **_: 1.0, "expected"),
        (lambda **a: right(**a | {"weight_decay": -a["weight_decay"]}), "expected"),
        (lambda **_: None, "returned None"),
        (lambda w, **_: w @ torch.zeros(99, dtype=w.dtype), "raised RuntimeError"),
    ],
)
def test_any_other_wrong_answer_is_refused(answer, says):
    assert verdict(answer).startswith("not yet") and says in verdict(answer)
