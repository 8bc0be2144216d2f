"""Notebook 06: the edge, the largest learning rate at which an optimizer still trains."""

import math

from .judge import Mistake, judge

ENOUGH = 0.5  # nats by which the last loss must lie below the first


def right(runs):
    """The largest rate of (rate, first loss, last loss) whose last loss is finite and ENOUGH below the first."""
    return max(lr for lr, first, last in runs if math.isfinite(last) and last < first - ENOUGH)


def _diverged(runs):
    return max(lr for lr, _, _ in runs)


def _not_nan_is_enough(runs):
    return max(lr for lr, _, last in runs if math.isfinite(last))


def _any_gain(runs):
    return max(lr for lr, first, last in runs if math.isfinite(last) and last < first)


def _best(runs):
    return min((last, lr) for lr, _, last in runs if math.isfinite(last))[1]


def _last_in_the_list(runs):
    return [lr for lr, first, last in runs if math.isfinite(last) and last < first - ENOUGH][-1]


def _shared(runs):
    return 0.01


MISTAKES = {
    "a rate that diverged": Mistake(
        _diverged, "you report a rate whose run diverged, with a last loss of nan; the edge is a rate that still trains"
    ),
    "finite is enough": Mistake(
        _not_nan_is_enough, "a finite loss is not enough: a run that ends higher than it began has not trained"
    ),
    "any gain": Mistake(_any_gain, "the last loss must be at least half a nat below the first, not merely below it"),
    "the best rate": Mistake(_best, "this is the rate with the lowest loss; the edge is the largest rate that trains"),
    "one shared rate": Mistake(
        _shared, "you give one shared rate whatever the runs say; each optimizer has an edge of its own"
    ),
    "the order of the list": Mistake(
        _last_in_the_list, "you trust the order of the list: take the largest rate, wherever it stands"
    ),
}

NAN = float("nan")
_LADDER = [(0.001, 4.3, 3.4), (0.005, 4.3, 2.9), (0.025, 4.3, 3.3), (0.05, 4.3, 4.1), (0.1, 4.3, 4.9), (0.5, 4.3, NAN)]
_MIXED = [(0.25, 4.3, 3.5), (0.05, 4.3, 2.8), (1.25, 4.3, math.inf), (0.7, 4.3, 4.2), (0.9, 4.3, 4.4), (0.01, 4.3, 3.6)]
INPUTS = [{"runs": _LADDER}, {"runs": _MIXED}]


def verdict(answer) -> str:
    """What is wrong with the answer, if anything."""
    return judge(answer, right, INPUTS, MISTAKES.values())


def check_edge(answer) -> None:
    """Print the verdict on a function (runs) -> rate."""
    print(verdict(answer))
