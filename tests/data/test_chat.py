"""Conversations through published chat templates: ids and masks against tables written by hand.

In a table a piece between bars is counted: what the model itself writes, with what ends it.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from specheads.core.errors import InputError
from specheads.data.chat import Sample, Template
from specheads.data.conversations import conversation
from specheads.data.prompts import held_out
from specheads.data.settings import Data

BASE = Path(__file__).parents[2] / "recipes" / "tiny_code" / "base"
TEMPLATES = Path(__file__).parent / "templates"

CHATML = ("<|im_start|>", "<|im_end|>")
LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
MISTRAL = (
    *("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
)
SPECIAL: dict[str, tuple[str, ...]] = {
    "smollm2": CHATML,
    "qwen3": CHATML,
    "qwen3_training": CHATML,
    "llama3_1": LLAMA,
    "llama3_2": LLAMA,
    "granite3_3": ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"),
    "mistral_nemo": MISTRAL,
    "gemma3": ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
}
BOS = {"llama3_1": LLAMA[0], "llama3_2": LLAMA[0], "mistral_nemo": "<s>", "gemma3": "<bos>"}
EOS = {"gemma3": "<eos>", "mistral_nemo": "</s>"}

SINGLE = [("user", "Hi?"), ("assistant", "Hello.")]
MULTI = [*SINGLE, ("user", "More"), ("assistant", "Bye.")]
SYSTEM = [("system", "Be brief."), *MULTI]
THINKING = [
    *(("user", "Hi?"), ("assistant", "<think>\nhm\n</think>\n\nHello.")),
    *(("user", "More"), ("assistant", "<think>\nha\n</think>\n\nBye.")),
]
CALL = {"id": "abcdefghi", "function": {"name": "sun", "arguments": '{"city": "Rome"}'}}
TOOL = {"type": "function", "function": {"name": "sun", "parameters": {}}}
CALLING: list[Any] = [
    {"role": "user", "content": "Sun?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "yes", "tool_call_id": "abcdefghi"},
    {"role": "assistant", "content": "Sunny."},
]
CALLING_IN_TEXT: list[Any] = [
    CALLING[0],
    {"role": "assistant", "content": '<|tool_call|>[{"name": "sun"}]'},
    *CALLING[2:],
]
"""Granite's template has no place for calls: it publishes them in the answer's text."""

SMOL = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
LLAMA_SYSTEM = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
    "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
)
LLAMA_USER = "<|start_header_id|>user<|end_header_id|>\n\n"
LLAMA_ASKS = "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
LLAMA_TOOLS = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nEnvironment: ipython\n"
    "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n<|eot_id|>"
    f"{LLAMA_USER}Given the following functions, please respond with a JSON for a function call "
    "with its proper arguments that best answers the given prompt.\n\nRespond in the format "
    '{"name": function name, "parameters": dictionary of argument name and its value}.'
    'Do not use variables.\n\n{\n    "type": "function",\n    "function": {\n        '
    '"name": "sun",\n        "parameters": {}\n    }\n}\n\nSun?'
)
QWEN_TOOLS = (
    "<|im_start|>system\n# Tools\n\nYou may call one or more functions to assist with the user "
    "query.\n\nYou are provided with function signatures within <tools></tools> XML tags:\n<tools>"
    '\n{"type": "function", "function": {"name": "sun", "parameters": {}}}\n</tools>\n\nFor each '
    "function call, return a json object with function name and arguments within <tool_call>"
    '</tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": '
    "<args-json-object>}\n</tool_call><|im_end|>\n<|im_start|>user\nSun?<|im_end|>\n"
)
GRANITE = (
    "<|start_of_role|>system<|end_of_role|>Knowledge Cutoff Date: April 2024. Today's Date: "
    "July 26, 2024. You are Granite, developed by IBM. You are a helpful "
)
GRANITE_TOOLS = (
    f"{GRANITE}assistant with access to the following tools. When a tool is required to answer the "
    "user's query, respond only with <|tool_call|> followed by a JSON list of tools used. If a "
    "tool does not exist in the provided list of tools, notify the user that you do not have the "
    "ability to fulfill the request.<|end_of_text|>\n<|start_of_role|>available_tools"
    '<|end_of_role|>[\n    {\n        "type": "function",\n        "function": {\n            '
    '"name": "sun",\n            "parameters": {}\n        }\n    }\n]<|end_of_text|>\n'
)
NEMO_TOOLS = (
    '<s>[AVAILABLE_TOOLS][{"type": "function", "function": {"name": "sun", "parameters": {}}}]'
    "[/AVAILABLE_TOOLS][INST]Sun?[/INST]"
)
NO_THOUGHT = "<think>\n\n</think>\n\n"


def chatml(*turns: str, system: str = "", ends: str = "\n") -> str:
    """Write questions and answers in turn."""
    out = f"{system}<|im_end|>\n" if system else ""
    for place, text in enumerate(turns):
        role = "assistant" if place % 2 else "user"
        said = f"|{text}<|im_end|>|" if place % 2 else f"{text}<|im_end|>"
        out += f"<|im_start|>{role}\n{said}{ends}"
    return out


def qwen(asked: str, said: str, again: str, answer: str, system: str = "") -> list[str]:
    """Write what qwen3 makes of two turns: the first answer keeps its thought for itself."""
    first = chatml(asked, said, system=system)
    history = first.replace("|" + said, said.rpartition("\n\n")[2]).replace(
        "<|im_end|>|", "<|im_end|>"
    )
    return [first, history + chatml(again, answer)]


def llama(*turns: str, system: str = "") -> str:
    out = f"{LLAMA_SYSTEM}{system}<|eot_id|>"
    for asked, said in zip(turns[::2], turns[1::2], strict=True):
        out += f"{LLAMA_USER}{asked}{LLAMA_ASKS}|{said}<|eot_id|>|"
    return out


def granite(*turns: str, system: str = f"{GRANITE}AI assistant.") -> str:
    system = system if system.startswith("<") else f"<|start_of_role|>system<|end_of_role|>{system}"
    out = f"{system}<|end_of_text|>\n"
    for asked, said in zip(turns[::2], turns[1::2], strict=True):
        out += f"<|start_of_role|>user<|end_of_role|>{asked}<|end_of_text|>\n"
        out += f"<|start_of_role|>assistant<|end_of_role|>|{said}<|end_of_text|>|\n"
    return out


def gemma(*turns: str) -> str:
    out = "<bos>"
    for asked, said in zip(turns[::2], turns[1::2], strict=True):
        out += f"<start_of_turn>user\n{asked}<end_of_turn>\n"
        out += f"<start_of_turn>model\n|{said}<end_of_turn>|\n"
    return out


HM, HA = "<think>\nhm\n</think>\n\nHello.", "<think>\nha\n</think>\n\nBye."
CASES: dict[str, Any] = {
    "single": SINGLE, "multi": MULTI, "system": SYSTEM, "thinking": THINKING, "calling": CALLING,
}  # fmt: skip
EXPECTED: dict[tuple[str, str], list[str]] = {
    ("smollm2", "single"): [chatml("Hi?", "Hello.", system=SMOL)],
    ("smollm2", "multi"): [chatml("Hi?", "Hello.", "More", "Bye.", system=SMOL)],
    ("smollm2", "system"): [
        chatml("Hi?", "Hello.", "More", "Bye.", system="<|im_start|>system\nBe brief.")
    ],
    ("smollm2", "thinking"): [chatml("Hi?", HM, "More", HA, system=SMOL)],
    ("qwen3", "single"): [chatml("Hi?", f"{NO_THOUGHT}Hello.")],
    ("qwen3", "multi"): qwen("Hi?", f"{NO_THOUGHT}Hello.", "More", f"{NO_THOUGHT}Bye."),
    ("qwen3", "system"): qwen(
        *("Hi?", f"{NO_THOUGHT}Hello.", "More", f"{NO_THOUGHT}Bye."),
        system="<|im_start|>system\nBe brief.",
    ),
    ("qwen3", "thinking"): qwen("Hi?", HM, "More", HA),
    ("qwen3", "calling"): [
        f"{QWEN_TOOLS}<|im_start|>assistant\n|{NO_THOUGHT}<tool_call>\n"
        '{"name": "sun", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>|\n',
        f"{QWEN_TOOLS}<|im_start|>assistant\n<tool_call>\n"
        '{"name": "sun", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nyes\n</tool_response><|im_end|>\n"
        f"<|im_start|>assistant\n|{NO_THOUGHT}Sunny.<|im_end|>|\n",
    ],
    ("qwen3_training", "multi"): [
        chatml("Hi?", f"{NO_THOUGHT}Hello.", "More", f"{NO_THOUGHT}Bye.")
    ],
    ("qwen3_training", "thinking"): [chatml("Hi?", HM, "More", HA)],
    **{
        (name, case): table
        for name in ("llama3_1", "llama3_2")
        for case, table in {
            "single": [llama("Hi?", "Hello.")],
            "multi": [llama("Hi?", "Hello.", "More", "Bye.")],
            "system": [llama("Hi?", "Hello.", "More", "Bye.", system="Be brief.")],
            "thinking": [llama("Hi?", HM, "More", HA)],
            "calling": [
                f'{LLAMA_TOOLS}{LLAMA_ASKS}|{{"name": "sun", "parameters": {{"city": "Rome"}}}}'
                '<|eot_id|>|<|start_header_id|>ipython<|end_header_id|>\n\n"yes"'
                f"{LLAMA_ASKS}|Sunny.<|eot_id|>|"
            ],
        }.items()
    },
    ("granite3_3", "single"): [granite("Hi?", "Hello.")],
    ("granite3_3", "multi"): [granite("Hi?", "Hello.", "More", "Bye.")],
    ("granite3_3", "system"): [granite("Hi?", "Hello.", "More", "Bye.", system="Be brief.")],
    ("granite3_3", "thinking"): [granite("Hi?", HM, "More", HA)],
    ("granite3_3", "calling"): [
        f"{GRANITE_TOOLS}<|start_of_role|>user<|end_of_role|>Sun?<|end_of_text|>\n"
        '<|start_of_role|>assistant<|end_of_role|>|<|tool_call|>[{"name": "sun"}]<|end_of_text|>|\n'
        "<|start_of_role|>tool<|end_of_role|>yes<|end_of_text|>\n"
        "<|start_of_role|>assistant<|end_of_role|>|Sunny.<|end_of_text|>|\n"
    ],
    ("mistral_nemo", "single"): ["<s>[INST]Hi?[/INST]|Hello.</s>|"],
    ("mistral_nemo", "multi"): ["<s>[INST]Hi?[/INST]|Hello.</s>|[INST]More[/INST]|Bye.</s>|"],
    # it moves the system prompt to the last question, so the first answer has a text of its own
    ("mistral_nemo", "system"): [
        "<s>[INST]Be brief.\n\nHi?[/INST]|Hello.</s>|",
        "<s>[INST]Hi?[/INST]Hello.</s>[INST]Be brief.\n\nMore[/INST]|Bye.</s>|",
    ],
    ("mistral_nemo", "thinking"): [f"<s>[INST]Hi?[/INST]|{HM}</s>|[INST]More[/INST]|{HA}</s>|"],
    ("mistral_nemo", "calling"): [
        f'{NEMO_TOOLS}|[TOOL_CALLS][{{"name": "sun", "arguments": {{"city": "Rome"}}, "id": '
        '"abcdefghi"}]</s>|[TOOL_RESULTS]{"content": yes, "call_id": "abcdefghi"}[/TOOL_RESULTS]'
        "|Sunny.</s>|"
    ],
    ("gemma3", "single"): [gemma("Hi?", "Hello.")],
    ("gemma3", "multi"): [gemma("Hi?", "Hello.", "More", "Bye.")],
    ("gemma3", "system"): [gemma("Be brief.\n\nHi?", "Hello.", "More", "Bye.")],
    ("gemma3", "thinking"): [gemma("Hi?", HM, "More", HA)],
}


@cache
def tokenizer(family: str) -> PreTrainedTokenizerBase:
    """Return a small byte-level tokenizer with the special tokens and the template of a family."""
    made = AutoTokenizer.from_pretrained(BASE)
    special = SPECIAL[family]
    named = {"eos_token": EOS.get(family, special[-1])}
    named |= {"bos_token": BOS[family]} if family in BOS else {}
    made.add_special_tokens({**named, "additional_special_tokens": list(special)})
    if family.startswith("qwen3"):
        made.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    made.chat_template = (TEMPLATES / f"{family}.jinja").read_text(encoding="utf-8")
    return made


def said(case: Any) -> list[dict[str, Any]]:
    """Return messages as a row's reader gives them."""
    rows = [{"role": one[0], "content": one[1]} if isinstance(one, tuple) else one for one in case]
    return conversation({"messages": rows}, "a row").messages


