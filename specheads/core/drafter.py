"""The contracts of drafting and of training a drafter.

tests/heads/test_heads.py checks them for every head. See docs/add_a_head.md.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn, Protocol, runtime_checkable

import torch
from huggingface_hub import PyTorchModelHubMixin
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from specheads.core.errors import InputError
from specheads.core.features import Committed, Features
from specheads.core.weight_layout import product

State = Any
"""What a drafter keeps between the levels of one draft; opaque to the engines."""

Weight = Float[Tensor, "vocab width"]
Bias = Float[Tensor, " vocab"]


@runtime_checkable
class Memory(Protocol):
    """What a drafter keeps between steps (EAGLE's keys and values).

    It says itself how its rows stay, join and lie scattered: there is no default, since rows
    that silently stay what they were would draft from somebody else's text.
    """

    def keep(self, rows: Int[Tensor, " kept"]) -> "Memory":
        """Return the memory of these rows: finished requests leave the batch."""
        ...

    def join(self, other: Any) -> "Memory":
        """Return the memory of both batches' rows, those of `other` last: new requests join.

        Both come from `Drafter.memory` with the same capacity, and neither is used any more.
        """
        ...

    def scatter(
        self, places: Int[Tensor, "batch slot"], lengths: Int[Tensor, " batch"]
    ) -> "Memory":
        """Return rows whose positions lie anywhere in the only row of this memory.

        For engines that give each position of a text a slot of one large cache: what `begin`
        remembers of a scattered row is written there, and serves that one `begin` and what
        follows from it.

        Args:
            places: Slot in which each position lies.
            lengths: Number of positions of each row that are remembered already.

        Raises:
            ValueError: This memory cannot lie scattered.
        """
        ...


def refuse_scattering(
    memory: object, places: Int[Tensor, "batch slot"], lengths: Int[Tensor, " batch"]
) -> NoReturn:
    """Serve as `scatter` of a memory that needs rows of its own.

    Raises:
        ValueError: Always.
    """
    del places, lengths
    raise InputError(
        f"a {type(memory).__name__} keeps each row's text in a row of its own and cannot lie "
        "scattered in another engine's cache; draft with a head there"
    )


class Drafter(ABC):
    """Proposes the next tokens, one level of nodes at a time.

    A draft is one `begin`, which reads what was committed since the last draft and answers for
    the root, and then one `extend` per further level.
    """

    depth: int
    """Levels it can draft."""

    drafted_size: int = 0
    """Columns of its logits. Zero is not known."""
    aux_layers: tuple[int, ...] = ()
    """Base layers whose residual stream it reads: k is the stream after k layers."""
    most_unread: int = 32
    """Committed positions that steps without a draft may leave it to read at once."""

    def memory(self, batch: int, capacity: int) -> Memory | None:
        """Return what persists between steps for rows of at most `capacity`; None is nothing."""
        del batch, capacity
        return None

    def to_tokens(self, drafted: Int[Tensor, "*any"]) -> Int[Tensor, "*any"]:
        """Return the tokens that these columns of its logits stand for."""
        return drafted

    def confidence(self, state: State) -> Float[Tensor, "batch node"] | None:
        """Return how likely the base is to accept a guess after each node that was answered last.

        It is known before that guess is drawn. None: it does not say, and its logits are all.
        """
        del state

    @abstractmethod
    def begin(
        self, committed: Committed, memory: Any
    ) -> tuple[Float[Tensor, "batch 1 vocab"], State]:
        """Read what was committed; return logits for the token after the root.

        Args:
            committed: Positions the base has read since the last draft, and their next tokens.
            memory: From `memory`, updated in place.
        """

    def read(self, committed: Committed, memory: Any) -> None:
        """Remember what was committed, for drafts to come, and draft nothing."""
        if memory is not None:
            self.begin(committed, memory)

    @abstractmethod
    def extend(
        self, state: State, tokens: Int[Tensor, "batch node"], parents: Int[Tensor, "batch node"]
    ) -> tuple[Float[Tensor, "batch node vocab"], State]:
        """Read one level of nodes; return logits for the token after each.

        `parents[b, i]` says which node of the previous level node i continues.
        """


class Head(Drafter, nn.Module, PyTorchModelHubMixin):
    """A trained drafter: adds teacher-forced states, so that one loop can train any kind.

    Args:
        config: The kind's own `Config`.
        width: Width of the base's final hidden state.
        vocab_size: Rows of the base's vocabulary projection.
    """

    draft_ids: Tensor | None
    """Tokens it can draft, in increasing order; None is the whole vocabulary."""

    num_anchors: int = 0
    """Positions of each row, drawn anew in each step, whose drafts it learns from: whole ones,
    from their first level to their last. Zero: every depth learns from every label."""

    base_fingerprint: str = ""
    """Weights of the base it was trained on: see base/fingerprint.py. Empty where none is known."""

    tuned: Any = None
    """What `specheads tune` measured of it: see decoding/trees/tuned.py. None where nothing is."""

    def __init__(self, config: Any, width: int, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.width, self.vocab_size = width, vocab_size
        size = getattr(config, "draft_tokens", 0)
        if not 0 <= size <= vocab_size:
            raise InputError(
                f"draft_tokens must lie between 0 (all) and {vocab_size} (the vocabulary), got "
                f"{size}"
            )
        # until a corpus is counted the first tokens stand there, so that shapes are right
        self.register_buffer("draft_ids", torch.arange(size) if size else None)
        self.drafted_size = size or vocab_size

    def is_of(self, fingerprint: str) -> bool:
        """Return whether it was trained on such weights, as far as it and a fingerprint tell.

        An empty fingerprint, or the first half of one, tells less.
        """
        return self.base_fingerprint[: len(fingerprint)] in ("", fingerprint)

    def choose_vocabulary(self, counts: Int[Tensor, " vocab"]) -> None:
        """Draft the most frequent tokens only, as many as the settings say.

        Decoding stays lossless: what cannot be drafted is said by the base itself.

        Args:
            counts: How often each token of the vocabulary stands in the training text.

        Source: Zhao et al. 2025, FR-Spec, arXiv:2502.14856.
        """
        if self.draft_ids is not None:
            self.draft_ids.copy_(counts.topk(len(self.draft_ids)).indices.sort().values)

    def coverage(self, counts: Int[Tensor, " vocab"]) -> float:
        """Return the share of a text that the head could draft, from its token counts."""
        # the text is counted on the host, the head may be on a GPU
        counts = counts.to(next(self.parameters()).device)
        drafted = self.to_drafted(torch.arange(len(counts), device=counts.device)) >= 0
        return (counts[drafted].sum() / counts.sum().clamp(min=1)).item()

    def to_tokens(self, drafted: Int[Tensor, "*any"]) -> Int[Tensor, "*any"]:
        """Return the tokens that these columns of its logits stand for."""
        return drafted if self.draft_ids is None else self.draft_ids[drafted]

    def to_drafted(self, tokens: Int[Tensor, "*any"]) -> Int[Tensor, "*any"]:
        """Return the columns of its logits that stand for these tokens, -1 where none does."""
        if self.draft_ids is None:
            return tokens
        columns = torch.searchsorted(self.draft_ids, tokens).clamp(max=len(self.draft_ids) - 1)
        return torch.where(self.draft_ids[columns] == tokens, columns, -1)

    def draft_maps(self) -> tuple[Int[Tensor, " drafted"], Bool[Tensor, " vocab"]]:
        """Return the two maps that serving engines and public checkpoints call d2t and t2d.

        Returns:
            How far the token of each column of its logits stands from that column, and which
            tokens of the vocabulary it can draft.
        """
        columns = torch.arange(self.drafted_size)
        tokens = columns if self.draft_ids is None else self.draft_ids.to(columns.device)
        marks = torch.zeros(self.vocab_size, dtype=torch.bool)
        marks[tokens] = True
        return tokens - columns, marks

    @property
    def kind(self) -> str:
        """The name of its module: what `kind` says in a configuration and in config.json."""
        return type(self).__module__.rpartition(".")[2]

    @abstractmethod
    def states(
        self,
        features: Features,
        tokens: Int[Tensor, "batch time"],
        anchors: Bool[Tensor, "batch time"] | None = None,
    ) -> Iterator[Float[Tensor, "batch time width"]]:
        """Yield `depth` states; position t of the k-th predicts `tokens[:, t + 2 + k]`.

        The k-th state at t may have read `tokens[:, ..t + 1 + k]` and nothing later. Positions
        too close to the end for that wrap round and are meaningless; callers leave them out.

        Args:
            features: The base at every position. Of a row of several documents each sees its own
                only: `features.visible()`, at `features.places()`.
            tokens: What it read there.
            anchors: Positions that are drafted from. States elsewhere may be anything, so that
                heads whose cost grows with these positions can skip the others; None is all.
        """

    @abstractmethod
    def projection(self, level: int) -> tuple[Weight, Bias | None]:
        """Return the matrix that turns the state of this level into logits.

        States and matrix are given apart so that the loss can fuse the product and never hold
        the logits of a whole batch.
        """

    def projections(self) -> list[tuple[Weight, Bias | None]]:
        """Return the projection of every level; levels that share one give the same tensor."""
        return [self.projection(level) for level in range(self.depth)]

    def confidence_logits(
        self, state: Float[Tensor, "*batch width"]
    ) -> Float[Tensor, "*batch"] | None:
        """Return the logit of the chance that the base accepts what this state guesses.

        It is trained where a head says one; `confidence` is what it says of a draft.
        """
        del state

    def projection_rows(self, projection: Weight) -> Float[Tensor, "drafted width"]:
        """Return the rows of the base's projection that stand for what the head can draft."""
        return projection if self.draft_ids is None else projection[self.draft_ids]

    def choose_aux_layers(self, num_layers: int) -> None:
        """Settle `aux_layers` where the settings leave them open; called once a base is at hand.

        Args:
            num_layers: Number of layers of the base.
        """
        del num_layers

    def initialise(self, embedding: Tensor, projection: Tensor) -> None:
        """Start from the base's own tensors where that helps; called once, before training.

        Args:
            embedding: The base's input embedding (vocab, width).
            projection: The matrix whose product with the final hidden state is its logits, of
                the tokens that the head can draft.
        """
        del embedding, projection

    def bind(self, embedding: Tensor, projection: Tensor | None = None) -> None:
        """Lend the base's own tensors to a head that borrows them: never trained, never saved.

        Args:
            embedding: The base's input embedding (vocab, width).
            projection: Its vocabulary projection; None when it is the embedding itself.
        """
        del embedding, projection

    def logits(
        self, state: Float[Tensor, "*batch width"], level: int
    ) -> Float[Tensor, "*batch vocab"]:
        """Return the logits that `state` of this level stands for."""
        weight, bias = self.projection(level)
        return product(state, weight, bias)

    def _save_pretrained(self, save_directory: Path) -> None:
        """Write the weights, and a config.json that says which kind of head it is."""
        super()._save_pretrained(save_directory)
        text = json.dumps(self.settings(), indent=2, sort_keys=True)
        (save_directory / "config.json").write_text(text + "\n", encoding="utf-8")

    def settings(self) -> dict[str, Any]:
        """Return config.json: kind, settings, sizes, and which base it was trained on."""
        sizes = {"width": self.width, "vocab_size": self.vocab_size}
        base = {"base_fingerprint": self.base_fingerprint} if self.base_fingerprint else {}
        return {"kind": self.kind, **asdict(self.config), **sizes, **base}


def pick_parents(
    state: Float[Tensor, "batch level width"], parents: Int[Tensor, "batch node"]
) -> Float[Tensor, "batch node width"]:
    """Return the state of each node's parent."""
    if state.shape[1] == 1:
        return state.expand(-1, parents.shape[1], -1)
    return state.gather(1, parents[..., None].expand(-1, -1, state.shape[-1]))
