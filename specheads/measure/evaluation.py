"""Evaluate a head: offline replay, online decoding, speed, and the quality of an adapted base."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path

import torch
from torch.nn import functional as F  # noqa: N812

from specheads.base.ends import BaseEnds
from specheads.base.model import FrozenBase
from specheads.config.data import DataSettings
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.core.files import from_json, read_json
from specheads.core.machine import dtype_name
from specheads.data.prompts import PromptSet, held_out_prompts
from specheads.data.tokenise import UnansweredError, cut_windows, tokenise_corpus
from specheads.decoding.accept import LOSSY
from specheads.decoding.calibration import Reliability, reliability
from specheads.decoding.trees import policies
from specheads.decoding.trees.hybrid import HybridTree, remove_lookup
from specheads.decoding.trees.tuned import Tuned
from specheads.heads.load import load_head
from specheads.measure import results
from specheads.measure.counts import (
    DepthCounts,
    bootstrap_interval,
    compute_rate,
    number_sources,
    paired_gain,
)
from specheads.measure.generation import (
    BaseTexts,
    GenerationSettings,
    continue_prompts,
    decode_prompts,
    decode_texts,
)
from specheads.measure.offline import measure_offline
from specheads.measure.online import measure_online
from specheads.measure.results import Results
from specheads.measure.speed import measure_ledger, measure_speed
from specheads.measure.tune_trees import draft_chances, trace_texts
from specheads.runs.directory import RunDirectory
from specheads.runs.progress import progress_bar
from specheads.runs.provenance import collect_provenance, shorten_paths

NUM_WINDOWS = 64
"""Windows of validation text on which quality is measured."""
Scores = list[tuple[float, int]]
"""For each window: summed cross entropy in nats, and predicted tokens: all but the first."""


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
    run: RunDirectory | None = None,
    base_quality: dict[str, results.TextQuality] | None = None,
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
        run: The run that trained the head, if there is one.
        base_quality: The base's own quality before and after joint training: see `quality`.
    """
    if mode != "all":
        generation = replace(generation, speed_prompts=0)
    chain = replace(generation, tree=None, batch_size=8)
    tokens = [prompt.tokens for prompt in prompts.prompts]
    texts = BaseTexts(tokens, continue_prompts(base, tokens, chain), prompts.groups)
    offline = measure_offline(base, head, texts, generation) if generation.is_matched else None
    online = lossless = degenerate = None
    decoded_texts = list[results.DecodedText]()
    if mode != "offline":
        online, lossless, degenerate = measure_online(base, head, texts, generation)
        decoded_texts = decode_texts(base, head, prompts.prompts, generation)
    is_timed, has_ledger = generation.speed_prompts > 0, generation.ledger and mode == "all"
    is_greedy, tuning = generation.sampling.temperature == 0, head.tuned or tuned
    return Results(
        head=head_summary(head),
        base=base_summary(base),
        prompts=prompt_summary(prompts),
        settings=evaluation_settings(base, head, generation),
        draft_vocabulary=draft_vocabulary(head, run),
        offline=offline,
        online=online,
        lossless=lossless,
        degenerate=degenerate,
        texts=decoded_texts,
        calibration=measure_calibration(base, head, texts, tuning) if tuning and is_greedy else [],
        phases=[measure_phase(base, folder, texts, chain) for folder in phases],
        speed=measure_speed(base, head, tokens, generation) if is_timed else None,
        ledger=measure_ledger(base, head, tokens, generation) if has_ledger else None,
        contexts=measure_contexts(base, head, contexts, generation),
        base_quality=base_quality,
        tuned=tuned,
        provenance=collect_provenance(),
    )


def measure_calibration(
    base: FrozenBase, head: Head, texts: BaseTexts, tuned: Tuned
) -> list[Reliability]:
    """Return how well each depth is calibrated, as deep as drafts were accepted."""
    traces = trace_texts(base, head, texts.pairs) if tuned.acceptance.curves else []
    if not traces:
        return []
    pairs = zip(tuned.acceptance.curves, draft_chances(traces), strict=True)
    return [reliability(curve, *drafts) for curve, drafts in pairs if len(drafts[0])]


def measure_phase(
    base: FrozenBase, folder: Path, texts: BaseTexts, generation: GenerationSettings
) -> results.PhaseRate:
    """Replay a chain with the head as it was at the end of a phase."""
    offline = measure_offline(base, load_head(folder, base, force=True), texts, generation)
    return results.PhaseRate(
        phase=folder.name, tokens_per_forward=offline.tokens_per_forward, interval=offline.interval
    )


def measure_contexts(
    base: FrozenBase, head: Head, contexts: Sequence[PromptSet], generation: GenerationSettings
) -> list[results.ContextRate]:
    """Decode the same prompts at each context length."""
    rates, first_counts = [], list[DepthCounts]()
    for prompts in contexts:
        tokens, speed = [prompt.tokens for prompt in prompts.prompts], None
        counts = [text.counts for text in decode_prompts(base, head, tokens, generation)]
        first_counts = first_counts or counts
        if generation.speed_prompts:
            speed = measure_speed(base, head, tokens, generation, with_prompt=False)
        rates.append(
            results.ContextRate(
                **asdict(compute_rate(counts)),
                context=len(tokens[0]),
                over_first=paired_gain(counts, first_counts),
                speed=speed,
            )
        )
    return rates


