"""Short chat templates with the shapes of published ones, and what the loss covers in each.

Each string of a table is one stretch that is counted: what the model writes, with what ends it.
Each list of strings is one text of the conversation.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from specheads.core.errors import InputError
from specheads.data.chat import Sample, Template
from specheads.data.conversations import conversation

BASE = Path(__file__).parents[2] / "recipes" / "tiny_code" / "base"

CALLS = (
    "{% for c in m.tool_calls or [] %}{{ '<call>' + c.function.name + "
    "(c.function.arguments | tojson) + '</call>' }}{% endfor %}"
)
LAST = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)


def turns(assistant: str, other: str, asks: str, begin: str = "", closing: str = "") -> str:
    """Write a template; `{A}` and `{/A}` around the answer are its generation markers."""
    return (
        f"{begin}{{% for m in messages %}}{{% if m.role == 'assistant' %}}{assistant}"
        f"{{% else %}}{other}{{% endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{asks}{{% else %}}{closing}{{% endif %}}"
    )


TEXT = "{{ m.content }}" + CALLS
THINKS = "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
CLOSED = dict(
    other="<|{{ m.role }}|>{{ '\n' }}{{ m.content }}<|end|>{{ '\n' }}",
    asks="<|assistant|>{{ '\n' }}",
    closing="{{ eos_token }}",
)
HEADED = dict(
    begin="[start]",
    other="<|{{ 'observation' if m.role == 'tool' else m.role }}|>{{ '\n' }}{{ m.content }}",
    asks="<|assistant|>",
)
DROPPED = "{% if loop.index0 > ns.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
OPENED = dict(
    other="<|{{ m.role }}|>{{ m.content }}",
    asks="<|assistant|><think>{{ '\n' }}",
)
DOUBLE = dict(
    other="<|turn|><|{{ m.role }}|>{{ m.content }}<|end|>",
    asks="<|turn|><|assistant|><|text|>",
)
THOUGHTS = (
    "{% if m.reasoning_content and loop.index0 > ns.last %}<|thought|>{{ m.reasoning_content }}"
    "<|/thought|>{% endif %}"
)
CHANNELS = dict(
    begin=LAST,
    other="<|turn|>{{ m.role }}<|message|>{{ m.content }}<|end|>",
    asks="<|turn|>assistant",
)
ANALYSIS = (
    "<|turn|>assistant{% if m.reasoning_content and loop.index0 > ns.last %}<|channel|>analysis"
    "<|message|>{{ m.reasoning_content }}<|end|><|turn|>assistant{% endif %}"
)
CALLED = (
    "{% if m.tool_calls %}{% for c in m.tool_calls %}{{ '<|turn|>assistant' if not loop.first }}"
    "<|channel|>commentary to={{ c.function.name }}<|message|>"
    "{{ c.function.arguments | tojson }}<|calls|>{% endfor %}{% else %}"
)
FINAL = (
    "<|channel|>final<|message|>{{ m.content }}{{ '<|return|>' if loop.last else '<|end|>' }}"
    "{% endif %}"
)
EMPTY = dict(
    begin=LAST,
    other="<|turn|>{{ m.role }}{{ '\n' }}{{ m.content }}<|end|>{{ '\n' }}",
    asks="<|turn|>model{{ '\n' }}<|channel|>thought{{ '\n' }}<|/channel|>",
)
INNER = (
    "{% if m.reasoning_content and loop.index0 > ns.last %}<|channel|>thought{{ '\n' }}"
    "{{ m.reasoning_content }}<|/channel|>{% endif %}"
)


def shapes(header: str, answer: str, end: str = "", **others: Any) -> dict[str, str]:
    """Return a template without generation markers and one with them."""
    marked = header + "{% generation %}" + answer + end + "{% endgeneration %}"
    return {"plain": turns(header + answer + end, **others), "marked": turns(marked, **others)}


def header_in(header: str, answer: str, **others: Any) -> str:
    return turns("{% generation %}" + header + answer + "{% endgeneration %}", **others)


END = "<|end|>{{ '\n' }}"
TEMPLATES: dict[str, dict[str, str]] = {
    "closing": {
        **shapes("<|assistant|>{{ '\n' }}", THINKS + TEXT, END, **CLOSED),
        "header": header_in("<|assistant|>{{ '\n' }}", THINKS + TEXT + END, **CLOSED),
        "open": turns(
            "<|assistant|>{{ '\n' }}{% generation %}" + THINKS + TEXT + "{% endgeneration %}" + END,
            **CLOSED,
        ),
    },
    "headed": {
        **shapes("<|assistant|>", "{{ '\n' }}" + THINKS + TEXT, **HEADED),
        "header": header_in("<|assistant|>", "{{ '\n' }}" + THINKS + TEXT, **HEADED),
    },
    "dropped": {
        **shapes("<|assistant|>", "{{ '\n' }}" + DROPPED + TEXT, **HEADED | {"begin": LAST}),
    },
    "opened": {
        **shapes("<|assistant|>", THINKS + TEXT, "<|end|>", **OPENED),
        "header": header_in("<|assistant|>", THINKS + TEXT + "<|end|>", **OPENED),
    },
    "double": {
        **shapes(
            "<|turn|><|assistant|>",
            THOUGHTS + "<|text|>" + TEXT,
            "<|/text|><|end|>",
            **DOUBLE | {"begin": LAST},
        ),
    },
    "channels": {
        "plain": turns(ANALYSIS + CALLED + FINAL, **CHANNELS),
        "header": header_in("", ANALYSIS + CALLED + FINAL, **CHANNELS),
    },
    "empty": {
        **shapes("<|turn|>model{{ '\n' }}", INNER + TEXT, END, **EMPTY),
        "header": header_in("<|turn|>model{{ '\n' }}", INNER + TEXT + END, **EMPTY),
    },
}
TEMPLATES["shut"] = {
    form: source.replace("<|channel|>thought{{ '\n' }}", "<think>").replace(
        "<|/channel|>", "</think>"
    )
    for form, source in TEMPLATES["empty"].items()
}
EOS = {
    "closing": "<|endoftext|>",
    "headed": "<|endoftext|>",
    "dropped": "<|endoftext|>",
    "channels": "<|return|>",
}
SPECIAL = (
    *("<|end|>", "<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>"),
    *("<|observation|>", "[start]", "<|turn|>", "<|text|>", "<|/text|>", "<|thought|>"),
    *("<|/thought|>", "<|channel|>", "<|/channel|>", "<|message|>", "<|calls|>", "<|return|>"),
)


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": f"call {name}", "function": {"name": name, "arguments": arguments}}


def said(role: str, content: str | None, **others: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **others}


def answer(content: str, thought: str = "") -> dict[str, Any]:
    return said("assistant", content, **({"reasoning_content": thought} if thought else {}))


SINGLE = [said("user", "Two and two?"), answer("Four.")]
MULTI = [*SINGLE, said("user", "Three?"), answer("Six, I think."), said("user", "No"), answer("7.")]
CASES: dict[str, list[dict[str, Any]]] = {
    "single": SINGLE,
    "multi": MULTI,
    "system": [said("system", "Count."), *MULTI[:4]],
    "thinking": [
        *(said("user", "Two and two?"), answer("Four.", "2 + 2")),
        *(said("user", "Three?"), answer("Six.", "3 + 3\nis even")),
    ],
    "call": [
        said("user", "Sun?"),
        said("assistant", None, tool_calls=[call("sun", city="Rome")]),
        said("tool", "yes", tool_call_id="call sun"),
        answer("Sunny."),
    ],
    "calls": [
        said("user", "Sun and rain?"),
        said("assistant", None, tool_calls=[call("sun", city="Rome"), call("rain", day=2)]),
        said("tool", "yes", tool_call_id="call sun"),
        said("tool", "no", tool_call_id="call rain"),
        answer("Sunny."),
        said("user", "Thanks"),
        answer("Bye."),
    ],
}
SUN, RAIN = '<call>sun{"city": "Rome"}</call>', '<call>rain{"day": 2}</call>'


def table(end: str, before: str = "") -> dict[str, list[list[str]]]:
    """Return what is counted by a template that keeps its answers as they were."""

    def one(*texts: str) -> list[list[str]]:
        return [[before + text + end for text in texts]]

    return {
        "single": one("Four."),
        "multi": one("Four.", "Six, I think.", "7."),
        "system": one("Four.", "Six, I think."),
        "thinking": one("<think>2 + 2</think>Four.", "<think>3 + 3\nis even</think>Six."),
        "call": one(SUN, "Sunny."),
        "calls": one(SUN + RAIN, "Sunny.", "Bye."),
    }


EXPECTED: dict[str, dict[str, list[list[str]]]] = {
    "closing": table("<|end|>"),
    # the header of the next turn ends an answer, and the last answer has no end
    "headed": {
        "single": [["\nFour."]],
        "multi": [["\nFour.<|user|>", "\nSix, I think.<|user|>", "\n7."]],
        "system": [["\nFour.<|user|>", "\nSix, I think."]],
        "thinking": [
            ["\n<think>2 + 2</think>Four.<|user|>", "\n<think>3 + 3\nis even</think>Six."]
        ],
        "call": [[f"\n{SUN}<|observation|>", "\nSunny."]],
        "calls": [[f"\n{SUN}{RAIN}<|observation|>", "\nSunny.<|user|>", "\nBye."]],
    },
    "dropped": {
        "single": [["\n<think></think>Four."]],
        "multi": [
            ["\n<think></think>Four."],
            ["\n<think></think>Six, I think."],
            ["\n<think></think>7."],
        ],
        "system": [["\n<think></think>Four."], ["\n<think></think>Six, I think."]],
        "thinking": [["\n<think>2 + 2</think>Four."], ["\n<think>3 + 3\nis even</think>Six."]],
        "call": [[f"\n<think></think>{SUN}<|observation|>", "\n<think></think>Sunny."]],
        "calls": [
            [f"\n<think></think>{SUN}{RAIN}<|observation|>", "\n<think></think>Sunny."],
            ["\n<think></think>Bye."],
        ],
    },
    "opened": table("<|end|>")
    | {
        # the prompt opens the thought, and the line break is the answer's or is not there
        "thinking": [["2 + 2</think>Four.<|end|>", "3 + 3\nis even</think>Six.<|end|>"]],
    },
    "double": {
        "single": [["Four.<|/text|><|end|>"]],
        "multi": [["Four.<|/text|><|end|>", "Six, I think.<|/text|><|end|>", "7.<|/text|><|end|>"]],
        "system": [["Four.<|/text|><|end|>", "Six, I think.<|/text|><|end|>"]],
        "thinking": [
            ["<|thought|>2 + 2<|/thought|><|text|>Four.<|/text|><|end|>"],
            ["<|thought|>3 + 3\nis even<|/thought|><|text|>Six.<|/text|><|end|>"],
        ],
        "call": [[f"{SUN}<|/text|><|end|>", "Sunny.<|/text|><|end|>"]],
        "calls": [
            [f"{SUN}{RAIN}<|/text|><|end|>", "Sunny.<|/text|><|end|>", "Bye.<|/text|><|end|>"]
        ],
    },
    "channels": {
        "single": [["<|channel|>final<|message|>Four.<|return|>"]],
        "multi": [
            ["<|channel|>final<|message|>Four.<|return|>"],
            ["<|channel|>final<|message|>Six, I think.<|return|>"],
            ["<|channel|>final<|message|>7.<|return|>"],
        ],
        "system": [
            ["<|channel|>final<|message|>Four.<|return|>"],
            ["<|channel|>final<|message|>Six, I think.<|return|>"],
        ],
        "thinking": [
            [
                "<|channel|>analysis<|message|>2 + 2<|end|>"
                "<|turn|>assistant<|channel|>final<|message|>Four.<|return|>"
            ],
            [
                "<|channel|>analysis<|message|>3 + 3\nis even<|end|>"
                "<|turn|>assistant<|channel|>final<|message|>Six.<|return|>"
            ],
        ],
        "call": [
            [
                '<|channel|>commentary to=sun<|message|>{"city": "Rome"}<|calls|>',
                "<|channel|>final<|message|>Sunny.<|return|>",
            ]
        ],
        "calls": [
            [
                '<|channel|>commentary to=sun<|message|>{"city": "Rome"}<|calls|><|turn|>assistant'
                '<|channel|>commentary to=rain<|message|>{"day": 2}<|calls|>',
                "<|channel|>final<|message|>Sunny.<|return|>",
            ],
            ["<|channel|>final<|message|>Bye.<|return|>"],
        ],
    },
    "empty": table("<|end|>")
    | {
        "thinking": [
            ["<|channel|>thought\n2 + 2<|/channel|>Four.<|end|>"],
            ["<|channel|>thought\n3 + 3\nis even<|/channel|>Six.<|end|>"],
        ],
    },
}

EXPECTED["shut"] = table("<|end|>") | {
    "thinking": [[one] for one in table("<|end|>")["thinking"][0]],
}


@cache
def reader(source: str, eos: str = "<|end|>") -> Any:
    made = AutoTokenizer.from_pretrained(BASE)
    made.add_special_tokens({"eos_token": eos, "additional_special_tokens": list(SPECIAL)})
    made.add_tokens(["<think>", "</think>", "<call>", "</call>"])
    made.chat_template = source
    return made


def samples(source: str, messages: list[dict[str, Any]], eos: str = "<|end|>") -> list[Sample]:
    read = conversation({"messages": messages}, "line 3")
    return Template(reader(source, eos)).samples(read.messages, None, "line 3")


def counted(one: Sample, source: str, eos: str = "<|end|>") -> list[str]:
    """Return the text of each stretch in the loss."""
    stretches, was_in = [], False
    for token, is_in in zip(one.tokens, one.loss_mask, strict=True):
        if is_in and not was_in:
            stretches.append([])
        if is_in:
            stretches[-1].append(token)
        was_in = is_in
    return [reader(source, eos).decode(tokens) for tokens in stretches]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("shape", "form"), [(shape, form) for shape, forms in TEMPLATES.items() for form in forms]
)
def test_answers_and_their_ends_are_counted(shape: str, form: str, case: str):
    source, eos = TEMPLATES[shape][form], EOS.get(shape, "<|end|>")
    found = samples(source, CASES[case], eos)
    assert [counted(one, source, eos) for one in found] == EXPECTED[shape][case]
    # the last text is the conversation as transformers renders it
    read = conversation({"messages": CASES[case]}, "line 3").messages
    assert found[-1].tokens == reader(source, eos).apply_chat_template(read, return_dict=False)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", TEMPLATES)
def test_shifted_masks_are_refused(shape: str, case: str):
    source, eos = TEMPLATES[shape]["plain"], EOS.get(shape, "<|end|>")
    one = samples(source, CASES[case], eos)[-1]
    answers = conversation({"messages": CASES[case]}, "a row").messages
    answers = [message for message in answers if message["role"] == "assistant"]
    answers = answers[len(answers) - len(EXPECTED[shape][case][-1]) :]
    template = Template(reader(source, eos))
    template.refuse_wrong_mask(one, answers)
    # line breaks and tags before an answer are up to the template
    around = [False] * 4
    for wrong in ([*one.loss_mask[4:], *around], [*around, *one.loss_mask[:-4]]):
        with pytest.raises(InputError, match="must count the assistant's answers"):
            template.refuse_wrong_mask(replace(one, loss_mask=wrong), answers)


PLAIN = dict(other="{{ m.role }}: {{ m.content }}{{ '\n' }}", asks="assistant:")
OTHER = dict(other="<|{{ m.role }}|>{{ m.content }}<|end|>", asks="<|assistant|>Answer: ")


@pytest.mark.parametrize(
    ("refused", "message", "remedied", "told"),
    [
        # no token ends an answer
        (
            turns("assistant:" + TEXT + "{{ '\n' }}", **PLAIN),
            r"must end an answer with a special token.* adds '\\n'; write {{ eos_token }} after",
            turns("assistant:" + TEXT + "{{ eos_token }}", **PLAIN),
            ["Four.<|end|>", "Six, I think.<|end|>", "7.<|end|>"],
        ),
        # the tokenizer has no such token
        (
            turns("<|assistant|>" + TEXT + "<|stop|>", **OTHER | {"asks": "<|assistant|>"}),
            r"this tokenizer's adds '<\|stop\|>'; write {{ eos_token }}",
            turns("<|assistant|>" + TEXT + "{{ eos_token }}", **OTHER | {"asks": "<|assistant|>"}),
            ["Four.<|end|>", "Six, I think.<|end|>", "7.<|end|>"],
        ),
        # the token that opens every turn does not end one
        (
            turns(
                "<|turn|>assistant:" + TEXT,
                "<|turn|>user:{{ m.content }}", "<|turn|>assistant:",
            ),
            "must end an answer with a special token",
            turns(
                "<|turn|>assistant:" + TEXT + "{{ eos_token }}",
                "<|turn|>user:{{ m.content }}", "<|turn|>assistant:",
            ),
            ["Four.<|end|>", "Six, I think.<|end|>", "7.<|end|>"],
        ),
        # the generation prompt has words that the answer lacks
        (
            turns("<|assistant|>" + TEXT + "<|end|>", **OTHER),
            "the mask is unstable .give the tokenizer a template with {% generation %} markers",
            turns("<|assistant|>{% generation %}" + TEXT + "<|end|>{% endgeneration %}", **OTHER),
            ["Four.<|end|>", "Six, I think.<|end|>", "7.<|end|>"],
        ),
        # the markers are empty
        (
            turns("<|assistant|>" + TEXT + "{% generation %}{% endgeneration %}<|end|>", **DOUBLE),
            "move them, or remove them from the template",
            turns("<|turn|><|assistant|>" + TEXT + "<|end|>", **DOUBLE),
            ["Four.<|end|>", "Six, I think.<|end|>", "7.<|end|>"],
        ),
        # only the end is marked
        (
            turns("<|assistant|>" + TEXT + "{% generation %}<|end|>{% endgeneration %}", **OPENED),
            "move them, or remove them from the template",
            turns("<|assistant|>" + TEXT + "<|end|>", **OPENED),
            ["Four.<|end|>", "Six, I think.<|end|>", "7.<|end|>"],
        ),
    ],
    ids=["endless", "unknown", "opener", "words", "empty", "end"],
)  # fmt: skip
def test_remedy_of_a_refusal_works(refused: str, message: str, remedied: str, told: list[str]):
    with pytest.raises(InputError, match=message) as caught:
        samples(refused, MULTI)
    assert "\n" not in str(caught.value)
    assert not any("\ue000" <= letter <= "\ue002" for letter in str(caught.value))
    (one,) = samples(remedied, MULTI)
    assert counted(one, remedied) == told


@pytest.mark.parametrize(
    ("shape", "wrote"),
    [
        *(("closing", end) for end in ("", "<|end|>", "<|endoftext|>")),
        *(("headed", end) for end in ("", "<|user|>")),
        *(("double", end) for end in ("", "<|/text|>", "<|/text|><|end|>")),
    ],
)
def test_next_prompt_adds_what_the_base_did_not_write_of_the_end(shape: str, wrote: str):
    source, eos = TEMPLATES[shape]["plain"], EOS.get(shape, "<|end|>")
    template, messages = (
        Template(reader(source, eos)),
        conversation({"messages": MULTI[:3]}, "a row").messages,
    )
    begin = template.prompt(messages[:1])
    said = "\nFour." if shape == "headed" else "Four."
    ids = reader(source, eos)(said + wrote, add_special_tokens=False)["input_ids"]
    found = template.next_prompt([*begin, *ids], messages)
    wanted = template.prompt(messages)
    if wrote == "<|endoftext|>":
        # the base ended its turn with another end token, and its ids are kept
        wanted = reader(source, eos)("<|end|>", add_special_tokens=False)["input_ids"]
        assert found[: len(begin) + len(ids)] == [*begin, *ids]
        assert wanted[0] not in found[len(begin) : len(begin) + len(ids) + 2]
    else:
        assert found == wanted
