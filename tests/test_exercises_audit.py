"""The exercise of notebook 10: the solution passes, each typical wrong answer is told what is wrong with it."""

import pytest
import torch
from lessons import solution_of

from merit_lab.exercises import check_separates
from merit_lab.exercises.audit import ROUNDING, _random, differs, each_its_own, last_word, verdict

SEPARATES = torch.tensor([[0.0, 0.0], [1.0, 2.0]]), torch.full((2, 2), 0.5)


def test_the_solution_in_the_notebook_is_right(capsys):
    check_separates(solution_of("10_paper_and_code", "separates"))
    assert capsys.readouterr().out == "right\n"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_a_zero_row_with_a_large_ratio_elsewhere_separates_in_any_precision(dtype):
    w, u = (x.to(dtype) for x in SEPARATES)
    assert last_word(w, u).tolist() == [[0.5, 0.5], [1.0, 1.0]]
    assert each_its_own(w, u).tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert verdict(lambda: (w, u)) == "right"
    assert verdict(lambda: (w.T, u.T)) == "right"


def test_the_two_programs_agree_but_for_rounding_where_nothing_is_zero():
    w, u = _random()
    assert differs(last_word(w, u), each_its_own(w, u)).any()
    w, u = w.double(), u.double()
    assert not differs(last_word(w, u), each_its_own(w, u), ROUNDING).any()


def test_rounding_in_float64_is_rounding_too():
    w, u = (x.double() for x in _random())
    assert "that is rounding" in verdict(lambda: (w, u))


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (lambda: None, "returned NoneType"),
        (lambda: torch.ones(2, 2), "returned Tensor"),
        (lambda: ([[0.0]], [[1.0]]), "w is list"),
        (lambda: (torch.ones(2, 2, dtype=torch.int64), torch.ones(2, 2)), "expected floats"),
        (lambda: (torch.ones(2), torch.ones(2)), "expected a matrix"),
        (lambda: (torch.ones(0, 2), torch.ones(0, 2)), "expected a matrix"),
        (lambda: (torch.ones(2, 2), torch.ones(2, 3)), "the same shape"),
        (lambda: (_random()[0].double(), _random()[1]), "the same precision"),
        (lambda: torch.ones(2, 3) @ torch.ones(2, 3), "raised RuntimeError"),
    ],
)
def test_any_other_wrong_answer_is_refused(answer, says):
    assert verdict(answer).startswith("not yet: ") and says in verdict(answer)
