"""The optimizer X-ray: one weight matrix, one step, optimizers beside each other, element by element.

    OptimizerXRay()                                    presets and matrices typed by hand
    OptimizerXRay(optimizers=["LAMB", "MERIT"])        any names of merit_lab.optim.OPTIMIZERS
    OptimizerXRay(weight=[[0, 0], [.1, .2]], grad=1)   your own
    OptimizerXRay(run=training)                        W_Q and W_K of a live Training, a Run, or a GPT2

Everything shown is what the project's own step functions returned; nothing is computed anew here.
Rows, columns and steps count from 1, as in the paper.
"""

import html
import math
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import ipywidgets
import numpy as np
import torch
from torch import Tensor

from .. import optim
from ..errors import InputError
from ..figures import matrices
from ..figures.style import join
from ..optim import traced
from ..probes.weights import query_key_weights
from .base import TEXT, LabWidget

NONE = "(none)"
OWN = "your own entries"
SHOWS = {
    "everything": tuple(matrices.QUANTITIES),
    "ratios: u, s, decided by": ("u", "s", "decided"),
    "steps: w, s, update": ("w", "s", "update"),
}
GRADIENTS = {
    "the same g at every step": "same",
    "random around g (step 1 is g)": "random",
}
SETTINGS = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.0}
MOST_KEPT = 8_000_000  # numbers of earlier steps that are kept for the way back; beyond that they are taken again


class Preset(NamedTuple):
    """A worked case: weights, gradients, what to look for, and settings that belong to it."""

    weight: Any
    grad: Any
    hint: str
    settings: Mapping[str, float] = MappingProxyType({})


def _random_preset():
    generator = torch.Generator().manual_seed(0)
    draw = [torch.randn(8, 8, generator=generator, dtype=torch.float64) for _ in range(2)]
    return (0.3 * draw[0]).round(decimals=2), draw[1].round(decimals=2)


_QUIET = 1e-7  # below ε: the direction is then far smaller than elsewhere

PRESETS = {
    "a quiet row and a quiet column": Preset(
        [[0.2, -0.1, 0.3, 0.1], [0.6, -0.4, 0.5, -0.3], [0.1, 0.2, -0.4, 0.1], [-0.2, 0.1, 0.2, 1.2]],
        [[1, -1, _QUIET, 0.5], [_QUIET] * 4, [0.5, 2, -_QUIET, -1], [-1, 0.3, _QUIET, -2]],
        "Row 2 and column 3 have almost no gradient, so their own ratios r and c are far above b and win: they move "
        "as far as the rest. The weight 1.2 makes b large enough for the clip.",
    ),
    "one large row, one large column": Preset(
        [[0.1, -0.05, 0.6, 0.08], [0.5, -0.4, 0.9, 0.45], [-0.1, 0.05, 0.5, -0.02], [0.06, 0.1, -0.7, 0.1]],
        [[1, -1, 1, 1], [1, 1, -1, 1], [-1, 1, 1, -1], [1, -1, 1, 1]],
        "Large weights alone do not make r or c win: on a first step |u| is the same everywhere, so no row or column "
        "exceeds b. Go forward with random gradients and watch the ratios part.",
    ),
    "a zero row": Preset(
        [[0, 0], [0.1, 0.2]],
        [[1, 1], [1, 1]],
        "Row 1 is zero, so its ratio is guarded: s is 1 there, and row 1 moves by −0.0044721. 'MERIT paper variant' "
        "leaves the zero ratio out of the maximum instead: −0.002.",
    ),
    "a dead column": Preset(
        [[0.3, 0.4], [0.1, 0.2]],
        [[0, 1], [0, 1]],
        "Column 1 has no gradient: its direction is 0, its ratio would divide by 0. It stays where it is, finite.",
    ),
    "no gradient, decay alone": Preset(
        [[1, -0.5], [0.25, 2]],
        [[0, 0], [0, 0]],
        "With g = 0 the direction is λw. LAMB shrinks every weight by η w whatever λ is; AdamW by η λ w; MERIT too by "
        "η w, but the clip stops at 1.",
        {"weight_decay": 0.1},
    ),
    "one outlier weight": Preset(
        [[0.1] * 5, [0.1] * 5, [0.1, 0.1, 2.0, 0.1, 0.1], [0.1] * 5, [0.1] * 5],
        [[1, -1, 1, 1, -1], [-1, 1, 1, -1, 1], [1, 1, 1, -1, -1], [1, -1, -1, 1, 1], [-1, 1, -1, 1, -1]],
        "One weight of 2 sets b for the whole matrix: every element of Δ is the clip's 1, ten times most weights. "
        "LAMB's ℓ2 norm sees the outlier less.",
    ),
    "Q, K and V in one matrix": Preset(
        [[0.1, 0.1], [0.1, 0.1], [1, 1]],
        [[1, 1], [1, 1], [1, 1]],
        "Rows Q, K and V share their columns' maxima: Q moves by −0.01 here; in a matrix of its own by −0.001.",
    ),
    "random, 8 x 8": Preset(*_random_preset(), "Normal weights and gradients. Move the outlier's slider."),
}