def sampled(family: str, case: str) -> list[Sample]:
    is_text = family == "granite3_3" and case == "calling"
    messages = said(CALLING_IN_TEXT if is_text else CASES[case])
    return Template(tokenizer(family)).samples(messages, [TOOL] if case == "calling" else None)


def table(family: str, text: str) -> tuple[list[int], list[bool]]:
    """Return the ids and the mask of a text in whose pieces every other one is counted."""
    ids, counted = [], []
    for place, piece in enumerate(text.split("|_|")):
        found: Any = tokenizer(family)(piece, add_special_tokens=False)["input_ids"]
        ids += found
        counted += [place % 2 == 1] * len(found)
    return ids, counted


def barred(text: str) -> str:
    """Mark the bars that are not those of a special token, such as <|im_end|>."""
    plain = text.replace("<|", "\0").replace("|>", "\1").replace("|", "|_|")
    return plain.replace("\0", "<|").replace("\1", "|>")


@pytest.mark.parametrize(("family", "case"), EXPECTED)
def test_published_templates_give_hand_written_ids_and_masks(family: str, case: str):
    found = sampled(family, case)
    wanted = [barred(text) for text in EXPECTED[family, case]]
    assert [one.text for one in found] == [text.replace("|_|", "") for text in wanted]
    assert [(one.tokens, one.loss_mask) for one in found] == [table(family, one) for one in wanted]


