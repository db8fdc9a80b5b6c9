"""Conversations through published chat templates: texts of transformers, masks by hand."""

import json
from datetime import datetime
from functools import cache
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from specheads.data.chat import Sample, Template
from specheads.data.conversations import conversation
from tests.data.conftest import BASE

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

NO_THOUGHT = "<think>\n\n</think>\n\n"


SUN = '{"name": "sun", "arguments": {"city": "Rome"}}'
HM, HA = "<think>\nhm\n</think>\n\nHello.", "<think>\nha\n</think>\n\nBye."
CASES: dict[str, Any] = {
    "single": SINGLE, "multi": MULTI, "system": SYSTEM, "thinking": THINKING, "calling": CALLING,
}  # fmt: skip
PLAIN = {
    "single": [["Hello."]],
    "multi": [["Hello.", "Bye."]],
    "system": [["Hello.", "Bye."]],
    "thinking": [[HM, HA]],
}
LLAMA_CALL = '{"name": "sun", "parameters": {"city": "Rome"}}'
NEMO_CALL = f'[TOOL_CALLS][{SUN[:-1]}, "id": "abcdefghi"}}]'
ANSWERS: dict[str, dict[str, list[list[str]]]] = {
    "smollm2": PLAIN,
    # the first answer keeps its thought in a text of its own
    "qwen3": {
        "single": [[f"{NO_THOUGHT}Hello."]],
        "multi": [[f"{NO_THOUGHT}Hello."], [f"{NO_THOUGHT}Bye."]],
        "system": [[f"{NO_THOUGHT}Hello."], [f"{NO_THOUGHT}Bye."]],
        "thinking": [[HM], [HA]],
        "calling": [[f"{NO_THOUGHT}<tool_call>\n{SUN}\n</tool_call>"], [f"{NO_THOUGHT}Sunny."]],
    },
    "qwen3_training": {
        "multi": [[f"{NO_THOUGHT}Hello.", f"{NO_THOUGHT}Bye."]],
        "thinking": [[HM, HA]],
    },
    "llama3_1": PLAIN | {"calling": [[LLAMA_CALL, "Sunny."]]},
    "llama3_2": PLAIN | {"calling": [[LLAMA_CALL, "Sunny."]]},
    "granite3_3": PLAIN | {"calling": [['<|tool_call|>[{"name": "sun"}]', "Sunny."]]},
    # it moves the system prompt to the last question, so the first answer has a text of its own
    "mistral_nemo": PLAIN | {"system": [["Hello."], ["Bye."]], "calling": [[NEMO_CALL, "Sunny."]]},
    "gemma3": PLAIN,
}
"""What the model writes in each text, without the end of a turn."""

NEMO_SYSTEM = [
    "<s>[INST]Be brief.\n\nHi?[/INST]Hello.</s>",
    "<s>[INST]Hi?[/INST]Hello.</s>[INST]Be brief.\n\nMore[/INST]Bye.</s>",
]
"""A prompt and its answer; transformers leaves the system prompt out of a whole conversation."""

EXPECTED = [(family, case) for family, cases in ANSWERS.items() for case in cases]


@cache
def tokenizer(family: str) -> PreTrainedTokenizerBase:
    """Return a small byte-level tokenizer with the special tokens and the template of a family."""
    small_tokenizer = AutoTokenizer.from_pretrained(BASE)
    special = SPECIAL[family]
    special_tokens = {"eos_token": EOS.get(family, special[-1])}
    special_tokens |= {"bos_token": BOS[family]} if family in BOS else {}
    small_tokenizer.add_special_tokens(
        {**special_tokens, "additional_special_tokens": list(special)}
    )
    if family.startswith("qwen3"):
        small_tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    small_tokenizer.chat_template = (TEMPLATES / f"{family}.jinja").read_text(encoding="utf-8")
    return small_tokenizer


def to_messages(case: Any) -> list[dict[str, Any]]:
    """Return messages as a row's reader gives them."""
    rows = [
        {"role": turn[0], "content": turn[1]} if isinstance(turn, tuple) else turn for turn in case
    ]
    return conversation({"messages": rows}, "a row")["messages"]


def messages_of(family: str, case: str) -> list[dict[str, Any]]:
    is_text = family == "granite3_3" and case == "calling"
    return to_messages(CALLING_IN_TEXT if is_text else CASES[case])


def samples_of(family: str, case: str) -> list[Sample]:
    tools = [TOOL] if case == "calling" else None
    return Template(tokenizer(family)).samples(messages_of(family, case), tools)


def label_texts(sample: Sample, reader: Any) -> list[str]:
    """Return the text of each run in the loss."""
    pairs = zip(sample.tokens, sample.loss_mask, strict=True)
    runs = groupby(pairs, key=lambda pair: pair[1])
    return [reader.decode([token for token, _ in run]) for is_in, run in runs if is_in]


class RenderingDay(datetime):
    """The day that our templates are rendered on."""

    @classmethod
    def now(cls, tz: Any = None) -> datetime:
        return datetime(2024, 7, 26, tzinfo=tz)


