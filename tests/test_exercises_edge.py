"""The exercise of notebook 06: the solution passes, each typical wrong answer is told what is wrong with it."""

import pytest
from lessons import solution_of

from merit_lab.exercises import check_edge
from merit_lab.exercises.edge import MISTAKES, right, verdict


def test_the_solution_in_the_notebook_is_right(capsys):
    check_edge(solution_of("06_train_live", "edge"))
    assert capsys.readouterr().out == "right\n"


def test_untouched_it_is_your_turn():
    def untouched(runs):
        raise NotImplementedError

    assert verdict(untouched).startswith("your turn")


@pytest.mark.parametrize("name", MISTAKES)
def test_each_typical_mistake_is_named(name):
    assert verdict(MISTAKES[name].function) == f"not yet: {MISTAKES[name].says}"


def test_the_messages_differ():
    assert len({mistake.says for mistake in MISTAKES.values()}) == len(MISTAKES)


@pytest.mark.parametrize(
    "answer, says",
    [
        (lambda runs: right(runs) / 2, "expected 0.025"),
        (lambda runs: None, "returned None"),
        (lambda runs: "large", "not yet"),
        (lambda runs: runs[99], "raised IndexError"),
    ],
)
def test_any_other_wrong_answer_is_refused(answer, says):
    assert says in verdict(answer) and verdict(answer) != "right"
