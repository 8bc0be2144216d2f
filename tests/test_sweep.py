"""Sweeps: reading the file, which runs follow from which results, one run, and going on after a kill."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from merit_lab import __main__ as cli
from merit_lab import sweep as sweeps
from merit_lab.errors import InputError
from merit_lab.recipe import Recipe
from merit_lab.sweep import Pool, Sweep

ROOT = Path(__file__).resolve().parent.parent
SMALL = {"model": {"n_layer": 1, "n_head": 2, "n_embd": 16, "block_size": 16}, "text": "synthetic", "tokens": 1280}
SMALL |= {"eval_sequences": 8, "device": "cpu", "batch_size": 8}  # 10 steps


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("MERIT_LAB_OFFLINE", "1")


def made(**values):
    return Sweep.from_dict("made", {"fields": dict(SMALL)} | values)


def search(**values):
    return {"lr": {"AdamW": [1e-3, 2e-3, 4e-3], "default": [1e-2, 2e-2, 4e-2]}, "seed": 0} | values


def settled(sweep, loss):
    """Plan to the end with a made-up loss in place of training. Returns the runs and the losses asked for, in order."""
    rows, order = {}, []
    while True:
        planned, whole = sweep.plan(rows.get)
        missing = [run for run in planned if run.name not in rows]
        if not missing:
            assert whole
            return planned, order
        assert not whole or all(run.stage == "report" for run in missing)
        for run in missing:
            order.append(run)
            rows[run.name] = {"val_loss": loss(run.recipe)}


# -- the file --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"grids": {}}, "unknown key 'grids'"),
        ({"grid": {}, "fields": {"lr": 1e-2}, "recipe": "huge"}, "recipe: got 'huge', expected one of"),
        ({"grid": {"seed": 3}, "fields": {"lr": 1e-2}}, "grid: seed: got 3, expected a list"),
        ({"grid": {"seed": []}, "fields": {"lr": 1e-2}}, "expected a list of values"),
        ({"grid": 3}, "grid: got 3"),
        ({"grid": {"optimizer": ["AdamW"]}}, "no learning rate"),
        ({"grid": {"optimizer": ["Adam"]}, "fields": {"lr": 1e-2}}, "optimizer: got 'Adam'"),
        ({"grid": {"lr": [1e-2, -1]}}, "lr: got -1"),
        ({"grid": {"lr": [1e-2]}, "search": search()}, "leave one out"),
        ({"grid": {"optimizer": ["LAMB"]}, "search": search(lr={"AdamW": [1, 2, 3]})}, "no rates for 'LAMB'"),
        ({"grid": {"optimizer": ["LAMB"]}, "search": search(lr={"default": [1e-2, 2e-2]})}, "three rates or more"),
        ({"grid": {"optimizer": ["LAMB"]}, "search": search(lr={"default": [3, 2, 1]})}, "rising"),
        ({"grid": {"optimizer": ["LAMB"]}, "search": search(lr=[1, 2, 3])}, "search.lr: got [1, 2, 3]"),
        ({"grid": {"optimizer": ["LAMB"]}, "search": search(wide=3)}, "unknown key 'wide'"),
        ({"grid": {"optimizer": ["LAMB"]}, "search": search(widen=-1)}, "whole numbers"),
        ({"grid": {"lr": [1e-2, 1e-2]}}, "ask for the same runs"),
        ({"grid": {"lr": [1e-2]}, "report": {"seeds": [0.5]}}, "whole numbers"),
        ({"grid": {"lr": [1e-2]}, "report": {"measure": ["taste"]}}, "report.measure: got 'taste'"),
        ({"grid": {"lr": [1e-2]}, "report": 4}, "report: got 4, expected a table"),
        ({"grid": {"lr": [1e-2], "text.size": [1]}}, "text is 'synthetic' and has no entries"),
        ({"grid": {"lr": [1e-2], "colour": [1]}}, "unknown field 'colour'"),
    ],
)
def test_a_wrong_file_is_refused_by_name(values, said):
    values = dict(values)
    fields = dict(SMALL) | values.pop("fields", {})
    with pytest.raises(InputError) as refused:
        Sweep.from_dict("wrong", values | {"fields": fields})
    assert said in str(refused.value)


def test_no_toml_no_file_no_source(tmp_path):
    path = tmp_path / "wrong.toml"
    with pytest.raises(InputError, match="cannot read"):
        Sweep.read(path)
    path.write_text("grid = [")
    with pytest.raises(InputError, match="is not TOML"):
        Sweep.read(path)
    path.write_text('lr_from = "wrong"\n[grid]\nseed=[1]')
    with pytest.raises(InputError, match="another sweep file"):
        Sweep.read(path)
    path.write_text('lr_from = "gone"\n[grid]\nseed=[1]')
    with pytest.raises(InputError, match="cannot read"):
        Sweep.read(path)


def test_every_sweep_of_the_project_reads_and_searches_alike():
    files = sorted((ROOT / "data" / "sweeps").glob("*.toml"))
    assert len(files) >= 7
    for file in files:
        sweep = Sweep.read(file)
        assert sweep.purpose
        for cell in sweep.cells:
            assert len(cell.seeds) >= 3
            if cell.search:  # an equal search for everybody: five rates a factor of 2 apart, and the same rules
                assert len(cell.rates) == 5 and cell.widen == 4
                assert cell.refine == (sweep.name not in ("batch_micro", "longer"))  # as the protocol has it
                assert [round(b / a, 6) for a, b in zip(cell.rates, cell.rates[1:], strict=False)] == [2.0] * 4
                assert cell.search_seed not in cell.seeds


def test_entries_of_tables_vary_and_a_named_model_becomes_a_table():
    sweep = Sweep.from_dict(
        "made",
        {
            "fields": {"model": "nano", "lr": 0.01},
            "grid": {"model.qk_norm": [False, True], "optimizer_args.weight_decay": [0.0, 0.3]},
        },
    )
    recipes = [run.recipe for run in sweep.plan(lambda name: None)[0]]
    assert [r.model for r in recipes][::2] == [{"named": "nano", "qk_norm": q} for q in (False, True)]
    assert [r.optimizer_args["weight_decay"] for r in recipes] == [0.0, 0.3] * 2


def test_a_grid_of_rates_and_seeds_is_a_plain_product():
    sweep = made(grid={"lr": [1e-2, 2e-2], "seed": [4, 5], "optimizer": ["AdamW", "LAMB"]})
    runs, whole = sweep.plan(lambda name: None)
    assert whole and len(runs) == sweep.least() == sweep.most() == 8
    assert {(r.recipe.lr, r.recipe.seed) for r in runs} == {(lr, s) for lr in (1e-2, 2e-2) for s in (4, 5)}


# -- which runs follow -----------------------------------------------------------------------------------------


def bowl(centre):
    """A loss that is lowest at this rate."""
    import math

    return lambda recipe: abs(math.log(recipe.lr / centre)) + recipe.seed / 100


def test_a_best_rate_inside_is_refined_and_reported():
    sweep = made(grid={"optimizer": ["LAMB"]}, search=search(widen=4, refine=True), report={"seeds": [1, 2]})
    runs, _ = settled(sweep, bowl(0.019))
    assert [r.recipe.lr for r in runs if r.stage == "search"] == [0.01, 0.0141, 0.02, 0.0283, 0.04]
    assert [(r.recipe.lr, r.recipe.seed) for r in runs if r.stage == "report"] == [(0.02, 1), (0.02, 2)]
    assert len(runs) == sweep.least()


@pytest.mark.parametrize(("centre", "added"), [(0.16, [0.08, 0.16, 0.32]), (0.0025, [0.005, 0.0025, 0.00125])])
def test_a_best_rate_at_an_edge_widens_the_search(centre, added):
    sweep = made(grid={"optimizer": ["LAMB"]}, search=search(widen=4), report={"seeds": [1]})
    runs, order = settled(sweep, bowl(centre))
    assert [r.recipe.lr for r in order if r.stage == "search"][3:] == added
    assert runs[-1].recipe.lr == centre


def test_widening_ends_where_the_file_says_so():
    sweep = made(grid={"optimizer": ["LAMB"]}, search=search(widen=2, refine=True), report={"seeds": [1]})
    runs, _ = settled(sweep, bowl(1.0))
    assert [r.recipe.lr for r in runs if r.stage == "search"] == [0.01, 0.02, 0.04, 0.08, 0.113, 0.16]
    assert runs[-1].recipe.lr == 0.16
    assert sweep.least() <= len(runs) <= sweep.most()


def test_rates_that_diverge_are_the_worst():
    sweep = made(grid={"optimizer": ["LAMB"]}, search=search(widen=4), report={"seeds": [1]})
    runs, _ = settled(sweep, lambda recipe: 2.0 - recipe.lr if recipe.lr <= 0.005 else None)
    assert runs[-1].stage == "report" and runs[-1].recipe.lr == 0.005
    runs, _ = settled(sweep, lambda recipe: None)
    assert [r.recipe.lr for r in runs] == [0.000625, 0.00125, 0.0025, 0.005, 0.01, 0.02, 0.04]
    assert all(r.stage == "search" for r in runs)


def test_a_rate_from_another_sweep(tmp_path):
    fields = "".join(f"{k} = {json.dumps(v)}\n" for k, v in SMALL.items() if k != "model")
    fields = f"[fields]\n{fields}model = 'nano'\nblock_size = 16\n"
    first = "[grid]\noptimizer = ['AdamW', 'LAMB']\n[search]\nlr.default = [1e-2, 2e-2, 4e-2]\n"
    first += "[report]\nseeds = [1, 2]\n"
    (tmp_path / "first.toml").write_text(fields + first)
    second = '[grid]\noptimizer = ["LAMB"]\n"model.qk_norm" = [true]\n[report]\nseeds = [1, 2, 3]\n'
    (tmp_path / "second.toml").write_text('lr_from = "first"\n' + fields + second)
    sweep = Sweep.read(tmp_path / "second.toml")
    runs, order = settled(sweep, bowl(0.02))
    assert [(r.recipe.lr, r.recipe.seed, r.recipe.model) for r in runs] == [
        (0.02, seed, {"named": "nano", "qk_norm": True}) for seed in (1, 2, 3)
    ]
    assert {r.recipe.optimizer for r in order} == {"LAMB"}  # only the cell that is asked for
    (tmp_path / "second.toml").write_text('lr_from = "first"\n' + fields + second.replace("LAMB", "MERIT"))
    with pytest.raises(InputError, match="first has 0 cells for .*MERIT"):
        Sweep.read(tmp_path / "second.toml")


def test_a_run_is_named_after_all_that_decides_it():
    base = Recipe.from_dict(SMALL | {"lr": 0.01})
    name = sweeps.run_name(base)
    assert name.startswith("MERIT-b8-lr0.01-s0-")
    others = [base.replace(tokens=2560), base.replace(seed=1), base.replace(optimizer_args={"weight_decay": 0.0})]
    others.append(base.replace(model=SMALL["model"] | {"qk_norm": True}))
    assert len({name, sweeps.run_name(base, ("curvature",)), *map(sweeps.run_name, others)}) == 6
    assert sweeps.run_name(Recipe.from_dict(base.to_dict())) == name
    assert sweeps.run_name(base.replace(warmup=0.02)) == name  # a default, said or unsaid


# -- one run ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MERIT_LAB_OFFLINE", "1")
        recipe = Recipe.from_dict(SMALL | {"optimizer": "MERIT", "lr": 0.02, "noise_every": 5})
        return recipe, sweeps.measure(recipe, ("curvature",))


def test_a_run_gives_the_columns_that_are_documented(measured):
    recipe, result = measured
    assert [*result["row"]] == [c for c in sweeps.COLUMNS if c not in ("run", "stage", "cell")]
    assert all([*point] == [c for c in sweeps.CURVE_COLUMNS if c != "run"] for point in result["curve"])
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    row = result["row"]
    assert Recipe.from_dict(row["recipe"]) == recipe
    missing = [name for name, value in row.items() if value is None]
    assert missing == []
    text = (ROOT / "data" / "README.md").read_text()
    for name, meaning in (sweeps.COLUMNS | sweeps.CURVE_COLUMNS).items():
        assert f"`{name}`" in text and meaning in text


def test_a_row_agrees_with_the_records(measured):
    from merit_lab.training import train

    recipe, result = measured
    training = train(recipe)
    records = list(training)
    row, curve = result["row"], result["curve"]
    probed = [r for r in records if r.max_attention_logit is not None]
    assert [p["step"] for p in curve] == [r.step for r in probed]
    assert row["val_loss"] == pytest.approx(records[-1].val_loss, rel=1e-4)
    assert row["peak_logit"] == pytest.approx(max(r.peak_logit for r in probed), rel=1e-4)
    assert row["peak_logit_layers"] == [row["peak_logit"]]
    assert row["train_loss"] < records[0].train_loss
    weights = [getattr(training.model.blocks[0].attention, kind).weight for kind in ("query", "key")]
    assert row["largest_weight"] == pytest.approx(max(w.abs().max().item() for w in weights), rel=1e-4)
    assert row["bound_over_logit"] > 1 and row["trace"] > 0 and row["top_eigenvalue"] > 0
    assert curve[0]["noise_trace"] > 0 and curve[1]["noise_trace"] is None


def test_a_run_that_diverges_is_a_result():
    recipe = Recipe.from_dict(SMALL | {"optimizer": "AdamW", "lr": 1e30, "grad_clip": None, "warmup": 0.0})
    row = sweeps.measure(recipe, ("curvature",))["row"]
    assert row["diverged"] and row["val_loss"] is None and row["train_loss"] is None and row["trace"] is None
    json.dumps(row, allow_nan=False)


# -- doing it --------------------------------------------------------------------------------------------------


class InProcess(sweeps.Engine):
    """Runs one after the other, with a made-up result; what is in `fails` fails."""

    def __init__(self, loss, fails=(), workers=2):
        self.workers, self.loss, self.fails = workers, loss, set(fails)
        self.queue, self.started, self.most = [], [], 0

    def start(self, name, run):
        self.started.append(name)
        self.queue.append((name, run))
        self.most = max(self.most, len(self.queue))

    def next(self):
        name, run = self.queue.pop(0)
        if name in self.fails:
            return name, "Traceback\nValueError: a broken run"
        row = {"recipe": run.recipe.to_dict(), "val_loss": self.loss(run.recipe), "seconds": 1.0, "tokens": 10}
        return name, {"row": row, "curve": [{"step": 1}]}

    def stop(self):
        self.queue.clear()


def test_work_makes_each_run_once_and_says_where_it_stands(tmp_path):
    sweep = made(grid={"optimizer": ["AdamW", "LAMB"]}, search=search(widen=4, refine=True), report={"seeds": [1, 2]})
    engine = InProcess(lambda recipe: bowl(0.003 if recipe.optimizer == "AdamW" else 0.05)(recipe))
    states = list(sweeps.work(sweep, Pool(tmp_path / "pool"), engine))
    planned, _ = sweep.plan(Pool(tmp_path / "pool").row)
    assert sorted(engine.started) == sorted(run.name for run in planned) and engine.most == 2
    assert states[0].done == 0 and states[0].finished is None
    assert [s.done for s in states] == list(range(len(planned) + 1)) and states[-1].known == len(planned)
    again = InProcess(engine.loss)
    assert [s.done for s in sweeps.work(sweep, Pool(tmp_path / "pool"), again)] == [len(planned)]
    assert again.started == []
    table, curves = sweeps.write_tables(sweep, Pool(tmp_path / "pool"), tmp_path)
    rows = [json.loads(line) for line in table.read_text().splitlines()]
    assert [row["run"] for row in rows] == [run.name for run in planned]
    assert {row["stage"] for row in rows} == {"search", "report"} and rows[0]["cell"] == {"optimizer": "AdamW"}
    assert len(curves.read_text().splitlines()) == sum(row["stage"] == "report" for row in rows)


def test_a_run_that_fails_costs_one_run_and_is_tried_again(tmp_path):
    sweep = made(grid={"lr": [1e-2, 2e-2, 4e-2]})
    names = [run.name for run in sweep.plan(lambda name: None)[0]]
    pool = Pool(tmp_path)
    states = list(sweeps.work(sweep, pool, InProcess(bowl(1), fails=[names[1]])))
    assert [s.error for s in states if s.error] == ["Traceback\nValueError: a broken run"]
    assert (states[-1].done, states[-1].known) == (2, 3)
    assert "a broken run" in pool.failed(names[1]).read_text()
    engine = InProcess(bowl(1))
    assert [*sweeps.work(sweep, Pool(tmp_path), engine)][-1].done == 3
    assert engine.started == [names[1]] and not pool.failed(names[1]).exists()


def test_two_sweeps_do_not_work_in_one_folder(tmp_path):
    sweep = made(grid={"lr": [1e-2, 2e-2]})
    going = sweeps.work(sweep, Pool(tmp_path), InProcess(bowl(1)))
    next(going)
    with pytest.raises(InputError, match="another one is at work"):
        next(sweeps.work(sweep, Pool(tmp_path), InProcess(bowl(1))))
    going.close()
    assert [*sweeps.work(sweep, Pool(tmp_path), InProcess(bowl(1)))][-1].done == 2


def test_a_damaged_result_is_named_made_anew_and_kept(tmp_path):
    sweep = made(grid={"lr": [1e-2, 2e-2]})
    list(sweeps.work(sweep, Pool(tmp_path), InProcess(bowl(1))))
    name, other = (run.name for run in sweep.plan(Pool(tmp_path).row)[0])
    path = Pool(tmp_path).path(name)
    good, damaged = path.read_bytes(), path.read_bytes()[:40]
    path.write_bytes(damaged)
    with pytest.warns(UserWarning, match=f"{name}.json cannot be read as a finished run .*counts as missing"):
        sweeps.write_tables(sweep, Pool(tmp_path), tmp_path)  # looking changes nothing
    assert path.read_bytes() == damaged
    engine = InProcess(bowl(1))
    with pytest.warns(UserWarning, match=name) as said:
        assert [*sweeps.work(sweep, Pool(tmp_path), engine)][-1].done == 2
    assert len(said) == 1 and engine.started == [name]
    assert path.read_bytes() == good and (tmp_path / f"{name}.damaged1").read_bytes() == damaged
    path.write_bytes(Pool(tmp_path).path(other).read_bytes())
    with pytest.warns(UserWarning, match="its recipe is that of another run"):
        assert Pool(tmp_path).row(name) is None


def test_a_process_that_dies_costs_one_run(tmp_path, monkeypatch):
    sweep = made(grid={"lr": [1e-2, 2e-2]})
    engine = sweeps.Processes(workers=1)
    runs = sweep.plan(lambda name: None)[0]
    with engine:
        engine.start(runs[0].name, runs[0])
        process, _ = engine._running[runs[0].name]
        os.kill(process.pid, signal.SIGKILL)
        name, result = engine.next()
        assert name == runs[0].name and "exit code -9" in result
        engine.start(runs[1].name, runs[1])
        name, result = engine.next()
        assert name == runs[1].name and result["row"]["steps"] == 10


def test_an_error_inside_a_run_is_told_whole():
    assert sweeps._result({"lr": -1}, ()) == "lr: got -1, expected a finite number ≥ 0"


# -- the command -----------------------------------------------------------------------------------------------

FILE = """
purpose = "small"
[fields]
text = "synthetic"
tokens = 1280
eval_sequences = 8
device = "cpu"
model = { n_layer = 1, n_head = 2, n_embd = 16, block_size = 16 }
[grid]
optimizer = ["AdamW", "MERIT"]
batch_size = [8, 16]
[search]
refine = true
widen = 1
lr.AdamW = [1e-3, 4e-3, 1.6e-2]
lr.default = [1e-2, 4e-2, 1.6e-1]
[report]
seeds = [1, 2]
"""


def command(*arguments):
    return [sys.executable, "-m", "merit_lab", "sweep", *map(str, arguments)]


def same_table(folder):
    """The table without what differs from run to run."""
    rows = [json.loads(line) for line in (folder / "small.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in ("seconds", "date")} for row in rows]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "small.toml").write_text(FILE)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MERIT_LAB_OFFLINE": "1"}
    done = subprocess.run(
        command(folder / "small.toml", "--out", folder / "whole", "--workers", 2),
        env=environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder, environment, done


@pytest.mark.timeout(900)  # the sweep is made here, for all tests below
def test_the_command_writes_a_table_and_says_what_it_found(undisturbed):
    folder, _, done = undisturbed
    assert "small.jsonl" in done.stdout and "optimizer MERIT, batch_size 16" in done.stdout
    assert " left" in done.stderr  # the time left
    rows = same_table(folder / "whole")
    assert len(rows) >= 4 * 7 and {row["stage"] for row in rows} == {"search", "report"}


@pytest.mark.timeout(900)  # it starts Python twenty-one times
def test_killed_at_twenty_random_moments_it_ends_with_the_same_table(undisturbed):
    folder, environment, _ = undisturbed
    out, chance = folder / "killed", random.Random(0)
    asked = command(folder / "small.toml", "--out", out, "--workers", 2)
    kept: dict[str, tuple] = {}
    kills, moments = 0, [0, 0, 1, 1, 2]  # so many runs are let finish, of some thirty
    for _ in range(20):
        process = subprocess.Popen(asked, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wanted = len(kept) + chance.choice(moments)
        while process.poll() is None and len(list((out / "pool").glob("*.json"))) < wanted:
            time.sleep(0.01)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(chance.uniform(0, 6) if wanted == len(kept) else chance.uniform(0, 0.3))
        if process.poll() is None:
            process.kill()
            kills += 1
        process.wait()
        for path in (out / "pool").glob("*.json"):
            state = (path.stat().st_ino, path.stat().st_mtime_ns)
            assert kept.setdefault(path.name, state) == state, "a finished run was made again"
    assert kills >= 15 and len(kept) >= 5, "most kills came too late or too early to say anything"
    done = subprocess.run(asked, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert same_table(out) == same_table(folder / "whole")


def test_ctrl_c_keeps_what_is_complete(undisturbed):
    folder, environment, *_ = undisturbed
    asked = command(folder / "small.toml", "--out", folder / "stopped", "--workers", 2)
    process = subprocess.Popen(
        asked,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Where these tests run in the background of a script, Ctrl-C is ignored unless asked for.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    for line in process.stderr:
        if "3/" in line:
            break
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == cli.STOPPED, said
    assert "the same command goes on from there" in said and "Traceback" not in said
    assert len(list((folder / "stopped" / "pool").glob("*.json"))) >= 3


def test_dry_run_counts_and_estimates_without_training(undisturbed, monkeypatch):
    folder, *_ = undisturbed

    def refused(*_, **__):
        raise AssertionError("a run was made")

    monkeypatch.setattr(sweeps, "work", refused)
    asked = ["sweep", str(folder / "small.toml"), "--dry-run", "--out"]
    result = CliRunner().invoke(cli.app, [*asked, str(folder / "none")])
    assert result.exit_code == 0, result.output
    assert "28 to 32" in result.output and "a few steps" in result.output
    result = CliRunner().invoke(cli.app, [*asked, str(folder / "whole")])
    assert "finished runs" in result.output and "0:00" in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--engine", "slurm"], "expected local or ray"), (["--workers", "0"], "workers: got 0")],
)
def test_wrong_options_are_named(undisturbed, arguments, said):
    folder, *_ = undisturbed
    result = CliRunner().invoke(cli.app, ["sweep", str(folder / "small.toml"), *arguments])
    assert result.exit_code == cli.WRONG_INPUT and said in result.output


def test_ray_runs_the_same_file(undisturbed, tmp_path):
    pytest.importorskip("ray", reason="an optional extra: pip install 'merit-lab[ray]'")
    folder, environment, *_ = undisturbed
    asked = command(folder / "small.toml", "--out", tmp_path, "--engine", "ray", "--address", "local", "--workers", 2)
    done = subprocess.run(asked, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert same_table(tmp_path) == [row | {} for row in same_table(folder / "whole")]
