"""A recipe: everything that decides a training run, in one place, checked when it is made.

    recipe = Recipe.named("compare", optimizer="MERIT", seed=1)
    recipe.replace(lr=2e-2).to_dict()

The same recipe and seed on the same machine give the same numbers.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch

from . import files, optim, text
from .errors import InputError, shown
from .models import GPT2Config
from .optim.traced import is_finite

DEVICES = ("auto", "cpu", "cuda", "mps")
PRECISIONS = ("auto", "fp32", "bf16")
LARGEST_COUNT = 10**15  # of tokens, sequences or steps: no run is longer, and all of it is whole in a float
LARGEST_BATCH = 2**28  # tokens, 32 times the paper's largest batch: more is a slip of the keyboard
PAPER_ARGS = {"betas": (0.9, 0.95), "weight_decay": 0.1}  # MERIT paper, section on settings


@dataclass(frozen=True)
class Recipe:
    """What to train, on what, how. Every field is checked; an InputError names the field, its value, and what is
    allowed.
    """

    model: str | dict = "nano"  # a size ("nano", "gpt2", …) or {"named": "nano", "qk_norm": True, …}
    text: str = "shakespeare"  # as merit_lab.text.load takes it: "shakespeare", "file:my.txt@gpt2", …
    optimizer: str = "MERIT"  # AdamW, LAMB, MERIT, or any rung of the ladder
    optimizer_args: dict[str, Any] = field(default_factory=dict)  # on top of betas (.9, .95), weight_decay .1
    lr: float = 0.01  # peak learning rate
    batch_size: int = 64  # sequences a step
    micro_batch_size: int | None = None  # sequences a forward pass; None: as many as run well, at most 64
    tokens: int = 1_000_000  # token budget; the number of steps follows from it
    warmup: float = 0.02  # share of the steps that warm up
    final_lr: float = 0.1  # share of the peak rate at the end of the cosine
    grad_clip: float | None = 1.0  # largest global ℓ2 norm of the gradients; None: no clipping
    qk_clip: float | None = None  # τ: after a step, heads with a larger |attention logit| are scaled down to it
    seed: int = 0  # decides the first weights and the order of the data
    device: str = "auto"  # CUDA if there is one, else the CPU
    precision: str = "auto"  # bf16 autocast on CUDA, else fp32
    block_size: int | None = None  # tokens a sequence; None: the model's own
    probe_every: int | None = None  # steps between probes of attention and ratios; None: 30 in a run
    eval_every: int | None = None  # steps between validation losses; None: 10 in a run
    noise_every: int | None = None  # steps between measurements of the gradient noise; None: never
    eval_sequences: int = 128  # sequences a validation loss is taken over

    def __post_init__(self):
        for name in ("batch_size", "tokens", "eval_sequences"):
            self._check_count(name)
        for name in ("micro_batch_size", "block_size", "probe_every", "eval_every", "noise_every"):
            self._check_count(name, or_none=True)
        self._check_number("lr", low=0)
        self._check_number("warmup", low=0, high=1)
        self._check_number("final_lr", low=0, high=1)
        self._check_number("grad_clip", low=0, or_none=True, open_low=True)
        self._check_number("qk_clip", low=0, or_none=True, open_low=True)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise InputError(f"seed: got {shown(self.seed)}, expected a whole number from 0 to 2^63 - 1")
        self._check_choice("device", DEVICES)
        self._check_choice("precision", PRECISIONS)
        text.check_spec(self.text)
        self._check_optimizer()
        config = self.model_config()  # checks the model
        object.__setattr__(self, "block_size", config.block_size)
        if isinstance(self.model, dict):
            object.__setattr__(self, "model", {name: _plain(value) for name, value in self.model.items()})
        if self.qk_clip is not None and config.qk_norm:
            raise InputError(
                f"qk_clip: got {self.qk_clip!r} for a model with qk_norm=True, where the scale of W_Q and W_K does not "
                "reach the attention logits; set qk_clip to None or qk_norm to False"
            )
        if self.tokens < self.tokens_per_step:
            raise InputError(
                f"tokens: got {self.tokens}, less than one batch: {self.batch_size} sequences of {self.block_size} "
                f"tokens are {self.tokens_per_step}; raise tokens or lower batch_size"
            )
        if self.tokens_per_step > LARGEST_BATCH:
            raise InputError(
                f"batch_size: got {self.batch_size}, a batch of {self.tokens_per_step:,} tokens, above the limit of "
                f"{LARGEST_BATCH:,}; lower batch_size or block_size"
            )

    # -- what follows from the fields ----------------------------------------------------------------------------

    @property
    def tokens_per_step(self) -> int:
        """Tokens in one batch."""
        return self.batch_size * self.block_size

    @property
    def n_steps(self) -> int:
        """Optimizer steps: the token budget in whole batches."""
        return self.tokens // self.tokens_per_step

    def model_config(self, vocab_size: int | None = None) -> GPT2Config:
        """The model's configuration; vocab_size comes from the text, unless the recipe sets it."""
        if isinstance(self.model, str):
            overrides = {"named": self.model}
        elif isinstance(self.model, dict):
            overrides = dict(self.model)
        else:
            raise InputError(f"model: got {shown(self.model)}, expected a size or a table such as {{'named': 'nano'}}")
        name = overrides.pop("named", None)
        if self.block_size is not None:
            overrides["block_size"] = self.block_size
        if vocab_size is not None:
            overrides.setdefault("vocab_size", vocab_size)
        try:
            return GPT2Config.named(name, **overrides) if name is not None else GPT2Config(**overrides)
        except TypeError:
            known = ", ".join(f.name for f in dataclasses.fields(GPT2Config))
            raise InputError(f"model: got {shown(self.model)}, expected the keys named, {known}") from None

    def replace(self, **changes) -> "Recipe":
        """A copy with other values, checked anew. A new model brings its own block_size unless one is given."""
        if "model" in changes:
            changes.setdefault("block_size", None)
        _refuse_unknown(changes)
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain values alone, for JSON."""
        values = dataclasses.asdict(self)
        values["optimizer_args"] = {k: list(v) if isinstance(v, tuple) else v for k, v in self.optimizer_args.items()}
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Recipe":
        """The recipe of a table as `to_dict` makes it."""
        if not isinstance(values, dict):
            raise InputError(f"recipe: got {type(values).__name__}, expected a table of field = value")
        _refuse_unknown(values)
        return cls(**values)

    @classmethod
    def read(cls, path: str | Path, **changes) -> "Recipe":
        """The recipe in a TOML file: `field = value` lines."""
        path = Path(path)
        try:
            values = files.read_toml(path)
        except OSError as error:
            raise InputError(f"recipe: cannot read {path} ({error.strerror}); give a TOML file or a name") from None
        except ValueError as error:  # also that of a number too long for Python, which tomllib lets through
            raise InputError(f"recipe: {path} is not TOML: {error}") from None
        return cls.from_dict(values | changes)

    @classmethod
    def named(cls, name: str, **changes) -> "Recipe":
        """A recipe of RECIPES. Its learning rate is the optimizer's own; the preset's `lr_from` says where it is from.

        Args:
            changes: fields to set otherwise.
        """
        preset = _preset(name)
        _refuse_unknown(changes)
        optimizer = changes.get("optimizer", "MERIT")
        rates = preset.lr
        values = preset.fields | {"optimizer": optimizer, "lr": rates.get(optimizer, rates["MERIT"])} | changes
        if "model" in changes and "block_size" not in changes:
            values.pop("block_size", None)
        return cls(**values)

    # -- checks --------------------------------------------------------------------------------------------------

    def _check_count(self, name, or_none=False):
        value = getattr(self, name)
        if value is None and or_none:
            return
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{name}: got {shown(value)}, expected a whole number ≥ 1{' or None' * or_none}")
        if value > LARGEST_COUNT:
            raise InputError(f"{name}: got {shown(value)}, expected a whole number from 1 to {LARGEST_COUNT:,}")

    def _check_number(self, name, low, high=math.inf, or_none=False, open_low=False):
        value = getattr(self, name)
        if value is None and or_none:
            return
        good = isinstance(value, int | float) and not isinstance(value, bool) and is_finite(value)
        if not good or not low <= value <= high or (open_low and value == low):
            bounds = f"{'> ' if open_low else '≥ '}{low}" if high == math.inf else f"from {low} to {high}"
            raise InputError(f"{name}: got {shown(value)}, expected a finite number {bounds}{' or None' * or_none}")

    def _check_choice(self, name, allowed):
        value = getattr(self, name)
        if not isinstance(value, str) or value not in allowed:
            raise InputError(f"{name}: got {shown(value)}, expected one of {', '.join(allowed)}")

    def _check_optimizer(self):
        if not isinstance(self.optimizer, str):
            raise InputError(f"optimizer: got {shown(self.optimizer)}, expected a name such as 'MERIT'")
        if not isinstance(self.optimizer_args, dict):
            raise InputError(f"optimizer_args: got {shown(self.optimizer_args)}, expected a table of argument = value")
        arguments = PAPER_ARGS | self.optimizer_args
        if isinstance(arguments["betas"], list):
            arguments["betas"] = tuple(arguments["betas"])
        try:  # the optimizer knows best which arguments it takes
            optim.build(self.optimizer, [torch.zeros(1)], self.lr, **arguments)
        except InputError:
            raise
        except (ValueError, TypeError) as error:
            raise InputError(f"optimizer_args: {error}") from None
        object.__setattr__(self, "optimizer_args", {name: _plain(value) for name, value in arguments.items()})


def _plain(value):
    """A number of numpy, torch or another library as Python's own, which JSON can hold; anything else as it is."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    if isinstance(value, torch.Tensor):
        return value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def _refuse_unknown(values):
    known = [f.name for f in dataclasses.fields(Recipe)]
    for name in values:
        if name not in known:
            raise InputError(f"recipe: got an unknown field {shown(name)}, expected one of {', '.join(known)}")


