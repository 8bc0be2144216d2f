"""The command line: what it prints, what it writes, and how it answers wrong input and Ctrl-C."""

import errno
import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from merit_lab import __main__ as cli
from merit_lab import __version__, compare, doctor, optim, runs
from merit_lab.recipe import RECIPES, Recipe
from merit_lab.training import StepRecord, Training

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = ("compare", "train", "recipes", "optimizers", "text", "doctor")
TINY = ("--recipe", "tiny", "--text", "synthetic", "--tokens", "4096", "--device", "cpu")  # 4 steps
STEPS = 4
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\x9b]")  # all but tab and newline


@pytest.fixture(scope="module", autouse=True)
def quiet_world(tmp_path_factory):
    """No network, a cache of its own, and nothing in the environment that asks for colours."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MERIT_LAB_OFFLINE", "1")
        patch.setenv("MERIT_LAB_DATA", str(tmp_path_factory.mktemp("texts")))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
        for name in ("FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "TTY_COMPATIBLE", "COLUMNS"):
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Each test in a folder of its own, which is also the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments, code=0):
    """The command's result in this process. Its exit code must be `code`, and no exception may escape."""
    result = CliRunner().invoke(cli.app, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def one_line(text):
    """Without the frames and line ends of error boxes and tables."""
    return re.sub(r"[\s│╭╮╰╯─]+", " ", text)


def no_training(*_, **__):
    raise AssertionError("training began")


# -- compare -----------------------------------------------------------------------------------------------


def test_compare_prints_a_table_and_writes_runs_and_figure(folder):
    result = run("compare", *TINY, "--seed", 3, "--out", "there")
    table = result.stdout.splitlines()
    for name, rate in RECIPES["tiny"].lr.items():
        recorded = runs.read(folder / "there" / f"{name}.jsonl")
        assert recorded.complete and len(recorded) == STEPS
        assert (recorded.recipe.lr, recorded.recipe.seed, recorded.recipe.text) == (rate, 3, "synthetic")
        (row,) = [line.split() for line in table if line.split()[:1] == [name]]
        seconds = f"{recorded.records[-1].seconds:.1f}"
        assert row == [
            name, f"{rate:g}", f"{recorded.final_val_loss:.3f}", f"{recorded.peak_logit:.1f}", seconds, "no",
        ]  # fmt: skip
    assert (folder / "there" / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "there" / "comparison.pdf").read_bytes().startswith(b"%PDF")
    assert sorted(path.name for path in (folder / "there").iterdir()) == [
        "AdamW.jsonl", "LAMB.jsonl", "MERIT.jsonl", "comparison.pdf", "comparison.png",
    ]  # fmt: skip
    for path in (folder / "there").iterdir():
        assert str(path.relative_to(folder)) in result.stdout
    assert "one seed (3)" in result.stdout and "recipe tiny (AdamW, LAMB, MERIT)" in result.stdout
    assert "made up" in result.stdout
    assert not CONTROL.search(result.output)


def test_compared_optimizers_start_alike_and_see_the_same_text(folder):
    run("compare", *TINY, "--optimizers", "AdamW,MERIT", "--out", ".")
    first = [runs.read(folder / f"{name}.jsonl").records[0] for name in ("AdamW", "MERIT")]
    assert first[0].train_loss == first[1].train_loss and first[0].grad_norm == first[1].grad_norm


def test_compare_says_which_rates_were_given_and_which_were_borrowed():
    result = run("compare", *TINY, "--optimizers", "AdamW, maxLAMB,MERIT", "--lr", "MERIT=.025", "--out", "x")
    assert "recipe tiny (AdamW); MERIT's in recipe tiny (maxLAMB); given (MERIT)" in one_line(result.stdout)
    assert runs.read("x/MERIT.jsonl").recipe.lr == 0.025
    assert runs.read("x/maxLAMB.jsonl").recipe.lr == RECIPES["tiny"].lr["MERIT"]


def test_compare_shows_a_run_that_diverged():
    result = run("compare", *TINY, "--optimizers", "AdamW,MERIT", "--lr", "AdamW=1e30", "--out", "x")
    recorded = runs.read("x/AdamW.jsonl")
    assert recorded.diverged
    row = next(line for line in result.stdout.splitlines() if line.strip().startswith("AdamW"))
    assert f"at step {len(recorded)}" in row and "inf" not in row
    assert "AdamW: step" in result.stderr and "diverged" in result.stderr


def test_compare_replaces_a_run_only_by_a_complete_one(monkeypatch):
    run("compare", *TINY, "--out", "x")
    before = {name: Path(f"x/{name}.jsonl").read_bytes() for name in ("AdamW", "LAMB", "MERIT")}
    interrupt_at(monkeypatch, "LAMB", 2)
    result = run("compare", *TINY, "--seed", 1, "--out", "x", code=130)
    assert "replaced when the new run is complete: x/AdamW.jsonl, x/LAMB.jsonl, x/MERIT.jsonl" in result.stderr
    assert "AdamW: complete, in x/AdamW.jsonl" in result.stderr
    assert f"LAMB: 1 of {STEPS} steps, kept in x/LAMB.jsonl.partial" in result.stderr
    assert "MERIT: not trained" in result.stderr
    assert runs.read("x/AdamW.jsonl").recipe.seed == 1
    assert len(runs.read("x/LAMB.jsonl.partial")) == 1
    for name in ("LAMB", "MERIT"):
        assert Path(f"x/{name}.jsonl").read_bytes() == before[name]


def interrupt_at(monkeypatch, optimizer, step):
    """Ctrl-C while this step of this optimizer is computed."""
    plain = compare.train

    def train(recipe, corpus):
        training = plain(recipe, corpus)
        if recipe.optimizer == optimizer:
            original = training._accumulate_gradients

            def interrupted(now):
                if now == step:
                    raise KeyboardInterrupt
                return original(now)

            training._accumulate_gradients = interrupted
        return training

    monkeypatch.setattr(compare, "train", train)


def test_compare_without_a_plotting_library_still_writes_the_runs(monkeypatch):
    for name in [*sys.modules, "matplotlib"]:
        if name.partition(".")[0] == "matplotlib":
            monkeypatch.setitem(sys.modules, name, None)
        elif name.startswith("merit_lab.figures"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("merit_lab.figures", raising=False)
    result = run("compare", *TINY, "--optimizers", "MERIT", "--out", "x")
    assert "no figure: matplotlib is not installed" in result.stdout and ".[lab]" in result.stdout
    assert runs.read("x/MERIT.jsonl").complete and not Path("x/comparison.png").exists()


def test_compare_takes_a_file_and_wants_a_rate_for_each_other_optimizer():
    Path("my.toml").write_text('text = "synthetic"\noptimizer = "LAMB"\nlr = 0.02\nbatch_size = 16\ntokens = 2048\n')
    wrong = run("compare", "--recipe", "my.toml", "--optimizers", "AdamW,LAMB", "--out", "x", code=2)
    assert "my.toml has a learning rate for LAMB alone; give AdamW its own" in wrong.stderr
    assert not Path("x").exists()
    right = run("compare", "--recipe", "my.toml", "--optimizers", "AdamW,LAMB", "--lr", "AdamW=1e-3", "--out", "x")
    assert "given (AdamW); my.toml (LAMB)" in right.stdout
    assert [runs.read(f"x/{name}.jsonl").recipe.lr for name in ("AdamW", "LAMB")] == [1e-3, 0.02]


def test_file_names_differ_for_all_optimizers():
    names = [compare.file_name(name) for name in optim.OPTIMIZERS]
    assert len(set(map(str.lower, names))) == len(names)
    assert all(re.fullmatch(r"[A-Za-z0-9-]+", name) for name in names)
    assert compare.file_name("+ element-wise") == "plus-element-wise"


# -- train -------------------------------------------------------------------------------------------------


def test_train_records_a_run():
    result = run("train", *TINY, "--out", "deep/run.jsonl")
    recorded = runs.read("deep/run.jsonl")
    assert recorded.complete and len(recorded) == STEPS
    assert f"Validation loss {recorded.final_val_loss:.3f}" in result.stdout
    assert "Written: deep/run.jsonl" in result.stdout
    assert "MERIT: step 1/4" in result.stderr and "MERIT: step 4/4" in result.stderr
    assert not CONTROL.search(result.output)


def test_train_without_out_writes_nothing(folder):
    assert "Not recorded" in run("train", *TINY).stdout
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        (["--optimizer", "LAMB"], "optimizer", "LAMB"),
        (["--optimizer", "LAMB"], "lr", RECIPES["tiny"].lr["LAMB"]),
        (["--lr", "0.125"], "lr", 0.125),
        (["--model", "micro"], "model", "micro"),
        (["--text", "synthetic@chars"], "text", "synthetic@chars"),
        (["--batch-size", "8"], "batch_size", 8),
        (["--micro-batch-size", "3"], "micro_batch_size", 3),
        (["--tokens", "5000"], "tokens", 5000),
        (["--seed", "7"], "seed", 7),
        (["--device", "auto"], "device", "auto"),
        (["--precision", "fp32"], "precision", "fp32"),
        (["--set", "warmup=.5"], "warmup", 0.5),
        (["--set", "eval_every = 2"], "eval_every", 2),
        (["--set", "grad_clip=none"], "grad_clip", None),
        (["--set", "lr=0.25"], "lr", 0.25),
        (["--set", "block_size=32"], "block_size", 32),
        (["--set", "model.qk_norm=true"], "model", {"named": "nano", "qk_norm": True}),
        (["--set", "model.qk_norm=true", "--set", "block_size=32"], "block_size", 32),
        (["--model", "micro", "--set", "model.n_layer=1"], "model", {"named": "micro", "n_layer": 1}),
        (["--set", "model={named='nano', bias=false}"], "model", {"named": "nano", "bias": False}),
    ],
)
def test_every_field_can_be_set(monkeypatch, arguments, field, value):
    assert getattr(recipe_of(monkeypatch, arguments), field) == value


