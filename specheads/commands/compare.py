"""Compare heads with each other and with methods that need no training, in turns.

specheads compare run=runs/smollm2
specheads compare 'heads=[runs/a,runs/b]' 'temperatures=[0,1]' 'batch_sizes=[1,4]'
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from rich.console import Console

from specheads.base.model import FrozenBase
from specheads.commands._library import (
    Prompts,
    SettingsWithEvaluation,
    head_of,
    load_base,
    own,
    prompt_set,
    settings_for,
)
from specheads.commands.evaluate import generation_settings, tree_for, usable_prompts
from specheads.config import Compare
from specheads.config.commands import DRAFTERS, OF_DRAFT_MODEL
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.core.files import dumps, writable_folder, write_atomic
from specheads.core.machine import dtype_name
from specheads.data.prompts import PromptSet
from specheads.decoding.draft_model import refuse_vocabulary
from specheads.decoding.prompt_lookup import MAX_NGRAM
from specheads.decoding.trees.hybrid import own_tree
from specheads.heads.load import load_head
from specheads.measure.compare import (
    COPIED_TOKENS,
    SINKS,
    WINDOW,
    compare_methods,
    condition,
    make_methods,
    tables,
)
from specheads.measure.evaluation import head_summary, subject
from specheads.measure.generation import Continuations, write_alone
from specheads.measure.results import Comparison
from specheads.runs.directory import RunDirectory
from specheads.runs.provenance import nearby


def run(settings: Compare, overrides: Sequence[str]) -> None:
    """Compare heads of one base with each other and with the baselines."""
    comparison = compare(settings=settings, overrides=overrides)
    console = Console()
    for table in tables(comparison):
        console.print(table)
    path = output_folder(settings) / "compare.json"
    console.print(f"comparison: {path}", soft_wrap=True, markup=False)


def compare(
    run: str | Path = "",
    overrides: Sequence[str] = (),
    *,
    settings: Compare | None = None,
    base: FrozenBase | None = None,
    head: Head | None = None,
    heads: Mapping[str, Head] | None = None,
    prompts: Prompts = None,
    out: str | Path = "",
) -> Comparison:
    """Compare heads of one base with each other and with methods that need no training.

    Args:
        run: Directory of the run.
        overrides: As on the command line: `["drafters=[head,hybrid]"]`, `["heads=[DIR,DIR]"]`.
        settings: Typed settings.
        base: The loaded base; needed with loaded heads.
        head: A loaded head, called `head`.
        heads: Several loaded heads by name.
        prompts: Token ids, a name or a .jsonl file.
        out: Folder of compare.json. Without it that is the report of the first run.
    """
    given = heads or ({"head": head} if head else {})
    first = next(iter(given.values()), None)
    settings, words = settings_for(Compare, settings, overrides, first, run=run, out=out)
    names = method_names(settings.drafters, settings.draft_model)
    if settings.out:
        writable_folder(settings.out)
    evaluated: SettingsWithEvaluation = settings
    if not given:
        folder = output_folder(settings)
        if named := _first_run(settings):
            _, evaluated = own(replace(settings, run=named), words)
        base, given = _load(settings, evaluated, base)
    elif base is None:
        raise InputError("name what to compare: run=DIR, or heads=[DIR,DIR]")
    else:
        folder = Path(settings.out) if settings.out else None
    comparison = _compare(base, given, names, settings, evaluated, prompt_set(prompts, evaluated))
    if folder:
        write_atomic(writable_folder(folder) / "compare.json", dumps(comparison))
    return comparison


def _compare(
    base: FrozenBase,
    heads: Mapping[str, Head],
    names: Sequence[str],
    settings: Compare,
    evaluated: SettingsWithEvaluation,
    prompts: PromptSet | None,
) -> Comparison:
    """Compare heads and baselines; `evaluated` has the settings of the first run or the command."""
    evaluation = evaluated.evaluation
    prompts = usable_prompts(base, min(one.depth for one in heads.values()), evaluated, prompts)
    draft_model = None
    if {*names} & {*OF_DRAFT_MODEL}:
        dtype = dtype_name(base.dtype)
        draft_model = FrozenBase.load(settings.draft_model, dtype=dtype, device=str(base.device))
        refuse_vocabulary(draft_model, base)
    tokens = [prompt.tokens for prompt in prompts.prompts]
    categories = [prompt.category for prompt in prompts.prompts]
    conditions = []
    for temperature, batch_size in product(
        settings.temperatures or [evaluation.temperature],
        settings.batch_sizes or [evaluation.batch_size],
    ):
        evaluation.temperature, evaluation.batch_size = temperature, batch_size
        # baselines are compared with the base's own tokens
        generation = replace(generation_settings(evaluated, prompts), acceptance="match")
        trees = {}
        if {"head", "hybrid"} & {*names}:
            trees = {
                name: own_tree(tree_for(base, head, evaluated, prompts, generation)[0])
                for name, head in heads.items()
            }
        methods = make_methods(names, base, heads, trees, draft_model, settings.draft_depth)
        alone = write_alone(base, tokens, replace(generation, batch_size=8))
        rows = compare_methods(
            base,
            methods,
            Continuations(tokens, alone, categories),
            generation,
            speed_prompts=evaluation.speed_prompts,
            repetitions=evaluation.repeats,
        )
        conditions.append(condition(rows, temperature, batch_size))
    return Comparison(
        **subject(base, next(iter(heads.values())), prompts),
        heads={name: head_summary(head) for name, head in heads.items()},
        conditions=conditions,
        settings={
            "max_new_tokens": evaluation.max_new_tokens,
            "draft_model": nearby(settings.draft_model),
            "draft_depth": settings.draft_depth,
            "copied_tokens": COPIED_TOKENS,
            "max_ngram": MAX_NGRAM,
            "sinks": SINKS,
            "window": WINDOW,
            "dtype": dtype_name(base.dtype),
            "device": base.device.type,
            "seed": evaluated.seed,
            "coupled": evaluation.coupled,
        },
    )


def method_names(drafters: Sequence[str], draft_model: str) -> list[str]:
    """Return the names of the methods; those with a draft model need the name of one."""
    if (needing := {*drafters} & {*OF_DRAFT_MODEL}) and not draft_model:
        raise InputError(f"the drafter {min(needing)} needs a model: draft_model=FOLDER_OR_HUB_ID")
    named = [name for name in DRAFTERS if draft_model or name not in OF_DRAFT_MODEL]
    return list(dict.fromkeys(drafters)) or named


def output_folder(settings: Compare) -> Path:
    """Return the folder of compare.json: `out`, or the report of the first run."""
    if settings.out:
        return Path(settings.out)
    if first := _first_run(settings):
        return RunDirectory(Path(first)).report
    raise InputError("heads without a run need out=FOLDER for compare.json")


def _first_run(settings: Compare) -> str:
    """Return the first run that the settings name; empty if they name only heads."""
    # run= must be a run, and is checked later
    return settings.run or next((place for place in _places(settings) if _run_at(place)), "")


def _load(
    settings: Compare, evaluated: SettingsWithEvaluation, base: FrozenBase | None
) -> tuple[FrozenBase, dict[str, Head]]:
    """Return the base, and the heads of the settings by name."""
    places = _places(settings)
    runs = {place: run for place in places if (run := _run_at(place))}
    for run in runs.values():
        run.refuse_unfinished("compared")
        if run.adapter.is_dir() and len(places) > 1:
            raise InputError(
                f"heads are compared on one base, and {run.path} trained its base with an adapter; "
                "compare it alone, with run=DIR"
            )
    base = base or load_base(evaluated)
    heads = [
        head_of(runs[place], base, force=False) if place in runs else load_head(place, base)
        for place in places
    ]
    return base, dict(zip(_names(places), heads, strict=True))


def _places(settings: Compare) -> list[str]:
    places = [*([settings.run] if settings.run else []), *settings.heads]
    if not places:
        raise InputError("name what to compare: run=DIR, or heads=[DIR,DIR]")
    return places


def _run_at(place: str) -> RunDirectory | None:
    run = RunDirectory(Path(place))
    return run if run.config.is_file() else None


def _names(places: Sequence[str]) -> list[str]:
    """Return the last parts of the folder names, numbered if they repeat; one alone is `head`."""
    if len(places) == 1:
        return ["head"]
    paths = [Path(place) for place in places]
    names = [path.parent.name if path.name == "head" else path.name for path in paths]
    return [
        name if names.count(name) == 1 else f"{name}_{names[: index + 1].count(name)}"
        for index, name in enumerate(names)
    ]
