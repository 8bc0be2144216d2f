"""Rows and columns of weight matrices, norms, and the bound on attention logits that the weights alone give.

MERIT scales rows and columns one by one because the weights of W_Q and W_K are said to be alike within a row and
within a column (MERIT paper, section on element-wise ratios). These probes measure how much alike, against the
same values in a shuffled order.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from einops import reduce
from torch import Tensor

from ..errors import InputError
from .attention import attention, attention_inputs

OUTLIER_DEVIATIONS = 8.0  # robust standard deviations from the median at which a row or column stands out


class Lines(NamedTuple):
    """The rows, or the columns, of one matrix, by the size of their weights."""

    max: Tensor  # (n,): largest |w| of each line
    mean: Tensor  # (n,): mean |w| of each line
    similarity: float  # see `similarity`; about 0 for a shuffled matrix
    outliers: list[int]  # lines whose mean |w| stands out, the largest first


class MatrixPattern(NamedTuple):
    """How |w| is spread over the rows and columns of one matrix."""

    rows: Lines  # of W_Q or W_K: a row is one output dimension, n_embd / n_head of them a head
    columns: Lines  # a column is one dimension of the residual stream
    head_boundaries: list[int]  # first row of each head but the first; empty for one head
    norm_gap: float  # see `norm_gap`, of the whole matrix
    row_norm_gap: Tensor  # (n,), of each row
    column_norm_gap: Tensor  # (k,), of each column


@torch.no_grad()
def pattern(weight: Tensor, n_head: int = 1) -> MatrixPattern:
    """Describe the rows and columns of a matrix (n, k), whose rows belong to n_head heads in turn.

    Raises InputError if it is not a matrix, is empty or not finite, or n_head does not divide its rows.
    """
    w = _matrix(weight)
    if not isinstance(n_head, int) or n_head < 1 or w.shape[0] % n_head:
        raise InputError(f"n_head: got {n_head!r}, expected a divisor of the {w.shape[0]} rows")
    per_head = w.shape[0] // n_head
    return MatrixPattern(
        rows=_lines(w),
        columns=_lines(w.T),
        head_boundaries=[per_head * head for head in range(1, n_head)],
        norm_gap=norm_gap(w).item(),
        row_norm_gap=norm_gap(w, dim=1),
        column_norm_gap=norm_gap(w, dim=0),
    )


def _lines(w: Tensor) -> Lines:
    size = w.abs()
    mean = size.mean(dim=1)
    return Lines(size.amax(dim=1), mean, similarity(w), outliers(mean))


@torch.no_grad()
def similarity(weight: Tensor) -> float:
    """How alike |w| is within the rows of a matrix (n, k); of its transpose: within the columns.

    The share of the variance of |w| that lies between rows, less what chance alone gives:
    (η² - e) / (1 - e) with e = (n - 1) / (n k - 1), the mean of η² over all orders of the same values. So it
    is 1 where |w| is the same all along each row, and 0 on average for a shuffled matrix, whatever its shape
    and values; a little below 0 is chance too. 0 where all |w| are equal, or a row has one element.
    """
    size = _matrix(weight).abs()
    n, k = size.shape
    total = (size - size.mean()).square().sum()
    # Against rounding: the squares of a constant matrix's deviations are not quite 0.
    if n == 1 or k == 1 or total <= size.numel() * (1e-12 * size.amax()).square():
        return 0.0
    between = k * (size.mean(dim=1) - size.mean()).square().sum()
    chance = (n - 1) / (n * k - 1)
    return ((between / total - chance) / (1 - chance)).item()


@torch.no_grad()
def shuffled(weight: Tensor, seed: int = 0) -> Tensor:
    """The same values in a random order: the control for anything said about rows and columns."""
    order = torch.randperm(weight.numel(), generator=torch.Generator().manual_seed(seed))
    return weight.detach().flatten()[order.to(weight.device)].view(weight.shape)


@torch.no_grad()
def outliers(values: Tensor, deviations: float = OUTLIER_DEVIATIONS) -> list[int]:
    """Places of a 1-D tensor whose value stands out above the rest, the largest first.

    A value stands out if it is more than `deviations` robust standard deviations (1.4826 times the median
    distance from the median) above the median. Median and not mean, so that an outlier does not hide itself.
    """
    values = values.detach().double().flatten()
    median = values.median()
    spread = 1.4826 * (values - median).abs().median()
    # Where most values are equal the spread is 0: then any clear difference stands out.
    limit = median + deviations * torch.maximum(spread, 1e-6 * median.abs())
    order = values.argsort(descending=True, stable=True)
    return [int(i) for i in order if values[i] > limit]


@torch.no_grad()
def norm_gap(weight: Tensor, dim: int | None = None) -> Tensor:
    """(‖w‖₂ - ‖w‖_m) / ‖w‖₂ of the whole tensor (0-D), or along `dim`: 0 for a zero tensor.

    What an ℓ2 trust ratio sees beside the largest element: 0 where one element is everything, 1 - 1/√n where n
    elements are equal (MERIT paper).
    """
    w = weight.detach().double()
    largest = w.abs().amax() if dim is None else w.abs().amax(dim=dim)
    l2 = torch.linalg.vector_norm(w, 2, dim=dim)
    return torch.where(l2 > 0, (l2 - largest) / l2.clamp_min(torch.finfo(l2.dtype).tiny), 0.0)


class LogitBound(NamedTuple):
    """The bound √d · ‖W_Q‖_m · ‖W_K‖_m · C_X² beside the attention logits it bounds."""

    bound: Tensor  # (n_layer,): float64, no logit of the layer exceeds it
    head_bound: Tensor  # (n_layer, n_head): the same with the maxima taken over the head's own rows
    max_logit: Tensor  # (n_layer, n_head): the true max |z_ij| over causal pairs
    query_max: Tensor  # (n_layer,): ‖W_Q‖_m
    key_max: Tensor  # (n_layer,): ‖W_K‖_m
    input_l1: Tensor  # (n_layer,): C_X, the largest ℓ1 norm of a token's input to the attention layer


@torch.no_grad()
def logit_bound(model, tokens: Tensor) -> LogitBound:
    """Bound every attention logit by the largest weight, and measure how far the bound is from the truth.

    With x the input of the attention layer (after its LayerNorm), C_X = max ‖x‖₁ over tokens, and d = d_head:

        |z_ij| = |Σ_a (W_Q x_i + b_Q)_a (W_K x_j + b_K)_a| / √d           a over the d dimensions of a head
               ≤ √d · (‖W_Q‖_m C_X + ‖b_Q‖_m) · (‖W_K‖_m C_X + ‖b_K‖_m)   since |⟨w, x⟩| ≤ ‖w‖_m ‖x‖₁

    which is √d · ‖W_Q‖_m · ‖W_K‖_m · C_X² where there is no bias, as the MERIT paper has it. d is the width of a
    head, not of the model: the sum runs over one head, and 1/√d_head is part of z. With QK-norm the weights do not
    bound z but the gains do, √d · max|gain_q| · max|gain_k|; that is returned.

    Args:
        model: a GPT2.
        tokens: (B, T) int64.
    """
    measured = attention(model, tokens)
    rows = []
    for module, x in attention_inputs(model, tokens):
        c = x.detach().double().abs().sum(-1).amax()  # C_X
        query, key = (w.detach().double().abs() for w in module.query_key_value_weights()[:2])
        d_head = query.shape[0] // module.n_head
        of_layer = of_heads = d_head * module.scale  # √d
        parts = zip((query, key), _biases(module), (module.query_norm, module.key_norm), strict=True)
        for weight, bias, norm in parts:
            per_row = weight.amax(dim=1)  # (n_embd,): ‖W_i‖_m
            if isinstance(norm, torch.nn.Identity):
                of_layer = of_layer * (per_row.amax() * c + bias.amax())
                of_heads = of_heads * (_heads_max(per_row, module.n_head) * c + _heads_max(bias, module.n_head))
            else:
                gain = norm.weight.detach().double().abs().amax()
                of_layer = of_layer * gain
                of_heads = of_heads * gain.expand(module.n_head)
        rows.append((of_layer, of_heads, query.amax(), key.amax(), c))
    bound, head_bound, query_max, key_max, input_l1 = (torch.stack(column) for column in zip(*rows, strict=True))
    return LogitBound(bound, head_bound, measured.max_logit, query_max, key_max, input_l1)


def _heads_max(per_row: Tensor, n_head: int) -> Tensor:
    return reduce(per_row, "(head row) -> head", "max", head=n_head)


def _biases(module) -> tuple[Tensor, Tensor]:
    """|b_Q| and |b_K|, each (n_embd,), zeros where there is no bias."""
    if module.fused:
        bias = module.qkv.bias
        pair = (None, None) if bias is None else bias.chunk(3)[:2]
    else:
        pair = module.query.bias, module.key.bias
    like = module.query_key_value_weights()[0][:, 0]
    return tuple((torch.zeros_like(like) if b is None else b).double().abs() for b in pair)


# -- where the matrices come from --------------------------------------------------------------------------------


class QueryKey(NamedTuple):
    """W_Q and W_K of one layer, detached float32 copies on the CPU, and the heads their rows belong to."""

    query: Tensor  # (n_embd, n_embd)
    key: Tensor  # (n_embd, n_embd)
    n_head: int


def query_key_weights(source: Any, n_head: int | None = None) -> list[QueryKey]:
    """W_Q and W_K of every layer of whatever has them.

    Args:
        source: a live Training, a recorded Run that kept weights, a GPT2, or a mapping of names to tensors: a
            GPT2's state dict, or {"query": W_Q, "key": W_K} for a single layer.
        n_head: heads a layer, for a mapping (1 if not given); the others know it.

    Raises InputError for a source without such matrices.
    """
    heads = n_head or _heads_of(source)
    model = getattr(source, "model", source)
    if hasattr(model, "blocks"):
        pairs = [block.attention.query_key_value_weights()[:2] for block in model.blocks]
    else:
        tensors = source.weights() if callable(getattr(source, "weights", None)) else source
        if not isinstance(tensors, Mapping):
            raise InputError(
                f"weights: got {type(source).__name__}, expected a Training, a Run recorded with keep_weights=True, "
                "a GPT2, or a table of tensors"
            )
        pairs = _pairs_by_name(tensors)
    found = []
    for layer, (query, key) in enumerate(pairs):
        query, key = (_matrix(w, f"weights of layer {layer}").float().cpu().clone() for w in (query, key))
        if heads < 1 or query.shape[0] % heads or key.shape[0] % heads:
            raise InputError(f"n_head: got {heads}, expected a divisor of the {query.shape[0]} rows of W_Q")
        found.append(QueryKey(query, key, heads))
    return found


def _heads_of(source) -> int:
    model = getattr(source, "model", source)
    if hasattr(model, "config"):
        return model.config.n_head
    header = getattr(source, "header", None)
    return int(header.get("n_head", 1)) if isinstance(header, Mapping) else 1


def _pairs_by_name(tensors: Mapping[str, Tensor]) -> Sequence[tuple[Tensor, Tensor]]:
    """(W_Q, W_K) a layer, by the names that GPT2 gives them, in the order of the layers."""
    layers: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        words = name.split(".")
        layer = next((int(word) for word in words if word.isdigit()), 0)
        if words[-1] == "bias":
            continue
        if "qkv" in words:
            query, key, _ = tensor.chunk(3)
            layers.setdefault(layer, {}).update(query=query, key=key)
        for part in ("query", "key"):
            if part in words:
                layers.setdefault(layer, {})[part] = tensor
    complete = [layers[i] for i in sorted(layers) if layers[i].keys() >= {"query", "key"}]
    if not complete:
        raise InputError(
            f"weights: no W_Q and W_K among the names {', '.join(list(map(str, tensors))[:6]) or '(none)'}; expected "
            "those of a GPT2's state dict, or 'query' and 'key'"
        )
    return [(layer["query"], layer["key"]) for layer in complete]


def _matrix(weight, name="weight") -> Tensor:
    """The weight as a detached matrix of doubles; an InputError that says what came where it is none."""
    try:
        w = torch.as_tensor(weight).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{name}: got {type(weight).__name__}, expected a matrix of numbers ({error})") from None
    if w.ndim != 2 or w.numel() == 0 or w.is_complex():
        raise InputError(f"{name}: got shape {tuple(w.shape)}, dtype {w.dtype}, expected a real matrix (rows, columns)")
    w = w.double()
    if not math.isfinite(w.abs().amax().item()):
        raise InputError(f"{name}: it holds a NaN or an infinity; take a step from before the run diverged")
    return w
