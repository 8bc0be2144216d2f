"""Notebook 00: the batch size at which AdamW's attention logit passes 100, if the learning rate grows with it."""

import dataclasses
import json
import math
from collections.abc import Callable
from functools import lru_cache

from ..recipe import Recipe
from ..training import train
from .judge import RIGHT, YOUR_TURN

THRESHOLD = 100  # as in the MERIT paper's figures
BATCHES = (4, 8, 16, 32, 64)


def check_passes_100(answer: Callable[[Recipe], Recipe]) -> None:
    """Print the verdict on `answer(small)`: the small recipe with the first batch size that lets AdamW's largest
    attention logit pass 100, its learning rate grown in proportion. Trains twice, some ten seconds each.
    """
    print(verdict(answer))


def small_recipe() -> Recipe:
    """The recipe to start from: AdamW at the small batch."""
    return Recipe.named("start", optimizer="AdamW", batch_size=BATCHES[0], lr=SMALL_LR, device="cpu")


SMALL_LR = 2.5e-3


def peak_logit(recipe: Recipe) -> float:
    """Train this recipe; its largest attention logit at any probe, layer and head. The same recipe trains once."""
    return _peak_logit(json.dumps(recipe.to_dict()))


@lru_cache(maxsize=None)
def _peak_logit(recipe):
    peaks = [record.peak_logit for record in train(Recipe.from_dict(json.loads(recipe)))]
    return max((peak for peak in peaks if peak is not None), default=math.nan)


def verdict(answer: Callable[[Recipe], Recipe], peak: Callable[[Recipe], float] = peak_logit) -> str:
    """Judge what can be judged without training first.

    Args:
        peak: what trains; tests put something quicker in its place.
    """
    small = small_recipe()
    try:
        recipe = answer(small)
    except NotImplementedError:
        return YOUR_TURN
    except Exception as error:  # the reader's code may raise anything
        return f"not yet: your function raised {type(error).__name__}: {error}"
    wrong = fault(recipe, small)
    if wrong:
        return f"not yet: {wrong}"
    reached = peak(recipe)
    if not reached > THRESHOLD:
        return f"not yet: at batch {recipe.batch_size} the largest logit is {reached:.0f}; it has not passed {THRESHOLD}"
    half = at_batch(recipe.batch_size // 2, small)
    if peak(half) > THRESHOLD:
        return f"not yet: it does pass {THRESHOLD} there, but at batch {half.batch_size} too; find the first batch size"
    return RIGHT


def at_batch(batch_size: int, small: Recipe) -> Recipe:
    """The small recipe at another batch size, the learning rate in proportion."""
    return small.replace(batch_size=batch_size, lr=small.lr * batch_size / small.batch_size)


def fault(recipe, small: Recipe) -> str:
    """What is wrong with a recipe before it is trained; "" if nothing."""
    if recipe is None:
        return "your function returned None; does it end with a return?"
    if not isinstance(recipe, Recipe):
        return f"your function returned {type(recipe).__name__}, expected a Recipe: small.replace(batch_size=…, lr=…)"
    if recipe.optimizer != small.optimizer:
        return f"that recipe trains with {recipe.optimizer}; the question is where {small.optimizer}'s logit passes"
    if recipe == small:
        return "that is the small recipe, unchanged; replace batch_size, and lr with it"
    for field in dataclasses.fields(Recipe):
        value, kept = getattr(recipe, field.name), getattr(small, field.name)
        if field.name not in ("batch_size", "lr") and value != kept:
            return f"you changed {field.name} from {kept!r} to {value!r} too; then the batch is not what made the difference"
    if recipe.batch_size == small.batch_size:
        return f"you changed the learning rate alone; the batch is {small.batch_size} as before, so this is another question"
    if recipe.batch_size not in BATCHES:
        return f"batch_size: got {recipe.batch_size}, expected a doubling: {', '.join(map(str, BATCHES[1:]))}"
    times = recipe.batch_size / small.batch_size
    if math.isclose(recipe.lr, small.lr):
        return (
            "you kept the learning rate: fewer steps of the same size. The rule to try is a rate "
            "that grows in proportion to the batch"
        )
    if math.isclose(recipe.lr, small.lr * math.sqrt(times), rel_tol=1e-3):
        return f"your rate grows with the root of the batch; in proportion to it it is {times:g} times as large"
    if not math.isclose(recipe.lr, small.lr * times, rel_tol=1e-3):
        return f"lr: got {recipe.lr:g}; a batch {times:g} times as large takes {small.lr:g} × {times:g} = {small.lr * times:g}"
    return ""
