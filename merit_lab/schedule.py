"""The learning rate as a pure function of the step, so that a resumed run cannot start at another rate."""

import math


def warmup_steps(n_steps: int, warmup: float) -> int:
    """How many of n_steps steps warm up: the share `warmup` of them, rounded up."""
    return math.ceil(n_steps * warmup - 1e-9)  # 50 · .02 must be 1, also where it is 1.0000000000000002


def learning_rate(step: int, n_steps: int, peak: float, *, warmup: float = 0.02, final: float = 0.1) -> float:
    """Linear warm-up, then a cosine down to `final · peak` at the last step.

    Args:
        step: from 1 to n_steps. A warm-up of 4 steps gives .25, .5, .75, 1 of the peak: never 0.
        n_steps: length of the run.
        peak: the highest rate.
        warmup: share of the steps that warm up, 0 to 1. At 1 the run ends at the peak.
        final: share of the peak that is left at the end.
    """
    if not 1 <= step <= n_steps:
        raise ValueError(f"step: got {step!r}, expected 1 to n_steps = {n_steps}")
    rising = warmup_steps(n_steps, warmup)
    if step <= rising:
        return peak * step / rising
    progress = (step - rising) / (n_steps - rising)  # in (0, 1]: there is a step after the warm-up
    return peak * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress)))
