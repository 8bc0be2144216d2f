"""The places where a DTensor (a tensor whose rows or columns are spread over ranks) needs a line of its own.

Everything else in this folder runs on DTensors as it stands. A plain tensor passes through unchanged. DTensors are
told by what they have, since importing their class takes longer than importing the rest of this package.
"""

import math

import torch
from torch import Tensor

WHOLE = ("weight", "direction")  # sizes of a tensor as a whole, in fast.Sizes


def without_empty_shards(x: Tensor) -> Tensor:
    """x, on every rank whole if it is a DTensor that leaves some rank with nothing: nothing has no maximum.

    That takes about as few rows as there are ranks, so x is small. It is decided from the shape alone, so that all
    ranks decide alike.
    """
    if not hasattr(x, "placements"):
        return x
    last = list(x.shape)  # becomes the shape of the last rank's shard, the smallest, as torch.chunk cuts
    for ranks, placement in zip(x.device_mesh.shape, x.placements, strict=True):
        if placement.is_shard():
            last[placement.dim] -= (ranks - 1) * math.ceil(last[placement.dim] / ranks)
    if min(last, default=1) > 0:
        return x
    from torch.distributed.tensor import Replicate

    return x.redistribute(placements=[Replicate()] * len(x.placements))


def all_finite(x: Tensor) -> bool:
    """Whether no element is NaN or infinite. Of a DTensor: on any rank, so that all ranks get one answer."""
    finite = torch.isfinite(x).all()
    return bool(finite.full_tensor() if hasattr(finite, "full_tensor") else finite)


def write(x: Tensor, value: Tensor) -> None:
    """Write value into x in place; a DTensor keeps its own placement, wherever the value lies."""
    x.copy_(value.redistribute(placements=x.placements) if hasattr(x, "placements") else value)


def local(x: Tensor) -> Tensor | None:
    """This rank's part of a DTensor, in its own memory; None where parts are yet to be summed."""
    if not hasattr(x, "placements"):
        return x
    return None if any(placement.is_partial() for placement in x.placements) else x.to_local()


def exchange(entries: list[tuple[Tensor, dict[str, Tensor | None], bool]]) -> list[dict[str, Tensor | None]]:
    """Norms of whole tensors from the norms of their parts, by one all-reduce for each dimension of the mesh.

    Args:
        entries: DTensors, each with the sizes of this rank's part (fast.Sizes as a dict) and whether these are sums
            of squares. All ranks give the same tensors in the same order.

    A dimension of the mesh that cuts rows apart (`Shard(0)`) leaves each rank with some rows of every column: the
    columns' sizes meet, the rows' are whole already. One that cuts columns apart: the other way round. The tensor's
    own size always meets. Everything of one dimension travels in one piece.
    """
    from torch import distributed

    after = [dict(sizes) for _, sizes, _ in entries]
    for dim in range(max(x.device_mesh.ndim for x, _, _ in entries)):
        packed: dict[tuple, list[tuple[dict, str]]] = {}
        for (x, _, squares), sizes in zip(entries, after, strict=True):
            if dim >= x.device_mesh.ndim or not x.placements[dim].is_shard():
                continue
            line = "column" if x.placements[dim].dim == 0 else "row"
            names = [name for name in sizes if name in WHOLE or (name.endswith(line) and sizes[name] is not None)]
            key = (x.device_mesh, squares, sizes["weight"].dtype)
            packed.setdefault(key, []).extend((sizes, name) for name in names)
        for (mesh, squares, _), places in packed.items():
            parts = [sizes[name] for sizes, name in places]
            buffer = torch.cat([part.reshape(-1) for part in parts])
            operation = distributed.ReduceOp.SUM if squares else distributed.ReduceOp.MAX
            distributed.all_reduce(buffer, operation, group=mesh.get_group(dim))
            for (sizes, name), whole in zip(places, buffer.split([p.numel() for p in parts]), strict=True):
                sizes[name] = whole.reshape(sizes[name].shape)
    return after
