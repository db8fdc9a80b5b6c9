"""Evaluate a head: offline replay, online decoding, speed."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from specheads.base.model import FrozenBase
from specheads.core.drafter import Head
from specheads.core.files import from_json, read_json
from specheads.core.machine import dtype_name
from specheads.data.prompts import PromptSet
from specheads.decoding.accept import LOSSY
from specheads.decoding.calibration import reliability
from specheads.decoding.trees import policies
from specheads.decoding.trees.hybrid import HybridTree, own_tree
from specheads.decoding.trees.tuned import Tuned
from specheads.heads.load import load_head
from specheads.measure import results
from specheads.measure.counts import DepthCounts, compute_rate, paired_gain
from specheads.measure.generation import (
    Continuations,
    GenerationSettings,
    decode_prompts,
    decode_texts,
    write_alone,
)
from specheads.measure.offline import measure_offline
from specheads.measure.online import measure_online
from specheads.measure.results import Results
from specheads.measure.speed import measure_speed
from specheads.measure.tune_trees import draft_chances, traced
from specheads.runs.directory import RunDirectory
from specheads.runs.provenance import nearby, provenance


def evaluate_head(
    base: FrozenBase,
    head: Head,
    prompts: PromptSet,
    generation: GenerationSettings,
    *,
    mode: str = "all",
    tuned: Tuned | None = None,
    phases: Sequence[Path] = (),
    contexts: Sequence[PromptSet] = (),
) -> Results:
    """Evaluate a head that is bound to its base.

    Args:
        base: The base.
        head: The head.
        prompts: The prompts.
        generation: Conditions of decoding, with the tree.
        mode: offline (replay only), online (decoding too), or all (with speed).
        tuned: The measurements that chose the tree, if it was chosen for this evaluation.
        phases: Folders of the head at the end of each phase, named after the phase.
        contexts: The prompts at several context lengths: see `with_context`.
    """
    tree = generation.tree or policies.chain(head.depth)
    sampling, own = generation.sampling, own_tree(tree)
    if mode != "all":
        generation = replace(generation, speed_prompts=0)
    chain = replace(generation, tree=None, batch_size=8)
    tokens = [prompt.tokens for prompt in prompts.prompts]
    texts = Continuations(tokens, write_alone(base, tokens, chain), prompts.groups)
    found: dict[str, Any] = {}
    if generation.matched:
        found["offline"] = measure_offline(base, head, texts, generation)
    if mode != "offline":
        online, lossless, degenerate = measure_online(base, head, texts, generation)
        found |= {"online": online, "degenerate": degenerate, "lossless": lossless}
        found["texts"] = decode_texts(base, head, prompts.prompts, generation)
    measured = head.tuned or tuned
    if measured and measured.acceptance.curves and sampling.temperature == 0:
        traces = traced(base, head, zip(texts.prompts, texts.alone, strict=True))
        pairs = zip(measured.acceptance.curves, draft_chances(traces, head.depth), strict=True)
        # as deep as drafts were accepted
        found["calibration"] = [reliability(curve, *each) for curve, each in pairs if len(each[0])]
    found["phases"] = []
    for folder in phases:
        early = load_head(folder, base, force=True)
        rated = measure_offline(base, early, texts, chain)
        figures = {"tokens_per_forward": rated.tokens_per_forward, "interval": rated.interval}
        found["phases"].append(results.PhaseRate(phase=folder.name, **figures))
    if generation.speed_prompts:
        found["speed"] = measure_speed(base, head, tokens, generation)
    found["contexts"] = measure_contexts(base, head, contexts, generation)
    return Results(
        **subject(base, head, prompts),
        settings=results.EvaluationSettings(
            **asdict(sampling),
            max_new_tokens=generation.max_new_tokens,
            batch_size=generation.batch_size,
            acceptance=generation.acceptance,
            coupled=generation.coupled,
            lossless=sampling.temperature == 0 or generation.acceptance not in LOSSY,
            tree=tree.name,
            num_nodes=tree.num_nodes,
            paths=[list(path) for path in own.paths] if isinstance(own, policies.Static) else [],
            copied_tokens=tree.size if isinstance(tree, HybridTree) else 0,
            dtype=dtype_name(base.dtype),
            device=base.device.type,
        ),
        draft_vocabulary=draft_vocabulary(head, None),
        tuned=tuned,
        **found,
    )


def measure_contexts(
    base: FrozenBase,
    head: Head,
    contexts: Sequence[PromptSet],
    generation: GenerationSettings,
) -> list[results.ContextRate]:
    """Decode the same prompts at each context length."""
    found, first = [], list[DepthCounts]()
    for prompts in contexts:
        tokens, speed = [prompt.tokens for prompt in prompts.prompts], None
        counts = [one.counts for one in decode_prompts(base, head, tokens, generation)]
        first = first or counts
        if generation.speed_prompts:
            speed = measure_speed(base, head, tokens, generation, with_prompt=False)
        found.append(
            results.ContextRate(
                **asdict(compute_rate(counts)),
                context=len(tokens[0]),
                over_first=paired_gain(counts, first),
                speed=speed,
            )
        )
    return found


def subject(base: FrozenBase, head: Head, prompts: PromptSet) -> dict[str, Any]:
    """Return the sections on head, base, prompts and provenance, without local paths."""
    given = prompts.prompts
    return {
        "head": head_summary(head),
        "base": results.BaseSummary(
            name=nearby(base.name),
            revision=base.revision,
            adapter=nearby(base.adapter),
            fingerprint=base.fingerprint,
            parameters=base.num_parameters,
        ),
        "prompts": results.PromptSummary(
            name=prompts.name,
            version=prompts.version,
            count=len(given),
            categories=dict(sorted(Counter(prompt.category for prompt in given).items())),
            sources=len({prompt.source or place for place, prompt in enumerate(given)}),
        ),
        "provenance": provenance(),
    }


def head_summary(head: Head) -> results.HeadSummary:
    """Return the kind and size of a head."""
    parameters = sum(parameter.numel() for parameter in head.parameters())
    return results.HeadSummary(kind=head.kind, depth=head.depth, parameters=parameters)


def draft_vocabulary(head: Head, run: RunDirectory | None) -> results.DraftVocabulary:
    """Return how many tokens the head can draft, and their share of its training text."""
    if head.draft_ids is None:
        return results.DraftVocabulary(size=head.vocab_size, coverage=1.0)
    known = read_json(run.provenance) if run is not None else {}
    counted = known.get("draft_vocabulary") or {"size": head.drafted_size, "coverage": None}
    return from_json(results.DraftVocabulary, counted, "provenance.json")
