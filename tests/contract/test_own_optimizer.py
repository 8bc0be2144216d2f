"""Other people's optimizers are put through as the package's docstring says."""

import os
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from xml.etree import ElementTree

import pytest

from contract.subject import Subject, find
from merit_lab import MERIT

FOLDER = Path(__file__).parent
MINE = '''
"""An optimizer that keeps every promise, and three that do not."""

from typing import NamedTuple

import pytest
import torch
from contract.subject import Subject
from merit_lab.optim import Traced


class MomentumStep(NamedTuple):
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    update: torch.Tensor
    weight: torch.Tensor


def momentum_step(weight, grad, exp_avg, exp_avg_sq, *, lr, betas, eps, weight_decay):
    exp_avg = betas[0] * exp_avg + (1 - betas[0]) * grad
    update = exp_avg + weight_decay * weight
    return MomentumStep(exp_avg, exp_avg_sq, update, weight - lr * update)


class Momentum(Traced):
    step_function = staticmethod(momentum_step)
    counts_steps = False

    def __init__(
        self, params, lr, betas=(0.9, 0.95), eps=0.0, weight_decay=0.0, *, maximize=False, skip_nonfinite=False
    ):
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, maximize=maximize, skip_nonfinite=skip_nonfinite)


class Normalised(Momentum):
    """Scales the gradients where they lie, as many trainers do."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and not p.grad.is_sparse:
                    p.grad.mul_(0.5)
        return super().step(closure)


class Lenient(Momentum):
    """Takes each argument as it comes."""

    def _check(self, group):
        pass


class Unwilling(Momentum):
    def step(self, closure=None):
        pytest.skip("not today")


AS_IT_COMES = dict.fromkeys(["checks", "checks all"], "it takes every argument as it comes")
SUBJECT = Subject("said in words", Lenient, differs=AS_IT_COMES)
'''


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mine")
    (folder / "mine.py").write_text(MINE)
    return folder


def contract(folder, *names):
    """What pytest said, and for each subject how many cases ran and which failed, in float32."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=line", "-o", "addopts=", "-p", "no:cacheprovider"]
    command += [f"--junitxml={folder / 'results.xml'}", "-k", "fp32", str(FOLDER)]
    command += [f"--optimizer={name}" for name in names]
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    alone = {"PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    said = subprocess.run(command, capture_output=True, text=True, env=os.environ | alone, timeout=250)
    failed = defaultdict(set)
    asked = Counter()
    for case in ElementTree.parse(folder / "results.xml").iter("testcase"):
        test, subject = case.get("name").removesuffix("-fp32]").split("[")
        asked[subject] += 1
        if case.find("failure") is not None:
            failed[subject].add(test)
    return said, asked, failed


def test_each_is_held_to_its_promises(mine):
    names = ["mine.Momentum", "torch.optim.NAdam", "mine:Normalised", "mine:SUBJECT", "mine:Lenient", "mine.Unwilling"]
    said, asked, failed = contract(mine, *names)
    assert asked.keys() == {"Momentum", "NAdam", "Normalised", "said in words", "Lenient", "Unwilling"}, said.stdout
    assert min(asked.values()) > 30
    assert failed["Momentum"] == failed["said in words"] == set()
    assert failed["Normalised"] == {"test_gradient_is_only_read"}
    assert failed["Lenient"] == {"test_hyper_parameters_are_checked"}
    # torch casts what it loads, NAdam's product of its momenta too: of a parameter in half precision half of it is lost
    assert failed["NAdam"] <= {"test_a_copy_halfway_goes_on_bit_for_bit"}
    assert len(failed["Unwilling"]) > 20 and "a case of the contract is never skipped" in said.stdout
    assert said.returncode == 1


@pytest.mark.parametrize(
    "name, says",
    [
        ("nowhere.Mine", "'nowhere.Mine', expected mypackage.MyOptimizer: No module named 'nowhere'"),
        ("merit_lab.optim.Missing", "has no attribute 'Missing'"),
        ("SGD", "'SGD', expected mypackage.MyOptimizer"),
        ("torch.optim.lr_scheduler.StepLR", "expected a torch.optim.Optimizer or a Subject"),
    ],
)
def test_what_cannot_be_put_through(name, says):
    with pytest.raises(pytest.UsageError, match=f"--optimizer: .*{says}"):
        find(name)


def test_a_class_is_held_to_everything_and_one_of_torchs_to_what_torch_says():
    assert find("merit_lab:MERIT") == Subject("MERIT", MERIT) == find("merit_lab.optim.MERIT")
    assert not find("torch.optim:NAdam").keeps("once")
