"""Output of `train` and `distill` that stop before training: the plan, or examples of the text."""

import sys
from dataclasses import asdict

import numpy as np
import yaml
from rich.console import Console
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from specheads.base.loading import load_tokenizer
from specheads.config import Train, compose
from specheads.core.errors import InputError, printable
from specheads.data.masks import CLOSE, OPEN, marked
from specheads.data.prompts import held_out
from specheads.data.tokenise import UnansweredError, tokenised
from specheads.training.plan import Setup, plan
from specheads.training.processes import accelerator_of_environment
from specheads.training.settings import distilled

MAX_TOKENS = 2048
"""Tokens printed of a document."""


def setup_of(settings: Train) -> Setup:
    """Return what the plan of a training needs to know."""
    return Setup(
        base=asdict(settings.base),
        head=settings.head,
        init=settings.init,
        schedule=settings.schedule,
        data=settings.data,
        seed=settings.seed,
    )


def show_plan(settings: Train) -> None:
    """Print the settings and the plan as two YAML documents."""
    accelerator = accelerator_of_environment(settings.base.dtype)
    if accelerator.is_main_process:
        sys.stdout.write(compose.as_yaml(settings))
        sys.stdout.flush()
    found = {"plan": plan(setup_of(settings), accelerator)}
    if accelerator.is_main_process:
        sys.stdout.write("---\n" + yaml.safe_dump(found, sort_keys=False, width=1000))


def show_examples(settings: Train) -> None:
    """Print documents of the corpus with their loss mask; only the tokenizer is loaded."""
    tokenizer, console = corpus_tokenizer(settings), _console()
    try:
        documents = tokenised(settings.data, "train", tokenizer, settings.seed)
    except UnansweredError:
        if any(phase.distill is None for phase in settings.schedule.phases.values()):
            raise
        show_prompts(settings, tokenizer)
        return
    order = np.random.default_rng(settings.seed).permutation(len(documents))[: settings.preview]
    console.print(f"{len(documents):,} documents; tokens in the loss are in {OPEN}{CLOSE}")
    for place, number in enumerate(order.tolist(), start=1):
        tokens, loss_mask = documents.tokens(number).tolist(), documents.loss_mask(number).tolist()
        console.print(
            f"\n--- {place} of {len(order)}: {len(tokens):,} tokens, {sum(loss_mask):,} in the "
            f"loss ({sum(loss_mask) / max(len(tokens), 1):.1%})"
        )
        shown = marked(tokenizer, tokens[:MAX_TOKENS], loss_mask[:MAX_TOKENS])
        console.print(printable(shown))
        if len(tokens) > MAX_TOKENS:
            console.print(f"... and {len(tokens) - MAX_TOKENS:,} more tokens")


def show_prompts(settings: Train, tokenizer: PreTrainedTokenizerBase) -> None:
    """Print prompts that the base will continue, in its chat template."""
    console, length = _console(), distilled(settings.schedule).prompt_tokens
    prompts = held_out(settings.data, "train", tokenizer, length, settings.preview, settings.seed)
    console.print("the base continues prompts such as these, and the head learns its text")
    for place, prompt in enumerate(prompts, start=1):
        console.print(f"\n--- {place} of {len(prompts)}: {len(prompt.tokens):,} tokens")
        tokens = prompt.tokens[:MAX_TOKENS]
        console.print(printable(marked(tokenizer, tokens, [False] * len(tokens))))


def corpus_tokenizer(settings: Train) -> PreTrainedTokenizerBase:
    """Return the tokenizer of the base; a corpus cannot be read without one."""
    tokenizer = load_tokenizer(settings.base.model, revision=settings.base.revision)
    if tokenizer is None:
        raise InputError(
            f"training needs a base with a tokenizer, got {settings.base.model}; add its files"
        )
    return tokenizer


def _console() -> Console:
    return Console(markup=False, highlight=False, soft_wrap=True)
