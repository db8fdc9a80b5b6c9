"""Short chat templates with the shapes of TRL's 55, and what the loss covers in each.

The templates are in templates/shapes. A name with `_training` has generation markers, as TRL's
templates of that name do; the markers are removed from the others.
"""

import json
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from specheads.base.model import FrozenBase
from specheads.core.errors import InputError
from specheads.data.bad_rows import BadRows
from specheads.data.chat import Sample, Template, turn_end_ids
from specheads.data.conversations import conversation
from specheads.data.masks import strip_spaces
from specheads.decoding.generate import generate
from specheads.training.distill.prompts import ConversationPrompts
from tests.data.conftest import BASE
from tests.data.test_chat import label_texts

SPECIAL = (
    *("<|end|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "[start]"),
    *("<|turn|>", "<|text|>", "<|/text|>", "<|channel|>", "<|/channel|>", "<|message|>"),
    *("<|call|>", "<|/call|>", "<|calls|>", "<|/calls|>", "<|result|>", "<|/result|>"),
)
TEXT = "{{ m.content }}"
SHAPED = Path(__file__).parent / "templates" / "shapes"
WIDE = "<think>\n{}\n</think>\n\n"
MARK = r"{% (?:end)?generation %}"


def turns(assistant: str, other_turn: str, asks: str) -> str:
    """Write a template of its turns and its generation prompt."""
    return (
        f"{{% for m in messages %}}{{% if m.role == 'assistant' %}}{assistant}"
        f"{{% else %}}{other_turn}{{% endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{asks}{{% endif %}}"
    )


# --- what a model writes, by its family ---------------------------------------------------------


@dataclass(frozen=True)
class Generated:
    content: str
    thought: str = ""
    calls: Sequence[dict[str, Any]] = ()
    after: str = ""
    """Role of the next message, if it is in the same text."""


Speller = Callable[[Generated], str]


def ended(
    end: str, before: str = "", thought: str = "", calls: Callable[[Any], str] | None = None
) -> Speller:
    """Write an answer, with a thought in `thought` if it has one and `before` otherwise."""

    def spell(generated: Generated) -> str:
        begin = thought.format(generated.thought) if generated.thought else before
        return (
            begin
            + generated.content
            + (calls(generated.calls) if calls and generated.calls else "")
            + end
        )

    return spell


def in_json(calls: Sequence[dict[str, Any]]) -> str:
    return "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)


def in_xml(calls: Sequence[dict[str, Any]]) -> str:
    return "".join(
        f"<tool_call>\n<function={call['name']}>\n<parameter={key}>\n{value}\n</parameter>\n"
        "</function>\n</tool_call>\n"
        for call in calls
        for key, value in call["arguments"].items()
    )


def in_python(calls: Sequence[dict[str, Any]]) -> str:
    out = [f"{c['name']}({k}={v!r})" for c in calls for k, v in c["arguments"].items()]
    return f"<|calls|>[{', '.join(out)}]<|/calls|>"


def in_tokens(calls: Sequence[dict[str, Any]]) -> str:
    out = "".join(
        f"<|call|>{call['name']}\n```json\n{json.dumps(call['arguments'])}\n```<|/call|>"
        for call in calls
    )
    return f"<|calls|>{out}<|/calls|>"


def in_llama(calls: Sequence[dict[str, Any]]) -> str:
    return json.dumps({"name": calls[0]["name"], "parameters": calls[0]["arguments"]})


def by_glm(generated: Generated) -> str:
    out = f"\n<think>{generated.thought}</think>" + (
        f"\n{generated.content}" if generated.content else ""
    )
    for call in generated.calls:
        ((key, value),) = call["arguments"].items()
        out += f"\n<tool_call>{call['name']}\n<arg_key>{key}</arg_key>\n"
        out += f"<arg_value>{value}</arg_value>\n</tool_call>"
    return out + (f"<|{generated.after}|>" if generated.after else "")


def by_glm_training(generated: Generated) -> str:
    return by_glm(replace(generated, after="tool" if generated.calls else "user"))


def by_gpt(generated: Generated) -> str:
    for call in generated.calls:
        arguments = json.dumps(call["arguments"])
        return f" to={call['name']}<|channel|>commentary<|message|>{arguments}<|calls|>"
    thought = f"<|channel|>analysis<|message|>{generated.thought}<|end|><|turn|>assistant"
    return (
        thought if generated.thought else ""
    ) + f"<|channel|>final<|message|>{generated.content}<|eos|>"


def by_gemma_4(generated: Generated) -> str:
    out = f"<|channel|>thought\n{generated.thought}\n<|/channel|>" if generated.thought else ""
    for call in generated.calls:
        ((key, value),) = call["arguments"].items()
        out += f"<|call|>call:{call['name']}{{{key}:{value}}}<|/call|>"
    return out + generated.content + ("<|result|>" if generated.calls else "<|end|>")


# --- the table ----------------------------------------------------------------------------------

ROLES, CALLS, TWO, SYSTEM = "roles must alternate", "must write all", "one call", "no system"


@dataclass(frozen=True)
class Shape:
    spell: Speller
    families: tuple[str, ...]
    refused: dict[str, str]
    eos: str = "<|end|>"

    def template(self, family: str) -> str:
        text = (SHAPED / f"{self.families[0]}.jinja").read_text(encoding="utf-8")
        if "_training" in family or family == "lfm2_2_5":
            return text
        return re.sub(rf"(?m)^ *{MARK}\n?|{MARK}(?:\n *(?={{%)|\n)?", "", text)


def shape(
    families: str, spell: Speller, *, calls: str = "", calls_2: str = "", system: str = "",
    eos: str = "<|end|>",
) -> Shape:  # fmt: skip
    """Return a shape; the last settings are the words of refusals."""
    refused = {"call": calls, "calls": calls or calls_2, "system": system}
    refused = {case: message for case, message in refused.items() if message}
    return Shape(spell, tuple(families.split()), refused, eos)


SHAPES = [
    shape("cohere cohere_training", ended("<|end|>"), calls=ROLES),
    shape("cohere2 cohere2_training", ended("<|/text|><|end|>"), calls=ROLES),
    *(
        shape(family, ended("<|eos|>", calls=in_tokens), eos="<|eos|>")
        for family in ("deepseekv3", "deepseekv3_training", "deepseekv3-0528")
    ),
    shape("gemma gemma_training", ended("<|end|>"), calls=ROLES, system=SYSTEM),
    shape("gemma3 gemma3_training", ended("<|end|>"), calls=ROLES),
    # the prompt has an empty channel, and a tool's result is a part of the model's turn
    shape("gemma4", by_gemma_4, eos="<|eos|>"),
    # the header is written again after a tool's result, but not in the prompt
    shape("diffusion_gemma diffusion_gemma_training", by_gemma_4, eos="<|eos|>"),
    # nothing ends an answer but the header of the next turn
    shape("glm4moe", by_glm, eos="<|eos|>"),
    shape("glm4moe_training", by_glm_training, eos="<|eos|>"),
    # it writes the first of several calls only
    shape("gptoss gptoss_training", by_gpt, calls_2=CALLS, eos="<|eos|>"),
    shape("idefics3 idefics3_training", ended("<|end|>", " ", " "), calls=CALLS),
    shape("lfm2 lfm2_training", ended("<|end|>"), calls=CALLS),
    shape("lfm2_2_5", ended("<|end|>", thought="<think>{}</think>", calls=in_python)),
    shape("llama3 llama3_training", ended("<|end|>"), calls=CALLS),
    shape("llama3_1 llama3_2", ended("<|end|>", calls=in_llama), calls_2=TWO),
    # without a generation prompt, and with a blank after the end
    shape("llava_next llava_next_training", ended("<|end|>", " ", " "), calls=ROLES),
    shape(
        "nemotron_3_nano nemotron_3_nano_training nemotron_3_super nemotron_3_super_training",
        ended("<|end|>", "</think>", "{}\n</think>", calls=in_xml),
    ),
    shape(
        "nemotron_3_ultra nemotron_3_ultra_training",
        ended("<|end|>", "</think>", "{}</think>", calls=in_xml),
    ),
    shape(
        "phi3 phi3_training phi3_5 phi3_5_training", ended("<|end|>"), calls=CALLS, eos="<|eos|>"
    ),
    # the markers contain the line break of the header
    shape("qwen2_5 qwen2_5_training", ended("<|end|>", calls=in_json)),
    shape("qwen2_5_vl qwen2_5_vl_training", ended("<|end|>"), calls=CALLS),
    *(
        shape(family, ended("<|end|>", "<think>\n\n</think>\n\n", WIDE, in_json))
        for family in ("qwen3", "qwen3_training")
    ),
    # two line breaks are one token, which begins in the prompt
    *(
        shape(families, ended("<|end|>", "</think>\n\n", "{}\n</think>\n\n", in_xml))
        for families in ("qwen3_5_think qwen3_6", "qwen3_5_think_training qwen3_6_training")
    ),
    # the prompt closes an empty thought
    *(
        shape(family, ended("<|end|>", "", WIDE, in_xml))
        for family in ("qwen3_5_nothink", "qwen3_5_nothink_training")
    ),
    shape(
        "qwen3_instruct_2507 qwen3_instruct_2507_training qwen3_vl qwen3_vl_training",
        ended("<|end|>", calls=in_json),
    ),
]
FAMILIES = {family: shape for shape in SHAPES for family in shape.families}

# --- the conversations --------------------------------------------------------------------------


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": f"call {name}", "function": {"name": name, "arguments": arguments}}


def say(role: str, content: str | None, **keys: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **keys}


def answer(content: str, thought: str = "") -> dict[str, Any]:
    return say("assistant", content, **({"reasoning_content": thought} if thought else {}))


SINGLE = [say("user", "Two and two?"), answer("Four.")]
MULTI = [*SINGLE, say("user", "Three?"), answer("Six, I think."), say("user", "No"), answer("7.")]
CASES: dict[str, list[dict[str, Any]]] = {
    "single": SINGLE,
    "multi": MULTI,
    "system": [say("system", "Count."), *MULTI[:4]],
    "thinking": [
        *(say("user", "Two and two?"), answer("Four.", "2 + 2")),
        *(say("user", "Three?"), answer("Six.", "3 + 3\nis even")),
    ],
    "call": [
        say("user", "Sun?"),
        say("assistant", None, tool_calls=[call("sun", city="Rome")]),
        say("tool", "yes", tool_call_id="call sun"),
        answer("Sunny."),
    ],
    "calls": [
        say("user", "Sun and rain?"),
        say("assistant", None, tool_calls=[call("sun", city="Rome"), call("rain", day=2)]),
        say("tool", "yes", tool_call_id="call sun"),
        say("tool", "no", tool_call_id="call rain"),
        answer("Sunny."),
        say("user", "Thanks"),
        answer("Bye."),
    ],
}


def in_turns(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Write a conversation as texts of user and assistant in turn, for templates without more."""
    out: list[dict[str, Any]] = []
    for message in messages:
        calls = [call["function"] for call in message.get("tool_calls", ())]
        text = "\n".join(
            [*([message["content"]] if message["content"] else []), *map(json.dumps, calls)]
        )
        role = "assistant" if message["role"] == "assistant" else "user"
        if out and out[-1]["role"] == role:
            out[-1]["content"] += f"\n\n{text}"
        else:
            out.append(say(role, text))
    return out


@cache
def reader(source: str, eos: str = "<|end|>") -> Any:
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    tokenizer.add_special_tokens({"eos_token": eos, "additional_special_tokens": list(SPECIAL)})
    tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    tokenizer.chat_template = source
    return tokenizer


def tokenizer_of(family: str) -> Any:
    return reader(FAMILIES[family].template(family), FAMILIES[family].eos)


@cache
def template_of(family: str) -> Template:
    return Template(tokenizer_of(family))


def samples(template: Template, messages: list[dict[str, Any]]) -> list[Sample]:
    converted = conversation({"messages": messages}, "line 3")
    with warnings.catch_warnings():
        # some templates leave out thoughts
        warnings.filterwarnings("ignore", ".*leaves out text of a conversation .reasoning")
        return template.samples(converted["messages"], None, "line 3")


def label_spans(sample: Sample) -> Iterator[tuple[int, int]]:
    """Yield (begin, stop) of each run in the loss."""
    pairs = enumerate(pairwise([False, *sample.loss_mask, False]))
    edges = [index for index, (before, after) in pairs if before != after]
    yield from zip(edges[::2], edges[1::2], strict=True)


def generated_texts(family: str, case: str, sizes: list[int]) -> list[str]:
    """Return what the model writes in a conversation, whose texts have so many answers."""
    messages, out = conversation({"messages": CASES[case]}, "a row")["messages"], []
    ends = list(accumulate(sizes))
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            is_last = len(out) + 1 in ends
            after = "" if is_last else messages[index + 1]["role"]
            called = [call["function"] for call in message.get("tool_calls", ())]
            generated = Generated(
                message["content"], message.get("reasoning_content", ""), called, after
            )
            out.append(FAMILIES[family].spell(generated))
    return out


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_and_their_ends_are_counted_or_the_row_is_refused(family: str, case: str):
    shape, template = FAMILIES[family], template_of(family)
    if message := shape.refused.get(case):
        with pytest.raises(InputError, match=message) as caught:
            samples(template, CASES[case])
        assert not any("\ue000" <= letter <= "\ue002" for letter in str(caught.value))
        # the line says "fix or remove the row", and data.bad_rows=drop removes it
        samples(template, in_turns(CASES[case]))
        bad = BadRows()
        bad.add(caught.value)
        with pytest.warns(UserWarning, match="1 row of x cannot be used.*left out"):
            bad.report("x", "drop")
        return
    found_samples = samples(template, CASES[case])
    tokenizer = tokenizer_of(family)
    texts = [label_texts(sample, tokenizer) for sample in found_samples]
    assert list(chain(*texts)) == generated_texts(family, case, list(map(len, texts)))
    # each text is the conversation up to an answer, as transformers renders it
    messages = conversation({"messages": CASES[case]}, "a row")["messages"]
    ends = [index for index, message in enumerate(messages, 1) if message["role"] == "assistant"]
    for sample, size in zip(found_samples, accumulate(map(len, texts)), strict=True):
        assert sample.text == template.renderer.render(messages[: ends[size - 1]])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", [shape.families[-1] for shape in SHAPES])
def test_wrong_mask_is_refused_with_its_text(family: str, case: str):
    template, messages = (
        template_of(family),
        conversation({"messages": CASES[case]}, "")["messages"],
    )
    if case in FAMILIES[family].refused:
        return
    sample = samples(template, CASES[case])[-1]
    spans = list(label_spans(sample))
    answers = [message for message in messages if message["role"] == "assistant"][-len(spans) :]
    # the first begin and the last end, each one token earlier and later
    (begin, _), (_, stop) = spans[0], spans[-1]
    wrongs = {"begin": [(begin - 1, True), (begin, False)], "end": [(stop - 1, False)]}
    wrongs["end"] += [(stop, True)] if stop < len(sample.tokens) else []
    masks = [[value] * len(sample.tokens) for value in (False, True)]
    for position, value in chain(*wrongs.values()):
        masks.append([*sample.loss_mask[:position], value, *sample.loss_mask[position + 1 :]])
    # without the last answer
    begin, stop = spans[-1]
    masks.append([*sample.loss_mask[:begin], *[False] * (stop - begin), *sample.loss_mask[stop:]])
    for mask in masks:
        with (
            pytest.raises(InputError, match="must count the assistant's answers") as caught,
            warnings.catch_warnings(action="ignore"),
        ):
            template.refuse_wrong_mask(replace(sample, loss_mask=mask), answers)
        assert caught.value.details.replace("⟦", "").replace("⟧", "") == sample.text


# --- templates without a mask -------------------------------------------------------------------

PLAIN = dict(other_turn="{{ m.role }}: {{ m.content }}{{ '\n' }}", asks="assistant:")
OTHER = dict(other_turn="<|{{ m.role }}|>{{ m.content }}<|end|>", asks="<|assistant|>Answer: ")
DOUBLE = dict(
    other_turn="<|turn|><|{{ m.role }}|>{{ m.content }}<|end|>",
    asks="<|turn|><|assistant|><|text|>",
)
OPENED = dict(other_turn="<|{{ m.role }}|>{{ m.content }}", asks="<|assistant|><think>{{ '\n' }}")
ENDED = ["Four.<|end|>", "Six, I think.<|end|>", "7.<|end|>"]


@pytest.mark.parametrize(
    ("refused", "message", "remedied"),
    [
        # no token ends an answer
        (
            turns("assistant:" + TEXT + "{{ '\n' }}", **PLAIN),
            r"must end an answer with a special token.* adds '\\n'; write {{ eos_token }} after",
            turns("assistant:" + TEXT + "{{ eos_token }}", **PLAIN),
        ),
        # the tokenizer has no such token
        (
            turns("<|assistant|>" + TEXT + "<|stop|>", **OTHER | {"asks": "<|assistant|>"}),
            r"this tokenizer's adds '<\|stop\|>'; write {{ eos_token }}",
            turns("<|assistant|>" + TEXT + "{{ eos_token }}", **OTHER | {"asks": "<|assistant|>"}),
        ),
        # the generation prompt has words that the answer lacks
        (
            turns("<|assistant|>" + TEXT + "<|end|>", **OTHER),
            "the mask is unstable .give the tokenizer a template with {% generation %} markers",
            turns("<|assistant|>{% generation %}" + TEXT + "<|end|>{% endgeneration %}", **OTHER),
        ),
        # the markers are empty
        (
            turns("<|assistant|>" + TEXT + "{% generation %}{% endgeneration %}<|end|>", **DOUBLE),
            "markers around its answers",
            turns("<|turn|><|assistant|>" + TEXT + "<|end|>", **DOUBLE),
        ),
        # only the end is marked
        (
            turns("<|assistant|>" + TEXT + "{% generation %}<|end|>{% endgeneration %}", **OPENED),
            "must write all of an answer, inside its {% generation %} markers",
            turns("<|assistant|>" + TEXT + "<|end|>", **OPENED),
        ),
    ],
    ids=["endless", "unknown", "words", "empty", "end"],
)  # fmt: skip
def test_remedy_of_a_refusal_works(refused: str, message: str, remedied: str):
    with pytest.raises(InputError, match=message) as caught:
        samples(Template(reader(refused)), MULTI)
    assert not any("\ue000" <= letter <= "\ue002" for letter in str(caught.value))
    (sample,) = samples(Template(reader(remedied)), MULTI)
    assert label_texts(sample, reader(remedied)) == ENDED


@pytest.mark.parametrize(
    ("role", "other_turn", "left_out"),
    [
        ("system", "{% if m.role != 'system' %}" + OTHER["other_turn"] + "{% endif %}", True),
        ("user", "{% if not loop.first %}" + OTHER["other_turn"] + "{% endif %}", True),
        ("tools", OTHER["other_turn"], True),
        ("tools", "{{ tools[0].function.name if tools }}" + OTHER["other_turn"], False),
        ("system", OTHER["other_turn"].replace("m.content", "m.content | trim"), False),
    ],
)  # fmt: skip
def test_text_that_a_template_leaves_out_is_told(role: str, other_turn: str, left_out: bool):
    source = turns("<|assistant|>" + TEXT + "<|end|>", other_turn, "<|assistant|>")
    messages = [say("system", " Count.\n")] * (role == "system") + MULTI
    tools = [{"type": "function", "function": {"name": "sun"}}] if role == "tools" else None
    with warnings.catch_warnings(record=True, action="always") as caught:
        Template(reader(source)).samples(
            conversation({"messages": messages}, "")["messages"], tools
        )
    assert [f"({role})" in str(warning.message) for warning in caught] == [True] * left_out


# --- several turns, and ends --------------------------------------------------------------------


def spell_letters(reader: Any, text: str, content: str) -> list[int]:
    """Return ids of a text that spell its content letter by letter, as a model may write it."""
    before, _, after = text.partition(content)
    return [id for piece in (before, *content, after) for id in reader.encode(piece)]


@pytest.mark.parametrize("thought", ["", "2 + 2"])
@pytest.mark.parametrize("family", FAMILIES)
def test_second_turn_keeps_the_ids_of_the_answer_or_is_what_the_template_makes(
    family: str, thought: str
):
    shape, template = FAMILIES[family], template_of(family)
    tokenizer = tokenizer_of(family)
    generated = shape.spell(Generated("Four.", thought, after="user"))
    if thought not in generated:
        # the family does not think
        return
    first, second = say("user", "Two and two?"), say("user", "Three?")
    # an answer in the row is not used
    row = json.dumps({"messages": [first, answer("5."), second]})
    source = ConversationPrompts([row], template)
    prompt, ids = source.first_prompt(0), spell_letters(tokenizer, generated, "Four.")
    next_prompt = source.next_prompt(0, prompt + ids, [ids])
    history = [first, answer("Four.", thought), second]
    rendered = template.renderer.render(history, add_generation_prompt=True)
    body = list(ids)
    while body[-1] in tokenizer.all_special_ids:
        body.pop()
    assert next_prompt is not None
    if strip_spaces(rendered).startswith(strip_spaces(tokenizer.decode(prompt + body))):
        # the end is the template's, which may be another one between turns
        is_whole = strip_spaces(rendered).startswith(strip_spaces(tokenizer.decode(prompt + ids)))
        beginning = prompt + (ids if is_whole else body)
        assert is_whole or family.startswith("gptoss")
        assert next_prompt[: len(beginning)] == beginning
        assert next_prompt != template.encode_prompt(history)
        assert strip_spaces(tokenizer.decode(next_prompt)) == strip_spaces(rendered)
    else:
        # the template removes a thought, or an empty one
        assert next_prompt == template.encode_prompt(history)
        assert thought or "th" in tokenizer.decode(prompt).partition("two?")[2] + generated


@pytest.mark.parametrize("family", FAMILIES)
def test_end_of_a_turn_is_the_last_token_that_the_model_writes(family: str):
    generated = tokenizer_of(family).encode(
        FAMILIES[family].spell(Generated("Four.", after="user"))
    )
    assert turn_end_ids(tokenizer_of(family)) == (generated[-1],)


def test_base_stops_at_the_end_of_the_template_and_at_its_own():
    base = FrozenBase.load(BASE, device="cpu")
    tokenizer: Any = base.tokenizer
    prompt, eos_ids = tokenizer.encode("class A:\n    def __init__(self, name"), base.eos_ids
    (long,) = generate(base, None, [prompt], max_new_tokens=24).tokens
    # a token of the text becomes the end of a turn
    end = tokenizer.convert_tokens_to_ids("name")
    tokenizer.add_special_tokens({"additional_special_tokens": ["name"]})
    tokenizer.chat_template = turns("A" + TEXT + "name", "U" + TEXT + "name", "A")
    stopping = FrozenBase(base.model, tokenizer, prepare=False)
    assert stopping.eos_ids == (*eos_ids, end)
    (short,) = generate(stopping, None, [prompt], max_new_tokens=24).tokens
    assert short == long[: long.index(end) + 1]
    # a template without an end adds none
    tokenizer.chat_template = turns("A" + TEXT, "U" + TEXT, "A")
    assert FrozenBase(base.model, tokenizer, prepare=False).eos_ids == eos_ids
