"""Export a trained head for a serving engine, after a check that it drafts the same there.

specheads export run=runs/smollm2 engine=vllm out=served
specheads export head=HEAD base=MODEL engine=sglang out=served
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specheads.base.model import FrozenBase
from specheads.commands._call import checked_settings, run_folder_of
from specheads.commands._library import load_base_and_head
from specheads.config.commands import Export
from specheads.core.errors import InputError
from specheads.core.files import from_json, read_json, writable_folder
from specheads.data.prompts import load_prompts
from specheads.export.layouts import engine_module
from specheads.export.write import (
    Parity,
    acceptance_profile,
    export_head,
    generate_check_texts,
    scale_positions,
)
from specheads.measure.results import Results
from specheads.runs.directory import RunDirectory


@dataclass(frozen=True, slots=True)
class Exported:
    """An export that passed the check."""

    folder: Path
    serve: tuple[str, ...]
    """Command lines that serve it."""
    parity: Parity


def run(settings: Export) -> None:
    """Export the head of a run, or any head with its base."""
    exported = export(settings=settings)
    accepted = " ".join(f"{depth.accepted}/{depth.offered}" for depth in exported.parity.per_depth)
    sys.stderr.write(
        f"{exported.folder}: the export drafts as the head does, {accepted} accepted by depth, "
        f"{exported.parity.tokens_per_forward:.2f} tokens per forward\n"
    )
    sys.stdout.write("".join(f"{line}\n" for line in exported.serve))


def export(
    run: str | Path = "",
    engine: str = "",
    out: str | Path = "",
    overrides: Sequence[str] = (),
    *,
    settings: Export | None = None,
    base: FrozenBase | None = None,
) -> Exported:
    """Export a head for a serving engine, after a check that it drafts the same there.

    A base with a merged adapter, as after joint training, is written too.

    Raises:
        InputError: The engine cannot serve the head, or the export drafts differently.
    """
    settings = settings or checked_settings(Export, overrides, run=run, engine=engine, out=out)
    engine_module(settings.engine)
    if not settings.out:
        raise InputError("an export needs its own folder: add out=FOLDER")
    folder = writable_folder(settings.out)
    base, head = load_base_and_head(settings, base)
    if settings.rope_scaling == "base":
        head = scale_positions(head, base)
    tokenizer = base.tokenizer_for("the check of an export")
    prompts = load_prompts("python_stdlib", tokenizer, num_prompts=8, prompt_tokens=64)
    tokens = [prompt.tokens for prompt in prompts.prompts]
    texts = generate_check_texts(head, base, settings.engine, folder, tokens)
    run_folder, results = run_folder_of(settings), None
    # with other positions it is another network, whose acceptance was not measured
    if run_folder and settings.rope_scaling == "head":
        file = RunDirectory(Path(run_folder)).report / "results.json"
        results = from_json(Results, read_json(file), str(file)) if file.is_file() else None
    profile = acceptance_profile(head, results)
    return Exported(folder, *export_head(head, base, settings.engine, folder, texts, profile))
