"""Logit growth: where and when attention logits grow, and what that does to attention.

    LogitGrowth(runs.read_many("data/runs"))

Above, layers (or heads) x time in log colours: the largest |z|, the paper's measure, outlined where its threshold of
100 is passed. Below, the attention row that the largest z belongs to, sign included, at the chosen time, as it
collapses to one-hot. A negative logit can be larger in size; it turns no row one-hot, and the sentence names it.
"""

import ipywidgets
from matplotlib.figure import Figure

from .. import figures
from ..errors import InputError
from .base import LabWidget


class LogitGrowth(LabWidget):
    """A heatmap of the max attention logit |z| over time, and the softmax row of the largest z, sign included.

    Args:
        runs: a recorded run or several, in any form that figures take. InputError if attention was never measured.

    Attributes:
        run, per_head, time: the controls. `time` counts the measurements; the line beside it names the step.
    """

    def __init__(self, runs):
        self.curves = [curve for curve in figures.curves(runs) if _probed(curve)]
        if not self.curves:
            raise InputError("runs: none of them has measured attention logits; record them with probe_every set")
        self.figure: Figure | None = None
        wide = {"style": {"description_width": "initial"}, "layout": {"width": "330px", "max_width": "100%"}}
        options = [(curve.label, i) for i, curve in enumerate(self.curves)]
        last = len(_probed(self.curves[0])) - 1
        self.run = ipywidgets.Dropdown(options=options, value=0, description="run", **wide)
        self.per_head = ipywidgets.Checkbox(description="each head", indent=False, layout={"width": "auto"})
        self.time = ipywidgets.IntSlider(
            value=last, min=0, max=last, description="time", readout=False, continuous_update=False, **wide
        )
        self.play = ipywidgets.Play(value=last, min=0, max=last, interval=400, show_repeat=False)
        self.when = ipywidgets.HTML()
        self._link = ipywidgets.jslink((self.play, "value"), (self.time, "value"))
        row = {"flex_flow": "row wrap", "width": "100%", "align_items": "center"}
        super().__init__([
            ipywidgets.HBox([self.run, self.per_head], layout=row),
            ipywidgets.HBox([self.time, self.play, self.when], layout=row),
        ])  # fmt: skip
        self.on_change(self.run, self._another_run)
        self.on_change(self.per_head, self.refresh)
        self.on_change(self.time, self.refresh)
        self.refresh()

    def _another_run(self):
        was, last = (self.time.value, self.time.max), len(_probed(self.curves[self.run.value])) - 1
        at = round(was[0] / max(was[1], 1) * last)  # as far into the run as before
        self.time.max = self.play.max = last
        if self.time.value == at:
            self.refresh()
        else:
            self.time.value = at

    def draw(self) -> Figure:
        """The heatmap with the chosen time marked, and the softmax row then."""
        curve = self.curves[self.run.value]
        probed = _probed(curve)
        step = probed[min(self.time.value, len(probed) - 1)].step
        self.when.value = f"step {step:,} of {curve.records[-1].step:,}"
        self.figure = figures.logit_growth(curve, per_head=self.per_head.value, at=step, row=True, figure=self.figure)
        return self.figure

    def close(self) -> None:
        """Close every widget inside."""
        if getattr(self, "_link", None) is not None:
            self._link.close()
            self._link = None
        super().close()
        self.figure = None


def _probed(curve):
    return [record for record in curve.measured if record.max_attention_logit]
