"""What all tests share."""

import os

# Before anything imports torch or matplotlib. One thread a worker: two workers share two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["MPLBACKEND"] = "Agg"
# Else torch.compile starts a pool of workers when it is imported, whose log, left open, is held against a later test.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

import hypothesis
import pytest

from merit_lab.doctor import find_browser

# The same examples each time, so that a red run is red again; and no deadline, which a busy machine breaks.
hypothesis.settings.register_profile("merit_lab", derandomize=True, deadline=None)
hypothesis.settings.load_profile("merit_lab")


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session")
def chromium():
    """Path of a Chromium for Playwright's executable_path. Skips where there is none, and fails in CI."""
    path = find_browser()
    if path is None:
        message = "no Chromium for the browser tests: apt install chromium, or set MERIT_LAB_BROWSER to one"
        if os.environ.get("MERIT_LAB_REQUIRE_BROWSER", "0") != "0":
            pytest.fail(message)
        pytest.skip(message)
    return path
