"""The reader of conversations: every common form of a row becomes one form, or is refused.

A row is used whole or refused: nothing that it says about its turns is dropped. See docs/data.md.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from specheads.core.errors import InputError
from specheads.data.files import Row, located, names

Message = dict[str, Any]
ROLES = {
    **{role: role for role in ("system", "user", "assistant", "tool")},
    **{"developer": "system", "human": "user"},
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model"), "assistant"),
    **{"function_call": "assistant", "tool_call": "assistant"},
    **{"observation": "tool", "ipython": "tool", "function": "tool", "tool_response": "tool"},
}
"""Published names of roles, and the names that templates use."""
FORMS = ("messages", "conversations", "conversation")
"""Columns of whole conversations."""
ASKS = (
    *("instruction", "prompt", "question", "query", "problem", "text", "input"),
    "question_content",
)
CONTEXTS = ("input", "context", "starter_code")
ANSWERS = ("output", "response", "completion", "answer", "code", "solution")
"""Columns of a question, of text that belongs to it, and of its answer."""
SYSTEM, TOOLS = ("system", "system_prompt"), ("tools", "functions")
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
CALLS = ("tool_calls", "function_call")
KEPT = ("name", "tool_call_id")
"""Keys of a message that templates may read, in addition to role and content."""
LEARNED = ("weight", "loss", "train", "trainable")
"""Keys of a message that decide whether it is learned."""
PARTS = {
    **{"text": "text", "input_text": "text", "output_text": "text"},
    **{"reasoning": "thought", "thinking": "thought"},
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
WORDS = re.compile(r"[_\W]+|(?<=[a-z])(?=[A-Z])")
NOT_ASKED = (
    *(*ANSWERS, "reference", "canonical_solution", "test", "entry_point"),
    *("public_test_cases", "private_test_cases"),
)
"""Columns of public prompt sets that a prompt must not hold."""


def conversation(
    row: Mapping[str, Any],
    where: str = "a row",
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
    with located(where):
        given = _present(row, ignore)
        tools = next((name for name in TOOLS if name in given), "")
        if form := next((name for name in FORMS if name in given), ""):
            read, messages = {form}, _messages(_parsed(given[form]), ignore)
        else:
            read, messages = _pair(given, ignore, is_answered=is_answered)
        if system := _one(given, SYSTEM):
            if messages[0]["role"] != "system":
                messages = [_message({"role": "system", "content": system}, ignore), *messages]
            elif messages[0]["content"] != system:
                raise InputError("a conversation has one system prompt", fault="has two")
        if not any(message["role"] == "user" for message in messages):
            roles = ", ".join(sorted({message["role"] for message in messages}))
            raise InputError("a conversation needs a turn of the user", fault=f"has only {roles}")
        refuse_unread(given, {*read, *SYSTEM, tools}, [one["content"] for one in messages])
        return {"messages": messages, "tools": _tools(tools, given.get(tools))}


def question(row: Mapping[str, Any]) -> Row:
    """Convert a row as `conversation` does, without its last answer: a prompt."""
    found = conversation(row, ignore=NOT_ASKED, is_answered=False)
    while found["messages"][-1]["role"] == "assistant":
        found["messages"].pop()
    return found


def last_message(messages: Sequence[Message], role: str) -> int:
    """Return the index of the last message of a role, which must exist."""
    return max(place for place, one in enumerate(messages) if one["role"] == role)


def first_answer(messages: Sequence[Message]) -> int:
    """Return the index of the first answer to a user, else the number of messages.

    A message of the assistant before any user message is a greeting.
    """
    roles = [message["role"] for message in messages]
    asked = roles.index("user") if "user" in roles else len(roles)
    return roles.index("assistant", asked) if "assistant" in roles[asked:] else len(roles)


def _present(value: Mapping[str, Any], ignore: Collection[str]) -> dict[str, Any]:
    return {name: one for name, one in value.items() if name not in ignore and not _is_empty(one)}


def _pair(
    given: Mapping[str, Any], ignore: Collection[str], *, is_answered: bool
) -> tuple[set[str], list[Message]]:
    """Return the messages of a question and its answer, and the columns that they are from."""
    ask = next((name for name in ASKS if name in given), "")
    answer = next((name for name in ANSWERS if name in given), "")
    if not ask or (is_answered and not answer):
        rule = "a row needs messages or conversations, or prompt, turns or a question"
        rule += " with its answer (as instruction and output)" * is_answered
        raise InputError(rule, fault=f"has {names(given) if given else 'empty columns only'}")
    columns = [ask, *(name for name in CONTEXTS if name in given and name != ask)]
    asked, said = given[ask], given.get(answer)
    if isinstance(asked, list):
        more = said if isinstance(said, list) else [said] * is_answered
        return {ask, answer}, _messages([*asked, *more], ignore)
    for name in [*columns, *([answer] if is_answered else [])]:
        if not isinstance(given[name], str):
            raise InputError(f"{name} must be text", fault=f"has {given[name]!r:.60}")
    messages: list[Message] = [
        {"role": "user", "content": "\n\n".join(given[name] for name in columns)}
    ]
    if is_answered:
        thoughts = {name: given[name] for name in THOUGHTS if name in given}
        messages.append(_message({"role": "assistant", "content": said, **thoughts}, ignore))
    return {*columns, answer, *THOUGHTS}, messages


def _messages(value: Any, ignore: Collection[str]) -> list[Message]:
    rule = "messages must be a list of objects with role and content, and not empty"
    is_list = isinstance(value, list) and all(isinstance(one, Mapping) for one in value)
    if not is_list or not value:
        raise InputError(rule, fault=f"has {value!r:.60}")
    return [_message(one, ignore) for one in value]


def _message(given: Mapping[str, Any], ignore: Collection[str]) -> Message:
    learned = {name: given[name] for name in LEARNED if given.get(name) is not None}
    value = _present(given, [*ignore, *LEARNED])
    named = _one(value, ("role", "from"))
    kind = named.lower() if isinstance(named, str) else ""
    if kind not in ROLES:
        rule = f"the role of a message must be one of {', '.join(ROLES)}"
        raise InputError(rule, fault=f"has {named!r:.40}")
    role, content, calls = ROLES[kind], _one(value, ("content", "value")), _one(value, CALLS)
    if kind in ("function_call", "tool_call"):
        content, calls = None, content
    is_assistant = role == "assistant"
    for name, weight in learned.items():
        if name not in ignore and weight != is_assistant:
            raise InputError(
                f"every answer is learned and nothing else: {name} must be 1 for the assistant, 0 "
                "for others",
                fault=f"has {weight!r:.40} for the {role}",
            )
    text, thought = _content(content)
    thought = _one({"parts": thought, **value}, ("parts", *THOUGHTS))
    if thought and "</think>" in text:
        raise InputError(
            "an answer's thoughts are in its content or in a key of their own", fault="has both"
        )
    if not is_assistant and (thought or calls):
        raise InputError("only the assistant thinks and calls tools", fault=f"has such a {role}")
    refuse_unread(value, {"role", "from", "content", "value", *KEPT, *THOUGHTS, *CALLS})
    out: Message = {"role": role, "content": text}
    out |= {name: value[name] for name in KEPT if name in value}
    if thought:
        out["reasoning_content"] = "".join(_content(thought))
    if calls:
        out["tool_calls"] = _calls(calls)
    may_be_empty = role in ("system", "tool") or "tool_calls" in out
    if not may_be_empty and not text.strip():
        raise InputError(f"a message of the {role} must not be empty", fault="has one that is")
    return out


def _content(content: Any) -> tuple[str, str]:
    """Return the text and the reasoning of a message; join its parts."""
    if content is None or isinstance(content, str):
        return content or "", ""
    found = {"text": "", "thought": ""}
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") or "text" if isinstance(part, Mapping) else type(part).__name__
        text = part.get("text", part.get(kind)) if kind in PARTS else None
        if not isinstance(text, str):
            shown = f"a part of type {kind} without text" if kind in PARTS else kind
            raise InputError(
                "the content of a message must be text, or parts with text or reasoning",
                fault=f"has {'an object' if isinstance(content, Mapping) else shown!s:.60}",
            )
        refuse_unread(part, {"type", "text", kind})
        found[PARTS[kind]] += text
    return found["text"], found["thought"]


def _calls(value: Any) -> list[dict[str, Any]]:
    """Return tool calls with their arguments as objects, which templates write as JSON."""
    calls, value = [], _parsed(value)
    for call in value if isinstance(value, list) else [value]:
        function: Any = call.get("function", call) if isinstance(call, Mapping) else None
        given = function.get("arguments") if isinstance(function, Mapping) else None
        # a call without arguments is published as null, an empty list or empty text, or their JSON
        arguments = {} if _is_empty(_parsed(given)) else _parsed(given)
        is_named = isinstance(function, Mapping) and isinstance(function.get("name"), str)
        if not is_named or not isinstance(arguments, Mapping):
            raise InputError(
                "tool_calls must be a list of objects with function, and that with name and "
                "arguments (an object, or its JSON)",
                fault=f"has {(given if is_named else call)!r:.60}",
            )
        refuse_unread(function, {"id", "type", "name", "arguments"})
        if function is not call:
            refuse_unread(call, {"id", "type", "function"})
        known = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
        calls.append(({"id": call["id"]} if isinstance(call.get("id"), str) else {}) | known)
    return calls


def _tools(column: str, value: Any) -> list[dict[str, Any]] | None:
    tools = _parsed(value)
    tools = [_parsed(tool) for tool in tools] if isinstance(tools, list) else tools
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise InputError("tools must be a list of JSON schemas", fault=f"has {value!r:.60}")
    if tools and column == "functions":
        return [{"type": "function", "function": tool} for tool in tools]
    return tools or None


def _one(given: Mapping[str, Any], keys: Iterable[str]) -> Any:
    """Return the value under the first of several names; others must not differ."""
    found = {name: given[name] for name in keys if not _is_empty(given.get(name))}
    if any(value != next(iter(found.values())) for value in found.values()):
        raise InputError(f"{' and '.join(found)} must be the same", fault="has different ones")
    return next(iter(found.values()), None)


def refuse_unread(
    given: Mapping[str, Any], read: Collection[str], texts: Sequence[str] = ()
) -> None:
    """Refuse a key that is not read and may say something about the turns.

    Metadata is not refused. With the texts of a row, its other numbers and a text that only repeats
    the turns are not refused either.
    """
    unread = []
    for name, value in given.items():
        words = [word.lower() for word in WORDS.split(name) if word.lower() != "name"]
        is_number = bool(texts) and isinstance(value, int | float) and name not in LEARNED
        is_known = name in read or is_number or bool({name, *words[-1:]} & METADATA)
        is_text = isinstance(value, str) and _repeats(value.strip(), texts)
        if not (is_known or is_text or _is_empty(value)):
            unread.append(name)
    if unread:
        raise InputError(
            "every column must be read or be known as metadata, and these are neither: "
            f"{names(unread)} (rename or remove them; for training, data.ignore can name them)",
            fault=f"has {given[unread[0]]!r:.60}",
        )


def _repeats(value: str, texts: Sequence[str]) -> bool:
    """Return whether a text is in the turns, or contains all of them."""
    return any(value in text for text in texts) or (
        bool(texts) and all(part in value for text in texts for part in text.split("\n\n"))
    )


def _is_empty(value: Any) -> bool:
    is_blank = isinstance(value, str) and not value.strip()
    return is_blank or value is None or value is False or value in ([], {})


def _parsed(value: Any) -> Any:
    """Parse text as JSON if it is JSON; flat tables keep nested values that way."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (json.JSONDecodeError, RecursionError):
        return value
