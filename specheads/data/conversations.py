"""Rows of conversations in the common published forms, converted to one form or refused."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from specheads.core.errors import InputError
from specheads.data.files import names

Message = dict[str, Any]

ROLES = {
    **{role: role for role in ("system", "user", "assistant", "tool")},
    **{"developer": "system", "human": "user", "gpt": "assistant", "model": "assistant"},
    **{"observation": "tool", "ipython": "tool", "function": "tool"},
}
"""Published names of roles, and the names that templates use."""

KEPT = ("name", "tool_call_id")
"""Keys of a message that templates may read, in addition to role and content."""

ASKS, ANSWERS = (
    ("instruction", "prompt", "question", "text"),
    ("output", "response", "completion", "answer", "code"),
)
"""Columns of rows with one question and one answer; the last are MBPP's."""

SYSTEM = ("system", "system_prompt")
"""Columns of the system message."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in the form that chat templates read."""

    messages: list[Message]
    """`role` is one of system, user, assistant and tool; `content` is text. `reasoning_content` has
    the assistant's thoughts, and `tool_calls` its calls."""
    tools: list[dict[str, Any]] | None = None
    """JSON schemas of the tools that the assistant may call."""


def conversation(row: Mapping[str, Any], where: str) -> Conversation:
    """Convert a row of any common form; error messages call it by `where`.

    The forms are `messages` of role and content, ShareGPT's `conversations` of from and value, and
    a question (`instruction`, with `input`, or `prompt`, `question` or `text`) with its answer
    (`output`, `response`, `completion`, `answer` or `code`). Each may have `system` and `tools`.
    A null counts as absent, because tables fill missing keys with null.

    Raises:
        InputError: The row has no known form or several, no user message, or a bad message.
    """
    row = {name: value for name, value in row.items() if value is not None}
    ask = next((name for name in ASKS if name in row), "")
    answer = next((name for name in ANSWERS if name in row), "")
    found = [name for name in ("messages", "conversations") if name in row]
    found += [f"{ask} and {answer}"] if ask and answer else []
    if len(found) != 1:
        raise InputError(
            "a conversation is a row with messages, or conversations, or a question and its answer "
            f"(as instruction and output), and with one of them only; {where} has "
            f"{'; '.join(found) or names(row)}; fix or remove it"
        )
    is_pair = bool(ask and answer)
    messages = _pair(row, ask, answer, where) if is_pair else _messages(row[found[0]], where)
    system = next((row[name] for name in SYSTEM if name in row), "")
    if system and messages[0]["role"] != "system":
        messages = [_message({"role": "system", "content": system}, where), *messages]
    if not any(message["role"] == "user" for message in messages):
        raise InputError(
            f"a conversation needs a turn of the user, {where} has only "
            f"{', '.join(sorted({message['role'] for message in messages}))}; remove it"
        )
    return Conversation(messages, _tools(row.get("tools"), where))


def first_answer(messages: Sequence[Message]) -> int:
    """Return the index of the first answer to a user, else the number of messages.

    A message of the assistant before any user message is a greeting.
    """
    roles = [message["role"] for message in messages]
    asked = roles.index("user") if "user" in roles else len(roles)
    return roles.index("assistant", asked) if "assistant" in roles[asked:] else len(roles)


def _pair(row: Mapping[str, Any], ask: str, answer: str, where: str) -> list[Message]:
    pair = row[ask], row[answer]
    if all(isinstance(one, list) for one in pair):
        return _messages([*pair[0], *pair[1]], where)
    more = row.get("input", "") if ask == "instruction" else ""
    for name, text in ((ask, pair[0]), (answer, pair[1]), ("input", more)):
        if not isinstance(text, str) or (name != "input" and not text.strip()):
            raise InputError(
                f"{name} must be text, and not empty, {where} has {text!r:.60}; fix or remove it"
            )
    asked = f"{pair[0]}\n\n{more}" if more.strip() else pair[0]
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": pair[1]}]


def _messages(value: Any, where: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise InputError(
            "messages must be a list of objects with role and content, and not empty; "
            f"{where} has {value!r:.60}; fix or remove it"
        )
    return [_message(one, where) for one in value]


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, Mapping):
        raise InputError(
            "messages must be a list of objects with role and content, and not empty; "
            f"{where} has {value!r:.60} among them; fix or remove it"
        )
    given = {name: part for name, part in value.items() if part is not None}
    role, content = given.get("role", given.get("from")), given.get("content", given.get("value"))
    if not isinstance(role, str) or role not in ROLES:
        raise InputError(
            f"the role of a message must be one of {', '.join(ROLES)}; {where} has {role!r:.40}: "
            "fix or remove it"
        )
    out: Message = {"role": ROLES[role], "content": _text(content, where)}
    out |= {name: given[name] for name in KEPT if name in given}
    thought = given.get("reasoning_content", given.get("reasoning", given.get("thinking")))
    if out["role"] == "assistant":
        if thought:
            out["reasoning_content"] = _text(thought, where)
        if given.get("tool_calls"):
            out["tool_calls"] = _calls(given["tool_calls"], where)
    may_be_empty = out["role"] in ("system", "tool") or "tool_calls" in out
    if not may_be_empty and not out["content"].strip():
        raise InputError(
            f"a message of the {out['role']} must not be empty, one of {where} is; fix or remove "
            "the row"
        )
    return out


def _text(content: Any, where: str) -> str:
    """Return the text of a message; join parts of text."""
    if content is None:
        return ""
    if isinstance(content, list) and all(map(_is_text_part, content)):
        return "".join(part["text"] for part in content)
    if not isinstance(content, str):
        parts = content if isinstance(content, list) else [content]
        kinds = (
            str(part.get("type", "an object")) if isinstance(part, Mapping) else type(part).__name__
            for part in parts
        )
        raise InputError(
            f"the content of a message must be text or a list of parts of text, {where} has "
            f"{', '.join(kinds) or 'an empty list':.60}; write it as text"
        )
    return content


def _is_text_part(part: Any) -> TypeGuard[Mapping[str, str]]:
    return isinstance(part, Mapping) and isinstance(part.get("text"), str)


def _calls(value: Any, where: str) -> list[dict[str, Any]]:
    """Return tool calls with their arguments as objects, which templates write as JSON."""
    calls = []
    for call in value if isinstance(value, list) else [value]:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise InputError(
                "tool_calls must be a list of objects with function, and that with name and "
                f"arguments; {where} has {call!r:.60}: fix or remove the row"
            )
        arguments = _parsed(function.get("arguments", {}))
        if not isinstance(arguments, Mapping):
            raise InputError(
                f"arguments of a tool call must be an object or its JSON, {where} has "
                f"{function.get('arguments')!r:.60}; fix or remove the row"
            )
        known = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
        calls.append(({"id": call["id"]} if isinstance(call.get("id"), str) else {}) | known)
    return calls


def _tools(value: Any, where: str) -> list[dict[str, Any]] | None:
    tools = _parsed(value) if value else None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InputError(
            f"tools must be a list of JSON schemas, {where} has {value!r:.60}; fix or remove it"
        )
    return tools


def _parsed(value: Any) -> Any:
    """Parse text as JSON if it is JSON; flat tables keep nested values that way."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (json.JSONDecodeError, RecursionError):
        return value
