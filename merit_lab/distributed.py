"""Training on several ranks: processes that each take a slice of every batch and together take the same steps.

    torchrun --nproc-per-node 2 -m merit_lab train --recipe tiny --parallel fsdp

    "ddp"    every rank holds the whole model; gradients are averaged over the ranks (DistributedDataParallel)
    "fsdp"   every rank holds some rows of each weight, of its gradient and of its moments, and gathers the rest of a
             layer while it needs it (fully_shard): parameters are DTensors, and MERIT, LAMB and AdamW step them

A recipe's batch is the batch of all ranks together, so that the same recipe on more ranks is the same training: the
gradient is the whole batch's, to rounding, also where the ranks do not divide the batch. Losses, gradient norms and
records are the same on every rank. Measurements (probes, validation losses, gradient noise) are made by every rank for
itself; under "fsdp" they gather the whole model, which must fit on one device while they last.

Processes talk through gloo on a CPU and NCCL on CUDA. One that waits longer than MERIT_LAB_RANK_TIMEOUT seconds (40,
unless the environment says otherwise) for another ends with a RankError.
"""

import hashlib
import io
import math
import os
import pickle
import re
import shutil
import signal
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path, PurePath
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from .errors import InputError, RankError
from .files import cache_dir, read_text, write_whole
from .models import GPT2
from .optim import Traced

MODES = ("ddp", "fsdp")
TIMEOUT = 40  # seconds; well under the minute after which a person would look
TORCHRUN = "torchrun --nproc-per-node 2 -m merit_lab train …"

# -- how a run is spread -------------------------------------------------------------------------------------------


class Ranks:
    """This process among those that train together: the only one, unless a subclass says otherwise.

    Attributes:
        mode: None, "ddp" or "fsdp".
        rank: number of this process, from 0. Rank 0 prints and writes.
        size: how many there are.
        device: what this one computes on.
    """

    mode: str | None = None

    def __init__(self, device: torch.device, rank: int = 0, size: int = 1):
        self.device, self.rank, self.size = device, rank, size

    def take(self, model: GPT2) -> nn.Module:
        """Make the model ready for this mode; to be called in training, where `model` itself is for measuring.

        Its parameters are those to give to an optimizer from now on.
        """
        self.model = self._called = model
        return self._called

    def micro_batches(self, n: int, largest: int, draw: Callable) -> Iterator[tuple[Tensor, Tensor, float]]:
        """This rank's slice of a batch, a micro-batch at a time; each goes forward and backward before the next.

        Gradients are reduced over the ranks in the last one's backward pass alone. What decides so is set before a
        micro-batch is handed out, hence before its forward pass: torch looks at it there.

        Args:
            n: sequences in the whole batch.
            largest: sequences in a micro-batch, at most.
            draw: called with the first sequence's number and how many; returns x and y, (b, T) each.

        Yields:
            x, y: (b, T) each.
            weight: what to multiply their mean loss by before `backward`, so that the reduced gradient is that of
                the mean over the whole batch. Their share of it times the ranks, over which torch averages.
        """
        start, stop = self.rank * n // self.size, (self.rank + 1) * n // self.size
        pieces = [(at, min(largest, stop - at)) for at in range(start, stop, largest)]
        weights = [count * self.size / n for _, count in pieces]
        # As many on every rank, for under "fsdp" each gathers weights from all. What is left over counts for nothing.
        missing = math.ceil(math.ceil(n / self.size) / largest) - len(pieces)
        pieces += [(start, 1)] * missing
        weights += [0.0] * missing
        for index, (piece, weight) in enumerate(zip(pieces, weights, strict=True)):
            with self._reducing(index == len(pieces) - 1):
                yield *draw(*piece), weight

    def _reducing(self, wanted: bool):
        return nullcontext()

    def mean(self, x: Tensor) -> Tensor:
        """The mean over the ranks of a tensor that each has its own value of."""
        return x

    @contextmanager
    def whole_model(self, write_back: bool = False) -> Iterator[GPT2]:
        """The model with plain tensors for weights, to measure with. All ranks enter this together.

        Args:
            write_back: the weights are changed inside, alike on every rank, and the model is to have them.
        """
        yield self.model

    def whole(self, step: tuple) -> tuple:
        """What `optimizer.explain` returned, with plain tensors. All ranks ask together."""
        return step

    @contextmanager
    def naming_failures(self) -> Iterator[None]:
        """Turns torch's error about a rank that does not answer into a RankError, a line that says who noticed."""
        yield


