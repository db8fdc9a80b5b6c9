"""Evaluate a head: offline replay, online decoding, speed."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from specheads.base.model import FrozenBase
from specheads.core.drafter import Head
from specheads.core.files import from_json, read_json, to_json
from specheads.core.machine import dtype_name
from specheads.data.prompts import PromptSet
from specheads.decoding.accept import LOSSY
from specheads.decoding.calibration import Curve, Reliability, reliability
from specheads.decoding.trees import policies
from specheads.decoding.trees.hybrid import HybridTree, own_tree
from specheads.decoding.trees.tuned import Tuned
from specheads.heads.load import load_head
from specheads.measure import results
from specheads.measure.counts import DepthCounts, paired_gain, rate
from specheads.measure.generation import (
    Continuations,
    GenerationSettings,
    decode_prompts,
    decode_texts,
    write_alone,
)
from specheads.measure.offline import measure_offline, replays
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
    repetitions: int = 2,
    speed_prompts: int = 16,
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
        repetitions: Timed runs of each prompt.
        speed_prompts: Prompts to time.
        tuned: The measurements that chose the tree, if it was chosen for this evaluation.
        phases: Folders of the head at the end of each phase, named after the phase.
        contexts: The prompts at several context lengths: see `with_context`.
    """
    tree = generation.tree or policies.chain(head.depth)
    sampling, own = generation.sampling, own_tree(tree)
    chain = replace(generation, tree=None, batch_size=8)
    tokens = [prompt.tokens for prompt in prompts.prompts]
    texts = Continuations(tokens, write_alone(base, tokens, chain), prompts.groups)
    found: dict[str, Any] = {}
    if generation.matched:
        found["offline"] = measure_offline(base, head, texts, generation)
    if mode != "offline":
        online, lossless, degenerate = measure_online(base, head, texts, generation)
        found["replay"] = _replay(found.get("offline"), online, tree)
        found |= {"online": online, "degenerate": degenerate, "lossless": lossless}
        found["texts"] = decode_texts(base, head, prompts.prompts, generation)
    measured = head.tuned or tuned
    if measured and sampling.temperature == 0:
        curves = measured.acceptance.curves
        found["calibration"] = measure_calibration(base, head, texts, curves)
    timed = speed_prompts if mode == "all" else 0
    if timed:
        found["speed"] = measure_speed(
            base, head, tokens[:timed], generation, repetitions=repetitions
        )
    found["contexts"] = measure_contexts(
        base, head, contexts, generation, repetitions=repetitions, speed_prompts=timed
    )
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
        tree_candidates=tuned.tried if tuned else [],
        tuned=tuned,
        phases=[_phase(base, folder, texts, chain) for folder in phases],
        **found,
    )


def measure_calibration(
    base: FrozenBase, head: Head, texts: Continuations, curves: Sequence[Curve]
) -> list[Reliability]:
    """Return how each depth's calibration does on these texts, as deep as drafts were accepted."""
    if not curves:
        return []
    traces = traced(base, head, zip(texts.prompts, texts.alone, strict=True))
    pairs = zip(curves, draft_chances(traces, head.depth), strict=True)
    return [reliability(curve, *drafts) for curve, drafts in pairs if len(drafts[0])]


def measure_contexts(
    base: FrozenBase,
    head: Head,
    contexts: Sequence[PromptSet],
    generation: GenerationSettings,
    *,
    repetitions: int,
    speed_prompts: int,
) -> list[results.ContextRate]:
    """Decode the same prompts at each context length; zero `speed_prompts` times none of them."""
    found, first = [], list[DepthCounts]()
    for prompts in contexts:
        tokens, speed = [prompt.tokens for prompt in prompts.prompts], None
        counts = [one.counts for one in decode_prompts(base, head, tokens, generation)]
        first = first or counts
        if speed_prompts:
            speed = measure_speed(
                *(base, head, tokens[:speed_prompts], generation),
                repetitions=repetitions,
                with_prompt=False,
            )
        found.append(
            results.ContextRate(
                **asdict(rate(counts)),
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


def _replay(
    offline: results.Offline | None, online: results.Online, tree: policies.TreePolicy
) -> dict[str, Any] | None:
    """Compare replay and decoding; None if a chain was replayed because the tree is not fixed."""
    if offline is None or not replays(tree):
        return None
    names = ("forwards", "per_depth", "tokens_per_forward")
    pair = [{name: to_json(one)[name] for name in names} for one in (offline, online)]
    return {"tree": tree.name, "offline": pair[0], "online": pair[1], "equal": pair[0] == pair[1]}


def _phase(
    base: FrozenBase, folder: Path, texts: Continuations, chain: GenerationSettings
) -> results.PhaseRate:
    """Replay a chain with the head at the end of a phase."""
    rate = measure_offline(base, load_head(folder, base, force=True), texts, chain)
    return results.PhaseRate(
        phase=folder.name, tokens_per_forward=rate.tokens_per_forward, interval=rate.interval
    )
