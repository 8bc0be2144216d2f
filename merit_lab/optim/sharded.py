"""The three places where a DTensor (a tensor whose rows are spread over ranks) needs a line of its own.

Everything else in this folder runs on DTensors as it stands. A plain tensor passes through unchanged. DTensors are
told by what they have, since importing their class takes longer than importing the rest of this package.
"""

import math

import torch
from torch import Tensor


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
