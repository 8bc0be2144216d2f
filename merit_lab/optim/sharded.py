"""The places where a DTensor (a tensor whose rows or columns are spread over ranks) needs a line of its own.

Everything else in this folder runs on DTensors as it stands. A plain tensor passes through unchanged. DTensors are
told by what they have, since importing their class takes longer than importing the rest of this package.
"""

import math
from functools import cache

import torch
from torch import Tensor

WHOLE = ("weight", "direction")  # sizes of a tensor as a whole, in fast.Sizes


def without_empty_shards(x: Tensor) -> Tensor:
    """x, on every rank whole if it is a DTensor that leaves some rank with nothing: nothing has no maximum.

    Along each sharded dimension x then has fewer elements than the square of the ranks there, as torch.chunk cuts:
    mostly fewer than the ranks. It is decided from the shape alone, so that all ranks decide alike.
    """
    if not hasattr(x, "placements"):
        return x
    if not leaves_a_shard_empty(tuple(x.shape), tuple(x.device_mesh.shape), x.placements):
        return x
    from torch.distributed.tensor import Replicate

    return x.redistribute(placements=[Replicate()] * len(x.placements))


def met(norm: Tensor) -> Tensor:
    """A norm of a DTensor, known on every rank that needs it: else each use of it would ask the others anew."""
    placements = getattr(norm, "placements", ())
    if not any(placement.is_partial() for placement in placements):
        return norm
    from torch.distributed.tensor import Replicate

    everywhere = [Replicate() if p.is_partial() else p for p in placements]
    if not any(getattr(p, "reduce_op", None) == "max" for p in placements):
        return norm.redistribute(placements=everywhere)
    here = {"device_mesh": norm.device_mesh, "run_check": False, "shape": norm.shape, "stride": norm.stride()}
    bits, dtype = _as_bits(norm.to_local())
    bits = type(norm).from_local(bits, placements=placements, **here).redistribute(placements=everywhere)
    return type(norm).from_local(bits.to_local().view(dtype).to(norm.dtype), placements=everywhere, **here)


def _as_bits(magnitudes: Tensor) -> tuple[Tensor, torch.dtype]:
    """Magnitudes as whole numbers of the same order, NaN above all; and the dtype to view these as afterwards.

    gloo's and NCCL's maximum of floating-point numbers may lose a NaN: then a rank would go on as if there were none,
    where one process has NaN everywhere. Their maximum of whole numbers cannot.
    """
    if magnitudes.element_size() < 4:  # they have no maximum of 16-bit whole numbers
        magnitudes = magnitudes.float()
    # abs: a NaN may have a sign, with which it would be below all
    return magnitudes.abs().view(torch.int64 if magnitudes.element_size() == 8 else torch.int32), magnitudes.dtype


@cache
def leaves_a_shard_empty(shape: tuple[int, ...], ranks: tuple[int, ...], placements: tuple) -> bool:
    """Whether a DTensor of this shape has an empty shard on some rank of the mesh.

    Args:
        ranks: the mesh's shape.
        placements: a placement for each dimension of the mesh.
    """
    sizes = [{length} for length in shape]  # of the shards, along each dimension of the tensor
    # FSDP over tensor parallelism cuts by the later dimension of the mesh first: a _StridedShard, which is no Shard.
    strided = any(type(placement).__name__ == "_StridedShard" for placement in placements)
    cuts = list(zip(ranks, placements, strict=True))
    for count, placement in reversed(cuts) if strided else cuts:
        dim = getattr(placement, "dim", None)
        if dim is not None:
            sizes[dim] = {size for length in sizes[dim] for size in _chunks(length, count)}
    return any(0 in along for along in sizes)


def _chunks(length: int, count: int) -> set[int]:
    """The sizes of the pieces that torch.chunk makes, 0 for those that it leaves out."""
    size = math.ceil(length / count)
    return {min(size, max(0, length - i * size)) for i in range(count)}


def all_finite(x: Tensor) -> bool:
    """Whether no element is NaN or infinite. Of a DTensor: on any rank, so that all ranks get one answer."""
    finite = torch.isfinite(x).all()
    return bool(finite.full_tensor() if hasattr(finite, "full_tensor") else finite)


def write(x: Tensor, value: Tensor) -> None:
    """Write value into x in place; a DTensor keeps its own placement, wherever the value lies."""
    x.copy_(value.redistribute(placements=x.placements) if hasattr(x, "placements") else value)


def whole_norms(tensors: list[Tensor]) -> list[Tensor]:
    """The ℓ2 norm of each tensor, 0-D, in float32 or better; of DTensors that lie alike in one collective for all."""
    norms = [torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32)).float() for x in tensors]
    alike: dict[tuple, list[int]] = {}
    for index, norm in enumerate(norms):
        if hasattr(norm, "placements"):
            alike.setdefault((norm.device_mesh, norm.placements), []).append(index)
    for (mesh, placements), indices in alike.items():
        # A shard's norm is not the norm: the placement of each says how to add the ranks' parts up.
        parts = torch.stack([norms[index].to_local() for index in indices])
        whole = type(norms[indices[0]]).from_local(parts, mesh, placements, run_check=False).full_tensor()
        for index, norm in zip(indices, whole, strict=True):
            norms[index] = norm
    return norms


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
            cut = getattr(x.placements[dim], "dim", None) if dim < x.device_mesh.ndim else None
            if cut is None:
                continue
            line = "column" if cut == 0 else "row"
            names = [name for name in sizes if name in WHOLE or (name.endswith(line) and sizes[name] is not None)]
            key = (x.device_mesh, squares, sizes["weight"].dtype)
            packed.setdefault(key, []).extend((sizes, name) for name in names)
        for (mesh, squares, _), places in packed.items():
            parts = [sizes[name] for sizes, name in places]
            buffer = torch.cat([part.reshape(-1) for part in parts])
            group = mesh.get_group(dim)
            if squares:
                distributed.all_reduce(buffer, distributed.ReduceOp.SUM, group=group)
            else:
                bits, dtype = _as_bits(buffer)
                distributed.all_reduce(bits, distributed.ReduceOp.MAX, group=group)
                buffer = bits.view(dtype)
            for (sizes, name), whole in zip(places, buffer.split([p.numel() for p in parts]), strict=True):
                sizes[name] = whole.reshape(sizes[name].shape)
    return after