class OptimizerXRay(LabWidget):
    """Look into one step of one to three optimizers on one weight matrix.

    Args:
        optimizers: one to three names of merit_lab.optim.OPTIMIZERS.
        preset: a name of PRESETS to begin with.
        weight, grad: your own matrix (n, k), at most 16 x 16, and its gradient, a matrix or one number for all.
        run: where W_Q and W_K come from: a live Training (with its latest gradients), a Run that kept weights, a
            GPT2, or a table of tensors. At most 16 x 16 elements are shown, the ratios are those of the whole.
        steps: how far time goes.
        lr, betas, eps, weight_decay: of every optimizer shown. With a run, its own are taken where none is given.
        seed: of random gradients.

    Raises InputError for what cannot be used; later errors go to the status line.
    """

    def __init__(
        self,
        optimizers: Sequence[str] = ("AdamW", "LAMB", "MERIT"),
        *,
        preset: str | None = None,
        weight=None,
        grad=None,
        run=None,
        steps: int = 20,
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        seed: int = 0,
    ):
        names = [optimizers] if isinstance(optimizers, str) else list(optimizers)
        if not 1 <= len(names) <= 3:
            raise InputError(f"optimizers: got {len(names)} names, expected one to three")
        for name in names:
            optim.named(name)
        if preset is not None and preset not in PRESETS:
            raise InputError(f"preset: got {preset!r}, expected one of {', '.join(map(repr, PRESETS))}")
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise InputError(f"steps: got {steps!r}, expected a whole number ≥ 1")
        given = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        self._given = {key: value for key, value in given.items() if value is not None}
        _check({**SETTINGS, **self._given})
        self.run = run
        self._matrices = _from_run(run) if run is not None else {}
        self._quiet = 0  # above 0 while several controls are set together
        self._histories: dict[str, _History] = {}
        self._make_controls(names, steps, {**SETTINGS, **self._given}, seed)
        super().__init__(self._rows(), [self.reading])
        try:
            if weight is not None:
                w = as_matrix(weight, "weight")
                g = as_matrix(1.0 if grad is None else grad, "grad")
                self._take_entries(to_text(w), to_text(g))
            else:
                self.source.value = preset or next(iter(self._matrices or PRESETS))
                self._take_source(**self._given)
            self.refresh()
            if self.error is not None:
                raise self.error
        except Exception:
            self.close()
            raise
        self._listen()

    # -- controls --------------------------------------------------------------------------------------------

    def _make_controls(self, names, steps, settings, seed):
        def box(description, value, **how):
            layout = {"width": how.pop("width", "150px")}
            kind = how.pop("kind", ipywidgets.FloatText)
            return kind(
                value=value, description=description, layout=layout, style={"description_width": "initial"}, **how
            )

        def choice(description, options, value, width):
            return box(description, value, kind=ipywidgets.Dropdown, options=options, width=width)

        def count(description, value, most, width="120px"):
            return box(description, value, kind=ipywidgets.BoundedIntText, min=1, max=most, width=width)

        known = list(optim.OPTIMIZERS)
        chosen = [*names, NONE, NONE][:3]
        self.optimizers = [
            choice(f"Optimizer {place}", known if place == 1 else [NONE, *known], name, "300px")
            for place, name in enumerate(chosen, 1)
        ]
        options = [*self._matrices, *PRESETS, OWN]
        self.source = choice("Matrix", options, options[0], "330px")
        self.show = choice("Show", list(SHOWS), "everything", "260px")
        entries = {"continuous_update": False, "kind": ipywidgets.Textarea, "width": "370px", "rows": 5}
        self.weight_text = box("w", "", **entries, placeholder="rows of numbers, a line a row")
        self.grad_text = box("g", "", **entries, placeholder="rows of numbers, or one for all")
        self.outlier_in = choice("Outlier in", ["w", "g"], "w", "130px")
        self.outlier_row, self.outlier_column = count("row", 1, 1, "100px"), count("column", 1, 1, "120px")
        self.outlier = box(
            "times",
            1.0,
            kind=ipywidgets.FloatLogSlider,
            width="330px",
            base=10,
            min=0,
            max=3,
            step=0.05,
            readout_format=".3g",
            continuous_update=False,
        )
        beta1, beta2 = settings["betas"]
        self.lr, self.beta1, self.beta2 = (
            box("η, lr", settings["lr"], step=0.001),
            box("β₁", beta1, step=0.01, width="110px"),
            box("β₂", beta2, step=0.01, width="110px"),
        )
        self.eps = box("ε", settings["eps"], step=1e-6, width="130px")
        self.weight_decay = box("λ, decay", settings["weight_decay"], step=0.01)
        self.gradients = choice("Gradients", list(GRADIENTS), next(iter(GRADIENTS)), "330px")
        self.seed = box("Seed", seed, kind=ipywidgets.BoundedIntText, min=0, max=2**31 - 1, width="140px")
        self.back = ipywidgets.Button(description="Back", tooltip="one step back in time", layout={"width": "90px"})
        self.forward = ipywidgets.Button(
            description="Forward", tooltip="one step forward in time", layout={"width": "90px"}
        )
        self.time = box("Step", 1, kind=ipywidgets.IntSlider, min=1, max=steps, width="360px", continuous_update=False)
        self.row, self.column = count("Element: row", 1, 1, "170px"), count("column", 1, 1, "130px")
        self.hint = ipywidgets.HTML()
        self.reading = ipywidgets.HTML()

    def _rows(self):
        def row(*widgets):
            return ipywidgets.HBox(widgets, layout={"flex_flow": "row wrap"})

        return [
            row(*self.optimizers),
            row(self.source, self.show),
            self.hint,
            row(self.weight_text, self.grad_text),
            row(self.outlier_in, self.outlier_row, self.outlier_column, self.outlier),
            row(self.lr, self.beta1, self.beta2, self.eps, self.weight_decay),
            row(self.gradients, self.seed),
            row(self.back, self.time, self.forward, self.row, self.column),
        ]

    def _listen(self):
        for control in (*self.optimizers, self.show, self.row, self.column, self.time):
            self.on_change(control, self._look)
        restarting = [self.lr, self.beta1, self.beta2, self.eps, self.weight_decay, self.gradients, self.seed]
        restarting += [self.outlier, self.outlier_in, self.outlier_row, self.outlier_column]
        for control in restarting:
            self.on_change(control, self._restart)
        self.on_change(self.source, self._source_chosen)
        for control in (self.weight_text, self.grad_text):
            self.on_change(control, self._entries_typed)
        self.on_click(self.back, lambda: self._move(-1))
        self.on_click(self.forward, lambda: self._move(1))

    def _look(self):
        if not self._quiet:
            self.refresh()

    def _restart(self):
        if not self._quiet:
            _check(self.settings)
            self._histories.clear()
            self.refresh()

    def _move(self, by):
        self.time.value = min(max(self.time.value + by, self.time.min), self.time.max)  # its observer draws

    def _source_chosen(self):
        if not self._quiet:
            self._take_source()
            self.refresh()

    def _entries_typed(self):
        if not self._quiet:
            self._take_entries(self.weight_text.value, self.grad_text.value)
            self.refresh()

    # -- the matrix ------------------------------------------------------------------------------------------

    def _take_source(self, **first):
        """The matrix of the source chosen, with the settings that belong to it; those given here come first."""
        name = self.source.value
        if name in self._matrices:
            weight, grad, hint = self._matrices[name]
            size = f"{weight.shape[0]} x {weight.shape[1]}"
            texts = (f"{name}, {size}", "its gradient")
        elif name in PRESETS:
            preset = PRESETS[name]
            weight, grad, hint = as_matrix(preset.weight, "w"), as_matrix(preset.grad, "g"), preset.hint
            texts = (to_text(weight), to_text(grad))
        else:
            return self._take_entries(self.weight_text.value, self.grad_text.value)
        self._quiet += 1
        try:
            self.weight_text.value, self.grad_text.value = texts
            for text in (self.weight_text, self.grad_text):
                text.disabled = name in self._matrices
            # A preset's hint speaks of the lab's settings and its own; a run comes with the run's.
            own = PRESETS[name].settings if name in PRESETS else _settings_of(self.run)
            for key, value in {**SETTINGS, **self._given, **own, **first}.items():
                if key == "betas":
                    self.beta1.value, self.beta2.value = value
                else:
                    getattr(self, key).value = value
            self._take(weight, grad, hint)
        finally:
            self._quiet -= 1

    def _take_entries(self, weight_text, grad_text):
        """The matrix that was typed."""
        if self.weight_text.disabled:
            # from a run to your own entries: begin with a matrix that can be typed
            preset = next(iter(PRESETS.values()))
            weight_text, grad_text = to_text(as_matrix(preset.weight, "w")), to_text(as_matrix(preset.grad, "g"))
        weight, grad = parse(weight_text, "w"), parse(grad_text, "g")
        if max(weight.shape) > matrices.MOST_CELLS:
            raise InputError(
                f"w: got {weight.shape[0]} x {weight.shape[1]}, expected {matrices.MOST_CELLS} rows and columns at most"
            )
        if grad.numel() == 1:
            grad = grad.expand_as(weight).clone()
        if grad.shape != weight.shape:
            raise InputError(
                f"g: got {grad.shape[0]} x {grad.shape[1]}, but w is {weight.shape[0]} x {weight.shape[1]}; give g as "
                "many rows and columns, or one number for all"
            )
        self._quiet += 1
        try:
            self.source.value = OWN
            self.weight_text.value, self.grad_text.value = weight_text, grad_text
            self.weight_text.disabled = self.grad_text.disabled = False
            self._take(weight, grad, "Rows are lines; numbers are parted by spaces or commas.")
        finally:
            self._quiet -= 1

    def _take(self, weight, grad, hint):
        self._weight, self._grad = weight, grad
        n, k = weight.shape
        for control, most in (
            (self.row, n),
            (self.column, k),
            (self.outlier_row, n),
            (self.outlier_column, k),
        ):
            control.max = most  # brings the value into range too
        self.time.value = 1
        self.outlier.value = 1.0
        self.hint.value = f'<p style="{TEXT} margin: 2px 0">{html.escape(hint)}</p>'
        self._histories.clear()

    @property
    def weight(self) -> Tensor:
        """w before the first step, the outlier in it."""
        return self._with_outlier(self._weight, "w")

    def gradient(self, step: int) -> Tensor:
        """g of this step, the outlier in it."""
        grad = self._grad
        if GRADIENTS[self.gradients.value] == "random" and step > 1:
            generator = torch.Generator().manual_seed(1_000_003 * self.seed.value + step)
            noise = torch.randn(grad.shape, generator=generator, dtype=torch.float64).to(grad.dtype)
            spread = grad.square().mean().sqrt()
            grad = grad + noise * (spread if spread > 0 else 1.0)
        return self._with_outlier(grad, "g")

    def _with_outlier(self, matrix, name):
        if self.outlier_in.value != name or self.outlier.value == 1:
            return matrix
        matrix = matrix.clone()
        matrix[self.outlier_row.value - 1, self.outlier_column.value - 1] *= self.outlier.value
        return matrix

    # -- what was computed -----------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """The optimizers shown, each once."""
        return list(dict.fromkeys(d.value for d in self.optimizers if d.value != NONE))

    @property
    def settings(self) -> dict[str, Any]:
        """lr, betas, eps and weight_decay as they are set."""
        return {
            "lr": self.lr.value,
            "betas": (self.beta1.value, self.beta2.value),
            "eps": self.eps.value,
            "weight_decay": self.weight_decay.value,
        }

    def taken(self, name: str) -> "Taken":
        """The step of this optimizer at the time shown, with what it started from."""
        if name not in self._histories:
            self._histories[name] = _History(name, self.weight, self.gradient, self.settings)
        return self._histories[name].at(self.time.value)

    def draw(self):
        _check(self.settings)
        taken = {name: self.taken(name) for name in self.names}
        n, k = self._weight.shape
        i, j = self.row.value - 1, self.column.value - 1
        window, origin = _window(n, k, i, j)
        pictures = [_picture(name, step, window) for name, step in taken.items()]
        size = f"a {n} x {k} matrix"
        if (n, k) != pictures[0].w.shape:
            rows, columns = (f"{part.start + 1} to {part.stop}" for part in window)
            size = f"rows {rows} and columns {columns} of {size}, ratios of the whole"
        about = [f"Step {self.time.value} on {size}.", _moves(taken, i, j)]
        about += [words for name, step in taken.items() if (words := _counts(name, step))]
        figure = matrices.step_maps(
            pictures,
            chosen=(i - origin[0], j - origin[1]),
            origin=origin,
            quantities=SHOWS[self.show.value],
            title=f"step {self.time.value} of {self.time.max}",
            about=" ".join(about),
        )
        self.reading.value = _tables({name: explain(name, step, i, j) for name, step in taken.items()}, i, j)
        return figure

    def close(self):
        self._histories, self._matrices, self.run = {}, {}, None
        super().close()