class _Several(Ranks):
    """What both modes share."""

    def mean(self, x):
        total = x.detach().clone()
        dist.all_reduce(total)
        return total / self.size

    @contextmanager
    def naming_failures(self):
        try:
            yield
        except RuntimeError as error:
            if not _is_about_another_rank(error):
                raise
            raise RankError(
                f"rank {self.rank} of {self.size}: another rank has ended or does not answer ({_cause(error)}); "
                "look for its message above or on its machine, then start all ranks again"
            ) from error


class Replicated(_Several):
    """mode "ddp"."""

    mode = "ddp"

    def take(self, model):
        self.model = model
        devices = [self.device.index] if self.device.type == "cuda" else None
        with self.naming_failures():
            self._called = nn.parallel.DistributedDataParallel(model, device_ids=devices)  # sends rank 0's weights
        return self._called

    def _reducing(self, wanted):
        return nullcontext() if wanted else self._called.no_sync()


class Sharded(_Several):
    """mode "fsdp": one unit a block, and one of the rest, so that a tied embedding and head stay one tensor."""

    mode = "fsdp"

    def take(self, model):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        self.model = self._called = model
        with self.naming_failures():
            mesh = init_device_mesh(self.device.type, (self.size,))
            with torch.no_grad():
                for parameter in model.parameters():
                    dist.broadcast(parameter, 0)
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            return fully_shard(model, mesh=mesh)

    @contextmanager
    def _reducing(self, wanted):
        self._called.set_requires_gradient_sync(wanted)
        yield

    @contextmanager
    def whole_model(self, write_back=False):
        named = dict(self.model.named_parameters())
        with torch.device("meta"):
            model = GPT2(self.model.config)
        whole = {name: parameter.detach().full_tensor() for name, parameter in named.items()}
        model.load_state_dict(whole, strict=False, assign=True)  # not strict: a tied head has no name of its own
        if model.config.tie_weights:
            model.head.weight = model.token_embedding.weight
        yield model
        if write_back:
            from torch.distributed.tensor import distribute_tensor

            with torch.no_grad():
                for name, changed in model.named_parameters():
                    place = {"device_mesh": named[name].device_mesh, "placements": named[name].placements}
                    # src_data_rank: each rank cuts its own share, since all have the same whole
                    named[name].copy_(distribute_tensor(changed.detach(), **place, src_data_rank=None))

    def whole(self, step):
        return type(step)(*(part.full_tensor() if hasattr(part, "full_tensor") else part for part in step))


