"""The exercise of notebook 06: the solution passes, each typical wrong answer is told what is wrong with it."""

import pytest
from lessons import solution_of

from merit_lab.exercises import check_edge
from merit_lab.exercises.edge import right, verdict


def test_the_solution_in_the_notebook_is_right(capsys):
    check_edge(solution_of("06_train_live", "edge"))
    assert capsys.readouterr().out == "right\n"


@pytest.mark.parametrize(
    "answer, says",
    [
        (lambda runs, guess: right(runs, guess) / 2, "expected 0.025"),
        (lambda runs, guess: None, "returned None"),
        (lambda runs, guess: "large", "not yet"),
        (lambda runs, guess: runs[99], "raised IndexError"),
        (lambda runs, guess: max(lr for lr, last in runs if last < guess - 0.1), "raised ValueError"),  # none trains
    ],
)
def test_any_other_wrong_answer_is_refused(answer, says):
    assert says in verdict(answer) and verdict(answer) != "right"