def test_greeting_is_not_an_answer_and_text_after_last_answer_is_dropped():
    messages = said([("assistant", "Welcome."), *SINGLE, ("user", "Thanks")])
    (one,) = Template(tokenizer("smollm2")).samples(messages)
    text = chatml("Hi?", "Hello.", system=f"{SMOL}<|im_end|>\n<|im_start|>assistant\nWelcome.")
    assert one.text == barred(text).replace("|_|", "")
    assert (one.tokens, one.loss_mask) == table("smollm2", barred(text))


def test_held_out_prompt_ends_before_first_answer_and_keeps_tools(tmp_path, monkeypatch):
    chosen = tokenizer("smollm2")
    told = "{% if tools %}Call {{ tools[0].function.name }}. {% endif %}"
    monkeypatch.setattr(chosen, "chat_template", f"{told}{chosen.chat_template}")
    tools = [{"type": "function", "function": {"name": "clock", "parameters": {}}}]
    file = tmp_path / "a.jsonl"
    with file.open("w") as out:
        for number in range(40):
            turns = [("assistant", "Welcome."), ("user", f"Hi {number}?"), ("assistant", "Hello.")]
            out.write(json.dumps({"messages": said(turns), "tools": tools}) + "\n")
    found = held_out(Data(source="chat", path=str(file)), "validation", chosen, 64, 1)
    (text,) = (one.text for one in found)
    assert text.startswith("Call clock. ")
    assert "Welcome." in text
    assert text.endswith("?<|im_end|>\n<|im_start|>assistant\n")


