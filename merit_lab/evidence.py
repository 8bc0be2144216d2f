"""The ledger: each claim of the paper, each objection of its reviewers, and what the recorded sweeps say to it.

    python -m merit_lab.evidence        (make evidence)

reads data/runs/sweeps, applies the rules of data/protocol.md, and writes the ledger, the points and the figures to
data/evidence, and the ledger's table into the README. No run is made, and nothing is needed but the recorded files.
"""

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from . import files, noisy_quadratic, readme, sweep
from .bench.rows import read as read_bench
from .errors import InputError

HOLDS, PART, FAILS, CANNOT = "holds", "holds in part", "does not hold here", "cannot be tested at this scale"
ANSWER = "answer"
GUESSING = math.log(78)  # nats: what a seed that diverged counts as
NATS, SHARE = 0.01, 0.05  # differences below these are level, whatever the spread (data/protocol.md)
SEEDS = 3
LARGE = 256
LEAST_LARGE = 64  # the smallest batch that the protocol calls large
THREE = ("AdamW", "LAMB", "MERIT")


# -- numbers ---------------------------------------------------------------------------------------------------


def mean_and_spread(values: Iterable[float | None], digits: int = 3) -> str:
    """Mean ± standard deviation over seeds; those that diverged (None) are counted, not averaged."""
    values = list(values)
    there = [value for value in values if value is not None and math.isfinite(value)]
    gone = f", {len(values) - len(there)} diverged" if len(there) < len(values) else ""
    if not there:
        return f"all {len(values)} diverged" if values else "not run"
    spread = f" ± {_say(stdev(there), digits)}" if len(there) > 1 else ""
    return f"{_say(mean(there), digits)}{spread}{gone}"


def _say(value: float, digits: int = 3) -> str:
    """Three decimals below 10, otherwise three significant digits."""
    return f"{value:.{digits}f}" if abs(value) < 10 else f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def order(a: list[float], b: list[float], *, loss: bool = True) -> str:
    """"lower", "higher" or "level": a beside b, by the rule of data/protocol.md.

    Means must differ by more than two standard errors of their difference, and by more than .01 nats (loss) or 5 %.
    """
    difference = mean(a) - mean(b)
    error = math.sqrt(_variance(a) / len(a) + _variance(b) / len(b))
    least = NATS if loss else SHARE * max(abs(mean(a)), abs(mean(b)))
    if abs(difference) <= max(2 * error, least):
        return "level"
    return "lower" if difference < 0 else "higher"


def _variance(values: list[float]) -> float:
    return stdev(values) ** 2 if len(values) > 1 else 0.0


class Point(NamedTuple):
    """One point of a sweep: its reported runs, one a seed, and how many learning rates were searched for it."""

    name: str  # the variant
    rows: list[dict[str, Any]]
    searched: int

    def __bool__(self):
        return len(self.rows) >= SEEDS

    def values(self, column: str | Callable[[dict], float]) -> list[float]:
        """A column of its rows. A run that diverged has the loss of guessing, and no other end."""
        get = column if callable(column) else lambda row: row[column]
        values = [get(row) for row in self.rows]
        if column == "val_loss":
            return [GUESSING if value is None else value for value in values]
        return [value for value in values if value is not None]

    @property
    def lr(self) -> float:
        """The best rate of its search."""
        return self.rows[0]["lr"]

    def say(self, column="val_loss") -> str:
        """Name, mean and spread."""
        raw = [row["val_loss"] for row in self.rows] if column == "val_loss" else self.values(column)
        return f"{self.name} {mean_and_spread(raw)}"


def variant(row: dict[str, Any]) -> str:
    """What was trained, in words: the optimizer and what is not the paper's default."""
    recipe = row["recipe"]
    model = recipe["model"] if isinstance(recipe["model"], dict) else {}
    parts = [row["optimizer"]]
    parts += ["QK-norm"] * bool(model.get("qk_norm")) + ["fused QKV"] * bool(model.get("fused_qkv"))
    if recipe.get("qk_clip") is not None:
        parts.append("QK-clip")
    return " + ".join(parts)


