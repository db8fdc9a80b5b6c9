"""The reader of rows: published forms become one form, and nothing of a row is dropped."""

import json
from typing import Any

import pytest
from datasets import Dataset

from specheads.core.errors import InputError
from specheads.data.conversations import conversation
from specheads.data.files import rows_of

LOCATION = "line 7 of talks.jsonl"
HI, HELLO = {"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Hello."}
BRIEF = {"role": "system", "content": "Be brief."}
HUMAN, GPT = {"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Hello."}
TOOL: Any = {"type": "function", "function": {"name": "sun", "parameters": {}}}
ROME = {"name": "sun", "arguments": {"city": "Rome"}}
CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": ROME}],
}
YES = {"role": "tool", "content": "yes"}
PART = {"type": "text", "text": "Hello."}


def read(*messages: dict[str, Any], **columns: Any) -> list[dict[str, Any]]:
    return conversation({"messages": list(messages), **columns}, LOCATION)["messages"]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [HI, HELLO]},
        {"messages": [HI | {"name": None}, HELLO | {"tool_calls": None}], "output": None},
        {"messages": json.dumps([HI, HELLO])},
        {"conversations": [HUMAN, GPT]},
        {"conversations": [HUMAN | {"weight": 0.0}, GPT | {"weight": 1.0}], "source": "x"},
        {"conversations": [HI, HELLO], "id": "x", "num_turns": 2, "verified": True},
        {"conversation": [HI, HELLO], "conversation_hash": "x", "modelName": "y", "toxic": False},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi?"}]}, HELLO]},
        {"instruction": "", "input": "Hi?", "output": "Hello."},
        {"prompt": "Hi?", "completion": "Hello."},
        {"prompt": [HI], "completion": [HELLO]},
        {"question": "Hi?", "answer": "Hello."},
        {"query": "Hi?", "response": "Hello.", "type": "x"},
        {"text": "Hi?", "code": "Hello.", "test_list": ["assert hi()"]},
        {"problem": "Hi?", "solution": "Hello.", "problem_type": "greeting"},
        {"conversations": [HUMAN | {"from": "Human"}, GPT | {"from": "chatgpt"}]},
        {"messages": [HI | {"role": "USER"}, HELLO | {"role": "Assistant"}]},
    ],
)
def test_common_forms_become_the_same_messages(row: dict[str, Any]):
    converted = conversation(row, LOCATION)
    assert converted["messages"] == [HI, HELLO]
    assert converted["tools"] is None


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [BRIEF, HI, HELLO]},
        {"messages": [BRIEF | {"role": "developer"}, HI, HELLO]},
        {"system": "Be brief.", "conversations": [HI, HELLO]},
        {"system": " ", "system_prompt": "Be brief.", "question": "Hi?", "response": "Hello."},
        {"system": "Be brief.", "system_prompt": "Be brief.", "messages": [BRIEF, HI, HELLO]},
    ],
)
def test_system_prompt_comes_first(row: dict[str, Any]):
    assert conversation(row, LOCATION)["messages"] == [BRIEF, HI, HELLO]


@pytest.mark.parametrize(
    ("row", "content"),
    [
        ({"instruction": "Add.", "input": "1 + 1", "output": "2"}, "Add.\n\n1 + 1"),
        ({"question": "Who?", "context": "Bob lives.", "answer": "Bob."}, "Who?\n\nBob lives."),
        ({"query": "a", "context": "b", "input": "c", "output": "d"}, "a\n\nc\n\nb"),
        ({"instruction": "a", "context": None, "input": " ", "response": "d"}, "a"),
    ],
)
def test_context_follows_its_question(row: dict[str, Any], content: str):
    assert conversation(row, LOCATION)["messages"][0]["content"] == content


@pytest.mark.parametrize(
    "call",
    [
        {"content": "", "function_call": ROME},
        {"content": None, "function_call": {"name": "sun", "arguments": '{"city": "Rome"}'}},
        {"tool_calls": [{"function": ROME}], "function_call": None},
        {"tool_calls": json.dumps([{"function": ROME}])},
        {"role": "function_call", "content": json.dumps(ROME)},
        {"role": "tool_call", "content": json.dumps([ROME])},
    ],
)
@pytest.mark.parametrize("result", [YES, {"from": "observation", "value": "yes"}])
def test_calls_are_read_in_every_published_form(call: dict[str, Any], result: dict[str, Any]):
    assert read(HI, {"role": "assistant", **call}, result, HELLO) == [HI, CALLED, YES, HELLO]


