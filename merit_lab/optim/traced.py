"""The torch optimizer around a step function, and a look inside it.

`Traced` turns a pure step function into a `torch.optim.Optimizer`. It adds nothing to the arithmetic: it keeps
the moments, hands them over, and writes back what the function returns.

    optimizer = MERIT(model.parameters(), lr=9e-3)
    optimizer.watch([weight])           # from now on, keep what a step computes for this weight
    loss.backward()
    optimizer.step()
    optimizer.explain(weight)           # a MeritStep: exp_avg, direction, row_ratio, element_ratio, ...

What it guarantees:
- Gradients are only read.
- Parameters in half precision (float16, bfloat16) are computed in float32, with float32 moments and a float32
  copy of the weight (`state["master_weight"]`), so that steps too small for the half-precision grid add up.
- A step on an empty tensor does nothing.
- Without `skip_nonfinite` a NaN in a gradient reaches that parameter's weights, as in torch.optim. With it, a
  step in which any gradient holds a NaN or an infinity changes nothing and is counted in `skipped_steps`.
"""

import inspect
import math
import numbers
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from ..errors import shown
from . import fast
from .sharded import all_finite, write

HALF = (torch.float16, torch.bfloat16)


class Traced(torch.optim.Optimizer):
    """Base of AdamW, LAMB and MERIT. A subclass names its `step_function` and the checks of its own arguments.

    Raises:
        ValueError: an argument out of its range, at construction and for each parameter group; the message
            names the argument, what came and what is allowed. A parameter given twice.
        TypeError: a complex or integer parameter.
    """

    step_function: Callable[..., tuple]
    counts_steps = True  # whether the step function takes `step`
    hyper_names: tuple[str, ...]  # its other keywords; a group may hold more keys, of a scheduler or a user
    checks: ClassVar[dict[str, Callable]] = {}
    fused_form: ClassVar[str | None] = None  # which of fast.py's steps is this one's; None: it has none

    def __init__(self, params, defaults, *, maximize, skip_nonfinite):
        self._watched: set[Tensor] = set()
        self._watch_all = False
        self._explained: dict[Tensor, tuple] = {}
        self.skipped_steps = 0
        check_bool("skip_nonfinite", skip_nonfinite)
        self.skip_nonfinite = skip_nonfinite
        super().__init__(params, defaults | {"maximize": maximize})

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        keywords = inspect.signature(cls.step_function).parameters.values()
        cls.hyper_names = tuple(k.name for k in keywords if k.kind == k.KEYWORD_ONLY and k.name != "step")

    # -- construction ------------------------------------------------------------------------------------------

    @classmethod
    def argument_names(cls) -> list[str]:
        """The arguments of the constructor beside params and lr, in order."""
        return [name for name in inspect.signature(cls).parameters if name not in ("params", "lr")]

    def add_param_group(self, param_group):
        """Add parameters with their own arguments; both are checked as at construction."""
        group = dict(param_group)
        params = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        named = [p if isinstance(p, tuple) else ("", p) for p in params]  # torch accepts (name, tensor) pairs
        seen = {p for g in self.param_groups for p in g["params"]}
        for _, parameter in named:
            if not isinstance(parameter, Tensor):
                raise TypeError(f"params: got {type(parameter).__name__}, expected tensors")
            if not parameter.is_floating_point():
                raise TypeError(
                    f"params: got a {parameter.dtype} parameter of shape {tuple(parameter.shape)}, expected a "
                    "real floating-point one; view a complex parameter with torch.view_as_real"
                )
            if parameter in seen:
                raise ValueError(
                    f"params: the parameter of shape {tuple(parameter.shape)} is given twice; give each once"
                )
            seen.add(parameter)
        group["params"] = params
        self._check(self.defaults | group)
        super().add_param_group(group)

    def _check(self, group):
        _check_number("lr", group["lr"])
        _check_number("eps", group["eps"])
        _check_number("weight_decay", group["weight_decay"])
        _check_betas(group["betas"])
        check_bool("maximize", group["maximize"])
        for name, value in group.items():
            if name in self.checks:
                self.checks[name](name, value)

    # -- one step ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure=None):
        """Take one step of every parameter that has a gradient.

        Args:
            closure: computes the loss and its gradients anew and returns the loss (gradients are enabled in it).

        Raises:
            RuntimeError: a gradient is sparse; names the parameter's shape.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_gradients_are_dense()  # of all parameters, before the first one moves
        if self.skip_nonfinite and not self._gradients_are_finite():
            self.skipped_steps += 1
            return loss
        waiting = []  # sharded tensors between the two passes of the fused step: their norms travel together
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None or parameter.numel() == 0:
                    continue
                if not self._is_watched(parameter) and fast.takes(parameter, group, self.fused_form):
                    state = self._state_of(parameter)
                    state["step"] += 1
                    started = fast.start(parameter, state, group, self.fused_form)
                    if hasattr(parameter, "placements"):
                        waiting.append(started)
                    elif started is not None:
                        fast.finish(started)
                else:
                    self._step_parameter(parameter, group)
        if waiting:
            for started in fast.meet(waiting):
                fast.finish(started)
        return loss

    def _is_watched(self, parameter) -> bool:
        return self._watch_all or parameter in self._watched

    def _gradients(self):
        return [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]

    def _check_gradients_are_dense(self):
        for grad in self._gradients():
            if grad.layout != torch.strided:
                raise RuntimeError(
                    f"the gradient of the parameter of shape {tuple(grad.shape)} is sparse and "
                    f"{type(self).__name__} needs a dense one: build the embedding with sparse=False"
                )

    def _gradients_are_finite(self) -> bool:
        return all(all_finite(grad) for grad in self._gradients())

    def _step_parameter(self, parameter, group):
        grad = parameter.grad
        state = self._state_of(parameter)
        state["step"] += 1
        weight = _master_weight(parameter, state)
        hyper = {name: group[name] for name in self.hyper_names}
        if self.counts_steps:
            hyper["step"] = state["step"]
        result = type(self).step_function(
            weight,
            (-grad if group["maximize"] else grad).to(weight.dtype),
            state["exp_avg"],
            state["exp_avg_sq"],
            **hyper,
        )
        write(state["exp_avg"], result.exp_avg)
        write(state["exp_avg_sq"], result.exp_avg_sq)
        if "master_weight" in state:
            write(state["master_weight"], result.weight)
        write(parameter, result.weight)
        if self._is_watched(parameter):
            self._explained[parameter] = result

    def _state_of(self, parameter):
        state = self.state[parameter]
        if not state:
            dtype = torch.float32 if parameter.dtype in HALF else parameter.dtype
            # float64 on the host: β ** t must not lose digits, and must not wait for the device
            state["step"] = torch.zeros((), dtype=torch.float64)
            state["exp_avg"] = torch.zeros_like(parameter, dtype=dtype)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=dtype)
        if parameter.dtype in HALF and "master_weight" not in state:  # new, or loaded from a float32 run
            state["master_weight"] = parameter.detach().to(torch.float32, copy=True)
        return state

    # -- looking inside ----------------------------------------------------------------------------------------

    def watch(self, parameters=None) -> None:
        """Keep what the next steps of these parameters compute (None: of all). Costs nothing while unused.

        Args:
            parameters: a tensor or an iterable of tensors that this optimizer steps.
        """
        if parameters is None:
            self._watch_all = True
            return
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        mine = {p for group in self.param_groups for p in group["params"]}
        for parameter in parameters:
            if parameter not in mine:
                raise ValueError(f"watch: the tensor of shape {tuple(parameter.shape)} is not a parameter of mine")
        self._watched.update(parameters)

    def unwatch(self) -> None:
        """Stop keeping and let go of what was kept."""
        self._watched.clear()
        self._explained.clear()
        self._watch_all = False

    @property
    def explained(self):
        """The parameters that `explain` can say something about."""
        return self._explained.keys()

    def explain(self, parameter):
        """The named quantities of the latest watched step of this parameter (AdamWStep, LAMBStep or MeritStep).

        The tensors are in the precision of the computation: float32 for a half-precision parameter.

        Raises:
            ValueError: the parameter has not been watched, or no step has been taken since.
        """
        if parameter not in self._explained:
            shape = tuple(parameter.shape)
            if not self._is_watched(parameter):
                raise ValueError(f"explain: the parameter of shape {shape} is not watched; call watch() before step()")
            raise ValueError(f"explain: no step of the parameter of shape {shape} since watch(); call step() first")
        return self._explained[parameter]

    # -- saving and loading ------------------------------------------------------------------------------------

    def state_dict(self):
        """torch's state dict, with the count of skipped steps beside it."""
        return super().state_dict() | {"skipped_steps": self.skipped_steps}

    def load_state_dict(self, state_dict):
        """Load a state saved on any device. Moments keep float32 where the parameter is half precision."""
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "skipped_steps"})
        self.skipped_steps = state_dict.get("skipped_steps", 0)
        for group in self.param_groups:
            self._check(group)
        # torch casts what it loads to the parameter's dtype; take the half-precision ones from the source again
        saved_ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for saved_id, parameter in zip(saved_ids, parameters, strict=True):
            for name, value in state_dict["state"].get(saved_id, {}).items():
                if name == "step":
                    self.state[parameter][name] = value.to("cpu", torch.float64, copy=True)
                elif parameter.dtype in HALF:
                    self.state[parameter][name] = value.to(parameter.device, torch.float32, copy=True)

    def __getstate__(self):
        mine = ("_watched", "_watch_all", "skipped_steps", "skip_nonfinite")
        return super().__getstate__() | {name: getattr(self, name) for name in mine}

    def __setstate__(self, state):
        super().__setstate__(state)
        self._explained = {}  # what a step computed belongs to the original, not to a copy


