"""Rows of conversations: the forms that people publish, and what is refused by its line."""

import json
from typing import Any

import pytest

from specheads.core.errors import InputError
from specheads.data.conversations import conversation

WHERE = "line 7 of talks.jsonl"
HI, HELLO = {"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Hello."}
BRIEF = {"role": "system", "content": "Be brief."}
TOOL = {"type": "function", "function": {"name": "sun", "parameters": {}}}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [HI, HELLO]},
        {"messages": [HI | {"name": None}, HELLO | {"tool_calls": None}], "output": None},
        {"messages": [HI, HELLO], "prompt": "Hi?", "prompt_id": "x"},
        {"conversations": [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Hello."}]},
        {"conversations": [HI, HELLO], "id": "x"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi?"}]}, HELLO]},
        {"instruction": "Hi?", "input": "", "output": "Hello."},
        {"prompt": "Hi?", "completion": "Hello."},
        {"prompt": [HI], "completion": [HELLO]},
        {"question": "Hi?", "answer": "Hello."},
        {"text": "Hi?", "code": "Hello.", "test_list": ["assert hi()"]},
    ],
)
def test_common_forms_become_the_same_messages(row: dict[str, Any]):
    found = conversation(row, WHERE)
    assert found.messages == [HI, HELLO]
    assert found.tools is None


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [BRIEF, HI, HELLO]},
        {"messages": [BRIEF | {"role": "developer"}, HI, HELLO]},
        {"system": "Be brief.", "conversations": [HI, HELLO]},
        {"system_prompt": "Be brief.", "question": "Hi?", "response": "Hello."},
        {"system": "ignored", "messages": [BRIEF, HI, HELLO]},
    ],
)
def test_system_prompt_comes_first(row: dict[str, Any]):
    assert conversation(row, WHERE).messages == [BRIEF, HI, HELLO]


def test_input_follows_its_instruction():
    row = {"instruction": "Add.", "input": "1 + 1", "output": "2"}
    assert conversation(row, WHERE).messages[0]["content"] == "Add.\n\n1 + 1"


def test_tool_arguments_become_objects_and_tools_are_parsed():
    call = {"id": "a", "function": {"name": "sun", "arguments": '{"city": "Rome"}'}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    told = {"from": "observation", "value": "yes"}
    row = {"messages": [HI, asked, told, HELLO], "tools": json.dumps([TOOL])}
    found = conversation(row, WHERE)
    assert found.messages[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Rome"}
    assert found.messages[1]["tool_calls"][0]["id"] == "a"
    assert found.messages[2] == {"role": "tool", "content": "yes"}
    assert found.tools == [TOOL]


def test_thoughts_are_kept_apart_from_the_answer():
    thinking = HELLO | {"reasoning": "hm"}
    found = conversation({"messages": [HI, thinking]}, WHERE).messages
    assert found[1] == HELLO | {"reasoning_content": "hm"}


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({}, "has no key"),
        ({"text": "Hi?"}, "has text"),
        ({"instruction": "Hi?", "input": "x"}, "has instruction, input"),
        ({"messages": None, "text": None}, "has no key"),
        ({"messages": [HI, HELLO], "conversations": [HI]}, "has messages; conversations"),
        ({"messages": [HI], "instruction": "a", "output": "b"}, "messages; instruction and output"),
        ({"messages": []}, r"not empty; line 7 of talks.jsonl has \[\]"),
        ({"messages": "Hi?"}, "must be a list of objects"),
        ({"messages": ["Hi?"]}, "has 'Hi\\?' among them"),
        ({"messages": [{"content": "Hi?"}]}, "has None"),
        ({"messages": [{"role": "bot", "content": "Hi?"}]}, "one of system, user.* has 'bot'"),
        ({"messages": [{"role": ["user"], "content": "Hi?"}]}, r"has \['user'\]"),
        ({"messages": [{"role": "user", "content": 3}]}, "parts of text, .* has int"),
        ({"messages": [{"role": "user", "content": {"a": 1}}]}, "has an object"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "has image"),
        ({"messages": [{"role": "user", "content": ["Hi?"]}]}, "has str"),
        ({"messages": [{"role": "user", "content": " \n"}]}, "of the user must not be empty"),
        ({"messages": [HI, {"role": "assistant"}]}, "of the assistant must not be empty"),
        ({"messages": [BRIEF, HELLO]}, "needs a turn of the user, .* only assistant, system"),
        ({"instruction": "Hi?", "output": ""}, "output must be text, and not empty"),
        ({"instruction": 3, "output": "b"}, "instruction must be text"),
        ({"instruction": "a", "input": {}, "output": "b"}, "input must be text"),
        ({"messages": [HI, HELLO], "tools": "x"}, "list of JSON schemas, .* has 'x'"),
        ({"messages": [HI, HELLO | {"tool_calls": [3]}]}, "list of objects with function.* has 3"),
        (
            {"messages": [HI, HELLO | {"tool_calls": [{"name": "f", "arguments": "{"}]}]},
            "arguments of a tool call must be an object",
        ),
    ],
)
def test_bad_conversation_is_refused_in_one_line(row: Any, told: str):
    with pytest.raises(InputError, match=told) as caught:
        conversation(row, WHERE)
    assert WHERE in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
