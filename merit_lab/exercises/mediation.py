"""Notebook 09: mediation. A remedy takes AdamW's logit down to MERIT's: what share of the gap in loss does it close?"""

import math

from .judge import RIGHT, Mistake, judge

ADAMW, REMEDY, MERIT = "AdamW", "AdamW + QK-norm", "MERIT"
SAME = 1.05  # logits within 5 % are level, as in data/protocol.md


def right(runs):
    """(AdamW - remedy) / (AdamW - MERIT) in loss, each at its own best rate; nan where the test says nothing.

    It says nothing where AdamW's logit is not above MERIT's to begin with, or where the remedy leaves it above.

    Args:
        runs: a list of (name, learning rate, largest logit, final loss).
    """
    (adamw_logit, _), (remedy_logit, _), (merit_logit, _) = (_best(runs, name) for name in (ADAMW, REMEDY, MERIT))
    if adamw_logit <= SAME * merit_logit or remedy_logit > SAME * merit_logit:
        return math.nan
    return _unchecked(runs)


def _of(runs, name):
    return [(lr, logit, loss) for n, lr, logit, loss in runs if n == name]


def _best(runs, name):
    """Logit and loss at the name's best rate."""
    return min(_of(runs, name), key=lambda run: run[2])[1:]


def _unchecked(runs):
    adamw, remedy, merit = (_best(runs, name)[1] for name in (ADAMW, REMEDY, MERIT))
    return (adamw - remedy) / (adamw - merit)


def _half_checked(runs):
    return math.nan if _best(runs, REMEDY)[0] > SAME * _best(runs, MERIT)[0] else _unchecked(runs)


def _at_adamws_rate(runs):
    """Everything as it should be, but the remedy at the rate that is AdamW's best."""
    rate = min(_of(runs, ADAMW), key=lambda run: run[2])[0]
    [kept] = [run for run in runs if run[0] == REMEDY and run[1] == rate]
    others = [run for run in runs if run[0] != REMEDY]
    return right([*others, kept])


def _left(runs):
    return 1 - _unchecked(runs)


def _of_adamw(runs):
    return (_best(runs, ADAMW)[1] - _best(runs, REMEDY)[1]) / _best(runs, ADAMW)[1]


def _in_logit(runs):
    adamw, remedy, merit = (_best(runs, name)[0] for name in (ADAMW, REMEDY, MERIT))
    return (adamw - remedy) / (adamw - merit)


def _averaged(runs):
    adamw, remedy, merit = (_mean([loss for _, _, loss in _of(runs, name)]) for name in (ADAMW, REMEDY, MERIT))
    return (adamw - remedy) / (adamw - merit)


def _mean(values):
    return sum(values) / len(values)


def _correlation(of=lambda values: values):
    """Pearson's, of what `of` makes of the logits and of the losses, over all runs."""

    def correlation(runs):
        x, y = of([run[2] for run in runs]), [run[3] for run in runs]
        y = of(y) if of is _ranks else y
        x, y = ([value - _mean(values) for value in values] for values in (x, y))
        product = sum(a * b for a, b in zip(x, y, strict=True))
        return product / math.sqrt(sum(a * a for a in x) * sum(b * b for b in y))

    return correlation


def _logs(values):
    return [math.log(value) for value in values]


def _ranks(values):
    return [sorted(values).index(value) for value in values]


MISTAKES = {
    "correlation": Mistake(
        _correlation(),
        "this is the correlation of logit and loss over all runs. Optimizers and rates that differ in their logit "
        "differ in much else; a correlation across them is no cause. Look at the runs in which the logit was changed",
    ),
    "correlation with the log": Mistake(
        _correlation(_logs),
        "this is the correlation of loss and log logit over all runs; taking the log does not make a cause of it. Look "
        "at the runs in which the logit was changed",
    ),
    "rank correlation": Mistake(
        _correlation(_ranks),
        "this is the rank correlation of logit and loss over all runs, and no cause either. Look at the runs in which "
        "the logit was changed",
    ),
    "AdamW's rate": Mistake(
        _at_adamws_rate,
        "you take QK-norm at the rate that is best for AdamW without it. With QK-norm another rate is best: each of "
        "the three gets the best of its own search",
    ),
    "logit unchecked": Mistake(
        _unchecked,
        "you never look at the logits. Where the remedy has not brought the logit down to MERIT's, its loss says "
        "nothing about the logit",
    ),
    "nothing to bring down": Mistake(
        _half_checked,
        "where AdamW's own logit is not above MERIT's there is nothing to bring down: whatever the remedy does to the "
        "loss, it does by another way",
    ),
    "the share left": Mistake(
        _left, "this is the share of the gap that is left; asked for is the share that is closed"
    ),
    "a share of AdamW's loss": Mistake(
        _of_adamw, "you divide by AdamW's loss; divide by the gap between AdamW and MERIT"
    ),
    "the logit's share": Mistake(
        _in_logit,
        "this is the share of the gap in logit; that the remedy closes it was the premise. Asked for is the loss",
    ),
    "the mean over rates": Mistake(
        _averaged,
        "you average over learning rates, bad ones too; take each name's best, the run with its lowest loss",
    ),
}


def _runs(adamw, remedy, merit):
    named = ((ADAMW, adamw), (REMEDY, remedy), (MERIT, merit))
    return {"runs": [(name, lr, logit, loss) for name, values in named for lr, logit, loss in values]}


COMPANION = _runs(
    [(0.002, 20.0, 2.6), (0.004, 90.0, 2.5), (0.008, 300.0, 2.9)],
    [(0.002, 6.0, 2.62), (0.004, 7.5, 2.55), (0.008, 8.0, 2.46)],
    [(0.02, 7.0, 2.4), (0.04, 9.0, 2.3), (0.08, 200.0, 2.7)],
)
CAUSE = _runs(
    [(0.004, 60.0, 2.8), (0.002, 40.0, 3.0), (0.008, 70.0, 3.1)],
    [(0.008, 3.0, 2.45), (0.002, 1.0, 2.9), (0.004, 2.0, 2.65)],
    [(0.08, 5.0, 2.6), (0.04, 3.2, 2.4), (0.02, 2.2, 2.75)],
)
STILL_HIGH = _runs(  # the remedy leaves the logit where it was
    [(0.002, 20.0, 2.6), (0.004, 90.0, 2.5)],
    [(0.002, 30.0, 2.45), (0.004, 50.0, 2.35)],
    [(0.02, 7.0, 2.4), (0.04, 9.0, 2.3)],
)
NEVER_HIGH = _runs(  # AdamW's logit is below MERIT's already
    [(0.002, 5.0, 2.6), (0.004, 8.0, 2.5)],
    [(0.002, 4.0, 2.55), (0.004, 6.0, 2.45)],
    [(0.02, 12.0, 2.4), (0.04, 20.0, 2.3)],
)
APPLIES = [COMPANION, CAUSE]
INPUTS = [*APPLIES, STILL_HIGH, NEVER_HIGH]


def verdict(answer) -> str:
    """Judged in rounds: first where the test says something, so that two mistakes at once are told one by one."""
    for inputs in (APPLIES, INPUTS):
        shown = [m for m in MISTAKES.values() if judge(m.function, right, inputs) != RIGHT]
        said = judge(answer, right, inputs, shown)
        if said != RIGHT:
            return said
    return RIGHT


def check_mediation(answer) -> None:
    """Print the verdict on a function (runs) -> share of the gap in loss that the remedy closes, or nan."""
    print(verdict(answer))
