"""transformers' own generation beside ours: whole calls of `generate`, as users make them."""

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from specheads.base.model import FrozenBase
from specheads.base.own_settings import without_own_settings
from specheads.core.machine import synchronise
from specheads.decoding.acceptance.sampling import Sampling, each_prompt
from specheads.decoding.trees import policies
from specheads.measure.counts import DepthCounts
from specheads.measure.how import How
from specheads.measure.online import Decoded
from specheads.measure.speed import Timing


@dataclass(slots=True)
class _Watch(BaseStreamer):
    """What a call of `generate` did: the base's forwards, and the tokens that each gave."""

    read: list[int] = field(default_factory=list)
    """Tokens that each forward read of a row."""
    began: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    given: list[int] = field(default_factory=list)
    """Tokens of the prompt, and then those that each forward gave."""

    def put(self, value: torch.Tensor) -> None:
        """Note what a forward gave."""
        self.given.append(value.numel())

    def end(self) -> None:
        """Note nothing."""

    @contextmanager
    def forwards(self, model: PreTrainedModel) -> Iterator[None]:
        """Note the forwards of a model."""

        def before(_: Any, __: Any, inputs: dict[str, Any]) -> None:
            self.read.append(inputs["input_ids"].shape[1])
            self.began.append(time.perf_counter())

        def after(*_: Any) -> None:
            self.ended.append(time.perf_counter())

        hooks = [
            model.register_forward_pre_hook(before, with_kwargs=True),
            model.register_forward_hook(after),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


class Rival:
    """A way to decode with transformers' `generate`, by what is said to it.

    Alone it takes a whole batch, and with `assistant_model=` or `prompt_lookup_num_tokens=` one
    prompt at a time, for it can no more. What it says above temperature zero is another draw.
    """

    tree = policies.NOTHING

    def __init__(self, name: str, **settings: Any) -> None:
        self.name, self.settings, self.batches = name, settings, not settings

    def decode(self, base: FrozenBase, prompts: list[list[int]], how: How) -> list[Decoded]:
        """Decode every prompt and count its forwards after the one that reads the prompt."""
        each, sources = each_prompt(how.sampling, len(prompts)), how.sources_of(prompts)
        if self.batches:
            size = how.batch_size
            texts = [
                text
                for first in range(0, len(prompts), size)
                for text in self._call(base, prompts[first : first + size], how, each[first])
            ]
            return [
                Decoded(text, DepthCounts(len(text) - 1, [], [], source))
                for text, source in zip(texts, sources, strict=True)
            ]
        watched, texts = [], []
        for prompt, one in zip(prompts, each, strict=True):
            watch = _Watch()
            with watch.forwards(base.model):
                texts += self._call(base, [prompt], how, one, streamer=watch)
            watched.append(watch)
        depth = max((read - 1 for watch in watched for read in watch.read[1:]), default=0)
        counts = [_count(*pair, depth) for pair in zip(watched, sources, strict=True)]
        return [Decoded(*pair) for pair in zip(texts, counts, strict=True)]

    def time(self, base: FrozenBase, prompts: list[list[int]], how: How) -> Timing:
        """Decode prompts once, by the clock: together, or one by one where it can no more."""
        units = [prompts] if self.batches else [[prompt] for prompt in prompts]
        total = Timing(0.0, 0.0, 0, 0, 0)
        for unit in units:
            watch = _Watch()
            synchronise(base.device)
            start = time.perf_counter()
            with watch.forwards(base.model):
                texts = self._call(base, unit, how, how.sampling)
            synchronise(base.device)
            total.seconds += time.perf_counter() - start
            total.step_seconds += watch.ended[-1] - watch.ended[0]
            total.num_steps += len(watch.ended) - 1
            total.new_tokens += sum(map(len, texts))
            total.forwards += len(unit) * (len(watch.ended) - 1)
        return total

    def draft_seconds(self, base: FrozenBase, prompts: list[list[int]], how: How) -> float:
        """Return the median time between two forwards of the base; alone it drafts nothing."""
        if self.batches:
            return 0.0
        watch = _Watch()
        with watch.forwards(base.model):
            self._call(base, prompts[:1], how, how.sampling)
        gaps = zip(watch.ended, watch.began[1:], strict=False)
        return statistics.median([began - ended for ended, began in gaps] or [0.0])

    def _call(
        self,
        base: FrozenBase,
        prompts: list[list[int]],
        how: How,
        sampling: Sampling,
        **watching: Any,
    ) -> list[list[int]]:
        """Return the new tokens of one call, cut after the first end-of-text token."""
        width = max(map(len, prompts))
        padded = [[0] * (width - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        ends = base.eos_ids if how.stop_at_eos else ()
        hidden = without_own_settings(base.model)
        with torch.random.fork_rng(), torch.inference_mode(), hidden:
            torch.manual_seed(sampling.seed)
            out: Any = base.model.generate(  # pyright: ignore[reportCallIssue]
                torch.tensor(padded, device=base.device),
                attention_mask=torch.tensor(mask, device=base.device),
                generation_config=_config(how, sampling, ends),
                **self.settings,
                **watching,
            )
        return [_cut(row, ends) for row in out[:, width:].tolist()]


def _config(how: How, sampling: Sampling, ends: tuple[int, ...]) -> GenerationConfig:
    """Return the settings in transformers' own words."""
    drawn: dict[str, Any] = {}
    if sampling.temperature > 0:
        drawn = {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p or None,
        }
    return GenerationConfig(
        max_new_tokens=how.max_new_tokens,
        do_sample=sampling.temperature > 0,
        repetition_penalty=sampling.repetition_penalty,
        eos_token_id=list(ends) or None,
        pad_token_id=ends[0] if ends else 0,
        **drawn,
    )


def _cut(text: list[int], ends: tuple[int, ...]) -> list[int]:
    first = next((place for place, token in enumerate(text) if token in ends), len(text))
    return text[: first + 1]


def _count(watch: _Watch, source: str, depth: int) -> DepthCounts:
    """Count the forwards after the first, which reads the prompt and drafts besides."""
    counts = DepthCounts.zeros(depth, source)
    for read, given in zip(watch.read[1:], watch.given[2:], strict=True):
        counts.add(given - 1, drafted_beyond=read > given)
    return counts
