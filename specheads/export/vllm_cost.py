"""Time steps of real vLLM at several numbers of requests and drafts, for the plug-in's budget.

`specheads tune engine=vllm` starts this module as a program in vLLM's own environment. It reads a
job as JSON from stdin: `model`, `dtype`, `depth`, `batch_sizes` and `contexts`. It writes `engine`
(the version), its `machine`, `steps` and `ragged` to stdout: see `fit_server_cost` and `fit_ragged`
in `measure.step_times`.
"""

import importlib
import json
import os
import sys
import time
from itertools import product
from typing import Any

import torch

from specheads.core.files import to_json
from specheads.export.vllm import Proposer

BURST = 4
"""Consecutive steps of one depth. The first is not timed: it finds the caches of another depth."""
ROUNDS = 3
"""Bursts of each depth, at least, for each number of requests."""
MEASUREMENTS: dict[str, Any] = {"steps": [], "ragged": []}
"""Steps of equal chains, and steps in which every second request drafts."""


class TimedProposer(Proposer):
    """The plug-in's proposer, which drafts all depths in turn and records the seconds of steps.

    After the largest depth every second request gets two drafts and the others none.
    """

    def load_model(self, target_model: Any) -> None:
        """Load the head. A budget of an earlier measurement is not used."""
        super().load_model(target_model)
        MEASUREMENTS["machine"] = to_json(self.machine)
        self.budget, self._max_depth, self._step = None, self.depth, 0
        self._start_time, self._num_planned, self._num_verified = 0.0, 0, 0
        self._is_ragged = False

    def observe_forward(self, batch: Any, arguments: dict[str, Any]) -> None:
        """Record the step that ends here, if all requests verified as many drafts as planned."""
        now, num_requests = time.perf_counter(), len(batch.req_ids)
        num_planned = num_requests + self._num_planned
        num_scheduled = sum(arguments["scheduler_output"].num_scheduled_tokens.values())
        if self._step % BURST and num_scheduled == num_planned == self._num_verified:
            lengths = batch.num_computed_tokens_cpu[:num_requests]
            context = sum(map(int, lengths)) / num_requests
            seconds = now - self._end_time
            if not self._is_ragged:
                draft_seconds = self._end_time - self._start_time if self.depth else 0.0
                step = (num_requests, context, self.depth, seconds, draft_seconds)
                MEASUREMENTS["steps"].append(step)
            elif num_requests > 1:
                MEASUREMENTS["ragged"].append((num_requests, context, num_scheduled, seconds))
        self._num_verified = num_scheduled
        super().observe_forward(batch, arguments)

    def propose(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        """Draft as many tokens as planned for this step."""
        self._step += 1
        mode = self._step // BURST % (self._max_depth + 2)
        self._is_ragged = mode > self._max_depth
        self.depth = min(2, self._max_depth) if self._is_ragged else mode
        self._start_time = time.perf_counter()
        drafts = super().propose(*args, **kwargs)
        if self._is_ragged:
            drafts = [chain if row % 2 else [] for row, chain in enumerate(drafts)]
        self._num_planned = sum(map(len, drafts))
        return drafts


def main() -> None:
    """Run the job."""
    job = json.load(sys.stdin)
    # vLLM also writes to stdout, so redirect that to stderr and keep stdout for the measurements
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    vllm: Any = importlib.import_module("vllm")
    # drafts may be right, so some bursts are shorter
    new_tokens = 2 * ROUNDS * BURST * (job["depth"] + 2)
    engine = vllm.LLM(
        job["model"],
        dtype=job["dtype"],
        max_model_len=max(job["contexts"]) + new_tokens,
        max_num_seqs=max(job["batch_sizes"]),
        enable_prefix_caching=False,
        seed=0,
        speculative_config={
            "method": "custom_class",
            "model": f"{__name__}.{TimedProposer.__name__}",
            "num_speculative_tokens": job["depth"],
        },
    )
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    generator = torch.Generator().manual_seed(0)
    size = engine.model_config.get_vocab_size()
    loads = list(product(job["contexts"], job["batch_sizes"]))
    for number, (context, batch) in enumerate(loads, start=1):
        sys.stderr.write(f"load {number} of {len(loads)}: {batch} requests of {context} tokens\n")
        prompts = torch.randint(size, (batch, context), generator=generator).tolist()
        prompts = [{"prompt_token_ids": prompt} for prompt in prompts]
        engine.generate(prompts, sampling, use_tqdm=False)
    json.dump(MEASUREMENTS | {"engine": f"vLLM {vllm.__version__}"}, output)
    output.close()


if __name__ == "__main__":
    # vLLM imports the proposer by this name, and __main__ would be another copy
    importlib.import_module("specheads.export.vllm_cost").main()