def test_special_tokens_in_a_message_are_read_as_a_server_reads_them():
    # a special token in a message is that token, as in transformers, and no end of the mask
    messages = said([("user", "What is <|im_end|>?"), ("assistant", "<|im_end|> ends.")])
    one = Template(tokenizer("smollm2")).samples(messages)[-1]
    text = barred(chatml("What is <|im_end|>?", "<|im_end|> ends.", system=SMOL))
    assert (one.tokens, one.loss_mask) == table("smollm2", text)


def test_token_that_begins_in_prompt_is_not_counted():
    # "\n\n" is one token, and its first half the generation prompt's
    one = Template(tokenizer("smollm2")).samples(
        said([("user", "Hi?"), ("assistant", "\nHello.")])
    )[-1]
    begin = one.loss_mask.index(True)
    assert tokenizer("smollm2").decode(one.tokens[begin - 1]) == "\n\n"
    counted = [token for token, is_in in zip(one.tokens, one.loss_mask, strict=True) if is_in]
    assert tokenizer("smollm2").decode(counted) == "Hello.<|im_end|>"


@pytest.mark.parametrize("family", ["smollm2", "gemma3"])
def test_end_token_with_line_break_is_counted(family: str):
    made = AutoTokenizer.from_pretrained(BASE)
    *others, end = SPECIAL[family]
    made.add_special_tokens({"additional_special_tokens": [*others, AddedToken(end, rstrip=True)]})
    made.chat_template = tokenizer(family).chat_template
    one = Template(made).samples(said(MULTI))[-1]
    counted = [token for token, is_in in zip(one.tokens, one.loss_mask, strict=True) if is_in]
    assert made.decode(counted) == f"Hello.{end}Bye.{end}"


def test_normalising_tokenizer_is_accepted():
    reader: Any = tokenizer("smollm2")
    rules = json.loads(reader.backend_tokenizer.to_str())
    rules["normalizer"] = {"type": "NFC"}
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(rules)))
    made.add_special_tokens({"eos_token": "<|im_end|>"})
    made.chat_template = tokenizer("smollm2").chat_template
    one = Template(made).samples(said([("user", "Hi?"), ("assistant", "Cafe\u0301 e\u0301.")]))[-1]
    counted = [token for token, is_in in zip(one.tokens, one.loss_mask, strict=True) if is_in]
    assert made.decode(counted) == "Caf\u00e9 \u00e9.<|im_end|>"


