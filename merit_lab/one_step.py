"""What a single step does, where the paper states it exactly: python -m merit_lab.one_step (part of `make sweep`).

Four quantities, three seeds each, a row of one_step.jsonl each: how the max attention logit moves with the rate, how
far one step of MERIT can grow ‖W‖_m, and what MERIT keeps and needs for a weight.
"""

import argparse
import copy
import json
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch

from . import files
from .optim import MERIT
from .probes import traffic
from .probes.attention import attention_inputs
from .recipe import Recipe
from .training import clip_gradients, train

SEEDS = (1, 2, 3)
WARM_STEPS = 16
RATES = {"AdamW": 2e-3, "LAMB": 4e-2, "MERIT": 4e-2}
SMALL = (1 / 8, 1 / 16)  # shares of the rate between which the change must be in proportion
SHAPES = ((512, 512), (1024, 1024), (768, 3072))


def recipe(optimizer: str, seed: int, steps: int) -> Recipe:
    """A nano model at batch 64, all probes out of the way."""
    return Recipe(
        model="nano", optimizer=optimizer, lr=RATES[optimizer], batch_size=64, tokens=steps * 64 * 64, seed=seed,
        micro_batch_size=32, probe_every=10**6, eval_every=10**6, eval_sequences=8, device="cpu",
    )  # fmt: skip


def logit_change_ratio(optimizer: str, seed: int) -> float:
    """The change of the max attention logit over the rate, at 1/8 of the rate, over the same at 1/16.

    1 to first order. All from the same state, after WARM_STEPS steps, and the same gradient; the logit is followed in
    the layer, head, sequence and pair where it is largest before the step.
    """
    training = train(recipe(optimizer, seed, 4 * WARM_STEPS))
    for _ in range(WARM_STEPS):
        next(training)
    training._accumulate_gradients(WARM_STEPS + 1)
    clip_gradients(training.model.parameters(), 1.0)
    weights, state = copy.deepcopy((training.model.state_dict(), training.optimizer.state_dict()))
    largest = training.attention().largest

    def logit() -> float:
        x, _ = training.held_out(largest.sequence + 1)
        module, inputs = attention_inputs(training.model.double(), x)[largest.layer]
        q, k, _ = module.queries_keys_values(inputs)  # (B, n_head, T, d_head)
        at = largest.sequence, largest.head
        value = (q[at][largest.query] @ k[at][largest.key] * module.scale).item()
        training.model.float()
        return value

    before, changes = logit(), []
    for share in SMALL:
        training.model.load_state_dict(weights)
        training.optimizer.load_state_dict(copy.deepcopy(state))
        for group in training.optimizer.param_groups:
            group["lr"] = share * RATES[optimizer]
        training.optimizer.step()
        changes.append((logit() - before) / share)
    return changes[0] / changes[1]


def max_norm_growth(seed: int, steps: int = 128) -> float:
    """The largest (‖W'‖_m - ‖W‖_m) / (η‖W‖_m) of any step and matrix of a MERIT run; at most 1 where no guard fires.

    The first and the last step are left out: the trainer's own probe watches them.
    """
    training = train(recipe("MERIT", seed, steps))
    matrices = [p for p in training.model.parameters() if p.ndim == 2]
    largest = -1.0
    for step in range(1, steps):
        before = [p.detach().abs().amax().double() for p in matrices]
        training.optimizer.watch()
        record = next(training)
        if step == 1:
            continue
        for parameter, old in zip(matrices, before, strict=True):
            if training.optimizer.explain(parameter).guarded.any():
                continue
            grown = parameter.detach().abs().amax().double() - old
            largest = max(largest, (grown / (record.lr * old)).item())
    return largest


def cost_a_weight(shape: tuple[int, int], seed: int, fused: bool = False) -> tuple[int, float]:
    """Of one step of MERIT on a float32 matrix: full-size states kept, and bytes of temporaries, a weight."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.nn.Parameter(torch.randn(shape, generator=generator))
    weight.grad = torch.randn(shape, generator=generator)
    optimizer = MERIT([weight], lr=0.01, fused=fused)
    optimizer.step()
    states = sum(torch.is_tensor(value) and value.shape == weight.shape for value in optimizer.state[weight].values())
    with traffic() as moved:
        optimizer.step()
    return states, moved.peak / weight.numel()


def rows() -> list[dict]:
    """All quantities, a row each."""
    found = []
    for seed, shape in zip(SEEDS, SHAPES, strict=True):
        for optimizer in RATES:
            found.append(("logit_change_ratio", optimizer, seed, logit_change_ratio(optimizer, seed)))
        found.append(("max_norm_growth", "MERIT", seed, max_norm_growth(seed)))
        states, temporaries = cost_a_weight(shape, seed)
        found.append(("states_a_weight", "MERIT", seed, states))
        found.append(("temporary_bytes_a_weight", "MERIT", seed, temporaries))
        found.append(("temporary_bytes_a_weight", "MERIT, fused", seed, cost_a_weight(shape, seed, fused=True)[1]))
    date = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return [
        {"quantity": q, "optimizer": o, "seed": s, "value": float(f"{v:.5g}"), "torch": torch.__version__, "date": date}
        for q, o, s, v in found
    ]


def main(arguments: list[str] | None = None) -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(prog="python -m merit_lab.one_step", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("results/sweeps"), help="folder that one_step.jsonl goes to")
    path = parser.parse_args(arguments).out / "one_step.jsonl"
    files.write_whole(path, "".join(json.dumps(row) + "\n" for row in rows()))
    print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
