"""Training as a generator: one optimizer step an iteration, one StepRecord a step.

    for record in train(Recipe.named("tiny", optimizer="MERIT")):
        print(record.step, record.train_loss)

Who iterates decides: not calling `next` is pause, leaving the loop is stop, `zip(train(a), train(b))` is lockstep.
The trainer knows nothing of progress bars, recorded runs or widgets.

    train(recipe, checkpoint="results/merit", checkpoint_every=25)

keeps checkpoints in that folder, and goes on from the newest one where there is one: it then yields the records that
were kept, at once, and after them the others, so that whoever iterates sees every step once. checkpoint.py has the
rest.
"""

import math
import os
import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from . import distributed, optim, probes, text
from .checkpoint import Checkpoints
from .errors import InputError
from .models import GPT2
from .optim.sharded import whole_norms
from .probes import round_
from .qk_clip import qk_clip
from .recipe import Recipe
from .record import StepRecord
from .schedule import learning_rate

PROBE_SEQUENCES = 8  # attention is measured on this many held-out sequences, the same along a run
QK_CLIP_SEQUENCES = 8  # QK-clip takes each head's largest logit over this many sequences, the step's batch's first
NOISE_SEQUENCES = 256  # the gradient noise is measured on this many training sequences, the same along a run,
NOISE_PIECE = 8  # in pieces of so many
LARGEST_MICRO_BATCH = 64
LARGEST_EVALUATION = 1 << 29  # logits held at once for a validation loss: 10 sequences of GPT-2's


def train(
    recipe: Recipe,
    corpus: text.Corpus | None = None,
    parallel: str | None = None,
    *,
    checkpoint: str | os.PathLike | None = None,
    checkpoint_every: int | None = None,
    keep: int = 2,
) -> "Training":
    """A training run of this recipe, ready to be iterated over.

    Args:
        recipe: what to train.
        corpus: the recipe's text, if it is loaded already; otherwise it is loaded here.
        parallel: "ddp" or "fsdp" among the ranks that torchrun started (see distributed.py), each of which calls this
            and iterates. None is "ddp" where there are several ranks, else one process.
        checkpoint: a folder for the checkpoints of this run alone, made as needed. The run goes on from the newest
            good one in it, bit for bit on the same machine. None: no checkpoints, and no file.
        checkpoint_every: steps between two; None: ten in a run. The last step always has one.
        keep: how many of them are kept.

    Raises:
        InputError: the folder cannot be written, or its checkpoints are damaged, or of another recipe, text or format.
            Also from the iterator, where a checkpoint cannot be written: the disk is full, the folder gone.
    """
    return Training(recipe, corpus, parallel, Checkpoints(checkpoint, checkpoint_every, keep, recipe.n_steps))