def join(parallel: str | None, device: torch.device, batch_size: int) -> Ranks:
    """This process's place among the ranks; starts the process group where torchrun wants one and there is none yet.

    Args:
        parallel: "ddp", "fsdp", or None: "ddp" where there are several ranks, else the one process.
        device: a device's kind; of several CUDA devices each rank of a machine takes its own.
        batch_size: sequences in a step, of all ranks together.
    """
    if parallel is not None and parallel not in MODES:
        raise InputError(f"parallel: got {parallel!r}, expected {', '.join(MODES)} or None")
    size = world_size()
    if size is None and parallel is not None:
        raise InputError(f"parallel: got {parallel!r} in a process of its own; start the ranks with {TORCHRUN}")
    if parallel is None and (size or 1) == 1:
        return Ranks(device)
    if device.type == "mps":
        raise InputError("device: got 'mps', on which processes cannot talk to each other; take cpu or cuda")
    if batch_size < size:
        raise InputError(
            f"batch_size: got {batch_size} for {size} ranks, some of which would have nothing to do; "
            f"take at least {size} sequences or fewer ranks"
        )
    local_rank = int(os.environ.get("LOCAL_RANK", dist.get_rank() if dist.is_initialized() else 0))
    if device.type == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise InputError(
                f"device: rank {local_rank} of this machine has no CUDA device of its own, there being "
                f"{torch.cuda.device_count()}; start as many ranks as there are devices, or take the device cpu"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    ranks = (Sharded if parallel == "fsdp" else Replicated)(device, int(os.environ.get("RANK", 0)), size)
    if not dist.is_initialized():
        backend, its_device = ("nccl", device) if device.type == "cuda" else ("gloo", None)
        with ranks.naming_failures():
            dist.init_process_group(backend, timeout=timedelta(seconds=_timeout()), device_id=its_device)
    ranks.rank = dist.get_rank()
    return ranks


def world_size() -> int | None:
    """How many ranks the process group has, or will have by torchrun's environment; None where there is neither."""
    if dist.is_initialized():
        return dist.get_world_size()
    torchrun = all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))
    return int(os.environ["WORLD_SIZE"]) if torchrun else None


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Ranks of one machine enter one by one: the first to come prepares a text, the others find it ready.

    By a lock on a file, not by a message: preparing may take longer than a rank may keep another waiting.
    """
    if (world_size() or 1) == 1:
        yield
        return
    from filelock import FileLock

    with FileLock(cache_dir() / ".ranks.lock"):
        yield


def end_on_sigterm(ranks: Ranks) -> None:
    """From now on SIGTERM, by which torchrun ends the others where one rank fails, is a RankError.

    Not with NCCL: a process that waits for it hears no signal, and is better ended by it at once.
    """
    if ranks.size == 1 or ranks.device.type == "cuda":
        return

    def end(*_):
        raise RankError(
            f"rank {ranks.rank} of {ranks.size}: told to end (SIGTERM), as torchrun does when another rank has failed; "
            "look for its message above or on its machine, then start all ranks again"
        )

    signal.signal(signal.SIGTERM, end)


def place() -> tuple[int, int]:
    """This process's rank and how many train together: (0, 1) alone, also where torch was built without ranks."""
    together = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(), dist.get_world_size()) if together else (0, 1)


def from_all(value: Any) -> list[Any]:
    """What each rank hands in, by rank, known to all. All ranks call this together; a process alone gets its own."""
    _, size = place()
    if size == 1:
        return [value]
    values = [None] * size
    dist.all_gather_object(values, value)
    return values


