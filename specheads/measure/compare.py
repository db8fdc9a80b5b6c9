"""Compare methods on the same prompts, in one process, in turns: see docs/compare.md.

The methods are heads, baselines without training, and transformers.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from specheads.base.loading import without_generation_config
from specheads.base.model import FrozenBase
from specheads.config.commands import HYBRIDS
from specheads.core.drafter import Drafter, Head
from specheads.core.errors import InputError
from specheads.core.machine import synchronise
from specheads.decoding.draft_model import DraftModel, Streaming
from specheads.decoding.sampling import expand_sampling
from specheads.decoding.suffix_decoding import LookupText, SuffixAutomaton
from specheads.decoding.trees import policies
from specheads.decoding.trees.hybrid import HybridTree, lookup_tree
from specheads.measure.counts import DepthCounts, paired_gain
from specheads.measure.generation import (
    BaseTexts,
    DecodedPrompt,
    GenerationSettings,
    decode_prompts,
)
from specheads.measure.online import online_sections
from specheads.measure.results import Comparison, Condition, Gain, MethodResults
from specheads.measure.speed import Timing, paired_speed, summarise, time_generate, time_in_turns
from specheads.measure.summary import ConsoleTable, divergence_note, with_interval

COPIED_TOKENS = 10
"""Tokens that are copied at most, alone and in the tree of a hybrid."""
SINKS = 4
"""First tokens of a text that streaming attends to."""
WINDOW = 60
"""Recent tokens that streaming attends to."""
NEEDS_KEYS = ("hybrid", "streaming", "transformers_lookup", "transformers_assisted")
"""Methods that a base with states cannot run: they branch, or cut its text."""
DRAFT_DEPTH = 4
"""Tokens that streaming and the draft model draft, as a chain."""


@dataclass(frozen=True, slots=True)
class DraftMethod:
    """A drafter with a tree in our loop."""

    drafter: Drafter | None
    tree: policies.TreePolicy
    shares_text: bool = False
    """Whether it also copies from prompts and answers before the one that it decodes."""
    batches: bool = True
    decoded: list[list[int]] = field(default_factory=list)
    """With `shares_text`, each prompt with its answer, in order."""

    def decode(
        self, base: FrozenBase, prompts: list[list[int]], generation: GenerationSettings
    ) -> list[DecodedPrompt]:
        """Decode every prompt and count its forwards."""
        memory = SuffixAutomaton() if self.shares_text else None
        generation = replace(generation, tree=self.tree, memory=memory)
        out = decode_prompts(base, self.drafter, prompts, generation)
        if self.shares_text:
            pairs = zip(prompts, out, strict=True)
            self.decoded[:] = [prompt + answer.tokens for prompt, answer in pairs]
        return out

    def time(
        self, base: FrozenBase, prompts: list[list[int]], generation: GenerationSettings
    ) -> Timing:
        """Decode prompts together once, with those before them in memory, and time it."""
        memory, first = SuffixAutomaton() if self.shares_text else None, prompts[0]
        # a repetition must not know their answers
        for text in takewhile(lambda text: text[: len(first)] != first, self.decoded):
            LookupText(text, memory).find(1)
        generation = replace(generation, tree=self.tree, memory=memory)
        return time_generate(base, self.drafter, prompts, generation)


def make_methods(
    names: Sequence[str],
    base: FrozenBase,
    heads: Mapping[str, Head],
    trees: Mapping[str, policies.TreePolicy],
    draft_model: FrozenBase | None = None,
) -> "dict[str, Method]":
    """Return the methods with these names; `head` and both hybrids give one for each head.

    A single head is called `head`. `trees` are the heads' own, without prompt-lookup tokens.
    """
    chain = policies.chain(DRAFT_DEPTH)
    untrained: dict[str, Callable[[], Method]] = {
        "prompt_lookup": lambda: DraftMethod(None, lookup_tree(COPIED_TOKENS)),
        "suffix": lambda: DraftMethod(None, lookup_tree(COPIED_TOKENS), shares_text=True),
        "streaming": lambda: DraftMethod(
            Streaming(base, DRAFT_DEPTH, sinks=SINKS, window=WINDOW), chain
        ),
        "transformers": TransformersMethod,
        "transformers_lookup": lambda: TransformersMethod(copied_tokens=COPIED_TOKENS),
    }
    if draft_model is not None:
        untrained |= {
            "transformers_assisted": lambda: TransformersMethod(assistant=draft_model.model),
            "draft_model": lambda: DraftMethod(DraftModel(draft_model, DRAFT_DEPTH, base), chain),
        }
    methods: dict[str, Method] = {}
    for name in names:
        if base.has_states and name in NEEDS_KEYS:
            raise InputError(
                f"the drafter {name} needs a base with keys and values only, and layers of "
                f"{base.config.model_type!r} keep states; leave it out of drafters"
            )
        if name == "head":
            methods |= {label: DraftMethod(head, trees[label]) for label, head in heads.items()}
        elif name in HYBRIDS:
            for label, head in heads.items():
                hybrid = name if label == "head" else f"{label}_{name}"
                tree = HybridTree(trees[label], COPIED_TOKENS)
                methods[hybrid] = DraftMethod(head, tree, shares_text=name != "hybrid")
        else:
            methods[name] = untrained[name]()
    return methods


# --- transformers' own generation --------------------------------------------------------------


class TransformersMethod:
    """Decode with transformers' `generate`, alone, with a draft model or with prompt lookup.

    With drafts transformers cannot batch. Above temperature zero its text is another sample.
    """

    tree = policies.NOTHING

    def __init__(self, assistant: PreTrainedModel | None = None, copied_tokens: int = 0) -> None:
        self.assistant, self.copied_tokens = assistant, copied_tokens
        self.batches = assistant is None and not copied_tokens

    def decode(
        self, base: FrozenBase, prompts: list[list[int]], generation: GenerationSettings
    ) -> list[DecodedPrompt]:
        """Decode every prompt and count its forwards after the one that reads the prompt."""
        calls = list(self.generate(base, prompts, generation))
        depth = max((size - 1 for call in calls for size in call.input_sizes[1:]), default=0)
        texts = [(call, text) for call in calls for text in call.texts]
        decoded = []
        for (call, text), source in zip(texts, generation.sources_of(prompts), strict=True):
            counts = DepthCounts.zeros(depth, source)
            # in a batch each forward after the first gives every text a token
            steps = [(1, 1)] * (len(text) - 1)
            if not self.batches:
                steps = list(zip(call.input_sizes[1:], call.output_sizes[2:], strict=True))
            for num_read, num_new in steps:
                counts.add(num_new - 1, drafted_beyond=num_read > num_new, drafted=num_read - 1)
            decoded.append(DecodedPrompt(text, counts))
        return decoded

    def time(
        self, base: FrozenBase, prompts: list[list[int]], generation: GenerationSettings
    ) -> Timing:
        """Decode prompts once and time it: together, or one by one if it cannot batch."""
        calls = list(self.generate(base, prompts, generation))
        return Timing(
            seconds=sum(call.seconds for call in calls),
            step_seconds=sum(call.end_times[-1] - call.end_times[1] for call in calls),
            num_steps=sum(len(call.input_sizes) - 1 for call in calls),
            new_tokens=sum(len(text) for call in calls for text in call.texts),
            forwards=sum(len(call.texts) * (len(call.input_sizes) - 1) for call in calls),
        )

    def generate(
        self, base: FrozenBase, prompts: list[list[int]], generation: GenerationSettings
    ) -> "Iterator[GenerateCall]":
        """Decode every prompt; yield one call of transformers' `generate` after the other."""
        sampling = generation.sampling
        eos_ids = base.eos_ids if generation.stop_at_eos else ()
        do_sample = sampling.temperature > 0
        config = GenerationConfig(
            max_new_tokens=generation.max_new_tokens,
            do_sample=do_sample,
            repetition_penalty=sampling.repetition_penalty,
            eos_token_id=list(eos_ids) or None,
            pad_token_id=eos_ids[0] if eos_ids else 0,
            prompt_lookup_num_tokens=self.copied_tokens or None,
            **({name: getattr(sampling, name) for name in CUTS} if do_sample else {}),
        )
        samplings = expand_sampling(sampling, len(prompts))
        size = generation.batch_size if self.batches else 1
        for start in range(0, len(prompts), size):
            rows = [torch.tensor(row, device=base.device) for row in prompts[start : start + size]]
            masks = [torch.ones_like(row) for row in rows]
            tokens = pad_sequence(rows, batch_first=True, padding_side="left")
            mask = pad_sequence(masks, batch_first=True, padding_side="left")
            call = GenerateCall()
            synchronise(base.device)
            start_time = time.perf_counter()
            with (
                base.model.register_forward_pre_hook(call.record_input, with_kwargs=True),
                without_generation_config(base.model),
                torch.random.fork_rng(),
                torch.inference_mode(),
            ):
                torch.manual_seed(samplings[start].seed)
                out: Any = base.model.generate(  # pyright: ignore[reportCallIssue]
                    tokens,
                    attention_mask=mask,
                    generation_config=config,
                    streamer=call,
                    assistant_model=self.assistant,
                )
            synchronise(base.device)
            call.seconds = time.perf_counter() - start_time
            for row in out[:, tokens.shape[1] :].tolist():
                ends = (i for i, token in enumerate(row, start=1) if token in eos_ids)
                length = next(ends, len(row))
                call.texts.append(row[:length])
            yield call