class Sweeps:
    """The recorded sweeps of a folder.

    Args:
        folder: where NAME.jsonl and NAME.curves.jsonl are.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        paths = sorted(p for p in self.folder.glob("*.jsonl") if not p.name.endswith(".curves.jsonl"))
        if not paths:
            raise InputError(f"evidence: no sweep's table (NAME.jsonl) in {folder}; make them with `make sweep`")
        self.tables = {path.stem: sweep.read_rows(path) for path in paths}
        self._curves: dict[str, dict[str, list[dict]]] = {}

    def rows(self, name: str) -> list[dict[str, Any]]:
        """All rows of a sweep; none if it has not been run."""
        return self.tables.get(name, [])

    def point(self, name: str, what: str, batch_size: int | None = None, **fields) -> Point:
        """The point of a sweep: its variant (as `variant` names it), batch size, and any column or recipe field."""
        def wanted(row):
            return (
                variant(row) == what
                and batch_size in (None, row["batch_size"])
                and all(row["recipe"].get(k, row.get(k)) == v for k, v in fields.items())
            )

        rows = [row for row in self.rows(name) if wanted(row)]
        return Point(what, [r for r in rows if r["stage"] == "report"], sum(r["stage"] == "search" for r in rows))

    def batches(self, name: str) -> list[int]:
        """The batch sizes of a sweep at which all three optimizers have reported runs, rising."""
        seen = {(row["batch_size"], variant(row)) for row in self.rows(name) if row["stage"] == "report"}
        return sorted({batch for batch, _ in seen if all((batch, what) in seen for what in THREE)})

    def curve(self, name: str, run: str) -> list[dict[str, Any]]:
        """The probed steps of a reported run."""
        if name not in self._curves:
            found: dict[str, list[dict]] = {}
            for point in sweep.read_rows(self.folder / f"{name}.curves.jsonl"):
                found.setdefault(point["run"], []).append(point)
            self._curves[name] = found
        return self._curves[name].get(run, [])


# -- verdicts --------------------------------------------------------------------------------------------------


class Check(NamedTuple):
    """One comparison of a claim: what was found, in words with numbers, and whether it is as the paper says."""

    words: str
    as_paper: bool | None  # None: it could not be made


class Entry(NamedTuple):
    """A row of the ledger."""

    id: str
    text: str  # what the paper says, or the objection
    paper: str  # the paper's figures
    scale: str  # where it was tried here
    checks: list[Check]
    verdict: str
    why: str  # the reason, where there is no verdict; the answer, to an objection

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return self._asdict() | {"checks": [check._asdict() for check in self.checks]}


def verdict(checks: list[Check]) -> str:
    """holds: all are as the paper says; in part: some; does not hold here: none."""
    if not checks or any(check.as_paper is None for check in checks):
        return CANNOT
    good = sum(check.as_paper for check in checks)
    return HOLDS if good == len(checks) else PART if good else FAILS


def compare(a: Point, b: Point, expected: str, column="val_loss", where: str = "") -> Check:
    """A check that a is "lower", "higher" or "level" beside b; "not lower" is either of the others."""
    where = f"{where}: " if where else ""
    if not a or not b:
        return Check(f"{where}{a.name} and {b.name}: fewer than {SEEDS} seeds", None)
    x, y = a.values(column), b.values(column)
    if len(x) < SEEDS or len(y) < SEEDS:
        return Check(f"{where}{a.say(column)}, {b.say(column)}: too few runs have a value", None)
    found = order(x, y, loss=column == "val_loss")
    good = found != expected[4:] if expected.startswith("not ") else found == expected
    return Check(f"{where}{a.say(column)}, {b.say(column)}: {found}", good)


class Ledger:
    """Applies the rules to the sweeps. Each method named after a claim (its dashes as underscores) gives its row."""

    def __init__(self, sweeps: Sweeps):
        self.sweeps = sweeps

    def entries(self, claims: dict[str, Any]) -> list[Entry]:
        """A row a claim, then a row an objection."""
        rows = []
        for claim in claims["claims"]:
            scale, checks, why = getattr(self, claim["id"].replace("-", "_"))()
            found = verdict(checks)
            if found == CANNOT and not why:
                why = "; ".join(c.words for c in checks if c.as_paper is None) or "not run"
            rows.append(Entry(claim["id"], claim["text"], _figures(claim), scale, checks, found, why))
        for number, (text, answer) in enumerate(zip(claims["objections"], self.OBJECTIONS, strict=True), 1):
            scale, checks, why = getattr(self, answer)()
            found = ANSWER if why else CANNOT
            rows.append(Entry(f"objection-{number}", text, "", scale, checks, found, why or "not run"))
        return rows

    # -- loss against batch size ---------------------------------------------------------------------------------

    def main_val_loss(self):
        checks = []
        for name, size in SIZES.items():
            adamw, lamb, merit = (self.sweeps.point(name, what, LARGE) for what in THREE)
            checks += [compare(merit, lamb, "lower", where=size), compare(lamb, adamw, "lower", where=size)]
        return f"nano and micro, batch {LARGE}", checks, ""

    def batch_sweep_small(self):
        return self._batch_sweep("batch_nano")

    def batch_sweep_medium(self):
        return self._batch_sweep("batch_micro")

    def _batch_sweep(self, name):
        batches = self.sweeps.batches(name)
        if not batches:
            return SIZES[name], [], ""
        points = {what: [self.sweeps.point(name, what, b) for b in batches] for what in THREE}
        if not all(all(row) for row in points.values()):
            return SIZES[name], [], f"fewer than {SEEDS} seeds at some batch"
        best = {what: min(row, key=lambda p: mean(p.values("val_loss"))) for what, row in points.items()}
        lost = {
            what: mean(points[what][-1].values("val_loss")) - mean(best[what].values("val_loss")) for what in THREE
        }
        said = ", ".join(f"{what} {lost[what]:.3f} (from batch {best[what].rows[0]['batch_size']})" for what in THREE)
        adamw = compare(points["AdamW"][-1], best["AdamW"], "higher")
        return f"{SIZES[name]}, batch {batches[0]} to {batches[-1]}", [
            Check(f"AdamW at batch {batches[-1]} against its best: {adamw.words}", adamw.as_paper),
            Check(f"lost from the best batch to {batches[-1]}: {said}", lost["MERIT"] < lost["AdamW"] - NATS),
            compare(points["MERIT"][0], points["AdamW"][0], "not lower", where=_smallest(batches)),
        ], ""

    def lambada_small(self):
        return "", [], "a character model of Shakespeare cannot guess LAMBADA's last words"

    lambada_medium = lambada_small

    def equal_to_small_batch(self):
        small, large = self.sweeps.point("longer", "AdamW", 16), self.sweeps.point("longer", "MERIT", 128)
        check = compare(small, large, "not lower", where="AdamW at batch 16, MERIT at batch 128")
        return "nano, 1,048,576 tokens", [check], ""

    def zero_shot(self):
        return "", [], "the tasks need a model of English at large"

    def llama(self):
        return "", [], "no Llama is trained here"

    def t5(self):
        return "", [], "no T5 is trained here"

    # -- attention logits ----------------------------------------------------------------------------------------

    def peak_mal(self):
        name, checks = "batch_micro", []
        for batch in self.sweeps.batches(name):
            adamw, lamb, merit = (self.sweeps.point(name, what, batch) for what in THREE)
            for other in (adamw, lamb):
                checks.append(compare(merit, other, "lower", "peak_logit", f"batch {batch}"))
        for what in THREE:
            small, large = self.sweeps.point(name, what, 64), self.sweeps.point(name, what, LARGE)
            check = compare(large, small, "higher", "peak_logit")
            checks.append(Check(f"batch {LARGE} against 64: {check.words}", check.as_paper))
        return "micro, each at its best learning rate", checks, ""

    def layers_mal_over_100(self):
        name, checks = "batch_micro", []
        over = {}
        for batch in self.sweeps.batches(name):
            points = [self.sweeps.point(name, what, batch) for what in THREE]
            if not all(points):
                return "micro", [], f"fewer than {SEEDS} seeds at batch {batch}"
            over[batch] = [mean(p.values(lambda row: sum(z > 100 for z in row["peak_logit_layers"]))) for p in points]
            if max(over[batch]) > 0:
                adamw, _, merit = over[batch]
                said = f"batch {batch}: layers over 100: AdamW {adamw:.1f}, MERIT {merit:.1f}"
                checks.append(Check(said, merit < adamw))
        highest = max((row["peak_logit"] for row in self.sweeps.rows(name) if row["stage"] == "report"), default=0)
        why = f"at the best learning rates no layer passes 100 (the highest peak is {_say(highest, 1)})"
        return "micro, each at its best learning rate", checks, "" if checks else why

    def peak_mal_layer(self):
        adamw, merit = (self.sweeps.point("batch_micro", what, LARGE) for what in ("AdamW", "MERIT"))
        if not adamw or not merit:
            return "micro", [], f"fewer than {SEEDS} seeds"
        layers = {p.name: p.values(lambda row: 1 + _argmax(row["peak_logit_layers"])) for p in (adamw, merit)}
        return f"micro (4 layers), batch {LARGE}", [
            Check(f"AdamW's peak is in layer {_list(layers['AdamW'])}", all(n == 1 for n in layers["AdamW"])),
            Check(f"MERIT's is in layer {_list(layers['MERIT'])}", all(n > 1 for n in layers["MERIT"])),
        ], ""

    def clip_ratio(self):
        merit = self.sweeps.point("batch_micro", "MERIT", LARGE)
        if not merit:
            return "micro", [], f"fewer than {SEEDS} seeds"
        layers = [mean(column) for column in zip(*(row["clipped_layers"] for row in merit.rows), strict=True)]
        middle = max(layers[1:-1])
        said = ", ".join(f"{100 * share:.2g} %" for share in layers)
        return f"micro, batch {LARGE}", [
            Check(f"largest share at a probed step, layers 1 to {len(layers)}: {said}", middle > 0.01),
            Check("more in a middle layer than in the first and the last", middle > max(layers[0], layers[-1])),
        ], ""

    def bound_trigger(self):
        merit = self.sweeps.point("batch_micro", "MERIT", LARGE)
        if not merit:
            return "micro", [], f"fewer than {SEEDS} seeds"
        checks = []
        for column, words in (("bound_layers", "decided by the bound"), ("clipped_layers", "clipped")):
            halves = [self._halves(row, column) for row in merit.rows]
            if not all(early and late for early, late in halves):
                return "micro", [], "the curves of these runs are missing"
            early, late = ([mean(half[i]) for half in halves] for i in (0, 1))
            said = f"elements {words}: {100 * mean(early):.3g} % early, {100 * mean(late):.3g} % late"
            checks.append(Check(said, order(late, early, loss=False) == "lower"))
        return f"micro, batch {LARGE}, first half of the steps against the second", checks, ""

    def _halves(self, row, column):
        points = self.sweeps.curve("batch_micro", row["run"])
        shares = [(p["step"] <= row["steps"] / 2, mean(p[column])) for p in points if p[column] is not None]
        return [[share for early, share in shares if early is half] for half in (True, False)]

    def stripes(self):
        adamw, merit = (self.sweeps.point("batch_micro", what, 64) for what in ("AdamW", "MERIT"))
        checks = []
        for column, words in (("row_similarity", "rows"), ("column_similarity", "columns")):
            values = merit.values(column) if merit else []
            checks.append(Check(f"{words}: MERIT {mean_and_spread(values)}", min(values) > 0.02 if values else None))
            checks.append(compare(merit, adamw, "not lower", column, words))
        return "micro, batch 64", checks, ""

    # -- the ladder and its parts --------------------------------------------------------------------------------

    def _rung(self, what):
        return self.sweeps.point("ladder", what, 64)

    def norm_ablation(self):
        rungs = [self._rung(what) for what in ("AdamW", "LAMB", "maxLAMB", "MERIT")]
        pairs = zip(rungs[1:], rungs, strict=False)
        return "nano, batch 64", [compare(upper, lower, "lower") for upper, lower in pairs], ""

    def parts_ablation(self):
        without = [self._rung(what) for what in ("+ bound", "MERIT without bound", "MERIT without element-wise")]
        without[0] = without[0]._replace(name="MERIT without clip")
        checks = [compare(self._rung("MERIT"), part, "lower") for part in without]
        if all(without):
            worst = max(without, key=lambda p: mean(p.values("val_loss")))
            checks.append(Check(f"the worst of the three is {worst.name}", worst.name == "MERIT without bound"))
        return "nano, batch 64", checks, ""

    def row_column_ablation(self):
        parts = ("MERIT row only", "MERIT column only")
        return "nano, batch 64", [compare(self._rung("MERIT"), self._rung(part), "lower") for part in parts], ""

    # -- the forward pass ----------------------------------------------------------------------------------------

    def _normed(self, what, batch):
        return self.sweeps.point("forward", f"{what} + QK-norm", batch)

    def qk_norm_small_large_batch(self):
        check = compare(self._normed("AdamW", LARGE), self.sweeps.point("batch_nano", "AdamW", LARGE), "not lower")
        return f"nano, batch {LARGE}", [check], ""

    def qk_norm_small_small_batch(self):
        check = compare(self._normed("AdamW", 16), self.sweeps.point("batch_nano", "AdamW", 16), "level")
        return "nano, batch 16", [check], ""

    def qk_norm_merit(self):
        check = compare(self._normed("MERIT", LARGE), self.sweeps.point("batch_nano", "MERIT", LARGE), "lower")
        return f"nano, batch {LARGE}", [check], ""

    # -- curvature, bounds, cost ---------------------------------------------------------------------------------

    def curvature(self):
        checks = []
        for name, size in SIZES.items():
            adamw, lamb, merit = (self.sweeps.point(name, what, LARGE) for what in THREE)
            for column, words in (("top_eigenvalue", "top eigenvalue"), ("trace", "trace")):
                for other in (adamw, lamb):
                    checks.append(compare(merit, other, "lower", column, f"{size}, {words}"))
        return f"nano and micro, batch {LARGE}", checks, ""

    def logit_bound(self):
        rows = [row for table in self.sweeps.tables.values() for row in table if row.get("stage") == "report"]
        loose = [row["bound_over_logit"] for row in rows if row.get("bound_over_logit") is not None]
        if len(loose) < SEEDS:
            return "", [], ""
        said = f"bound over true max logit in {len(loose)} runs: from {_say(min(loose), 1)} to {_say(max(loose), 1)}"
        return "every reported run, at its end", [Check(said, min(loose) >= 1)], ""

    def _one_step(self, quantity) -> list[dict]:
        return [row for row in self.sweeps.rows("one_step") if row["quantity"] == quantity]

    def logit_lr(self):
        checks = []
        for what in THREE:
            values = [row["value"] for row in self._one_step("logit_change_ratio") if row["optimizer"] == what]
            good = all(abs(value - 1) < SHARE for value in values) if len(values) >= SEEDS else None
            said = f"{what}: change over rate, at 1/8 of the rate over at 1/16: {mean_and_spread(values)}"
            checks.append(Check(said, good))
        return "nano, one step after 16", checks, ""

    def norm_bound(self):
        values = [row["value"] for row in self._one_step("max_norm_growth")]
        good = max(values) <= 1 + 1e-3 if len(values) >= SEEDS else None  # the room is for float32
        return "nano, 128 steps, every matrix", [
            Check(f"largest growth of ‖W‖_m in a step over η‖W‖_m: {mean_and_spread(values)}", good)
        ], ""

    def memory(self):
        states = [row["value"] for row in self._one_step("states_a_weight")]
        enough = len(states) >= SEEDS
        two = all(n == 2 for n in states) if enough else None
        checks = [Check(f"states a weight: {_list(sorted(set(states)))}", two)]
        for step in ("MERIT", "MERIT, fused"):
            found = [r["value"] for r in self._one_step("temporary_bytes_a_weight") if r["optimizer"] == step]
            said = f"temporary bytes a weight, {step}: {mean_and_spread(found, 2)}"
            checks.append(Check(said, max(found) < 1 if len(found) >= SEEDS else None))
        return "one step, readable and fused, three matrices", checks, ""

    def step_cost(self):
        return "", [], "the paper's seconds and TFLOPS are those of a 770 M model on its GPUs"

    def tensor_parallel(self):
        try:
            counted = read_bench("collectives")
        except FileNotFoundError:
            return "", [], "not counted: run `make bench`"
        both = {row["step"]: row for row in counted["rows"] if row["cut"] == "both cut"}
        paper, ranks = counted["paper"], both["MERIT"]["ranks"]
        # The norms of w and those of u meet by themselves; the paper counts a norm once.
        calls, numbers = ((both["MERIT"][key] - both["LAMB"][key]) / 2 for key in ("calls", "numbers"))
        packed = both["MERIT, fused"]["calls"] - both["LAMB, fused"]["calls"]
        return f"{both['MERIT']['weights']} matrices of a GPT-2 Small block, cut both ways over {ranks} ranks", [
            Check(
                f"all-reduces more than LAMB's: {2 * calls:g}, {calls:g} for w and as many for u; "
                f"the paper's {paper['calls']:g}; {packed} more where the fused step packs all norms into one message",
                calls == paper["calls"],
            ),
            Check(
                f"numbers more: {2 * numbers:,.0f}, {numbers:,.0f} for w and as many for u; "
                f"the paper's {paper['numbers']:,.0f}",
                numbers == paper["numbers"],
            ),
        ], ""

    # -- objections ----------------------------------------------------------------------------------------------

    OBJECTIONS = (
        "cause_or_companion",
        "one_step_many_steps",
        "inherent_loss",
        "generalization",
        "seeds",
        "largest_batch",
        "forward_pass",
        "heads",
        "whole_curves",
        "small_batches_more_tokens",
    )

    def cause_or_companion(self):
        checks, answers = [], []
        for batch in (64, LARGE):
            adamw, merit = (self.sweeps.point("batch_nano", what, batch) for what in ("AdamW", "MERIT"))
            before = compare(adamw, merit, "higher", "peak_logit", f"batch {batch}, peak logit without a remedy")
            words = "above MERIT's" if before.as_paper else "not above MERIT's"
            answers.append(f"batch {batch}: AdamW's logit at its best rate is {words}")
            for how in ("QK-clip", "QK-norm"):
                remedy = self.sweeps.point("forward", f"AdamW + {how}", batch)
                if not (adamw and merit and remedy):
                    return "nano", [], ""
                logit = compare(remedy, merit, "not higher", "peak_logit", f"batch {batch}, peak logit")
                loss = compare(remedy, merit, "not higher", where=f"batch {batch}, val loss")
                own = compare(remedy, adamw, "lower", where=f"batch {batch}, val loss")
                checks += [logit, loss, own]
                down = "down to MERIT's" if logit.as_paper else "above MERIT's"
                better = "lower than AdamW's" if own.as_paper else "not lower than AdamW's"
                answers.append(f"with {how} logit {down}, loss {better}" + ", and at MERIT's" * loss.as_paper)
        followed = sum(checks[i + 1].as_paper for i in range(0, len(checks), 3))
        head = {0: "A companion here", len(checks) // 3: "A cause, by this test"}.get(followed, "Mixed")
        return "nano, batch 64 and 256", checks, f"{head}. {'; '.join(answers)}."

    def one_step_many_steps(self):
        checks = []
        for name, size in SIZES.items():
            adamw, lamb, merit = (self.sweeps.point(name, what, LARGE) for what in THREE)
            for other in (adamw, lamb):
                checks.append(compare(merit, other, "lower", "largest_weight", f"{size}, largest |w| of W_Q and W_K"))
        if any(check.as_paper is None for check in checks):
            return "nano and micro", checks, ""
        good = sum(check.as_paper for check in checks)
        return f"nano and micro, batch {LARGE}, at the end", checks, (
            f"MERIT ends with a smaller largest query or key weight in {good} of {len(checks)} comparisons."
        )

    def inherent_loss(self):
        noise = [self.sweeps.point("noise", what) for what in ("AdamW", "MERIT")]
        batches = self.sweeps.batches("batch_nano")
        if not all(noise) or not batches:
            return "nano", [], ""
        checks = [
            Check(f"noise scale along a run at batch 16, sequences: {p.say('noise_scale')}", None) for p in noise
        ]
        lost = []
        for what in THREE:
            losses = [mean(self.sweeps.point("batch_nano", what, batch).values("val_loss")) for batch in batches]
            lost.append(f"{what} {losses[-1] - min(losses):.2f}")
        scale = mean(noise[0].values("noise_scale"))
        rise = noisy_quadratic_rise(batches, 524_288 // 64)
        return "nano", checks, (
            f"The gradient noise scale is about {_say(scale, 0)} sequences: batches far above it are large. A noisy "
            f"quadratic with as many sequences, preconditioned as Adam's model is, ends {rise:.1f} times as high at "
            f"batch {batches[-1]} as at its best batch, whatever the rate; a perfect preconditioner would lose "
            f"nothing. Measured, from the best batch to {batches[-1]}: {', '.join(lost)} nats lost."
        )

    def generalization(self):
        gaps, checks = {}, []
        for name, size in SIZES.items():
            for what in THREE:
                point = self.sweeps.point(name, what, LARGE)
                gap = point.values(lambda row: row["val_loss"] - row["train_loss"] if row["train_loss"] else None)
                if len(gap) < SEEDS:
                    return "nano and micro", [], ""
                gaps[name, what] = gap
                checks.append(Check(f"{size}, {what}: val minus train {mean_and_spread(gap)}", None))
        widest = max(abs(mean(gap)) for gap in gaps.values())
        return f"nano and micro, batch {LARGE}, train and val loss of the same runs", checks, (
            f"Not generalization: val and train loss differ by {widest:.3f} nats at most. The differences between "
            "optimizers are in both alike; hardly any text is seen twice."
        )

    def seeds(self):
        checks, least = [], math.inf
        for name, size in SIZES.items():
            for batch in self.sweeps.batches(name):
                adamw, merit = (self.sweeps.point(name, what, batch).values("val_loss") for what in ("AdamW", "MERIT"))
                if min(len(adamw), len(merit)) < SEEDS:
                    return "nano and micro", [], ""
                error = math.sqrt(_variance(adamw) / len(adamw) + _variance(merit) / len(merit))
                gain = mean(adamw) - mean(merit)
                said = f"{size}, batch {batch}: AdamW minus MERIT {gain:+.3f} nats, {gain / error:+.1f} standard errors"
                checks.append(Check(said, None))
                if batch >= 64:
                    least = min(least, gain / error)
        return "nano and micro, three seeds", checks, (
            f"At batch 64 and above MERIT's gain over AdamW is {least:+.1f} standard errors at the least."
            if least > 2
            else f"Not everywhere: at batch 64 and above the smallest is {least:+.1f} standard errors."
        )

    def largest_batch(self):
        words, checks = [], []
        for name, size in SIZES.items():
            for what in ("AdamW", "MERIT"):
                points = {b: self.sweeps.point(name, what, b) for b in self.sweeps.batches(name)}
                if not points or not all(points.values()):
                    return "nano and micro", [], ""
                best = min(points.values(), key=lambda p: mean(p.values("val_loss")))
                least = best.values("val_loss")
                level = [b for b, p in points.items() if order(p.values("val_loss"), least) != "higher"]
                words.append(f"{size}: {what} up to {max(level)}")
                checks += [Check(f"{size}, batch {b}: {p.say()}", None) for b, p in points.items()]
        return "nano and micro", checks, f"Level with their own best: {'; '.join(words)} sequences, of those tried."

    def forward_pass(self):
        checks, words = [], []
        for batch in (64, LARGE):
            adamw, merit = self._normed("AdamW", batch), self.sweeps.point("batch_nano", "MERIT", batch)
            if not adamw or not merit:
                return "nano", [], ""
            check = compare(adamw, merit, "not higher", where=f"batch {batch}")
            checks += [check, compare(self._normed("MERIT", batch), merit, "lower", where=f"batch {batch}")]
            does = "does" if check.as_paper else "does not do"
            words.append(f"at batch {batch} AdamW with QK-norm {does} as well as MERIT")
        return "nano, batch 64 and 256, each searched", checks, f"{words[0][0].upper()}{words[0][1:]}; {words[1]}."

    def heads(self):
        merit = self.sweeps.point("batch_micro", "MERIT", 64)
        if not merit:
            return "micro", [], ""
        rows, heads = (mean(merit.values(column)) for column in ("row_similarity", "head_similarity"))
        said = f"W_Q and W_K: {merit.say('row_similarity')} within rows, of which {heads:.3f} between whole heads"
        share = max(0.0, heads / rows) if rows > 0 else 0.0
        return "micro, batch 64", [Check(said, None)], (
            f"Whole heads explain {100 * share:.0f} % of the rows' similarity at this scale. Whether the columns are "
            "outlier dimensions: notebook 07."
        )

    def whole_curves(self):
        flips = total = 0
        for name in SIZES:
            for batch in self.sweeps.batches(name):
                for seed in {row["seed"] for row in self.sweeps.rows(name) if row["stage"] == "report"}:
                    ranks = self._ranks(name, batch, seed)
                    if ranks:
                        total += 1
                        flips += ranks[0] != ranks[1]
        if not total:
            return "nano and micro", [], ""
        return "nano and micro, every batch and seed", [], (
            f"In {flips} of {total} cases the order of the three at half of the tokens is not the order at the end. "
            "All curves are shown whole."
        )

    def _ranks(self, name, batch, seed):
        half, end = {}, {}
        for what in THREE:
            rows = [r for r in self.sweeps.point(name, what, batch).rows if r["seed"] == seed]
            curve = [point for row in rows for point in self.sweeps.curve(name, row["run"])]
            losses = [(p["tokens"], p["val_loss"]) for p in curve if p["val_loss"]]
            if not losses or rows[0]["diverged"]:
                return None
            half[what] = min(losses, key=lambda pair: abs(pair[0] - rows[0]["tokens"] / 2))[1]
            end[what] = losses[-1][1]
        return [sorted(losses, key=losses.get) for losses in (half, end)]

    def small_batches_more_tokens(self):
        checks = []
        for name, size in SIZES.items():
            batch = self.sweeps.batches(name)[:1]
            if batch:
                adamw, merit = (self.sweeps.point(name, what, batch[0]) for what in ("AdamW", "MERIT"))
                checks.append(compare(merit, adamw, "not lower", where=f"{size}, {_smallest(batch)}"))
        adamw, merit = (self.sweeps.point("longer", what, 128) for what in ("AdamW", "MERIT"))
        checks.append(compare(merit, adamw, "lower", where="nano, twice the tokens, batch 128"))
        if any(check.as_paper is None for check in checks):
            return "nano and micro", checks, ""
        gain = mean(adamw.values("val_loss")) - mean(merit.values("val_loss"))
        small = "not better" if all(check.as_paper for check in checks[:-1]) else "better in at least one size"
        return "nano and micro", checks, (
            f"At the smallest batch MERIT is {small} than AdamW. With twice the tokens, at batch 128, its gain is "
            f"{gain:+.3f} nats. Many more tokens were not tried."
        )


def _smallest(batches) -> str:
    """The smallest batch of a sweep in words; where the protocol calls it large, that is said."""
    return f"batch {batches[0]}" + (" (no small one)" if batches[0] >= LEAST_LARGE else "")


SIZES = {"batch_nano": "nano", "batch_micro": "micro"}


def _argmax(values: list[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)


def _list(values: Iterable) -> str:
    return ", ".join(f"{value:g}" for value in values)


def _figures(claim: dict[str, Any]) -> str:
    """The paper's figures of a claim, in a line."""
    said = "; ".join(
        f"{name} {' / '.join('–' if v is None else f'{v:g}' for v in values)}"
        for name, values in claim["values"].items()
    )
    columns = " / ".join(f"{column:g}" if isinstance(column, int | float) else column for column in claim["columns"])
    return f"{said} ({columns})" if said else ""


