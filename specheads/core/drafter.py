"""The contracts of drafting and of training a drafter.

tests/heads/test_heads.py checks them for every head. See docs/add_a_head.md.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol, runtime_checkable

import torch
from huggingface_hub import PyTorchModelHubMixin
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from specheads.core.cpu.weight_layout import product
from specheads.core.errors import InputError
from specheads.core.features import Committed, Features
from specheads.core.files import as_json
from specheads.core.ranges import check_fields

State = Any
"""State of a drafter between the levels of one draft; opaque to the engines."""
Tokens = Int[Tensor, "batch time"]
Anchors = Bool[Tensor, "batch time"]
States = Iterator[Float[Tensor, "batch time width"]]
Nodes = Int[Tensor, "batch node"]
Guesses = tuple[Float[Tensor, "batch node vocab"], State]
"""Logits for the token after each node of a level, and the state that the next level continues."""
Weight = Float[Tensor, "vocab width"]
Hidden = Float[Tensor, "*batch width"]
"""States of a head, from which logits are computed."""


class Projection(NamedTuple):
    """Matrix and bias that turn a state into logits."""

    weight: Weight
    bias: Float[Tensor, " vocab"] | None = None


@runtime_checkable
class Memory(Protocol):
    """State of a drafter between steps, such as EAGLE's keys and values.

    There are no defaults: rows that are not updated would draft from another request's text.
    """

    def keep(self, rows: Int[Tensor, " kept"]) -> "Memory":
        """Return the memory of these rows, after finished requests leave the batch."""
        ...

    def join(self, new_rows: Any, /) -> "Memory":
        """Return the memory of the rows of both batches, those of `new_rows` last.

        Both have the same capacity, and neither may be used afterwards.
        """
        ...

    def scatter(
        self, slots: Int[Tensor, "batch slot"], lengths: Int[Tensor, " batch"], /
    ) -> "Memory":
        """Return rows whose positions are stored in any slots of the only row of this memory.

        This is for engines that assign each position a slot of one large cache; the
        first `lengths` ones of each row are stored already. The result is valid for one `begin` and
        the `extend` calls after it. A memory without paged slots raises a ValueError.
        """
        ...


def refuse_scattering(memory: object, *_: Tensor) -> NoReturn:
    """Implement `scatter` for a memory that does not support paged slots: raise a ValueError."""
    raise InputError(
        f"{type(memory).__name__} does not support paged slots; use a trained head with this engine"
    )


class Drafter(ABC):
    """Proposes the next tokens, one level of nodes at a time.

    A draft is one `begin`, which reads the tokens committed since the last draft and returns the
    logits after the root, and then one `extend` per further level.
    """

    depth: int
    """Number of levels it can draft."""
    drafted_size: int = 0
    """Number of columns of its logits; zero if unknown."""
    aux_layers: tuple[int, ...] = ()
    """Base layers whose residual stream it reads: k is the stream after k layers."""
    max_length: int | None = None
    """Length of the longest text it can draft for; None is any."""
    can_record: bool = False
    """Whether `begin` and `extend` are functions of tensors that read nothing back, so that a GPU
    can record a draft. Its memory is then None, or has `fix_shapes` as that of trained heads."""
    max_unread_positions: int = 32
    """Most committed positions that steps without a draft may leave unread."""
    tuned: Any = None
    """Measurements of `specheads tune`: see decoding/trees/tuned.py. None without them."""

    def memory(self, batch: int, capacity: int) -> Memory | None:
        """Return the state between steps for rows of at most `capacity`; None without any."""
        return None

    def to_tokens(self, drafted: Int[Tensor, "*any"]) -> Int[Tensor, "*any"]:
        """Return the tokens of these columns of its logits."""
        return drafted

    def confidence(self, state: State) -> Float[Tensor, "batch node"] | None:
        """Return the probability that the base accepts a token after each node of the last level.

        It does not depend on the token. None if the drafter has no confidence output.
        """
        return None

    @abstractmethod
    def begin(self, committed: Committed, memory: Any) -> Guesses:
        """Read the committed tokens; return logits for the token after the root, the only node.

        Args:
            committed: Positions the base has read since the last draft, and their next tokens.
            memory: The result of `memory`, updated in place.
        """

    def store_committed(self, committed: Committed, memory: Any) -> None:
        """Store the committed tokens for later drafts, without a draft."""
        if memory is not None:
            self.begin(committed, memory)

    @abstractmethod
    def extend(self, state: State, tokens: Nodes, parents: Nodes) -> Guesses:
        """Read one level of nodes; return logits for the token after each.

        `parents[b, i]` is the node of the previous level that node i continues.
        """


class Head(Drafter, nn.Module, PyTorchModelHubMixin):
    """A trained drafter, with teacher-forced states so that one loop can train any kind.

    Args:
        config: The kind's own `Config`, with `depth`; its values are checked here.
        width: Width of the base's final hidden state.
        vocab_size: Rows of the base's vocabulary projection.
    """

    can_record = True
    draft_ids: Tensor | None
    """Tokens that it can draft, in increasing order; None is the whole vocabulary."""
    num_anchors: int = 0
    """Number of positions per row from which it drafts in a training step, sampled at each step.
    Zero: every depth learns from every position of the loss mask."""
    drafts_blocks: bool = False
    """Whether one forward drafts all levels, after an anchor."""
    adds_to_base_logits: bool = False
    """Whether its logits are those of the base's projection plus a correction."""
    num_candidates: int = 0
    """Number of tokens of each level, those with the largest products of the first `width` entries
    of a state and its `projection`, among which it selects; zero is all tokens."""
    uncorrected_loss: float = 0.0
    """Share of the loss of its logits without the correction, at the first step of a phase; it
    falls linearly to zero. The first `width` entries of its states need no correction."""
    base_fingerprint: str = ""
    """Fingerprint of the base it was trained on: see base/fingerprint.py. Empty if unknown."""

    def __init__(self, config: Any, width: int, vocab_size: int) -> None:
        super().__init__()
        check_fields(config, "head")
        self.config, self.depth = config, config.depth
        self.width, self.vocab_size = width, vocab_size
        size = getattr(config, "draft_tokens", 0)
        if not 0 <= size <= vocab_size:
            raise InputError(
                f"head.draft_tokens must be 0 (all) to {vocab_size}, got {size}; lower it"
            )
        # the first tokens, to have the right shape until `choose_vocabulary`
        self.register_buffer("draft_ids", torch.arange(size) if size else None)
        self.drafted_size = size or vocab_size

    def matches_fingerprint(self, fingerprint: str) -> bool:
        """Return whether its base may have this fingerprint.

        An empty fingerprint, or only the first half of one, matches more bases, on either side.
        """
        trained_on = self.base_fingerprint
        return trained_on.startswith(fingerprint) or fingerprint.startswith(trained_on)

    def choose_vocabulary(self, counts: Int[Tensor, " vocab"]) -> None:
        """Restrict the draft vocabulary to the tokens with the largest counts in training text.

        Decoding stays lossless: the base generates the other tokens itself.

        Source: Zhao et al. 2025, FR-Spec, arXiv:2502.14856.
        """
        if self.draft_ids is not None:
            self.draft_ids.copy_(counts.topk(len(self.draft_ids)).indices.sort().values)

    def coverage(self, counts: Int[Tensor, " vocab"]) -> float:
        """Return the fraction of a text, given as token counts, that is in the draft vocabulary."""
        # the counts are on the host, the head may be on a GPU
        counts = counts.to(next(self.parameters()).device)
        drafted = self.to_drafted(torch.arange(len(counts), device=counts.device)) >= 0
        return (counts[drafted].sum() / counts.sum().clamp(min=1)).item()

    def to_tokens(self, drafted: Int[Tensor, "*any"]) -> Int[Tensor, "*any"]:
        """Return the tokens of these columns of its logits."""
        return drafted if self.draft_ids is None else self.draft_ids[drafted]

    def to_drafted(self, tokens: Int[Tensor, "*any"]) -> Int[Tensor, "*any"]:
        """Return the columns of its logits for these tokens; -1 if a token cannot be drafted."""
        if self.draft_ids is None:
            return tokens
        columns = torch.searchsorted(self.draft_ids, tokens).clamp(max=len(self.draft_ids) - 1)
        return torch.where(self.draft_ids[columns] == tokens, columns, -1)

    def draft_maps(self) -> tuple[Int[Tensor, " drafted"], Bool[Tensor, " vocab"]]:
        """Return the maps that serving engines and public checkpoints call d2t and t2d.

        These are the token minus the column for each column of its logits, and a mask of the
        vocabulary that marks the tokens it can draft.
        """
        columns = torch.arange(self.drafted_size)
        tokens = columns if self.draft_ids is None else self.draft_ids.to(columns.device)
        marks = torch.zeros(self.vocab_size, dtype=torch.bool)
        marks[tokens] = True
        return tokens - columns, marks

    @property
    def kind(self) -> str:
        """The name of its module, which is `kind` in settings and in config.json."""
        return type(self).__module__.rpartition(".")[2]

    @abstractmethod
    def states(self, features: Features, tokens: Tokens, anchors: Anchors | None = None) -> States:
        """Yield `depth` states; position t of the k-th predicts `tokens[:, t + 2 + k]`.

        The k-th state at t may have read `tokens[:, ..t + 1 + k]` and nothing later. Positions too
        close to the end wrap around and are meaningless; callers ignore them.

        Args:
            features: Features of the base at every position. A document of a packed row sees only
                itself: `features.causal_mask()`, at positions `features.positions()`.
            tokens: Tokens at these positions.
            anchors: Positions from which to draft; None is all. Other states are undefined, so that
                a head whose cost grows with the anchors can skip them.
        """

    @abstractmethod
    def projection(self, level: int) -> Projection:
        """Return the matrix and bias that turn a state of this level into logits.

        The loss fuses the product and never stores the logits of a whole batch.
        """

    def projections(self) -> list[Projection]:
        """Return the projection of every level; levels with a shared one return the same tensor."""
        return [self.projection(level) for level in range(self.depth)]

    def confidence_logits(self, state: Hidden) -> Float[Tensor, "*batch"] | None:
        """Return the logit of the probability that the base accepts the token of this state.

        None if the head has no confidence output. `confidence` returns it during a draft.
        """

    def candidate_logits(
        self, state: Hidden, level: int, best: Int[Tensor, " *batch"]
    ) -> tuple[Float[Tensor, "*batch candidate"], Int[Tensor, " *batch"]]:
        """Return the logits of the candidates of a head with `num_candidates`, for its loss.

        Also return the index of the best column, which replaces the last candidate if it is none.
        """
        raise NotImplementedError

    def projection_rows(
        self, projection: Float[Tensor, "vocab ..."]
    ) -> Float[Tensor, "drafted ..."]:
        """Return the rows of the base's projection, or of its bias, for the draft vocabulary."""
        return projection if self.draft_ids is None else projection[self.draft_ids]

    def choose_aux_layers(self, num_layers: int) -> None:
        """Choose `aux_layers`, if the settings leave them open, for a base of so many layers."""

    def initialise(self, embedding: Tensor, projection: Tensor) -> None:
        """Initialise from the base's tensors if that helps; called once, before training.

        These are the input embedding (vocab, width), and the vocabulary projection with the rows of
        the draft vocabulary.
        """

    def calibrate(self, features: Iterable[Features], total: Callable[[Tensor], Tensor]) -> None:
        """Measure the base's features if that helps; called once, before the first training step.

        `features` are those of the positions before the labels of the first batch, in parts of one
        row each. `total` sums a tensor over all processes, which call this together.
        """

    def bind(
        self, embedding: Tensor, projection: Tensor | None = None, bias: Tensor | None = None
    ) -> None:
        """Set the base's tensors that a head borrows; they are never trained or saved.

        A projection of None is the input embedding (vocab, width). `bias` is the projection's.
        """

    def logits(self, state: Hidden, level: int) -> Float[Tensor, "*batch vocab"]:
        """Return the logits of a state of this level."""
        weight, bias = self.projection(level)
        return product(state, weight, bias)

    def _save_pretrained(self, save_directory: Path) -> None:
        """Write the weights and config.json."""
        super()._save_pretrained(save_directory)
        (save_directory / "config.json").write_text(as_json(self.settings()), encoding="utf-8")

    def settings(self) -> dict[str, Any]:
        """Return the content of config.json: kind, settings but null ones, sizes, fingerprint."""
        sizes = {"width": self.width, "vocab_size": self.vocab_size}
        base = {"base_fingerprint": self.base_fingerprint} if self.base_fingerprint else {}
        settings = {name: value for name, value in asdict(self.config).items() if value is not None}
        return {"kind": self.kind, **settings, **sizes, **base}
