"""The exercise of notebook 04: how large can an attention logit be?"""

import math

import torch

from .judge import Mistake, judge


def check_logit_bound(answer) -> None:
    """Print the verdict on `answer(w_q, w_k, x, n_head)`, which should return √d · ‖W_Q‖_m · ‖W_K‖_m · C_X² for
    weights (n_embd, n_embd) without bias and inputs x (T, n_embd) of the attention layer.
    """
    print(verdict(answer))


def verdict(answer) -> str:
    """What `check_logit_bound` prints."""
    return judge(answer, right, inputs(), MISTAKES.values())


def right(w_q, w_k, x, n_head):
    """√d · ‖W_Q‖_m · ‖W_K‖_m · C_X²: d the width of a head, C_X the largest ℓ1 norm of a token's input."""
    return math.sqrt(w_q.shape[0] / n_head) * w_q.abs().max() * w_k.abs().max() * _c(x) ** 2


def inputs() -> list[dict]:
    """Calls that tell the mistakes from the right answer and from each other."""

    def call(w_q, w_k, x, n_head):
        w_q, w_k, x = (torch.tensor(rows, dtype=torch.float64) for rows in (w_q, w_k, x))
        return {"w_q": w_q, "w_k": w_k, "x": x, "n_head": n_head}

    return [
        call([[0.5, 1.0], [-2.0, 0.5]], [[1.0, 0.0], [0.5, 0.25]], [[1.0, -1.0], [3.0, 2.0], [-1.0, 0.5]], 1),
        call(
            [[0.1, -0.2, 0.3, 0.0], [0.2, 0.1, 0.1, -0.4], [0.5, 0.2, -0.6, 0.1], [0.3, 0.3, 0.1, 0.2]],
            [[0.2, 0.2, -0.1, 0.1], [0.3, -0.8, 0.1, 0.1], [0.1, 0.4, 0.1, 0.2], [0.0, 0.1, 0.7, -0.1]],
            [[1.0, -2.0, 0.5, 1.0], [-3.0, 1.0, 2.0, 0.0], [0.5, 0.5, 0.5, -0.5]],
            2,
        ),
    ]


def _c(x):
    return x.abs().sum(-1).max()


def _wrong(c=_c, d=lambda width, n_head: math.sqrt(width / n_head), size=lambda w: w.abs().max(), power=2):
    """The bound with one thing wrong: see MISTAKES for what each part is."""

    def bound(w_q, w_k, x, n_head):
        return d(w_q.shape[0], n_head) * size(w_q) * size(w_k) * c(x) ** power

    return bound


MISTAKES = {
    "C_X an ℓ2 norm": Mistake(
        _wrong(c=lambda x: torch.linalg.vector_norm(x, dim=-1).max()),
        "C_X is an ℓ2 norm here. The ℓ2 norm of x goes with the ℓ2 norm of a row of W (Cauchy-Schwarz); beside the "
        "largest weight stands the ℓ1 norm: |⟨w, x⟩| ≤ ‖w‖_m · ‖x‖₁.",
    ),
    "weights in ℓ2": Mistake(
        _wrong(size=torch.linalg.vector_norm),
        "the norms of the weights are ℓ2 norms; ‖W‖_m is the largest absolute element.",
    ),
    "both in ℓ2": Mistake(
        _wrong(c=lambda x: torch.linalg.vector_norm(x, dim=-1).max(), size=torch.linalg.vector_norm),
        "all norms are ℓ2 norms. That is another bound (Cauchy-Schwarz); this one has ‖W‖_m, the largest absolute "
        "element, and for C_X the ℓ1 norm.",
    ),
    "√d forgotten": Mistake(
        _wrong(d=lambda width, n_head: 1.0),
        "the factor √d is missing: a logit is a sum of d products, divided by √d.",
    ),
    "d for √d": Mistake(
        _wrong(d=lambda width, n_head: width / n_head),
        "the factor is √d, not d: the sum has d products, but the logit is divided by √d.",
    ),
    "heads ignored": Mistake(
        _wrong(d=lambda width, n_head: math.sqrt(width)),
        "the heads are ignored: a logit sums over the rows of one head, d = n_embd / n_head. Your value is a bound "
        "too, √n_head times too loose.",
    ),
    "summed over all heads": Mistake(
        _wrong(d=lambda width, n_head: width / math.sqrt(width / n_head)),
        "you sum over the rows of all heads and divide by √d of one: a logit belongs to one head and sums over its "
        "d = n_embd / n_head rows.",
    ),
    "C_X a mean over tokens": Mistake(
        _wrong(c=lambda x: x.abs().sum(-1).mean()),
        "C_X is a mean over the tokens. A bound must hold for every pair of tokens, and the largest logit tends to be "
        "between the largest: take the maximum.",
    ),
    "C_X a mean over dimensions": Mistake(
        _wrong(c=lambda x: x.abs().mean(-1).max()),
        "C_X is a mean over the dimensions: the ℓ1 norm is the sum of the absolute values.",
    ),
    "C_X over the tokens": Mistake(
        _wrong(c=lambda x: x.abs().sum(0).max()),
        "you sum over the tokens (dim 0): C_X is the ℓ1 norm of one token's input, a sum over its dimensions.",
    ),
    "C_X a max-norm": Mistake(
        _wrong(c=lambda x: x.abs().max()),
        "C_X is a max-norm: |⟨w, x⟩| can be as large as ‖w‖_m times the sum of all |x|, the ℓ1 norm.",
    ),
    "C_X without absolute values": Mistake(
        _wrong(c=lambda x: x.sum(-1).max()),
        "C_X sums without absolute values: signs of x would cancel, and those of a row of W may undo that.",
    ),
    "C_X once": Mistake(_wrong(power=1), "C_X stands there once: it comes in with q and again with k, so C_X²."),
    "weights without absolute values": Mistake(
        _wrong(size=torch.max), "the largest weight is taken with its sign: ‖W‖_m is the largest absolute element."
    ),
    "largest row sum": Mistake(
        _wrong(size=lambda w: w.abs().sum(1).max()),
        "that is the matrix infinity norm, the largest row sum; ‖W‖_m is the largest single element, as in MERIT.",
    ),
}