# -- tables ----------------------------------------------------------------------------------------------------


def points(sweeps: Sweeps) -> list[dict[str, Any]]:
    """Every point of every sweep: a row with its cell, best rate, number of rates searched, and means over seeds."""
    found = []
    for name, table in sweeps.tables.items():
        cells: dict[str, list[dict]] = {}
        for row in table:
            if "stage" in row:
                cells.setdefault(json.dumps(row["cell"]), []).append(row)
        for rows in cells.values():
            reported = [row for row in rows if row["stage"] == "report"]
            if not reported:
                continue
            point = Point(variant(reported[0]), reported, sum(row["stage"] == "search" for row in rows))
            rates = sorted({row["lr"] for row in rows if row["stage"] == "search"})
            losses = point.values("val_loss")
            found.append({
                "sweep": name,
                "variant": point.name,
                "cell": reported[0]["cell"],
                "batch_size": reported[0]["batch_size"],
                "lr": point.lr,
                "rates_searched": len(rates),
                "best_at_edge": point.lr in (rates[0], rates[-1]) if rates else None,
                "seeds": len(reported),
                "diverged": sum(row["diverged"] for row in reported),
                "val_loss": round(mean(losses), 4),
                "val_loss_sd": round(stdev(losses), 4) if len(losses) > 1 else None,
                "peak_logit": round(mean(point.values("peak_logit")), 2),
            })  # fmt: skip
    return found