# -- steps in time -------------------------------------------------------------------------------------------


class Taken(NamedTuple):
    """One step: what it started from and what the step function returned."""

    number: int  # t, from 1
    weight: Tensor  # before the step
    grad: Tensor
    exp_avg: Tensor  # before the step
    exp_avg_sq: Tensor
    settings: dict[str, Any]
    step: tuple  # AdamWStep, LAMBStep or MeritStep


class _History:
    """The steps of one optimizer on one sequence of gradients, taken as they are asked for."""

    def __init__(self, name, weight, gradient: Callable[[int], Tensor], settings):
        self.function, self.gradient, self.settings = optim.step_function(name), gradient, settings
        zeros = torch.zeros_like(weight)
        self.states = {0: (weight, zeros, zeros)}  # weight, m, v after so many steps
        self.latest: Taken | None = None

    def at(self, number: int) -> Taken:
        """Step `number`."""
        if self.latest is not None and self.latest.number == number:
            return self.latest
        start = max(t for t in self.states if t < number)
        for t in range(start + 1, number + 1):
            weight, exp_avg, exp_avg_sq = self.states[t - 1]
            grad = self.gradient(t)
            step = self.function(weight, grad, exp_avg, exp_avg_sq, step=t, **self.settings)
            self.latest = Taken(t, weight, grad, exp_avg, exp_avg_sq, self.settings, step)
            self.states[t] = (step.weight, step.exp_avg, step.exp_avg_sq)
            if 3 * weight.numel() * len(self.states) > MOST_KEPT:
                for old in [old for old in self.states if old not in (0, t)]:
                    del self.states[old]
        return self.latest