def test_optimizer_arguments_are_laid_over_the_recipes(monkeypatch):
    recipe = recipe_of(monkeypatch, ["--set", "optimizer_args.clip=false", "--set", "optimizer_args.betas=[0.5, 0.6]"])
    assert recipe.optimizer_args == {"betas": (0.5, 0.6), "weight_decay": 0.1, "clip": False}


def recipe_of(monkeypatch, arguments):
    """The recipe that `train` would have trained."""
    seen = []

    class Enough(Exception):
        pass

    def start(recipe, corpus, parallel):
        seen.append(recipe)
        raise Enough

    monkeypatch.setattr("merit_lab.training.train", start)
    with pytest.raises(Enough):
        run("train", *TINY, *arguments)  # of an option that is given twice the later one counts
    return seen[0]


def test_train_takes_a_file():
    Path("my.toml").write_text('text = "synthetic"\nlr = 0.02\nbatch_size = 16\ntokens = 2048\n')
    result = run("train", "--recipe", "my.toml", "--out", "run.jsonl", "--set", "optimizer_args.clip=false")
    assert runs.read("run.jsonl").recipe.optimizer_args["clip"] is False
    assert "MERIT at lr 0.02 (my.toml)" in result.stderr
    assert "give LAMB its own" in run("train", "--recipe", "my.toml", "--optimizer", "LAMB", code=2).stderr


