"""Notebook 00: at a learning rate too large for AdamW, the batch size at which its attention logit passes 100."""

import dataclasses
import json
import math
from collections.abc import Callable
from functools import cache

from ..recipe import Recipe
from ..training import train
from .judge import RIGHT, YOUR_TURN

THRESHOLD = 100  # as in the MERIT paper's figures
BATCHES = (4, 16, 64, 256)  # sequences; the exercise starts from 64
TOO_LARGE = 2e-2  # learning rate


def check_passes_100(answer: Callable[[Recipe], Recipe]) -> None:
    """Print the verdict on `answer(recipe)`: the recipe with another batch size, the first, going by factors of 4, at
    which the largest attention logit passes 100. Trains two runs, about ten seconds each, if nothing else is wrong.
    """
    print(verdict(answer))


def recipe_below_100() -> Recipe:
    """What to start from: AdamW at batch 64 and a rate that is too large, though its logit stays below 100."""
    return Recipe.named("start", optimizer="AdamW", lr=TOO_LARGE, device="cpu")


def peak_logit(recipe: Recipe) -> float:
    """Train this recipe; its largest attention logit at any probe, layer and head. The same recipe trains once."""
    return _peak_logit(json.dumps(recipe.to_dict()))


@cache
def _peak_logit(recipe):
    peaks = [record.peak_logit for record in train(Recipe.from_dict(json.loads(recipe)))]
    return max((peak for peak in peaks if peak is not None), default=math.nan)


def verdict(answer: Callable[[Recipe], Recipe], peak: Callable[[Recipe], float] = peak_logit) -> str:
    """What is wrong with the answer, if anything; what can be told without training, first.

    Args:
        peak: trains a recipe and returns its largest logit; tests put something quicker in its place.
    """
    start = recipe_below_100()
    try:
        recipe = answer(start)
    except NotImplementedError:
        return YOUR_TURN
    except Exception as error:  # the reader's code may raise anything
        return f"not yet: your function raised {type(error).__name__}: {error}"
    wrong = fault(recipe, start)
    if wrong:
        return f"not yet: {wrong}"
    reached = peak(recipe)
    if not reached > THRESHOLD:
        steps = "fewer" if recipe.batch_size > start.batch_size else "more"
        return (
            f"not yet: at batch {recipe.batch_size} the largest logit is {reached:.0f}, not above {THRESHOLD}; "
            f"the rate is the same, the steps are {steps}"
        )
    nearer = recipe.batch_size * 4 if recipe.batch_size < start.batch_size else recipe.batch_size // 4
    if nearer != start.batch_size and peak(start.replace(batch_size=nearer)) > THRESHOLD:
        return f"not yet: it passes {THRESHOLD} there, but it does so at batch {nearer} already"
    return RIGHT


def fault(recipe, start: Recipe) -> str:
    """What is wrong with an answer before anything is trained; "" if nothing."""
    if recipe is None:
        return "your function returned None; does it end with a return?"
    if not isinstance(recipe, Recipe):
        return f"your function returned {type(recipe).__name__}, expected a Recipe: recipe.replace(batch_size=…)"
    if recipe == start:
        return "this is the recipe as it was; at its batch size the logit stays below 100"
    if recipe.optimizer != start.optimizer:
        return f"this recipe trains with {recipe.optimizer}; the question is where {start.optimizer}'s logit passes 100"
    if recipe.lr != start.lr:
        return (
            f"you changed the learning rate, from {start.lr:g} to {recipe.lr:g}; a larger one raises the logit at any "
            "batch size, and then you cannot tell which of the two did it"
        )
    if recipe.tokens != start.tokens:
        return "you changed the token budget; keep it, so that only the number of steps follows the batch size"
    for field in dataclasses.fields(Recipe):
        if field.name != "batch_size" and getattr(recipe, field.name) != getattr(start, field.name):
            return f"you changed {field.name} too; change the batch size alone"
    if recipe.batch_size not in BATCHES:
        return f"batch_size: got {recipe.batch_size}; go by factors of 4: {', '.join(map(str, BATCHES))}"
    return ""
