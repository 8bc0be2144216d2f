"""Training processes that are killed again and again, and what becomes of their runs.

    python tests/killed.py FOLDER 100     # so many kills; prints what happened as a line of JSON
    python tests/killed.py FOLDER 400+600 # one kill: so many steps, a kill, and so many more

A process needs seconds to load torch. So this one loads it once, and forks: each fork trains from the newest
checkpoint until it is killed, the next one goes on. Of the kills, three in four come from outside at a random moment;
one in four comes at a random one of the system calls that a save is made of. When a run has come to its end all the
same, it must hold what a run holds that nobody disturbed and that kept no checkpoints.
"""

import json
import os
import random
import signal
import sys
import time
import traceback
import warnings
from functools import partial
from itertools import cycle
from pathlib import Path

import torch

from merit_lab import checkpoint, runs, text
from merit_lab.optim import fast_c
from merit_lab.recipe import Recipe
from merit_lab.training import train

KEEP = 2
BASE = {
    "model": {"named": "nano", "n_layer": 1, "n_head": 2, "n_embd": 16, "block_size": 16},
    "text": "synthetic", "batch_size": 6, "tokens": 6 * 16 * 40, "eval_sequences": 4, "device": "cpu",
}  # fmt: skip
FUSED = {"fused": True}  # but for the steps that are probed
RECIPES = [  # and steps between checkpoints
    (Recipe(**BASE, optimizer="MERIT", micro_batch_size=4, probe_every=3, eval_every=5, optimizer_args=FUSED), 1),
    (Recipe(**BASE, optimizer="AdamW", qk_clip=0.02, lr=2e-2), 2),
    (Recipe(**BASE, optimizer="LAMB", noise_every=20, lr=5e-2), 3),
]


def work(recipe, corpus, every, folder, say):
    """In a fork: train to the end, from the newest checkpoint. `say` is called when it is found, and each new step."""
    kept = {} if every is None else {"checkpoint": folder / "checkpoints", "checkpoint_every": every, "keep": KEEP}
    training = train(recipe, corpus, **kept)
    say()
    for record in runs.record_to(folder / "run.jsonl", training):
        if record.step > (training.resumed or 0):
            say()
    torch.save(checkpoint.state_of(training), folder / "end")


def die_in(call, count):
    """Let this process be killed when it makes this system call for the count-th time."""
    real, left = getattr(os, call), count

    def counted(*arguments):
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments)

    setattr(os, call, counted)


def die_writing(count):
    """Let this process be killed when a checkpoint's writer is called for the count-th time, half of it on disk."""
    real, left = checkpoint._Hashed.write, count

    def counted(hashed, data):
        nonlocal left
        left -= 1
        if left == 0:
            hashed.file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return real(hashed, data)

    checkpoint._Hashed.write = counted


def fork(recipe, corpus, every, folder, prepare=None):
    """(process id, the end of a pipe that gives a byte whenever the fork says something)."""
    reading, writing = os.pipe()
    process = os.fork()
    if process:
        os.close(writing)
        return process, reading
    code = 1
    try:
        os.close(reading)
        warnings.simplefilter("error", UserWarning)  # no checkpoint may ever be found damaged
        if prepare is not None:
            prepare()
        work(recipe, corpus, every, folder, lambda: os.write(writing, b"."))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def until_killed(recipe, corpus, every, folder, chance):
    """One fork, and a kill. Whether it was killed; else it came to the end."""
    kind = chance.random()
    if kind < 0.05:
        prepare = partial(die_writing, chance.randint(1, 80))
    elif kind < 0.25:
        prepare = partial(die_in, chance.choice(["fsync", "replace", "unlink"]), chance.randint(1, 6))
    else:
        prepare = None
    process, said = fork(recipe, corpus, every, folder, prepare)
    if prepare is None:
        for _ in range(chance.choice([0, 0, 1, 2, 3, 4])):
            os.read(said, 1)
        time.sleep(chance.uniform(0, 0.03))
        os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    os.close(said)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0, "a fork failed; its traceback is above"
    return False


