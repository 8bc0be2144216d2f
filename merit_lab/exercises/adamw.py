"""The exercise of notebook 01: AdamW, written out."""

import torch

from ..optim import adamw_step
from .judge import Mistake, judge


def check_adamw(answer) -> None:
    """Print the verdict on `answer(w, grads, lr, beta1, beta2, eps, weight_decay)`, which should return the weights
    after one AdamW step for each gradient in `grads`, with m and v from 0.
    """
    print(verdict(answer))


def verdict(answer) -> str:
    """What `check_adamw` prints."""

    def without_crash(w, **arguments):
        try:
            return answer(w=w, **arguments)
        except ZeroDivisionError:  # 1 - beta**0, where somebody divides plain numbers
            return torch.full_like(w, torch.nan)

    return judge(without_crash, right, inputs(), MISTAKES.values())


def right(w, grads, lr, beta1, beta2, eps, weight_decay):
    """The weights after one AdamW step a gradient."""
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for t, g in enumerate(grads, start=1):
        step = adamw_step(w, g, m, v, step=t, lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=weight_decay)
        w, m, v = step.weight, step.exp_avg, step.exp_avg_sq
    return w


def inputs() -> list[dict]:
    """Calls that tell the mistakes from the right answer and from each other: the ε's are large enough to see."""
    w = torch.tensor([[1.0, -2.0, 0.5], [0.25, 3.0, -1.0]], dtype=torch.float64)
    first = torch.tensor([[1.0, -2.0, 0.5], [0.1, 4.0, -1.0]], dtype=torch.float64)
    second = torch.tensor([[-0.5, -2.0, 2.0], [0.3, 1.0, 0.2]], dtype=torch.float64)
    third = torch.tensor([[2.0, 1.0, 0.5], [-0.1, 4.0, -3.0]], dtype=torch.float64)
    hyper = {"lr": 0.1, "beta1": 0.9, "beta2": 0.95}
    return [
        {"w": w, "grads": first[None], **hyper, "eps": 0.01, "weight_decay": 0.0},
        {"w": w, "grads": torch.stack([first, second]), **hyper, "eps": 0.04, "weight_decay": 0.1},
        {"w": w, "grads": torch.stack([first, second, third]), **hyper, "eps": 1e-8, "weight_decay": 0.1},
    ]


def _wrong(first=1, correct=True, inside=False, mean_sq=True, root=True, l2=False, sign=-1, cold=False):
    """AdamW with one thing wrong: see MISTAKES for what each switch is."""

    def run(w, grads, lr, beta1, beta2, eps, weight_decay):
        m, v = torch.zeros_like(w), torch.zeros_like(w)
        for t, g in enumerate(grads, start=first):
            if cold:
                m, v = torch.zeros_like(w), torch.zeros_like(w)
            if l2:
                g = g + weight_decay * w
            m = beta1 * m + (1 - beta1) * g
            v = beta2 * v + (1 - beta2) * (g * g if mean_sq else g)
            m_hat, v_hat = (m / (1 - beta1**t), v / (1 - beta2**t)) if correct else (m, v)
            if not root:
                below = v_hat + eps
            else:
                below = (v_hat + eps).sqrt() if inside else v_hat.sqrt() + eps
            w = w + sign * lr * (m_hat / below + (0 if l2 else weight_decay * w))
        return w

    return run


def _no_decay(w, grads, lr, beta1, beta2, eps, weight_decay):
    return right(w, grads, lr, beta1, beta2, eps, 0.0)


MISTAKES = {
    "no bias correction": Mistake(
        _wrong(correct=False),
        "the bias correction is missing: m and v start at 0 and are too small at first; divide them by "
        "1 - beta1**t and 1 - beta2**t.",
    ),
    "ε under the root": Mistake(
        _wrong(inside=True),
        "ε stands under the root: write sqrt(v̂) + ε, not sqrt(v̂ + ε).",
    ),
    "decay inside the gradient": Mistake(
        _wrong(l2=True),
        "the decay is inside the gradient: λ w goes through m and v, where its size is divided away. That is Adam "
        "with an ℓ2 penalty. Take λ w off the weight, beside the direction.",
    ),
    "t from 0": Mistake(
        _wrong(first=0),
        "t starts from 0: 1 - beta**0 is 0, and every weight becomes 0/0. Count from 1: enumerate(grads, start=1).",
    ),
    "no decay": Mistake(_no_decay, "the decay is missing: take lr * weight_decay * w off the weight too."),
    "no root": Mistake(_wrong(root=False), "the root is missing: divide by sqrt(v̂) + ε, not by v̂ + ε."),
    "uphill": Mistake(_wrong(sign=1), "the step goes uphill: take lr times the direction off the weight."),
    "moments reset": Mistake(
        _wrong(cold=True), "m and v are set to 0 at every step: set them before the loop, and carry them on."
    ),
}
