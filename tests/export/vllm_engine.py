"""Run one engine of real vLLM in its own process: `main` reads a job and writes its answer.

A job is JSON with `engine` (arguments of `vllm.LLM`), `prompts` (token ids), `sampling` (arguments
of `vllm.SamplingParams`) and `repair` (whether to fix the CPU build's expansion of temperatures).
The answer has the new tokens of each prompt, vLLM's counters, and the drafts of `Recorder` with
their texts.
"""

import json
import os
import sys
import time
from typing import Any

import torch
from numpy import ndarray

from specheads.export.vllm import Proposer

COUNTED = ("vllm:spec_decode", "vllm:num_preemptions", "vllm:prefix_cache_hits")
DRAFTS: list[tuple[list[int], list[int]]] = []


class Recorder(Proposer):
    """The plug-in's proposer, which also records every draft."""

    def load_model(self, target_model: Any) -> None:
        """Keep the cost that a test chose: steps of this machine take other times."""
        super().load_model(target_model)
        if self.budget:
            vars(self.budget)["follow_verify"] = vars(self.budget)["follow_draft"] = lambda *_: None

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        _lengths: ndarray,
        token_ids_cpu: ndarray,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Record and return the drafts of the plug-in."""
        chains = super().propose(sampled_token_ids, _lengths, token_ids_cpu, slot_mappings)
        for row, chain in enumerate(chains):
            if chain:
                DRAFTS.append((token_ids_cpu[row, : _lengths[row]].tolist(), chain))
        return chains


class SlowProposer(Proposer):
    """The plug-in's proposer, whose drafts take much longer than a step of a small base."""

    def _draft(self, spans: Any, texts: Any) -> list[list[int]]:
        time.sleep(0.5)
        return super()._draft(spans, texts)


def repair_temperatures() -> None:
    """Expand temperatures as vLLM's GPU kernel does; its CPU build truncates them to integers."""
    from vllm.utils import cpu_triton_utils  # pyright: ignore[reportMissingImports]

    def expand(out: Any, values: Any, ends: Any, old: Any, new: Any, *_: Any) -> None:
        counts = torch.diff(ends, prepend=ends.new_zeros(1))
        replaced = torch.where(values == old, new, values)
        out.copy_(replaced.repeat_interleave(counts).to(out.dtype))

    cpu_triton_utils._expand_kernel_impl = expand


def main() -> None:
    """Run the job."""
    job = json.load(sys.stdin)
    # vLLM also writes to stdout, so redirect that to stderr and keep stdout for the answer
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import vllm  # pyright: ignore[reportMissingImports]

    if job["repair"]:
        repair_temperatures()
    engine = vllm.LLM(disable_log_stats=False, enforce_eager=True, seed=0, **job["engine"])
    sampling = vllm.SamplingParams(**job["sampling"])
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in job["prompts"]], sampling)
    counters = {
        metric.name.removeprefix("vllm:"): getattr(metric, "values", None) or metric.value
        for metric in engine.get_metrics()
        if metric.name.startswith(COUNTED)
    }
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    json.dump({"tokens": tokens, "counters": counters, "drafts": DRAFTS}, answer)
    answer.close()