# --- what was measured -------------------------------------------------------------------------


def head_summary(head: Head) -> results.HeadSummary:
    """Return the kind and size of a head."""
    parameters = sum(parameter.numel() for parameter in head.parameters())
    return results.HeadSummary(kind=head.kind, depth=head.depth, parameters=parameters)


def base_summary(base: FrozenBase) -> results.BaseSummary:
    """Return the name and size of a base, without local paths."""
    return results.BaseSummary(
        name=shorten_paths(base.name),
        revision=base.revision,
        adapter=shorten_paths(base.adapter),
        fingerprint=base.fingerprint,
        parameters=base.num_parameters,
    )


def prompt_summary(prompts: PromptSet) -> results.PromptSummary:
    """Return the name of a prompt set and how many prompts it has."""
    categories = Counter(prompt.category for prompt in prompts.prompts)
    return results.PromptSummary(
        name=prompts.name,
        version=prompts.version,
        count=len(prompts.prompts),
        categories=dict(sorted(categories.items())),
        sources=len({*number_sources([prompt.source for prompt in prompts.prompts])}),
    )


def evaluation_settings(
    base: FrozenBase, head: Head, generation: GenerationSettings
) -> results.EvaluationSettings:
    """Return the conditions of decoding as results.json stores them."""
    tree, sampling = generation.tree_of(head), generation.sampling
    head_tree = remove_lookup(tree)
    is_static = isinstance(head_tree, policies.Static)
    # an evaluation samples without the processors of a request
    names = "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed"
    return results.EvaluationSettings(
        **{name: getattr(sampling, name) for name in names},
        max_new_tokens=generation.max_new_tokens,
        batch_size=generation.batch_size,
        acceptance=generation.acceptance,
        coupled=generation.coupled,
        lossless=sampling.temperature == 0 or generation.acceptance not in LOSSY,
        tree=tree.name,
        num_nodes=tree.num_nodes,
        paths=[list(path) for path in head_tree.paths] if is_static else [],
        copied_tokens=tree.num_copied if isinstance(tree, HybridTree) else 0,
        dtype=dtype_name(base.dtype),
        device=base.device.type,
    )


def draft_vocabulary(head: Head, run: RunDirectory | None) -> results.DraftVocabulary:
    """Return how many tokens the head can draft, and their share of its training text."""
    if head.draft_ids is None:
        return results.DraftVocabulary(size=head.vocab_size, coverage=1.0)
    facts = read_json(run.provenance) if run is not None else {}
    vocabulary = facts.get("draft_vocabulary") or {"size": head.drafted_size, "coverage": None}
    return from_json(results.DraftVocabulary, vocabulary, "provenance.json")


# --- the base's own quality, before and after joint training -------------------------------------


def quality_windows(base: BaseEnds, corpus: DataSettings, seed: int) -> list[list[int]]:
    """Return windows of validation text, at most 512 tokens each."""
    tokenizer = base.tokenizer_for("the base's quality")
    try:
        documents = tokenise_corpus(corpus, "validation", tokenizer, seed)
    except UnansweredError:
        # the corpus has prompts only
        prompts = held_out_prompts(corpus, "validation", tokenizer, 512, NUM_WINDOWS, seed)
        return [prompt.tokens for prompt in prompts]
    length = min(512, base.max_length)
    while length > 1:
        rows = cut_windows(documents, tokenizer, length, seed)
        if windows := [window for _, window in islice(rows, NUM_WINDOWS)]:
            return windows
        # every document is shorter
        length //= 2
    raise InputError("the base's quality needs validation text, got none; give longer documents")


@torch.no_grad()
def measure_quality(
    base: FrozenBase, windows: Sequence[Sequence[int]], *, progress: bool = False
) -> Scores:
    """Score every next token of windows of text, each window by itself."""
    scores = []
    for window in progress_bar(windows, "base quality", progress):
        tokens = torch.tensor(window, device=base.device)
        logits = base.logits_of(base.read(tokens[None]).hidden[0, :-1])
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        nats = F.cross_entropy(logits, tokens[1:], reduction="sum").item()
        scores.append((nats, len(tokens) - 1))
    return scores


def compare_quality(before: Scores, after: Scores) -> dict[str, results.TextQuality]:
    """Return the `base_quality` section of results.json.

    `change` is the difference on the same windows; above zero the cross entropy has become worse.
    """
    change = [
        (nats_after - nats_before, num_tokens)
        for (nats_before, num_tokens), (nats_after, _) in zip(before, after, strict=True)
    ]
    return {"before": _summary(before), "after": _summary(after), "change": _summary(change)}


def _summary(scores: Scores) -> results.TextQuality:
    nats, tokens = zip(*scores, strict=True)
    interval = bootstrap_interval(nats, tokens)
    return results.TextQuality(
        cross_entropy=sum(nats) / sum(tokens), cross_entropy_interval=interval
    )
