"""What is put through the contract: an optimizer, what it promises, and where it differs."""

import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any

import oracle
import pytest
import torch
from torch.optim import Optimizer

from merit_lab.optim import ABLATIONS, LADDER, LAMB, MERIT, AdamW, Rung

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}

PROMISES = {
    "decoupled decay": "weight decay never enters the moments",
    "zero over zero": "where ε and a gradient are 0 nothing moves and nothing becomes NaN",
    "skip_nonfinite": "with skip_nonfinite=True a step whose gradients hold a NaN or an infinity changes nothing and "
    "is counted in skipped_steps",
    "checks": "a rate, decay, ε or β out of its range is a ValueError at construction that says the value",
    "checks all": "so is every argument of a wrong kind or length, and in each group; the message names the argument, "
    "its value and its range",
    "real": "a complex or integer parameter is a TypeError at construction",
    "sparse": "a sparse gradient is a RuntimeError that names the parameter's shape, before anything has moved",
    "once": "a parameter given twice is a ValueError",
    "float32 inside": "half-precision parameters are computed in float32, with float32 moments, and steps too small "
    "for their grid add up",
    "maximize": "maximize=True climbs",
}

TORCH = {
    "zero over zero": "divides 0 by 0, which is NaN",
    "skip_nonfinite": "has no such option; a GradScaler leaves such a step out",
    "checks all": "looks at construction alone, and not for infinities, kinds or lengths; it says the value, but no "
    "range",
    "real": "takes complex parameters, as pairs of real numbers, and integer ones too, until they are stepped",
    "sparse": "a RuntimeError too, without the shape",
    "once": "warns, and steps the parameter twice; in two groups it is a ValueError",
    "float32 inside": "arithmetic and moments are in the parameter's precision, and small steps are lost in it",
}


@dataclass(frozen=True)
class Subject:
    """An optimizer under contract. It keeps every promise of PROMISES but those in `differs`.

    Args:
        name: shown in the tests' names.
        build: callable(params, **arguments) -> torch.optim.Optimizer; a class, or a partial of one.
        differs: promise -> what it does instead. The cases assert the difference.
        rule: what scales a step, so that a case knows its numbers: "plain" (nothing, as in AdamW), or a trust ratio of
            norms: "l2" or "max". None: not known, and only what holds for any optimizer is asked.
        corrected: whether moments are corrected for their start at 0. Without, |u| = (1-β₁)/√(1-β₂) on a first step.
        clips: whether no element of a step exceeds lr.
        largest_norm: the limit of the weights' norm in the ratio, None: no limit.
        leaves_zero: whether a matrix of zeros learns.
        reference: the weight after each step in plain Python, called as oracle.adamw is; None: there is none.
    """

    name: str
    build: Callable[..., Optimizer]
    differs: dict[str, str] = field(default_factory=dict)
    rule: str | None = None
    corrected: bool = True
    clips: bool = False
    largest_norm: float | None = None
    leaves_zero: bool = True
    reference: Callable[..., list[dict]] | None = None

    def __post_init__(self):
        unknown = self.differs.keys() - PROMISES.keys()
        if unknown:
            raise ValueError(f"differs: got {', '.join(sorted(unknown))}, expected some of {', '.join(PROMISES)}")

    @property
    def takes(self) -> frozenset[str]:
        """The names of the arguments of `build`."""
        return frozenset(inspect.signature(self.build).parameters)

    def keeps(self, promise: str) -> bool:
        """Whether it keeps a promise of PROMISES."""
        assert promise in PROMISES
        return promise not in self.differs

    def make(self, params, **arguments: Any) -> Optimizer:
        """The optimizer over these parameters; without those of betas, eps and weight_decay that it does not take."""
        left_out = {"betas", "eps", "weight_decay"} - self.takes
        return self.build(params, **{name: value for name, value in arguments.items() if name not in left_out})

    @classmethod
    def of(cls, optimizer: type[Optimizer]) -> "Subject":
        """A class of which nothing else is said: one of torch's own differs as AdamW does, any other in nothing."""
        differs = {}
        if optimizer.__module__.startswith("torch.optim"):
            differs = TORCH | {"decoupled decay": "λ w is added to the gradient"}
        if "maximize" not in inspect.signature(optimizer).parameters:
            differs["maximize"] = "does not take it"
        return cls(optimizer.__name__, optimizer, differs)


# -- ours, and torch's ---------------------------------------------------------------------------------------------


def _of_rung(rung: Rung, **build) -> Subject:
    """A rung of the ladder as a subject: its traits follow from its switches."""
    optimizer = partial(rung.optimizer, **rung.switches, **build)
    if rung.optimizer is AdamW:
        return Subject(rung.name, optimizer, rule="plain", reference=oracle.adamw)
    if rung.optimizer is LAMB:
        corrected, limit = rung.switches.get("bias_correction", True), rung.switches.get("max_weight_norm")
        reference = partial(oracle.lamb, corrected=corrected, max_weight_norm=limit or inf)
        return Subject(rung.name, optimizer, rule="l2", corrected=corrected, largest_norm=limit, reference=reference)
    return Subject(
        rung.name,
        optimizer,
        rule=rung.switches.get("norm", "max"),
        corrected=False,
        clips=rung.switches.get("clip", True),
        leaves_zero=rung.switches.get("variant") != "paper",  # as printed: every ratio of a zero matrix is 0
        reference=partial(oracle.merit, **rung.switches),
    )


def _ours() -> Iterator[Subject]:
    rungs = [*ABLATIONS.values(), *LADDER.values()]
    rungs = [r for i, r in enumerate(rungs) if r[1:3] not in [other[1:3] for other in rungs[:i]]]  # "+ clip" is MERIT
    rungs.append(Rung("LAMB clamped", LAMB, {"bias_correction": False, "max_weight_norm": 10.0}, "as pytorch-lamb"))
    for rung in rungs:
        if "fused" in inspect.signature(rung.optimizer).parameters:
            yield _of_rung(rung, fused=False)
            yield _of_rung(rung._replace(name=f"{rung.name}, fused"), fused=True)
        else:
            yield _of_rung(rung)


SUBJECTS = [
    *_ours(),
    Subject("torch.optim.AdamW", torch.optim.AdamW, TORCH, rule="plain", reference=oracle.adamw),
]
FUSED = "fused" in inspect.signature(MERIT).parameters


def find(name: str) -> Subject:
    """The subject that `--optimizer` names: module.Class, module:Class, or either with a Subject in the class's place.

    Raises:
        pytest.UsageError: there is no such module or name in it, or it is neither of the two.
    """
    module, _, attribute = name.replace(":", ".").rpartition(".")
    try:
        found = getattr(importlib.import_module(module or name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise pytest.UsageError(f"--optimizer: got {name!r}, expected mypackage.MyOptimizer: {error}") from None
    if isinstance(found, Subject):
        return found
    if isinstance(found, type) and issubclass(found, Optimizer):
        return Subject.of(found)
    raise pytest.UsageError(f"--optimizer: {name} is {found!r}, expected a torch.optim.Optimizer or a Subject")


# -- a case and what it runs for -----------------------------------------------------------------------------------


def row(kind: str, where: Callable[[Subject], bool] = lambda subject: True):
    """Mark a test as the case of this kind. `where`: the subjects it can be asked of, the others have no such thing."""

    def mark(test):
        test.kind, test.where = kind, where
        return test

    return mark


def combinations(test, subjects: list[Subject]) -> list[tuple[Subject, str]]:
    """(subject, name of the dtype) for each run of a case."""
    return [(subject, name) for subject in subjects if test.where(subject) for name in DTYPES]
