"""One llama.cpp server that decodes what it is told, who tells it, and llama.cpp's converter.

    make llama_cpp                                       builds the server and fetches the converter

bench_serve.py holds a server with a head against one without, tests/export/ against our own loop:
both through `Server`. It is asked and answers as `Engine` of bench_vllm.py does.
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

BUILT = Path(__file__).resolve().parents[1] / ".llama_cpp"
"""What `make llama_cpp` fills."""

SOURCES = Path("vendor") / "llama.cpp"
SERVER = Path("build") / "bin" / "llama-server"
COUNTED = re.compile(r'^llamacpp:spec_decode_num_(\w+?)_total(?:\{position="\d+"\})? (\d+)$', re.M)
DEADLINE_SECONDS = 600
"""After which a server that does not answer is given up."""

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


class Server:
    """A server in a process of its own, which ends with this one.

    Args:
        arguments: What `llama-server` is told.
        log: File for what it says.
        built: What `make llama_cpp` has filled.
    """

    def __init__(self, arguments: Sequence[str], log: Path, built: Path = BUILT) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.place, self.log = f"http://127.0.0.1:{port}", log
        command = [str(built / SERVER), "--host", "127.0.0.1", "--port", str(port), "--metrics"]
        with log.open("w") as out:
            self.process = subprocess.Popen([*command, *arguments], stdout=out, stderr=out)
        self._end = finalize(self, _end, self.process)
        self._wait()
        self.versions = {"llama.cpp": json.loads(self._read("/props"))["build_info"]}
        self._drafts, self._forwards = "-md" in arguments, 0

    def ask(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Have all prompts answered at a time; as many slots as prompts are told at the start.

        Args:
            job: `prompts`, token ids; `sampling`, of which `temperature`, `max_tokens` and
                `ignore_eos` are read: a text ends where the GGUF file says that it does.

        Returns:
            `seconds` and `tokens` of this job, each prompt's `timings` as the server gives them,
            and `counters` since the start, by vLLM's names: what drafts came to, none without a
            head, and `forwards`, those that had no draft to verify among them.
        """
        told = job["sampling"]
        wanted = {
            "n_predict": told["max_tokens"],
            "temperature": told["temperature"],
            "ignore_eos": told.get("ignore_eos", False),
            "return_tokens": True,
            "cache_prompt": False,
        }
        began = time.perf_counter()
        with ThreadPoolExecutor(len(job["prompts"])) as pool:
            said = pool.map(lambda ids: self._ask(wanted | {"prompt": ids}), job["prompts"])
            answers = [json.loads(one) for one in said]
        seconds = time.perf_counter() - began
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
        if not self._drafts:
            return {}
        # of a text's tokens the prompt's forward gave one, and drafts those accepted
        self._forwards += sum(len(text) - 1 for text in tokens)
        self._forwards -= sum(one.get("draft_n_accepted", 0) for one in timings)
        counters: dict[str, Any] = {"forwards": self._forwards}
        for name, value in COUNTED.findall(self._read("/metrics")):
            if name.endswith("per_pos"):
                counters.setdefault(name, []).append(int(value))
            else:
                counters[name] = int(value)
        return counters

    def close(self) -> None:
        """End it, and give its memory back."""
        self._end()

    def _wait(self) -> None:
        late = time.monotonic() + DEADLINE_SECONDS
        while self.process.poll() is None and time.monotonic() < late:
            try:
                self._read("/health")
            except urllib.error.URLError:
                time.sleep(0.2)
            else:
                return
        raise SystemExit(f"error: llama-server did not start; {self.log} ends with {self._said()}")

    def _said(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")[-2000:]

    def _ask(self, job: Mapping[str, Any]) -> str:
        headers = {"Content-Type": "application/json"}
        return self._read("/completion", json.dumps(job).encode(), headers)

    def _read(
        self, path: str, data: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> str:
        request = urllib.request.Request(f"{self.place}{path}", data, dict(headers or {}))
        with urllib.request.urlopen(request, timeout=DEADLINE_SECONDS) as answer:
            return answer.read().decode()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait()


def convert(
    arguments: Sequence[str], outtype: str, *, pre_tokenizer: str = "", built: Path = BUILT
) -> None:
    """Convert a folder to GGUF with llama.cpp's own converter.

    Args:
        arguments: Of `convert_hf_to_gguf.py`.
        outtype: Of the weights.
        pre_tokenizer: How text is split, where the converter does not know the tokenizer.
        built: What `make llama_cpp` has filled.

    Raises:
        SystemExit: The converter failed; with the end of what it said.
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
