"""The exercise of notebook 11: the solution passes, each typical wrong answer is told what is wrong with it."""

import pytest
from lessons import solution_of

from merit_lab.exercises import check_traffic
from merit_lab.exercises.cost import APART, FUSED, right, verdict

N, K = 64, 32
ELEMENTS = dict.fromkeys(("w", "g", "m", "v", "u", "step"), N * K) | dict.fromkeys(("r", "of_w", "of_u"), N)


def test_the_solution_in_the_notebook_is_right(capsys):
    check_traffic(solution_of("11_cost", "bytes_moved"))
    assert capsys.readouterr().out == "right\n"


def test_untouched_it_is_your_turn(capsys):
    def bytes_moved(program, elements, size):
        raise NotImplementedError("your turn")

    check_traffic(bytes_moved)
    assert capsys.readouterr().out.startswith("your turn")


@pytest.mark.parametrize("program, a_weight, a_row", [(FUSED, 40, 8), (APART, 76, 24)])
def test_a_program_counted_by_hand(program, a_weight, a_row):
    assert right(program, ELEMENTS, 4) == a_weight * N * K + a_row * N
    assert right(program, ELEMENTS, 2) == (a_weight * N * K + a_row * N) / 2


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (lambda program, elements, size: None, "returned None"),
        (lambda program, elements, size: 40, "expected"),
        (lambda program, elements, size: elements["q"], "raised KeyError"),
        (lambda program, elements, size: 2 * right(program, elements, size), "expected"),
    ],
)
def test_any_other_wrong_answer_is_refused(answer, says):
    assert verdict(answer).startswith("not yet: ") and says in verdict(answer)
