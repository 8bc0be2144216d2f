"""How an exercise's answer is judged: against the right function, and against the typical wrong ones.

A notebook holds a function that raises NotImplementedError; `check_…(function)` prints what is wrong with it. An
answer that behaves like a typical mistake on every input is told which mistake it looks like; any other wrong answer
is shown the first input on which it differs.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

YOUR_TURN = "your turn: replace the line that raises NotImplementedError, then run this cell again"
RIGHT = "right"


class Mistake(NamedTuple):
    """A typical wrong answer: the function it amounts to, and what to tell who made it."""

    function: Callable
    says: str


def judge(
    answer: Callable,
    right: Callable,
    inputs: Iterable[Mapping[str, Any]],
    mistakes: Iterable[Mistake] = (),
    *,
    tolerance: float = 1e-6,
) -> str:
    """The verdict on `answer`: "right", "your turn…", or what is wrong with it.

    Args:
        answer: the reader's function.
        right: the function it should equal.
        inputs: keyword arguments of calls to try; together they must tell every mistake from the right answer.
        mistakes: looked through in order.
        tolerance: relative and absolute.
    """
    inputs = list(inputs)
    if not inputs:
        raise ValueError("judge: no inputs, so that any answer would pass")
    results = []
    for arguments in inputs:
        try:
            results.append(answer(**_copies(arguments)))
        except NotImplementedError:
            return YOUR_TURN
        except Exception as error:  # the reader's code may raise anything
            return f"not yet: your function raised {type(error).__name__}: {error}\n  for {_show(arguments)}"
        if results[-1] is None:
            return "not yet: your function returned None; does it end with a return?"
    expected = [right(**_copies(arguments)) for arguments in inputs]
    if all(_agree(a, b, tolerance) for a, b in zip(results, expected, strict=True)):
        return RIGHT
    for mistake in mistakes:
        wrong = [mistake.function(**_copies(arguments)) for arguments in inputs]
        if all(_agree(a, b, tolerance) for a, b in zip(results, wrong, strict=True)):
            return f"not yet: {mistake.says}"
    for arguments, result, value in zip(inputs, results, expected, strict=True):
        if not _agree(result, value, tolerance):
            return f"not yet: for {_show(arguments)}\n  expected {_show(value)}\n  got      {_show(result)}"
    raise AssertionError("unreachable: some result differs")


def _copies(arguments):
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}


def _agree(a, b, tolerance) -> bool:
    try:
        a, b = torch.as_tensor(a, dtype=torch.float64), torch.as_tensor(b, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        return a == b
    return a.shape == b.shape and torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


def _show(value) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={_show(item)}" for name, item in value.items())
    if isinstance(value, torch.Tensor):
        return str([_rounded(x) for x in value.tolist()] if value.ndim else _rounded(value.item()))
    return str(_rounded(value))


def _rounded(value):
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value
