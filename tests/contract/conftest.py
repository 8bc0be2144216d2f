"""Each case of the contract for each subject and precision; and none of them skipped."""

import pytest

from contract.subject import DTYPES, SUBJECTS, combinations, find

CHOSEN = pytest.StashKey[list]()


def pytest_addoption(parser):
    parser.addoption(
        "--optimizer",
        action="append",
        default=[],
        metavar="MODULE.NAME",
        help="tests/contract: put this optimizer through instead (see tests/contract/__init__.py)",
    )


def pytest_configure(config):
    # The default is for a run of all of tests/: there this file is read after the command line.
    config.stash[CHOSEN] = [find(name) for name in config.getoption("--optimizer", [])]


def pytest_generate_tests(metafunc):
    if "subject" in metafunc.fixturenames:
        subjects = metafunc.config.stash[CHOSEN] or SUBJECTS
        runs = combinations(metafunc.function, subjects)
        values = [pytest.param(subject, DTYPES[name], id=f"{subject.name}-{name}") for subject, name in runs]
        metafunc.parametrize("subject, dtype", values)


def pytest_collection_modifyitems(config, items):
    chosen = config.stash[CHOSEN]

    def is_wanted(item):
        test = getattr(item, "function", None)
        if not hasattr(test, "kind"):
            return not chosen  # a test of the suite itself, or of something else
        return bool(combinations(test, chosen or SUBJECTS))  # of none pytest makes a test that skips

    items[:] = filter(is_wanted, items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.skipped and not item.get_closest_marker("gpu"):
        report.outcome = "failed"
        report.longrepr = "a case of the contract is never skipped: say in the Subject's `differs` what it does instead"
    return report
