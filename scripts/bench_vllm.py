"""One vLLM engine that decodes what it is told, a line of JSON at a time: for bench_distill.py.

The first line has `engine`, the arguments of `vllm.LLM`; its answer are the versions. Each further
line has `prompts` (token ids) and `sampling` (of `vllm.SamplingParams`), and gets `seconds` and
`tokens`. It runs in the environment that has vLLM and knows nothing of specheads.
"""

import json
import os
import sys
import time


def main() -> None:
    """Answer every line."""
    # vLLM writes to stdout too: answers go where that was, and all else to stderr
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import vllm  # pyright: ignore[reportMissingImports]

    engine = vllm.LLM(**json.loads(sys.stdin.readline())["engine"])
    _say(answers, {"vllm": vllm.__version__})
    for line in sys.stdin:
        job = json.loads(line)
        sampling = vllm.SamplingParams(**job["sampling"])
        prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
        began = time.perf_counter()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - began
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        _say(answers, {"seconds": seconds, "tokens": tokens})


def _say(answers, answer) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
