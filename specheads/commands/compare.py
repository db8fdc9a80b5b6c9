"""Compare heads with each other and with methods that need no training, in turns.

specheads compare run=runs/smollm2
specheads compare 'heads=[runs/a,runs/b]' 'temperatures=[0,1]' 'batch_sizes=[1,4]'
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from rich.console import Console

from specheads.base.model import FrozenBase
from specheads.commands._call import checked_settings, run_folder_of
from specheads.commands._library import load_base, load_run_head
from specheads.commands.evaluate import (
    choose_policy,
    evaluation_prompts,
    generation_settings,
    shortage_note,
)
from specheads.config.commands import DRAFTERS, HYBRIDS, WITH_DRAFT_MODEL, Compare
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.core.files import dumps, writable_folder, write_atomic
from specheads.core.machine import dtype_name
from specheads.decoding.draft_model import refuse_vocabulary
from specheads.decoding.trees.hybrid import remove_lookup
from specheads.heads.load import load_head
from specheads.measure.compare import (
    NEEDS_KEYS,
    compare_methods,
    comparison_tables,
    make_condition,
    make_methods,
)
from specheads.measure.evaluation import base_summary, head_summary, prompt_summary
from specheads.measure.generation import BaseTexts, continue_prompts
from specheads.measure.results import Comparison
from specheads.runs.directory import RunDirectory
from specheads.runs.provenance import collect_provenance, shorten_paths


def run(settings: Compare) -> None:
    """Compare heads of one base with each other and with the baselines."""
    comparison = compare(settings=settings)
    Console().print(*comparison_tables(comparison))
    sys.stdout.write(shortage_note(comparison.prompts, settings))
    sys.stdout.write(f"comparison: {output_folder(settings) / 'compare.json'}\n")


def compare(
    run: str | Path = "",
    overrides: Sequence[str] = (),
    *,
    settings: Compare | None = None,
    base: FrozenBase | None = None,
    out: str | Path = "",
) -> Comparison:
    """Compare heads of one base with each other and with methods that need no training.

    `overrides` are like `["heads=[DIR,DIR]", "drafters=[head,hybrid]"]`. Without `out` compare.json
    goes into the report of the first run.
    """
    settings = settings or checked_settings(Compare, overrides, run=run, out=out)
    evaluation, names = settings.evaluation, method_names(settings.drafters, settings.draft_model)
    folder = writable_folder(output_folder(settings))
    base, heads = _load(settings, base)
    if base.has_states and not settings.drafters:
        names = [name for name in names if name not in NEEDS_KEYS]
    prompts = evaluation_prompts(base, min(head.depth for head in heads.values()), settings)
    tokens = [prompt.tokens for prompt in prompts.prompts]
    draft_model = None
    if {*names} & {*WITH_DRAFT_MODEL}:
        dtype = dtype_name(base.dtype)
        draft_model = FrozenBase.load(settings.draft_model, dtype=dtype, device=str(base.device))
        refuse_vocabulary(draft_model, base)
    conditions = []
    for temperature, batch_size in product(
        settings.temperatures or [evaluation.temperature],
        settings.batch_sizes or [evaluation.batch_size],
    ):
        condition = {"temperature": temperature, "batch_size": batch_size}
        # baselines are compared with the base's own tokens
        condition_settings = replace(
            settings, evaluation=replace(evaluation, acceptance="match", **condition)
        )
        generation, trees = generation_settings(condition_settings, prompts), {}
        if {"head", *HYBRIDS} & {*names}:
            policies = {
                name: choose_policy(base, heads[name], condition_settings, prompts, generation)
                for name in heads
            }
            trees = {name: remove_lookup(tree) for name, (tree, _) in policies.items()}
        methods = make_methods(names, base, heads, trees, draft_model)
        base_tokens = continue_prompts(base, tokens, replace(generation, batch_size=8))
        texts = BaseTexts(tokens, base_tokens, prompts.groups)
        rows = compare_methods(base, methods, texts, generation)
        conditions.append(make_condition(rows, temperature, batch_size))
    comparison = Comparison(
        head=head_summary(next(iter(heads.values()))),
        heads={name: head_summary(head) for name, head in heads.items()},
        base=base_summary(base),
        prompts=prompt_summary(prompts),
        conditions=conditions,
        settings={
            "max_new_tokens": evaluation.max_new_tokens,
            "draft_model": shorten_paths(settings.draft_model),
            "dtype": dtype_name(base.dtype),
            "device": base.device.type,
            "seed": settings.seed,
            "coupled": evaluation.coupled,
        },
        provenance=collect_provenance(),
    )
    write_atomic(folder / "compare.json", dumps(comparison))
    return comparison


def method_names(drafters: Sequence[str], draft_model: str) -> list[str]:
    """Return the names of the methods; those with a draft model need the name of one."""
    if (with_model := {*drafters} & {*WITH_DRAFT_MODEL}) and not draft_model:
        raise InputError(
            f"the drafter {min(with_model)} needs a model: draft_model=FOLDER_OR_HUB_ID"
        )
    available = [name for name in DRAFTERS if draft_model or name not in WITH_DRAFT_MODEL]
    return list(dict.fromkeys(drafters)) or available


def output_folder(settings: Compare) -> Path:
    """Return the folder of compare.json: `out`, or the report of the first run."""
    if settings.out:
        return Path(settings.out)
    if not (settings.run or settings.heads):
        raise InputError("name what to compare: run=DIR, or heads=[DIR,DIR]")
    if first := run_folder_of(settings):
        return RunDirectory(Path(first)).report
    raise InputError("heads without a run need out=FOLDER for compare.json")


def _load(settings: Compare, base: FrozenBase | None) -> tuple[FrozenBase, dict[str, Head]]:
    """Return the base, and the heads of the settings by name."""
    paths = [Path(path) for path in [settings.run, *settings.heads] if path]
    runs = {path: run for path in paths if (run := RunDirectory(path)).config.is_file()}
    for run in runs.values():
        run.refuse_unfinished("compared")
        if run.adapter.is_dir() and len(paths) > 1:
            raise InputError(
                f"heads are compared on one base, and {run.path} trained its base with an adapter; "
                "compare it alone, with run=DIR"
            )
    base = base or load_base(settings)
    # a head alone is `head`; several have the names of their folders, or their paths if some repeat
    names = [path.parent.name if path.name == "head" else path.name for path in paths]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    if len(names) == 1:
        names = ["head"]
    heads = {}
    for name, path in zip(names, paths, strict=True):
        run = runs.get(path)
        heads[name] = load_run_head(run, base) if run else load_head(path, base)
    return base, heads
