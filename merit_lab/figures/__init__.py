"""Static figures, one function a figure, drawn from records. Widgets draw with them too.

    from merit_lab import figures, runs
    figures.show(figures.loss_and_logit(runs.read_many("data/runs")))

curves.py: runs over time. sweeps.py: many finished runs. matrices.py: weights and ratios as heatmaps.
lessons.py: a few numbers as lines, heatmaps or text, no run behind them. attention.py: attention weights as images.
evidence.py: the recorded sweeps beside the paper's figures. cost.py: bytes of a step, and a roofline.
output.py: show and save. style.py: colours, markers, scales.
"""

from .attention import attention_maps
from .cost import Timed, operations, roofline
from .curves import (
    Curve,
    curves,
    dashboard,
    entropy_over_time,
    logit_by_layer,
    logit_growth,
    loss_and_logit,
    loss_curves,
    ratio_over_time,
    ratio_tensors,
    seeds_band,
    shares_over_time,
    softmax_row,
)
from .evidence import batch_curves, inherent, noise_along
from .lessons import heatmaps, lines, side_by_side
from .matrices import PatternPicture, StepPicture, pattern_maps, step_maps
from .output import alt_of, bundle, png, save, show
from .style import LOOKS, look
from .sweeps import ladder, loss_against_logit, sweep_batch, sweep_lr, table

__all__ = [
    "LOOKS",
    "Curve",
    "PatternPicture",
    "StepPicture",
    "Timed",
    "alt_of",
    "attention_maps",
    "batch_curves",
    "bundle",
    "curves",
    "dashboard",
    "entropy_over_time",
    "heatmaps",
    "inherent",
    "ladder",
    "lines",
    "logit_by_layer",
    "logit_growth",
    "look",
    "loss_against_logit",
    "loss_and_logit",
    "loss_curves",
    "noise_along",
    "operations",
    "pattern_maps",
    "png",
    "ratio_over_time",
    "ratio_tensors",
    "roofline",
    "save",
    "seeds_band",
    "shares_over_time",
    "show",
    "side_by_side",
    "softmax_row",
    "step_maps",
    "sweep_batch",
    "sweep_lr",
    "table",
]
