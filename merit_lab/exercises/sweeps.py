"""Notebook 08: a fair comparison of two optimizers out of the runs of a sweep."""

from statistics import mean

from ..evidence import SEEDS, order
from .judge import Mistake, judge

# A run is (lr, seed, losses): losses along the run, the last one at its end. Seed 0 searched the rate.
Runs = list[tuple[float, int, list[float]]]
NONE = "no verdict"


def right(a: Runs, b: Runs) -> str:
    """"a" or "b", whichever is lower, "level", or "no verdict"."""
    ends = []
    for runs in (a, b):
        search = {lr: losses[-1] for lr, seed, losses in runs if seed == 0}
        best = min(search, key=search.get)
        if best in (min(search), max(search)):
            return NONE
        ends.append(_ends(runs, best))
    return _said(*ends) if _enough(ends) else NONE


def _ends(runs, best):
    return [losses[-1] for lr, seed, losses in runs if lr == best and seed != 0]


def _best(runs):
    return min((losses[-1], lr) for lr, seed, losses in runs if seed == 0)[1]


def _at_edge(runs):
    rates = [lr for lr, seed, _ in runs if seed == 0]
    return _best(runs) in (min(rates), max(rates))


def _enough(ends):
    return min(map(len, ends)) >= SEEDS


def _said(x, y):
    return {"lower": "a", "higher": "b", "level": "level"}[order(x, y)]


def _winner(x, y):
    return "a" if x < y else "b"


def _larger_grid(a, b):
    return _winner(*(min(losses[-1] for _, seed, losses in runs if seed == 0) for runs in (a, b)))


def _best_run_of_all(a, b):
    return _winner(*(min(losses[-1] for _, _, losses in runs) for runs in (a, b)))


def _edge(a, b):
    ends = [_ends(runs, _best(runs)) for runs in (a, b)]
    return _said(*ends) if _enough(ends) else NONE


def _one_seed(a, b):
    if _at_edge(a) or _at_edge(b):
        return NONE
    return _winner(*(_ends(runs, _best(runs))[0] for runs in (a, b)))


def _few_seeds(a, b):
    if _at_edge(a) or _at_edge(b):
        return NONE
    return _said(*(_ends(runs, _best(runs)) for runs in (a, b)))


def _zoom(a, b):
    if _at_edge(a) or _at_edge(b):
        return NONE
    last = []
    for runs in (a, b):
        best = _best(runs)
        last.append([loss for lr, seed, losses in runs if lr == best and seed != 0 for loss in losses[-3:]])
    return _said(*last) if min(map(len, last)) >= 3 * SEEDS else NONE


def _no_spread(a, b):
    if _at_edge(a) or _at_edge(b):
        return NONE
    ends = [_ends(runs, _best(runs)) for runs in (a, b)]
    return _winner(*map(mean, ends)) if _enough(ends) else NONE


def _shared(a, b):
    rates = sorted({lr for lr, *_ in a} & {lr for lr, *_ in b})
    if not rates:
        return NONE
    return _winner(*(next(losses[-1] for lr, seed, losses in runs if lr == rates[0] and seed == 0) for runs in (a, b)))


MISTAKES = {
    "best of a larger grid": Mistake(
        _larger_grid,
        "you compare the lowest run of one search with the lowest of the other. The lowest of eleven is lower than the "
        "lowest of five by luck alone: let the search choose the rate, and compare fresh seeds at that rate",
    ),
    "best run of all": Mistake(
        _best_run_of_all,
        "you take the best run of each, whatever its rate and seed: the more runs, the luckier the best",
    ),
    "best at an edge": Mistake(
        _edge,
        "a best rate that is the smallest or the largest tried is not known to be the best: the search has to be "
        "widened, and until then there is no verdict",
    ),
    "one seed": Mistake(
        _one_seed,
        "you compare one seed with one seed; another seed may turn the order round. Fewer than three: no verdict",
    ),
    "too few seeds": Mistake(
        _few_seeds, "fewer than three seeds give no verdict: from so few the spread cannot be told"
    ),
    "last-steps zoom": Mistake(
        _zoom,
        "you zoom in on the last steps and count them as if each were a run of its own. Points of one run move "
        "together: three seeds are three values, the losses at the end",
    ),
    "no spread": Mistake(
        _no_spread,
        "a lower mean is not enough: beside the spread of the seeds the two may be level. `order` knows the rule",
    ),
    "one rate for both": Mistake(
        _shared, "you compare both at one shared rate; each has its own best, found by its own search"
    ),
}


def _search(losses: dict[float, float]) -> Runs:
    return [(lr, 0, [round(loss + 0.4, 2), round(loss + 0.1, 2), loss]) for lr, loss in losses.items()]


def _report(lr: float, *ends: float) -> Runs:
    falls = (0.4, 0.02, 0.01, 0)  # slower and slower, as the rate goes down
    return [(lr, seed, [round(end + fall, 2) for fall in falls]) for seed, end in enumerate(ends, 1)]


_FIVE = {0.01: 2.9, 0.02: 2.7, 0.04: 2.6, 0.08: 2.8, 0.16: 3.4}
_LUCKY = {0.01: 2.9, 0.014: 2.85, 0.02: 2.72, 0.028: 2.66, 0.034: 2.63, 0.04: 2.49, 0.048: 2.62, 0.056: 2.66, 0.08: 2.8}
INPUTS = [  # in the order in which a wrong answer is shown one of them
    {"a": _search(_FIVE) + _report(0.04, 2.6, 2.62, 2.61), "b": _search(_FIVE) + _report(0.04, 2.7, 2.71, 2.69)},
    {  # a's search was larger, and lucky; fresh seeds tell
        "a": _search(_LUCKY) + _report(0.04, 2.63, 2.64, 2.65),
        "b": _search(_FIVE) + _report(0.04, 2.59, 2.58, 2.6),
    },
    {  # a is still falling at its largest rate
        "a": _search({0.001: 3.0, 0.002: 2.9, 0.004: 2.8}) + _report(0.004, 2.8, 2.81, 2.79),
        "b": _search(_FIVE) + _report(0.04, 2.6, 2.61, 2.6),
    },
    {"a": _search(_FIVE) + _report(0.04, 2.5), "b": _search(_FIVE) + _report(0.04, 2.6)},
    {"a": _search(_FIVE) + _report(0.04, 2.5, 2.51), "b": _search(_FIVE) + _report(0.04, 2.6, 2.61)},
    {  # seed 1 says b, the mean says a, the spread says level
        "a": _search(_FIVE) + _report(0.04, 2.68, 2.52, 2.54),
        "b": _search(_FIVE) + _report(0.04, 2.6, 2.64, 2.62),
    },
    {  # 9 points of the last steps would do, 3 seeds do not
        "a": _search(_FIVE) + _report(0.04, 2.5, 2.58, 2.54),
        "b": _search(_FIVE) + _report(0.04, 2.57, 2.61, 2.59),
    },
]  # fmt: skip


def verdict(answer) -> str:
    """What is wrong with the answer, if anything."""
    return judge(answer, right, INPUTS, MISTAKES.values())


def check_fair(answer) -> None:
    """Print the verdict on a function (a, b) -> "a", "b", "level" or "no verdict", of the runs of two optimizers."""
    print(verdict(answer))