def test_train_writes_a_sample_that_can_be_repeated():
    first, second = (run("train", *TINY, "--sample", 60).stdout for _ in range(2))
    sample = first.split("seconds.\n")[1].split("\nNot recorded")[0]
    assert len(sample.strip("\n")) <= 60 and len(sample) >= 60
    assert sample == second.split("seconds.\n")[1].split("\nNot recorded")[0]


def test_a_sample_cannot_steer_the_terminal():
    Path("steer.txt").write_text("\x1b[31mred\x07\x9b " * 3000, encoding="utf-8", newline="")
    result = run("train", *TINY[:2], "--text", "file:steer.txt", "--tokens", 2048, "--sample", 200)
    assert "\N{REPLACEMENT CHARACTER}" in result.stdout and not CONTROL.search(result.stdout)


def test_train_says_that_a_run_diverged():
    arguments = ["--optimizer", "AdamW", "--lr", "1e30", "--sample", "20", "--out", "run.jsonl"]
    result = run("train", *TINY, *arguments)
    assert f"Diverged at step {len(runs.read('run.jsonl'))}" in result.stdout
    assert "No sample" in result.stdout


def test_train_keeps_weights():
    run("train", *TINY, "--keep-weights", "--out", "run.jsonl")
    assert runs.read("run.jsonl").weights()["blocks.0.attention.query.weight"].shape == (64, 64)


