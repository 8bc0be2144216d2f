"""GPT-2 (Radford et al. 2019), the model of this lab.

    x      = E[token] + P[position]
    x      = x + Attention(LayerNorm(x))    } n_layer times; x itself, the residual stream,
    x      = x + MLP(LayerNorm(x))          } is never normalised
    logits = E LayerNorm(x)                 the embedding E serves twice (weight tying)

    Attention, in every head, for positions i and j:
    q_i, k_i, v_i = W_Q x_i, W_K x_i, W_V x_i
    z_ij  = <q_i, k_j> / sqrt(d_head)  for j <= i: the attention logits
    out_i = Σ_j softmax_j(z_ij) v_j;   W_O mixes the heads' outputs

GPT-2's own code has one matrix for Q, K and V. Here they are three, since an optimizer that takes the
maximum of a row or a column steps otherwise when they are one (`fused_qkv=True` makes them one).
`qk_norm=True` bounds the attention logits in the forward pass. There is no dropout, as in the MERIT
paper's runs.

Letters in the shapes: B sequences, T tokens a sequence, V words of the vocabulary.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from merit_lab.errors import InputError, shown

# What a configuration may ask for: far above GPT-2 Large, and low enough that a slip of the pen is an error at once
# instead of hours of making layers, or a machine without memory.
LARGEST = {"block_size": 2**17, "vocab_size": 2**21, "n_layer": 1000, "n_head": 2**12, "n_embd": 2**16}
LARGEST_MODEL = 10**10  # weights: with their gradients and an optimizer's two moments 160 GB in float32


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


@dataclass(frozen=True)
class GPT2Config:
    """What a GPT2 is made of. The defaults are GPT-2's smallest; `named` knows the other sizes.

    Raises InputError, naming the field, for a size that is not a whole number of 1 or more or is above
    LARGEST, a switch that is not True or False, an n_embd that n_head does not divide, and a model of
    more than LARGEST_MODEL weights.
    """

    block_size: int = 1024  # longest sequence: each position has its own learned embedding
    vocab_size: int = 50257  # GPT-2's byte-pair encoding; the text decides (a character model: under 100)
    n_layer: int = 12  # depth; also sets the initialisation of what writes to the residual stream
    n_head: int = 12  # heads a layer; each sees n_embd / n_head dimensions
    n_embd: int = 768  # width of the residual stream
    qk_norm: bool = False  # normalise q and k in every head: bounds the attention logits
    fused_qkv: bool = False  # one matrix for Q, K, V, as GPT-2's code has it: other row and column maxima
    tie_weights: bool = True  # the head is the token embedding: GPT-2's parameter counts assume it
    bias: bool = True  # biases in Linear and LayerNorm; GPT-2 has them, many later models do not

    def __post_init__(self):
        for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd"):
            value = getattr(self, name)
            if not _is_whole(value) or value < 1:
                raise InputError(f"{name}={shown(value)}: {name} must be a whole number, 1 or more.")
            if value > LARGEST[name]:
                raise InputError(f"{name}={shown(value)}: {name} must be at most {LARGEST[name]:,}.")
            object.__setattr__(self, name, int(value))  # a numpy integer would not go into JSON
        for name in ("qk_norm", "fused_qkv", "tie_weights", "bias"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise InputError(f"{name}={shown(value)}: {name} must be True or False.")
        if self.n_embd % self.n_head:
            multiple = max(self.d_head, 1) * self.n_head
            raise InputError(
                f"n_embd={self.n_embd}, n_head={self.n_head}: every head gets n_embd / n_head dimensions, "
                f"so n_embd must be a multiple of n_head (for example {multiple})."
            )
        matrices = 12 * self.n_layer * self.n_embd**2 + (self.vocab_size + self.block_size) * self.n_embd
        if matrices > LARGEST_MODEL:
            raise InputError(
                f"n_layer={self.n_layer}, n_embd={self.n_embd}, vocab_size={self.vocab_size}, "
                f"block_size={self.block_size}: a model of {matrices:,} weights is above the limit of "
                f"{LARGEST_MODEL:,}; take a smaller n_embd or n_layer."
            )

    @property
    def d_head(self) -> int:
        """Dimensions of one head's q, k and v."""
        return self.n_embd // self.n_head

    @classmethod
    def named(cls, name: str, **overrides: Any) -> "GPT2Config":
        """A size by its name (a key of SIZES), with single fields replaced by `overrides`.

        Raises InputError for a name or a field that does not exist; the message lists those that do.
        """
        if not isinstance(name, str) or name not in SIZES:
            raise InputError(f"model {shown(name)} is not a known size: choose one of {', '.join(SIZES)}.")
        known = [field.name for field in fields(cls)]
        for field, value in overrides.items():
            if field not in known:
                raise InputError(
                    f"{field}={shown(value)}: GPT-2 has no {field}; its fields are {', '.join(known)}."
                )
        return replace(SIZES[name], **overrides)


