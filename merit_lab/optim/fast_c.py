"""The two passes of fast.py in C (fast.c), compiled when they are first needed.

The compiled file stands in the cache folder (merit_lab.files.cache_dir) under a name made of the source, the compiler
and the processor, so that it is compiled once. It shares torch's own threads. Where no compiler is found, or it fails,
`library` warns once and returns None, and fast.py goes on in torch.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from functools import cache, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from ..errors import InputError
from ..files import cache_dir
from . import fast_tiles
from .fast_tiles import Sizes, tell, tiles

SOURCE = Path(__file__).with_name("fast.c")
LINE = 1024  # elements of a row where the weight has none: a vector is worked on in pieces of so many
PARALLEL_FROM = 1 << 15  # elements: below, waking a second thread takes longer than it saves

TYPES = {
    torch.float32: ("float", "int32_t", "uint32_t", "sqrtf", ctypes.c_float),
    torch.float64: ("double", "int64_t", "uint64_t", "sqrt", ctypes.c_double),
}
# Exact: each operation rounded by itself. The last two let gcc use vectors; they change no result.
EXACT = ["-O3", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
ATTEMPTS = (  # from the best to what every compiler takes
    ["-march=native", "-fopenmp"],
    ["-mcpu=native", "-fopenmp"],
    ["-march=native"],
    ["-mcpu=native"],
    [],
)


@cache
def library(dtype: torch.dtype):
    """The compiled passes for this dtype, or None where there can be none. The first call may compile (a second).

    MERIT_LAB_NO_COMPILER=1 in the environment, before that call, keeps to torch.
    """
    if os.environ.get("MERIT_LAB_NO_COMPILER", "0") != "0" or dtype not in TYPES:
        return None
    try:
        loaded = _load(dtype)
    except (OSError, InputError, subprocess.SubprocessError) as error:
        warnings.warn(
            f"MERIT and LAMB take their fused step in torch, which is slower: {error}. Install gcc or clang "
            "(Debian: apt install gcc), or pass fused=False for the readable step.",
            stacklevel=2,
        )
        return None
    # As declared in fast.c: l for long, i for int, p for a pointer, r for REAL.
    kinds = {"l": ctypes.c_long, "i": ctypes.c_int, "p": ctypes.c_void_p, "r": TYPES[dtype][-1]}
    of_passes = {"measure_max": "llippppppppp", "measure_l2": "llipppppppp", "apply": "llippppplpirr"}
    of_passes["merit"] = "llipppppiiiiirp"
    for name, signature in (of_passes | {"ratios": "lppirrp"}).items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = None, [kinds[kind] for kind in signature]
    return loaded


@cache
def _structure(real):
    names = ("beta1", "rest1", "beta2", "rest2", "scale1", "scale2", "eps", "decay", "sign", "largest")
    return type("How", (ctypes.Structure,), {"_fields_": [(name, real) for name in names]})


@lru_cache(256)
def _as_c(how, dtype):
    """This direction as the library takes it: one for all tensors of a step."""
    (beta1, beta2), (one, two) = how.betas, how.corrections
    largest = torch.finfo(dtype).max
    return ctypes.byref(
        _structure(TYPES[dtype][-1])(
            beta1, 1 - beta1, beta2, 1 - beta2, 1 / one, 1 / two, how.eps, how.decay, how.sign, largest
        )
    )


def _load(dtype):
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", ""), "cc", "gcc", "clang"))), None)
    if compiler is None:
        raise OSError("no C compiler was found")
    source, (real, bits, unsigned, root, _) = SOURCE.read_bytes(), TYPES[dtype]
    defines = [f"-DREAL={real}", f"-DBITS={bits}", f"-DUNSIGNED={unsigned}", f"-DSQRT={root}"]
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False, timeout=60).stdout
    digest = hashlib.sha256(b"\0".join((source, version, _processor().encode(), torch.__version__.encode())))
    failed = ""
    for number, attempt in enumerate(ATTEMPTS):
        path = cache_dir() / "compiled" / f"fast-{real}-{digest.hexdigest()[:16]}-{number}.so"
        parallel = "-fopenmp" in attempt
        thread = ["-DTHREAD=omp_get_thread_num()", "-include", "omp.h"] if parallel else ["-DTHREAD=0"]
        try:
            if not path.is_file():
                _compile(compiler, [*EXACT, *attempt, *defines, *thread], path)
            loaded = ctypes.CDLL(str(path))
        except (OSError, subprocess.SubprocessError) as error:
            failed = f"{Path(compiler).name} failed: {_first_line(error)}"
            continue
        loaded.parallel = parallel
        return loaded
    raise OSError(failed)


def _compile(compiler, flags, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        compiled, linked = Path(folder) / "fast.o", Path(folder) / "fast.so"
        commands = (
            [*flags, "-c", str(SOURCE), "-o", str(compiled)],
            # Without -fopenmp: its calls find the OpenMP that torch has loaded, and so torch's threads.
            ["-shared", str(compiled), "-o", str(linked), "-lm"],
        )
        for arguments in commands:
            subprocess.run([compiler, *arguments], capture_output=True, check=True, timeout=300)
        os.replace(linked, path)


def _first_line(error):
    said = getattr(error, "stderr", None)
    return (said.decode(errors="replace").strip().splitlines() or [str(error)])[0] if said else str(error)


def _processor() -> str:
    """What tells processors apart that cannot run each other's code."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line for line in file if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return f"{platform.machine()} {platform.processor()}"