KEPT = ("--out", "run.jsonl", "--checkpoint", "kept", "--checkpoint-every", 2)


def stop_at(monkeypatch, stopped, error):
    """This happens while this step is computed."""
    original = Training._accumulate_gradients

    def accumulate(training, step):
        if step == stopped:
            raise error
        return original(training, step)

    monkeypatch.setattr(Training, "_accumulate_gradients", accumulate)


def test_train_goes_on_where_it_was_stopped(monkeypatch):
    with monkeypatch.context() as patch:
        stop_at(patch, 4, KeyboardInterrupt())
        first = run("train", *TINY, *KEPT, code=130)
    assert first.stderr.endswith(
        f"stopped after 3 of {STEPS} steps, kept in run.jsonl.partial; "
        "the same command goes on after step 2, kept in kept\n"
    )
    second = run("train", *TINY, *KEPT, "--keep", 1)
    assert f"going on after step 2 of {STEPS}, kept in kept" in second.stderr
    assert [record.step for record in runs.read("run.jsonl")] == list(range(1, STEPS + 1))
    assert [path.name for path in Path("kept").iterdir()] == ["step-000004.checkpoint"]
    other = run("train", *TINY, *KEPT, "--lr", 0.5, code=2)
    assert "lr is 0.05 there and 0.5 here" in other.stderr and runs.read("run.jsonl").recipe.lr == 0.05


def test_train_without_out_but_with_checkpoints(monkeypatch):
    stop_at(monkeypatch, 3, KeyboardInterrupt())
    result = run("train", *TINY, *KEPT[2:], code=130)
    assert f"stopped after 2 of {STEPS} steps; the same command goes on after step 2, kept in kept" in result.stderr


def test_train_says_a_damaged_checkpoint_and_a_full_disk(monkeypatch):
    run("train", *TINY, *KEPT)
    newest = Path("kept/step-000004.checkpoint")
    newest.write_bytes(newest.read_bytes()[:-1])
    monkeypatch.setattr("merit_lab.checkpoint.write", full)
    result = run("train", *TINY, *KEPT, code=2)
    assert "note: checkpoint: kept/step-000004.checkpoint cannot be used: its checksum is wrong" in result.stderr
    assert "error: checkpoint: that of step 4 cannot be written to kept (No space left on device)" in result.stderr
    assert [record.step for record in runs.read("run.jsonl.partial")] == [1, 2, 3]


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_compare_goes_on_where_it_was_stopped(monkeypatch):
    arguments = (*TINY, "--optimizers", "AdamW,LAMB", "--out", "x", *KEPT[2:])
    with monkeypatch.context() as patch:
        stop_at(patch, 4, KeyboardInterrupt())
        first = run("compare", *arguments, code=130)
    assert "the same command goes on from the checkpoints in kept" in first.stderr
    assert sorted(str(path) for path in Path("kept").rglob("*.checkpoint")) == ["kept/AdamW/step-000002.checkpoint"]
    run("compare", *arguments)
    assert all(runs.read(f"x/{name}.jsonl").complete for name in ("AdamW", "LAMB"))
    monkeypatch.setattr(Training, "_accumulate_gradients", no_training)
    before = runs.read("x/LAMB.jsonl").records
    run("compare", *arguments)
    assert runs.read("x/LAMB.jsonl").records == before


def test_out_of_memory_is_said_and_what_to_do(monkeypatch):
    def start(*_):
        raise MemoryError("Unable to allocate 52 GiB")

    monkeypatch.setattr("merit_lab.training.train", start)
    error = run("train", *TINY, code=1).stderr
    assert "52 GiB" in error and "--micro-batch-size" in error


# -- the others --------------------------------------------------------------------------------------------


def test_recipes_lists_each_with_its_numbers():
    shown = run("recipes").stdout
    for name in RECIPES:
        recipe = Recipe.named(name)
        (row,) = [line for line in shown.splitlines() if line.split()[:1] == [name]]
        assert f"{recipe.batch_size} × {recipe.block_size}" in row and str(recipe.n_steps) in row.split()
        assert RECIPES[name].purpose.split()[0] in row
    assert "0.11 M" in shown


