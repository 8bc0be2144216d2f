"""The exercise of notebook 07: the solution passes, each typical wrong answer is told what is wrong with it."""

import pytest
from lessons import solution_of

from merit_lab.exercises import check_similarity
from merit_lab.exercises.patterns import INPUTS, right, verdict
from merit_lab.probes import shuffled


def test_the_solution_in_the_notebook_is_right(capsys):
    check_similarity(solution_of("07_weight_patterns", "row_similarity"))
    assert capsys.readouterr().out == "right\n"


def test_the_right_answer_is_zero_on_average_for_a_shuffled_matrix():
    scores = [right(shuffled(INPUTS[0]["w"], seed)) for seed in range(400)]
    assert abs(sum(scores) / 400) < 0.01 and right(INPUTS[0]["w"]) > 0.2


@pytest.mark.parametrize("answer, says", [(lambda w: 2 * right(w), "expected"), (lambda w: None, "returned None")])
def test_any_other_wrong_answer_is_refused(answer, says):
    assert says in verdict(answer) and verdict(answer) != "right"
