"""Shared by the tests of exercises."""

import re
from pathlib import Path

import nbformat
import torch

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"


def solution_of(notebook: str, function: str):
    """The function as the notebook's Solution writes it: the code block under that <summary>, run."""
    cells = nbformat.read(NOTEBOOKS / f"{notebook}.ipynb", as_version=4).cells
    text = "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    blocks = re.findall(r"<summary>Solution.*?</summary>\s*```python\n(.*?)```", text, flags=re.S)
    found = [block for block in blocks if f"def {function}(" in block]
    assert len(found) == 1, f"{notebook}: {len(found)} solutions define {function}"
    names = {"torch": torch}
    exec(found[0], names)
    return names[function]