class Training(Iterator[StepRecord]):
    """An iterator of StepRecords that holds what it trains.

    Attributes:
        recipe, corpus, model, optimizer, device.
        precision: "fp32" or "bf16", what the recipe's comes to on the device.
        ranks: this process among those that train together (distributed.Ranks).
        n_steps: how many records there will be, unless the run diverges.
        last: the latest record, None before the first.
        checkpoints: the run's Checkpoints.
        resumed: the step that the run goes on from, None if it begins. Records up to there come from the checkpoint,
            while the model is that step's.
    """

    def __init__(self, recipe: Recipe, corpus: text.Corpus | None, parallel: str | None, checkpoints: Checkpoints):
        self.recipe, self.checkpoints = recipe, checkpoints
        device = pick_device(recipe.device)
        with distributed.one_at_a_time():
            self.corpus = corpus or text.load(recipe.text, block_size=recipe.block_size)
        self.ranks = distributed.join(parallel, device, recipe.batch_size)
        self.device = self.ranks.device
        self.model = build_model(recipe, self.corpus).to(self.device)
        self._called = self.ranks.take(self.model)  # the model as it is called in training
        self.optimizer = build_optimizer(recipe, self.model)
        self.n_steps = recipe.n_steps
        self.last: StepRecord | None = None
        self.precision = pick_precision(self.device, recipe.precision)
        self._autocast = autocast(self.device, recipe.precision)
        self._kept = [StepRecord.from_dict(values) for values in self.checkpoints.resume(self)]
        self.resumed = self._kept[-1].step if self._kept else None
        self._records = self._run()

    def __next__(self) -> StepRecord:
        with self.ranks.naming_failures():
            self.last = next(self._records)
        return self.last

    def __len__(self) -> int:
        return self.n_steps

    def close(self) -> None:
        """End the run here; further iteration yields nothing."""
        self._records.close()

    # -- the loop ------------------------------------------------------------------------------------------------

    def _run(self):
        yield from self._kept
        before = self._kept[-1] if self._kept else None
        if before is not None and before.diverged:
            return
        recipe, started = self.recipe, time.perf_counter() - (before.seconds if before else 0.0)
        for step in range(before.step + 1 if before else 1, self.n_steps + 1):
            lr = learning_rate(step, self.n_steps, recipe.lr, warmup=recipe.warmup, final=recipe.final_lr)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            loss = self._accumulate_gradients(step)
            norm = clip_gradients(self.model.parameters(), recipe.grad_clip)
            record = StepRecord(
                step=step,
                tokens=step * recipe.tokens_per_step,
                lr=lr,
                train_loss=loss,
                grad_norm=norm.item(),
                seconds=0.0,
                diverged=not math.isfinite(loss),
            )
            if not record.diverged:
                # A gradient that is not finite while the loss is: leave the step out, nothing becomes NaN.
                self._step(record, take=math.isfinite(record.grad_norm))
            record.seconds = round_(time.perf_counter() - started)
            self.checkpoints.take(self, record)
            yield record
            if record.diverged:
                return

    def _accumulate_gradients(self, step) -> float:
        """Gradients of the mean loss over the whole batch, a micro-batch at a time. Returns that loss."""
        recipe, total = self.recipe, torch.zeros((), device=self.device)
        draw = partial(text.batch, self.corpus.train, recipe.block_size, seed=recipe.seed, step=step)
        self.optimizer.zero_grad(set_to_none=True)
        micro = recipe.micro_batch_size or min(recipe.batch_size, LARGEST_MICRO_BATCH)
        # Drawn when its turn comes: memory does not grow with the batch. x and y: (micro-batch, block_size)
        pieces = self.ranks.micro_batches(recipe.batch_size, micro, lambda first, n: draw(n, first=first))
        for x, y, weight in pieces:
            with self._autocast:
                _, loss = self._called(x.to(self.device), y.to(self.device))
            (loss * weight).backward()
            total += loss.detach() * weight
        return self.ranks.mean(total).item()

    def _step(self, record, take: bool):
        recipe, step = self.recipe, record.step
        probing = is_due(step, recipe.probe_every or max(1, self.n_steps // 30), self.n_steps)
        if recipe.noise_every and is_due(step, recipe.noise_every, self.n_steps):
            noise = self.noise_scale()
            record.noise_scale = {"gradient_sq": round_(noise.gradient_sq), "trace": round_(noise.trace)}
        if take and probing:
            self.optimizer.watch()
        if take:
            self.optimizer.step()
            if recipe.qk_clip is not None:
                record.clipped_heads = self._qk_clip(step)
        if probing:
            self._probe(record)
        if is_due(step, recipe.eval_every or max(1, self.n_steps // 10), self.n_steps):
            record.val_loss = self.val_loss()

    def _qk_clip(self, step) -> int:
        """Clip the heads whose logits, after this step and on its batch's first sequences, exceed τ; how many."""
        recipe = self.recipe
        n_sequences = min(QK_CLIP_SEQUENCES, recipe.batch_size)
        x, _ = text.batch(self.corpus.train, recipe.block_size, n_sequences, seed=recipe.seed, step=step)
        with self.ranks.whole_model(write_back=True) as model, self._autocast:
            largest = qk_clip(model, x.to(self.device), recipe.qk_clip)  # (n_layer, n_head)
        return int((largest > recipe.qk_clip).sum())

    # -- measuring -----------------------------------------------------------------------------------------------

    def _probe(self, record):
        record.ratios = {}
        group = self.optimizer.param_groups[0]
        switches = {name: group[name] for name in ("ratio", "bound") if name in group}
        for name, parameter in self.model.named_parameters():
            if parameter in self.optimizer.explained:
                summary = probes.ratios(self.ranks.whole(self.optimizer.explain(parameter)), **switches)
                if summary is not None:
                    record.ratios[name] = summary._asdict()
        self.optimizer.unwatch()
        measured = self.attention()
        record.max_attention_logit = _table(measured.max_logit)
        record.max_attention_logit_signed = _table(measured.max_logit_signed)
        record.attention_entropy = _table(measured.entropy)
        largest = measured.largest._asdict()
        record.largest_logit = largest | {
            "logit": round_(largest["logit"]),
            "softmax": [round_(p, 4) for p in largest["softmax"]],
        }

    def attention(self) -> probes.AttentionProbe:
        """Attention logits now, on the fixed probe batch."""
        x, _ = self.held_out(PROBE_SEQUENCES)
        with self.ranks.whole_model() as model, self._autocast:
            return probes.attention(model, x)

    def val_loss(self, n_sequences: int | None = None) -> float:
        """Validation loss now, nats a token, over evenly spaced held-out sequences."""
        x, y = self.held_out(n_sequences or self.recipe.eval_sequences)
        with self.ranks.whole_model() as model, self._autocast:
            return probes.mean_loss(model, x, y, self._evaluated_at_once())

    def train_loss(self, n_sequences: int) -> float:
        """Loss now on evenly spaced sequences of the training text, nats a token: to set beside `val_loss`."""
        x, y = text.fixed_batches(self.corpus.train, self.recipe.block_size, n_sequences)
        with self.ranks.whole_model() as model, self._autocast:
            return probes.mean_loss(model, x.to(self.device), y.to(self.device), self._evaluated_at_once())

    def _evaluated_at_once(self) -> int:
        """Sequences in a forward pass: few where the vocabulary is large. Not the micro-batch, for then a run's
        validation loss would depend on it in its last digits.
        """
        logits = self.recipe.block_size * self.model.config.vocab_size  # of one sequence
        return min(LARGEST_MICRO_BATCH, max(1, LARGEST_EVALUATION // logits))

    def noise_scale(self) -> probes.NoiseScale:
        """Gradient noise now, on NOISE_SEQUENCES random sequences of the training text, the same for every seed.

        They are drawn as a batch is, so that their noise is a batch's; as step 0's, which no run trains on.
        """
        x, y = text.batch(self.corpus.train, self.recipe.block_size, NOISE_SEQUENCES, seed=0, step=0)
        with self.ranks.whole_model() as model, self._autocast:
            return probes.noise_scale(model, x.to(self.device), y.to(self.device), piece=NOISE_PIECE)

    def held_out(self, n_sequences: int) -> tuple[Tensor, Tensor]:
        """Evenly spaced held-out sequences and their targets, the same for every seed: each (N, block_size)."""
        x, y = text.fixed_batches(self.corpus.val, self.recipe.block_size, n_sequences)
        return x.to(self.device), y.to(self.device)


# -- parts -------------------------------------------------------------------------------------------------------


def build_model(recipe: Recipe, corpus: text.Corpus) -> GPT2:
    """The recipe's model with its first weights: they depend on the seed alone, not on what was drawn before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return GPT2(recipe.model_config(corpus.vocab_size))


def build_optimizer(recipe: Recipe, model) -> optim.Traced:
    """The recipe's optimizer. Matrices decay; biases, gains and other 1-D tensors do not (as in nanoGPT)."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return optim.build(recipe.optimizer, [g for g in groups if g["params"]], recipe.lr, **recipe.optimizer_args)


@torch.no_grad()
def clip_gradients(parameters, max_norm: float | None) -> Tensor:
    """Scale the gradients so that their global ℓ2 norm is at most max_norm; None only measures.

    The norm is taken in float32 or better whatever the gradients' types. Where it is not finite the gradients
    are left as they are, and the caller should leave out the step: scaled by 1 / inf they would become 0 or NaN.

    Returns:
        The norm before clipping, 0-D float32.
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    if not grads:
        return torch.zeros(())
    norms = whole_norms(grads)
    norm = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]))
    if max_norm is not None and torch.isfinite(norm) and norm > max_norm:
        for grad in grads:
            grad.mul_((max_norm / norm).to(grad.device, grad.dtype))
    return norm


def pick_device(name: str) -> torch.device:
    """"auto" is CUDA if there is one, else the CPU. A device that is not there is an InputError."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not there.get(name, False):
        found = ", ".join(device for device, available in there.items() if available)
        raise InputError(f"device: got {name!r}, but this machine has {found}; take one of these or 'auto'")
    return torch.device(name)


def pick_precision(device: torch.device, name: str) -> str:
    """"auto" is "bf16" on a CUDA device that has it, else "fp32"."""
    if name == "auto":
        return "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "fp32"
    return name


def autocast(device: torch.device, precision: str):
    """The precision's context: bf16 autocast or nothing. "auto" as `pick_precision` says."""
    bf16 = pick_precision(device, precision) == "bf16"
    return torch.autocast(device.type, torch.bfloat16) if bf16 else nullcontext()


def is_due(step: int, every: int, n_steps: int) -> bool:
    """Whether something done every so many steps is due: at the first step, the multiples, and the last."""
    return step in (1, n_steps) or step % every == 0


def _table(x: Tensor) -> list[list[float]]:
    return [[round_(value) for value in row] for row in x.tolist()]
