"""Time steps of real vLLM at several numbers of requests and drafts, for the plug-in's budget.

`specheads tune engine=vllm` starts this module as a program in vLLM's own environment. It reads a
job as JSON from stdin: `model`, `dtype`, `depth`, `batch_sizes` and `contexts`. It writes `engine`
(the version), its `machine`, `steps` and `ragged` to stdout: see `measure.tune.fit_server` and
`fit_ragged`.
"""

import importlib
import json
import os
import sys
import time
from typing import Any

import torch

from specheads.core.files import to_json
from specheads.export.vllm import Proposer

BURST = 4
"""Consecutive steps of one depth. The first is not timed: it finds the caches of another depth."""
ROUNDS = 3
"""Bursts of each depth, at least, for each number of requests."""
ANSWER: dict[str, Any] = {"steps": [], "ragged": []}
"""What is measured: steps of equal chains, and steps in which every second request drafts."""


class Timed(Proposer):
    """The plug-in's proposer, which drafts all depths in turn and records the seconds of steps.

    After the largest depth every second request gets two drafts and the others none.
    """

    def load_model(self, target_model: Any) -> None:
        """Load the head. A budget of an earlier measurement is not used."""
        super().load_model(target_model)
        ANSWER["machine"] = to_json(self.machine)
        self.budget, self._deepest, self._step = None, self.depth, 0
        self._began, self._planned, self._last, self._is_ragged = 0.0, 0, 0, False

    def watch(self, batch: Any, given: dict[str, Any]) -> None:
        """Record the step that ends here, if all requests verified as many drafts as planned."""
        now, requests = time.perf_counter(), len(batch.req_ids)
        planned = requests + self._planned
        scheduled = sum(given["scheduler_output"].num_scheduled_tokens.values())
        if self._step % BURST and scheduled == planned == self._last:
            context = sum(map(int, batch.num_computed_tokens_cpu[:requests])) / requests
            drafting = self._ended - self._began if self.depth else 0.0
            if not self._is_ragged:
                seconds = now - self._ended, drafting
                ANSWER["steps"].append((requests, context, self.depth, *seconds))
            elif requests > 1:
                ANSWER["ragged"].append((requests, context, scheduled, now - self._ended))
        self._last = scheduled
        super().watch(batch, given)

    def propose(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        """Draft as many tokens as planned for this step."""
        self._step += 1
        mode = self._step // BURST % (self._deepest + 2)
        self._is_ragged = mode > self._deepest
        self.depth = min(2, self._deepest) if self._is_ragged else mode
        self._began = time.perf_counter()
        drafts = super().propose(*args, **kwargs)
        if self._is_ragged:
            drafts = [chain if row % 2 else [] for row, chain in enumerate(drafts)]
        self._planned = sum(map(len, drafts))
        return drafts


def main() -> None:
    """Run the job."""
    job = json.load(sys.stdin)
    # vLLM also writes to stdout, so redirect that to stderr and keep stdout for the answer
    answer = os.fdopen(os.dup(1), "w")
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
            "model": f"{__name__}.{Timed.__name__}",
            "num_speculative_tokens": job["depth"],
        },
    )
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    draws = torch.Generator().manual_seed(0)
    size = engine.model_config.get_vocab_size()
    for context in job["contexts"]:
        for batch in job["batch_sizes"]:
            ids = torch.randint(size, (batch, context), generator=draws).tolist()
            engine.generate([{"prompt_token_ids": one} for one in ids], sampling, use_tqdm=False)
    json.dump(ANSWER | {"engine": f"vLLM {vllm.__version__}"}, answer)
    answer.close()


if __name__ == "__main__":
    # vLLM imports the proposer by this name, and __main__ would be another copy
    importlib.import_module("specheads.export.vllm_cost").main()
