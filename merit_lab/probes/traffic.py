"""What an optimizer step moves through memory and what it allocates, by count.

    with traffic() as moved:
        optimizer.step()
    moved.read, moved.written, moved.peak      # bytes

Every operation of torch is counted as if nothing stayed in cache between two operations: it reads the tensors it is
given and writes the tensors it makes or changes. A tensor given twice counts once; one that broadcasts counts as
large as it is, not as large as what it meets.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..optim import fast_tiles

WRITE_ALONE = ("copy_", "zero_", "fill_")  # change a tensor without reading it
WRITE_NOTHING = ("empty", "empty_like", "empty_strided", "new_empty")  # make a tensor without writing it
ASK_FOR_SHAPE = ("new_", "_like")  # in the name of operations that do not read the tensor they are given


@dataclass
class Moved:
    """Bytes, from the beginning of the block until now."""

    read: int = 0
    written: int = 0
    peak: int = 0  # most bytes that were held at once by tensors made in the block
    calls: list[tuple[str, int, int]] = field(default_factory=list)  # (operation, read, written), in order

    @property
    def bytes(self) -> int:
        """Read and written together."""
        return self.read + self.written

    def add(self, name: str, read: int, written: int) -> None:
        """Count one operation."""
        self.read += read
        self.written += written
        self.calls.append((name, read, written))


@contextmanager
def traffic() -> Iterator[Moved]:
    """Count what operations of torch, and the compiled passes of the fused step, move within the block."""
    moved = Moved()
    fast_tiles.observers.append(moved)
    try:
        with _Counting(moved):
            yield moved
    finally:
        fast_tiles.observers.remove(moved)


class _Counting(TorchDispatchMode):
    def __init__(self, moved: Moved):
        super().__init__()
        self.moved, self.now, self._made = moved, 0, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        given = tree_leaves((args, kwargs))
        known = {t.untyped_storage().data_ptr() for t in given if isinstance(t, Tensor)}
        made = [
            t for t in tree_leaves(result) if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in known
        ]
        for tensor in made:
            self._hold(tensor.untyped_storage())
        name = function._schema.name.removeprefix("aten::")
        changed, only_written = [], []
        for argument, value in self._arguments(function, args, kwargs):
            if argument.name == "grads":
                continue  # torch's fused optimizers declare that they write gradients, but do so for a loss scale alone
            if argument.alias_info is not None and argument.alias_info.is_write:
                changed.append(value)
                if argument.is_out or name in WRITE_ALONE:
                    only_written.append(value)
        if made or changed or not isinstance(result, Tensor):  # else it is a view: the same memory, looked at anew
            read = 0 if any(part in name for part in ASK_FOR_SHAPE) else _bytes(given) - _bytes(only_written)
            written = _bytes(changed) + (0 if name in WRITE_NOTHING else _bytes(made))
            self.moved.add(name, read, written)
        return result

    @staticmethod
    def _arguments(function, args, kwargs):
        schema = function._schema.arguments
        yield from zip(schema, args, strict=False)
        yield from ((a, kwargs[a.name]) for a in schema if a.name in kwargs)

    def _hold(self, storage):
        pointer, size = storage.data_ptr(), storage.nbytes()
        if pointer in self._made or not size:
            return
        self._made.add(pointer)
        self.now += size
        self.moved.peak = max(self.moved.peak, self.now)
        weakref.finalize(storage, self._freed, pointer, size)

    def _freed(self, pointer, size):
        self._made.discard(pointer)
        self.now -= size


def _bytes(values) -> int:
    """Bytes of the tensors in these values, each once."""
    sizes = {}
    for tensor in tree_leaves(values):
        if isinstance(tensor, Tensor):
            storage = tensor.untyped_storage()
            place = (storage.data_ptr(), tensor.storage_offset(), tensor.shape)
            sizes[place] = min(tensor.numel() * tensor.element_size(), storage.nbytes())
    return sum(sizes.values())
