"""Chat in the terminal: answers and the origin of each token."""

import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from specheads.base.model import FrozenBase
from specheads.commands import chat
from specheads.commands._call import call
from specheads.commands.chat import ChatAnswer, Dialogue
from specheads.config import data_dir
from specheads.core.errors import InputError
from specheads.decoding.generate import generate
from specheads.decoding.loop import BASE_ORIGIN, Origin
from specheads.decoding.sampling import GREEDY
from specheads.decoding.trees.policies import chain
from specheads.heads.load import build_for_base
from tests import tiny
from tests.oracle import Oracle

BASE_FOLDER = data_dir("recipes") / "tiny_code" / "base"
ASKED = "def add(first, second):\n"


@pytest.fixture(scope="module")
def head(base: FrozenBase, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a head that was never trained."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("head") / "medusa"
    build_for_base({"kind": "medusa", "depth": 2}, base).save_pretrained(folder)
    return folder


def tokenizer_of(base: FrozenBase) -> PreTrainedTokenizerBase:
    assert base.tokenizer is not None
    return base.tokenizer


def answered(base: FrozenBase) -> ChatAnswer:
    """Return a complete answer, whose drafter is always right."""
    prompt = Dialogue(tokenizer_of(base)).prompt_for(ASKED)
    tokens = generate(base, None, [prompt], max_new_tokens=24).tokens[0]
    drafter = Oracle([prompt + tokens], 3, base.vocab_size)
    answer = ChatAnswer(base, prompt, drafter, chain(3), 24, GREEDY)
    while not answer.is_over:
        answer.step()
    return answer


def test_answer_equals_the_base_and_has_the_origin_of_each_token(base: FrozenBase):
    answer = answered(base)
    tokens = generate(base, None, [answer.stream.request.prompt], max_new_tokens=24).tokens[0]
    assert answer.stream.tokens == tokens
    text = "".join(piece for piece, _ in answer.pieces)
    assert text == answer.stream.text == tokenizer_of(base).decode(tokens)
    # one token of the prompt's forward, then three drafts and one of the base per step
    drafts = [Origin("drafted", depth) for depth in (1, 2, 3)]
    origins = [origin for _, origin in answer.pieces]
    assert origins[:24] == [BASE_ORIGIN, *[*drafts, BASE_ORIGIN] * 5, *drafts]
    assert answer.summary().startswith("3.83 tokens per forward, ")
    assert answer.tokens_per_second > 0


def test_dialogue_uses_the_chat_template_and_keeps_earlier_tokens(base: FrozenBase):
    tokenizer: Any = FrozenBase.load(BASE_FOLDER, device="cpu").tokenizer
    tokenizer.chat_template, end = tiny.CHAT, tokenizer.eos_token
    dialogue = Dialogue(tokenizer, "be brief")
    first = dialogue.prompt_for("one?")
    assert tokenizer.decode(first) == f"<system>be brief{end}<user>one?{end}<assistant>"
    answer = tokenizer("two").input_ids
    dialogue.add_answer(first, answer)
    dialogue.prompt_for("too long to be answered?")
    second = dialogue.prompt_for("three?")
    assert second[: len(first) + len(answer)] == [*first, *answer]
    assert tokenizer.decode(second).endswith(f"two{end}<user>three?{end}<assistant>")
    dialogue.clear()
    assert dialogue.prompt_for("one?") == first
    with pytest.raises(InputError, match="system needs a base with a chat template"):
        Dialogue(tokenizer_of(base), "be brief")


def test_piped_lines_are_answered_in_plain_text(
    head: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    lines = f"\n{ASKED}\udcff\n{'a ' * 5000}\n/reset\nclass A:\n/quit\nnever\n"
    piped = io.BytesIO(lines.encode(errors="surrogateescape"))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(piped, encoding="utf-8"))
    words = [f"head={head}", f"base={BASE_FOLDER}", "max_new_tokens=8", "side_by_side=true"]
    call("chat", [*words, "base.device=cpu"])
    output, errors = capsys.readouterr()
    assert "a conversation must fit into the context" in errors
    assert len(errors.splitlines()) == 1
    assert "\x1b" not in output
    # bytes that are no UTF-8 are replaced
    assert output.count("with the head:\n") == output.count("the base alone:\n") == 3
    assert output.count("the same text]") == 3
    assert output.count(" tokens per forward, ") == output.count(" tokens/s]") == 6
    assert "never" not in output


def test_end_of_a_pipe_ends_the_line(
    head: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    call("chat", [f"head={head}", f"base={BASE_FOLDER}", "base.device=cpu"])
    assert capsys.readouterr().out.endswith("> \n")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_two_answers_in_bfloat16_are_decoded_exactly(dtype: str, monkeypatch: pytest.MonkeyPatch):
    base = FrozenBase.load(BASE_FOLDER, device="cpu", dtype=dtype)
    oracle = Oracle([[1]], 3, base.vocab_size)
    monkeypatch.setattr(chat, "load_base_and_head", lambda _: (base, oracle))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    call("chat", ["head=any", f"base={BASE_FOLDER}", "side_by_side=true", "tree.kind=chain"])
    assert base.exact == (dtype == "bfloat16")


def test_chat_without_a_base_is_refused(refusal: Any):
    assert "name a run as run=DIR, or a head as head=PATH and base=PATH" in refusal("chat")