def test_optimizers_lists_every_name_and_what_it_changes():
    rows = {}  # first cell of a row, or a part of it where it is folded
    shown = one_line(run("optimizers").stdout)
    for name, rung in optim.OPTIMIZERS.items():
        assert name.split()[-1] in shown, name
        assert rung.switch.split()[0] in shown
        rows[name] = rung
    assert "MERIT(bound=False)" in shown and "norm='max'" in shown


def test_text_describes_what_it_prepared():
    shown = run("text", "synthetic").stdout
    assert "synthetic@chars" in shown and "sha256" in shown and "licence: made up" in shown


def test_a_text_that_cannot_be_fetched_is_replaced_and_named():
    result = run("text", "shakespeare")
    assert result.stderr.startswith("note: ") and "synthetic text" in result.stderr
    assert "made up" in result.stdout


@pytest.mark.parametrize("code", [0, 1])
def test_doctor_exits_with_the_reports_code(monkeypatch, code):
    monkeypatch.setattr(doctor, "report", lambda: code)
    run("doctor", code=code)


def test_version():
    assert run("--version").stdout == f"merit_lab {__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_each_help_has_an_example(command):
    shown = one_line(run(command, "--help").stdout)
    assert f"python -m merit_lab {command}" in shown.partition("Examples:")[2]


