"""Errors whose message is for the person who typed the input, not for a programmer."""

from typing import Any


class InputError(ValueError):
    """A recipe, text, path or option that cannot be used.

    The message names what came, what was expected and what to do. The command line prints it
    without a traceback and exits with code 2.
    """


class RankError(RuntimeError):
    """A run on several ranks cannot go on, since one of them has ended or does not answer.

    The message names the rank that noticed, the cause and what to do. The command line prints it without a
    traceback and exits with code 1.
    """


def shown(value: Any, most: int = 200) -> str:
    """A value for a message: its repr, cut to `most` characters, and never an error of its own."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # Python refuses to write whole numbers of more than 4,300 digits
        return f"a {type(value).__name__} too large to be shown"
    return text if len(text) <= most else f"{text[:most]}…"
