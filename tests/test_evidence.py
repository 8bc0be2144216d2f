"""The ledger: the rules themselves, on made-up numbers; and that it follows from the recorded runs alone."""

import json
import math
from pathlib import Path

import pytest
from helpers import needs_compiler

from merit_lab import evidence, one_step
from merit_lab.errors import InputError
from merit_lab.evidence import CANNOT, FAILS, HOLDS, PART, Check, Ledger, Point, Sweeps, compare, order, verdict

ROOT = Path(__file__).resolve().parent.parent
CLAIMS = json.loads((ROOT / "data" / "claims.json").read_text())
RECORDED = ROOT / "data" / "runs" / "sweeps"


# -- the rules -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "loss", "found"),
    [
        ([2.0, 2.01, 1.99], [2.5, 2.51, 2.49], True, "lower"),
        ([2.5, 2.51, 2.49], [2.0, 2.01, 1.99], True, "higher"),
        ([2.0, 2.3, 1.7], [2.2, 2.5, 1.9], True, "level"),  # .2 apart, but two standard errors are .49
        ([2.000, 2.000, 2.000], [2.009, 2.009, 2.009], True, "level"),  # no spread, but under .01 nats
        ([2.000, 2.000, 2.000], [2.011, 2.011, 2.011], True, "lower"),
        ([100.0, 100.0, 100.0], [104.0, 104.0, 104.0], False, "level"),  # under 5 %
        ([100.0, 100.0, 100.0], [110.0, 110.0, 110.0], False, "lower"),
    ],
)
def test_order(a, b, loss, found):
    assert order(a, b, loss=loss) == found
    assert order(b, a, loss=loss) == {"lower": "higher", "higher": "lower", "level": "level"}[found]


def row(loss, seed=1, **more):
    return {"val_loss": loss, "seed": seed, "lr": 0.01, "stage": "report", **more}


def point(name, *losses):
    return Point(name, [row(loss, seed) for seed, loss in enumerate(losses, 1)], 7)


def test_a_seed_that_diverged_counts_as_guessing_and_is_said():
    lost = point("AdamW", 2.0, None, 2.1)
    assert lost.values("val_loss") == [2.0, math.log(78), 2.1]
    assert lost.say() == "AdamW 2.050 ± 0.071, 1 diverged"
    assert point("AdamW", None, None, None).say() == "AdamW all 3 diverged"


def test_fewer_than_three_seeds_give_no_verdict():
    check = compare(point("MERIT", 2.0, 2.0), point("LAMB", 3.0, 3.0, 3.0), "lower")
    assert check.as_paper is None and "fewer than 3 seeds" in check.words
    assert verdict([check, Check("", True)]) == CANNOT


@pytest.mark.parametrize(
    ("good", "found"),
    [([True, True], HOLDS), ([True, False], PART), ([False, False], FAILS), ([], CANNOT), ([True, None], CANNOT)],
)
def test_verdict(good, found):
    assert verdict([Check("", value) for value in good]) == found


def test_not_lower_is_level_or_higher():
    low, high = point("a", 2.0, 2.0, 2.0), point("b", 3.0, 3.0, 3.0)
    assert compare(high, low, "not lower").as_paper and compare(low, low, "not lower").as_paper
    assert not compare(low, high, "not lower").as_paper


# -- made-up sweeps --------------------------------------------------------------------------------------------


def made_up(folder, losses, logits=None):
    """batch_nano and batch_micro with these losses: optimizer -> batch -> mean, seeds .001 apart."""
    for name, batches in (("batch_nano", (8, 16, 64, 256)), ("batch_micro", (64, 256))):
        rows = []
        for optimizer, by_batch in losses.items():
            for batch in batches:
                for seed in (1, 2, 3):
                    peak = (logits or {}).get(optimizer, 5.0)
                    rows.append({
                        "run": f"{optimizer}-{batch}-{seed}", "stage": "report", "cell": {"optimizer": optimizer},
                        "optimizer": optimizer, "lr": 0.01, "batch_size": batch, "seed": seed, "diverged": False,
                        "val_loss": by_batch[batch] + seed / 1000, "train_loss": by_batch[batch], "steps": 100,
                        "peak_logit": peak, "peak_logit_layers": [peak, peak / 2, peak / 3, peak / 4],
                        "clipped_layers": [0.0, 0.02, 0.0, 0.0], "row_similarity": 0.1, "column_similarity": 0.1,
                        "head_similarity": 0.05, "largest_weight": 0.5, "top_eigenvalue": 10.0, "trace": 100.0,
                        "bound_over_logit": 3.0, "tokens": 1000, "recipe": {"model": name[6:], "qk_clip": None},
                    })  # fmt: skip
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
        (folder / f"{name}.curves.jsonl").write_text("")
    return Ledger(Sweeps(folder))


RISING = {"AdamW": {8: 2.0, 16: 2.1, 64: 2.5, 256: 3.0}, "LAMB": {8: 2.1, 16: 2.1, 64: 2.3, 256: 2.8}}
RISING["MERIT"] = {8: 2.1, 16: 2.1, 64: 2.2, 256: 2.5}


def checked(row):
    _, checks, _ = row
    return verdict(checks)


def test_a_paper_like_world_gets_holds_and_its_opposite_does_not(tmp_path):
    like = made_up(tmp_path, RISING)
    assert checked(like.main_val_loss()) == HOLDS
    assert checked(like.batch_sweep_small()) == HOLDS
    assert checked(like.batch_sweep_medium()) == PART  # MERIT is lower at the smallest of its batches, 64, too
    unlike = made_up(tmp_path, {"AdamW": RISING["MERIT"], "LAMB": RISING["LAMB"], "MERIT": RISING["AdamW"]})
    assert checked(unlike.main_val_loss()) == FAILS
    swapped = made_up(tmp_path, {"AdamW": RISING["AdamW"], "LAMB": RISING["MERIT"], "MERIT": RISING["LAMB"]})
    assert checked(swapped.main_val_loss()) == PART  # LAMB is lower than AdamW, MERIT not lower than LAMB