def test_ids_of_calls_and_names_are_kept():
    call = {"id": "a", "function": {"name": "sun", "arguments": {}}}
    result = {"role": "function", "name": "sun", "tool_call_id": "a", "content": "yes"}
    messages = read(HI, {"role": "assistant", "tool_calls": [call]}, result, HELLO)
    assert messages[1]["tool_calls"][0]["id"] == "a"
    assert messages[2] == result | {"role": "tool"}


@pytest.mark.parametrize("empty", [..., None, "", "\n", "null", " null ", "{}", {}, [], "[]", '""'])
def test_call_without_arguments_has_an_empty_object(empty: Any):
    function = {"name": "sun"} | ({} if empty is ... else {"arguments": empty})
    messages = read(HI, {"role": "assistant", "content": "", "function_call": function}, YES, HELLO)
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize(
    "columns",
    [
        {"tools": [TOOL]},
        {"tools": json.dumps([TOOL])},
        {"tools": [json.dumps(TOOL)]},
        {"functions": [TOOL["function"]]},
    ],
)
def test_tools_are_read_as_lists_and_as_json(columns: dict[str, Any]):
    assert conversation({"messages": [HI, HELLO], **columns}, LOCATION)["tools"] == [TOOL]


@pytest.mark.parametrize(
    "answer",
    [
        {"content": "Hello.", "reasoning": "hm"},
        {"content": "Hello.", "thinking": "hm", "reasoning_content": "hm"},
        {"content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "Hello."}]},
        {"content": [{"type": "reasoning", "text": "hm"}, {"text": "Hel"}, {"text": "lo."}]},
        {"content": [{"type": "output_text", "text": "Hello."}], "reasoning": [{"text": "hm"}]},
    ],
)
def test_thoughts_are_kept_apart_from_the_answer(answer: dict[str, Any]):
    messages = read(HI, {"role": "assistant", **answer})
    assert messages[1] == HELLO | {"reasoning_content": "hm"}


@pytest.mark.parametrize("name", ["reasoning", "thinking", "reasoning_content"])
def test_column_of_thoughts_belongs_to_the_answer(name: str):
    messages = conversation({"question": "Hi?", name: "hm", "answer": "Hello."}, LOCATION)[
        "messages"
    ]
    assert messages == [HI, HELLO | {"reasoning_content": "hm"}]


@pytest.mark.parametrize(
    "calls",
    [
        [{"x": 0, "y": 1}, {"text": "a"}],
        [{"all": [{"x": 1}, {"y": 2}]}, {"all": [{"z": 3}]}],
        [{"flag": False, "n": 0, "s": ""}, {"t": "a"}],
    ],
)
@pytest.mark.parametrize("key", ["tool_calls", "function_call"])
def test_parquet_reads_as_json_lines_do(tmp_path, calls: list[dict[str, Any]], key: str):
    rows = []
    for number, arguments in enumerate(calls):
        function = {"name": f"f{number}", "arguments": arguments}
        call = [{"id": "c", "function": function}] if key == "tool_calls" else function
        schema = {"type": "object", "properties": {name: {"enum": ["a"]} for name in arguments}}
        tools = [{"type": "function", "function": {"name": f"f{number}", "parameters": schema}}]
        answer = {"role": "assistant", "content": None, key: call}
        rows.append({"messages": [HI, answer, YES, HELLO], "tools": tools})
    Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    table_rows = [row for _, row in rows_of([tmp_path / "a.parquet"])]
    assert [conversation(row, "") for row in table_rows] == [conversation(row, "") for row in rows]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "has empty columns only"),
        ({"instruction": "Hi?", "input": "x"}, "has instruction, input"),
        ({"messages": [HI, HELLO], "conversations": [HI]}, "neither: conversations "),
        ({"messages": [HI], "instruction": "a", "output": "b"}, "neither: instruction, output "),
        ({"messages": "Hi?"}, "must be a list of objects"),
        ({"messages": [{"content": "Hi?"}]}, "has None"),
        ({"messages": [{"role": "bot", "content": "Hi?"}]}, "one of system, user.* has 'bot'"),
        ({"messages": [{"role": "user", "content": 3}]}, "parts with text .* has int"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "has image"),
        ({"messages": [{"role": "user", "content": " \n"}]}, "of the user must not be empty"),
        ({"messages": [HI, {"role": "assistant"}]}, "of the assistant must not be empty"),
        ({"messages": [BRIEF, HELLO]}, "needs a turn of the user; .* only assistant, system"),
        ({"instruction": 3, "output": "b"}, "instruction must be text"),
        ({"prompt": [HI], "completion": "Hello."}, "must be a list of objects .*'Hello.'"),
        ({"messages": [HI, HELLO], "tools": "x"}, "list of JSON schemas; .* has 'x'"),
        ({"messages": [HI, HELLO | {"tool_calls": [3]}]}, "list of objects with function.* has 3"),
        (
            {"messages": [HI, HELLO | {"tool_calls": [{"name": "f", "arguments": "{"}]}]},
            r"arguments \(an object, or its JSON\); .* has '{'",
        ),
        # what would be dropped is named
        ({"messages": [HI, HELLO], "hint": "Think.", "state": "x"}, "neither: hint, state "),
        ({"instruction": "a", "output": "b", "history": [["c", "d"]]}, "history"),
        ({"messages": [HI, HELLO], "chat_template_kwargs": {"thinking": True}}, "chat_template"),
        ({"messages": [HI, HELLO], "rejected": [HI, HELLO]}, "rejected"),
        ({"messages": [HI, HELLO], "tools": [TOOL], "functions": [TOOL]}, "functions"),
        ({"messages": [HI, HELLO | {"weight": 0}]}, "weight"),
        ({"messages": [HI, HELLO | {"prefix": True}]}, "prefix"),
        ({"messages": [HI, HELLO | {"refusal": "No."}]}, "refusal"),
        ({"messages": [HI | {"tool_calls": [ROME]}, HELLO]}, "calls tools; .* user"),
        ({"messages": [HI | {"thinking": "hm"}, HELLO]}, "thinks .* user"),
        ({"messages": [HI, HELLO | {"thinking": "a", "reasoning": "b"}]}, "reasoning and thinking"),
        ({"messages": [HI, HELLO | {"value": "Bye."}]}, "content and value"),
        (
            {"messages": [HI, HELLO | {"content": "<think>a</think>b", "reasoning": "a"}]},
            "in a key of their own; .* has both",
        ),
        ({"messages": [HI, HELLO | {"content": [{"text": {"value": "a"}}]}]}, "text without text"),
        ({"question": "a", "document": "b", "answer": "c"}, "document"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "answer": "d"}, "chosen, rejected"),
        ({"problem": "a", "solution": "b", "answer": "c"}, "solution"),
        ({"question": "a", "context": ["b", "c"], "answer": "d"}, "context must be text"),
        ({"messages": [HI, HELLO | {"tool_calls": [ROME], "function_call": ROME}]}, "tool_calls"),
        ({"messages": [HI, HELLO | {"function_call": ROME | {"parameters": [1]}}]}, "parameters"),
        ({"messages": [HI, HELLO | {"content": [PART | {"image": "a.png"}]}]}, "image"),
        ({"messages": [HI, HELLO | {"content": [PART, {"type": "audio", "text": ""}]}]}, "audio"),
        ({"system": "Be long.", "messages": [BRIEF, HI, HELLO]}, "one system prompt"),
        (
            {"system": "a", "system_prompt": "b", "messages": [HI, HELLO]},
            "system and system_prompt",
        ),
    ],
)
def test_bad_conversation_is_refused_in_one_line(row: Any, message: str):
    with pytest.raises(InputError, match=message) as caught:
        conversation(row, LOCATION)
    assert LOCATION in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("row", "ignore"),
    [
        ({"messages": [HI, HELLO], "hint": "Think."}, ["hint"]),
        ({"messages": [HI | {"state": "x"}, HELLO | {"state": "y"}], "a": [1]}, ["a", "state"]),
        ({"messages": [HI, HELLO | {"weight": 0}]}, ["weight"]),
        ({"instruction": "Hi?", "input": "x", "output": "Hello."}, ["input"]),
    ],
)
def test_ignored_columns_and_keys_are_not_read(row: Any, ignore: list[str]):
    assert conversation(row, LOCATION, ignore)["messages"] == [HI, HELLO]
