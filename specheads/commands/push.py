"""Publish a run's head on the Hugging Face Hub, with its card, in one commit."""

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

from huggingface_hub.utils import logging as hub_logging
from rich.console import Console
from transformers.utils import logging as transformers_logging

from specheads.base.model import FrozenBase
from specheads.commands import _compose, evaluate
from specheads.config import Push, Train
from specheads.export.hub import upload
from specheads.export.hub.card import model_card
from specheads.export.hub.summary import HUB_ID, read_facts
from specheads.heads.load import load_head
from specheads.runs.directory import RunDirectory


@_compose.command("push")
def main(settings: Push) -> None:
    """Push a run."""
    push_run(settings)


def push_run(settings: Push) -> None:
    """Check that the head is whole and its base the right one, and upload it.

    Raises:
        ValueError: It is not, or the Hub refused: see `upload.push`.
    """
    transformers_logging.disable_progress_bar()
    # it would tell every retry, with addresses that let anyone upload
    hub_logging.set_verbosity_error()
    if not settings.run:
        raise ValueError("name what to push: run=DIR")
    if not HUB_ID.fullmatch(settings.repo):
        raise ValueError(f"name where to push, as repo=USER/NAME; got {settings.repo!r}")
    gated = settings.gated.lower()
    if gated and gated not in upload.GATES:
        raise ValueError(f"gated must be one of {', '.join(upload.GATES)}, got {settings.gated!r}")
    files = _files(settings)
    if settings.dry_run:
        sizes = {path: upload.size(content) for path, content in files.items()}
        lines = [f"{size:>15,}  {path}\n" for path, size in sizes.items()]
        sys.stdout.write("".join([*lines, f"{sum(sizes.values()):>15,}  bytes in all\n"]))
        return
    address = upload.push(settings.repo, files, private=settings.private, gated=gated)
    Console().print(f"pushed: {address}", soft_wrap=True)


def _files(settings: Push) -> upload.Contents:
    """Return what is to be uploaded, once the head has shown that it loads on its base."""
    run = RunDirectory(Path(settings.run))
    trained = _compose.read_run(run.config, Train)
    _refuse_unusable(run, trained)
    base = _measured_base(run, trained)
    head = load_head(run.head, base)
    facts = read_facts(run, asdict(trained), base, settings.base_repo)
    card = model_card(
        facts,
        head,
        base,
        repo=settings.repo,
        licence=settings.licence,
        data_licence=settings.data_licence,
        pictures=upload.pictures(run),
    )
    return upload.contents(run, facts, card, settings.repo)


def _measured_base(run: RunDirectory, trained: Train) -> FrozenBase:
    """Return the run's base; where the run was evaluated, exactly the one that was measured."""
    results = run.report / "results.json"
    if not results.is_file():
        return evaluate.load_base(trained.base)
    told = json.loads(results.read_text(encoding="utf-8"))
    base = evaluate.load_base(replace(trained.base, dtype=told["settings"]["dtype"]))
    if base.fingerprint != told["base"]["fingerprint"]:
        raise ValueError(
            f"a card tells what was measured on the base it names, and {base.name} has changed "
            f"since {results} was; measure again with specheads evaluate run={run.path}"
        )
    return base


def _refuse_unusable(run: RunDirectory, trained: Train) -> None:
    run.refuse_unfinished("pushed")
    if run.adapter.is_dir() or trained.base.adapter:
        raise ValueError(
            f"a pushed head has to fit a base that others can load, and that of {run.path} is one "
            "together with an adapter; merge the adapter into the base, publish that, and train on "
            "it: base.model=USER/MERGED init=HEAD"
        )


if __name__ == "__main__":
    main()
