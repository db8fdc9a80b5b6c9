"""Text engines: each text once, in spite of faults of servers."""

import copy
import random
import sys
import threading
import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import _base_client
from transformers import GenerationConfig

from specheads.base.model import FrozenBase
from specheads.config.training import DistillSettings
from specheads.core.errors import InputError
from specheads.decoding.sampling import Sampling
from specheads.training.distill import openai
from specheads.training.distill.engines import (
    GeneratedAnswer,
    GenerationRequest,
    TextEngine,
)
from specheads.training.distill.run import build_engine
from tests import tiny
from tests.training.distill.completions_server import PASSING, Completions, continuation, serving
from tests.training.distill.transformers_oracle import generate_answers

TINY_CODE = Path(__file__).parents[3] / "recipes" / "tiny_code" / "base"
KEY = "sk-secret-0123"
DEFINITION = [315, 290, 456, 1466]
"""`def f(x):` in the tokens of tiny_code."""
INVALID = (
    *("", "127.0.0.1:8000/v1", "ftp://a:hunter2@x?hunter2"),
    *("http://", "http://[::1", "http://x:99999"),
)


def write(engine: TextEngine, requests: Iterable[GenerationRequest]) -> dict[int, GeneratedAnswer]:
    """Answer all requests; return the answers by number, each once."""
    pending = iter(requests)
    outputs = engine(lambda: next(pending, None))
    answers = [answer for answer in outputs if isinstance(answer, GeneratedAnswer)]
    assert len({answer.number for answer in answers}) == len(answers)
    return {answer.number: answer for answer in answers}


def make_requests(count: int, new_tokens: int = 6) -> list[GenerationRequest]:
    return [
        GenerationRequest(number, [1 + number, 2, 3], new_tokens, Sampling())
        for number in range(count)
    ]


def settings(**changes: Any) -> DistillSettings:
    return DistillSettings(num_samples=1, **changes)


SAMPLING = (
    Sampling(temperature=1.0, seed=5),
    Sampling(temperature=0.7, top_k=5, seed=6),
    Sampling(temperature=1.3, top_p=0.8, repetition_penalty=1.4, seed=7),
    Sampling(temperature=1.0, min_p=0.1, seed=8),
    Sampling(repetition_penalty=1.5),
    Sampling(),
)


@pytest.mark.parametrize(
    ("architecture", "batch_size"), [("llama", 4), ("llama", 6), ("gpt2", 2), ("mistral", 2)]
)
def test_local_engine_writes_what_transformers_writes(architecture, batch_size):
    """Each text has its own sampling and seed."""
    base = tiny.base(architecture, dtype=torch.float32)
    requests = [
        GenerationRequest(number, prompt, 20, sampling)
        for number, (prompt, sampling) in enumerate(zip(tiny.prompts() * 2, SAMPLING, strict=True))
    ]
    answers = write(build_engine(settings(batch_size=batch_size), base), requests)
    assert [answers[number] for number in range(6)] == generate_answers(base, requests)


def test_answer_keeps_the_end_token_and_ignores_the_generation_config():
    continuations = tiny.continuations()
    model = copy.deepcopy(tiny.base().model)
    model.generation_config = GenerationConfig(
        eos_token_id=[continuations[0][9], tiny.VOCAB - 1],
        **{"do_sample": True, "top_k": 1, "repetition_penalty": 5.0, "suppress_tokens": [3, 4]},
    )
    base = FrozenBase(model)
    requests = [
        GenerationRequest(number, prompt, tiny.NEW_TOKENS, Sampling())
        for number, prompt in enumerate(tiny.prompts())
    ]
    answers = write(build_engine(settings(), base), requests)
    for number, tokens in enumerate(continuations):
        end = next((index for index, token in enumerate(tokens) if token in base.eos_ids), None)
        tokens = tokens if end is None else tokens[: end + 1]
        finish = "length" if end is None else "eos"
        assert answers[number] == GeneratedAnswer(number, tokens, finish)
    assert answers[0].finish == "eos"


@pytest.fixture
def service():
    with serving(Completions()) as state:
        yield state


@pytest.fixture(autouse=True)
def _hurry(monkeypatch):
    monkeypatch.setattr(_base_client, "INITIAL_RETRY_DELAY", 0.01)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def server_engine(
    service: Completions, base: FrozenBase | None = None, **changes: Any
) -> TextEngine:
    defaults = {"url": service.url, "timeout_seconds": 5.0, "served_as": "served"}
    return build_engine(settings(engine="openai", **defaults | changes), base or tiny.base())


