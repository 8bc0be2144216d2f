"""What one optimizer step did, in plain numbers: the same from a live run and from a file."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

from . import probes
from .errors import InputError, shown
from .recipe import LARGEST_COUNT


@dataclass
class StepRecord:
    """What one optimizer step did. Fields below the line are None except at the steps where they are measured.

    A record keeps no tensor: it is plain numbers, the same whether it comes from a live run or from a file.
    """

    step: int  # from 1
    tokens: int  # seen so far
    lr: float
    train_loss: float  # nats a token, on this step's batch, before the step
    grad_norm: float  # global ℓ2 norm of the gradients, before clipping
    seconds: float  # since the run began, measuring included
    diverged: bool = False  # the loss is not finite: this is the last record
    # -- measured after the step, on held-out text --
    val_loss: float | None = None  # nats a token
    max_attention_logit: list[list[float]] | None = None  # n_layer x n_head, largest |z|
    max_attention_logit_signed: list[list[float]] | None = None  # n_layer x n_head, largest z
    attention_entropy: list[list[float]] | None = None  # n_layer x n_head, nats
    largest_logit: dict | None = None  # probes.LargestLogit as a dict
    ratios: dict[str, dict] | None = None  # parameter name -> probes.RatioSummary as a dict; empty for AdamW
    # -- where the recipe asks for it --
    clipped_heads: int | None = None  # heads, over all layers, that QK-clip scaled after this step
    # {"gradient_sq": |G|², "trace": tr Σ} before the step, unbiased, so that gradient_sq may be below 0. Average each
    # over several records before taking the ratio: probes.average_noise_scale.
    noise_scale: dict[str, float] | None = None

    @property
    def peak_logit(self) -> float | None:
        """Largest |attention logit| over all layers and heads, if measured."""
        return max(map(max, self.max_attention_logit)) if self.max_attention_logit else None

    def to_dict(self) -> dict:
        """The fields that hold something."""
        return {k: v for k, v in dataclasses.asdict(self).items() if v is not None}

    @classmethod
    def from_dict(cls, values: dict) -> "StepRecord":
        """The record that `to_dict` wrote. InputError that names the field for whatever a run cannot have recorded."""
        if not isinstance(values, dict):
            raise InputError(f"record: got {shown(values)}, expected a table of field = value")
        kinds = {f.name: f for f in dataclasses.fields(cls)}
        for name, value in values.items():
            if name not in kinds:
                raise InputError(f"record: got an unknown field {shown(name)}, expected one of {', '.join(kinds)}")
            if value is None and kinds[name].default is None:
                continue
            good, expected = RECORDED[name]
            if not good(value):
                raise InputError(f"record: {name}: got {shown(value)}, expected {expected}")
        for name, kind in kinds.items():
            if kind.default is dataclasses.MISSING and name not in values:
                raise InputError(f"record: {name} is missing")
        return cls(**values)


# -- what a record may hold, for files that came from elsewhere -----------------------------------------------------


def _is_number(value) -> bool:
    """A real number, NaN and infinity among them: a run that diverges has both. float32 measures no 1e100."""
    if isinstance(value, float):
        return not math.isfinite(value) or abs(value) < 1e100
    return _is_whole(value) and abs(value) <= LARGEST_COUNT


def _is_whole(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(value, least=0) -> bool:
    return _is_whole(value) and least <= value <= LARGEST_COUNT


def _is_list(value) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_number, value))


def _is_table(value) -> bool:
    rows = isinstance(value, list) and bool(value) and all(map(_is_list, value))
    return rows and len({len(row) for row in value}) == 1


def _has(value, kinds: dict) -> bool:
    return isinstance(value, dict) and value.keys() == kinds.keys() and all(kinds[k](v) for k, v in value.items())


def _is_largest_logit(value) -> bool:
    places = dict.fromkeys(("layer", "head", "sequence", "query", "key"), _is_count)
    if not _has(value, places | {"logit": _is_number, "softmax": _is_list}):
        return False
    return value["key"] <= value["query"] and len(value["softmax"]) == value["query"] + 1


def _is_quantiles(value) -> bool:
    return _is_list(value) and len(value) == 5


def _is_ratios(value) -> bool:
    summary = dict.fromkeys(probes.RatioSummary._fields, _is_number) | {"quantiles": _is_quantiles}
    # Runs that were recorded before these were measured lack them.
    later = dict.fromkeys(probes.RatioSummary._field_defaults, lambda q: q is None or _is_quantiles(q))
    return isinstance(value, dict) and all(
        isinstance(name, str) and isinstance(ratios, dict) and _has(dict.fromkeys(later) | ratios, summary | later)
        for name, ratios in value.items()
    )


_NUMBER = _is_number, "a number"
_TABLE = _is_table, "a list for each layer of a number for each head"
RECORDED: dict[str, tuple[Callable, str]] = {  # field of StepRecord -> its check, and what it expects in words
    "step": (lambda value: _is_count(value, least=1), "a whole number ≥ 1"),
    "tokens": (_is_count, "a whole number ≥ 0"),
    "lr": _NUMBER,
    "train_loss": _NUMBER,
    "grad_norm": _NUMBER,
    "seconds": _NUMBER,
    "diverged": (lambda value: isinstance(value, bool), "true or false"),
    "val_loss": _NUMBER,
    "max_attention_logit": _TABLE,
    "max_attention_logit_signed": _TABLE,
    "attention_entropy": _TABLE,
    "largest_logit": (_is_largest_logit, "the fields of probes.LargestLogit, a softmax over the keys up to query"),
    "ratios": (_is_ratios, "for each parameter the fields of probes.RatioSummary"),
    "clipped_heads": (_is_count, "a whole number ≥ 0"),
    "noise_scale": (
        lambda value: _has(value, {"gradient_sq": _is_number, "trace": _is_number}), "gradient_sq and trace, numbers",
    ),
}  # fmt: skip
