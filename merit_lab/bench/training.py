"""Tokens a second of `train` beside a plain loop and beside transformers, and its memory as the batch grows."""

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .. import text
from ..probes import traffic
from ..recipe import Recipe
from ..training import Training, build_model, build_optimizer, clip_gradients, train
from . import rows

STEPS, ROUNDS = 10, 7  # steps timed at a time, and how often
BATCHES, MICRO = (64, 4096), 32  # sequences; more than one micro-batch in both, so that both hold gradients
AS_FAST, AS_THEIRS, MORE = 0.97, 1.0, 5.0  # the targets; the last in percent


def recipe(**changes) -> Recipe:
    """The lab's main comparison at one micro-batch a step, without probes between its first and its last step."""
    defaults = {"batch_size": 64, "device": "cpu", "probe_every": 10**6, "eval_every": 10**6, "eval_sequences": 8}
    return Recipe.named("compare", **defaults | changes)


def plain_loop(of: Recipe, corpus: text.Corpus, model: torch.nn.Module, loss_of: Callable) -> Iterator[None]:
    """What one types without the lab: the same batches, clipping and optimizer around a model; a step an iteration.

    Args:
        loss_of: called with model, x, y; x and y are (batch_size, block_size).
    """
    optimizer = build_optimizer(of, model)
    step = 0
    while True:
        step += 1
        x, y = text.batch(corpus.train, of.block_size, of.batch_size, seed=of.seed, step=step)
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model, x, y)
        loss.backward()
        clip_gradients(model.parameters(), of.grad_clip)
        optimizer.step()
        loss.item()
        yield


def transformers_model(of: Recipe, corpus: text.Corpus) -> torch.nn.Module:
    """transformers' GPT-2 of the recipe's sizes, without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    ours = of.model_config(corpus.vocab_size)
    torch.manual_seed(of.seed)
    config = GPT2Config(
        vocab_size=ours.vocab_size, n_positions=ours.block_size, n_embd=ours.n_embd, n_layer=ours.n_layer,
        n_head=ours.n_head, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def _their_loss(model, x, y):
    logits = model(input_ids=x).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())


def speed(rounds: int = ROUNDS, steps: int = STEPS) -> tuple[list[dict], list[dict]]:
    """A row a loop, with tokens a second; and the two targets."""
    of = recipe(tokens=64 * 64 * (2 + steps * (rounds + 1) + 2))
    corpus = train(of).corpus
    ours = train(of, corpus)
    next(ours)  # the first step is probed; the last is not reached
    plain = plain_loop(of, corpus, build_model(of, corpus), lambda model, x, y: model(x, y)[1])
    theirs = plain_loop(of, corpus, transformers_model(of, corpus), _their_loss)
    seconds = rows.in_turn(
        {
            "train": lambda: _advance(ours, steps),
            "a plain loop": lambda: _advance(plain, steps),
            "transformers' GPT-2 in that loop": lambda: _advance(theirs, steps),
        },
        rounds,
    )
    tokens = steps * of.tokens_per_step
    table = [
        {"loop": name, "tokens_a_second": float(f"{tokens / statistics.median(times):.4g}")}
        for name, times in seconds.items()
    ]
    loop, of_train, of_theirs = seconds["a plain loop"], seconds["train"], list(seconds.values())[2]
    beside_loop, beside_theirs = rows.ratio(loop, of_train), rows.ratio(of_theirs, loop)
    what = "train: tokens a second, of a plain loop's", "that loop's, of the loop around transformers' GPT-2"
    return table, [
        rows.figure(what[0], beside_loop, "×", f"at least {AS_FAST:g} ×", beside_loop >= AS_FAST),
        rows.figure(what[1], beside_theirs, "×", f"at least {AS_THEIRS:g} ×", beside_theirs >= AS_THEIRS),
    ]


def _advance(steps: Iterator, n: int) -> None:
    for _ in range(n):
        next(steps)


def memory(batches: tuple[int, int] = BATCHES, micro: int = MICRO, **changes) -> tuple[list[dict], list[dict]]:
    """Most bytes that tensors of one step hold, beside weights and moments, at each batch size; and the target."""
    small, large = batches
    table = []
    for size in batches:
        of = recipe(batch_size=size, micro_batch_size=micro, tokens=3 * size * 64, **changes)
        table.append({"batch_size": size, "micro_batch_size": micro, "peak_bytes": _second_step(train(of))})
    more = 100 * (table[1]["peak_bytes"] / table[0]["peak_bytes"] - 1)
    what = f"memory of a step: more at batch {large} than at {small}, micro-batch {micro}"
    return table, [rows.figure(what, more, "%", f"at most {MORE:g} %", more <= MORE)]


def _second_step(training: Training) -> int:
    next(training)
    with traffic() as moved:
        next(training)
    return moved.peak


def measure() -> dict[str, Any]:
    """Everything, on the CPU."""
    loops, of_loops = speed()
    held, of_memory = memory()
    return {"loops": loops, "memory": held, "figures": of_loops + of_memory}
