"""One vLLM engine that decodes what it is told, a line of JSON at a time, and who tells it.

Run, it is the engine. The first line has `engine`, the arguments of `vllm.LLM`; its answer are the
versions. Each further line has `prompts` (token ids) and `sampling` (of `vllm.SamplingParams`), and
gets `seconds`, `tokens` and, where `disable_log_stats` is false, `counters`: what vLLM has counted
of drafts since its start. It runs in the environment that has vLLM and knows nothing of specheads.
bench_distill.py and bench_serve.py import `Engine`, which starts it and talks to it.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

COUNTED = "vllm:spec_decode_num_"
"""What vLLM's names of such counters begin with."""


class Engine:
    """An engine in a process of its own, which ends with this one.

    Args:
        python: Interpreter that has vLLM.
        arguments: What `vllm.LLM` is told.
        threads: Cores it computes on.
        cache_gib: Room for keys and values.
        environment: Further variables for it.
    """

    def __init__(
        self,
        python: str,
        arguments: Mapping[str, Any],
        threads: int,
        cache_gib: int,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
        self.process = subprocess.Popen(
            [python, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ
            | {
                "VLLM_CPU_KVCACHE_SPACE": str(cache_gib),
                "VLLM_CPU_OMP_THREADS_BIND": cores,
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "OMP_NUM_THREADS": str(threads),
                "PYTHONPATH": "",
            }
            | dict(environment or {}),
        )
        self.versions = self.ask({"engine": dict(arguments)})

    def ask(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Return its answer to one line."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        if not (line := self.process.stdout.readline()):
            raise SystemExit(f"error: vLLM ended with code {self.process.wait()}; see above")
        return json.loads(line)

    def close(self) -> None:
        """End it, and give its memory back."""
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def main() -> None:
    """Answer every line."""
    # vLLM writes to stdout too: answers go where that was, and all else to stderr
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch
    import vllm  # pyright: ignore[reportMissingImports]

    arguments = json.loads(sys.stdin.readline())["engine"]
    engine = vllm.LLM(**arguments)
    _say(answers, {"vllm": vllm.__version__, "torch": torch.__version__})
    for line in sys.stdin:
        job = json.loads(line)
        sampling = vllm.SamplingParams(**job["sampling"])
        prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
        began = time.perf_counter()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - began
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        answer = {"seconds": seconds, "tokens": tokens}
        if arguments.get("disable_log_stats") is False:
            answer["counters"] = {
                metric.name.removeprefix(COUNTED): getattr(metric, "values", None) or metric.value
                for metric in engine.get_metrics()
                if metric.name.startswith(COUNTED)
            }
        _say(answers, answer)


def _say(answers, answer) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
