"""merit_lab: AdamW, LAMB and MERIT step by step, and small GPT-2 models to try them on.

    from merit_lab import AdamW, LAMB, MERIT, GPT2, GPT2Config, Recipe, train

Names are loaded when first used, so that `import merit_lab` is quick and pulls in no plotting library.
"""

from importlib import import_module

__version__ = "0.1.0"

_HOMES = {
    "AdamW": "merit_lab.optim",
    "LAMB": "merit_lab.optim",
    "MERIT": "merit_lab.optim",
    "GPT2": "merit_lab.models",
    "GPT2Config": "merit_lab.models",
    "Recipe": "merit_lab.recipe",
    "train": "merit_lab.training",
}
__all__ = ["__version__", *_HOMES]


def __getattr__(name):
    if name not in _HOMES:
        raise AttributeError(f"module 'merit_lab' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted(__all__)
