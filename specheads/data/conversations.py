"""The reader of conversations: every common form of a row becomes one form, or is refused.

A row is used whole or refused: nothing that it says about its turns is dropped. See docs/data.md.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from specheads.core.errors import InputError
from specheads.data.bad_rows import join_keys, locate_errors
from specheads.data.files import Row, unique_keys

Message = dict[str, Any]
ROLES = {
    **{role: role for role in ("system", "user", "assistant", "tool")},
    **{"developer": "system", "human": "user"},
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model"), "assistant"),
    **{"function_call": "assistant", "tool_call": "assistant"},
    **{"observation": "tool", "ipython": "tool", "function": "tool", "tool_response": "tool"},
}
"""Published names of roles, and the names that templates use."""
CONVERSATION_COLUMNS = ("messages", "conversations", "conversation")
QUESTION_COLUMNS = (
    *("instruction", "prompt", "question", "query", "problem", "text", "input"),
    "question_content",
)
CONTEXT_COLUMNS = ("input", "context", "starter_code")
ANSWER_COLUMNS = ("output", "response", "completion", "answer", "code", "solution")
"""Columns of a question, of text that belongs to it, and of its answer."""
SYSTEM_KEYS, TOOLS_KEYS = ("system", "system_prompt"), ("tools", "functions")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
CALL_KEYS = ("tool_calls", "function_call")
TEMPLATE_KEYS = ("name", "tool_call_id")
"""Keys of a message that templates may read, in addition to role and content."""
WEIGHT_KEYS = ("weight", "loss", "train", "trainable")
"""Keys of a message that decide whether it is learned."""
PART_TYPES = {
    **{"text": "text", "input_text": "text", "output_text": "text"},
    **{"reasoning": "reasoning", "thinking": "reasoning"},
}
"""Types of content parts that are read."""

METADATA = {
    *("identifier", "config", "configs"),
    *("id", "ids", "uid", "idx", "index", "uuid", "hash", "source", "dataset", "origin", "model"),
    *("generator", "category", "subcategory", "topic", "domain", "subject", "type", "tag", "tags"),
    *("label", "labels", "lang", "language", "country", "region", "split", "ip", "version"),
    *("license", "url", "title", "date", "time", "timestamp", "created", "author", "annotator"),
    *("score", "scores", "rating", "reward", "quality", "difficulty", "length", "tokens"),
    *("moderation", "metadata", "meta", "toxic", "redacted", "signature", "test_list"),
    *("test_setup_code", "challenge_test_list", "platform", "cluster"),
}
"""Names, and last words of names, of columns that describe a row and are not part of its turns."""
WORD_BREAK = re.compile(r"[_\W]+|(?<=[a-z])(?=[A-Z])")
ANSWERS_OF_PROMPT_SETS = (
    *(*ANSWER_COLUMNS, "reference", "canonical_solution", "test", "entry_point"),
    *("public_test_cases", "private_test_cases"),
)
"""Columns of public prompt sets that a prompt must not hold."""


def conversation(
    row: Mapping[str, Any],
    location: str = "a row",
    ignore: Collection[str] = (),
    *,
    is_answered: bool = True,
) -> Row:
    """Convert a row of any common form into `messages` and `tools`; docs/data.md lists the forms.

    A message has a `role` (system, user, assistant or tool) and a `content`, which is text, and
    maybe `reasoning_content` and `tool_calls`. `tools` are JSON schemas, or None. A null counts as
    absent. Columns, and keys of messages, in `ignore` are not read.

    Raises:
        InputError: The row has no known form, a bad message, or something that would not be used.
    """
    with locate_errors(location):
        row = _without_empty(row, ignore)
        tools_column = next((name for name in TOOLS_KEYS if name in row), "")
        if column := next((name for name in CONVERSATION_COLUMNS if name in row), ""):
            columns, messages = {column}, _convert_messages(_parse_nested(row[column]), ignore)
        else:
            columns, messages = _convert_pair(row, ignore, is_answered=is_answered)
        if system := _first_value(row, SYSTEM_KEYS):
            if messages[0]["role"] != "system":
                message = {"role": "system", "content": system}
                messages = [_convert_message(message, ignore), *messages]
            elif messages[0]["content"] != system:
                raise InputError("a conversation has one system prompt", fault="has two")
        if not any(message["role"] == "user" for message in messages):
            roles = ", ".join(sorted({message["role"] for message in messages}))
            raise InputError("a conversation needs a turn of the user", fault=f"has only {roles}")
        contents = [message["content"] for message in messages]
        refuse_unread(row, {*columns, *SYSTEM_KEYS, tools_column}, contents)
        return {"messages": messages, "tools": _convert_tools(tools_column, row.get(tools_column))}


def question(row: Mapping[str, Any]) -> Row:
    """Convert a row as `conversation` does, without its last answer: a prompt."""
    unanswered = conversation(row, ignore=ANSWERS_OF_PROMPT_SETS, is_answered=False)
    while unanswered["messages"][-1]["role"] == "assistant":
        unanswered["messages"].pop()
    return unanswered


def last_message(messages: Sequence[Message], role: str) -> int:
    """Return the index of the last message of a role, which must exist."""
    return max(index for index, message in enumerate(messages) if message["role"] == role)


def first_answer(messages: Sequence[Message]) -> int:
    """Return the index of the first answer to a user, else the number of messages.

    A message of the assistant before any user message is a greeting.
    """
    roles = [message["role"] for message in messages]
    start = roles.index("user") if "user" in roles else len(roles)
    return roles.index("assistant", start) if "assistant" in roles[start:] else len(roles)


def _without_empty(row: Mapping[str, Any], ignore: Collection[str]) -> dict[str, Any]:
    return {
        name: value for name, value in row.items() if name not in ignore and not _is_empty(value)
    }


def _convert_pair(
    row: Mapping[str, Any], ignore: Collection[str], *, is_answered: bool
) -> tuple[set[str], list[Message]]:
    """Return the messages of a question and its answer, and the columns that they are from."""
    question_column = next((name for name in QUESTION_COLUMNS if name in row), "")
    answer_column = next((name for name in ANSWER_COLUMNS if name in row), "")
    if not question_column or (is_answered and not answer_column):
        rule = "a row needs messages or conversations, or prompt, turns or a question"
        rule += " with its answer (as instruction and output)" * is_answered
        raise InputError(rule, fault=f"has {join_keys(row) if row else 'empty columns only'}")
    answer = row.get(answer_column)
    if isinstance(turns := row[question_column], list):
        answers = answer if isinstance(answer, list) else [answer] * is_answered
        messages = _convert_messages([*turns, *answers], ignore)
        return {question_column, answer_column}, messages
    contexts = [name for name in CONTEXT_COLUMNS if name in row and name != question_column]
    columns = [question_column, *contexts]
    for name in [*columns, *([answer_column] if is_answered else [])]:
        if not isinstance(row[name], str):
            raise InputError(f"{name} must be text", fault=f"has {row[name]!r:.60}")
    content = "\n\n".join(row[name] for name in columns)
    messages: list[Message] = [{"role": "user", "content": content}]
    if is_answered:
        reasoning = {name: row[name] for name in REASONING_KEYS if name in row}
        message = {"role": "assistant", "content": answer, **reasoning}
        messages.append(_convert_message(message, ignore))
    return {*columns, answer_column, *REASONING_KEYS}, messages


def _convert_messages(value: Any, ignore: Collection[str]) -> list[Message]:
    rule = "messages must be a list of objects with role and content, and not empty"
    is_list = isinstance(value, list) and all(isinstance(message, Mapping) for message in value)
    if not is_list or not value:
        raise InputError(rule, fault=f"has {value!r:.60}")
    return [_convert_message(message, ignore) for message in value]


def _convert_message(published: Mapping[str, Any], ignore: Collection[str]) -> Message:
    message = _without_empty(published, [*ignore, *WEIGHT_KEYS])
    published_role = _first_value(message, ("role", "from"))
    alias = published_role.lower() if isinstance(published_role, str) else ""
    if alias not in ROLES:
        rule = f"the role of a message must be one of {', '.join(ROLES)}"
        raise InputError(rule, fault=f"has {published_role!r:.40}")
    role, content = ROLES[alias], _first_value(message, ("content", "value"))
    calls = _first_value(message, CALL_KEYS)
    if alias in ("function_call", "tool_call"):
        content, calls = None, content
    _check_weights(published, role, ignore)
    text, reasoning = _join_parts(content)
    reasoning = _first_value({"parts": reasoning, **message}, ("parts", *REASONING_KEYS))
    if reasoning and "</think>" in text:
        raise InputError(
            "an answer's thoughts are in its content or in a key of their own", fault="has both"
        )
    if role != "assistant" and (reasoning or calls):
        raise InputError("only the assistant thinks and calls tools", fault=f"has such a {role}")
    content_keys = {"role", "from", "content", "value"}
    refuse_unread(message, {*content_keys, *TEMPLATE_KEYS, *REASONING_KEYS, *CALL_KEYS})
    converted: Message = {"role": role, "content": text}
    converted |= {name: message[name] for name in TEMPLATE_KEYS if name in message}
    if reasoning:
        converted["reasoning_content"] = "".join(_join_parts(reasoning))
    if calls:
        converted["tool_calls"] = _convert_calls(calls)
    may_be_empty = role in ("system", "tool") or "tool_calls" in converted
    if not may_be_empty and not text.strip():
        raise InputError(f"a message of the {role} must not be empty", fault="has one that is")
    return converted


def _check_weights(message: Mapping[str, Any], role: str, ignore: Collection[str]) -> None:
    for name in WEIGHT_KEYS:
        weight = message.get(name)
        if weight is not None and name not in ignore and weight != (role == "assistant"):
            raise InputError(
                f"every answer is learned and nothing else: {name} must be 1 for the assistant, 0 "
                "for others",
                fault=f"has {weight!r:.40} for the {role}",
            )


def _join_parts(content: Any) -> tuple[str, str]:
    """Return the text and the reasoning of a message; join its parts."""
    if content is None or isinstance(content, str):
        return content or "", ""
    joined = {"text": "", "reasoning": ""}
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") or "text" if isinstance(part, Mapping) else type(part).__name__
        text = part.get("text", part.get(kind)) if kind in PART_TYPES else None
        if not isinstance(text, str):
            content_type = f"a part of type {kind} without text" if kind in PART_TYPES else kind
            raise InputError(
                "the content of a message must be text, or parts with text or reasoning",
                fault=f"has {'an object' if isinstance(content, Mapping) else content_type!s:.60}",
            )
        refuse_unread(part, {"type", "text", kind})
        joined[PART_TYPES[kind]] += text
    return joined["text"], joined["reasoning"]


def _convert_calls(value: Any) -> list[dict[str, Any]]:
    """Return tool calls with their arguments as objects, which templates write as JSON."""
    calls, value = [], _parse_nested(value)
    for call in value if isinstance(value, list) else [value]:
        function: Any = call.get("function", call) if isinstance(call, Mapping) else None
        published = function.get("arguments") if isinstance(function, Mapping) else None
        # a call without arguments is published as null, an empty list or empty text, or their JSON
        arguments = _parse_nested(published)
        arguments = {} if _is_empty(arguments) else arguments
        is_named = isinstance(function, Mapping) and isinstance(function.get("name"), str)
        if not is_named or not isinstance(arguments, Mapping):
            raise InputError(
                "tool_calls must be a list of objects with function, and that with name and "
                "arguments (an object, or its JSON)",
                fault=f"has {(published if is_named else call)!r:.60}",
            )
        refuse_unread(function, {"id", "type", "name", "arguments"})
        if function is not call:
            refuse_unread(call, {"id", "type", "function"})
        call_id = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        named = {"name": function["name"], "arguments": arguments}
        calls.append(call_id | {"type": "function", "function": named})
    return calls


def _convert_tools(column: str, value: Any) -> list[dict[str, Any]] | None:
    tools = _parse_nested(value)
    tools = [_parse_nested(tool) for tool in tools] if isinstance(tools, list) else tools
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise InputError("tools must be a list of JSON schemas", fault=f"has {value!r:.60}")
    if tools and column == "functions":
        return [{"type": "function", "function": tool} for tool in tools]
    return tools or None


def _first_value(row: Mapping[str, Any], keys: Iterable[str]) -> Any:
    """Return the value under the first of several names; the values must not differ."""
    values = {name: row[name] for name in keys if not _is_empty(row.get(name))}
    if any(value != next(iter(values.values())) for value in values.values()):
        raise InputError(f"{' and '.join(values)} must be the same", fault="has different ones")
    return next(iter(values.values()), None)


def refuse_unread(
    row: Mapping[str, Any], used: Collection[str], contents: Sequence[str] = ()
) -> None:
    """Refuse a key that is not used and may say something about the turns.

    Metadata is not refused. With the `contents` of a row's messages, its other numbers and a text
    that only repeats the messages are not refused either.
    """
    unread = []
    for name, value in row.items():
        words = [word.lower() for word in WORD_BREAK.split(name) if word.lower() != "name"]
        is_number = bool(contents) and isinstance(value, int | float) and name not in WEIGHT_KEYS
        is_metadata = bool({name, *words[-1:]} & METADATA)
        is_repetition = isinstance(value, str) and _repeats(value.strip(), contents)
        if not (name in used or is_number or is_metadata or is_repetition or _is_empty(value)):
            unread.append(name)
    if unread:
        raise InputError(
            "every column must be read or be known as metadata, and these are neither: "
            f"{join_keys(unread)} (rename or remove them; for training, data.ignore can name them)",
            fault=f"has {row[unread[0]]!r:.60}",
        )


def _repeats(value: str, contents: Sequence[str]) -> bool:
    """Return whether a text is in one of the messages, or contains all of them."""
    return any(value in content for content in contents) or (
        bool(contents)
        and all(passage in value for content in contents for passage in content.split("\n\n"))
    )


def _is_empty(value: Any) -> bool:
    is_blank = isinstance(value, str) and not value.strip()
    return is_blank or value is None or value is False or value in ([], {})


def _parse_nested(value: Any) -> Any:
    """Parse text as JSON if it is JSON; flat tables keep nested values that way."""
    try:
        return json.loads(value, object_pairs_hook=unique_keys) if isinstance(value, str) else value
    except (json.JSONDecodeError, RecursionError):
        return value
