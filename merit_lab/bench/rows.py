"""Timing in turn, and the files that results are written to."""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from .. import __version__
from ..files import data_dir, write_whole
from ..runs import machine


def in_turn(functions: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each function in each round, after one round that does not count. Round i of all is one moment."""
    for function in functions.values():
        function()
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            seconds[name].append(time_of(function))
    return seconds


def time_of(function: Callable[[], Any]) -> float:
    """Seconds of one call."""
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def ratio(a: list[float], b: list[float]) -> float:
    """Median over rounds of a's time divided by b's."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def figure(what: str, value: float, unit: str, target: str | None = None, met: bool | None = None) -> dict:
    """A figure with its target, if it has one."""
    row = {"what": what, "value": float(f"{value:.4g}"), "unit": unit}
    return row if target is None else row | {"target": target, "met": bool(met)}


def said(row: dict) -> str:
    """A figure as a line for people."""
    end = ""
    if "target" in row:
        end = f" (target {row['target']}: {'met' if row['met'] else 'missed'})"
    return f"{row['what']}: {row['value']:.3g} {row['unit']}{end}"


def write(name: str, results: dict[str, Any], folder: Path | None = None) -> Path:
    """Write the results, with machine, versions and date, to NAME.json in `folder` (default data/bench)."""
    path = (folder or data_dir() / "bench") / f"{name}.json"
    header = {
        "machine": machine(torch.device("cpu")),
        "cores": os.cpu_count(),
        "versions": {"merit_lab": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }
    write_whole(path, json.dumps(header | results, indent=1, ensure_ascii=False) + "\n")
    print(f"written: {os.path.relpath(path)}")
    return path


def read(name: str, folder: Path | None = None) -> dict[str, Any]:
    """What `write` wrote."""
    return json.loads(((folder or data_dir() / "bench") / f"{name}.json").read_text(encoding="utf-8"))


def table(head: Iterable[str], rows: Iterable[Iterable[str]], numbers_from: int = 1) -> str:
    """A Markdown table; columns from `numbers_from` on are set to the right."""
    head = list(head)
    line = ["---" if i < numbers_from else "---:" for i in range(len(head))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, line, *rows))