CUTS = ("temperature", "top_k", "top_p", "min_p")
Method = DraftMethod | TransformersMethod


@dataclass(slots=True)
class GenerateCall(BaseStreamer):
    """One call of `generate`, and the base's forwards in it."""

    seconds: float = 0.0
    texts: list[list[int]] = field(default_factory=list)
    """New tokens of each prompt, cut after the first end-of-text token."""
    input_sizes: list[int] = field(default_factory=list)
    """Tokens of a row that each forward read."""
    output_sizes: list[int] = field(default_factory=list)
    """Tokens of the prompt, followed by the new tokens of each forward."""
    end_times: list[float] = field(default_factory=list)
    """Times at which `output_sizes` were recorded."""

    def record_input(self, _: Any, __: Any, inputs: dict[str, Any]) -> None:
        """Record the size of a forward's input."""
        self.input_sizes.append(inputs["input_ids"].shape[1])

    def put(self, value: torch.Tensor) -> None:
        """Record the number of a forward's new tokens."""
        self.output_sizes.append(value.numel())
        self.end_times.append(time.perf_counter())

    def end(self) -> None:
        """Record nothing."""


# --- the comparison ----------------------------------------------------------------------------


def make_condition(
    rows: dict[str, MethodResults], temperature: float, batch_size: int
) -> Condition:
    """Return rows with their ranking."""
    ranking = sorted(rows, key=lambda name: -rows[name].speed.tokens_per_second)
    return Condition(temperature=temperature, batch_size=batch_size, ranking=ranking, drafters=rows)