def _threads(lib, weight: Tensor) -> int:
    return torch.get_num_threads() if lib.parallel and weight.numel() >= PARALLEL_FROM else 1


def measure(weight, grad, exp_avg, exp_avg_sq, how, *, squares: bool, lines: bool):
    """Pass 1, as fast_tiles.measure."""
    if not weight.numel():  # of an empty shard, which may have rows or columns all the same
        return fast_tiles.measure(weight, grad, exp_avg, exp_avg_sq, how, squares=squares, lines=lines)
    if grad.dtype != weight.dtype:
        return _measure_in_pieces(weight, grad, exp_avg, exp_avg_sq, how, squares=squares, lines=lines)
    lib, count = library(weight.dtype), weight.numel()
    threads, as_c = _threads(lib, weight), _as_c(how, weight.dtype)
    n, columns = weight.shape if lines else (-(-count // LINE), min(LINE, count))
    kind = torch.float64 if squares else weight.dtype
    whole, of_rows = torch.zeros(2, dtype=kind), torch.empty(2, n, 1, dtype=kind)
    of_columns = torch.empty(2, threads, columns, dtype=kind) if lines else None
    scratch = torch.empty(threads, columns, dtype=weight.dtype)
    tensors = (weight.data_ptr(), grad.data_ptr(), exp_avg.data_ptr(), exp_avg_sq.data_ptr())
    arguments = (count, columns, threads, *tensors, as_c, whole.data_ptr(), of_rows.data_ptr())
    if squares:
        lib.measure_l2(*arguments, scratch.data_ptr())
    else:
        lib.measure_max(*arguments, of_columns.data_ptr() if lines else None, scratch.data_ptr())
    tell("pass 1", (weight, grad, exp_avg, exp_avg_sq), (exp_avg, exp_avg_sq))
    if not lines:
        return Sizes(whole[0], whole[1])
    return Sizes(whole[0], whole[1], of_rows[0], of_rows[1], of_columns[0, :1], of_columns[1, :1])


def _measure_in_pieces(weight, grad, exp_avg, exp_avg_sq, how, *, squares, lines):
    """A half-precision gradient is widened some rows at a time, so that no copy of it stands whole."""
    found = [
        measure(w, g.to(w.dtype), m, v, how, squares=squares, lines=lines)
        for w, g, m, v in tiles(weight, grad, exp_avg, exp_avg_sq, whole_rows=lines)
    ]
    join = torch.sum if squares else torch.amax
    whole = [join(torch.stack(parts), 0) for parts in zip(*(s[:2] for s in found), strict=True)]
    if not lines:
        return Sizes(*whole)
    of_rows = [torch.cat(parts) for parts in zip(*(s[2:4] for s in found), strict=True)]
    of_columns = [torch.cat(parts).amax(0, keepdim=True) for parts in zip(*(s[4:] for s in found), strict=True)]
    return Sizes(*whole, *of_rows, *of_columns)


def ratio(weight_norm, direction_norm, guards: bool, least: Tensor | None = None):
    """Ratios of norms, as fast_tiles.ratio."""
    weight_norm, direction_norm = weight_norm.contiguous(), direction_norm.contiguous()
    out = torch.empty_like(weight_norm)
    norms, floor = (weight_norm.data_ptr(), direction_norm.data_ptr()), 0.0 if least is None else least.item()
    library(out.dtype).ratios(out.numel(), *norms, guards, floor, torch.finfo(out.dtype).max, out.data_ptr())
    return out


def apply(weight, exp_avg, exp_avg_sq, how, factors, lr: float) -> None:
    """Pass 2, as fast_tiles.apply."""
    if not weight.numel():
        return
    lib = library(weight.dtype)
    row, column = factors.row.contiguous(), factors.column
    column = None if column is None else column.contiguous()
    stride = 1 if len(row) > 1 else 0
    columns = weight.shape[1] if column is not None or stride else LINE
    lib.apply(
        weight.numel(), columns, _threads(lib, weight),
        weight.data_ptr(), exp_avg.data_ptr(), exp_avg_sq.data_ptr(), _as_c(how, weight.dtype),
        row.data_ptr(), stride, None if column is None else column.data_ptr(), factors.clip, lr, factors.beside,
    )  # fmt: skip
    tell("pass 2", (weight, exp_avg, exp_avg_sq), (weight,))


def merit(weight, grad, exp_avg, exp_avg_sq, how, lr: float, *, guards, by_row, by_column, bound, clip) -> None:
    """MERIT's whole step of a matrix that is not empty, both passes in one call; grad is of the weight's dtype.

    Args:
        guards, by_row, by_column: see fast.line_7. bound, clip: MERIT's switches.
    """
    count, lib = weight.numel(), library(weight.dtype)
    threads, lines = _threads(lib, weight), by_row or by_column
    n, columns = weight.shape if lines else (-(-count // LINE), min(LINE, count))
    room = torch.empty(2 * n + 3 * threads * columns, dtype=weight.dtype)
    lib.merit(
        count, columns, threads,
        weight.data_ptr(), grad.data_ptr(), exp_avg.data_ptr(), exp_avg_sq.data_ptr(), _as_c(how, weight.dtype),
        guards, by_row, by_column, bound, clip, lr, room.data_ptr(),
    )  # fmt: skip
    tell("pass 1", (weight, grad, exp_avg, exp_avg_sq), (exp_avg, exp_avg_sq))
    tell("pass 2", (weight, exp_avg, exp_avg_sq), (weight,))
