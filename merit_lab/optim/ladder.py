"""From AdamW to MERIT, one switch a rung; and MERIT with one part taken away.

    for name, rung in LADDER.items():
        optimizer = build(name, model.parameters(), lr=1e-2, weight_decay=0.1)

A rung is an optimizer class and its switches. `rung.switch` says what changed from the rung before. eps and
weight_decay are no switches, and the classes differ in their defaults: pass both where rungs are compared.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from ..errors import InputError, shown
from .adamw import AdamW
from .lamb import LAMB
from .merit import MERIT
from .traced import Traced


class Rung(NamedTuple):
    """A named optimizer: its class, its switches, and what it changes."""

    name: str
    optimizer: type[Traced]
    switches: dict[str, Any]
    switch: str


def _named(*rungs):
    return {rung.name: rung for rung in rungs}


_LAMB3 = {"norm": "l2", "ratio": "weight", "bound": False, "clip": False}  # LAMB without bias correction, as a MERIT

LADDER = _named(
    Rung("AdamW", AdamW, {}, "the start: m̂ / (√v̂ + ε), decay beside it"),
    Rung("LAMB", LAMB, {}, "one ℓ2 trust ratio a tensor scales the whole update, decay included"),
    Rung("LAMB without bias correction", MERIT, _LAMB3, "m and v in place of m̂ and v̂"),
    Rung("maxLAMB", MERIT, _LAMB3 | {"norm": "max"}, "the largest element in place of the ℓ2 norm"),
    Rung(
        "+ element-wise",
        MERIT,
        {"ratio": "element", "bound": False, "clip": False},
        "a ratio an element, from its row and its column, in place of one a tensor",
    ),
    Rung("+ bound", MERIT, {"clip": False}, "the weight-wise ratio is a lower bound of each element's"),
    Rung("+ clip", MERIT, {}, "no element of the step exceeds 1: MERIT"),
)

ABLATIONS = _named(
    Rung("MERIT", MERIT, {}, "the whole"),
    Rung("MERIT without clip", MERIT, {"clip": False}, "line 8 does not clip"),
    Rung("MERIT without bound", MERIT, {"bound": False}, "b is no lower bound of s"),
    Rung("MERIT without element-wise", MERIT, {"ratio": "weight"}, "s is b everywhere"),
    Rung("MERIT row only", MERIT, {"ratio": "row"}, "the column ratio does not enter s"),
    Rung("MERIT column only", MERIT, {"ratio": "column"}, "the row ratio does not enter s"),
    Rung("MERIT l2", MERIT, {"norm": "l2"}, "ℓ2 norms in place of the largest element, everywhere"),
    Rung("MERIT paper variant", MERIT, {"variant": "paper"}, "zero norms as Algorithm 1 is printed"),
)

OPTIMIZERS = LADDER | ABLATIONS  # every name that `build` knows


def named(name: str) -> Rung:
    """The rung of this name. Raises InputError with the names there are."""
    if not isinstance(name, str) or name not in OPTIMIZERS:
        raise InputError(f"optimizer: got {shown(name)}, expected one of {', '.join(map(repr, OPTIMIZERS))}")
    return OPTIMIZERS[name]


def build(name: str, params, lr, **arguments) -> Traced:
    """The optimizer of this name over these parameters; further arguments as its class takes them.

    Raises:
        InputError: an unknown name, or an argument that this optimizer does not take.
        ValueError: an argument out of range.
    """
    rung = named(name)
    taken = rung.optimizer.argument_names()
    for argument in arguments:
        if argument not in taken:
            raise InputError(
                f"optimizer_args: {rung.optimizer.__name__} takes no {argument!r}, only {', '.join(taken)}"
            )
        # Types too, since an array compared with a string or a bool is no bool.
        given, meant = arguments[argument], rung.switches.get(argument)
        if argument in rung.switches and (type(given) is not type(meant) or given != meant):
            raise InputError(
                f"optimizer_args: {name!r} is {rung.optimizer.__name__} with {argument}={meant!r}, "
                f"got {shown(given)}; take it out or name another optimizer"
            )
    return rung.optimizer(params, lr, **rung.switches | arguments)


def step_function(name: str) -> Callable[..., tuple]:
    """The pure step function of this name, its switches set: f(weight, grad, exp_avg, exp_avg_sq, *, step, lr,
    betas, eps, weight_decay) for every name alike (MERIT does not look at `step`).
    """
    rung = named(name)
    function = partial(rung.optimizer.step_function, **rung.switches)
    if rung.optimizer.counts_steps:
        return function
    return lambda *tensors, step=None, **hyper: function(*tensors, **hyper)