@dataclass(frozen=True)
class Preset:
    """A recipe by name: its fields, each optimizer's learning rate, what it is for and how long a run takes."""

    purpose: str
    fields: dict[str, Any]
    lr: dict[str, float]
    time: str  # of one run, and on what; "computed" where nobody has measured it
    lr_from: str  # where the rates come from


SEARCHED = "a small search with one seed"
GUESSED = "guesses between those of compare and the paper's; search them first"
OWN_TEXT = "hf:Skylion007/openwebtext@gpt2"  # or "file:…@gpt2", "folder:…@gpt2"
A100 = 312e12  # bf16 FLOP a second at its peak; what `Preset.time` is computed with, see `seconds_at`

RECIPES = {
    "tiny": Preset(
        "to see that everything works",
        {"model": "nano", "batch_size": 16, "tokens": 40_960, "eval_sequences": 16},
        {"AdamW": 5e-3, "LAMB": 5e-2, "MERIT": 5e-2},
        "a few seconds on 2 CPU cores, measured",
        SEARCHED,
    ),
    "start": Preset(
        "the picture of the first notebook",
        {"model": "nano", "batch_size": 64, "tokens": 131_072, "eval_sequences": 64},
        {"AdamW": 3e-3, "LAMB": 6e-2, "MERIT": 4e-2},
        "5 to 25 s on 2 CPU cores, measured",
        SEARCHED,
    ),
    "compare": Preset(
        "a large batch on a CPU: the lab's main comparison",
        {"model": "micro", "batch_size": 256, "tokens": 1_000_000},
        {"AdamW": 2e-3, "LAMB": 5e-2, "MERIT": 3e-2},
        "1 min on 2 CPU cores, measured",
        SEARCHED,
    ),
    "mini": Preset(
        "a large batch on a GPU, 400 steps",
        {"model": "mini", "text": "addresses", "batch_size": 256, "tokens": 26_214_400, "micro_batch_size": 256},
        {"AdamW": 2e-3, "LAMB": 2e-2, "MERIT": 2e-2},
        "40 s on an A100, computed at 15 % of its peak",
        GUESSED,
    ),
    "base": Preset(
        "three times that model, twice the context, 400 steps",
        {"model": "base", "text": "addresses", "batch_size": 512, "tokens": 104_857_600, "micro_batch_size": 128},
        {"AdamW": 2e-3, "LAMB": 1e-2, "MERIT": 1e-2},
        "5 min on an A100, computed at 25 % of its peak",
        GUESSED,
    ),
    # The paper's large-batch runs. Micro-batches fit 80 GB, also in fp32 and without fused attention.
    "gpt2": Preset(
        "GPT-2 Small as the paper's, on OpenWebText or a text of yours",
        {"model": "gpt2", "text": OWN_TEXT, "batch_size": 1024, "tokens": 2_000_000_000, "micro_batch_size": 32},
        {"AdamW": 2e-3, "LAMB": 8e-3, "MERIT": 9e-3},
        "4 h on an A100, computed at 40 % of its peak",
        "MERIT's is the paper's best; the others are guesses, the middle of the paper's searches",
    ),
    "gpt2-medium": Preset(
        "GPT-2 Medium as the paper's, likewise",
        {"model": "gpt2-medium", "text": OWN_TEXT, "batch_size": 4096, "tokens": 8_000_000_000, "micro_batch_size": 16},
        {"AdamW": 2e-3, "LAMB": 8e-3, "MERIT": 9e-3},
        "43 h on an A100, computed at 40 % of its peak",
        "those of gpt2, guesses for this size",
    ),
    "gpt2-large": Preset(
        "GPT-2 Large as the paper's, likewise",
        {"model": "gpt2-large", "text": OWN_TEXT, "batch_size": 8192, "tokens": 16_000_000_000, "micro_batch_size": 8},
        {"AdamW": 2e-3, "LAMB": 8e-3, "MERIT": 9e-3},
        "8 days on an A100, computed at 40 % of its peak",
        "those of gpt2, guesses for this size",
    ),
}


def flops_a_token(config: GPT2Config, parameters: int) -> int:
    """Floating-point operations of training on one token, forward and backward: 6 N + 12 · layers · width · context.

    The second term is that of the attention logits and of their product with the values, the masked half counted in
    (Chowdhery et al. 2022, PaLM, appendix B). The optimizer's own arithmetic is left out.

    Args:
        parameters: N, a tied embedding counted once.
    """
    return 6 * parameters + 12 * config.n_layer * config.n_embd * config.block_size


def seconds_at(recipe: Recipe, parameters: int, flops_a_second: float) -> float:
    """How long a run of this recipe computes at this speed: the device's peak times the share of it that is reached."""
    return recipe.n_steps * recipe.tokens_per_step * flops_a_token(recipe.model_config(), parameters) / flops_a_second


def _preset(name: str) -> Preset:
    if not isinstance(name, str) or name not in RECIPES:
        raise InputError(f"recipe: got {shown(name)}, expected one of {', '.join(RECIPES)} or a TOML file")
    return RECIPES[name]
