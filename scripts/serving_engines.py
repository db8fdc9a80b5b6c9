"""Real serving engines in processes of their own: vLLM and llama.cpp's server.

    make vllm          installs vLLM in .venv-vllm
    make llama_cpp     builds llama-server and fetches llama.cpp's converter

`VllmEngine` and `LlamaServer` have one interface: `ask` sends prompts of token ids and returns
texts, seconds and the engine's own counts of drafts. bench_serve.py and tests/export/ use it.
Run as a script, this file is the vLLM side: it reads one JSON object a line from standard input and
answers each with a line. It runs in an environment that has vLLM, so it imports nothing else.
"""

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from weakref import finalize

VLLM_COUNTERS = "vllm:spec_decode_num_"
"""Prefix of vLLM's counters of drafts."""

BUILT = Path(__file__).resolve().parents[1] / ".llama_cpp"
"""Folder that `make llama_cpp` fills."""

SOURCES = Path("vendor") / "llama.cpp"
SERVER = Path("build") / "bin" / "llama-server"
LLAMA_COUNTERS = re.compile(
    r'^llamacpp:spec_decode_num_(\w+?)_total(?:\{position="\d+"\})? (\d+)$', re.M
)
TIMEOUT_SECONDS = 600
"""Longest wait for an answer of llama-server."""

CONVERT = """
import runpy, sys
script, pre_tokenizer = sys.argv.pop(1), sys.argv.pop(1)
sys.path.insert(0, script.rpartition("/")[0])
if pre_tokenizer:
    from conversion.base import TextModel
    TextModel.get_vocab_base_pre = lambda self, tokenizer: pre_tokenizer
sys.argv[0] = script
runpy.run_path(script, run_name="__main__")
"""


