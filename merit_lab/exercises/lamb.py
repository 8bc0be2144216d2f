"""The exercise of notebook 02: LAMB's trust ratio."""

import math

import torch

from ..optim import l2_norm
from ..optim import trust_ratio as guarded_ratio
from .judge import Mistake, judge


def check_trust_ratio(answer) -> None:
    """Print the verdict on `answer(w, d, g, weight_decay, max_weight_norm)`, which should return LAMB's trust ratio
    of a weight w whose direction without decay is d and whose gradient is g.
    """
    print(verdict(answer))


def verdict(answer) -> str:
    """What `check_trust_ratio` prints."""

    def without_crash(w, **arguments):
        try:
            return answer(w=w, **arguments)
        except ZeroDivisionError:  # where somebody divides plain numbers; tensors give inf and NaN
            return math.inf if w.any() else math.nan

    return judge(without_crash, right, inputs(), MISTAKES.values())


def right(w, d, g, weight_decay, max_weight_norm):
    """φ(‖w‖₂) / ‖d + λ w‖₂, and 1 where either norm is 0; φ bounds ‖w‖₂ by max_weight_norm."""
    return guarded_ratio(l2_norm(w).clamp(max=max_weight_norm), l2_norm(d + weight_decay * w))[0]


def inputs() -> list[dict]:
    """Calls that tell the mistakes from the right answer and from each other."""

    def call(w, d, g, weight_decay, max_weight_norm=10.0):
        w, d, g = (torch.tensor(x, dtype=torch.float64) for x in (w, d, g))
        return {"w": w, "d": d, "g": g, "weight_decay": weight_decay, "max_weight_norm": max_weight_norm}

    return [
        call([3.0, 4.0], [0.6, 0.8], [6.0, 8.0], 0.0),  # 5 / 1
        call([[3.0, -1.0], [1.0, 5.0]], [[1.0, -1.0], [1.0, 1.0]], [[2.0, -3.0], [0.5, 9.0]], 0.1),
        call([30.0, 40.0], [1.0, 0.0], [0.5, 0.0], 0.1),  # ‖w‖ = 50, bounded by 10; u = (4, 4)
        call([0.6, 0.8], [0.03, 0.04], [3.0, 4.0], 0.0),  # 1 / .05 = 20: the ratio itself is not bounded
        call([0.0, 0.0], [1.0, -1.0], [2.0, -2.0], 0.1),  # a bias at its start
        call([3.0, 4.0], [0.0, 0.0], [0.0, 0.0], 0.0),  # a dead tensor
        call([0.0, 0.0], [0.0, 0.0], [0.0, 0.0], 0.1),
    ]


def _wrong(norm_of="u", guard="both", bound="norm", flip=False, norm=l2_norm):
    """The trust ratio with one thing wrong: see MISTAKES for what each switch is."""

    def ratio(w, d, g, weight_decay, max_weight_norm):
        below = norm({"u": d + weight_decay * w, "d": d, "g": g}[norm_of])
        above = norm(w)
        if bound == "norm":
            above = above.clamp(max=max_weight_norm)
        value = below / above if flip else above / below
        zero = {"both": (above == 0) | (below == 0), "w": above == 0, "u": below == 0, None: torch.tensor(False)}
        value = torch.where(zero[guard], 1.0, value)
        return value.clamp(max=max_weight_norm) if bound == "ratio" else value

    return ratio


def _mean_norm(x):
    return x.abs().mean()


def _max_norm(x):
    return x.abs().amax()


MISTAKES = {
    "norm of the gradient": Mistake(
        _wrong(norm_of="g"),
        "that is the norm of the gradient g: that ratio would make the step depend on the gradient's size again. LAMB "
        "measures the step it is about to take, u = d + λ w.",
    ),
    "no guard": Mistake(
        _wrong(guard=None),
        "there is no zero guard: a weight that starts at 0 gets ratio 0 and never leaves, and u = 0 gives a division "
        "by 0. Return 1 where either norm is 0.",
    ),
    "bound on the ratio": Mistake(
        _wrong(bound="ratio"),
        "the bound is on the ratio (as in DeepSpeed): φ bounds the norm of the weights, before the division.",
    ),
    "decay left out": Mistake(
        _wrong(norm_of="d"),
        "the decay is left out of the norm: in LAMB u = d + λ w, and the ratio divides by the norm of all of it.",
    ),
    "guard on w alone": Mistake(
        _wrong(guard="w"), "the guard watches ‖w‖ alone: where ‖u‖ is 0 you still divide by 0."
    ),
    "guard on u alone": Mistake(
        _wrong(guard="u"), "the guard watches ‖u‖ alone: where w is 0 your ratio is 0, and w never leaves 0."
    ),
    "no bound": Mistake(_wrong(bound=None), "the bound is missing: φ(‖w‖₂) is at most max_weight_norm."),
    "upside down": Mistake(
        _wrong(flip=True), "the ratio is upside down: the weights' norm is above, the direction's below."
    ),
    "max-norms": Mistake(
        _wrong(norm=_max_norm), "these are max-norms, and LAMB's are ℓ2: the root of the sum of squares."
    ),
    "mean sizes": Mistake(
        _wrong(norm=_mean_norm), "these are mean sizes; LAMB's norms are ℓ2: the root of the sum of squares."
    ),
}
