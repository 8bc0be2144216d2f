"""The exercise of notebook 00: the solution passes, each typical wrong answer is told what is wrong with it."""

import math

import pytest
from lessons import solution_of

from merit_lab import Recipe, runs, text
from merit_lab.exercises import check_passes_100
from merit_lab.exercises.start import BATCHES, THRESHOLD, peak_logit, recipe_below_100, verdict
from merit_lab.files import data_dir


def like_the_model(recipe):
    """A peak for each batch size, in place of training: above 100 at batch 16 and below."""
    return {4: 260.0, 16: 180.0, 64: 40.0, 256: 4.0}[recipe.batch_size]


def no_training(recipe):
    raise AssertionError("training began")


def test_the_solution_in_the_notebook_is_right_when_it_is_trained(capsys):
    check_passes_100(solution_of("00_start_here", "passes_100"))
    assert capsys.readouterr().out == "right\n"


def test_the_recipe_to_start_from_stays_below():
    start = recipe_below_100()
    assert start.batch_size in BATCHES and peak_logit(start) < THRESHOLD


def test_untouched_it_is_your_turn():
    def untouched(recipe):
        raise NotImplementedError

    assert verdict(untouched, no_training).startswith("your turn")


WITHOUT_TRAINING = {
    "nothing returned": (lambda recipe: None, "returned None; does it end with a return?"),
    "a number": (lambda recipe: 16, "returned int, expected a Recipe"),
    "unchanged": (lambda recipe: recipe, "the recipe as it was"),
    "another optimizer": (
        lambda recipe: Recipe.named("start", optimizer="LAMB", batch_size=16),
        "trains with LAMB; the question is where AdamW's logit",
    ),
    "a larger rate": (lambda recipe: recipe.replace(lr=0.05), "you changed the learning rate, from 0.02 to 0.05"),
    "rate and batch": (
        lambda recipe: recipe.replace(batch_size=16, lr=0.08),
        "you changed the learning rate, from 0.02 to 0.08",
    ),
    "as many steps": (
        lambda recipe: recipe.replace(batch_size=16, tokens=recipe.tokens // 4),
        "you changed the token budget",
    ),
    "another seed": (lambda recipe: recipe.replace(batch_size=16, seed=1), "you changed seed too"),
    "another model": (lambda recipe: recipe.replace(batch_size=16, model="micro"), "you changed model too"),
    "a batch between": (lambda recipe: recipe.replace(batch_size=20), "got 20; go by factors of 4: 4, 16, 64, 256"),
    "a batch that is none": (lambda recipe: recipe.replace(batch_size=0), "raised InputError: batch_size: got 0"),
    "a slip": (lambda recipe: recipe.batchsize, "raised AttributeError"),
}


@pytest.mark.parametrize("name", WITHOUT_TRAINING)
def test_what_needs_no_training_is_told_without(name):
    answer, says = WITHOUT_TRAINING[name]
    said = verdict(answer, no_training)
    assert said.startswith("not yet: ") and says in said


WITH_TRAINING = {
    "the wrong way": (256, "the largest logit is 4, not above 100; the rate is the same, the steps are fewer"),
    "too far": (4, "it passes 100 there, but it does so at batch 16 already"),
    "right": (16, "right"),
}


@pytest.mark.parametrize("name", WITH_TRAINING)
def test_the_run_decides_the_rest(name):
    batch, says = WITH_TRAINING[name]
    assert says in verdict(lambda recipe: recipe.replace(batch_size=batch), like_the_model)


@pytest.mark.parametrize("peak", [99.9, 100.0, math.nan])
def test_what_does_not_exceed_100_has_not_passed_it(peak):
    assert "not above 100" in verdict(lambda recipe: recipe.replace(batch_size=16), lambda recipe: peak)


def test_the_messages_differ():
    said = [verdict(answer, no_training) for answer, _ in WITHOUT_TRAINING.values()]
    said += [verdict(lambda r, b=b: r.replace(batch_size=b), like_the_model) for b, _ in WITH_TRAINING.values()]
    assert len(set(said)) == len(said)


def test_the_recorded_runs_are_of_the_same_recipe_at_the_small_batch():
    found = {run.recipe.optimizer: run for run in runs.read_many(data_dir() / "runs" / "start")}
    assert set(found) == {"AdamW", "LAMB", "MERIT"}
    sha256 = text.load("shakespeare").sha256
    for name, run in found.items():
        large = Recipe.named("start", optimizer=name)
        assert run.complete and run.header["text"]["sha256"] == sha256
        expected = large.replace(batch_size=4, lr=run.recipe.lr, device="cpu", probe_every=32)
        assert run.recipe == expected and large.n_steps * 16 == run.recipe.n_steps
