"""How pytest and nbval meet the notebooks: `pytest --nbval notebooks`."""

import os
import re
from collections import Counter, defaultdict
from pathlib import Path
from unittest import mock

import pytest

from merit_lab.notebooks import COMPARED_FLOOR, fates, kernel_environment

outcomes = defaultdict(dict)  # notebook -> number of the code cell -> passed, failed or skipped


def pytest_collection_modifyitems(items):
    for item in items:
        if hasattr(item, "output_timeout"):
            item.output_timeout = 120  # nbval's 5 s between two messages are short on a busy machine


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    # The kernel starts in here, and only the kernel is to see no GPU: the stored outputs are a CPU's.
    with mock.patch.dict(os.environ, kernel_environment()):
        return (yield)


def pytest_runtest_logreport(report):
    cell = re.fullmatch(r"(.*\.ipynb)::Cell (\d+)", report.nodeid)
    if cell and (report.when == "call" or report.outcome != "passed"):
        outcomes[cell[1]][int(cell[2])] = report.outcome


def tallies(root):
    """(notebook, tally of its cells) for each that was run as a whole."""
    for name, done in sorted(outcomes.items()):
        kinds = fates(Path(root) / name)
        if len(done) == len(kinds):
            yield name, Counter("failed" if done[n] == "failed" else kind for n, kind in enumerate(kinds))


def pytest_sessionfinish(session):
    shares = [tally["compared"] / tally.total() for _, tally in tallies(session.config.rootpath)]
    if min(shares, default=1) < COMPARED_FLOOR and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
    rows = list(tallies(terminalreporter.config.rootpath))
    if rows:
        terminalreporter.section("notebook cells, as nbval treats them")
    for name, tally in rows:
        share = tally["compared"] / tally.total()
        counts = ", ".join(f"{number} {kind}" for kind, number in tally.most_common())
        below = "" if share >= COMPARED_FLOOR else f", below the {COMPARED_FLOOR:.0%} that must be"
        terminalreporter.write_line(f"{name}: {counts}; {share:.0%} compared{below}")
