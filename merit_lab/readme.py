"""The parts of README.md that commands write, each between two marks: <!-- NAME --> … <!-- /NAME -->."""

import re

from .errors import InputError


def section(readme: str, name: str) -> str:
    """What stands between the marks of this name. InputError where the README has none."""
    return _pattern(name, readme)[2]


def replaced(readme: str, name: str, content: str) -> str:
    """The README with `content` between the marks of this name. InputError where it has none."""
    found = _pattern(name, readme)
    return f"{readme[: found.start(2)]}{content.rstrip()}\n{readme[found.end(2) :]}"


def _pattern(name, readme):
    found = re.search(rf"(<!-- {name} -->\n)(.*?)(?=<!-- /{name} -->)", readme, re.DOTALL)
    if not found:
        raise InputError(f"README.md has no lines '<!-- {name} -->' and '<!-- /{name} -->' to write between; add them")
    return found
