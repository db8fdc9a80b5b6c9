"""Output of `train` and `distill` that stop before training: the plan, or examples of the text."""

import sys
from dataclasses import asdict
from typing import Any

import numpy as np
import yaml
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from specheads.base.loading import load_tokenizer
from specheads.config import compose
from specheads.config.commands import Train
from specheads.config.training import distill_settings
from specheads.core.errors import InputError, printable
from specheads.data.masks import CLOSE, OPEN, marked
from specheads.data.prompts import held_out_prompts
from specheads.data.sources import report_source
from specheads.data.tokenise import UnansweredError, tokenise_corpus
from specheads.training.batch_sizes import resolve_batch_sizes
from specheads.training.cost import cost_lines
from specheads.training.plan import plan_training
from specheads.training.processes import accelerator_of_environment


def show_plan(settings: Train) -> None:
    """Print the settings and the plan as two YAML documents, and the plan in one line."""
    accelerator = accelerator_of_environment(settings.base.dtype)
    resolve_batch_sizes(settings, accelerator, lambda line: sys.stdout.write(f"# {line}\n"))
    if accelerator.is_main_process:
        sys.stdout.write(compose.as_yaml(settings))
        sys.stdout.flush()
    plan = plan_training(settings, accelerator)
    if not accelerator.is_main_process:
        return
    sys.stdout.write("".join(f"# {line}\n" for line in _corpus_report(settings)))
    values = {"plan": asdict(plan, dict_factory=_without_zeros)}
    sys.stdout.write("---\n" + yaml.safe_dump(values, sort_keys=False, width=1000))
    room = f" of {plan.room_bytes / 1e9:.2f}" if plan.room_bytes else ""
    minutes = f"{60 * sum(plan.hours.values()):.0f} minutes without the evaluation, "
    sys.stdout.write(
        f"# {minutes if plan.hours else ''}peak memory {plan.peak_bytes / 1e9:.2f}{room} GB, "
        f"{plan.disk_bytes.total_bytes / 1e9:.2f} GB on disk\n"
    )
    if plan.device.startswith("cuda"):
        lines = cost_lines(settings, accelerator.num_processes)
        sys.stdout.write("".join(f"# {line}\n" for line in lines))


def _without_zeros(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return fields of a dataclass as a dictionary, without uses of zero bytes."""
    return {name: value for name, value in fields if type(value) is not int or value}


def _corpus_report(settings: Train) -> list[str]:
    """Return lines on what the sources of a corpus read and leave out."""
    lines = []
    for source in settings.data.active_sources:
        try:
            lines += report_source(source, settings.seed)
        except InputError as error:
            # a plan needs no corpus
            lines.append(str(error))
    return list(map(printable, lines))


def show_examples(settings: Train) -> None:
    """Print documents of the corpus with their loss mask, or prompts where it has no answers."""
    tokenizer, seed = corpus_tokenizer(settings), settings.seed
    try:
        documents = tokenise_corpus(settings.data, "train", tokenizer, seed)
    except UnansweredError:
        if any(phase.distill is None for phase in settings.schedule.phases.values()):
            raise
        show_prompts(settings, tokenizer)
        return
    order = np.random.default_rng(seed).permutation(len(documents))[: settings.preview].tolist()
    rows = [
        (documents.tokens(document).tolist(), documents.loss_mask(document).tolist())
        for document in order
    ]
    title = f"{len(documents):,} documents; tokens in the loss are in {OPEN}{CLOSE}"
    _show(tokenizer, title, _corpus_report(settings), rows)


def show_prompts(settings: Train, tokenizer: PreTrainedTokenizerBase) -> None:
    """Print prompts that the base will continue, in its chat template."""
    length = distill_settings(settings.schedule).prompt_tokens
    prompts = held_out_prompts(
        settings.data, "train", tokenizer, length, settings.preview, settings.seed
    )
    rows = [(prompt.tokens, [False] * len(prompt.tokens)) for prompt in prompts]
    title = "the base continues prompts such as these; the head learns its text"
    _show(tokenizer, title, _corpus_report(settings), rows)


def corpus_tokenizer(settings: Train) -> PreTrainedTokenizerBase:
    """Return the tokenizer of the base, without its weights."""
    tokenizer = load_tokenizer(settings.base.model, revision=settings.base.revision)
    if tokenizer is None:
        raise InputError(
            f"training needs a base with a tokenizer, got {settings.base.model}; add its files"
        )
    return tokenizer


def _show(
    tokenizer: PreTrainedTokenizerBase,
    title: str,
    corpus: list[str],
    rows: list[tuple[list[int], list[bool]]],
) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in [title, *corpus]))
    for number, (tokens, loss_mask) in enumerate(rows, start=1):
        counts = f"{len(tokens):,} tokens, {sum(loss_mask):,} in the loss"
        text = printable(marked(tokenizer, tokens, loss_mask))
        sys.stdout.write(f"\n--- {number} of {len(rows)}: {counts}\n{text}\n")