def noisy_quadratic_rise(batches: list[int], sequences: int) -> float:
    """By what factor the best loss of a noisy quadratic rises from its best batch to the largest, at a fixed budget.

    Preconditioned with h^.5, as Zhang et al. 2019 model Adam; the best rate of a fine grid at every batch.
    """
    losses = [noisy_quadratic.best_loss(sequences, batch, precondition=0.5).loss for batch in batches]
    return losses[-1] / min(losses)


def markdown(entries: list[Entry]) -> str:
    """The ledger as Markdown: how many claims came out how, the claims, the objections."""
    rows = [f"{summary(entries)}.", "", "| the paper says | tried here | found | verdict |", "|---|---|---|---|"]
    for entry in entries:
        if entry.verdict != ANSWER and not entry.id.startswith("objection"):
            paper = f" {entry.paper}." if entry.paper else ""
            found = "<br>".join(check.words for check in entry.checks) if entry.verdict != CANNOT else ""
            verdict_ = f"**{entry.verdict}**" + (f": {entry.why}" if entry.why else "")
            rows.append("| " + " | ".join(map(_cell, (f"{entry.text}.{paper}", entry.scale, found, verdict_))) + " |")
    rows += ["", "| the reviewers ask | tried here | answer |", "|---|---|---|"]
    for entry in entries:
        if entry.id.startswith("objection"):
            rows.append(f"| {_cell(entry.text)} | {_cell(entry.scale)} | {_cell(entry.why)} |")
    return "\n".join(rows)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def summary(entries: list[Entry]) -> str:
    """How many claims came out how."""
    count = Counter(entry.verdict for entry in entries if not entry.id.startswith("objection"))
    words = {HOLDS: "hold", PART: "hold in part", FAILS: "do not hold here", CANNOT: "cannot be tested at this scale"}
    return f"Of {count.total()} claims: " + ", ".join(f"{count[found]} {said}" for found, said in words.items())


