"""Write a trained head in a serving engine's layout, once it drafts there what it drafts here."""

import sys
from pathlib import Path

from rich.console import Console
from transformers.utils import logging as transformers_logging

from specheads.base.model import FrozenBase
from specheads.commands import _compose, evaluate
from specheads.config import Export, Train
from specheads.core.drafter import Head
from specheads.data.prompts import load_prompts
from specheads.export.engines import engine_module
from specheads.export.gate import Text
from specheads.export.write import export_head
from specheads.heads.load import load_head
from specheads.measure.online import decode_prompts
from specheads.runs.directory import RunDirectory

SHORT = {"head": "head_path", "base": "base.model"}


@_compose.command("export", SHORT)
def main(settings: Export) -> None:
    """Export a run's head, or any head with the base it was made for."""
    transformers_logging.disable_progress_bar()
    engine_module(settings.engine)
    if not settings.out:
        raise ValueError("an export needs a folder of its own: add out=FOLDER")
    base, head, prompts = _load(settings)
    out = Path(settings.out)
    texts = _texts(base, head, settings, settings.prompts or prompts)
    lines, parity = export_head(head, base, settings.engine, out, texts)
    accepted = " ".join(f"{one['accepted']}/{one['offered']}" for one in parity.per_depth)
    Console(stderr=True).print(
        f"{out}: read back, it accepts {accepted} drafts by depth, as the run's head does, "
        f"{parity.tokens_per_forward:.2f} tokens per forward"
    )
    # whole lines, to be copied: a console would wrap them
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def _load(settings: Export) -> tuple[FrozenBase, Head, str]:
    """Return base, head and the name of the prompts they were measured on."""
    if not settings.run:
        if not settings.head_path:
            raise ValueError("name what to export: run=DIR, or head=PATH and base=PATH")
        base = evaluate.load_base(settings.base)
        return base, load_head(settings.head_path, base, force=settings.force), "python_stdlib"
    run = RunDirectory(Path(settings.run))
    trained = _compose.read_run(run.config, Train)
    _compose.overlay(trained, settings, SHORT)
    run.refuse_unfinished("exported")
    if run.adapter.is_dir():
        raise ValueError(
            f"an engine loads whole bases, and the base of {run.path} learned along as an adapter; "
            f"merge {run.adapter} into it, save that, and export head={run.head} base=FOLDER"
        )
    base = evaluate.load_base(trained.base)
    return base, load_head(run.head, base), trained.evaluation.prompts


def _texts(base: FrozenBase, head: Head, settings: Export, prompts: str) -> list[Text]:
    """Return prompts, and what the base says after each."""
    if base.tokenizer is None:
        raise ValueError(f"the parity gate reads text: the base {base.name} needs a tokenizer")
    length, needed = settings.prompt_tokens, head.depth + 2
    if min(settings.num_prompts, length) < 1 or settings.new_tokens < needed:
        raise ValueError(
            f"the parity gate needs num_prompts >= 1, prompt_tokens >= 1 and new_tokens >= "
            f"{needed}, got {settings.num_prompts}, {length} and {settings.new_tokens}"
        )
    found = load_prompts(
        prompts, base.tokenizer, num_prompts=settings.num_prompts, prompt_tokens=length
    )
    tokens = [prompt.tokens[:length] for prompt in found.prompts]
    said = decode_prompts(
        base,
        None,
        tokens,
        max_new_tokens=settings.new_tokens,
        batch_size=8,
        # the gate needs text of some length, and not that it makes sense
        stop_at_eos=False,
    )
    return [(prompt, one.tokens) for prompt, one in zip(tokens, said, strict=True)]


if __name__ == "__main__":
    main()
