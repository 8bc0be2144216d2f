"""The two passes of fast.py in C (fast.c), compiled when they are first needed.

The compiled file stands in the cache folder (merit_lab.files.cache_dir) under a name made of the source, the compiler
and the processor, so that it is compiled once. It shares torch's own threads. Where no compiler is found, or it fails,
`library` returns None, `reason()` says why, and fast.py goes on in torch.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from ..errors import InputError
from ..files import cache_dir
from .fast_tiles import tiles

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

_reasons: list[str] = []


def library(dtype: torch.dtype):
    """The compiled passes for this dtype, or None where there can be none. The first call may compile (a second)."""
    if os.environ.get("MERIT_LAB_NO_COMPILER", "0") != "0" or dtype not in TYPES:
        return None
    return _library(dtype)


def reason() -> str:
    """Why there is no compiled step; empty while nothing has failed."""
    return "; ".join(dict.fromkeys(_reasons))


@cache
def _library(dtype):
    try:
        loaded = _load(dtype)
    except (OSError, InputError, subprocess.SubprocessError) as error:
        _reasons.append(str(error))
        warnings.warn(
            f"MERIT and LAMB take their fused step in torch, which is slower: {error}. Install gcc or clang "
            "(Debian: apt install gcc), or pass fused=False for the readable step.",
            stacklevel=2,
        )
        return None
    loaded.how = _how(TYPES[dtype][-1])
    for function in (loaded.measure_max, loaded.measure_l2, loaded.apply):
        function.restype = None
    return loaded


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


def _how(real):
    names = ("beta1", "rest1", "beta2", "rest2", "scale1", "scale2", "eps", "decay", "sign", "largest")
    return type("How", (ctypes.Structure,), {"_fields_": [(name, real) for name in names]})


def _of(tensor: Tensor | None):
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def _call(weight: Tensor, how):
    """The library, this direction as it takes it, threads, and the length of a row, for a matrix."""
    lib = library(weight.dtype)
    (beta1, beta2), (one, two) = how.betas, how.corrections
    largest = torch.finfo(weight.dtype).max
    as_c = lib.how(beta1, 1 - beta1, beta2, 1 - beta2, 1 / one, 1 / two, how.eps, how.decay, how.sign, largest)
    threads = torch.get_num_threads() if lib.parallel and weight.numel() >= PARALLEL_FROM else 1
    return lib, as_c, threads


def measure(weight, grad, exp_avg, exp_avg_sq, how, *, squares: bool, lines: bool):
    """Pass 1, as fast_tiles.measure."""
    from .fast import Sizes

    lib, as_c, threads = _call(weight, how)
    n, columns = weight.shape if lines else (-(-weight.numel() // LINE), LINE)
    scratch = weight.new_empty(threads, columns)
    of_rows = [weight.new_zeros(n, 1, dtype=torch.float64 if squares else weight.dtype) for _ in range(2)]
    of_columns = [weight.new_zeros(threads, columns) if lines else None for _ in range(2)]
    pieces = [(weight, grad, exp_avg, exp_avg_sq)]
    if grad.dtype != weight.dtype:  # a half-precision gradient is widened a piece at a time
        pieces = tiles(*pieces[0], whole_rows=lines)
    row = 0
    for w, g, m, v in pieces:
        count = w.numel()
        here = [x[row:] for x in of_rows]
        arguments = (ctypes.c_long(count), ctypes.c_long(max(columns, 1)), ctypes.c_int(threads))
        g = g.to(w.dtype)  # has a name so that it lives through the call
        arguments += (*map(_of, (w, g, m, v)), ctypes.byref(as_c), *map(_of, here))
        if squares:
            lib.measure_l2(*arguments, _of(scratch))
        else:
            lib.measure_max(*arguments, *map(_of, of_columns), _of(scratch))
        row += len(w) if lines else -(-count // LINE)
    if squares:
        return Sizes(*(x.sum() for x in of_rows))
    whole = [x.amax() if n else x.new_zeros(()) for x in of_rows]
    return Sizes(*whole, *of_rows, *(x.amax(0, keepdim=True) for x in of_columns)) if lines else Sizes(*whole)


def apply(weight, exp_avg, exp_avg_sq, how, factors, lr: float) -> None:
    """Pass 2, as fast_tiles.apply."""
    lib, as_c, threads = _call(weight, how)
    real = TYPES[weight.dtype][-1]
    row = factors.row.to(weight.dtype).contiguous()
    column = None if factors.column is None else factors.column.contiguous()
    guards = bool(row.isinf().any()) or (column is not None and bool(column.isinf().any()))
    stride = 1 if len(row) > 1 else 0
    columns = weight.shape[1] if column is not None or stride else LINE
    lib.apply(
        ctypes.c_long(weight.numel()), ctypes.c_long(max(columns, 1)), ctypes.c_int(threads),
        *map(_of, (weight, exp_avg, exp_avg_sq)), ctypes.byref(as_c),
        _of(row), ctypes.c_long(stride), _of(column), ctypes.c_int(guards), ctypes.c_int(factors.clip),
        real(lr), real(factors.beside),
    )  # fmt: skip
