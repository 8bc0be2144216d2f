"""AdamW, LAMB and MERIT, each a pure step function and a thin torch optimizer around it.

To find a quantity of MERIT's Algorithm 1 start in merit.py, of LAMB in lamb.py, of AdamW in adamw.py; the norms
and ratios they share are in ratios.py, the ladder from one to the next in ladder.py. The same steps at the speed of
memory are in fast.py, what tensors in shards need in sharded.py.
"""

from .adamw import AdamW, AdamWStep, adamw_step
from .ladder import ABLATIONS, LADDER, OPTIMIZERS, Rung, build, named, step_function
from .lamb import LAMB, LAMBStep, lamb_step
from .merit import MERIT, MeritStep, merit_ratios, merit_step
from .ratios import l2_norm, max_norm, quotient, trust_ratio
from .traced import Traced

__all__ = [
    "ABLATIONS",
    "LADDER",
    "LAMB",
    "MERIT",
    "OPTIMIZERS",
    "AdamW",
    "AdamWStep",
    "LAMBStep",
    "MeritStep",
    "Rung",
    "Traced",
    "adamw_step",
    "build",
    "l2_norm",
    "lamb_step",
    "max_norm",
    "merit_ratios",
    "merit_step",
    "named",
    "quotient",
    "step_function",
    "trust_ratio",
]
