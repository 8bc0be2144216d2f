"""The check_… functions behind the notebooks' exercises, a module a notebook.

Each prints "right", "your turn", or what is wrong; tests hold every one of them against the solution printed in the
notebook and against a list of typical wrong answers.
"""

from .adamw import check_adamw
from .attention import check_max_logit
from .audit import check_separates
from .bounds import check_logit_bound
from .cost import check_traffic
from .edge import check_edge
from .lamb import check_trust_ratio
from .mediation import check_mediation
from .merit import check_element_ratio
from .patterns import check_similarity
from .start import check_passes_100
from .sweeps import check_fair

__all__ = [
    "check_adamw",
    "check_edge",
    "check_element_ratio",
    "check_fair",
    "check_logit_bound",
    "check_max_logit",
    "check_mediation",
    "check_passes_100",
    "check_separates",
    "check_similarity",
    "check_traffic",
    "check_trust_ratio",
]
