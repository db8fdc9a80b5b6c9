"""IBM's MLP speculator: a small recurrence over the drafted tokens.

Source: Wertheimer et al. 2024, arXiv:2404.19124; foundation-model-stack/fms-extras. The gated
state: `ArcticLSTMSpeculator` of snowflakedb/ArcticInference.
"""

import math
import re
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from specheads.core.drafter import Projection
from specheads.core.errors import InputError
from specheads.core.foreign import refuse_unused
from specheads.core.ranges import Depth, LayerIndex, NonNegativeInt, WidthOrZero, one_of
from specheads.heads.checkpoint import fill_head
from specheads.heads.layers.common import RecurrentHead, entry_of_level

EPSILON = 1e-6
GATES = ("forget", "input", "output", "cell")
"""Parts of the gated recurrence in the order of their rows; the last one is not a gate."""


@dataclass(kw_only=True, slots=True)
class Config:
    """Settings of an MLP speculator; the defaults are the published ones."""

    depth: Depth = 3
    """Number of levels it drafts."""
    inner_dim: WidthOrZero = 0
    """Width of its state. Zero is the width of the base."""
    state: Annotated[str, one_of("mlp", "gated")] = "mlp"
    """Update of the state by a token: mlp (a linear layer) or gated (an LSTM)."""
    tie_weights: bool = True
    """Whether all levels share embedding, projection and norm, and all but the first share the
    recurrence."""
    scale_input: bool = True
    """Whether the base's hidden state is scaled to an RMS of 1/sqrt(2) first."""
    aux_layers: list[LayerIndex] | None = None
    """Base layers that it reads next to the final hidden state: k is the residual stream after k
    layers. Null is none; empty selects 2, n // 2 and n - 3 of n, or others for a shallow base."""
    draft_tokens: NonNegativeInt = 0
    """Size of the draft vocabulary: the most frequent tokens of the training text. Zero is all."""


class _Norm(nn.RMSNorm):
    """Root-mean-square norm with a bias, as in the published checkpoints."""

    def __init__(self, width: int) -> None:
        super().__init__(width, EPSILON)
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.bias


class Head(RecurrentHead):
    """`depth` steps of state <- GELU(norm(a * W state + b * E token)), each with its logits.

    The weights a and b are such that half of the first state's energy remains after all levels:
    a = 0.5 ** (0.5 / depth), b = sqrt((1 - a**2) * inner_dim / 2).

    With `gated`, W has four parts f, i, o and c that read the same token, and there is a cell that
    starts at zero: cell <- cell * sigmoid(f) + GELU(norm(c)) * sigmoid(i), and
    state <- GELU(norm(cell)) * sigmoid(o).
    """

    borrows_embedding = False

    def __init__(self, config: Config, width: int, vocab_size: int) -> None:
        super().__init__(config, width, vocab_size)
        inner = config.inner_dim or width
        copies = 1 if config.tie_weights else config.depth
        recurrences = min(config.depth - 1, 1 if config.tie_weights else config.depth)
        self.inner, self.num_embeddings = inner, copies
        self.gated = config.state == "gated"
        self.emb = nn.ModuleList(nn.Embedding(vocab_size, inner) for _ in range(copies))
        self.proj = nn.ModuleList(
            nn.Linear(size, inner * (len(GATES) if self.gated else 1), bias=False)
            for size in [width] + [inner] * recurrences
        )
        self.head = nn.ModuleList(
            nn.Linear(inner, self.drafted_size, bias=False) for _ in range(copies)
        )
        self.ln = nn.ModuleList(_Norm(inner) for _ in range(copies))
        self.state_ln = nn.ModuleList(_Norm(inner) for _ in range(copies * self.gated))
        for module in (*self.emb, *self.proj, *self.head):
            nn.init.normal_(module.get_parameter("weight"), std=1 / math.sqrt(inner))
        self.state_weight = 0.5 ** (0.5 / self.depth)
        self.token_weight = math.sqrt((1 - self.state_weight**2) * inner / 2)

    def initialise(self, embedding: Tensor, projection: Tensor) -> None:
        """Initialise embedding and projection from the base's, if the widths are equal."""
        if embedding.shape != self.emb[0].get_parameter("weight").shape:
            return
        scale = embedding.pow(2).mean().sqrt() * math.sqrt(embedding.shape[1])
        for level in self.emb:
            level.get_parameter("weight").data.copy_(embedding / scale)
        for level in self.head:
            level.get_parameter("weight").data.copy_(projection)
        nn.init.eye_(self.proj[0].get_parameter("weight").data[-self.inner :])

    def embed_level(self, tokens: Tensor, like: Tensor, level: int) -> Tensor:
        """Return the embeddings of a level's own table."""
        return entry_of_level(self.emb, level)(tokens)

    def projection(self, level: int) -> Projection:
        """Return the vocabulary projection of a level, without a bias."""
        return Projection(entry_of_level(self.head, level).weight)

    def first_state(self, hidden: Tensor) -> Tensor:
        """Return the state before any token, from the base's hidden state."""
        if self.config.scale_input:
            hidden = F.rms_norm(hidden, hidden.shape[-1:], eps=EPSILON) / math.sqrt(2)
        return F.pad(hidden, (0, self.inner)) if self.gated else hidden

    def read_token(self, state: Tensor, embedded: Tensor, level: int) -> Tensor:
        """Return the state after one more embedded token; [state, cell] if gated."""
        norm = entry_of_level(self.ln, level)
        # scaled by 1 / a compared with the formula, as in the original code: the norm undoes this
        # except for its epsilon
        scale, project = self.token_weight / self.state_weight, entry_of_level(self.proj, level)
        if not self.gated:
            return F.gelu(norm(torch.add(project(state), embedded, alpha=scale)))
        output, cell = state.split([state.shape[-1] - self.inner, self.inner], dim=-1)
        gates = project(output).unflatten(-1, (len(GATES), self.inner))
        gates = torch.add(gates, embedded[..., None, :], alpha=scale)
        forget_gate, input_gate, output_gate = gates[..., :3, :].sigmoid().unbind(-2)
        cell = cell * forget_gate + F.gelu(norm(gates[..., 3, :])) * input_gate
        output = F.gelu(entry_of_level(self.state_ln, level)(cell)) * output_gate
        return torch.cat([output, cell], dim=-1)

    def output(self, state: Tensor, hidden: Tensor, level: int) -> Tensor:
        """Return the state without the cell."""
        return state[..., : self.inner]