def decided_by(name: str, step) -> np.ndarray | None:
    """For each element what its factor is: "row", "column", "bound" (the whole matrix's ratio) or "guarded".

    A tie goes to the whole matrix's ratio where it takes part, then to the row. None for AdamW, which has no ratio.
    """
    if not hasattr(step, "weight_ratio"):
        return None
    if not hasattr(step, "element_ratio"):  # LAMB
        return np.full(step.update.shape, "guarded" if step.guarded else "bound", dtype=object)
    switches = optim.named(name).switches
    has_bound = switches.get("bound", True) or switches.get("ratio") == "weight"
    by_row = switches.get("ratio", "element") in ("element", "row")
    s = step.element_ratio
    decided = np.full(s.shape, "column", dtype=object)
    if by_row:
        decided[(s == step.row_ratio).numpy()] = "row"
    if has_bound:
        decided[(s == step.weight_ratio).numpy()] = "bound"
    decided[step.guarded.numpy()] = "guarded"
    return decided


def _picture(name, taken, window) -> matrices.StepPicture:
    step, (rows, columns) = taken.step, window

    def part(tensor):
        return tensor[rows, columns].numpy()

    picture = matrices.StepPicture(name, part(taken.weight), part(taken.grad), part(step.direction), part(step.update))
    decided = decided_by(name, step)
    if decided is None:
        return picture
    picture = picture._replace(decided=decided[rows, columns], b=step.weight_ratio.item())
    if not hasattr(step, "element_ratio"):  # LAMB
        return picture._replace(s=np.full(picture.w.shape, picture.b))
    return picture._replace(
        s=part(step.element_ratio),
        r=step.row_ratio[rows, 0].numpy(),
        c=step.column_ratio[0, columns].numpy(),
        clipped=part(step.clipped),
    )


