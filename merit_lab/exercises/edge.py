"""Notebook 06: the edge, the largest learning rate at which an optimizer still trains."""

import math

from .judge import Mistake, judge

ENOUGH = 0.1  # nats by which the last loss must lie below that of letter frequencies


def right(runs, guess):
    """The largest rate of (rate, last loss) whose last loss is finite and over ENOUGH below guess; 0 without one."""
    return max((lr for lr, last in runs if math.isfinite(last) and last < guess - ENOUGH), default=0)


def _diverged(runs, guess):
    return max(lr for lr, _ in runs)


def _not_nan_is_enough(runs, guess):
    return max(lr for lr, last in runs if math.isfinite(last))


def _any_gain(runs, guess):
    return max((lr for lr, last in runs if math.isfinite(last) and last < guess), default=0)


def _best(runs, guess):
    return min((last, lr) for lr, last in runs if math.isfinite(last))[1]


def _last_in_the_list(runs, guess):
    return ([lr for lr, last in runs if math.isfinite(last) and last < guess - ENOUGH] or [0])[-1]


def _shared(runs, guess):
    return 0.01


MISTAKES = {
    "a rate that diverged": Mistake(
        _diverged, "you report a rate whose run diverged, with a last loss of nan; the edge is a rate that still trains"
    ),
    "finite is enough": Mistake(
        _not_nan_is_enough, "a finite loss is not enough: a run that ends at or above `guess` has not trained"
    ),
    "any gain": Mistake(
        _any_gain, "the last loss must be more than a tenth of a nat below `guess`, not merely below it"
    ),
    "the best rate": Mistake(_best, "this is the rate with the lowest loss; the edge is the largest rate that trains"),
    "one shared rate": Mistake(
        _shared, "you give one shared rate whatever the runs say; each optimizer has an edge of its own"
    ),
    "the order of the list": Mistake(
        _last_in_the_list, "you trust the order of the list: take the largest rate, wherever it stands"
    ),
}

NAN = float("nan")
_LADDER = [(0.001, 3.2), (0.005, 2.9), (0.025, 3.1), (0.05, 3.3), (0.1, 4.9), (0.5, NAN)]
_MIXED = [(0.25, 2.9), (0.05, 2.6), (1.25, math.inf), (0.7, 3.05), (0.9, 3.15), (0.01, 3.6)]
_NONE = [(0.01, 3.6), (0.1, 3.3), (1.0, NAN)]
INPUTS = [{"runs": _LADDER, "guess": 3.33}, {"runs": _MIXED, "guess": 3.1}, {"runs": _NONE, "guess": 3.33}]


def verdict(answer) -> str:
    """What is wrong with the answer, if anything."""
    return judge(answer, right, INPUTS, MISTAKES.values())


def check_edge(answer) -> None:
    """Print the verdict on a function (runs, guess) -> rate."""
    print(verdict(answer))
