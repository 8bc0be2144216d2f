"""QK-clip: after a step, scale down the queries and keys of a head whose attention logits have grown too large.

For a head whose largest logit is above τ, with γ = τ / max|z|

    q ← √γ q,  k ← √γ k,   hence z ← γ z and max|z| = τ

q = W_Q x + b_Q, so that both the head's rows of W_Q and its part of b_Q are scaled, and the same for k.

Source: Kimi Team 2025, "Kimi K2" (arXiv 2507.20534), section 2.1, QK-clip with α = ½. What differs here: Kimi K2
takes max z, the signed maximum, over the whole batch in the training forward pass, that is, of the weights before the
step. Here max|z| is taken, the magnitude that the lab records, of the weights after the step, on the tokens given.
"""

import torch
from torch import Tensor

from .probes import evaluating, largest_logits


@torch.no_grad()
def qk_clip(model, tokens: Tensor, threshold: float) -> Tensor:
    """Scale W_Q, b_Q, W_K and b_K of every head whose max|z| on these tokens is above the threshold, in place.

    One forward pass, layer by layer: a layer is measured and clipped before it runs, so that the layers above see what
    it gives after clipping. Measured anew on the same tokens, every head of the model is then at or below the
    threshold (to rounding; under bf16 autocast that is a percent).

    A head at or below the threshold keeps its bits. So does one whose largest logit is not finite: no factor mends it.

    Args:
        model: a GPT2 with qk_norm=False. With QK-norm the scale of W_Q and W_K does not reach the logits.
        tokens: (B, T) int64.
        threshold: τ, the largest |z| allowed.

    Returns:
        (n_layer, n_head): max|z| of each head before it was clipped.
    """
    found = []

    def clip(module, args):
        largest = largest_logits(module, args[0])  # (n_head,)
        found.append(largest)
        above = (largest > threshold) & largest.isfinite()
        for head in above.nonzero().flatten().tolist():
            factor = (threshold / largest[head].double()).sqrt().item()
            for rows in _query_key_rows(module, head):
                rows.mul_(factor)
        torch.clear_autocast_cache()  # it holds bf16 copies of the weights as they were

    hooks = [block.attention.register_forward_pre_hook(clip) for block in model.blocks]
    try:
        with evaluating(model):
            model(tokens)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(found)


def _query_key_rows(module, head: int) -> list[Tensor]:
    """What makes a head's q and k, as views: its rows of W_Q and W_K, and of their biases where there are any."""
    if module.fused:
        whole = [part for p in (module.qkv.weight, module.qkv.bias) if p is not None for part in p.chunk(3)[:2]]
    else:
        whole = [p for layer in (module.query, module.key) for p in (layer.weight, layer.bias) if p is not None]
    return [p.chunk(module.n_head)[head] for p in whole]