def in_readme(text: str, entries: list[Entry]) -> str:
    """The README with the ledger between its marks."""
    return readme.replaced(text, "ledger", markdown(entries))


def draw(folder: Path, claims: dict[str, Any]) -> dict[str, Any]:
    """The figures of the evidence: name -> matplotlib Figure.

    Args:
        folder: the recorded sweeps.
    """
    from . import figures
    from .figures.evidence import batch_curves

    def runs(name, stage="report"):
        found = sweep.read_runs(folder / f"{name}.jsonl", stage)
        return [(variant(run.header["row"]), run) for run in found]

    paper = {claim["id"]: claim for claim in claims["claims"]}
    drawn = {}
    sizes = {size: runs(name) for name, size in SIZES.items() if (folder / f"{name}.jsonl").is_file()}
    if sizes:
        drawn["batch"] = batch_curves(sizes, (paper["batch-sweep-small"], paper["peak-mal"]))
    if (folder / "ladder.jsonl").is_file():
        drawn["ladder"] = figures.ladder(runs("ladder"))
        drawn["rates"] = figures.sweep_lr(runs("batch_nano", "search"), loss_to=GUESSING)
    return drawn


def main(arguments: list[str] | None = None) -> int:
    """Write the ledger, the points and the figures."""
    parser = argparse.ArgumentParser(prog="python -m merit_lab.evidence", description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, default=files.data_dir() / "runs" / "sweeps", help="recorded sweeps")
    parser.add_argument("--out", type=Path, default=files.data_dir() / "evidence", help="where the ledger goes")
    chosen = parser.parse_args(arguments)
    sweeps = Sweeps(chosen.runs)
    claims = json.loads((files.data_dir() / "claims.json").read_text(encoding="utf-8"))
    entries = Ledger(sweeps).entries(claims)
    for name, table in (("ledger", [entry.to_dict() for entry in entries]), ("points", points(sweeps))):
        files.write_whole(chosen.out / f"{name}.json", json.dumps(table, indent=1, ensure_ascii=False) + "\n")
        print(f"written: {chosen.out / name}.json")
    files.write_whole(chosen.out / "ledger.md", markdown(entries) + "\n")
    from . import figures

    for name, figure in draw(chosen.runs, claims).items():
        files.write_whole(chosen.out / f"{name}.png", figures.png(figure))
        print(f"written: {chosen.out / name}.png")
    root = files.repo_root()
    if root and chosen.out == parser.get_default("out"):  # what was made elsewhere is not the project's
        readme = (root / "README.md").read_text(encoding="utf-8")
        files.write_whole(root / "README.md", in_readme(readme, entries))
        print("written: README.md, its table of claims")
    print(f"{summary(entries)}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
