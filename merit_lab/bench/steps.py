"""An optimizer step beside named peers: nanoseconds, bytes moved and temporaries, a weight.

On the tensors of one block of GPT-2 Small and on its embedding, in float32. Time is measured in one process and in
turn; bytes are counted (merit_lab.probes.traffic). On CUDA the same, until the device has done its work.
"""

import importlib.util
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import optim
from ..files import repo_root
from ..models import GPT2Config
from ..models.gpt2 import Block
from ..optim import fast_c
from ..probes import traffic
from . import rows

ROUNDS = {"block": 15, "embedding": 7}
HYPER = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}
FASTEST = "torch AdamW, fused"  # what the others are a multiple of
PLAIN = "MERIT, plain loop"
FUSED = "MERIT, fused"
LIMIT = {"cpu": 3.0, "cuda": 1.8}  # times FASTEST that FUSED may take
GAIN = 8.0  # times faster than PLAIN that FUSED must be, on the CPU


class Peer(NamedTuple):
    """An optimizer by name: how to build it over parameters, and whether it steps without a compiler."""

    name: str
    build: Callable[[list], torch.optim.Optimizer]
    compiled: bool = True


def peers() -> list[Peer]:
    """What is compared. A peer whose package or source is not there is left out."""
    found = [
        Peer(FASTEST, lambda p: torch.optim.AdamW(p, **HYPER, fused=True)),
        Peer("torch AdamW, foreach", lambda p: torch.optim.AdamW(p, **HYPER, foreach=True)),
        Peer("torch AdamW, loop", lambda p: torch.optim.AdamW(p, **HYPER, foreach=False)),
        Peer("AdamW, readable", lambda p: optim.AdamW(p, **HYPER)),
        Peer("LAMB, readable", lambda p: optim.LAMB(p, **HYPER, fused=False)),
        Peer("LAMB, fused", lambda p: optim.LAMB(p, **HYPER, fused=True)),
        Peer("MERIT, readable", lambda p: optim.MERIT(p, **HYPER, fused=False)),
        Peer("MERIT, fused, no compiler", lambda p: optim.MERIT(p, **HYPER, fused=True), compiled=False),
        Peer(FUSED, lambda p: optim.MERIT(p, **HYPER, fused=True)),
    ]
    if importlib.util.find_spec("pytorch_optimizer"):
        found.insert(3, Peer("pytorch_optimizer's Lamb", _their_lamb))
    plain = plain_merit()
    if plain is not None:
        found.insert(-3, Peer(PLAIN, lambda p: plain(p, **HYPER)))
    return found


