"""The exercise of notebook 09: the solution passes, each typical wrong answer is told what is wrong with it."""

import math

import pytest
from lessons import solution_of

from merit_lab.exercises import check_mediation, mediation
from merit_lab.exercises.mediation import CAUSE, COMPANION, INPUTS, MISTAKES, NEVER_HIGH, STILL_HIGH, right, verdict


def test_the_solution_in_the_notebook_is_right(capsys):
    check_mediation(solution_of("09_ablations", "share_closed"))
    assert capsys.readouterr().out == "right\n"


def test_the_share_tells_a_companion_from_a_cause_and_from_no_test_at_all():
    assert right(**COMPANION) == pytest.approx(0.2) and right(**CAUSE) == pytest.approx(0.875)
    assert math.isnan(right(**STILL_HIGH)) and math.isnan(right(**NEVER_HIGH))


def test_at_adamws_own_rate_the_remedy_looks_worse_than_it_is():
    assert mediation._at_adamws_rate(**COMPANION) < 0 < right(**COMPANION)
    assert mediation._at_adamws_rate(**CAUSE) < 0.5 < right(**CAUSE)


def test_every_input_correlates_and_only_one_is_a_cause():
    high = [arguments for arguments in INPUTS if MISTAKES["rank correlation"].function(**arguments) > 0.3]
    assert COMPANION in high and CAUSE in high


def test_the_order_of_the_runs_does_not_matter():
    for arguments in INPUTS:
        assert right(arguments["runs"][::-1]) == pytest.approx(right(**arguments), nan_ok=True)


def test_two_mistakes_at_once_are_told_one_by_one():
    def both(runs):  # AdamW's rate, and no look at the logits
        rate = min((loss, lr) for name, lr, _, loss in runs if name == "AdamW")[1]
        return mediation._unchecked([run for run in runs if run[0] != "AdamW + QK-norm" or run[1] == rate])

    assert "QK-norm at the rate that is best for AdamW" in verdict(both)
    assert "never look at the logits" in verdict(mediation._unchecked)


@pytest.mark.parametrize(
    "answer, says",
    [
        (lambda runs: 2 * right(runs), "expected 0.2"),
        (lambda runs: None, "returned None"),
        (lambda runs: "a cause", "not yet"),
        (lambda runs: runs[99], "raised IndexError"),
    ],
)
def test_any_other_wrong_answer_is_refused(answer, says):
    assert says in verdict(answer) and verdict(answer) != "right"
