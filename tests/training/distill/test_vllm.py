"""Real vLLM, offline and as a server, generates the base's text: `make vllm`."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from specheads.base.model import FrozenBase
from specheads.config.training import DistillSettings
from specheads.core.errors import InputError
from specheads.decoding.generate import generate
from specheads.decoding.sampling import Sampling
from specheads.training.distill.engines import (
    GeneratedAnswer,
    GenerationRequest,
    TextEngine,
    vllm_engine,
)
from specheads.training.distill.openai import CompletionsEngine
from tests.servers import VLLM, free_port, served

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parents[3]
BASE = ROOT / "recipes" / "tiny_code" / "base"
KEY = "sk-secret-0123"
NEW_TOKENS = 40

# these packages may be missing
ABSENT = ("accelerate", "datasets", "hydra", "matplotlib", "omegaconf", "wandb")
START = f"""
import sys
if __name__ == "__main__":
    sys.modules.update(dict.fromkeys({ABSENT}))
    from tests.training.distill.test_vllm import main
    main()
"""


@cache
def base() -> FrozenBase:
    return FrozenBase.load(BASE, dtype="float32", device="cpu")


def make_requests(sampling: Sampling, new_tokens: int = NEW_TOKENS) -> list[GenerationRequest]:
    """Eight ragged prompts."""
    tokenizer = base().tokenizer
    assert tokenizer is not None
    ids = tokenizer((ROOT / "specheads" / "decoding" / "engine.py").read_text()[:4000])["input_ids"]
    prompts = [ids[50 * n : 50 * n + 10 + 5 * n] for n in range(8)]
    return [
        GenerationRequest(number, prompt, new_tokens, sampling.of_prompt(number))
        for number, prompt in enumerate(prompts)
    ]


def write(engine: TextEngine, requests: list[GenerationRequest]) -> list[dict[str, Any]]:
    """Return the expected answers by number, each once."""
    pending = iter(requests)
    outputs = engine(lambda: next(pending, None))
    answers = [answer for answer in outputs if isinstance(answer, GeneratedAnswer)]
    answers.sort(key=lambda answer: answer.number)
    assert [answer.number for answer in answers] == [request.number for request in requests]
    return [{"tokens": answer.tokens, "finish": answer.finish} for answer in answers]


def expected() -> list[dict[str, Any]]:
    prompts = [request.tokens for request in make_requests(Sampling())]
    texts = generate(base(), None, prompts, max_new_tokens=NEW_TOKENS).tokens
    end_ids = base().eos_ids
    return [
        {"tokens": text, "finish": "eos" if text[-1] in end_ids else "length"} for text in texts
    ]


def main() -> None:
    """Generate with vLLM offline in a separate process; the answer is its last line."""
    import vllm  # pyright: ignore[reportMissingImports]

    # compiling takes longer than everything else for this small base
    compiled_llm = vllm.LLM  # pyright: ignore[reportAttributeAccessIssue]
    vllm.LLM = lambda **settings: compiled_llm(enforce_eager=True, **settings)  # pyright: ignore
    settings = DistillSettings(num_samples=8, batch_size=3, engine="vllm")
    engine = vllm_engine(settings, base(), max_length=256)
    out: dict[str, Any] = {"greedy": write(engine, make_requests(Sampling()))}
    sampled = make_requests(Sampling(temperature=1.0, top_p=0.9, seed=4))
    out["sampled"] = write(engine, sampled)
    out["repeated"] = write(engine, sampled)
    try:
        write(engine, [GenerationRequest(7, [5, 6], 4, Sampling(temperature=3.0))])
    except InputError as error:
        out["refused"] = str(error)
    sys.stdout.write(f"\n{json.dumps(out)}\n")


def test_vllm_offline_equals_the_base_and_samples_by_seed():
    process = subprocess.run(
        [sys.executable, "-c", START],
        cwd=ROOT,
        env=os.environ | VLLM | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr[-5000:]
    line = next(line for line in process.stdout.splitlines() if line.startswith('{"greedy"'))
    out = json.loads(line)
    assert out["greedy"] == expected()
    assert out["sampled"] == out["repeated"]
    assert out["sampled"] != out["greedy"]
    assert "refused one: temperature must be" in out["refused"]
    assert "\n" not in out["refused"]


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """Return the URL of a real server of the tiny base that requires a key."""
    url = f"http://127.0.0.1:{free_port()}"
    log = tmp_path_factory.mktemp("serve") / "log"
    # not `vllm serve`, which looks for a package that the CPU build does not have
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(BASE)]
    command += ["--served-model-name", "tiny", "--dtype", "float32", "--max-model-len", "256"]
    command += ["--enforce-eager", "--host", "127.0.0.1", "--port", url.rpartition(":")[2]]
    with served([*command, "--api-key", KEY], f"{url}/health", log, VLLM):
        yield f"{url}/v1"


@pytest.fixture
def settings(url, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return DistillSettings(num_samples=8, engine="openai", url=url, served_as="tiny", batch_size=4)


def test_real_server_returns_the_bases_token_ids(settings):
    assert (
        write(CompletionsEngine(settings, base()).answers, make_requests(Sampling())) == expected()
    )


def test_real_server_samples_by_seed(settings):
    sampled = make_requests(Sampling(temperature=1.0, top_k=50, min_p=0.02, seed=4))
    first = write(CompletionsEngine(settings, base()).answers, sampled)
    assert (
        write(CompletionsEngine(replace(settings, batch_size=2), base()).answers, sampled) == first
    )
    assert first != expected()
