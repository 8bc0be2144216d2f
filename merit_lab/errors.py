"""Errors whose message is for the person who typed the input, not for a programmer."""


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
