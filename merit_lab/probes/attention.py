"""Attention logits and entropy of every layer and head, exactly, on a batch of tokens."""

import math
from contextlib import contextmanager, suppress
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor


class LargestLogit(NamedTuple):
    """Where the largest attention logit stands, and the attention row it belongs to."""

    layer: int
    head: int
    sequence: int  # index in the probe batch
    query: int  # position i
    key: int  # position j ≤ i
    logit: float
    softmax: list[float]  # attention weights over positions 0…i; close to one-hot where a logit is huge


class AttentionProbe(NamedTuple):
    """What `attention` measures. Logits are those that enter the softmax: after 1/√d_head and QK-norm."""

    max_logit: Tensor  # (n_layer, n_head): max over causal pairs j ≤ i of |z_ij|
    max_logit_signed: Tensor  # (n_layer, n_head): max of z_ij; below 0 where every logit is
    entropy: Tensor  # (n_layer, n_head): mean over rows of the entropy of softmax(z_i), nats
    largest: LargestLogit  # the largest signed logit of all


@torch.no_grad()
def attention(model, tokens: Tensor, chunk: int = 1 << 22) -> AttentionProbe:
    """Measure the attention logits z_ij = ⟨q_i, k_j⟩ / √d_head of every layer and head, exactly.

    Args:
        model: a GPT2.
        tokens: (B, T) int64, a probe batch; keep it fixed along a run.
        chunk: logits held at once. Heads are taken one by one and queries in pieces, so that no (T, T) matrix of
            all heads is ever in memory.

    Source: MERIT paper, section 3 (max attention logit); Zhai et al. 2023 (attention entropy).
    """
    max_abs, max_signed, entropy, largest = [], [], [], None
    futures = _futures(*tokens.shape, chunk, tokens.device)
    for layer, (module, x) in enumerate(attention_inputs(model, tokens)):
        q, k, _ = module.queries_keys_values(x)  # (B, n_head, T, d_head)
        rows = []
        for head in range(q.shape[1]):
            row, place = _one_head(q[:, head].float(), k[:, head].float(), module.scale, futures)
            rows.append(row)
            if largest is None or place.logit > largest.logit:
                largest = place._replace(layer=layer, head=head)
        for values, of_layer in zip((max_abs, max_signed, entropy), zip(*rows, strict=True), strict=True):
            values.append(torch.stack(of_layer))
    return AttentionProbe(torch.stack(max_abs), torch.stack(max_signed), torch.stack(entropy), largest)


def _futures(n_sequences, length, chunk, device) -> list[tuple[int, int, Tensor]]:
    """The queries of each piece, [start, stop), and which of the keys before `stop` lie in their future (j > i)."""
    piece = max(1, chunk // (n_sequences * length))
    cuts = [(start, min(start + piece, length)) for start in range(0, length, piece)]
    ones = partial(torch.ones, dtype=torch.bool, device=device)
    return [(start, stop, ones(stop - start, stop).triu(start + 1)) for start, stop in cuts]


def _one_head(q, k, scale, futures):
    """Maximum, signed maximum, mean entropy, and the place of the signed maximum. q, k: (B, T, d_head)."""
    n_sequences, length, _ = q.shape
    # Starting at -inf, not at 0: a head whose logits are all negative has a negative signed maximum.
    top_abs = top = torch.tensor(-math.inf, device=q.device)
    total_entropy = torch.zeros((), device=q.device)
    place = None
    for start, stop, future in futures:
        logits = q[:, start:stop] @ k[:, :stop].mT * scale  # (B, stop - start, stop)
        top_abs = torch.maximum(top_abs, logits.masked_fill(future, 0.0).abs_().max())
        logits.masked_fill_(future, -math.inf)
        peak = logits.max()
        if place is None or peak > top:
            top = peak
            sequence, row, key = (int(i) for i in torch.unravel_index(logits.argmax(), logits.shape))
            softmax = logits[sequence, row, : start + row + 1].softmax(-1)
            place = LargestLogit(-1, -1, sequence, start + row, key, peak.item(), softmax.tolist())
        log_p = logits.log_softmax(-1)
        total_entropy += torch.special.entr(log_p.exp()).sum()
    return (top_abs, top, total_entropy / (n_sequences * length)), place


@torch.no_grad()
def largest_logits(module, x: Tensor, chunk: int = 1 << 22) -> Tensor:
    """max |z_ij| over causal pairs j ≤ i of every head of one layer: (n_head,) float32.

    Args:
        module: an attention module of a GPT2.
        x: (B, T, n_embd), its input.
        chunk: logits held at once.
    """
    q, k, _ = (part.float() for part in module.queries_keys_values(x))  # (B, n_head, T, d_head)
    n_sequences, n_head, length, _ = q.shape
    piece = max(1, chunk // (n_sequences * n_head * length))
    top = torch.zeros(n_head, device=q.device)
    for start in range(0, length, piece):
        stop = min(start + piece, length)
        logits = q[:, :, start:stop] @ k[:, :, :stop].mT * module.scale  # (B, n_head, stop - start, stop)
        top = torch.maximum(top, logits.tril(start).abs().amax((0, 2, 3)))  # past the diagonal: 0, below any maximum
    return top


def attention_inputs(model, tokens) -> list[tuple[torch.nn.Module, Tensor]]:
    """Run the model as far as that takes; for each layer its attention module and its input (B, T, n_embd)."""
    inputs = []
    modules = [block.attention for block in model.blocks]

    def keep(module, args):
        inputs.append((module, args[0]))
        if module is modules[-1]:
            raise _Enough

    hooks = [module.register_forward_pre_hook(keep) for module in modules]
    try:
        with evaluating(model), suppress(_Enough):
            model(tokens)
    finally:
        for hook in hooks:
            hook.remove()
    return inputs


class _Enough(Exception):
    """What comes after the last layer's input is not asked for: a quarter of a small model's forward pass."""


@contextmanager
def evaluating(model):
    """The model in evaluation mode, and back to what it was."""
    training = model.training
    model.eval()
    try:
        yield model
    finally:
        model.train(training)


@torch.no_grad()
def mean_loss(model, x: Tensor, y: Tensor, micro_batch_size: int = 64) -> float:
    """Mean cross-entropy in nats a token over sequences x with targets y, both (N, T), a piece at a time."""
    total = 0.0
    with evaluating(model):
        for piece_x, piece_y in zip(x.split(micro_batch_size), y.split(micro_batch_size), strict=True):
            total += model(piece_x, piece_y)[1].item() * len(piece_x)
    return total / len(x)