# Below GPT-2's own sizes a text of single characters is meant: 78 of them, until a text says otherwise.
SIZES: dict[str, GPT2Config] = {  # and their numbers of parameters; the last three are OpenAI's own
    "nano": GPT2Config(64, 78, n_layer=2, n_head=2, n_embd=64),  # 109,184: for tests
    "micro": GPT2Config(64, 78, n_layer=4, n_head=4, n_embd=84),  # 355,152: trains in a minute on a CPU
    "mini": GPT2Config(256, 78, n_layer=6, n_head=6, n_embd=384),  # 10,775,808
    "base": GPT2Config(512, 78, n_layer=10, n_head=8, n_embd=512),  # 31,826,944
    "gpt2": GPT2Config(1024, 50257, n_layer=12, n_head=12, n_embd=768),  # 124,439,808
    "gpt2-medium": GPT2Config(1024, 50257, n_layer=24, n_head=16, n_embd=1024),  # 354,823,168
    "gpt2-large": GPT2Config(1024, 50257, n_layer=36, n_head=20, n_embd=1280),  # 774,030,080
}


class Linear(nn.Linear):
    """torch's layer without torch's initialisation: GPT2.initialise draws every weight, and a first
    draw that is thrown away would make the seed mean something else for each layout of Q, K and V."""

    def reset_parameters(self) -> None:
        pass


class Embedding(nn.Embedding):
    """torch's layer without torch's initialisation, for the same reason."""

    def reset_parameters(self) -> None:
        pass


class RMSNorm(nn.RMSNorm):
    """torch's layer, its gain cast to the input's precision, as autocast does for a Linear's weight."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    """Causal self-attention with n_head heads.

    `query`, `key`, `value` are Linear layers; with fused_qkv one layer `qkv` stands for them, its rows
    in the order Q, K, V. The rows of each belong to head 0, then head 1, and so on.

    With qk_norm, q and k of every head are divided by their root mean square and multiplied by a learned
    gain (`query_norm`, `key_norm`: RMSNorm over d_head, one gain for all heads of a layer; as Qwen3 and
    Gemma 3 do it). RMSNorm and not LayerNorm, because the length of q and k is all that has to be bounded:
    their direction stays as it was. Then |z_ij| <= sqrt(d_head) · max|gain_q| · max|gain_k| (Cauchy-Schwarz).
    """

    def __init__(self, config: GPT2Config):
        super().__init__()
        width, bias = config.n_embd, config.bias
        self.n_head = config.n_head
        self.scale = 1 / math.sqrt(config.d_head)
        self.fused = config.fused_qkv
        if self.fused:
            self.qkv = Linear(width, 3 * width, bias=bias)
        else:
            self.query = Linear(width, width, bias=bias)
            self.key = Linear(width, width, bias=bias)
            self.value = Linear(width, width, bias=bias)
        self.query_norm = RMSNorm(config.d_head, eps=1e-5) if config.qk_norm else nn.Identity()
        self.key_norm = RMSNorm(config.d_head, eps=1e-5) if config.qk_norm else nn.Identity()
        self.project = Linear(width, width, bias=bias)

    def query_key_value_weights(self) -> tuple[Tensor, Tensor, Tensor]:
        """W_Q, W_K, W_V, each (n_embd, n_embd), whichever way they are stored: views, not copies."""
        if self.fused:
            return self.qkv.weight.chunk(3)
        return self.query.weight, self.key.weight, self.value.weight

    def queries_keys_values(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v of a normalised input x (B, T, n_embd): each (B, n_head, T, d_head), after QK-norm.

        The attention logits are z = q kᵀ · scale, where k_j counts for q_i if j <= i.
        """
        if self.fused:
            parts = self.qkv(x).chunk(3, dim=-1)  # (B, T, n_embd), three times
        else:
            parts = self.query(x), self.key(x), self.value(x)
        q, k, v = (rearrange(part, "b t (h d) -> b h t d", h=self.n_head) for part in parts)
        return self.query_norm(q), self.key_norm(k), v  # (B, n_head, T, d_head)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.queries_keys_values(x)  # (B, n_head, T, d_head)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return self.project(rearrange(mixed, "b h t d -> b t (h d)"))  # (B, T, n_embd)


