"""Shared by the tests of exercises."""

import re
from pathlib import Path

import nbformat
import torch

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"


def solution_of(notebook: str, function: str):
    """The function as the notebook's Solution writes it: the code block under that <summary>, run."""
    names = {"torch": torch}
    exec(solution_text(notebook, function), names)
    return names[function]


def solution_text(notebook: str, function: str) -> str:
    """The code of that Solution."""
    cells = nbformat.read(NOTEBOOKS / f"{notebook}.ipynb", as_version=4).cells
    text = "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    blocks = re.findall(r"<summary>Solution.*?</summary>\s*```python\n(.*?)```", text, flags=re.S)
    found = [block for block in blocks if f"def {function}(" in block]
    assert len(found) == 1, f"{notebook}: {len(found)} solutions define {function}"
    return found[0]


def exercise_cell(notebook: str) -> str:
    """The code cell that calls the check, as it stands untouched."""
    cells = nbformat.read(NOTEBOOKS / f"{notebook}.ipynb", as_version=4).cells
    found = [c.source for c in cells if c.cell_type == "code" and re.search(r"^check_\w+\(", c.source, flags=re.M)]
    assert len(found) == 1, f"{notebook}: {len(found)} cells call a check"
    return found[0]
