"""Windows of one length, cut from documents."""

import random
from collections.abc import Iterator
from itertools import chain, zip_longest
from typing import Any

import numpy as np
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from specheads.core.errors import InputError
from specheads.data.documents import Documents
from specheads.data.encode import token_ids


def cut_windows(
    documents: Documents, tokenizer: PreTrainedTokenizerBase, prompt_tokens: int, seed: int = 0
) -> Iterator[tuple[int, list[int]]]:
    """Cut windows that do not overlap: one of every document, then another of every one, ...

    Yields each with the number of its document. A window has `prompt_tokens` tokens, those with
    which the tokenizer begins every text included; the seed decides which windows of a document
    come first.
    """
    whole, plain = (
        token_ids(tokenizer, "a", add_special_tokens=special) for special in (True, False)
    )
    if not plain or plain[0] not in whole:
        raise InputError("text needs a tokenizer that reads any letter, this one has none for 'a'")
    opening = whole[: whole.index(plain[0])]
    room = prompt_tokens - len(opening)
    if room < 1:
        raise InputError(f"prompt_tokens must be at least {len(opening) + 1}, got {prompt_tokens}")
    later: list[list[tuple[int, list[int]]]] = []
    end: Any = tokenizer.eos_token_id
    order = np.random.default_rng(seed).permutation(len(documents))
    for place, number in enumerate(order.tolist()):
        ids = documents.tokens(number).tolist()
        if ids[: len(opening)] == opening:
            ids = ids[len(opening) :]
        if ids[-1:] == [end]:
            ids.pop()
        starts = list(range(0, len(ids) - room + 1, room))
        random.Random(f"{seed} {place}").shuffle(starts)
        # the first round goes out as it is cut: a caller of few windows reads few documents
        windows = [(number, opening + ids[start : start + room]) for start in starts]
        yield from windows[:1]
        later.append(windows[1:])
    yield from (row for row in chain.from_iterable(zip_longest(*later)) if row is not None)
