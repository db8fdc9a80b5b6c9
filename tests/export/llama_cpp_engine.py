"""llama.cpp as `make llama_cpp` built it: its converter, and its server in a process of its own."""

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ENGINE = Path(__file__).parents[2] / ".llama_cpp"
SOURCES = ENGINE / "vendor" / "llama.cpp"
SERVER = ENGINE / "build" / "bin" / "llama-server"
COUNTED = re.compile(r'^llamacpp:(spec_decode\w+)(?:\{position="\d+"\})? (\d+)$', re.MULTILINE)
# exact as far as it goes: one thread, no half precision, and no text from an earlier request
EXACT = (
    *("--threads", "1", "--threads-batch", "1", "--flash-attn", "off", "--cache-ram", "0"),
    *("--cache-type-k", "f32", "--cache-type-v", "f32"),
    *("--cache-type-k-draft", "f32", "--cache-type-v-draft", "f32"),
)
DEADLINE_SECONDS = 120

# its converter knows tokenizers by what they make of one text, and tiny_code's has a vocabulary of
# its own; it splits text as Llama 3's does, and here requests are ids
CONVERT = f"""
import runpy, sys
sys.path.insert(0, {str(SOURCES)!r})
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "llama-bpe"
sys.argv[0] = {str(SOURCES / "convert_hf_to_gguf.py")!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def convert(arguments: Sequence[str]) -> Path:
    """Convert a model's folder to GGUF in float32; return the file, which is named last."""
    done = subprocess.run(
        [sys.executable, "-c", CONVERT, *arguments, "--outtype", "f32"],
        env=os.environ | {"PYTHONPATH": str(ENGINE / "python"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return Path(arguments[-1])


def serve(
    arguments: Sequence[str], prompts: Sequence[list[int]], new_tokens: int, log: Path
) -> dict[str, Any]:
    """Run one server to its end, and ask it greedily, as many requests at a time as it takes.

    The answer has each prompt's new tokens and timings, and the server's own counters.
    """
    job = {"n_predict": new_tokens, "temperature": 0.0, "ignore_eos": True}
    job |= {"return_tokens": True, "cache_prompt": False}
    with _server(arguments, log) as place, ThreadPoolExecutor(len(prompts)) as pool:
        answers = pool.map(lambda ids: _ask(place, job | {"prompt": ids}), prompts)
        answered = [json.loads(one) for one in answers]
        counted = COUNTED.findall(_read(f"{place}/metrics"))
    counters: dict[str, list[int]] = {}
    for name, value in counted:
        counters.setdefault(name, []).append(int(value))
    return {
        "tokens": [one["tokens"] for one in answered],
        "timings": [one["timings"] for one in answered],
        "counters": counters,
        "log": log.read_text(errors="replace"),
    }


@contextmanager
def _server(arguments: Sequence[str], log: Path) -> Iterator[str]:
    """Yield the address of a server that has loaded its model."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = f"http://127.0.0.1:{port}"
    command = [str(SERVER), "--host", "127.0.0.1", "--port", str(port), "--metrics"]
    with log.open("w") as out:
        process = subprocess.Popen([*command, *EXACT, *arguments], stdout=out, stderr=out)
    try:
        _wait(process, place, log)
        yield place
    finally:
        process.terminate()
        process.wait()


def _wait(process: subprocess.Popen[bytes], place: str, log: Path) -> None:
    late = time.monotonic() + DEADLINE_SECONDS
    while process.poll() is None and time.monotonic() < late:
        try:
            _read(f"{place}/health")
        except urllib.error.URLError:
            time.sleep(0.2)
        else:
            return
    raise AssertionError(log.read_text(errors="replace")[-5000:])


def _ask(place: str, job: dict[str, Any]) -> str:
    headers = {"Content-Type": "application/json"}
    return _read(urllib.request.Request(f"{place}/completion", json.dumps(job).encode(), headers))


def _read(request: str | urllib.request.Request) -> str:
    with urllib.request.urlopen(request, timeout=DEADLINE_SECONDS) as answer:
        return answer.read().decode()