def undisturbed(recipe, corpus, folder):
    folder.mkdir()
    process, said = fork(recipe, corpus, None, folder)
    assert os.waitpid(process, 0)[1] == 0
    os.close(said)


def lines(path):
    """A recorded run without what the clock says."""
    header, *records = map(json.loads, path.read_text().splitlines())
    return [header | {"date": None}] + [record | {"seconds": 0.0} for record in records]


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def check_what_is_left(folder, before):
    """After a kill: the record can be read, and no checkpoint is lost. Returns (checkpoints there, in a save?)."""
    recorded = folder / "run.jsonl.partial"
    if recorded.exists():
        steps = [record.step for record in runs.read(recorded)]
        assert steps == list(range(1, len(steps) + 1))
    place = folder / "checkpoints"
    whole = [path for path in place.glob("*") if checkpoint.NAME.fullmatch(path.name)]
    assert len(whole) >= min(before, KEEP), "a checkpoint was lost"
    assert len(whole) <= KEEP + 1, "older checkpoints were not deleted"
    return len(whole), any(place.glob(".*.tmp"))


def main(folder, wanted):
    if fast_c.library(torch.float32) is None:  # now it is compiled and loaded, once for all forks
        os.environ["MERIT_LAB_NO_COMPILER"] = "1"  # it has been said; in a fork a warning is an error
    if "+" in wanted:
        found = one_kill(folder, *map(int, wanted.split("+")))
    else:
        found = many_kills(folder, int(wanted))
    print(json.dumps(found))


def one_kill(folder, before, after):
    """`before` steps, a kill, `after` steps are what their sum is in one go; micro-batches and probes included."""
    corpus = text.load("synthetic")
    recipe = RECIPES[0][0].replace(tokens=6 * 16 * (before + after), probe_every=50, eval_every=100)
    undisturbed(recipe, corpus, folder / "undisturbed")
    place = folder / "run"
    place.mkdir()
    # os.write is how a fork says that it has found its checkpoint, and then each step.
    process, said = fork(recipe, corpus, 50, place, partial(die_in, "write", 1 + before))
    assert os.WTERMSIG(os.waitpid(process, 0)[1]) == signal.SIGKILL
    os.close(said)
    process, said = fork(recipe, corpus, 50, place)
    with os.fdopen(said, "rb") as pipe:
        steps = len(pipe.read()) - 1
    assert os.waitpid(process, 0)[1] == 0
    assert lines(place / "run.jsonl") == lines(folder / "undisturbed" / "run.jsonl")
    assert same(torch.load(place / "end"), torch.load(folder / "undisturbed" / "end"))
    return {"steps": before + after, "after the kill": steps}


def many_kills(folder, wanted):
    corpus = text.load("synthetic")
    chance = random.Random(0)
    kills = in_save = ended = 0
    for index, (recipe, every) in cycle(enumerate(RECIPES)):
        reference, place = folder / f"undisturbed{index}", folder / f"run{ended}"
        if not reference.exists():
            undisturbed(recipe, corpus, reference)
        place.mkdir()
        there = 0
        while kills < wanted and until_killed(recipe, corpus, every, place, chance):
            kills += 1
            there, saving = check_what_is_left(place, there)
            in_save += saving
        process, said = fork(recipe, corpus, every, place)  # to the end, or from the end
        assert os.waitpid(process, 0)[1] == 0
        os.close(said)
        assert lines(place / "run.jsonl") == lines(reference / "run.jsonl")
        assert same(torch.load(place / "end"), torch.load(reference / "end"))
        assert {path.name for path in place.iterdir()} == {"checkpoints", "run.jsonl", "end"}
        assert len(list((place / "checkpoints").iterdir())) == KEEP  # and nothing else
        ended += 1
        if kills >= wanted:
            break
    return {"kills": kills, "in_save": in_save, "runs": ended}


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
