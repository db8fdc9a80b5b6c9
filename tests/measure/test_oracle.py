import itertools

import torch

from specheads.core.drafter import Features
from specheads.core.features import Committed
from specheads.decoding.generate import generate
from tests import tiny
from tests.oracle import Oracle


def test_oracle_is_right_at_its_rate_and_depths_agree():
    said = torch.randint(0, 50, (1000,)).tolist()
    oracle = Oracle([said], depth=2, vocab_size=51, rate=0.7)
    memory, right, nothing = oracle.memory(1, 0), [], Features(torch.zeros(1, 1, 4))
    for place in range(900):
        # the root is position `place`
        memory.roots[0] = place - 1
        logits, state = oracle.begin(
            Committed(nothing, torch.zeros(1, 1).long(), torch.tensor([1])), memory
        )
        deeper, _ = oracle.extend(state, torch.tensor([[0]]), torch.tensor([[0]]))
        right.append((logits.argmax().item(), deeper.argmax().item()))
    share = sum(first == said[place + 1] for place, (first, _) in enumerate(right)) / 900
    assert 0.65 < share < 0.75
    assert all(now[1] == after[0] for now, after in itertools.pairwise(right))


def test_rate_zero_is_never_right_and_decoding_stays_exact():
    said = [p + c for p, c in zip(tiny.prompts(), tiny.continuations(), strict=True)]
    wrong = Oracle(said, 3, tiny.VOCAB, rate=0.0)
    out = generate(
        tiny.base(), wrong, tiny.prompts(), max_new_tokens=tiny.NEW_TOKENS, stop_at_eos=False
    )
    assert out.tokens == tiny.continuations()
    assert out.forwards == [tiny.NEW_TOKENS - 1] * 3
