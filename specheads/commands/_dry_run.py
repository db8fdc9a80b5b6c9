"""Output of `train` and `distill` that stop before training: the plan, or examples of the text."""

import sys
from dataclasses import asdict

import numpy as np
import yaml
from rich.console import Console
from rich.text import Text
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from specheads.base.loading import load_tokenizer
from specheads.config import Train, compose
from specheads.core.errors import InputError, printable
from specheads.data.masks import CLOSE, OPEN, marked, pieces
from specheads.data.prompts import held_out
from specheads.data.tokenise import UnansweredError, tokenised
from specheads.measure.tables import ConsoleTable
from specheads.training.plan.whole import Plan, plan
from specheads.training.processes import accelerator_of_environment
from specheads.training.settings import distilled

GIB = 2**30

MAX_TOKENS = 2048
"""Tokens printed of a document."""

IN_LOSS, OTHERS, SPECIAL = "bold green", "dim", " reverse"


def show_plan(settings: Train) -> None:
    """Print the settings and the plan: tables on a terminal, else two YAML documents."""
    accelerator = accelerator_of_environment(settings.base.dtype)
    if accelerator.is_main_process:
        sys.stdout.write(compose.as_yaml(settings))
        sys.stdout.flush()
    found = plan(settings, accelerator)
    if not accelerator.is_main_process:
        return
    if not sys.stdout.isatty():
        sys.stdout.write("---\n" + yaml.safe_dump(as_values(found), sort_keys=False, width=1000))
        return
    console = Console(markup=False, highlight=False)
    for one in tables(found):
        console.print(one)
    for line in lines(found):
        console.print(line, soft_wrap=True)


def as_values(found: Plan) -> dict[str, object]:
    """Return a plan as plain values."""
    more = {"fits": found.fits, "peak": found.peak.name, "peak_bytes": found.peak.total}
    return {"plan": asdict(found) | more | {"hours": found.hours}}


def tables(found: Plan) -> list[ConsoleTable]:
    """Return memory, phases and disk as tables."""
    parts = list(dict.fromkeys(part for stage in found.stages for part in stage.memory))
    memory = [[part, *(_gib(one.memory.get(part)) for one in found.stages)] for part in parts]
    memory.append(["at most", *(_gib(one.total) for one in found.stages)])
    phases = [
        [
            one.name, f"{one.steps:,}", f"{one.batch_size:,}", f"{one.tokens:,}",
            _hours(one.hours), _hours(one.writing_hours),
        ]
        for one in found.phases
    ]  # fmt: skip
    names = ["part", *(one.name for one in found.stages)]
    head = ["phase", "steps", "batch", "tokens", "hours", "hours of writing"]
    disk = [[name, _gib(size)] for name, size in found.disk.items()]
    each = "" if found.processes == 1 else f", each of {found.processes} processes"
    return [
        ConsoleTable(f"memory of {found.device}{each}, GiB", memory, names),
        ConsoleTable("phases", phases, head),
        ConsoleTable("disk, GiB", disk, ["what", "GiB"]),
    ]


def lines(found: Plan) -> list[str]:
    """Return the conclusions of a plan."""
    peak, out = found.peak, list(found.notes)
    needs = f"{peak.name} needs at most {_gib(peak.total)} GiB"
    if found.room is None:
        out.append(f"{needs}; {found.device} is not here, so whether that fits is unknown")
    else:
        fits = "fits" if found.fits else "does NOT fit"
        out.append(f"{needs}: it {fits} into the {_gib(found.room)} GiB of {found.device}")
    out += [f"change: {change}" for change in found.changes]
    if found.hours is not None:
        out.append(f"{_hours(found.hours)} hours in all, measured by a few steps on this machine")
    return out


def _gib(size: int | None) -> str:
    return "" if size is None else f"{size / GIB:,.3f}"


def _hours(hours: float | None) -> str:
    return "" if hours is None else f"{hours:,.3f}"


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
    has_colour = console.is_terminal and not console.no_color
    mark = "bright" if has_colour else f"in {OPEN}{CLOSE}"
    console.print(f"{len(documents):,} documents; tokens in the loss are {mark}")
    for place, number in enumerate(order.tolist(), start=1):
        tokens, loss_mask = documents.tokens(number).tolist(), documents.loss_mask(number).tolist()
        console.print(
            f"\n--- {place} of {len(order)}: {len(tokens):,} tokens, {sum(loss_mask):,} in the "
            f"loss ({sum(loss_mask) / max(len(tokens), 1):.1%})"
        )
        shown = tokens[:MAX_TOKENS], loss_mask[:MAX_TOKENS]
        console.print(
            _coloured(tokenizer, *shown) if has_colour else printable(marked(tokenizer, *shown))
        )
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


def _coloured(tokenizer: PreTrainedTokenizerBase, tokens: list[int], loss_mask: list[bool]) -> Text:
    out = Text()
    for text, is_in_loss, is_special in pieces(tokenizer, tokens, loss_mask):
        style = (IN_LOSS if is_in_loss else OTHERS) + (SPECIAL if is_special else "")
        out.append(printable(text), style)
    return out
