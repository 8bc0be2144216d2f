"""The check_… functions behind the notebooks' exercises, a module a notebook.

Each prints "right", "your turn", or what is wrong; tests hold every one of them against the solution printed in the
notebook and against a list of typical wrong answers.
"""

from .adamw import check_adamw
from .lamb import check_trust_ratio

__all__ = [
    "check_adamw",
    "check_trust_ratio",
]
