"""python -m merit_lab.bench: measure, print, write."""

import argparse
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import InputError
from ..files import repo_root, write_whole
from ..readme import replaced
from . import collectives, looking, rows, steps, training

PARTS: dict[str, ModuleType] = {
    "looking": looking,
    "steps": steps,
    "training": training,
    "collectives": collectives,
}

VERDICTS = {True: "met", False: "**missed**", None: ""}


def main(arguments: list[str] | None = None) -> int:
    """Measure the parts that are named, or all; 0 also where a target is missed, for that is a result."""
    parser = argparse.ArgumentParser(prog="python -m merit_lab.bench", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: all)")
    parser.add_argument("--out", type=Path, help="folder for the results (default: data/bench, and the README's part)")
    chosen = parser.parse_args(arguments)
    unknown = [part for part in chosen.parts if part not in PARTS]
    if unknown:
        print(f"error: part: got {unknown[0]!r}, expected one of {', '.join(PARTS)}", file=sys.stderr)
        return 2
    for part in chosen.parts or PARTS:
        results = PARTS[part].measure()
        if hasattr(PARTS[part], "table"):
            print(PARTS[part].table(results))
        for row in results["figures"]:
            print(rows.said(row), flush=True)
        if PARTS[part] is steps:
            for what, target in steps.not_measured(results):
                print(f"{what}: not measured (target {target})", flush=True)
        rows.write(part, results, chosen.out)
    root = repo_root()
    if chosen.out is None and root is not None:
        try:
            results = {part: rows.read(part) for part in PARTS}
        except FileNotFoundError as error:
            print(f"README.md is left as it is until there is {Path(error.filename).name}: run all parts")
            return 0
        path = root / "README.md"
        try:
            write_whole(path, replaced(path.read_text(encoding="utf-8"), "bench", markdown(results)))
        except InputError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    return 0


def markdown(results: dict[str, dict[str, Any]]) -> str:
    """The README's part: the table of steps, a line a target, and what sharding adds."""
    of = results["steps"]
    machine = f"{of['machine']}, torch {of['versions']['torch'].split('+')[0]}, {of['date']}"
    lines = [
        (row["what"], f"{row['value']:.3g} {row['unit']}", row.get("target", ""), VERDICTS[row.get("met")])
        for part in PARTS
        for row in results[part]["figures"]
        if part != "collectives"  # they have a table of their own
    ]
    lines += [(what, "not measured", target, "open") for what, target in steps.not_measured(of)]
    sharded = results["collectives"]
    said = (
        "Sharded, the norms of all weights travel in one message for each dimension of the mesh. The paper expects "
        f"{sharded['paper']['calls']} all-reduces and {sharded['paper']['numbers']:,.0f} numbers more than LAMB's "
        "where both rows and columns are cut; the readable step needs these for w and once more for u:"
    )
    devices = dict.fromkeys(row["device"] for row in of["rows"])
    tables = *(steps.table(of, device) for device in devices), rows.table(("measured", "is", "target", ""), lines)
    return "\n\n".join([f"On {machine}:", *tables, said, collectives.table(sharded)])


if __name__ == "__main__":
    sys.exit(main())
