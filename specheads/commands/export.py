"""Export a trained head for a serving engine, after a check that it drafts the same there.

specheads export run=runs/smollm2 engine=vllm out=served
specheads export head=HEAD base=MODEL engine=sglang out=served
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from specheads.base.model import FrozenBase
from specheads.commands._library import head_of, load_base, objects, own, settings_for
from specheads.config import Export
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.data.prompts import load_prompts
from specheads.export.layouts import engine_module
from specheads.export.write import Parity, export_head, gate_texts

NUM_PROMPTS, PROMPT_TOKENS = 8, 64
"""Prompts of the check, and their largest length."""


@dataclass(frozen=True, slots=True)
class Exported:
    """An export that passed the check."""

    folder: Path
    serve: tuple[str, ...]
    """Command lines that serve it."""
    parity: Parity


def run(settings: Export, overrides: Sequence[str]) -> None:
    """Export the head of a run, or any head with its base."""
    made = export(settings=settings, overrides=overrides)
    accepted = " ".join(f"{one.accepted}/{one.offered}" for one in made.parity.per_depth)
    Console(stderr=True).print(
        f"{made.folder}: the export drafts as the head does, {accepted} accepted by depth, "
        f"{made.parity.tokens_per_forward:.2f} tokens per forward",
        markup=False,
    )
    # a console would wrap these lines, which are to be copied
    sys.stdout.write("".join(f"{line}\n" for line in made.serve))


def export(
    run: str | Path = "",
    engine: str = "",
    out: str | Path = "",
    overrides: Sequence[str] = (),
    *,
    settings: Export | None = None,
    base: FrozenBase | None = None,
    head: Head | None = None,
) -> Exported:
    """Export a head for a serving engine, after a check that it drafts the same there.

    A base with a merged adapter, as after joint training, is written too.

    Args:
        run: Directory of the run.
        engine: A module of specheads/export/layouts.
        out: A new folder.
        overrides: As on the command line.
        settings: Typed settings.
        base: The loaded base, in place of the one in the settings.
        head: A loaded head.

    Raises:
        InputError: The engine cannot serve the head, or the export drafts differently.
    """
    settings, words = settings_for(
        Export, settings, overrides, head, run=run, engine=engine, out=out
    )
    engine_module(settings.engine)
    if not settings.out:
        raise InputError("an export needs its own folder: add out=FOLDER")
    place, prompts, corpus = Path(settings.out), "python_stdlib", None
    if settings.run:
        made, trained = own(settings, words)
        made.refuse_unfinished("exported")
        base, prompts, corpus = base or load_base(trained), trained.evaluation.prompts, trained.data
        head = head_of(made, base, force=settings.force)
    base, head = objects(settings, base, head, "export")
    if base.tokenizer is None:
        raise InputError(f"an export is checked on text, and {base.name} has no tokenizer; add one")
    found = load_prompts(
        prompts,
        base.tokenizer,
        num_prompts=NUM_PROMPTS,
        prompt_tokens=PROMPT_TOKENS,
        corpus=corpus,
    )
    tokens = [prompt.tokens[:PROMPT_TOKENS] for prompt in found.prompts]
    texts = gate_texts(head, base, settings.engine, place, tokens)
    serve, parity = export_head(head, base, settings.engine, place, texts)
    return Exported(place, serve, parity)
