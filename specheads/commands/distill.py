"""Generate text with the base of a recipe, for a distilled phase to train on.

specheads distill recipe=tiny_code out=text num_samples=5000
specheads distill recipe=conversations base.model=MODEL data.path=talks.jsonl out=text
"""

import sys
from collections.abc import Sequence

import yaml

from specheads.config import compose
from specheads.config.commands import Distill
from specheads.training.settings import distilled


def run(settings: Distill, _: Sequence[str]) -> None:
    """Generate the texts that are missing in the folder; the same command resumes."""
    if settings.dry_run:
        sys.stdout.write(f"{compose.as_yaml(settings)}---\n{_plan(settings)}")
        return
    if settings.preview:
        from specheads.commands import _dry_run

        _dry_run.show_prompts(settings, _dry_run.corpus_tokenizer(settings))
        return
    # imported late: a dry run should not load torch
    from rich.console import Console

    from specheads.commands._library import distill
    from specheads.training.distill.report import as_markdown

    report = distill(settings=settings)
    if report is not None:
        console = Console(markup=False, highlight=False)
        console.print(as_markdown(report), soft_wrap=True)
        console.print(f"text: {settings.out}", soft_wrap=True)


def _plan(settings: Distill) -> str:
    """Return the amount of text and its folder, as YAML."""
    distill = distilled(settings.schedule)
    tokens = distill.num_samples * distill.new_tokens
    plan = {"out": settings.out, "texts": distill.num_samples, "most_tokens_a_turn": tokens}
    return yaml.safe_dump({"plan": plan}, sort_keys=False)