def plain_merit() -> type[torch.optim.Optimizer] | None:
    """tests/peers.py's PlainMERIT, the formula as it is usually typed; None outside a checkout."""
    path = (repo_root() or Path()) / "tests" / "peers.py"
    if not path.is_file():
        return None
    spec = importlib.util.spec_from_file_location("merit_lab_peers", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.PlainMERIT


def _their_lamb(parameters):
    from pytorch_optimizer import Lamb

    return Lamb(parameters, **HYPER)


def tensors(what: str, device: torch.device, config: GPT2Config | None = None) -> list[torch.nn.Parameter]:
    """Random weights with gradients: "block", all of one block of GPT-2 Small, or "embedding", its token embedding.

    Args:
        config: of another model than GPT-2 Small.
    """
    config = config or GPT2Config.named("gpt2")
    if what == "block":
        shapes = [tuple(p.shape) for p in Block(config).parameters()]
    else:
        shapes = [(config.vocab_size, config.n_embd)]
    generator = torch.Generator(device).manual_seed(0)
    made = []
    for shape in shapes:
        parameter = torch.nn.Parameter(0.02 * torch.randn(shape, generator=generator, device=device))
        parameter.grad = torch.randn(shape, generator=generator, device=device)
        made.append(parameter)
    return made


def compare(
    what: str,
    device: torch.device,
    rounds: int | None = None,
    chosen: list[Peer] | None = None,
    config: GPT2Config | None = None,
) -> list[dict]:
    """A row a peer: time, multiple of FASTEST, bytes moved and held at the peak beside the states, a weight.

    Args:
        what, config: see `tensors`.
        rounds: that count; None: ROUNDS.
        chosen: the peers, FASTEST among them; None: all. Those without a compiler step on the CPU alone.
    """
    steps, counted = {}, {}
    for peer in chosen or peers():
        if not peer.compiled and device.type != "cpu":
            continue
        parameters = tensors(what, device, config)
        weights = sum(p.numel() for p in parameters)
        optimizer = peer.build(parameters)
        step = _timed(_without_compiler(optimizer.step) if not peer.compiled else optimizer.step, device)
        step()
        with traffic() as moved:
            step()
        counted[peer.name], steps[peer.name] = moved, step
    seconds = rows.in_turn(steps, rounds or ROUNDS[what])
    return [
        {
            "tensors": what,
            "weights": weights,
            "device": device.type,
            "optimizer": name,
            "nanoseconds": _digits(1e9 * statistics.median(times) / weights),
            "multiple": _digits(rows.ratio(times, seconds[FASTEST])),
            "bytes_moved": _digits(counted[name].bytes / weights),
            "bytes_held": _digits(counted[name].peak / weights),
        }
        for name, times in seconds.items()
    ]


def _timed(step, device):
    if device.type != "cuda":
        return step

    def and_wait():
        step()
        torch.cuda.synchronize(device)

    return and_wait


def _without_compiler(step):
    def in_torch():
        library, fast_c.library = fast_c.library, lambda dtype: None
        try:
            step()
        finally:
            fast_c.library = library

    return in_torch


def verdicts(compared: list[dict]) -> list[dict]:
    """The targets: met or missed, and by how much."""
    found = []
    for place in dict.fromkeys((row["tensors"], row["device"]) for row in compared):
        of = {row["optimizer"]: row for row in compared if (row["tensors"], row["device"]) == place}
        where, limit, multiple = ", ".join(place), LIMIT[place[1]], of[FUSED]["multiple"]
        share = 100 * of[FUSED]["bytes_held"] / 4
        wanted = [
            (f"{FUSED}: times {FASTEST}, {where}", multiple, "×", f"at most {limit:g} ×", multiple <= limit),
            (f"{FUSED}: temporaries, {where}", share, "% of the weights", "under 1 %", share < 1),
        ]
        if PLAIN in of and place[1] == "cpu":
            gain = of[PLAIN]["multiple"] / multiple
            wanted.append((f"{FUSED}: faster than {PLAIN}, {where}", gain, "×", f"at least {GAIN:g} ×", gain >= GAIN))
        found += [rows.figure(*row) for row in wanted]
    return found


def measure() -> dict[str, Any]:
    """Everything on the CPU, and on CUDA where it is."""
    devices = [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]
    compared = [row for device in devices for what in ("block", "embedding") for row in compare(what, device)]
    return {"rows": compared, "figures": verdicts(compared)}


def not_measured(results: dict[str, Any]) -> list[tuple[str, str]]:
    """Targets of a device that was not there: what, and the target."""
    measured = {row["device"] for row in results["rows"]}
    return [
        (f"{FUSED}: times {FASTEST}, block and embedding, {device}", f"at most {limit:g} ×")
        for device, limit in LIMIT.items()
        if device not in measured
    ]


def table(results: dict[str, Any], device: str = "cpu") -> str:
    """A line an optimizer, by its time on this device."""
    block, embedding = (
        {row["optimizer"]: row for row in results["rows"] if (row["tensors"], row["device"]) == (what, device)}
        for what in ("block", "embedding")
    )
    head = (f"one step, {device}", "ns a weight", "of AdamW, fused", "on the embedding", "bytes moved", "bytes held")
    lines = []
    for name, row in sorted(block.items(), key=lambda item: item[1]["multiple"]):
        cells = (row["nanoseconds"], row["multiple"], embedding[name]["multiple"], row["bytes_moved"])
        lines.append((name, *(f"{x:.1f}" if x < 10 else f"{x:.0f}" for x in cells), f"{row['bytes_held']:.2g}"))
    return rows.table(head, lines)


def _digits(value: float) -> float:
    return float(f"{value:.4g}") if math.isfinite(value) else value
