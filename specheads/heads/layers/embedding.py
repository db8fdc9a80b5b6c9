"""Heads that borrow the embedding, or embedding and vocabulary projection, of their base."""

from typing import Any

from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from specheads.core.drafter import Bias, Head, Weight
from specheads.core.errors import InputError


class EmbeddingHead(Head):
    """A head that borrows its base's input embedding as a frozen buffer that is not saved."""

    embedding: Tensor | None

    def __init__(self, config: Any, width: int, vocab_size: int) -> None:
        super().__init__(config, width, vocab_size)
        self.register_buffer("embedding", None, persistent=False)

    def bind(self, embedding: Tensor, projection: Tensor | None = None) -> None:
        """Borrow the base's input embedding."""
        del projection
        # detached, because it is not a parameter of this head
        self.embedding = embedding.detach()

    def embed(self, tokens: Int[Tensor, "*any"], like: Tensor) -> Float[Tensor, "*any width"]:
        """Return the embeddings of tokens in the dtype of `like`.

        Raises:
            ValueError: The head is not bound to a base.
        """
        if self.embedding is None:
            raise InputError(f"{self.kind} reads its base's embedding; load the head with its base")
        return F.embedding(tokens, self.embedding).to(like.dtype)


class BorrowingHead(EmbeddingHead):
    """A head that also borrows its base's vocabulary projection."""

    borrowed: Tensor | None

    def __init__(self, config: Any, width: int, vocab_size: int) -> None:
        super().__init__(config, width, vocab_size)
        self.register_buffer("borrowed", None, persistent=False)

    def bind(self, embedding: Tensor, projection: Tensor | None = None) -> None:
        """Borrow the base's input embedding and its vocabulary projection."""
        super().bind(embedding)
        projection = embedding if projection is None else projection
        self.borrowed = self.projection_rows(projection.detach())

    def lent(self) -> Weight:
        """Return the base's projection to the draft vocabulary.

        Raises:
            ValueError: The head is not bound to a base.
        """
        if self.borrowed is None:
            raise InputError(
                f"{self.kind} borrows its base's projection; load the head with its base"
            )
        return self.borrowed

    def projection(self, level: int) -> tuple[Weight, Bias | None]:
        """Return the projection, the same at every level."""
        del level
        return self.lent(), None