def leave() -> None:
    """End the process group, if there is one; all ranks do so together, at the end."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _timeout() -> int:
    value = os.environ.get("MERIT_LAB_RANK_TIMEOUT", str(TIMEOUT))
    if not value.isdecimal() or int(value) < 1:
        raise InputError(f"MERIT_LAB_RANK_TIMEOUT: got {value!r}, expected a whole number of seconds ≥ 1")
    return int(value)


def _is_about_another_rank(error: RuntimeError) -> bool:
    # gloo raises a bare RuntimeError that begins with the place in its own source
    return isinstance(error, dist.DistError) or "gloo/" in str(error) or "Gloo" in str(error)


def _cause(error: RuntimeError) -> str:
    """The error's first sentence, without the place in torch's source before it."""
    text = re.sub(r"^\[[^\]]*\]\s*", "", str(error).strip())
    return re.split(r"\.\s|\n", text)[0].rstrip(".")


# -- saving and loading --------------------------------------------------------------------------------------------

SUMS = "SHA256SUMS"  # of the folder's other files, as `sha256sum -c` reads them


def save_sharded(folder: str | os.PathLike, model: nn.Module, optimizer: Traced, step: int = 0) -> None:
    """Write weights and optimizer state, each rank its own share, as a folder that any number of ranks can load.

    A folder of that name is replaced once the new one is whole. All ranks call this together; so may one process
    without a process group. The format is that of torch.distributed.checkpoint, with checksums in SHA256SUMS beside.

    Args:
        step: how many steps were taken; `load_sharded` returns it.
    """
    import torch.distributed.checkpoint as dcp

    folder = Path(folder)
    partial, old = (folder.with_name(f".{folder.name}.{name}") for name in ("partial", "old"))
    rank, _ = place()
    first = rank == 0
    if first:
        shutil.rmtree(partial, ignore_errors=True)
    _meet()
    numbers = {"step": torch.tensor(step), "skipped_steps": torch.tensor(optimizer.skipped_steps)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is meant
        dcp.save(_tensors(model, optimizer) | numbers, checkpoint_id=partial)
    mine = [*partial.glob(f"__{rank}_*.distcp"), *([partial / ".metadata"] if first else [])]
    sums = [sum_ for theirs in from_all([(path.name, _sha256(path)) for path in mine]) for sum_ in theirs]
    if first:
        write_whole(partial / SUMS, "".join(f"{sha256}  {name}\n" for name, sha256 in sorted(sums)))
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)
        partial.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    _meet()


def load_sharded(folder: str | os.PathLike, model: nn.Module, optimizer: Traced) -> int:
    """Load what `save_sharded` wrote, on as many ranks as there are now, into a model and an optimizer in place.

    Learning rates and the other arguments are left as they are. All ranks call this together.

    Returns:
        How many steps were taken when it was saved.

    Raises:
        InputError: there is no such folder, a file in it was cut short or changed, or it is of another model. On all
            ranks, also where one alone finds it.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    folder = Path(folder)
    metadata = problem = None
    try:
        metadata = _checked(folder)
    except InputError as error:
        problem = str(error)
    for found in from_all(problem):
        if found is not None:
            raise InputError(found)
    saved = {name: getattr(entry, "size", None) for name, entry in metadata.state_dict_metadata.items()}
    for name, parameter in model.named_parameters():
        optimizer.state.pop(parameter, None)
        if f"state.{name}.step" in saved:
            optimizer._state_of(parameter)  # zeros, placed as the parameter is
    wanted = _tensors(model, optimizer) | {"step": torch.tensor(0), "skipped_steps": torch.tensor(0)}
    differing = sorted(
        name for name in saved.keys() | wanted.keys()
        if name not in saved or name not in wanted or saved[name] != wanted[name].shape
    )  # fmt: skip
    if differing:
        raise InputError(f"checkpoint: {folder} is of another model or optimizer; {differing[0]} differs")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.load(wanted, storage_reader=_reader(folder, metadata))
    except CheckpointException as error:
        raise InputError(f"checkpoint: {folder} cannot be read ({_cause(error)}); take an older one") from error
    optimizer.skipped_steps = int(wanted["skipped_steps"])
    return int(wanted["step"])


def _checked(folder: Path):
    """torch's metadata of a saved folder, whose files are as they were written. The ranks share the reading.

    Raises:
        InputError: a file is missing, was cut short or changed, or is something else.
    """
    rank, size = place()
    path = folder / SUMS
    try:
        sums = [line.split("  ", 1) for line in read_text(path).removesuffix("\n").split("\n")]
        sums = sorted((name, sha256) for sha256, name in sums)
        for index, (name, sha256) in enumerate(sums):
            path = folder / name
            if (index % size == rank or name == ".metadata") and _sha256(path) != sha256:
                raise InputError(
                    f"checkpoint: {path} was cut short or changed, for its checksum is wrong; take an older one"
                )
        path = folder / ".metadata"
        metadata = _metadata(path.read_bytes())
        metadata.state_dict_metadata = dict(metadata.state_dict_metadata)
        parts = {info.relative_path for info in metadata.storage_data.values()}
        if missing := {".metadata", *parts} - {name for name, _ in sums}:
            raise InputError(f"checkpoint: {folder / SUMS} has no checksum of {min(missing)}; take an older one")
    except OSError as error:
        raise InputError(
            f"checkpoint: cannot read {path} ({error.strerror}); give a folder that save_sharded wrote"
        ) from None
    except InputError:
        raise
    except Exception:  # pickle raises a dozen kinds, all of them about this file
        raise InputError(
            f"checkpoint: {path} is not what save_sharded writes; give a folder that it wrote, or an older one"
        ) from None
    return metadata


