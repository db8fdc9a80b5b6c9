"""What kinds of head share: tensors and layers of their base, recurrent levels, small modules."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from specheads.core.cpu.weight_layout import product
from specheads.core.drafter import (
    Anchors,
    Guesses,
    Head,
    Nodes,
    Projection,
    State,
    States,
    Tokens,
    Weight,
)
from specheads.core.errors import InputError
from specheads.core.features import Committed, Features

NUM_FUSED_LAYERS = 3
"""Number of base layers that a head with `aux_layers` reads by default."""


class BorrowingHead(Head):
    """A head that borrows tensors of its base, as frozen buffers that are not saved."""

    embedding: Tensor | None
    borrowed: Tensor | None
    borrowed_bias: Tensor | None
    fc: Any
    """Matrix that fuses the residual streams of `aux_layers`, or None without any."""
    borrows_embedding = True
    """Whether it reads the base's input embedding."""
    borrows_projection = False
    """Whether it uses the base's vocabulary projection."""
    has_own_fusion = False
    """Whether it fuses the streams itself. Other heads add them to the final hidden state
    by a matrix that starts at zero, so a head starts as one that reads no streams."""
    stream_scale: Tensor | None
    """Typical RMS of each residual stream, by which training divides them, or None. `calibrate`
    measures it, and a saved head has it in `fc`."""
    scales_streams = False
    """Whether `calibrate` measures `stream_scale`."""

    def __init__(self, config: Any, width: int, vocab_size: int) -> None:
        super().__init__(config, width, vocab_size)
        layers = getattr(config, "aux_layers", None)
        self.aux_layers, self.fc = tuple(layers or ()), None
        if layers is not None and not self.has_own_fusion:
            num_aux = len(layers) or NUM_FUSED_LAYERS
            self.fc = nn.Linear(num_aux * width, width, bias=False)
            nn.init.zeros_(self.fc.weight)
        for name in ("embedding", "borrowed", "borrowed_bias"):
            self.register_buffer(name, None, persistent=False)
        self.register_buffer("stream_scale", None)

    def bind(
        self, embedding: Tensor, projection: Tensor | None = None, bias: Tensor | None = None
    ) -> None:
        """Borrow the base's tensors, detached, because they are no parameters of this head."""
        if self.borrows_embedding:
            self.embedding = embedding.detach()
        if self.borrows_projection:
            projection = embedding if projection is None else projection
            self.borrowed = self.projection_rows(projection.detach())
            self.borrowed_bias = None if bias is None else self.projection_rows(bias.detach())

    def embed(self, tokens: Int[Tensor, "*any"], like: Tensor) -> Float[Tensor, "*any width"]:
        """Return the embeddings of tokens in the dtype of `like`, for a head bound to a base."""
        if self.embedding is None:
            raise InputError(f"{self.kind} reads its base's embedding; load the head with its base")
        return F.embedding(tokens, self.embedding).to(like.dtype)

    def borrowed_projection(self) -> Weight:
        """Return the base's projection to the draft vocabulary, for a head bound to a base."""
        if self.borrowed is None:
            raise InputError(
                f"{self.kind} borrows its base's projection; load the head with its base"
            )
        return self.borrowed

    def projection(self, level: int) -> Projection:
        """Return the projection, the same at every level."""
        return Projection(self.borrowed_projection(), self.borrowed_bias)

    def fuse_streams(self, features: Features) -> Features:
        """Return features with the fused streams added to the final hidden state."""
        if self.fc is None:
            return features
        streams = self.streams(features).unflatten(-1, (-1, self.width))
        # the scales differ by layer and position: in SmolLM2-135M by a factor above 100
        normed = F.rms_norm(streams, streams.shape[-1:], eps=1e-6).flatten(-2)
        hidden = features.hidden.to(self.fc.weight.dtype)
        return replace(features, hidden=hidden + self.fc(normed.to(hidden.dtype)))

    def fuse_committed(self, committed: Committed) -> Committed:
        """Return committed positions whose hidden states have the fused streams added."""
        return replace(committed, features=self.fuse_streams(committed.features))

    def choose_aux_layers(self, num_layers: int) -> None:
        """Choose the layers of EAGLE-3, or three evenly spaced ones in a shallow base."""
        if getattr(self.config, "aux_layers", None) == []:
            if num_layers < NUM_FUSED_LAYERS:
                raise InputError(
                    f"a base needs {NUM_FUSED_LAYERS} layers if aux_layers is empty, this one has "
                    f"{num_layers}; set head.aux_layers={[*range(num_layers)]}"
                )
            first, end = (2, 3) if num_layers >= 7 else (int(num_layers > 3), 1)
            self.set_aux_layers([first, num_layers // 2, num_layers - end])

    def set_aux_layers(self, aux_layers: list[int]) -> None:
        """Read the base after these layers."""
        self.config = replace(self.config, aux_layers=aux_layers)
        self.aux_layers = tuple(aux_layers)

    def streams(self, features: Features) -> Float[Tensor, "batch time aux"]:
        """Return the residual streams of the base after the layers that this head reads."""
        if features.aux is None:
            raise InputError(
                f"{self.kind} reads aux_layers, got none; read the base with head.aux_layers"
            )
        if self.stream_scale is None:
            return features.aux
        scale = self.stream_scale.repeat_interleave(self.width)
        return features.aux / scale.to(features.aux.dtype)

    def calibrate(self, features: Iterable[Features], total: Callable[[Tensor], Tensor]) -> None:
        """Divide the streams from now on by their geometric mean RMS.

        The scales of a base's layers differ by an order of magnitude, and an optimizer's steps are
        equally large for the weights of all of them.
        """
        if not self.scales_streams:
            return
        # sums over positions of the log RMS of each stream, and the number of positions
        sums = torch.zeros(())
        for row in features:
            streams = self.streams(row)[0].unflatten(-1, (-1, self.width)).float()
            logs = streams.square().mean(-1).clamp(min=1e-12).log() / 2
            sums = sums + torch.cat([logs.sum(0), logs.new_tensor([len(logs)])])
        sums = total(sums)
        self.stream_scale, self.scales_streams = (sums[:-1] / sums[-1].clamp(min=1)).exp(), False

    @torch.no_grad()
    def fold_streams(self) -> None:
        """Move the scale of the streams into `fc`, which changes no draft."""
        if self.stream_scale is not None:
            self.fc.weight /= self.stream_scale.repeat_interleave(self.width)
            self.stream_scale = None

    def _load_from_state_dict(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, state_dict: Mapping[str, Any], prefix: str, *arguments: Any
    ) -> None:
        """Load the weights of a head that was calibrated or not, as this one or otherwise."""
        scale = state_dict.get(f"{prefix}stream_scale")
        device = next(self.parameters()).device
        self.stream_scale = None if scale is None else torch.empty_like(scale, device=device)
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def _save_pretrained(self, save_directory: Path) -> None:
        """Write the weights, with the scale of the streams in `fc`, and config.json."""
        if self.stream_scale is None:
            super()._save_pretrained(save_directory)
            return
        folded = deepcopy(self, {id(buffer): buffer for buffer in self.buffers()})
        folded.fold_streams()
        folded._save_pretrained(save_directory)

    def corrected_projection(self, correction: nn.Module) -> Projection:
        """Return [W, C]: the base's projection W next to the matrix C of a layer; and W's bias."""
        weight = correction.get_parameter("weight")
        borrowed = self.borrowed_projection().to(weight.dtype)
        return Projection(torch.cat([borrowed, weight], dim=1), self.borrowed_bias)

    def corrected_logits(self, state: Tensor, correction: nn.Module) -> Tensor:
        """Return W h + b + C e of states [h, e], without `corrected_projection`'s concatenation."""
        hidden, update = state.split([self.width, state.shape[-1] - self.width], dim=-1)
        return product(hidden, self.borrowed_projection(), self.borrowed_bias) + correction(update)


@dataclass(frozen=True, slots=True)
class RecurrentDraft:
    """State of a draft."""

    states: Float[Tensor, "batch node state"]
    """States of the nodes of a level."""
    hidden: Float[Tensor, "batch 1 width"]
    """The base's last hidden state, encoded."""
    level: int


class RecurrentHead(BorrowingHead):
    """state_0 follows from the base's hidden state, and state_k+1 from state_k and a token."""

    num_embeddings: int = 1
    """Number of embeddings; later levels share the last one."""

    def encode_text(self, features: Features) -> Float[Tensor, "batch time width"]:
        """Return the base's hidden states that the first states follow from."""
        return self.fuse_streams(features).hidden

    def encode_committed(self, committed: Committed, memory: Any) -> Float[Tensor, "batch 1 width"]:
        """Return the same for the last committed position of each row."""
        return self.fuse_committed(committed).last_hidden()

    @abstractmethod
    def first_state(self, hidden: Tensor) -> Tensor:
        """Return the state before any token."""

    @abstractmethod
    def read_token(self, state: Tensor, embedded: Tensor, level: int) -> Tensor:
        """Return the state after one more embedded token."""

    @abstractmethod
    def output(self, state: Tensor, hidden: Tensor, level: int) -> Tensor:
        """Return the input of the vocabulary projection."""

    def embed_level(self, tokens: Tensor, like: Tensor, level: int) -> Tensor:
        """Return the embeddings that a level reads."""
        return self.embed(tokens, like)

    def states(self, features: Features, tokens: Tokens, anchors: Anchors | None = None) -> States:
        """Yield the states that read one token after each position, then two, and so on."""
        hidden = self.encode_text(features)
        state = self.first_state(hidden)
        # one lookup for all levels: the gradient of each lookup is as large as the table
        tables = [self.embed_level(tokens, hidden, level) for level in range(self.num_embeddings)]
        for level in range(self.depth):
            embedded = entry_of_level(tables, level).roll(-1 - level, 1)
            state = self.read_token(state, embedded, level)
            yield self.output(state, hidden, level)

    def begin(self, committed: Committed, memory: Any) -> Guesses:
        """Read the root after the base's last hidden state."""
        hidden = self.encode_committed(committed, memory)
        return self.guess(RecurrentDraft(self.first_state(hidden), hidden, 0), committed.root())

    def extend(self, state: State, tokens: Nodes, parents: Nodes) -> Guesses:
        """Read each node after its parent's state."""
        states = pick_parents(state.states, parents)
        return self.guess(RecurrentDraft(states, state.hidden, state.level + 1), tokens)

    def guess(self, parents: RecurrentDraft, tokens: Nodes) -> Guesses:
        """Return the logits after the tokens of a level, given their parents' states."""
        hidden, level = parents.hidden, parents.level
        states = self.read_token(parents.states, self.embed_level(tokens, hidden, level), level)
        logits = self.logits(self.output(states, hidden, level), level)
        return logits, RecurrentDraft(states, hidden, level)


class RMSNorm(nn.RMSNorm):
    """torch's RMSNorm for inputs of another dtype than its weight, for which torch's own warns."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise in the dtype of the weight; return the dtype of the input."""
        return super().forward(x.to(self.weight.dtype)).type_as(x)


class ResidualBlock(nn.Module):
    """R x + SiLU(W x + b), the block of Medusa, Hydra and ReDrafter.

    R is the identity unless `input_width` is above `width`. The block is initialised to return the
    leading channels of its input.
    """

    def __init__(self, width: int, input_width: int = 0) -> None:
        super().__init__()
        input_width = input_width or width
        self.linear = nn.Linear(input_width, width)
        is_wide = input_width > width
        self.res_connection = nn.Linear(input_width, width) if is_wide else nn.Identity()
        for parameter in self.parameters():
            nn.init.zeros_(parameter)
        if is_wide:
            nn.init.eye_(self.res_connection.get_parameter("weight"))

    def forward(self, values: Tensor) -> Tensor:
        """Return the output of the block."""
        return self.res_connection(values) + F.silu(self.linear(values))


def pick_parents(
    state: Float[Tensor, "batch level width"], parents: Nodes
) -> Float[Tensor, "batch node width"]:
    """Return the state of each node's parent."""
    if state.shape[1] == 1:
        return state.expand(-1, parents.shape[1], -1)
    return state.gather(1, parents[..., None].expand(-1, -1, state.shape[-1]))


def entry_of_level(modules: nn.ModuleList | list[Tensor], level: int) -> Any:
    """Return the entry of a level, or the last one, which later levels share."""
    return modules[min(level, len(modules) - 1)]
