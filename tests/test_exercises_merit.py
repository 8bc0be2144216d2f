"""The exercise of notebook 03: the solution passes, each typical wrong answer is told what is wrong with it."""

import pytest
import torch
from lessons import solution_of

from merit_lab.exercises import check_element_ratio
from merit_lab.exercises.merit import right, verdict


def test_the_solution_in_the_notebook_is_right(capsys):
    check_element_ratio(solution_of("03_merit", "element_ratio"))
    assert capsys.readouterr().out == "right\n"


@pytest.mark.parametrize(
    "answer, says",
    [
        (lambda w, u: 2 * right(w, u), "not yet: for w="),
        (lambda w, u: right(w, u).sum(), "expected"),
        (lambda w, u: None, "returned None"),
        (lambda w, u: w @ u.mT @ torch.zeros(99), "raised RuntimeError"),
        (lambda w, u: "s", "not yet"),
    ],
)
def test_any_other_wrong_answer_is_refused(answer, says):
    assert says in verdict(answer) and verdict(answer) != "right"
