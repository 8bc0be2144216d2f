"""How many collectives a step costs on sharded weights, and how many numbers they carry, beside the paper's estimate.

By count, not by time: gloo among processes of one machine says nothing of a network. The weights are the matrices of
one block of GPT-2 Small. MERIT needs the largest elements of rows and columns where LAMB needs two sums: the paper
says that on a weight cut both ways over p ranks this is two more all-reduces, of m/√p + n/√p numbers.
"""

import logging
import math
import multiprocessing
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from .. import optim
from ..models import GPT2Config
from ..models.gpt2 import Block
from . import rows

HYPER = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
CUTS = {  # in words: the mesh, and which dimension of a weight each dimension of it cuts
    "rows cut": ((2,), (0,)),
    "columns cut": ((2,), (1,)),
    "both cut": ((2, 2), (0, 1)),
}
STEPS = {
    "AdamW": ("AdamW", {}),
    "LAMB": ("LAMB", {"fused": False}),
    "MERIT": ("MERIT", {"fused": False}),
    "LAMB, fused": ("LAMB", {"fused": True}),
    "MERIT, fused": ("MERIT", {"fused": True}),
}


def shapes() -> list[tuple[int, int]]:
    """Of the matrices of one block of GPT-2 Small."""
    with torch.device("meta"):
        return [tuple(p.shape) for p in Block(GPT2Config.named("gpt2")).parameters() if p.ndim == 2]


def count(weights: list[tuple[int, int]]) -> list[dict]:
    """A row for each way to cut and each step: collectives of one step, and the numbers that a rank hands in."""
    with tempfile.TemporaryDirectory() as folder:
        # From a process that has imported it all: six imports of torch at a time take long on few cores.
        multiprocessing.set_forkserver_preload(["merit_lab.distributed", "torch.distributed.tensor"])
        for size in sorted({math.prod(mesh) for mesh, _ in CUTS.values()}):
            mp.start_processes(_on_a_rank, (size, folder, weights), nprocs=size, start_method="forkserver")
        found = [torch.load(path, weights_only=True) for path in sorted(Path(folder).glob("*.pt"))]
    order = list(CUTS)
    return sorted((row for part in found for row in part), key=lambda row: order.index(row["cut"]))


def _on_a_rank(rank, size, folder, weights):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from ..distributed import count_collectives

    torch.set_num_threads(1)
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)  # what it says is counted
    dist.init_process_group("gloo", init_method=f"file://{folder}/{size}", rank=rank, world_size=size)
    found = []
    for cut, (mesh_shape, dims) in CUTS.items():
        if math.prod(mesh_shape) != size:
            continue
        mesh = init_device_mesh("cpu", mesh_shape)

        def spread(x, mesh=mesh, dims=dims):
            return distribute_tensor(x, mesh, [Shard(dim) for dim in dims])

        for name, (optimizer, arguments) in STEPS.items():
            parameters = [torch.nn.Parameter(spread(torch.ones(shape))) for shape in weights]
            for parameter in parameters:
                parameter.grad = spread(torch.ones(parameter.shape))
            stepping = optim.build(optimizer, parameters, **HYPER, **arguments)
            with count_collectives() as counted:
                stepping.step()
            found.append(
                {"cut": cut, "ranks": size, "weights": len(weights), "step": name, "calls": counted.calls,
                 "numbers": counted.numbers}
            )  # fmt: skip
    if rank == 0:
        torch.save(found, f"{folder}/{size}.pt")
    dist.destroy_process_group()


def estimate(weights: list[tuple[int, int]], ranks: int) -> dict[str, float]:
    """The paper's: what MERIT's step costs more than LAMB's, on weights (m, n) cut both ways."""
    return {"calls": 2 * len(weights), "numbers": sum(m + n for m, n in weights) / math.sqrt(ranks)}


def measure(weights: list[tuple[int, int]] | None = None) -> dict[str, Any]:
    """Everything, on the matrices of a block of GPT-2 Small or on weights of these shapes."""
    weights = weights or shapes()
    counted = count(weights)
    both = {row["step"]: row for row in counted if row["cut"] == "both cut"}
    more = both["MERIT, fused"]["calls"] - both["LAMB, fused"]["calls"]
    paper = estimate(weights, both["MERIT"]["ranks"])
    return {
        "rows": counted,
        "paper": paper,
        "figures": [
            rows.figure("MERIT, fused: collectives a step more than LAMB, weights cut both ways", more, ""),
            rows.figure("the paper's estimate of that, unpacked", paper["calls"], ""),
        ],
    }


def table(results: dict[str, Any]) -> str:
    """A line a step: collectives, and the numbers that one rank hands in, for each way to cut."""
    found: dict[str, list[str]] = {}
    for row in results["rows"]:
        found.setdefault(row["step"], []).append(f"{row['calls']} / {row['numbers']:,}")
    ranks = {row["cut"]: row["ranks"] for row in results["rows"]}
    matrices = results["rows"][0]["weights"]
    head = (f"collectives / numbers, {matrices} matrices", *(f"{cut}, {n} ranks" for cut, n in ranks.items()))
    return rows.table(head, ((name, *cells) for name, cells in found.items()))