class VllmEngine:
    """A vLLM engine in a process of its own, which ends with this process.

    Args:
        python: Interpreter that has vLLM.
        arguments: Arguments of `vllm.LLM`.
        threads: Cores that the engine may use.
        cache_gib: GiB for keys and values.
        environment: Further environment variables of the process.
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
        """Send one job and return its answer.

        Args:
            job: `prompts`, token ids, and `sampling`, arguments of `vllm.SamplingParams`.

        Returns:
            `seconds`, `tokens` and, unless `disable_log_stats` is set, `counters`: what vLLM
            counted of drafts since its start.
        """
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        if not (line := self.process.stdout.readline()):
            raise SystemExit(f"error: vLLM ended with code {self.process.wait()}; see above")
        return json.loads(line)

    def close(self) -> None:
        """End the process and free its memory."""
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


class LlamaServer:
    """A llama.cpp server in a process of its own, which ends with this process.

    Args:
        arguments: Arguments of `llama-server`.
        log: File for its output.
        built: Folder that `make llama_cpp` fills.
    """

    def __init__(self, arguments: Sequence[str], log: Path, built: Path = BUILT) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.address, self.log = f"http://127.0.0.1:{port}", log
        command = [str(built / SERVER), "--host", "127.0.0.1", "--port", str(port), "--metrics"]
        with log.open("w") as out:
            self.process = subprocess.Popen([*command, *arguments], stdout=out, stderr=out)
        self._end = finalize(self, _end, self.process)
        self._wait()
        self.versions = {"llama.cpp": json.loads(self._read("/props"))["build_info"]}
        self._has_head, self._forwards = "-md" in arguments, 0

    def ask(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Send all prompts of a job at once; the server needs as many slots.

        Args:
            job: `prompts`, token ids, and `sampling` with `temperature`, `max_tokens` and
                `ignore_eos`. The GGUF file names the tokens that end a text.

        Returns:
            `seconds` and `tokens` of this job, the `timings` of each prompt as the server reports
            them, and `counters` since the start by vLLM's names. A server without a head has no
            counters. `forwards` includes forwards that had no draft to verify.
        """
        sampling = job["sampling"]
        settings = {
            "n_predict": sampling["max_tokens"],
            "temperature": sampling["temperature"],
            "ignore_eos": sampling.get("ignore_eos", False),
            "return_tokens": True,
            "cache_prompt": False,
        }
        start = time.perf_counter()
        with ThreadPoolExecutor(len(job["prompts"])) as pool:
            texts = pool.map(lambda ids: self._complete(settings | {"prompt": ids}), job["prompts"])
            answers = [json.loads(text) for text in texts]
        seconds = time.perf_counter() - start
        tokens, timings = ([one[name] for one in answers] for name in ("tokens", "timings"))
        return {
            "seconds": seconds,
            "tokens": tokens,
            "timings": timings,
            "counters": self._counters(tokens, timings),
        }

    def _counters(
        self, tokens: Sequence[list[int]], timings: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        if not self._has_head:
            return {}
        # the forward of the prompt gives the first token of a text, accepted drafts need none
        self._forwards += sum(len(text) - 1 for text in tokens)
        self._forwards -= sum(one.get("draft_n_accepted", 0) for one in timings)
        counters: dict[str, Any] = {"forwards": self._forwards}
        for name, value in LLAMA_COUNTERS.findall(self._read("/metrics")):
            if name.endswith("per_pos"):
                counters.setdefault(name, []).append(int(value))
            else:
                counters[name] = int(value)
        return counters

    def close(self) -> None:
        """End the process and free its memory."""
        self._end()

    def _wait(self) -> None:
        end = time.monotonic() + TIMEOUT_SECONDS
        while self.process.poll() is None and time.monotonic() < end:
            try:
                self._read("/health")
            except urllib.error.URLError:
                time.sleep(0.2)
            else:
                return
        output = self.log.read_text(encoding="utf-8", errors="replace")[-2000:]
        raise SystemExit(f"error: llama-server did not start; {self.log} ends with {output}")

    def _complete(self, job: Mapping[str, Any]) -> str:
        headers = {"Content-Type": "application/json"}
        return self._read("/completion", json.dumps(job).encode(), headers)

    def _read(
        self, path: str, data: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> str:
        request = urllib.request.Request(f"{self.address}{path}", data, dict(headers or {}))
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
            return answer.read().decode()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait()


def convert(
    arguments: Sequence[str], outtype: str, *, pre_tokenizer: str = "", built: Path = BUILT
) -> None:
    """Convert a folder to GGUF with llama.cpp's own converter.

    Args:
        arguments: Arguments of `convert_hf_to_gguf.py`.
        outtype: Precision of the weights.
        pre_tokenizer: Rule that splits text, if the converter does not know the tokenizer.
        built: Folder that `make llama_cpp` fills.

    Raises:
        SystemExit: The converter failed; the message ends with its output.
    """
    script = built / SOURCES / "convert_hf_to_gguf.py"
    done = subprocess.run(
        [sys.executable, "-c", CONVERT, script, pre_tokenizer, *arguments, "--outtype", outtype],
        env=os.environ | {"PYTHONPATH": str(built / "python"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"error: the converter failed: {done.stderr[-2000:]}")


def serve_vllm() -> None:
    """Start vLLM with the arguments of the first line, then answer every further line."""
    # vLLM writes to stdout too: keep the real stdout for answers and send the rest to stderr
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch
    import vllm  # pyright: ignore[reportMissingImports]

    def write(answer: Mapping[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    arguments = json.loads(sys.stdin.readline())["engine"]
    engine = vllm.LLM(**arguments)
    write({"vllm": vllm.__version__, "torch": torch.__version__})
    for line in sys.stdin:
        job = json.loads(line)
        sampling = vllm.SamplingParams(**job["sampling"])
        prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
        start = time.perf_counter()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        answer: dict[str, Any] = {"seconds": seconds, "tokens": tokens}
        if arguments.get("disable_log_stats") is False:
            answer["counters"] = {
                metric.name.removeprefix(VLLM_COUNTERS): getattr(metric, "values", None)
                or metric.value
                for metric in engine.get_metrics()
                if metric.name.startswith(VLLM_COUNTERS)
            }
        write(answer)


if __name__ == "__main__":
    serve_vllm()
