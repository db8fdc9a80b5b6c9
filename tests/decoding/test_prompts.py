"""Prompts are checked on entry: sequences of integers are accepted, others are refused."""

import array
from collections import UserDict, deque
from collections.abc import Iterator
from itertools import product
from typing import Any

import jaxtyping
import numpy as np
import pytest
import torch

from specheads.core.errors import InputError
from specheads.decoding.engine import Engine
from specheads.decoding.generate import generate
from specheads.decoding.request import Request
from specheads.decoding.sampling import Sampling
from tests import tiny

PROMPT = [5, 0, 60, 7]


@pytest.fixture(autouse=True)
def _as_users_run_it() -> Iterator[None]:
    """Skip the checks of annotations, which run before ours and under pytest only."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def answer(prompts: Any, **settings: Any) -> list[list[int]]:
    return generate(tiny.base(), None, prompts, **{"max_new_tokens": 3, **settings}).tokens


@pytest.mark.parametrize(
    "prompt",
    [
        tuple(PROMPT),
        np.array(PROMPT),
        np.array(PROMPT, dtype=np.uint8),
        torch.tensor(PROMPT),
        torch.tensor(PROMPT, dtype=torch.int32),
        array.array("i", PROMPT),
        [np.int64(one) for one in PROMPT],
        [torch.tensor(one) for one in PROMPT],
    ],
    ids=lambda prompt: f"{type(prompt).__name__} of {type(prompt[0]).__name__}",
)
def test_token_ids_are_taken_in_any_row_of_whole_numbers(prompt):
    assert answer([prompt]) == answer([PROMPT])
    request = Request(prompt=prompt)
    assert request.prompt == PROMPT
    assert {type(one) for one in request.prompt} == {int}


def test_a_range_is_a_prompt():
    assert answer([range(4)]) == answer([[0, 1, 2, 3]])


@pytest.mark.parametrize("kind", [torch.tensor, np.array, tuple])
def test_prompts_of_one_length_are_taken_in_one_array(kind):
    assert answer(kind([PROMPT, PROMPT[::-1]])) == answer([PROMPT, PROMPT[::-1]])


@pytest.mark.parametrize(
    ("prompts", "told"),
    [
        ("def f():", r"prompts must be .* got str 'def f\(\):'; tokenise .*tokenizer\(text\)"),
        (b"def", "prompts must be .* got bytes"),
        (["def f():"], "prompt 0 must be a list of token ids, got str 'def"),
        ([PROMPT, "a"], "prompt 1 must be .* got str 'a'"),
        (PROMPT, r"prompts must be a list of prompts, got one with 5 .* give \[prompt\]"),
        (torch.tensor(PROMPT), r"a list of prompts, got one .* give \[prompt\]"),
        (range(3), r"a list of prompts, got one .* give \[prompt\]"),
        ([[PROMPT]], "prompt 0 must be one list of token ids, got a list at place 0"),
        ([PROMPT, [5, (1, 2)]], "prompt 1 must be one list .* got a list at place 1"),
        ([[torch.tensor(PROMPT)]], "prompt 0 must be one list .* got a list at place 0"),
        (torch.zeros(1, 2, 2, dtype=torch.long), "prompt 0 must be one list"),
        ([PROMPT, [1, 2.0]], "token 1 of prompt 1 must be a whole number, got 2.0"),
        ([torch.tensor([1.0])], "token 0 of prompt 0 must be a whole number, got 1.0"),
        ([[True]], "token 0 of prompt 0 must be a whole number, got True"),
        ([torch.tensor([True])], "token 0 of prompt 0 must be a whole number, got True"),
        ([[1, None]], "token 1 of prompt 0 must be a whole number, got None"),
        ([[1, "2"]], "token 1 of prompt 0 must be a whole number, got '2'"),
        ([PROMPT, [1, 2, -3]], "token 2 of prompt 1 must be at least 0, got -3"),
        ([PROMPT, [1, 61]], "vocabulary size 61, got 61 at place 1 of prompt 1; use .* tokenizer"),
        ([[10**30]], "vocabulary size 61, got 10{30} at place 0 of prompt 0"),
        (None, "prompts must be a list of token ids, got NoneType"),
        ([None], "prompts must be a list of prompts, got one with None"),
        ({"input_ids": [PROMPT]}, "prompts must be .* got dict"),
        ([UserDict(input_ids=PROMPT)], "prompt 0 must be .* got UserDict"),
        ([set(PROMPT)], "prompt 0 must be .* got set"),
        ([deque(PROMPT[:0])], "prompt 0 must be|prompt 0 has none"),
        ((row for row in [PROMPT]), "prompts must be .* got generator"),
        (7, "prompts must be .* got int 7"),
    ],
)
def test_invalid_prompts_are_refused_by_number_place_and_value(prompts, told):
    with pytest.raises(InputError, match=told) as caught:
        answer(prompts)
    assert "\n" not in str(caught.value)


def test_no_prompts_in_a_tensor_give_no_answers():
    assert answer(torch.zeros(0, 4, dtype=torch.long)) == []


NO_NUMBERS = [2.0, True, "3", [3], torch.tensor(True), np.float32(2)]


@pytest.mark.parametrize(
    ("name", "value"),
    # a max_batch of None is all
    [("max_new_tokens", None), *product(["max_new_tokens", "max_batch"], NO_NUMBERS)],
)
def test_a_limit_is_a_whole_number(name, value):
    with pytest.raises(InputError, match=f"{name} must be a whole number, got"):
        answer([PROMPT], **{name: value})


@pytest.mark.parametrize("kind", [np.int32, torch.tensor])
def test_limits_of_numpy_and_torch_are_taken(kind):
    assert answer([PROMPT] * 2, max_new_tokens=kind(2), max_batch=kind(1)) == answer(
        [PROMPT] * 2, max_new_tokens=2
    )


@pytest.mark.parametrize(("name", "value"), [("max_new_tokens", -1), ("max_batch", 0)])
def test_a_limit_below_its_least_is_refused(name, value):
    with pytest.raises(InputError, match=f"{name} must be at least {value + 1}, got {value}"):
        answer([PROMPT], **{name: value})


BAD: dict[str, Any] = {
    "text": {"prompt": "abc"},
    "nothing": {"prompt": []},
    "several prompts": {"prompt": [PROMPT]},
    "a float": {"prompt": [1.5]},
    "no such token": {"prompt": [61]},
    "a limit in words": {"max_new_tokens": "4"},
    "a temperature for settings": {"sampling": 0.7},
    "no settings": {"sampling": None},
    "one stop string": {"stop": "end"},
    "stop tokens": {"stop": (3,)},
    "one end of text": {"eos_ids": 3},
    "ends of text in words": {"eos_ids": ("a",)},
    "stop strings without a tokenizer": {"stop": ("a",)},
    "a long prompt": {"prompt": [1] * 200},
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_fails_alone(name):
    engine = Engine(tiny.base(), None)
    before = engine.submit(Request(prompt=PROMPT, max_new_tokens=6))
    engine.step()
    state = engine.running, engine.waiting
    with pytest.raises(InputError) as caught:
        engine.submit(Request(**{"prompt": PROMPT, **BAD[name]}))
    assert "\n" not in str(caught.value)
    assert (engine.running, engine.waiting) == state
    after = engine.submit(Request(prompt=PROMPT, max_new_tokens=6))
    engine.run()
    assert (before.number, after.number) == (0, 1)
    assert [before.tokens] == [after.tokens] == answer([PROMPT], max_new_tokens=6)


def test_an_engine_takes_requests_only():
    with pytest.raises(InputError, match=r"submit takes a Request\(prompt=\.\.\.\), got \[5"):
        Engine(tiny.base()).submit(PROMPT)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("temperature", "hot"),
        ("temperature", True),
        ("temperature", float("nan")),
        ("top_p", None),
        ("min_p", [0.5]),
        ("repetition_penalty", float("inf")),
        ("top_k", 2.5),
        ("seed", "a"),
    ],
)
def test_settings_of_sampling_are_numbers(setting, value):
    with pytest.raises(InputError, match=f"{setting} must be .*number, got"):
        Sampling(**{setting: value})


@pytest.mark.parametrize("value", [0.7, "greedy", {"temperature": 1}])
def test_sampling_is_settings_or_a_list_of_them(value):
    with pytest.raises(InputError, match="sampling"):
        answer([PROMPT], sampling=value)