class MLP(nn.Module):
    """Two layers with a GELU between, four times as wide inside."""

    def __init__(self, config: GPT2Config):
        super().__init__()
        self.expand = Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.project = Linear(4 * config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.expand(x), approximate="tanh")  # (B, T, 4 n_embd); GPT-2 used the tanh form
        return self.project(hidden)  # (B, T, n_embd)


class Block(nn.Module):
    """One layer of the network: attention and MLP, each on a normalised copy of the residual stream."""

    def __init__(self, config: GPT2Config):
        super().__init__()
        self.norm1 = nn.LayerNorm(config.n_embd, eps=1e-5, bias=config.bias)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.n_embd, eps=1e-5, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))  # (B, T, n_embd)
        return x + self.mlp(self.norm2(x))


class GPT2(nn.Module):
    """GPT2(GPT2Config.named("gpt2")): token ids in, logits of the next token out.

    token_embedding, position_embedding, blocks[i].{norm1, attention, norm2, mlp}, final_norm, head.
    """

    def __init__(self, config: GPT2Config):
        if not isinstance(config, GPT2Config):
            raise InputError(
                f"GPT2({config!r}): expected a GPT2Config, for example GPT2Config.named('nano')."
            )
        super().__init__()
        self.config = config
        self.token_embedding = Embedding(config.vocab_size, config.n_embd)
        self.position_embedding = Embedding(config.block_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.final_norm = nn.LayerNorm(config.n_embd, eps=1e-5, bias=config.bias)
        self.head = Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_weights:
            self.head.weight = self.token_embedding.weight
        self.initialise()

    @torch.no_grad()
    def initialise(self) -> None:
        """Draw all weights anew: normal with deviation .02; biases 0; norms' gains 1.

        The two matrices of a block that write to the residual stream get .02 / sqrt(2 n_layer), so that
        the sum of the 2 n_layer writes does not grow with depth. OpenAI's code draws the position
        embedding with .01; here it is .02 like the rest, as in nanoGPT and the MERIT paper's settings.
        W_Q, W_K and W_V are drawn one after the other also where they are fused: the same
        torch.manual_seed gives the same start in both layouts.
        """
        std = 0.02
        residual_std = std / math.sqrt(2 * self.config.n_layer)
        for module in self.modules():
            if isinstance(module, nn.LayerNorm | nn.RMSNorm):
                module.reset_parameters()
            elif isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        nn.init.normal_(self.token_embedding.weight, std=std)
        nn.init.normal_(self.position_embedding.weight, std=std)
        for block in self.blocks:
            for weight in block.attention.query_key_value_weights():
                nn.init.normal_(weight, std=std)
            nn.init.normal_(block.attention.project.weight, std=residual_std)
            nn.init.normal_(block.mlp.expand.weight, std=std)
            nn.init.normal_(block.mlp.project.weight, std=residual_std)
        if not self.config.tie_weights:
            nn.init.normal_(self.head.weight, std=std)

    def count_parameters(self) -> int:
        """Number of learned values; a tied embedding and head count once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """tokens (B, T) int64 -> logits (B, T, V) and, where targets (B, T) are given, their loss.

        logits[:, t] has seen tokens[:, :t+1] and scores what comes next, so targets[:, t] is the token
        after tokens[:, t]. The loss is the mean cross-entropy in nats a token (a 0-D tensor); a target
        of -100 is left out of the mean. Raises InputError for another dtype or shape, or T > block_size.
        Ids outside 0..V-1 are not looked for here, since that would stop the GPU at every step.
        """
        self._check_tokens("tokens", tokens)
        if tokens.shape[1] > self.config.block_size:
            raise InputError(
                f"tokens of shape {tuple(tokens.shape)}: a sequence of {tokens.shape[1]} tokens is longer "
                f"than block_size={self.config.block_size}; shorten it, or build the model with a larger one."
            )
        if targets is not None:
            self._check_tokens("targets", targets)
            if targets.shape != tokens.shape:
                raise InputError(
                    f"targets of shape {tuple(targets.shape)} for tokens of shape {tuple(tokens.shape)}: "
                    "the shapes must be equal, a target for every token."
                )

        positions = torch.arange(tokens.shape[1], device=tokens.device)  # (T,)
        x = self.token_embedding(tokens) + self.position_embedding(positions)  # (B, T, n_embd)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.final_norm(x))  # (B, T, V)
        if targets is None:
            return logits, None
        loss = F.cross_entropy(rearrange(logits, "b t v -> (b t) v"), rearrange(targets, "b t -> (b t)"))
        return logits, loss

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continue tokens (B, T) by max_new_tokens: (B, T + max_new_tokens), the given ones included.

        Each token is drawn from softmax(logits / temperature), among the top_k likeliest if top_k is
        given; temperature 0 takes the likeliest. Only the last block_size tokens are looked at.
        generator: a torch.Generator on the model's device, for a draw that can be repeated.
        Raises InputError naming the argument and its value.
        """
        self._check_tokens("tokens", tokens)
        outside = tokens[(tokens < 0) | (tokens >= self.config.vocab_size)]
        if outside.numel():
            raise InputError(
                f"tokens hold the id {outside[0].item()}: this model's vocabulary has the ids 0 to "
                f"{self.config.vocab_size - 1}; encode the prompt with the tokenizer it was trained with."
            )
        if not _is_whole(max_new_tokens) or max_new_tokens < 0:
            raise InputError(f"max_new_tokens={max_new_tokens!r}: must be a whole number, 0 or more.")
        if (
            not isinstance(temperature, Real)
            or isinstance(temperature, bool)
            or not 0 <= temperature < math.inf
        ):
            raise InputError(
                f"temperature={temperature!r}: must be a finite number, 0 (the likeliest token) or more."
            )
        if top_k is not None and (not _is_whole(top_k) or top_k < 1):
            raise InputError(f"top_k={top_k!r}: must be a whole number, 1 or more, or None for all tokens.")

        for _ in range(max_new_tokens):
            logits, _ = self(tokens[:, -self.config.block_size :])  # (B, T, V)
            last = logits[:, -1].float()  # (B, V)
            if not last.isfinite().all():
                raise InputError(
                    "the model's logits are not finite, so nothing can be drawn from them: its weights "
                    "diverged in training; generate from an earlier state."
                )
            if temperature == 0:
                chosen = last.argmax(dim=-1, keepdim=True)  # (B, 1)
            else:
                if top_k is not None and top_k < last.shape[-1]:
                    kept, ids = last.topk(top_k)  # (B, top_k)
                    last = torch.full_like(last, -math.inf).scatter(-1, ids, kept)
                # The largest logit goes to 0 before the division, so that a tiny temperature cannot overflow.
                scores = (last - last.amax(dim=-1, keepdim=True)) / temperature
                chosen = torch.multinomial(scores.softmax(dim=-1), 1, generator=generator)  # (B, 1)
            tokens = torch.cat([tokens, chosen], dim=1)
        return tokens

    def _check_tokens(self, name: str, tokens: Tensor) -> None:
        if not isinstance(tokens, Tensor):
            raise InputError(
                f"{name} is a {type(tokens).__name__}: expected a torch tensor of shape (B, T), int64."
            )
        if tokens.dtype != torch.int64:
            raise InputError(f"{name} of dtype {tokens.dtype}: expected torch.int64; {name}.long() converts.")
        if tokens.ndim != 2 or tokens.shape[1] == 0:
            raise InputError(
                f"{name} of shape {tuple(tokens.shape)}: expected (B, T), B sequences of T >= 1 tokens; "
                f"{name}[None] makes a batch of one sequence."
            )


def fuse_qkv(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same weights for fused_qkv=True: query, key and value stacked to `qkv`, in this order of rows."""
    fused = {}
    for name, tensor in state_dict.items():
        if ".attention.query." in name:
            others = (state_dict[name.replace(".query.", f".{part}.")] for part in ("key", "value"))
            fused[name.replace(".query.", ".qkv.")] = torch.cat([tensor, *others])
        elif ".attention.key." not in name and ".attention.value." not in name:
            fused[name] = tensor
    return fused


def split_qkv(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same weights for fused_qkv=False: each `qkv` cut into query, key and value."""
    split = {}
    for name, tensor in state_dict.items():
        if ".attention.qkv." in name:
            for part, piece in zip(("query", "key", "value"), tensor.chunk(3), strict=True):
                split[name.replace(".qkv.", f".{part}.")] = piece.clone()
        else:
            split[name] = tensor
    return split


# transformers' name of a layer inside a block, ours, and whether it is a Conv1D, whose weight is (in, out).
_TRANSFORMERS_LAYERS = [
    ("ln_1", "norm1", False),
    ("attn.c_attn", "attention.qkv", True),
    ("attn.c_proj", "attention.project", True),
    ("ln_2", "norm2", False),
    ("mlp.c_fc", "mlp.expand", True),
    ("mlp.c_proj", "mlp.project", True),
]


def load_transformers_weights(model: GPT2, state_dict: Mapping[str, Tensor]) -> None:
    """Copy the weights of a transformers.GPT2LMHeadModel, or of GPT-2's checkpoint files, into `model`.

    state_dict: hf_model.state_dict(), or what safetensors.torch.load_file("model.safetensors") returns.
    The names may start with "transformer." or not; the causal masks that old files hold are passed over.
    The model must have the checkpoint's sizes, bias=True and qk_norm=False; Q, K and V may be fused.
    Raises InputError naming the tensors that are missing, left over or of another shape; the model is
    then unchanged.
    """
    theirs = {name.removeprefix("transformer."): tensor for name, tensor in state_dict.items()}
    masks = {name for name in theirs if name.endswith((".attn.bias", ".attn.masked_bias"))}
    theirs = {name: tensor for name, tensor in theirs.items() if name not in masks}
    wanted = model.state_dict()

    names = {  # theirs -> ours
        "wte.weight": "token_embedding.weight",
        "wpe.weight": "position_embedding.weight",
        "ln_f.weight": "final_norm.weight",
        "ln_f.bias": "final_norm.bias",
        "lm_head.weight": "head.weight",
    }
    transposed = set()
    for layer in range(model.config.n_layer):
        for their_name, our_name, is_conv1d in _TRANSFORMERS_LAYERS:
            for part in ("weight", "bias"):
                names[f"h.{layer}.{their_name}.{part}"] = f"blocks.{layer}.{our_name}.{part}"
            if is_conv1d:
                transposed.add(f"h.{layer}.{their_name}.weight")
    if "wte.weight" in theirs:
        theirs.setdefault("lm_head.weight", theirs["wte.weight"])  # GPT-2's files leave the tied head out
        if model.config.tie_weights and not torch.equal(theirs["lm_head.weight"], theirs["wte.weight"]):
            raise InputError(
                "lm_head.weight differs from wte.weight in this checkpoint: its head is not tied to the "
                "embedding; build the model with tie_weights=False."
            )

    _refuse("has tensors this model has no place for", sorted(theirs.keys() - names.keys()))
    _refuse("lacks tensors", sorted(names.keys() - theirs.keys()))
    ours = {}
    for name, tensor in theirs.items():
        ours[names[name]] = rearrange(tensor, "i o -> o i") if name in transposed else tensor
    if not model.config.fused_qkv:
        ours = split_qkv(ours)
    _refuse("has tensors this model has no place for", sorted(ours.keys() - wanted.keys()))
    _refuse("lacks tensors", sorted(wanted.keys() - ours.keys()))
    _refuse(
        "has tensors of another shape",
        [
            f"{name} {tuple(ours[name].shape)}, here {tuple(wanted[name].shape)}"
            for name in wanted
            if ours[name].shape != wanted[name].shape
        ],
    )
    model.load_state_dict(ours)


def _refuse(what: str, names: Iterable[str]) -> None:
    """Raise if there are any names."""
    names = list(names)
    if names:
        shown = "; ".join(names[:4]) + (f"; and {len(names) - 4} more" if len(names) > 4 else "")
        raise InputError(
            f"the checkpoint {what}: {shown}. The GPT2Config must have the checkpoint's sizes, "
            "bias=True and qk_norm=False."
        )
