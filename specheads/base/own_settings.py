"""What a model says of its own generation, which transformers hears unless it is hidden."""

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import GenerationConfig, PreTrainedModel


@contextmanager
def without_own_settings(model: PreTrainedModel) -> Iterator[None]:
    """Hide the model's own way to sample, with which transformers fills what it is not told."""
    before = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = before