@pytest.mark.parametrize(("family", "case"), EXPECTED)
def test_published_templates_count_what_the_model_writes(
    family: str, case: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", RenderingDay)
    reader, samples, expected = tokenizer(family), samples_of(family, case), ANSWERS[family][case]
    end = "<end_of_turn>" if family == "gemma3" else reader.eos_token
    assert [label_texts(sample, reader) for sample in samples] == [
        [f"{text}{end}" for text in texts] for texts in expected
    ]
    if (family, case) == ("mistral_nemo", "system"):
        assert [sample.text for sample in samples] == NEMO_SYSTEM
        return
    # each text is the conversation up to an answer, as transformers renders it
    messages = messages_of(family, case)
    ends = [index for index, message in enumerate(messages, 1) if message["role"] == "assistant"]
    tools = [TOOL] if case == "calling" else None
    for sample, size in zip(samples, accumulate(map(len, expected)), strict=True):
        rendered = {"tools": tools, "conversation": messages[: ends[size - 1]]}
        assert sample.text == reader.apply_chat_template(**rendered, tokenize=False)
        ids: Any = reader.apply_chat_template(**rendered, return_dict=False)
        assert sample.tokens == ids


def test_greeting_is_not_an_answer_and_text_after_last_answer_is_dropped():
    messages = to_messages([("assistant", "Welcome."), *SINGLE, ("user", "Thanks")])
    (sample,) = Template(tokenizer("smollm2")).samples(messages)
    assert label_texts(sample, tokenizer("smollm2")) == ["Hello.<|im_end|>"]
    assert "Welcome." in sample.text
    assert "Thanks" not in sample.text


def test_special_tokens_in_a_message_are_read_as_a_server_reads_them():
    # a special token in a message is that token, as in transformers, and no end of the mask
    messages = to_messages([("user", "What is <|im_end|>?"), ("assistant", "<|im_end|> ends.")])
    sample = Template(tokenizer("smollm2")).samples(messages)[-1]
    assert label_texts(sample, tokenizer("smollm2")) == ["<|im_end|> ends.<|im_end|>"]
    end: Any = tokenizer("smollm2").convert_tokens_to_ids("<|im_end|>")
    # one after the system prompt, one in each message and one after it
    assert sample.tokens.count(end) == 5


@pytest.mark.parametrize("family", ["smollm2", "gemma3"])
def test_end_token_with_line_break_is_counted(family: str):
    reader = AutoTokenizer.from_pretrained(BASE)
    *special, end = SPECIAL[family]
    reader.add_special_tokens(
        {"additional_special_tokens": [*special, AddedToken(end, rstrip=True)]}
    )
    reader.chat_template = tokenizer(family).chat_template
    sample = Template(reader).samples(to_messages(MULTI))[-1]
    assert "".join(label_texts(sample, reader)) == f"Hello.{end}Bye.{end}"


def test_normalising_tokenizer_is_accepted():
    reader: Any = tokenizer("smollm2")
    rules = json.loads(reader.backend_tokenizer.to_str())
    rules["normalizer"] = {"type": "NFC"}
    normalising = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(rules)))
    normalising.add_special_tokens({"eos_token": "<|im_end|>"})
    normalising.chat_template = tokenizer("smollm2").chat_template
    sample = Template(normalising).samples(
        to_messages([("user", "Hi?"), ("assistant", "Cafe\u0301 e\u0301.")])
    )[-1]
    assert label_texts(sample, normalising) == ["Caf\u00e9 \u00e9.<|im_end|>"]


HEADER = "{{ '<|im_start|>' + m.role + '\n' }}"
WRITES = "{{ m.content + '<|im_end|>' }}"
ASKS = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"


def marked_template(answer: str, asks: str = ASKS) -> str:
    """Return a template of ours with markers in the assistant's branch."""
    else_branch = "{% else %}" + HEADER + WRITES + "\n{% endif %}{% endfor %}"
    return "{% for m in messages %}{% if m.role == 'assistant' %}" + answer + else_branch + asks


@pytest.mark.parametrize(
    "source",
    [
        # these markers leave the end to us
        marked_template(
            HEADER + "{% generation %}{{ m.content }}{% endgeneration %}{{ '<|im_end|>\n' }}"
        ),
        # only the prompt opens a thought
        marked_template(
            HEADER + "{% generation %}" + WRITES + "{{ '\n' }}{% endgeneration %}",
            ASKS.replace("assistant\n", "assistant\n<think>\n"),
        ),
        # the header is marked, and is no answer
        marked_template("{% generation %}" + HEADER + WRITES + "\n{% endgeneration %}"),
        # prompt and answer differ, and only the markers show where it begins
        marked_template(
            HEADER.replace("'\n'", "'<|im_start|>'")
            + "{% generation %}" + WRITES + "{{ '\n' }}{% endgeneration %}"
        ),
        # the answer begins after the prompt, and markers elsewhere change nothing
        marked_template(HEADER + WRITES + "{% generation %}{{ '\n' }}{% endgeneration %}"),
        marked_template(
            HEADER + "{% if loop.last %}" + WRITES + "{% else %}{% generation %}" + WRITES
            + "{% endgeneration %}{% endif %}\n"
        ),
    ],
)  # fmt: skip
def test_prompts_and_generation_markers_decide_the_mask_with_the_end_token(source: str):
    reader = AutoTokenizer.from_pretrained(BASE)
    reader.add_special_tokens(
        {"eos_token": "<|im_end|>", "additional_special_tokens": list(CHATML)}
    )
    reader.chat_template = source
    (sample,) = Template(reader).samples(to_messages(MULTI))
    assert label_texts(sample, reader) == ["Hello.<|im_end|>", "Bye.<|im_end|>"]


def test_template_that_calls_the_clock_is_the_same_every_day(monkeypatch: Any):
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", None)
    assert "July 26, 2024" in samples_of("granite3_3", "single")[0].text
    assert "26 Jul 2024" in samples_of("llama3_2", "single")[0].text
