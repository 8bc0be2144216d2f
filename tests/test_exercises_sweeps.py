"""The exercise of notebook 08: the solution passes, each typical wrong answer is told what is wrong with it."""

import pytest
from lessons import solution_of

from merit_lab import evidence
from merit_lab.exercises import check_fair
from merit_lab.exercises.sweeps import INPUTS, right, verdict


def test_the_solution_in_the_notebook_is_right(capsys):
    check_fair(solution_of("08_large_batch", "fair"))
    assert capsys.readouterr().out == "right\n"


def test_the_inputs_have_every_verdict():
    assert {right(**runs) for runs in INPUTS} == {"a", "b", "level", "no verdict"}


def test_the_other_way_round_the_other_one_is_lower():
    turned = {"a": "b", "b": "a", "level": "level", "no verdict": "no verdict"}
    for runs in INPUTS:
        assert right(runs["b"], runs["a"]) == turned[right(**runs)]


def test_where_no_best_is_at_an_edge_it_is_the_rule_of_the_ledger():
    tried = 0
    for runs in INPUTS:
        points, rates = [], []
        for name in "ab":
            search = {lr: losses[-1] for lr, seed, losses in runs[name] if seed == 0}
            best = min(search, key=search.get)
            ends = [losses[-1] for lr, seed, losses in runs[name] if seed and lr == best]
            points.append(evidence.Point(name, [{"val_loss": loss} for loss in ends], len(search)))
            rates.append(min(search) < best < max(search))
        if all(rates):
            tried += 1
            assert (right(**runs) == "a") is (evidence.compare(*points, "lower").as_paper is True)
            assert (right(**runs) == "b") is (evidence.compare(*points, "higher").as_paper is True)
    assert tried >= 5


@pytest.mark.parametrize(
    "answer, says",
    [
        (lambda a, b: "a", "expected b"),
        (lambda a, b: "no verdict", "expected a"),
        (lambda a, b: None, "returned None"),
        (lambda a, b: a[99], "raised IndexError"),
        (lambda a, b: {"a": "b", "b": "a"}.get(right(a, b), "level"), "expected a"),
    ],
)
def test_any_other_wrong_answer_is_refused(answer, says):
    assert says in verdict(answer) and verdict(answer) != "right"
