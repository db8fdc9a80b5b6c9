"""Write an export, whole and through the parity gate, or not at all."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from specheads.base.model import FrozenBase
from specheads.config import Data, Export
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.core.files import sweep
from specheads.core.paths import writable_folder
from specheads.data.prompts import load_prompts
from specheads.export.engines import find_layout
from specheads.export.gate import Parity, Text, check, expect
from specheads.export.layout import RECORD, Folder
from specheads.measure.how import How
from specheads.measure.online import write_alone
from specheads.runs.directory import atomic_folder
from specheads.runs.provenance import provenance

BASE = "base"
"""Where in an export its base lies, if engines would find it nowhere else."""


def export_head(
    head: Head, base: FrozenBase, engine: str, out: Path, texts: Sequence[Text]
) -> tuple[tuple[str, ...], Parity]:
    """Write a head for an engine; return the command lines that serve it and what was checked.

    The folder holds the head's own weights, its settings, the base's name and what the gate
    counted: nothing of the environment. It replaces an earlier export. A base with an adapter
    merged into it is a model of its own, which engines find nowhere else: it lies in `base`.

    Raises:
        ValueError: The engine cannot serve this head, or `out` holds something else, or the gate
            refuses. Nothing is written then.
    """
    layout, out = find_layout(head, base, engine), _place(out, base)
    merged = bool(base.adapter)
    if merged:
        base.place = str(out / BASE)
    folder = layout.write(head, base, out)
    sweep(out.parent, out.name)
    with atomic_folder(out) as scratch:
        save(folder, scratch)
        if merged:
            save_base(base, scratch / BASE)
        parity = check(expect(head, base, texts), scratch, layout.read)
        record = {
            "engine": engine,
            "head": {"kind": head.kind, "depth": head.depth},
            "base": {"name": base.name, "revision": base.revision, "fingerprint": base.fingerprint},
            "parity": {"texts": len(texts), **asdict(parity)},
            "specheads": provenance().versions["specheads"],
        }
        (scratch / RECORD).write_text(_json(record), encoding="utf-8")
    return folder.serve, parity


def _place(out: Path, base: FrozenBase) -> Path:
    """Return the folder an export becomes, or replaces as a whole; refuse one it may not."""
    out = writable_folder(out)
    if not out.exists():
        return out
    if not (out / RECORD).is_file() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(
            f"out= must be a new or empty folder, or an earlier export; {out} holds other files"
        )
    # files are filled in beside it, and take its place
    writable_folder(out.parent)
    held = {"your working folder": Path.cwd()}
    if not base.adapter and Path(base.place).exists():
        held["its base"] = Path(base.place).resolve()
    reasons = [f"holds {what}" for what, place in held.items() if place.is_relative_to(out)]
    if out.is_mount():
        reasons = ["is a mount"]
    if reasons:
        raise InputError(
            f"out= is replaced as a whole, and {out} {reasons[0]}; name another folder"
        )
    return out


def gate_texts(
    base: FrozenBase, head: Head, settings: Export, prompts: str, corpus: Data | None = None
) -> list[Text]:
    """Return prompts, by name or from a .jsonl file, and what the base alone writes after each.

    The prompts `held_out` are those of the `corpus`.
    """
    # told before the base writes texts
    if settings.engine:
        find_layout(head, base, settings.engine)
    if settings.out:
        _place(Path(settings.out), base)
    if base.tokenizer is None:
        raise InputError(f"the parity gate reads text: the base {base.name} needs a tokenizer")
    length, needed = settings.prompt_tokens, head.depth + 2
    if settings.new_tokens < needed:
        raise InputError(
            f"the parity gate needs new_tokens >= {needed}, got {settings.new_tokens}; set that"
        )
    found = load_prompts(
        prompts,
        base.tokenizer,
        num_prompts=settings.num_prompts,
        prompt_tokens=length,
        corpus=corpus,
    )
    tokens = [prompt.tokens[:length] for prompt in found.prompts]
    # the gate needs text of some length, and not that it makes sense
    how = How(max_new_tokens=settings.new_tokens, batch_size=8, stop_at_eos=False, progress=True)
    return list(zip(tokens, write_alone(base, tokens, how), strict=True))


def save(folder: Folder, place: Path) -> None:
    """Write the files of an export into an existing folder."""
    (place / "config.json").write_text(_json(folder.config), encoding="utf-8")
    # safetensors takes no tensor that shares its memory, as tied ones do
    copies = {
        name: value.detach().cpu().clone().contiguous() for name, value in folder.tensors.items()
    }
    save_file(copies, place / folder.weights_file, metadata={"format": "pt"})
    for name, text in folder.files.items():
        (place / name).write_text(text, encoding="utf-8")


def save_base(base: FrozenBase, folder: Path) -> None:
    """Write a base as transformers loads it, in the precision it has here, and its tokenizer."""
    base.model.save_pretrained(folder)
    if base.tokenizer is not None:
        base.tokenizer.save_pretrained(folder)


def _json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"