def test_help_and_version_need_no_torch():
    program = (
        "import sys; from merit_lab.__main__ import app\n"
        f"for arguments in [['--help'], ['--version']] + [[c, '--help'] for c in {COMMANDS}]:\n"
        "    app(arguments, standalone_mode=False)\n"
        "print('LOADED', sorted({'torch', 'numpy', 'matplotlib', 'tiktoken'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "LOADED []" in done.stdout
    assert not CONTROL.search(done.stdout)


# -- wrong input -------------------------------------------------------------------------------------------

BOTH = [  # arguments, what the answer must hold: what came, and what is allowed
    (["--recipe", "huge"], ["recipe: got 'huge'", f"{', '.join(RECIPES)} or a TOML file"]),
    (["--recipe", "missing.toml"], ["missing.toml", "No such file", "give a TOML file or a name"]),
    (["--recipe", "bad.toml"], ["bad.toml is not TOML", "line 1"]),
    (["--recipe", "unknown.toml"], ["unknown field 'lerning_rate'", "lr"]),
    (["--recipe", "."], ["cannot read .", "directory"]),
    (["--model", "giant"], ["'giant'", "nano, micro"]),
    (["--text", "milton"], ["'milton'", "shakespeare"]),
    (["--text", "file:nowhere.txt"], ["nowhere.txt"]),
    (["--batch-size", "0"], ["batch_size: got 0", "≥ 1"]),
    (["--batch-size", "many"], ["--batch-size", "got 'many'", "whole number"]),
    (["--batch-size", "10000"], ["tokens: got 4096", "raise tokens or lower batch_size"]),
    (["--micro-batch-size", "-1"], ["micro_batch_size: got -1", "≥ 1"]),
    (["--tokens", "100"], ["tokens: got 100", "less than one batch"]),
    (["--seed", "-1"], ["seed: got -1", "from 0"]),
    (["--seed", "1.5"], ["--seed", "got '1.5'", "whole number"]),
    (["--device", "tpu"], ["device: got 'tpu'", "auto, cpu, cuda, mps"]),
    (["--precision", "fp8"], ["precision: got 'fp8'", "auto, fp32, bf16"]),
    (["--set", "wamup=1"], ["unknown field 'wamup'", "warmup"]),
    (["--set", "warmup=2"], ["warmup: got 2", "from 0 to 1"]),
    (["--set", "warmup=soon"], ["warmup: got 'soon'", "from 0 to 1"]),
    (["--set", "warmup"], ["set: got 'warmup'", "FIELD=VALUE"]),
    (["--set", "seed=1", "--seed", "2"], ["set: got 'seed=1'", "give it once"]),
    (["--set", "optimizer_args.speed=1"], ["'speed'", "weight_decay"]),
    (["--set", "optimizer_args.betas=[2, 3]"], ["betas", "2"]),
    (["--set", "optimizer_args.a.b=1"], ["optimizer_args.a.b=1", "FIELD=VALUE"]),
    (["--set", "optimizer_args=1"], ["optimizer_args: got 1", "table"]),
    (["--set", "model.depth=3"], ["depth", "n_layer"]),
    (["--set", "warmup=0.1", "--set", "warmup.x=1"], ["'warmup.x=1'", "no entries"]),
    (["--learning-rate", "1"], ["--learning-rate"]),
    (["--checkpoint-every", "5"], ["checkpoint-every: got 5", "give --checkpoint FOLDER too"]),
    (["--keep", "3"], ["keep: got 3", "give --checkpoint FOLDER too"]),
    (["--checkpoint-every", "often"], ["--checkpoint-every", "got 'often'", "whole number"]),
]
TRAIN = [
    (["--lr", "nan"], ["lr: got nan", "finite number ≥ 0"]),
    (["--lr", "inf"], ["lr: got inf", "finite number ≥ 0"]),
    (["--lr", "-1"], ["lr: got -1", "≥ 0"]),
    (["--lr", "fast"], ["--lr", "got 'fast'", "number"]),
    (["--optimizer", "SGD"], ["optimizer: got 'SGD'", "'MERIT'"]),
    (["--sample", "-5"], ["--sample", "got '-5'", "≥ 0"]),
    (["--out", "run.txt"], ["out: got 'run.txt'", ".jsonl"]),
    (["--out", "bad.toml/run.jsonl"], ["out: got bad.toml", "bad.toml is not a folder"]),
    (["--out", "taken.jsonl"], ["taken.jsonl, which is a folder"]),
    (["--keep-weights"], ["keep-weights", "--out"]),
]
COMPARE = [
    (["--optimizers", "AdamW,SGD"], ["optimizer: got 'SGD'", "'MERIT'"]),
    (["--optimizers", "MERIT,MERIT"], ["'MERIT' is named 2 times", "once"]),
    (["--optimizers", ","], ["optimizers: got none", "at least one"]),
    (["--lr", "MERIT=nan"], ["lr: got nan", "finite number ≥ 0"]),
    (["--lr", "MERIT=fast"], ["lr: got 'MERIT=fast'", "NAME=RATE"]),
    (["--lr", "0.1"], ["lr: got '0.1'", "NAME=RATE"]),
    (["--lr", "SGD=0.1"], ["'SGD'", "AdamW, LAMB, MERIT"]),
    (["--lr", "MERIT=1", "--lr", "MERIT=2"], ["MERIT=2", "give it once"]),
    (["--out", "bad.toml"], ["out: got bad.toml", "bad.toml is not a folder"]),
    (["--out", "/dev/null/x"], ["out: got /dev/null/x", "give a folder that can"]),
]
OTHERS = [
    (["fly"], ["No such command 'fly'"]),
    (["trian"], ["No such command 'trian'", "'train'"]),
    (["text"], ["Missing argument", "SPEC"]),
    (["text", "milton"], ["'milton'", "shakespeare"]),
    (["text", "shakespeare@bytes"], ["'bytes'", "chars", "gpt2"]),
    (["recipes", "tiny"], ["tiny"]),
]
CASES = [
    *[(["train", *TINY, *arguments], words) for arguments, words in BOTH + TRAIN],
    *[(["compare", *TINY, *arguments], words) for arguments, words in BOTH + COMPARE],
    *OTHERS,
]


@pytest.mark.parametrize(("arguments", "words"), CASES, ids=[" ".join(a) for a, _ in CASES])
def test_wrong_input(monkeypatch, folder, arguments, words):
    monkeypatch.setattr(compare, "train", no_training)
    monkeypatch.setattr("merit_lab.training.train", no_training)
    Path("bad.toml").write_text("lr = = 3")
    Path("unknown.toml").write_text("lerning_rate = 3")
    Path("taken.jsonl").mkdir()
    result = run(*arguments, code=2)
    for word in words:
        assert word in one_line(result.stderr)
    assert not result.stdout
    assert not [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".toml"]


def test_wrong_input_leaves_no_traceback():
    command = [sys.executable, "-m", "merit_lab", "compare", "--lr", "MERIT"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr == "error: lr: got 'MERIT', expected NAME=RATE such as MERIT=0.02\n"


def test_an_environment_that_is_not_set_up_is_told_what_to_do():
    program = "import runpy, sys; sys.modules['typer'] = None; runpy.run_module('merit_lab', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("error: typer is not installed; run make setup")


# -- Ctrl-C and terminals ----------------------------------------------------------------------------------


@pytest.mark.skipif(os.name == "nt", reason="Windows has another Ctrl-C")
def test_ctrl_c_keeps_what_was_recorded():
    command = [
        sys.executable,
        "-m",
        "merit_lab",
        "train",
        *TINY,
        "--tokens",
        "100000000",
        "--out",
        "run.jsonl",
    ]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Where these tests run in the background of a script, Ctrl-C is ignored unless asked for.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        try:
            said = ""
            for line in process.stderr:
                said += line
                if "step 1/" in line:
                    process.send_signal(signal.SIGINT)
                    break
            output, more = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130, said + more
    kept = runs.read("run.jsonl.partial")
    assert len(kept) >= 1 and not kept.complete
    assert f"stopped after {len(kept)} of " in more and "kept in run.jsonl.partial" in more
    assert "Traceback" not in more and not output and not Path("run.jsonl").exists()


def test_ctrl_c_without_out_says_that_nothing_is_kept(monkeypatch):
    def start(recipe, corpus, parallel):
        raise KeyboardInterrupt

    monkeypatch.setattr("merit_lab.training.train", start)
    result = run("train", *TINY, code=130)
    assert f"stopped after 0 of {STEPS} steps; nothing is kept without --out" in result.stderr


@pytest.mark.parametrize("name", ["recipes", "text"])
def test_ctrl_c_elsewhere(monkeypatch, name):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("merit_lab.text.load", interrupted)
    monkeypatch.setattr(cli, "parameters", interrupted)
    assert run(name, *["synthetic"] * (name == "text"), code=130).stderr == "stopped\n"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def show_two_runs(monkeypatch, stream, **environment):
    """What `progress` writes to this stream for a run that is complete and one that diverged."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stderr", stream)
    good, bad = Recipe.named("tiny", optimizer="AdamW"), Recipe.named("tiny", optimizer="MERIT")
    with cli.progress([good, bad]) as show:
        for step in range(1, good.n_steps + 1):
            show(good, StepRecord(step, step, 0.1, 2.5, 1.0, seconds=2.0 * step))
        show(bad, StepRecord(1, 1, 0.1, 3.5, 1.0, seconds=90.0))
        show(bad, StepRecord(2, 2, 0.1, float("nan"), 1.0, seconds=180.0, diverged=True))
    return stream.getvalue()


def test_a_terminal_gets_a_bar_an_optimizer(monkeypatch):
    shown = show_two_runs(monkeypatch, Terminal(), TERM="xterm", COLUMNS="100")
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert plain != shown and "waiting" in plain
    last = [line for line in re.split(r"[\r\n]+", plain) if "━" in line][-2:]
    assert re.search(r"^AdamW +━+ +40/40 +loss 2.500 +done in 1:20", last[0])
    assert re.search(r"^MERIT .*━+ +2/40 +loss nan +diverged", last[1])


@pytest.mark.parametrize(("stream", "term"), [(io.StringIO, "xterm"), (Terminal, "dumb")])
def test_what_is_no_terminal_or_a_dumb_one_gets_lines(monkeypatch, stream, term):
    shown = show_two_runs(monkeypatch, stream(), TERM=term).splitlines()
    assert shown[0] == "AdamW: step 1/40, loss 2.500, 1:18 left"
    assert shown[1] == "AdamW: step 4/40, loss 2.500, 1:12 left"
    assert shown[-3] == "AdamW: step 40/40, loss 2.500, done in 1:20"
    assert shown[-2:] == ["MERIT: step 1/40, loss 3.500, 58:30 left", "MERIT: step 2/40, loss nan, diverged"]


# -- small parts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("1", 1), ("1e-3", 1e-3), (".5", 0.5), ("true", True), ("none", None), ("None", None),
        ("[0.9, 0.95]", [0.9, 0.95]), ("'nano'", "nano"), ("file:my.txt", "file:my.txt"), (" 2 ", 2),
        ("", ""), ("{named = 'nano'}", {"named": "nano"})
    ],
)  # fmt: skip
def test_values_are_read_as_toml_writes_them(typed, meant):
    assert cli.toml_value(typed) == meant and type(cli.toml_value(typed)) is type(meant)


@pytest.mark.parametrize(("seconds", "shown"), [(0, "0:00"), (59.6, "1:00"), (125, "2:05"), (3725, "1:02:05")])
def test_clock(seconds, shown):
    assert cli.clock(seconds) == shown