def compare_methods(
    base: FrozenBase,
    methods: Mapping[str, Method],
    texts: BaseTexts,
    generation: GenerationSettings,
) -> dict[str, MethodResults]:
    """Measure acceptance of every method, and its speed on the first prompts.

    Each method has a tree of its own.
    """
    decoded = {
        name: method.decode(base, texts.prompts, generation) for name, method in methods.items()
    }
    counts = {name: [text.counts for text in rows] for name, rows in decoded.items()}
    runners = {
        name: partial(method.time, base, generation=generation) for name, method in methods.items()
    }
    timings = time_in_turns(base, runners, texts.prompts, generation)
    rows = {}
    for name, method in methods.items():
        # above temperature zero, transformers writes another sample
        is_comparable = generation.sampling.temperature == 0 or isinstance(method, DraftMethod)
        online, lossless, degenerate = online_sections(
            base, decoded[name], texts, generation, is_comparable=is_comparable
        )
        rivals = [rival for rival in methods if rival != name]
        rows[name] = MethodResults(
            online=online,
            lossless=lossless,
            degenerate=degenerate,
            tree=method.tree.name,
            num_nodes=method.tree.num_nodes,
            speed=summarise(timings[None], timings[name]),
            batches=method.batches,
            over={rival: paired_speed(timings[name], timings[rival]) for rival in rivals},
            accepted_over={rival: paired_gain(counts[name], counts[rival]) for rival in rivals},
        )
    return rows


# --- tables ------------------------------------------------------------------------------------


def comparison_tables(comparison: Comparison) -> Iterator[ConsoleTable]:
    """Yield a table for each condition, and for several heads their ratios to each other."""
    names = [*comparison.heads]
    for condition in comparison.conditions:
        yield condition_table(condition)
        if len(names) > 1:
            yield ratios(condition, names, "second")
            yield ratios(condition, names, "forward")


def condition_table(condition: Condition) -> ConsoleTable:
    """Return the methods of a condition, the fastest first, and the base alone."""
    methods = {name: condition.drafters[name] for name in condition.ranking}
    fastest, batch, rows = methods[condition.ranking[0]], condition.batch_size, []
    for name, method in methods.items():
        speed, lossless = method.speed, method.lossless
        rows.append(
            (
                # transformers drafts for one prompt at a time
                name if method.batches or batch == 1 else f"{name} (cannot batch: one by one)",
                f"{speed.tokens_per_second:.1f}",
                with_interval(speed.speedup, speed.interval),
                format_gain(fastest.over.get(name)),
                with_interval(method.online.tokens_per_forward, method.online.interval),
                f"{lossless.identical} of {lossless.compared}{divergence_note(lossless)}"
                if lossless.compared
                else "other draws",
            )
        )
    base_speed = f"{fastest.speed.base_tokens_per_second:.1f}"
    rows.append(("base alone", base_speed, "1.00", "", "1.00", ""))
    title = f"drafters at temperature {condition.temperature:g}, batch {batch}"
    columns = "drafter", "tokens per second", "speed-up", "fastest over it", "tokens per forward"
    return ConsoleTable(title, rows, (*columns, "text of the base"))


def ratios(condition: Condition, names: list[str], unit: str) -> ConsoleTable:
    """Return tokens per second or forward of each head (row) over each other head (column)."""
    methods = {name: condition.drafters[name] for name in condition.ranking if name in names}
    gains = {
        name: method.over if unit == "second" else method.accepted_over
        for name, method in methods.items()
    }
    # the ratio of a head to itself is empty
    rows = [
        (name, *(format_gain(over.get(column)) for column in gains)) for name, over in gains.items()
    ]
    return ConsoleTable(f"tokens per {unit}, row over column", rows, ("head", *gains))


def format_gain(gain: Gain | None) -> str:
    """Return a ratio with its interval; empty if there is none."""
    return with_interval(gain.ratio, gain.interval) if gain else ""
