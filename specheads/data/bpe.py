"""Tokenizers for bases trained from nothing."""

from collections.abc import Iterable, Iterator
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from specheads.base.gguf import SPLITTINGS
from specheads.core.errors import InputError

END, PAD = "<|endoftext|>", "<|pad|>"

MAX_CHARACTERS = 30_000_000
"""Text trained on at most: more changes the merges little and costs memory."""


def train_tokenizer(texts: Iterable[str], vocab_size: int, context: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer: any text can be written, and read back as it was.

    Of much text the beginning is read, whose order should be random. The vocabulary holds the 256
    bytes, `END` (0), `PAD` (1) and merges; little text gives fewer than `vocab_size`.
    `context` is the number of positions of the model it is for.
    """
    if vocab_size < 258:
        raise InputError(
            f"a byte-level vocabulary needs at least 258 tokens, got {vocab_size}; raise vocab_size"
        )
    bpe = Tokenizer(models.BPE())
    # the stubs of tokenizers take these properties for read-only
    parts: Any = bpe
    # runs of indentation stay whole
    parts.pre_tokenizer = SPLITTINGS["llama3"].pre_tokenizer()
    parts.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_first_texts(texts), trainer=trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=END,
        eos_token=END,
        pad_token=PAD,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )


def _first_texts(texts: Iterable[str]) -> Iterator[str]:
    characters = 0
    for text in texts:
        if characters >= MAX_CHARACTERS:
            return
        characters += len(text)
        yield text
