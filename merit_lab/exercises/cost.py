"""Notebook 11: the bytes that a step moves through memory, counted from the list of its operations."""

from .judge import Mistake, judge

STATES = ("w", "g", "m", "v")  # what an optimizer is handed or keeps; any other name is a temporary


def right(program, elements, size):
    """Bytes read and written.

    Args:
        program: a list of (reads, writes), one an operation: names of the tensors it reads and of those it writes. One
            that is changed in place stands in both.
        elements: name -> number of elements.
        size: bytes an element.
    """
    return size * sum(elements[name] for reads, writes in program for name in [*reads, *writes])


def _only(sides):
    """As `right`, but of (reads, writes) only what `sides` leaves over."""
    return lambda program, elements, size: right([sides(*operation) for operation in program], elements, size)


def _states(program, elements, size):
    kept = [tuple([name for name in side if name in STATES] for side in operation) for operation in program]
    return right(kept, elements, size)


def _each_once(program, elements, size):
    reads, writes = ({name for operation in program for name in operation[side]} for side in (0, 1))
    return right([(reads, writes)], elements, size)


def _elements(program, elements, size):
    return right(program, elements, 1)


def _all_whole(program, elements, size):
    return right(program, dict.fromkeys(elements, elements["w"]), size)


def _held(program, elements, size):
    names = {name for reads, writes in program for name in [*reads, *writes]}
    return size * sum(elements[name] for name in names)


# A step with a norm of the rows, each operation a walk through memory of its own; and the same fused.
APART = [
    (["m", "g"], ["m"]),
    (["v", "g"], ["v"]),
    (["m", "v"], ["u"]),
    (["u", "w"], ["u"]),
    (["w"], ["of_w"]),
    (["u"], ["of_u"]),
    (["of_w", "of_u"], ["r"]),
    (["r", "u"], ["step"]),
    (["w", "step"], ["w"]),
]
FUSED = [(["w", "g", "m", "v"], ["m", "v", "r"]), (["w", "m", "v", "r"], ["w"])]


def _inputs():
    for program, (n, k), size in ((FUSED, (4, 6), 4), (APART, (4, 6), 4), (APART, (64, 32), 2), (FUSED, (1, 8), 4)):
        elements = dict.fromkeys((*STATES, "u", "step"), n * k) | dict.fromkeys(("r", "of_w", "of_u"), n)
        yield {"program": program, "elements": elements, "size": size}


MISTAKES = {
    "temporaries": Mistake(
        _states,
        "you count w, g, m and v alone. A temporary goes through memory like any other tensor: u is written by one "
        "operation and read again by the next",
    ),
    "reads alone": Mistake(
        _only(lambda reads, writes: (reads, [])),
        "you count what is read and forget what is written; a tensor that an operation makes or changes has to get to "
        "memory too",
    ),
    "writes alone": Mistake(
        _only(lambda reads, writes: ([], writes)),
        "you count what is written and forget what is read",
    ),
    "the second pass": Mistake(
        _each_once,
        "you count each tensor once for reading and once for writing, as if it stayed in cache for the whole step. "
        "The second pass has to fetch it again",
    ),
    "held": Mistake(
        _held,
        "that is what the tensors take up, each once: the memory that is held, not what is moved through it",
    ),
    "elements": Mistake(
        _elements,
        "you count elements; bytes are `size` times as many",
    ),
    "in place": Mistake(
        _only(lambda reads, writes: ({*reads, *writes}, [])),
        "you count a tensor that is changed in place once; it is read, and it is written",
    ),
    "vectors as matrices": Mistake(
        _all_whole,
        "you count every tensor as large as w. A vector of ratios has as many elements as there are rows, and is read "
        "as such, whatever it is multiplied with: `elements` has its size",
    ),
}


def check_traffic(answer) -> None:
    """Print the verdict on a function (program, elements, size) -> bytes read and written."""
    print(verdict(answer))


def verdict(answer) -> str:
    """What `check_traffic` prints."""
    return judge(answer, right, _inputs(), MISTAKES.values())
