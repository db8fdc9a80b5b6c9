"""Have the base of a recipe write text, into shards that a distilled phase can train on.

specheads distill recipe=tiny_code out=text num_samples=5000
specheads distill recipe=conversations base.model=MODEL data.path=talks.jsonl out=text
"""

import sys
from collections.abc import Sequence

import yaml

from specheads.commands import _compose
from specheads.config.commands import Distill
from specheads.config.schedule import distilled


def run(settings: Distill, _: Sequence[str]) -> None:
    """Write what the folder lacks; a stopped one goes on with the same command."""
    if settings.dry_run:
        sys.stdout.write(f"{_compose.as_yaml(settings)}---\n{_plan(settings)}")
        return
    if settings.preview:
        from specheads.commands import _preview

        _preview.show_asked(settings, _preview.load_corpus_tokenizer(settings))
        return
    # late: what shows settings need not wait for torch
    from rich.console import Console

    from specheads.commands import _library
    from specheads.training.distill.report import as_markdown

    report = _library.distill(settings=settings)
    if report is not None:
        console = Console(markup=False, highlight=False)
        console.print(as_markdown(report), soft_wrap=True)
        console.print(f"text: {settings.out}", soft_wrap=True)


def _plan(settings: Distill) -> str:
    """Return how much would be written where, as YAML."""
    how = distilled(settings.schedule)
    tokens = how.num_samples * how.new_tokens
    plan = {"out": settings.out, "texts": how.num_samples, "most_tokens_a_turn": tokens}
    return yaml.safe_dump({"plan": plan}, sort_keys=False)
