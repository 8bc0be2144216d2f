"""The exercise of notebook 05: the largest causal attention logit of a head."""

import math

import torch

from .judge import Mistake, judge


def check_max_logit(answer) -> None:
    """Print the verdict on `answer(q, k)`, which should return the largest logit ⟨q_i, k_j⟩ / √d over j ≤ i, with its
    sign, for q and k of one head: (T, d) each.
    """
    print(verdict(answer))


def verdict(answer) -> str:
    """What `check_max_logit` prints."""
    return judge(answer, right, inputs(), MISTAKES.values())


def right(q, k):
    """The largest z_ij over causal pairs, signed."""
    return _logits(q, k).max()


def inputs() -> list[dict]:
    """Calls that tell the mistakes from the right answer and from each other."""

    def call(q, k):
        return {"q": torch.tensor(q, dtype=torch.float64), "k": torch.tensor(k, dtype=torch.float64)}

    return [
        # The largest of all stands in the future, at (0, 2); the largest absolute one is negative, at (2, 1).
        call([[2.0, 1, 0, 1], [1, 0, 2, 0], [0, 2, 1, 1]], [[1.0, 0, 1, 0], [0, -3, 0, -1], [4, 1, 0, 1]]),
        # The same the other way round: the largest of all stands in the past, at (2, 0).
        call([[1.0, 0, 1, 0], [0, -3, 0, -1], [4, 1, 0, 1]], [[2.0, 1, 0, 1], [1, 0, 2, 0], [0, 2, 1, 1]]),
        call([[1.0, 0.0]], [[-3.0, 0.0]]),  # one pair, and its logit is negative
        call([[1.0, 0, 0, 1], [1, 0, 1, 0]], [[-2.0, 0, 1, -1], [-1, 0, -3, 0]]),  # all are negative
    ]


def _logits(q, k, scale=0.5, hidden=1, fill=-math.inf):
    """z (T, T) over d**scale, with `fill` from the hidden-th diagonal on."""
    z = q @ k.mT / q.shape[-1] ** scale
    future = torch.ones_like(z, dtype=torch.bool).triu(hidden)  # j ≥ i + hidden
    return z.masked_fill(future, fill)


def _probability(mask):
    def largest(q, k):
        return (_logits(q, k) if mask else _logits(q, k, hidden=len(q))).softmax(-1).max()

    return largest


MISTAKES = {
    "mask forgotten": Mistake(
        lambda q, k: _logits(q, k, hidden=len(q)).max(),
        "the causal mask is missing: your maximum stands at a pair j > i, which no softmax ever sees.",
    ),
    "scale forgotten": Mistake(
        lambda q, k: _logits(q, k, scale=0).max(),
        "the scale is missing: a logit is ⟨q, k⟩ / √d, d the length of q.",
    ),
    "divided by d": Mistake(
        lambda q, k: _logits(q, k, scale=1).max(), "the scale is 1/√d, not 1/d, d the length of q."
    ),
    "maximum started at 0": Mistake(
        lambda q, k: right(q, k).clamp(min=0),
        "your maximum starts at 0: where all logits are negative it says 0. Start at -inf.",
    ),
    "masked with 0": Mistake(
        lambda q, k: _logits(q, k, fill=0.0).max(),
        "the future is filled with 0, and where all logits are negative those zeros win. Fill it with -inf.",
    ),
    "probabilities": Mistake(
        _probability(True),
        "these are probabilities, not logits: the maximum over softmax(z) is always 1, since the first row has one "
        "key to look at. Take the maximum before the softmax.",
    ),
    "probabilities, no mask": Mistake(
        _probability(False),
        "these are probabilities, not logits, and the causal mask is missing too. Take the maximum before the softmax, "
        "over j ≤ i.",
    ),
    "absolute values": Mistake(
        lambda q, k: _logits(q, k, fill=0.0).abs().max(),
        "that is the largest absolute value; asked for is the largest logit with its sign.",
    ),
    "diagonal left out": Mistake(
        lambda q, k: _logits(q, k, hidden=0).max(),
        "the diagonal is left out: a token may look at itself, j ≤ i.",
    ),
    "past for future": Mistake(
        lambda q, k: right(k, q),
        "past and future are exchanged: keep j ≤ i, the lower triangle of q kᵀ (tril).",
    ),
}
