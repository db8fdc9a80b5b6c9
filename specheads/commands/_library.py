"""What commands and Python call: `train`, `distill`, `evaluate`, `export`, `push`.

All take overrides as the command line does, or typed settings and objects; none prints.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub.utils import logging as hub_logging

from specheads import config
from specheads.base.model import FrozenBase
from specheads.commands import _compose
from specheads.config import Export, Push, commands
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.core.files import write_atomic
from specheads.core.paths import HUB_ID, writable_folder
from specheads.core.records import dumps
from specheads.data.prompts import Prompt, PromptSet
from specheads.decoding.trees.tuned import FILE
from specheads.export import card, hub
from specheads.export.layouts import engine_module
from specheads.export.write import Parity, export_head, gate_texts
from specheads.heads.load import load_head
from specheads.measure import report
from specheads.measure.evaluation import evaluate_head, evaluate_run
from specheads.measure.generation import EvaluationConfig
from specheads.measure.results import Results
from specheads.runs.directory import RunDirectory
from specheads.runs.trackers import read_metrics
from specheads.training import run as training
from specheads.training.distill.report import Report
from specheads.training.distill.run import write_recipe
from specheads.training.plan.batch import settle_batches, unsettled
from specheads.training.processes import accelerator_of_environment

T = TypeVar("T")

GATES: dict[str, hub.Gate | None] = {"": None, "false": False, "auto": "auto", "manual": "manual"}
"""Values of `gated=`."""

Prompts = str | Path | Sequence[Sequence[int]] | None
"""A name, a .jsonl file, or token ids; None is what the settings say."""


def train(
    recipe: str = "",
    overrides: Sequence[str] = (),
    *,
    settings: config.Train | None = None,
    base: FrozenBase | None = None,
    announce: training.Announce = training.quiet,
) -> RunDirectory:
    """Train a head through every phase of a recipe, then evaluate it; return the run.

    Overrides are as on the command line, `["name=mine", "head=medusa"]`; `settings` stand in
    place of recipe and overrides, `base` where the one they name is loaded already. `announce`
    takes lines for people.
    """
    words = [f"recipe={recipe}", *overrides] if recipe else list(overrides)
    settings, _ = settings_for(config.Train, settings, words)
    if unsettled(settings):
        accelerator = accelerator_of_environment(settings.base.dtype)
        base = settle_batches(settings, accelerator, announce, base)
    made = training.run(settings, _compose.as_yaml(settings), base, announce)
    if made.is_main:
        card.write_card(made.run, asdict(settings), made.head, made.base)
        announce(f"head: {made.run.head}")
        if made.run.adapter.is_dir():
            announce(f"adapter of the base: {made.run.adapter}")
        if settings.evaluate_after and made.base.sharding:
            told = "no process decodes by itself with a sharded base"
            announce(f"{told}: measure with specheads evaluate run={made.run.path}")
        elif settings.evaluate_after:
            results = _measure(made.run, settings, made.base)
            # the choice is made: greedy, as that of specheads tune
            if results.tuned and settings.evaluation.temperature == 0:
                write_atomic(made.run.head / FILE, dumps(results.tuned))
    return made.run


def distill(
    recipe: str = "",
    overrides: Sequence[str] = (),
    *,
    settings: commands.Distill | None = None,
    base: FrozenBase | None = None,
    head: Head | None = None,
    out: str | Path = "",
) -> Report | None:
    """Have the base of a recipe write text into a folder; return what came of it.

    Overrides are as on the command line, `["num_samples=5000", "engine=vllm"]`. A stopped call goes
    on where it was. A `head` drafts, and changes the text in nothing. Of several processes only the
    first gets the report.
    """
    words = [f"recipe={recipe}", *overrides] if recipe else list(overrides)
    settings, _ = settings_for(commands.Distill, settings, words, out=out)
    return write_recipe(settings, base, head)


def evaluate(
    run: str | Path = "",
    overrides: Sequence[str] = (),
    *,
    settings: config.Evaluate | None = None,
    base: FrozenBase | None = None,
    head: Head | None = None,
    prompts: Prompts = None,
    out: str | Path = "",
) -> Results:
    """Measure the head of a run, or any head on the base it was made for.

    Overrides are as on the command line: `["tree=chain", "num_prompts=8"]`. Of typed settings
    only what `overrides` names counts for a run, and the tree. A head that is given is bound to
    the base. A run's report and card are written anew, or with `out` a report there and no card.
    """
    settings, words = settings_for(config.Evaluate, settings, overrides, head, run=run, out=out)
    refuse_unwritable(settings.out)
    if settings.run:
        made, trained = own(settings, words)
        given = prompt_set(prompts, trained)
        base = base or load_base(trained)
        return _measure(made, trained, base, settings.out, given, force=settings.force)
    base, head = objects(settings, base, head, "evaluate")
    results = evaluate_head(base, head, settings, prompt_set(prompts, settings))
    if settings.out:
        report.write_report(Path(settings.out), results, [])
    return results


@dataclass(frozen=True, slots=True)
class Exported:
    """An export that passed the gate."""

    folder: Path
    serve: tuple[str, ...]
    """Command lines that serve it."""
    parity: Parity


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
    """Write a head in a serving engine's layout, once it drafts there what it drafts here.

    The engine is a module of specheads/export/layouts, `out` a new folder; the rest is as for
    `evaluate`. A head that the engine cannot serve, or that drafts otherwise there, is refused.
    A base that has an adapter merged into it, as a run of joint training does, is written too.
    """
    settings, words = settings_for(
        Export, settings, overrides, head, run=run, engine=engine, out=out
    )
    engine_module(settings.engine)
    if not settings.out:
        raise InputError("an export needs a folder of its own: add out=FOLDER")
    prompts, corpus = "python_stdlib", None
    if settings.run:
        made, trained = own(settings, words)
        made.refuse_unfinished("exported")
        base, prompts, corpus = base or load_base(trained), trained.evaluation.prompts, trained.data
        head = head_of(made, base, force=settings.force)
    base, head = objects(settings, base, head, "export")
    texts = gate_texts(
        base,
        head,
        settings.prompts or prompts,
        engine=settings.engine,
        out=settings.out,
        num_prompts=settings.num_prompts,
        prompt_tokens=settings.prompt_tokens,
        new_tokens=settings.new_tokens,
        corpus=corpus,
    )
    serve, parity = export_head(head, base, settings.engine, Path(settings.out), texts)
    return Exported(Path(settings.out), serve, parity)


def push(
    run: str | Path = "",
    repo: str = "",
    overrides: Sequence[str] = (),
    *,
    settings: Push | None = None,
    dry_run: bool = False,
) -> hub.Pushed:
    """Publish a run's head on the Hugging Face Hub, with its card, in one commit.

    The repository is USER/NAME, made where it is missing; overrides are as on the command line,
    `["licence=mit", "private=true"]`. A dry run only says what would be uploaded.
    """
    # it would log every retry, with addresses that let anyone upload
    hub_logging.set_verbosity_error()
    settings, _ = settings_for(Push, settings, overrides, run=run, repo=repo, dry_run=dry_run)
    if not settings.run:
        raise InputError("name what to push: run=DIR")
    if not HUB_ID.fullmatch(settings.repo):
        raise InputError(f"name where to push, as repo=USER/NAME; got {settings.repo!r}")
    made = RunDirectory(Path(settings.run))
    return hub.push_run(
        made,
        asdict(_compose.read_run(made.config, config.Train)),
        settings.repo,
        private=settings.private,
        gated=GATES[settings.gated.lower()],
        base_repo=settings.base_repo,
        licence=settings.licence,
        data_licence=settings.data_licence,
        dry_run=settings.dry_run,
    )


def refuse_unwritable(out: str) -> None:
    """Refuse a folder for results in which none can be made, before anything is measured."""
    if out:
        writable_folder(out)


def settings_for(
    kind: type[T],
    given: T | None,
    overrides: Sequence[str],
    head: Head | None = None,
    **words: str | Path | bool,
) -> tuple[T, list[str]]:
    """Return a command's settings, with what is said in words, and the overrides in full names.

    A run has a head of its own: another beside it is refused.
    """
    command = kind.__name__.lower()
    # a copy: what is said in words goes into it, and the caller's stays as it is
    settings: T = _compose.settings_of(command, overrides) if given is None else deepcopy(given)
    for name, value in words.items():
        if value:
            setattr(settings, name, str(value) if isinstance(value, Path) else value)
    config.check(settings)
    if head is not None and (run := getattr(settings, "run", "")):
        raise InputError(f"a run has a head of its own, got run={run} and a head; give one")
    return settings, _compose.lengthen(command, overrides)


def own(settings: Any, overrides: Sequence[str]) -> tuple[RunDirectory, config.Train]:
    """Return a run and its own settings, with what the command asks for put into them."""
    run = RunDirectory(Path(settings.run))
    trained = _compose.read_run(run.config, config.Train)
    trained.tree = getattr(settings, "tree", trained.tree)
    _compose.overlay(trained, settings, overrides)
    return run, trained


Loadable = EvaluationConfig | config.Tune | Export | config.Chat
"""Settings that name a base."""


def load_base(settings: Loadable) -> FrozenBase:
    """Return the base that settings name."""
    return FrozenBase.load(**asdict(settings.base))


def objects(
    settings: config.Evaluate | config.Tune | Export | config.Chat,
    base: FrozenBase | None,
    head: Head | None,
    what: str,
) -> tuple[FrozenBase, Head]:
    """Return base and head: those given, or those that the settings name."""
    if (head is None and not settings.head_path) or (base is None and not settings.base.model):
        raise InputError(f"name what to {what}: run=DIR, or head=PATH and base=PATH")
    base = base or load_base(settings)
    return base, head or load_head(settings.head_path, base, force=settings.force)


def head_of(run: RunDirectory, base: FrozenBase, *, force: bool) -> Head:
    """Return the head of a run, on its base with what joint training added to that."""
    if run.adapter.is_dir():
        base.merge(run.adapter)
    return load_head(run.head, base, force=force)


def prompt_set(given: Prompts, settings: EvaluationConfig) -> PromptSet | None:
    """Return prompts that are given as token ids; a name goes into the settings."""
    if given is None:
        return None
    if isinstance(given, str | Path):
        settings.evaluation.prompts = str(given)
        return None
    return PromptSet.of("given", [Prompt(list(tokens), "given", "") for tokens in given])


def _measure(
    run: RunDirectory,
    settings: config.Train,
    base: FrozenBase,
    out: str = "",
    prompts: PromptSet | None = None,
    *,
    force: bool = False,
) -> Results:
    """Evaluate a run and write its report; into its own folder, its card as well."""
    results, head = evaluate_run(run, settings, base, prompts, force=force)
    folder = Path(out) if out else run.report
    report.write_report(folder, results, read_metrics(run.metrics))
    if not out:
        card.write_card(run, asdict(settings), head, base)
    return results
