"""Texts for reports: decoded ones, and one that tries to break the page."""

import functools
from dataclasses import replace

from specheads.base.model import FrozenBase
from specheads.data.prompts import Prompt
from specheads.decoding.generate import generate
from specheads.decoding.trees import policies
from specheads.decoding.trees.hybrid import HybridTree
from specheads.measure.generation import GenerationSettings, decode_texts
from specheads.measure.results import DecodedText, Results, TextStep
from tests import tiny
from tests.decoding.test_detokenize import tokenizer
from tests.measure.test_measure import results

NEW_TOKENS = 30

RTL = "\N{RIGHT-TO-LEFT OVERRIDE}"
NASTY = [
    "</script><script>alert(1)</script>",
    '"><img src=//evil.example/x onerror=alert(1)>',
    f"{RTL}\N{RIGHT-TO-LEFT ISOLATE}", "\x00\x1b[31m", "\n\n\tx", "\u2028", "\ud800",
    "<!--", "]]>", "שלום", " ", "&amp;",
]  # fmt: skip
"""Hostile token texts: ends of scripts, markup, direction, control, half a surrogate pair."""


@functools.cache
def base() -> FrozenBase:
    """Return a tiny base with a tokenizer, some of whose tokens are parts of characters."""
    return FrozenBase(tiny.base().model, tokenizer(), name="tiny", prepare=False)


@functools.cache
def hybrid() -> tuple[list[Prompt], list[list[int]], list[DecodedText]]:
    """Return prompts, the texts of the base alone, and a hybrid's texts for some of them."""
    answers = generate(tiny.base(), None, tiny.prompts(), max_new_tokens=NEW_TOKENS).tokens
    # prompts that contain their continuation, for prompt lookup
    pairs = zip(tiny.prompts(), answers, strict=True)
    rows = [[*prompt, *answer[:20], *prompt] for prompt, answer in pairs]
    rows.append(rows[0][1:])
    out = generate(tiny.base(), None, rows, max_new_tokens=NEW_TOKENS, stop_at_eos=False).tokens
    texts = [row + continuation for row, continuation in zip(rows, out, strict=True)]
    tree = HybridTree(policies.Static([(0,), (1,), (0, 0), (0, 1)]), 4)
    generation = GenerationSettings(max_new_tokens=NEW_TOKENS, tree=tree, stop_at_eos=False)
    prompts = [Prompt(row, "rich", "") for row in rows]
    head = tiny.Oracle(texts, 2, tiny.VOCAB)
    return prompts, out, decode_texts(base(), head, prompts, generation)


def nasty() -> DecodedText:
    """Return a text in which every token tries to break the page; the last two are copied."""
    parents = [-1, *range(len(NASTY) - 1), 0]
    step = TextStep(
        tokens=[*NASTY, "</svg>"],
        parents=parents,
        path=list(range(len(NASTY))),
        bonus=NASTY[0],
        num_copied=3,
    )
    return DecodedText(
        category="<nasty>",
        prompt="".join(NASTY),
        first=NASTY[1],
        steps=[step],
        num_tokens=len(NASTY) + 1,
    )


def results_of(*texts: DecodedText) -> Results:
    """Return complete results with these texts."""
    return replace(results(), texts=list(texts))