def _metadata(content: bytes):
    """torch's metadata from its pickle. A pickle may name any function to be called: here it gets no other class."""
    from torch.distributed.checkpoint import filesystem, metadata

    class Unpickler(pickle.Unpickler):
        def find_class(self, module, name):
            if module == metadata.__name__ and name in (*metadata.__all__, "_MEM_FORMAT_ENCODING"):
                return getattr(metadata, name)
            if (module, name) == (filesystem.__name__, "_StorageInfo"):
                return filesystem._StorageInfo
            if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
                return getattr(torch, name)
            if (module, name) == ("torch.serialization", "_get_layout"):
                return torch.serialization._get_layout  # looks a name up
            if module.partition(".")[0] == "pathlib":  # where it was saved, perhaps on another system
                return PurePath
            raise pickle.UnpicklingError(f"{module}.{name} is no part of metadata")

    return Unpickler(io.BytesIO(content)).load()


def _reader(folder: Path, metadata):
    """torch's reader of a folder that takes this metadata, in place of unpickling the file."""
    from torch.distributed.checkpoint import FileSystemReader

    class Reader(FileSystemReader):
        def read_metadata(self, *args, **kwargs):
            return metadata

    return Reader(folder)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _tensors(model, optimizer) -> dict[str, Tensor]:
    """All that changes in training, by name: weights, and the optimizer's state of each. They share memory with it."""
    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[f"weight.{name}"] = parameter.detach()
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"state.{name}.{key}"] = value
    return tensors


def _meet() -> None:
    if dist.is_initialized():
        dist.barrier()


# -- what it costs -------------------------------------------------------------------------------------------------


class count_collectives(TorchDispatchMode):
    """Counts the collectives that this rank takes part in: those of DTensors, of DDP and FSDP, and plain ones.

        with count_collectives() as counted:
            optimizer.step()
        counted.calls, counted.numbers

    Attributes:
        by_operation: name of an operation such as "all_reduce" -> how many there were.
        numbers: elements of the tensors that this rank handed in, all together.
    """

    def __init__(self):
        super().__init__()
        self.by_operation: Counter[str] = Counter()
        self.numbers = 0

    @property
    def calls(self) -> int:
        """How many collectives there were."""
        return self.by_operation.total()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(hasattr(t, "full_tensor") for t in types):
            return NotImplemented  # a DTensor first becomes operations on its shards and collectives, seen here later
        namespace, _, name = getattr(func, "name", str)().partition("::")
        operation = _operation(name.partition(".")[0]) if namespace in ("c10d", "_c10d_functional") else None
        if operation:
            self.by_operation[operation] += 1
            self.numbers += sum(tensor.numel() for tensor in _handed_in(func, args))
        return func(*args, **(kwargs or {}))


_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "scatter", "gather", "reduce")


def _operation(name: str) -> str | None:
    """torch's several names of a collective as one: "_allgather_base_" -> "all_gather"; None for what is none."""
    squeezed = name.replace("_", "")
    return next((kind for kind in _COLLECTIVES if squeezed.startswith(kind.replace("_", ""))), None)


def _handed_in(func, args) -> list[Tensor]:
    from torch.utils._pytree import tree_leaves

    names = [argument.name for argument in func._schema.arguments]
    given: list[Any] = [
        value for name, value in zip(names, args, strict=False) if name.startswith("input") or name == "tensors"
    ]
    return [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