@pytest.mark.parametrize(
    ("family", "case", "told"),
    [
        ("smollm2", CALLING, "writes '<.im_end.>': '' and calls sun"),
        ("granite3_3", CALLING, "and calls sun"),
        ("gemma3", CALLING, "must take the messages of a row: Conversation roles must"),
        (
            "llama3_1",
            [CALLING[0], CALLING[1] | {"content": "Let me see."}],
            "writes .*: 'Let me see.' and calls sun",
        ),
        ("mistral_nemo", [*SINGLE, ("assistant", "More.")], "roles must alternate"),
        ("smollm2", SINGLE[:1], "needs an answer of the assistant .*; line 3 lacks one"),
        ("smollm2", [("assistant", "Welcome."), *SINGLE[:1]], "needs an answer"),
    ],
)
def test_template_that_drops_or_refuses_a_message_is_refused(family: str, case: Any, told: str):
    with pytest.raises(InputError, match=told) as caught:
        Template(tokenizer(family)).samples(said(case), [TOOL], "line 3")
    assert "\n" not in str(caught.value)


HEADER = "{{ '<|im_start|>' + m.role + '\n' }}"
SAID = "{{ m.content + '<|im_end|>' }}"
ASKS = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"


def marked(answer: str, asks: str = ASKS) -> str:
    """Return a template of ours with markers in the assistant's branch."""
    other = "{% else %}" + HEADER + SAID + "\n{% endif %}{% endfor %}"
    return "{% for m in messages %}{% if m.role == 'assistant' %}" + answer + other + asks


def with_template(source: str) -> Template:
    made = AutoTokenizer.from_pretrained(BASE)
    made.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": list(CHATML)})
    made.chat_template = source
    return Template(made)


@pytest.mark.parametrize(
    "source",
    [
        marked(HEADER + "{% generation %}" + SAID + "{{ '\n' }}{% endgeneration %}"),
        # these markers leave the end to us
        marked(HEADER + "{% generation %}{{ m.content }}{% endgeneration %}{{ '<|im_end|>\n' }}"),
        # both the prompt and the markers begin with the thought
        marked(
            HEADER + "{% generation %}{{ '<think>\n' }}" + SAID + "{{ '\n' }}{% endgeneration %}",
            ASKS.replace("assistant\n", "assistant\n<think>\n"),
        ),
        # only the prompt opens a thought
        marked(
            HEADER + "{% generation %}" + SAID + "{{ '\n' }}{% endgeneration %}",
            ASKS.replace("assistant\n", "assistant\n<think>\n"),
        ),
        marked(HEADER + SAID + "\n", ASKS.replace("assistant\n", "assistant\n<think>\n")),
        # the header is marked, and is no answer
        marked("{% generation %}" + HEADER + SAID + "\n{% endgeneration %}"),
        # prompt and answer differ, and only the markers show where it begins
        marked(
            HEADER.replace("'\n'", "'<|im_start|>'")
            + "{% generation %}" + SAID + "{{ '\n' }}{% endgeneration %}"
        ),
        # the answer begins behind the prompt, and markers elsewhere change nothing
        marked(HEADER + SAID + "{% generation %}{{ '\n' }}{% endgeneration %}"),
        marked(
            HEADER + "{% if loop.last %}" + SAID + "{% else %}{% generation %}" + SAID
            + "{% endgeneration %}{% endif %}\n"
        ),
    ],
)  # fmt: skip
def test_prompts_and_generation_markers_decide_the_mask_with_the_end_token(source: str):
    (one,) = with_template(source).samples(said(MULTI))
    counted = [token for token, is_in in zip(one.tokens, one.loss_mask, strict=True) if is_in]
    text = with_template(source)._tokenizer.decode(counted)
    assert text == "Hello.<|im_end|>Bye.<|im_end|>"


def test_next_prompt_keeps_the_ids_of_the_answer():
    template, reader = Template(tokenizer("llama3_1")), tokenizer("llama3_1")
    # letter by letter, and with a blank that the template trims
    odd = [token for one in " Hello. " for token in reader(one, add_special_tokens=False).input_ids]
    first = template.prompt(said(SINGLE[:1]))
    messages = said([*SINGLE[:1], ("assistant", " Hello. "), ("user", "More")])
    assert template.next_prompt([*first, *odd], messages)[: len(first) + len(odd)] == [*first, *odd]


def test_template_that_calls_the_clock_is_the_same_every_day(monkeypatch: Any):
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", None)
    assert "July 26, 2024" in sampled("granite3_3", "single")[0].text
    assert "26 Jul 2024" in sampled("llama3_2", "single")[0].text
