"""Runs that nobody trained: plausible StepRecords, quick to make, the same every time."""

import math
import threading
import time

import numpy as np

from merit_lab.recipe import Recipe
from merit_lab.runs import Run
from merit_lab.training import StepRecord

LAYERS, HEADS, CONTEXT = 3, 2, 32
MODEL = {"n_layer": LAYERS, "n_head": HEADS, "n_embd": 32, "block_size": CONTEXT, "vocab_size": 65}
PARTS = [f"attention.{name}" for name in ("query", "key", "value", "project")] + ["mlp.expand", "mlp.project"]
TENSORS = ["token_embedding.weight"] + [f"blocks.{i}.{part}.weight" for i in range(LAYERS) for part in PARTS]
# Where the loss ends, and by what factor the largest logit grows in a run.
ENDS = {"AdamW": (2.5, 400.0), "LAMB": (2.25, 60.0), "MERIT": (2.1, 15.0)}


def recipe(optimizer="MERIT", n_steps=60, batch_size=16, **changes) -> Recipe:
    """A recipe of a small model, n_steps long."""
    tokens = n_steps * batch_size * CONTEXT
    values = {"model": MODEL, "text": "synthetic", "lr": 0.01, "device": "cpu"} | changes
    return Recipe(optimizer=optimizer, batch_size=batch_size, tokens=tokens, **values)


def record(recipe: Recipe, step: int, diverge_at: int | None = None) -> StepRecord:
    """The record of one step; the same for the same arguments."""
    optimizer, n = recipe.optimizer, recipe.n_steps
    noise = np.random.default_rng([recipe.seed, step, len(optimizer)])
    end, growth = ENDS.get(optimizer, (2.3, 30.0))
    off = abs(math.log(recipe.lr / 0.01))  # a learning rate away from 0.01 ends higher
    progress = step / n
    loss = end + 0.1 * off + (4.2 - end) * math.exp(-6 * progress)
    result = StepRecord(
        step=step, tokens=step * recipe.tokens_per_step, lr=recipe.lr, seconds=0.01 * step,
        train_loss=loss + 0.05 * noise.standard_normal(), grad_norm=1 + 0.1 * noise.standard_normal(),
    )  # fmt: skip
    if step == diverge_at:
        result.diverged, result.train_loss = True, math.nan
        return result
    if step in (1, n) or step % max(1, n // 10) == 0:
        result.val_loss = loss + 0.02
    if step in (1, n) or step % max(1, n // 20) == 0:
        _probe(result, recipe, noise, progress, growth)
    return result


def _probe(result, recipe, noise, progress, growth):
    peak = growth**progress * np.linspace(0.6, 1.2, LAYERS * HEADS).reshape(LAYERS, HEADS)
    result.max_attention_logit = (1.5 * peak).tolist()
    result.max_attention_logit_signed = (1.4 * peak).tolist()
    result.attention_entropy = (2.6 / (1 + 0.02 * peak)).tolist()
    query = CONTEXT - 3
    logits = noise.standard_normal(query + 1)
    logits[7] += math.log1p(peak.max()) * 1.5
    softmax = np.exp(logits - logits.max())
    result.largest_logit = {
        "layer": LAYERS - 1, "head": HEADS - 1, "sequence": 0, "query": query, "key": 7,
        "logit": float(1.4 * peak.max()), "softmax": (softmax / softmax.sum()).round(4).tolist(),
    }  # fmt: skip
    result.ratios = {}
    if recipe.optimizer == "AdamW":
        return
    lamb = recipe.optimizer == "LAMB"
    for i, name in enumerate(TENSORS):
        middle = 0.1 * (1 + progress) * (1 + i / 10)
        spread = (1, 1, 1, 1, 1) if lamb else (0.3, 0.7, 1, 1.5, 6)
        row, column = (0.0, 0.0) if lamb else (0.5 - 0.2 * progress, 0.2)
        result.ratios[name] = {
            "quantiles": [middle * s for s in spread], "weight_ratio": middle * spread[0], "won_row": row,
            "won_column": column, "won_bound": 1 - row - column, "guarded": 0.0,
            "clipped": 0.0 if lamb else 0.1 * progress,
        }  # fmt: skip


def run(optimizer="MERIT", n_steps=60, diverge_at=None, **changes) -> Run:
    """A recorded run."""
    made = recipe(optimizer, n_steps, **changes)
    return Run({"recipe": made.to_dict()}, [record(made, i, diverge_at) for i in range(1, (diverge_at or n_steps) + 1)])


class Training:
    """In place of merit_lab.training.Training: no model, as many seconds a step as told.

    Class attributes are set by a test: `seconds` a step, `fail_at` a step, and `stepped`, called at each.
    """

    seconds = 0.0
    fail_at: int | None = None
    stepped = staticmethod(lambda training: None)
    open = 0  # trainings not closed

    def __init__(self, recipe, corpus=None):
        self.recipe, self.n_steps, self.last, self.at = recipe, recipe.n_steps, None, 0
        self.threads, self.closed = set(), False
        type(self).open += 1

    def __iter__(self):
        return self

    def __next__(self):
        if self.closed or self.at >= self.n_steps:
            raise StopIteration
        time.sleep(self.seconds)
        self.threads.add(threading.get_ident())
        self.at += 1
        if self.at == self.fail_at:
            raise RuntimeError(f"the step <{self.at}> failed & so on")
        self.last = record(self.recipe, self.at)
        self.stepped(self)
        return self.last

    def close(self):
        type(self).open -= not self.closed
        self.closed = True
