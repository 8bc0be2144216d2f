"""Tables, figures and verdicts out of recorded sweeps: python -m merit_lab.evidence (make evidence)."""

import math
from statistics import mean, stdev


def mean_and_spread(losses: list[float | None]) -> str:
    """Mean ± standard deviation over seeds; runs that diverged (None) are counted, not averaged."""
    there = [loss for loss in losses if loss is not None and math.isfinite(loss)]
    gone = f", {len(losses) - len(there)} diverged" if len(there) < len(losses) else ""
    if not there:
        return f"all {len(losses)} diverged"
    spread = f" ± {stdev(there):.3f}" if len(there) > 1 else ""
    return f"{mean(there):.3f}{spread}{gone}"
