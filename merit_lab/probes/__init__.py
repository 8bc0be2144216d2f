"""Measurements of a model, its optimizer and a batch. Every probe is a function that changes nothing.

    attention(model, tokens)         largest attention logit and entropy of every layer and head
    largest_logits(module, x)        max attention logit alone, of the heads of one layer
    mean_loss(model, x, y)           loss over many sequences, a piece at a time
    noise_scale(model, x, y)         gradient noise: |G|², tr Σ and their ratio, the batch where "large" begins
    ratios(step)                     how the trust ratios of one optimizer step are spread, and which one won
    pattern(weight, n_head)          rows and columns of one matrix: sizes, similarity, outliers, norm gaps
    logit_bound(model, tokens)       √d·‖W_Q‖_m·‖W_K‖_m·C_X² beside the true max attention logit
    traffic()                        bytes that an optimizer step reads, writes and holds, by count
    model_curvature(model, x, y)     top Hessian eigenvalue and trace; `curvature(loss, parameters)` for any loss
"""

from .attention import AttentionProbe, LargestLogit, attention, evaluating, largest_logits, mean_loss
from .curvature import Curvature, curvature, hessian_vector_product, model_curvature
from .noise import NoiseScale, average_noise_scale, noise_from_norms, noise_scale
from .ratios import RatioSummary, ratios
from .rounding import round_
from .traffic import Moved, traffic
from .weights import (
    Lines,
    LogitBound,
    MatrixPattern,
    QueryKey,
    logit_bound,
    norm_gap,
    outliers,
    pattern,
    query_key_weights,
    shuffled,
    similarity,
)

__all__ = [
    "AttentionProbe",
    "Curvature",
    "LargestLogit",
    "Lines",
    "LogitBound",
    "MatrixPattern",
    "Moved",
    "NoiseScale",
    "QueryKey",
    "RatioSummary",
    "attention",
    "average_noise_scale",
    "curvature",
    "evaluating",
    "hessian_vector_product",
    "largest_logits",
    "logit_bound",
    "mean_loss",
    "model_curvature",
    "noise_from_norms",
    "noise_scale",
    "norm_gap",
    "outliers",
    "pattern",
    "query_key_weights",
    "ratios",
    "round_",
    "shuffled",
    "similarity",
    "traffic",
]