def _master_weight(parameter, state):
    """The weight to compute with: the parameter, or its float32 copy where it is half precision.

    Where somebody has changed the parameter since (loaded weights, say), the parameter is right.
    """
    if "master_weight" not in state:
        return parameter
    master = state["master_weight"]
    return torch.where(master.to(parameter.dtype) == parameter, master, parameter.to(master.dtype))


# -- checks: each names the argument, what came and what is allowed -----------------------------------------------


def _check_number(name, value):
    if isinstance(value, Tensor):
        if value.ndim != 0:
            raise ValueError(f"{name}: got a tensor of shape {tuple(value.shape)}, expected a number or a 0-D tensor")
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name}: got {shown(value)}, expected a number ≥ 0")
    if not is_finite(value) or value < 0:
        raise ValueError(f"{name}: got {shown(value)}, expected a finite number ≥ 0")


def _check_betas(betas):
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise ValueError(f"betas: got {shown(betas)}, expected two numbers (β₁, β₂), each in [0, 1)")
    for index, beta in enumerate(betas):
        if isinstance(beta, bool) or not isinstance(beta, numbers.Real) or not 0 <= beta < 1:
            raise ValueError(f"betas[{index}]: got {shown(beta)}, expected a number in [0, 1)")


def is_finite(value) -> bool:
    """Whether a real number is finite as a float: 10**400 is not."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def check_bool(name, value):
    """Raise ValueError unless value is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}: got {shown(value)}, expected True or False")


def check_fused(name, value):
    """Raise ValueError unless value is True, False or "auto"."""
    if not isinstance(value, bool) and value != "auto":
        raise ValueError(f"{name}: got {value!r}, expected True, False or 'auto'")


def check_positive_or_none(name, value):
    """Raise ValueError unless value is None or a finite number > 0."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and value > 0 and is_finite(value)
    if value is not None and not good:
        raise ValueError(f"{name}: got {shown(value)}, expected None or a finite number > 0")


def check_one_of(*allowed):
    """A check that raises ValueError unless the value is one of these."""

    def check(name, value):
        if not isinstance(value, str) or value not in allowed:
            raise ValueError(f"{name}: got {shown(value)}, expected one of {', '.join(map(repr, allowed))}")

    return check