@pytest.mark.parametrize("name", ["local", "openai"])
def test_next_request_may_depend_on_an_answer(name, service):
    engine = build_engine(settings(engine=name, batch_size=2, url=service.url), tiny.base())
    ready, answers = make_requests(5, new_tokens=2), 0
    for answer in engine(lambda: ready.pop() if ready else None):
        if isinstance(answer, int):
            continue
        answers += 1
        if answer.number < 10:
            tokens = [*answer.tokens, 5]
            ready.append(GenerationRequest(answer.number + 5, tokens, 2, Sampling()))
    assert answers == 15


def test_server_faults_lose_and_duplicate_nothing(service):
    rng, requests = random.Random(3), make_requests(60)
    plans = {
        tuple(request.tokens): [rng.choice(PASSING) for _ in range(rng.randrange(3))]
        for request in requests
    }
    assert {fault for plan in plans.values() for fault in plan} == set(PASSING)
    service.fault = lambda prompt, attempt: [*plans[tuple(prompt)], None, None][attempt]
    answers = write(server_engine(service, batch_size=16, timeout_seconds=1.0), requests)
    assert answers == {
        request.number: GeneratedAnswer(request.number, continuation(request.tokens, 6), "length")
        for request in requests
    }
    assert service.attempts == {prompt: len(plan) + 1 for prompt, plan in plans.items()}


@pytest.mark.parametrize("batch_size", [1, 5])
def test_requests_in_flight_equal_batch_size(service, batch_size):
    service.seconds = 0.05
    write(server_engine(service, batch_size=batch_size), make_requests(20))
    assert service.peak == batch_size


