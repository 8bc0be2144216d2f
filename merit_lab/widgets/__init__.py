"""Widgets for notebooks, each a class that works in one line.

    OptimizerXRay()          one weight matrix, one step, optimizers side by side, element by element
    LiveTraining(recipes)    two to four optimizers in lockstep, or recorded runs replayed
    LogitGrowth(runs)        attention logits, layers x time, and the softmax row that collapses
    WeightPatterns(run)      rows and columns of W_Q and W_K, heads, outlier dimensions

They are loaded when first used: `import merit_lab.widgets` alone pulls in no ipywidgets and no matplotlib.
"""

from importlib import import_module

_HOMES = {
    "OptimizerXRay": "xray",
    "LiveTraining": "live",
    "LogitGrowth": "growth",
    "WeightPatterns": "patterns",
}
__all__ = ["LiveTraining", "LogitGrowth", "OptimizerXRay", "WeightPatterns"]


def __getattr__(name):
    if name not in _HOMES:
        raise AttributeError(f"module 'merit_lab.widgets' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted(__all__)
