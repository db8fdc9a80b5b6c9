"""Show some of the text that training would see, with what the loss counts of it."""

import numpy as np
from rich.console import Console
from rich.text import Text
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from specheads.base.loading import load_tokenizer
from specheads.config import Train
from specheads.config.schedule import distilled
from specheads.core.errors import InputError, printable
from specheads.data.masks import CLOSE, OPEN, marked, pieces
from specheads.data.prompts import held_out
from specheads.data.tokenise import UnansweredError, tokenised

MOST_TOKENS = 2048
"""Tokens shown of a document."""

COUNTED, OTHERS, SPECIAL = "bold green", "dim", " reverse"


def show(settings: Train) -> None:
    """Print documents of the corpus; of the base only the tokenizer is loaded."""
    tokenizer, console = load_corpus_tokenizer(settings), _console()
    try:
        documents = tokenised(settings.data, "train", tokenizer, settings.seed)
    except UnansweredError:
        if any(phase.distill is None for phase in settings.schedule.phases.values()):
            raise
        show_asked(settings, tokenizer)
        return
    order = np.random.default_rng(settings.seed).permutation(len(documents))[: settings.preview]
    has_colour = console.is_terminal and not console.no_color
    how = "bright" if has_colour else f"in {OPEN}{CLOSE}"
    console.print(f"{len(documents):,} documents; what the loss counts is {how}")
    for place, number in enumerate(order.tolist(), start=1):
        tokens, loss_mask = documents.tokens(number).tolist(), documents.loss_mask(number).tolist()
        console.print(
            f"\n--- {place} of {len(order)}: {len(tokens):,} tokens, {sum(loss_mask):,} counted "
            f"({sum(loss_mask) / max(len(tokens), 1):.1%})"
        )
        shown = tokens[:MOST_TOKENS], loss_mask[:MOST_TOKENS]
        is_plain = not has_colour
        console.print(printable(marked(tokenizer, *shown)) if is_plain else _lit(tokenizer, *shown))
        if len(tokens) > MOST_TOKENS:
            console.print(f"... and {len(tokens) - MOST_TOKENS:,} more tokens")


def show_asked(settings: Train, tokenizer: PreTrainedTokenizerBase) -> None:
    """Print such as the base is asked before anything is learned, in its template."""
    console, length = _console(), distilled(settings.schedule).prompt_tokens
    asked = held_out(settings.data, "train", tokenizer, length, settings.preview, settings.seed)
    console.print("the base goes on from texts such as these, and what it writes is learned")
    for place, prompt in enumerate(asked, start=1):
        console.print(f"\n--- {place} of {len(asked)}: {len(prompt.tokens):,} tokens")
        tokens = prompt.tokens[:MOST_TOKENS]
        console.print(printable(marked(tokenizer, tokens, [False] * len(tokens))))


def load_corpus_tokenizer(settings: Train) -> PreTrainedTokenizerBase:
    """Return the base's tokenizer, without which no corpus can be read."""
    tokenizer = load_tokenizer(settings.base.model, revision=settings.base.revision)
    if tokenizer is None:
        raise InputError(f"training reads text: the base {settings.base.model} needs a tokenizer")
    return tokenizer


def _console() -> Console:
    return Console(markup=False, highlight=False, soft_wrap=True)


def _lit(tokenizer: PreTrainedTokenizerBase, tokens: list[int], loss_mask: list[bool]) -> Text:
    out = Text()
    for text, is_counted, is_special in pieces(tokenizer, tokens, loss_mask):
        style = (COUNTED if is_counted else OTHERS) + (SPECIAL if is_special else "")
        out.append(printable(text), style)
    return out