def test_request_has_all_sampling_parameters(service):
    sampling = Sampling(
        temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, repetition_penalty=1.1, seed=2**62 + 1
    )
    write(server_engine(service), [GenerationRequest(4, [1, 2], 9, sampling)])
    write(server_engine(service), [GenerationRequest(5, [1, 3], 9, Sampling())])
    sampled, greedy = service.requests
    expected = {"model": "served", "prompt": [1, 2], "max_tokens": 9, "temperature": 0.5}
    expected |= {"top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.1}
    expected |= {"repeat_penalty": 1.1, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    expected |= {"seed": 2**62 + 1, "return_token_ids": True}
    assert sampled.items() >= expected.items()
    assert (greedy["temperature"], greedy["top_k"], greedy["top_p"]) == (0.0, -1, 1.0)


@pytest.mark.parametrize(
    ("status", "remedy"),
    [
        ("garbage", "must answer each request"),
        ("400", "lower prompt_tokens or new_tokens"),
        ("401", "environment variable OPENAI_API_KEY"),
        ("403", "environment variable OPENAI_API_KEY"),
        ("404", "model's name at the server"),
        ("422", "fix the server"),
    ],
)
def test_refusal_is_one_line_without_the_key(service, monkeypatch, status, remedy):
    monkeypatch.setenv("OPENAI_API_KEY", f" {KEY}\n")
    service.fault = lambda _prompt, _attempt: status
    with pytest.raises(InputError, match=remedy) as error:
        write(server_engine(service), make_requests(1))
    assert service.keys == [f"Bearer {KEY}"]
    message = str(error.value)
    assert status == "garbage" or f"status {status}, no, not with Bearer *** and not now" in message
    assert KEY not in message
    assert "\n" not in message


@pytest.mark.parametrize("fault", PASSING)
def test_server_without_answer_is_one_line_after_other_answers(service, fault, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    failing = make_requests(3)[2]
    service.fault = lambda prompt, _attempt: fault if prompt == failing.tokens else None
    monkeypatch.setattr(openai, "RETRIES", 2)
    engine = server_engine(service, timeout_seconds=0.5, batch_size=3)
    requests = iter(make_requests(3))
    numbers = (getattr(answer, "number", None) for answer in engine(lambda: next(requests, None)))
    assert {next(numbers), next(numbers)} == {0, 1}
    with pytest.raises(InputError, match="run the command again to resume") as error:
        next(numbers)
    assert service.attempts[tuple(failing.tokens)] == 3
    assert KEY not in str(error.value)


@pytest.mark.parametrize(
    ("url", "key", "line"),
    [
        *((url, "", "a server's url must begin") for url in INVALID),
        (
            "http://ada:hunter2@127.0.0.1:9/v1?token=hunter2",
            "",
            r"http://127\.0\.0\.1:9/v1 did not",
        ),
        ("http://127.0.0.1:9/v1", "hunter2\nX-Evil: 1", "the one in OPENAI_API_KEY"),
    ],
)
def test_unusable_address_or_key_is_refused_without_secrets(url, key, line, monkeypatch):
    monkeypatch.setattr(openai, "RETRIES", 1)
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises(InputError, match=line) as error:
        write(build_engine(settings(engine="openai", url=url), tiny.base()), make_requests(1))
    assert "hunter2" not in str(error.value)


def test_closing_cancels_requests_in_flight(service):
    service.fault = lambda prompt, _attempt: "stall" if prompt[0] > 1 else None
    before = {*threading.enumerate()}
    engine = server_engine(service, batch_size=4, timeout_seconds=600.0)
    requests = iter(make_requests(9))
    answers = engine(lambda: next(requests, None))
    assert getattr(next(answers), "number", None) == 0
    while service.num_open < 3:
        time.sleep(0.01)
    answers.close()
    # the server's handlers end when the client closes the connection
    while service.num_open:
        time.sleep(0.01)
    # a handler counts itself out just before its thread ends
    for thread in {*threading.enumerate()} - before:
        thread.join(timeout=60)
    assert {*threading.enumerate()} <= before


@cache
def tiny_code() -> FrozenBase:
    return FrozenBase.load(TINY_CODE, dtype="float32", device="cpu")


def replied(**choice: Any) -> dict[str, Any]:
    return {"choices": [{"text": "def f(x):", "finish_reason": "stop"} | choice]}


@pytest.mark.parametrize(
    ("choice", "tokens", "finish"),
    [
        # vLLM includes the end token, and names it if it is not the model's first
        ({"token_ids": [5, 6, 0], "stop_reason": None}, [5, 6, 0], "eos"),
        ({"token_ids": [5, 6, 9], "stop_reason": 9}, [5, 6, 9], "eos"),
        # SGLang names it, included or not
        ({"token_ids": [5, 6], "matched_stop": 9}, [5, 6, 9], "eos"),
        ({"token_ids": [5, 6, 9], "matched_stop": 9}, [5, 6, 9], "eos"),
        ({"token_ids": [5, 6]}, [5, 6, 0], "eos"),
        ({"token_ids": []}, [0], "eos"),
        ({"token_ids": [], "finish_reason": "length"}, [], "length"),
        ({"token_ids": [5, 6, 0], "finish_reason": "length"}, [5, 6, 0], "length"),
        # no space for the end token
        ({"token_ids": [5] * 6}, [5] * 6, "length"),
        ({"text": ""}, [0], "eos"),
        # text without token ids is tokenised
        ({}, [*DEFINITION, 0], "eos"),
        ({"finish_reason": "length"}, DEFINITION, "length"),
    ],
)
def test_answer_has_one_end_token(service, choice, tokens, finish):
    service.reply = lambda _request: replied(**choice)
    assert write(server_engine(service, tiny_code()), make_requests(1))[0] == GeneratedAnswer(
        0, tokens, finish
    )
    assert service.requests[0]["stop_token_ids"] == [0]


ONE_ANSWER = "must return one complete answer"


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ([], ONE_ANSWER),
        ({"error": "overloaded"}, ONE_ANSWER),
        ({"choices": None}, ONE_ANSWER),
        ({"choices": []}, ONE_ANSWER),
        (replied(finish_reason="abort"), ONE_ANSWER),
        (replied(token_ids="5, 6"), ONE_ANSWER),
        (replied(token_ids=[5, -1]), ONE_ANSWER),
        (replied(prompt_token_ids=3), ONE_ANSWER),
        ({"choices": [replied()["choices"][0]] * 2}, ONE_ANSWER),
        (replied(token_ids=[5], prompt_token_ids=[1, 2, 4]), r"read \d in place of the 3"),
        (
            replied(token_ids=[5]) | {"usage": {"prompt_tokens": 4}},
            "read 4 in place of the 3",
        ),
        (replied(token_ids=[5, tiny.VOCAB]), "token 61 of a vocabulary of 61"),
        (replied(), "without token ids, which needs a base with a tokenizer"),
    ],
)
def test_invalid_reply_is_refused_in_one_line(service, reply, message):
    service.reply = lambda _request: reply
    with pytest.raises(InputError, match=message):
        write(server_engine(service), make_requests(1))


def test_missing_vllm_is_refused_with_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(InputError, match=r"pip install specheads\[vllm\]"):
        build_engine(settings(engine="vllm"), tiny.base())
