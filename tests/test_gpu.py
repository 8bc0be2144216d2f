"""make gpu, where there is no GPU: what it refuses, that it keeps its time, and what it leaves."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from merit_lab import gpu, runs, sweep
from merit_lab.bench import steps
from merit_lab.errors import InputError
from merit_lab.files import repo_root
from merit_lab.recipe import RECIPES, Recipe

TEST = "import time, pytest\n@pytest.mark.gpu\ndef test_it(): {}\n"


@pytest.fixture(autouse=True)
def no_texts(tmp_path, monkeypatch):
    """An empty folder of texts, so that only the made-up one is there."""
    monkeypatch.setenv("MERIT_LAB_DATA", str(tmp_path / "texts"))


def a_test(folder, body="pass") -> list[Path]:
    path = folder / "test_made_up.py"
    path.write_text(TEST.format(body))
    return [path]


class Clock:
    """Seconds that pass when they are told to."""

    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def slow(monkeypatch):
    """A clock, and runs that take a second a step and ten beside; .started are their recipes."""
    clock = Clock()
    clock.started, clock.losses, clock.broken = [], lambda recipe: 1.0, ()

    def measure(recipe, measures, watch):
        clock.started.append(recipe)
        if len(clock.started) in clock.broken:
            raise RuntimeError("CUDA error: out of memory\nand much more")
        clock.now += 10
        for _ in range(recipe.n_steps):
            clock.now += 1
            watch()
        row = {"optimizer": recipe.optimizer, "lr": recipe.lr, "seed": recipe.seed, "val_loss": clock.losses(recipe)}
        return {"row": row | {"train_loss": 1.0, "peak_logit": 2.0}, "curve": [{"step": 1}]}

    monkeypatch.setattr(sweep, "measure", measure)
    monkeypatch.setattr(gpu, "_seconds_a_step", lambda recipe, watch: 1.0)
    return clock


def compare(tmp_path, clock, seconds, recipe="compare"):
    """The last report of the runs. The recipe `compare` has 61 steps."""
    return list(gpu.compare(tmp_path, gpu.Deadline(seconds, clock), "cpu", recipe))[-1]


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


# -- all of it ---------------------------------------------------------------------------------------------------


def test_all_of_it_leaves_a_few_json_files(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "runs.jsonl").write_text("of an earlier time")
    report = gpu.run(
        tmp_path / "out", seconds=30, device="cpu", recipe="tiny", benchmarked=("tiny",), tests=a_test(tmp_path)
    )
    left = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert {"report.json", "benchmark.json"} <= set(left) <= set(gpu.FILES) and len(left) <= 8
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == report
    assert report["parts"].keys() == {"tests", "benchmark", "runs"} and report["machine"]
    for row in json.loads((tmp_path / "out" / "benchmark.json").read_text()):
        assert row["tokens_a_second" if "micro_batch" in row else "nanoseconds"] > 0
    for name in set(left) & {"runs.jsonl", "curves.jsonl"}:
        assert all(isinstance(row, dict) for row in lines(tmp_path / "out" / name))
    assert sum(path.stat().st_size for path in (tmp_path / "out").iterdir()) < 1 << 20


@pytest.mark.parametrize(
    "version, found", [("2.10.1+cu128", "torch is 2.10.1+cu128"), ("2.11.0", "finds no CUDA device")]
)
def test_without_what_it_needs_it_says_so(monkeypatch, capsys, tmp_path, version, found):
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: version != "2.11.0")
    assert gpu.main(["--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().out
    assert "needs a CUDA device and torch >= 2.11 built for CUDA" in said and found in said
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: this would run everything")
def test_as_a_command():
    asked = subprocess.run(
        [sys.executable, "-m", "merit_lab.gpu"], cwd=repo_root(), capture_output=True, text=True, timeout=120
    )
    assert asked.returncode == 2 and "finds no CUDA device" in asked.stdout and asked.stderr == ""


def test_what_failed_decides_the_exit_code(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "missing", lambda: None)
    monkeypatch.setattr(gpu, "run", lambda out, seconds: {"failed": ["tests"] if seconds == 60 else []})
    assert gpu.main(["--out", str(tmp_path), "--minutes", "1"]) == 1
    assert gpu.main(["--out", str(tmp_path)]) == 0


# -- the tests ---------------------------------------------------------------------------------------------------


def test_the_tests_are_counted(tmp_path):
    done = gpu.run_tests(gpu.Deadline(100), a_test(tmp_path))
    assert done == {"state": "done", "passed": 1, "failed": 0, "skipped": 0}
    failed = gpu.run_tests(gpu.Deadline(100), a_test(tmp_path, "assert 3 == 4"))
    assert (failed["state"], failed["failed"]) == ("failed", 1) and "assert 3 == 4" in failed["why"]
    skipped = gpu.run_tests(gpu.Deadline(100), a_test(tmp_path, "pytest.skip('no GPU')"))
    assert (skipped["state"], skipped["skipped"]) == ("failed", 1)  # on a machine with CUDA, something is wrong
    nothing = gpu.run_tests(gpu.Deadline(100), [tmp_path / "test_missing.py"])
    assert nothing["state"] == "failed" and "test_missing.py" in nothing["why"]


def test_tests_that_hang_are_ended(tmp_path):
    found = gpu.run_tests(gpu.Deadline(3), a_test(tmp_path, "time.sleep(1000)"))
    assert found["state"] == "failed" and "not done after" in found["why"]


def test_there_are_tests_for_a_gpu():
    named = [path.name for path in (repo_root() / "tests").rglob("test_*.py") if "pytest.mark.gpu" in path.read_text()]
    assert {"test_on_gpu.py", "test_rows.py"} <= set(named)


# -- the benchmark -----------------------------------------------------------------------------------------------


def test_a_benchmark_without_time_says_what_it_left_out(tmp_path):
    clock = Clock()
    deadline = gpu.Deadline(1, clock)
    clock.now = 2
    found = gpu.benchmark(tmp_path, deadline, torch.device("cpu"), ("tiny",))
    assert (found["state"], found["rows"], len(found["left_out"])) == ("cut short", 0, 3)


def test_a_measurement_that_fails_takes_no_other_with_it(tmp_path, monkeypatch):
    def full(name, device):
        raise RuntimeError("CUDA out of memory. Tried to allocate\nmore")

    monkeypatch.setattr(gpu, "throughput", full)
    found = gpu.benchmark(tmp_path, gpu.Deadline(100), torch.device("cpu"), ("tiny",))
    rows = json.loads((tmp_path / "benchmark.json").read_text())
    assert found["state"] == "failed" and found["rows"] == len(rows) == 2 * len(steps.peers()) + 1
    weights = {(row["tensors"], row["weights"]) for row in rows[:-1]}
    config = Recipe.named("tiny").model_config()
    assert ("embedding", config.vocab_size * config.n_embd) in weights and len(weights) == 2
    assert found["targets"] and {row["target"] for row in found["targets"]} >= {"at most 3 ×", "under 1 %"}
    assert rows[-1] == {"what": "tokens a second of tiny", "error": "CUDA out of memory. Tried to allocate"}


# -- the runs ----------------------------------------------------------------------------------------------------


def test_with_time_enough_each_has_three_rates_and_three_seeds(tmp_path, slow):
    slow.losses = lambda recipe: 1 + abs(recipe.lr - 2 * RECIPES["compare"].lr[recipe.optimizer]) + recipe.seed / 10
    found = compare(tmp_path, slow, 10_000)
    assert found["state"] == "done" and found["steps"] == 61 and found["rounds_left_out"] == 0
    real = slow.started[1:]  # the first is to see how long one takes
    assert len(real) == 18 and all(recipe.n_steps == 61 for recipe in real)
    assert {recipe.text for recipe in real} == {"synthetic"} and "made up" in found["text"]
    for optimizer, result in found["results"].items():
        rate = RECIPES["compare"].lr[optimizer]
        assert result["lr_searched"] == [rate / 2, rate, rate * 2]
        assert result["lr"] == 2 * rate and result["lr_at_edge"] is True
        assert result["val_loss"] == pytest.approx([1.1, 1.2, 1.3])
    rows = lines(tmp_path / "runs.jsonl")
    assert [row["stage"] for row in rows] == ["search"] * 9 + ["report"] * 9
    assert {row["run"] for row in rows} == {row["run"] for row in lines(tmp_path / "curves.jsonl")}


@pytest.mark.parametrize("seconds", [30, 100, 500, 1000, 1500])
def test_the_deadline_is_kept_and_the_search_stays_equal(tmp_path, slow, seconds):
    found = compare(tmp_path, slow, seconds)
    assert slow.now <= seconds + 11  # a run's start and one step: it is looked at after every step
    counts = [len(result["val_loss"]) + len(result["lr_searched"]) for result in found.get("results", {}).values()]
    assert len(set(counts)) <= 1
    assert found["state"] == ("done" if seconds == 1500 else "cut short")
    if seconds == 1500:
        assert counts == [6, 6, 6]


def test_longer_recipes_are_cut_to_what_fits(tmp_path, slow):
    found = compare(tmp_path, slow, 3000, "mini")
    assert found["steps_of_the_recipe"] == 400 and 100 < found["steps"] < 200
    assert found["state"] == "done" and slow.now <= 3000


def test_runs_that_are_slower_than_they_seemed_still_keep_the_deadline(tmp_path, slow, monkeypatch):
    monkeypatch.setattr(gpu, "_seconds_a_step", lambda recipe, watch: 0.2)
    found = compare(tmp_path, slow, 700)
    assert found["state"] == "cut short" and found["rounds_left_out"] > 0 and slow.now <= 711
    counts = [len(r["lr_searched"]) + len(r["val_loss"]) for r in found["results"].values()]
    assert len(counts) == 3 and len(set(counts)) == 1


def test_a_run_that_fails_is_named_and_the_others_go_on(tmp_path, slow):
    slow.broken = (2, 5, 8)  # AdamW's, at each rate: it has none that is best
    found = compare(tmp_path, slow, 10_000)
    assert found["state"] == "failed" and len(found["failures"]) == 3
    assert found["failures"][0].startswith("AdamW, lr 0.002, seed 0: RuntimeError: CUDA error: out of memory")
    assert found["results"].keys() == {"LAMB", "MERIT"}
    assert [len(r["val_loss"]) for r in found["results"].values()] == [3, 3]


def test_where_not_even_one_run_can_be_made_the_reason_is_kept(tmp_path, monkeypatch):
    def full(recipe, watch):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(gpu, "_seconds_a_step", full)
    (found,) = gpu.compare(tmp_path, gpu.Deadline(10), "cpu", "tiny")
    assert found["state"] == "failed" and found["why"] == "OutOfMemoryError: CUDA out of memory"


def test_a_text_that_is_prepared_is_taken_and_no_other_is_fetched(tmp_path, monkeypatch):
    class Prepared:
        synthetic = False

        def describe(self):
            return "prepared"

    def load(spec, offline):
        assert offline is True
        if spec != "shakespeare":
            raise InputError("not prepared")
        return Prepared()

    assert gpu.available_text("addresses")[0] == "synthetic"
    monkeypatch.setattr(gpu.text, "load", load)
    assert gpu.available_text("addresses") == ("shakespeare", "prepared")


def test_the_time_of_a_step_is_measured_on_short_runs_too():
    for n_steps in (1, 4, 12):
        recipe = Recipe.named("tiny", text="synthetic", device="cpu", tokens=n_steps * 1024)
        assert gpu._seconds_a_step(recipe, lambda: None) > 0


def test_make_gpu_needs_no_setup():
    shown = subprocess.run(["make", "-n", "gpu"], cwd=repo_root(), capture_output=True, text=True).stdout
    assert "-m merit_lab.gpu" in shown and "bootstrap" not in shown


def test_its_rows_have_the_columns_of_a_sweep(tmp_path):
    """What reads a sweep's table reads this one."""
    recipe = Recipe.named("tiny", text="synthetic", device="cpu", tokens=2048)
    measured = sweep.measure(recipe, (), lambda: None)
    assert {"run", "stage", "cell", *measured["row"]} == set(sweep.COLUMNS)
    assert runs.machine(torch.device("cpu")) == measured["row"]["machine"]