def read_public(config: dict[str, Any], tensors: dict[str, Tensor]) -> Head | None:
    """Read an IBM accelerator, or one of Snowflake's Arctic speculators, which have a method.

    Tied tensors are stored once per level, and the copies must be equal.
    """
    if config.get("model_type") != "mlp_speculator":
        return None
    method = config.get("method")
    refuse_unused(
        "mlp_speculator",
        config,
        used=(
            *("n_predict", "vocab_size", "emb_dim", "inner_dim", "tie_weights", "scale_input"),
            *(("method", "input_hidden_dim", "proj_dim", "tie_lstm_embs") if method else ()),
            # engines choose trees of their own
            *("n_candidates", "top_k_tokens_per_head", "hidden_size", "base_model_archs"),
        ),
    )
    width = config["input_hidden_dim" if method else "emb_dim"]
    settings = Config(
        depth=config["n_predict"],
        inner_dim=_arctic_width(config) if method else config.get("inner_dim") or width,
        state="gated" if method == "sum_lstm" else "mlp",
        tie_weights=config.get("tie_weights", False),
        scale_input=config.get("scale_input", False),
    )
    head = Head(settings, width=width, vocab_size=config["vocab_size"])
    weights = {name.removeprefix("speculator."): value for name, value in tensors.items()}
    if head.gated:
        weights = _join_gates(weights)
    elif method:
        # there, each module is the only one of a sequence
        weights = {
            re.sub(r"^(emb|proj|ln)\.(\d+)\.0\.", r"\1.\2.", n): t for n, t in weights.items()
        }
    if settings.tie_weights:
        weights = _untie(weights, set(head.state_dict()))
    fill_head(head, weights)
    return head


def _arctic_width(config: dict[str, Any]) -> int:
    """Return the width of an Arctic speculator; refuse several widths and unsupported methods."""
    widths = {str(config[name]) for name in ("inner_dim", "emb_dim", "proj_dim")}
    tied = config.get("tie_weights") and config.get("tie_lstm_embs")
    is_supported = config["method"] == "sum_rnn" or (config["method"] == "sum_lstm" and tied)
    width = max(widths)
    if not is_supported or len(widths) > 1 or not width.isdigit():
        raise InputError(
            "an Arctic speculator must have one width and be sum_rnn, or sum_lstm with tied "
            f"weights and embeddings; this one is {config['method']!r} of widths {sorted(widths)}; "
            "choose another"
        )
    return int(width)


def _join_gates(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Stack the gates, which Arctic stores separately; all gates share one embedding."""
    weights = {name.replace("cell_ln.", "ln."): value for name, value in weights.items()}
    for module in ("emb", "proj"):
        for level in ("0", "1"):
            names = [f"{gate}_{module}.{level}.weight" for gate in GATES]
            gates = [weights.pop(name) for name in names if name in weights]
            if len(gates) < len(names):
                continue
            if module == "emb" and not all(torch.equal(gates[0], gate) for gate in gates):
                raise InputError(
                    "with tie_lstm_embs the gates' embeddings must be equal; download it again"
                )
            weights[f"{module}.{level}.weight"] = gates[0] if module == "emb" else torch.cat(gates)
    return weights


def _untie(weights: dict[str, Tensor], parameters: set[str]) -> dict[str, Tensor]:
    """Remove the copies of tied tensors, after a check that they are equal."""
    for name in sorted(set(weights) - parameters):
        module, _, suffix = name.partition(".")
        suffix = suffix.partition(".")[2]
        original = f"{module}.{1 if module == 'proj' else 0}.{suffix}"
        if original not in weights or not torch.equal(weights[original], weights[name]):
            raise InputError(
                f"with tie_weights {name!r} and {original!r} must be equal; download it again"
            )
    return {name: value for name, value in weights.items() if name in parameters}