def test_logits_are_compared_where_there_is_something_to_compare(tmp_path):
    quiet = made_up(tmp_path, RISING, {"AdamW": 20.0, "LAMB": 15.0, "MERIT": 10.0})
    _, checks, why = quiet.layers_mal_over_100()
    assert checks == [] and "no layer passes 100 (the highest peak is 20" in why
    loud = made_up(tmp_path, RISING, {"AdamW": 900.0, "LAMB": 150.0, "MERIT": 120.0})
    assert checked(loud.layers_mal_over_100()) == HOLDS
    assert checked(loud.peak_mal()) == PART  # MERIT's is the lowest, but nothing rises with the batch
    assert checked(loud.peak_mal_layer()) == PART  # every peak is in layer 1
    assert checked(loud.clip_ratio()) == HOLDS


def test_answers_say_what_the_numbers_say(tmp_path):
    like = made_up(tmp_path, RISING)
    assert like.largest_batch()[2] == (
        "Level with their own best: nano: AdamW up to 8; nano: MERIT up to 16; micro: AdamW up to 64; "
        "micro: MERIT up to 64 sequences, of those tried."
    )
    assert "differ by 0.003 nats" in like.generalization()[2] or "differ by 0.002 nats" in like.generalization()[2]
    assert like.heads()[2].startswith("Whole heads explain 50 %")


def test_what_was_not_run_has_no_verdict(tmp_path):
    ledger = made_up(tmp_path, RISING)
    entries = {entry.id: entry for entry in ledger.entries(CLAIMS)}
    assert entries["norm-ablation"].verdict == CANNOT and "fewer than 3 seeds" in entries["norm-ablation"].why
    assert entries["objection-1"].verdict == CANNOT


def test_an_empty_folder_is_an_error(tmp_path):
    with pytest.raises(InputError, match="make them with `make sweep`"):
        Sweeps(tmp_path)


# -- what is recorded ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def entries():
    return Ledger(Sweeps(RECORDED)).entries(CLAIMS)


def test_every_claim_and_every_objection_has_its_row_with_a_verdict_or_a_reason(entries):
    assert len(entries) == 28 + 10 == len(CLAIMS["claims"]) + len(CLAIMS["objections"])
    assert [entry.id for entry in entries[:28]] == [claim["id"] for claim in CLAIMS["claims"]]
    for entry in entries:
        assert entry.verdict in (HOLDS, PART, FAILS, CANNOT, evidence.ANSWER)
        if entry.verdict in (HOLDS, PART, FAILS):
            assert entry.checks and entry.scale
        else:
            assert entry.why
        assert "not run" not in entry.why and "fewer than" not in entry.why


def test_no_verdict_stands_on_fewer_than_three_seeds():
    for table in Sweeps(RECORDED).tables.values():
        cells = {}
        for r in table:
            if r.get("stage") == "report":
                cells.setdefault(json.dumps(r["cell"]), set()).add(r["seed"])
        assert all(len(seeds) >= 3 for seeds in cells.values())


def test_every_search_has_five_rates_or_more_and_its_best_inside():
    for found in evidence.points(Sweeps(RECORDED)):
        if found["rates_searched"]:
            assert 5 <= found["rates_searched"] <= 11
            assert found["best_at_edge"] is False, found


def test_the_committed_evidence_follows_from_the_recorded_runs(tmp_path):
    assert evidence.main(["--out", str(tmp_path)]) == 0
    for made in sorted(tmp_path.iterdir()):
        if made.suffix == ".png":  # its fonts are the machine's
            assert made.stat().st_size > 10_000
            continue
        assert made.read_text() == (ROOT / "data" / "evidence" / made.name).read_text(), made.name
    assert {p.name for p in (ROOT / "data" / "evidence").iterdir()} == {p.name for p in tmp_path.iterdir()}


def test_the_readme_holds_the_ledger():
    readme = (ROOT / "README.md").read_text()
    assert (ROOT / "data" / "evidence" / "ledger.md").read_text().strip() in readme
    entries_ = json.loads((ROOT / "data" / "evidence" / "ledger.json").read_text())
    assert len(entries_) == 38


def test_qk_clip_is_set_by_the_protocols_rule():
    sweeps = Sweeps(RECORDED)
    for r in sweeps.rows("forward"):
        if r["recipe"]["qk_clip"] is not None:
            merit = sweeps.point("batch_nano", "MERIT", r["batch_size"]).values("peak_logit")
            assert r["recipe"]["qk_clip"] == pytest.approx(sum(merit) / len(merit), rel=0.02)


# -- one step --------------------------------------------------------------------------------------------------


def test_merit_keeps_two_states_and_the_readable_step_needs_full_size_temporaries():
    states, temporaries = one_step.cost_a_weight((64, 48), seed=1)
    assert states == 2
    assert 8 < temporaries < 80


@needs_compiler
def test_the_fused_step_needs_none():
    states, temporaries = one_step.cost_a_weight((512, 512), seed=1, fused=True)
    assert states == 2 and temporaries < 1


def test_one_step_of_merit_stays_within_its_bound():
    growth = one_step.max_norm_growth(seed=1, steps=6)
    assert 0 < growth <= 1 + 1e-3


def test_the_logit_moves_in_proportion_to_a_small_rate():
    assert one_step.logit_change_ratio("AdamW", seed=1) == pytest.approx(1, abs=0.05)