def _window(n, k, i, j):
    """The part of a matrix that is shown, as two slices, and its first element: it holds (i, j)."""
    most = matrices.MOST_CELLS

    def start(size, at):
        return max(0, min(at // most * most, size - most))

    origin = start(n, i), start(k, j)
    return tuple(slice(o, min(o + most, size)) for o, size in zip(origin, (n, k), strict=True)), origin


# -- in words ------------------------------------------------------------------------------------------------


class Line(NamedTuple):
    """One line of an algorithm at one element."""

    line: str  # its number in adamw.py, lamb.py or merit.py
    rule: str  # what it says
    here: str  # with the numbers of this element


def explain(name: str, taken: Taken, i: int, j: int) -> list[Line]:
    """How the step of element (i, j), counted from 0, came about, in the lines of the optimizer's own file."""
    kind = optim.named(name).optimizer
    lines = {optim.AdamW: _adamw_lines, optim.LAMB: _lamb_lines, optim.MERIT: _merit_lines}[kind]
    return _moments(taken, i, j) + lines(name, taken, i, j)


def _moments(taken, i, j):
    beta1, beta2 = taken.settings["betas"]
    step = taken.step
    g, m, v = (x[i, j].item() for x in (taken.grad, taken.exp_avg, taken.exp_avg_sq))
    return [
        Line(
            "1",
            "m ← β₁ m + (1 − β₁) g",
            f"{_n(beta1)} · {_n(m)} + {_n(1 - beta1)} · {_n(g)} = {_at(step.exp_avg, i, j)}",
        ),
        Line(
            "2",
            "v ← β₂ v + (1 − β₂) g²",
            f"{_n(beta2)} · {_n(v)} + {_n(1 - beta2)} · {_n(g)}² = {_at(step.exp_avg_sq, i, j)}",
        ),
    ]


def _adamw_lines(name, taken, i, j):
    step, settings, t = taken.step, taken.settings, taken.number
    beta1, beta2 = settings["betas"]
    w, m_hat, v_hat = _at(taken.weight, i, j), _at(step.exp_avg_hat, i, j), _at(step.exp_avg_sq_hat, i, j)
    d, eps, decay = _at(step.direction, i, j), _n(settings["eps"]), _n(settings["weight_decay"])
    new = _at(step.weight, i, j)
    return [
        Line("3", "m̂ ← m / (1 − β₁ᵗ)", f"{_at(step.exp_avg, i, j)} / (1 − {_n(beta1)}^{t}) = {m_hat}"),
        Line("4", "v̂ ← v / (1 − β₂ᵗ)", f"{_at(step.exp_avg_sq, i, j)} / (1 − {_n(beta2)}^{t}) = {v_hat}"),
        Line("5", "d ← m̂ / (√v̂ + ε)", f"{m_hat} / (√{v_hat} + {eps}) = {d}"),
        Line("6", "w ← w − η (d + λ w)", f"{w} − {_n(settings['lr'])} · ({d} + {decay} · {w}) = {new}"),
    ]


def _lamb_lines(name, taken, i, j):
    step, settings, t = taken.step, taken.settings, taken.number
    beta1, beta2 = settings["betas"]
    w, u, b = _at(taken.weight, i, j), _at(step.direction, i, j), _n(step.weight_ratio)
    norms = f"{_n(step.weight_norm)} / {_n(step.direction_norm)}"
    guarded = bool(step.guarded)
    return [
        Line(
            "3",
            "m̂ ← m / (1 − β₁ᵗ), v̂ ← v / (1 − β₂ᵗ)",
            f"{_at(step.exp_avg, i, j)} / (1 − {_n(beta1)}^{t}), {_at(step.exp_avg_sq, i, j)} / (1 − {_n(beta2)}^{t})",
        ),
        Line("4", "u ← m̂ / (√v̂ + ε) + λ w", f"ε = {_n(settings['eps'])}, λ = {_n(settings['weight_decay'])}: {u}"),
        Line("5", "b ← ‖w‖₂ / ‖u‖₂", f"{norms}: a norm is 0, guarded: {b}" if guarded else f"{norms} = {b}"),
        Line("6", "w ← w − η b u", f"{w} − {_n(settings['lr'])} · {b} · {u} = {_at(step.weight, i, j)}"),
    ]


def _merit_lines(name, taken, i, j):
    step, settings, switches = taken.step, taken.settings, optim.named(name).switches
    l2 = switches.get("norm") == "l2"
    size, sign = (optim.l2_norm, "₂") if l2 else (optim.max_norm, "_m")
    official = switches.get("variant", "official") == "official"
    w, u, s = (_at(x, i, j) for x in (taken.weight, step.direction, step.element_ratio))
    m, v = _at(step.exp_avg, i, j), _at(step.exp_avg_sq, i, j)
    decay = _n(settings["weight_decay"])

    def ratio(line, letter, of, ratio, dim, place):
        """One of lines 4 to 6: the norms, their quotient, the guard."""
        top, under = (
            (size(x) if dim is None else size(x, dim).flatten()[place]) for x in (taken.weight, step.direction)
        )
        value = _n(ratio if dim is None else ratio.flatten()[place])
        words = f"{_n(top)} / {_n(under)} = {value}"
        if official and (top == 0 or under == 0):
            words = f"{_n(top)} / {_n(under)}: a norm is 0, guarded: {value}"
        elif under == 0:
            words = f"{_n(top)} / 0: left out of the maximum"
        return Line(line, f"{letter} ← ‖w{of}‖{sign} / ‖u{of}‖{sign}", words)

    rows, columns = f"r{_sub(i + 1)}", f"c{_sub(j + 1)}"
    decided = decided_by(name, step)[i, j]
    r, c, b = _n(step.row_ratio[i, 0]), _n(step.column_ratio[0, j]), _n(step.weight_ratio)
    takes = switches.get("ratio", "element")
    bound = switches.get("bound", True)
    rule, here = {
        "element": ("max(r, c)", f"max({r}, {c})"),
        "row": ("r", r),
        "column": ("c", c),
        "weight": ("b", b),
    }[takes]
    if bound and takes != "weight":
        rule, here = f"max({rule}, b)", f"max({here}, {b})"
    winner = {"row": "the row's ratio won", "column": "the column's ratio won", "bound": "the whole matrix's ratio won"}
    if decided == "guarded":
        reason = "a row or column of w or of u is all zero" if official else "some direction is all zero"
        here = f"{reason}, guarded: {s}"
    else:
        here = f"{here} = {s}: {winner[decided]}"
    cut = bool(step.clipped[i, j])
    clips = switches.get("clip", True)
    product = _n((step.element_ratio * step.direction)[i, j])
    return [
        Line("3", "u ← m / (√v + ε) + λ w", f"{m} / (√{v} + {_n(settings['eps'])}) + {decay} · {w} = {u}"),
        ratio("4", "b", "", step.weight_ratio, None, 0),
        ratio("5", rows, f"{_sub(i + 1)},:", step.row_ratio, 1, i),
        ratio("6", columns, f":,{_sub(j + 1)}", step.column_ratio, 0, j),
        Line("7", f"s ← {rule}", here),
        Line(
            "8",
            "Δ ← clip(s · u, 1)" if clips else "Δ ← s · u, no clip in this rung",
            f"{s} · {u} = {product}" + (f", clipped to {_at(step.update, i, j)}" if cut else ", not clipped" * clips),
        ),
        Line(
            "9",
            "w ← w − η Δ",
            f"{w} − {_n(settings['lr'])} · {_at(step.update, i, j)} = {_at(step.weight, i, j)}",
        ),
    ]


def _n(value) -> str:
    return f"{float(value):.5g}".replace("-", "−")


def _at(tensor, i, j) -> str:
    return _n(tensor[i, j])


def _sub(number: int) -> str:
    return str(number).translate(str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉"))


def _moves(taken, i, j) -> str:
    moves = [f"{name} by {_n((step.step.weight - step.weight)[i, j])}" for name, step in taken.items()]
    return f"The outlined element, row {i + 1}, column {j + 1}, is moved: {join(moves)}."


def _counts(name, taken) -> str:
    """How many elements each ratio decided, for optimizers that have row and column ratios."""
    if not hasattr(taken.step, "element_ratio"):
        return ""
    decided = decided_by(name, taken.step)
    row, column, bound, guarded = (int((decided == part).sum()) for part in ("row", "column", "bound", "guarded"))
    clipped = int(taken.step.clipped.sum())
    return (
        f"{name}: of {decided.size} elements the row's ratio decides {row}, the column's {column}, the whole matrix's "
        f"{bound}, the guard {guarded}; {clipped} clipped."
    )


_CELL = "padding: 1px 10px 1px 0; text-align: left; vertical-align: top; font-weight: normal; border: none"


def _tables(lines: dict[str, list[Line]], i, j) -> str:
    """The lines of each optimizer as an HTML table."""
    tables = []
    for name, found in lines.items():
        rows = "".join(
            f'<tr style="background: none"><th scope="row" style="{_CELL}">{html.escape(line.line)}</th>'
            f'<td style="{_CELL}">{html.escape(line.rule)}</td><td style="{_CELL}">{html.escape(line.here)}</td></tr>'
            for line in found
        )
        heads = "".join(f'<th scope="col" style="{_CELL}">{word}</th>' for word in ("line", "rule", "here"))
        tables.append(
            '<table style="border-collapse: collapse; margin: 0 24px 8px 0; line-height: 1.35; font-size: 0.92em">'
            f'<caption style="text-align: left; font-weight: bold; caption-side: top">{html.escape(name)}: '
            f"element in row {i + 1}, column {j + 1}</caption>"
            f"<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
        )
    return f'<div style="display: flex; flex-wrap: wrap; align-items: flex-start">{"".join(tables)}</div>'


# -- matrices in and out -------------------------------------------------------------------------------------


def parse(text: str, name: str) -> Tensor:
    """A matrix of doubles from lines of numbers. InputError that says which cell is wrong, and what came."""
    rows = []
    for number, line in enumerate((part for part in text.replace(";", "\n").splitlines() if part.strip()), 1):
        row = []
        for place, word in enumerate(line.replace(",", " ").replace("−", "-").split(), 1):
            try:
                value = float(word)
            except ValueError:
                value = math.nan
            if not math.isfinite(value):
                raise InputError(f"{name}, row {number}, column {place}: got {word!r}, expected a finite number")
            row.append(value)
        if not row:
            raise InputError(f"{name}, row {number}: got {line.strip()!r}, expected numbers")
        if rows and len(row) != len(rows[0]):
            raise InputError(f"{name}, row {number}: got {len(row)} numbers, but row 1 has {len(rows[0])}")
        rows.append(row)
    if not rows:
        raise InputError(f"{name}: got no numbers, expected rows of numbers, a line a row")
    return torch.tensor(rows, dtype=torch.float64)


def as_matrix(values, name: str) -> Tensor:
    """A matrix of doubles from nested lists, an array, a tensor or one number."""
    try:
        if isinstance(values, Tensor) and values.dtype != torch.float64:
            # to the digits that float32 holds, so that .1 is shown and taken as .1
            values = [[float(f"{x:.7g}") for x in row] for row in torch.atleast_2d(values.detach().float()).tolist()]
        matrix = torch.as_tensor(values, dtype=torch.float64).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{name}: got {values!r}, expected a matrix of numbers ({error})") from None
    if matrix.ndim == 0:
        matrix = matrix[None, None]
    if matrix.ndim != 2 or matrix.numel() == 0 or not torch.isfinite(matrix).all():
        raise InputError(f"{name}: got shape {tuple(matrix.shape)}, expected a matrix of finite numbers")
    return matrix


def to_text(matrix: Tensor) -> str:
    """What `parse` reads back, exactly."""
    return "\n".join(" ".join(f"{value!r}".removesuffix(".0") for value in row) for row in matrix.tolist())


def _from_run(run) -> dict[str, tuple[Tensor, Tensor, str]]:
    """W_Q and W_K of every layer with their gradients: name -> (weight, grad, hint)."""
    found = {}
    model = getattr(run, "model", run)
    for layer, pair in enumerate(query_key_weights(run)):
        grads = _gradients(model, layer)
        for place, (name, weight) in enumerate((("W_Q", pair.query), ("W_K", pair.key))):
            hint = "Moments start at 0. The gradient is the one of the latest step."
            if grads is None:
                generator = torch.Generator().manual_seed(2 * layer + place)
                grad = torch.randn(weight.shape, generator=generator)
                hint = "Moments start at 0. The gradient is random: none is kept with these weights."
            else:
                grad = grads[place]
            found[f"layer {layer}, {name}"] = (weight, grad, hint)
    return found


def _gradients(model, layer):
    """Copies of the gradients of W_Q and W_K, or None where there are none."""
    if not hasattr(model, "blocks"):
        return None
    attention = model.blocks[layer].attention
    if attention.fused:
        grad = attention.qkv.weight.grad
        grads = (None, None) if grad is None else grad.chunk(3)[:2]
    else:
        grads = attention.query.weight.grad, attention.key.weight.grad
    if any(grad is None for grad in grads):
        return None
    return [grad.detach().float().cpu().clone() for grad in grads]


def _check(settings):
    """InputError that names the setting, what came and what is allowed."""
    try:  # as the optimizers do; to construct one would load half of torch first
        traced._check_betas(settings["betas"])
        for name in ("lr", "eps", "weight_decay"):
            traced._check_number(name, settings[name])
    except ValueError as error:
        raise InputError(str(error)) from None


def _settings_of(run) -> dict[str, Any]:
    """lr, betas, eps and weight decay that the run's recipe names, if it has one."""
    recipe = getattr(run, "recipe", None)
    if recipe is None:
        return {}
    return {"lr": recipe.lr} | {key: recipe.optimizer_args[key] for key in SETTINGS if key in recipe.optimizer_args}


def benchmark_xray(size=8, moves=20, optimizers: Sequence[str] = ("AdamW", "LAMB", "MERIT")) -> list[float]:
    """Seconds from a new value of the outlier's slider to the new picture, for each of some moves.

    The goal is a median below 0.2 on an 8 x 8 matrix and two CPU cores. The time the browser takes is not in it.
    """
    generator = torch.Generator().manual_seed(0)
    weight, grad = (torch.randn(size, size, generator=generator) for _ in range(2))
    xray = OptimizerXRay(optimizers, weight=weight, grad=grad)
    seconds = []
    for move in range(moves):
        before, started = xray.frames, time.perf_counter()
        xray.outlier.value = 10 ** (0.1 * (move + 1))
        seconds.append(time.perf_counter() - started)
        if xray.frames != before + 1:
            raise RuntimeError(f"the slider's move made {xray.frames - before} pictures, expected one")
    xray.close()
    return seconds
