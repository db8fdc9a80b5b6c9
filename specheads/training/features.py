"""Sources of the base's features: the base in this process, files, or a vLLM server.

Training, validation and the losses know only `FeatureSource`. See docs/scale.md.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from specheads.base.model import FrozenBase
from specheads.core.drafter import Head
from specheads.core.features import Features
from specheads.data.packing import TokenBatch
from specheads.runs.directory import RunDirectory


class FeatureSource(ABC):
    """Gives the features of batches, without gradients."""

    waited_seconds: float = -1.0
    """Time spent waiting for features; negative if they are computed here."""
    can_fail: bool = False
    """Whether features may be lost in the middle of a run, as those of servers."""
    halted: Callable[[], bool] = staticmethod(lambda: False)
    """Whether the run is asked to stop, so that it waits no longer."""

    def begin(self, run: RunDirectory, rank: int) -> None:
        """Take the name of a run, which is open now, and the number of this process in it."""
        del run, rank

    @abstractmethod
    def features(self, batch: TokenBatch) -> Features:
        """Return the features of a batch, on the base's device."""

    def ahead(self, batch: TokenBatch) -> None:
        """Start to fetch the features of a batch that is needed soon. Another thread may call."""
        del batch

    def drop(self) -> None:
        """Forget what was fetched ahead."""
        return


class LocalBase(FeatureSource):
    """The base in this process, whole or sharded."""

    def __init__(self, base: FrozenBase, aux_layers: tuple[int, ...]) -> None:
        self.base, self.aux_layers = base, aux_layers

    def features(self, batch: TokenBatch) -> Features:
        """Return the features of a batch by a forward of the base."""
        return self.base.read(batch.tokens, self.aux_layers, batch.document_ids)


def features_of(
    states: Float[Tensor, "batch time layer width"],
    layers: Sequence[int],
    aux_layers: Sequence[int],
    base: FrozenBase,
    batch: TokenBatch,
) -> Features:
    """Return the features in a server's states of these layers, of which the last is the base's."""
    columns = [states[:, :, layers.index(layer)] for layer in aux_layers]
    aux = torch.cat(columns, -1) if columns else None
    return Features(base.final_norm(states[:, :, -1]), aux, batch.tokens, batch.document_ids)


def server_token_bytes(layers: Sequence[int], width: int, dtype: torch.dtype) -> int:
    """Return the bytes of a token in a server's file: its states and its id."""
    return len(layers) * width * dtype.itemsize + torch.int64.itemsize


def server_layers(head: Head, num_layers: int) -> list[int]:
    """Return the layers whose states a server gives for a head, in vLLM's numbers.

    k is the state after k layers: 0 is the embedding, by which each answer is checked, and
    `num_layers` is the last state before the final norm. The list is sorted and has no repeats.

    Args:
        head: The head; it chooses its `aux_layers` if its settings leave them open.
        num_layers: Number of layers of the base.
    """
    head.choose_aux_layers(num_layers)
    return sorted({0, *head.aux_layers, num_layers})
