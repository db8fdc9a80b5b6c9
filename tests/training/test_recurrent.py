"""Training on bases with recurrent layers: packed or not, after a kill, and measured."""

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specheads.config.training import Schedule
from specheads.core.drafter import Head
from specheads.data.packing import TokenBatch
from specheads.decoding.trees import policies
from specheads.measure.generation import GenerationSettings, continue_prompts, decode_prompts
from specheads.measure.offline import guess_ranks, replay
from specheads.runs.trackers import read_metrics
from tests import recurrent
from tests.packed import alone, packed
from tests.training.test_packed import loss_of, same
from tests.training.test_trainer import assert_equal, phase, power_cut, run_training

PROMPTS = recurrent.prompts(3, 5, 2, 4, 3, 2)
LENGTHS = (9, 20, 6, 12, 11, 7)
"""Any three documents in turn fit into a row."""

Pack = Callable[[list[Tensor]], TokenBatch]


class Documents:
    """The same documents in each batch, in turn; its cursor is the number of batches."""

    def __init__(self, texts: list[Tensor], pack: Pack) -> None:
        self.texts, self.pack = texts, pack

    def batches(
        self, cursor: dict[str, Any] | None = None
    ) -> Iterator[tuple[TokenBatch, dict[str, Any]]]:
        number = cursor["number"] if cursor else 0
        while True:
            start = number % len(self.texts)
            number += 1
            yield self.pack(self.texts[start:] + self.texts[:start]), {"number": number}


@pytest.mark.parametrize(
    ("kind", "architecture", "steps"),
    [
        ("redrafter", "granitemoehybrid", 3),
        ("dflash", "falcon_h1", 3),
        *(
            pytest.param(*case, 60, marks=pytest.mark.slow)
            for case in product(
                ("eagle3", "redrafter", "dflash", "mtp"),
                ("qwen3_5_text", "granitemoehybrid", "falcon_h1"),
            )
        ),
    ],
)
def test_packing_and_stops_change_no_head_of_a_base_with_states_and_replay_is_decoding(
    kind: str, architecture: str, steps: int, tmp_path: Path
):
    base = recurrent.base(architecture)
    chain = policies.chain(2)
    generation = GenerationSettings(max_new_tokens=15, tree=chain, batch_size=3)
    answers = continue_prompts(base, PROMPTS, generation)
    texts = [
        torch.tensor(prompt + answer)[:length]
        for prompt, answer, length in zip(PROMPTS, answers, LENGTHS, strict=True)
    ]

    def train(folder: str, pack: Pack = packed, num_rows: int = 2) -> Head:
        return run_training(
            tmp_path / folder,
            Schedule(phases={"corpus": phase(steps=steps, batch_size=num_rows)}),
            kind=kind,
            base=base,
            text=Documents(texts, pack),
            dtype=torch.float64,
            checkpoint_every=2 * steps // 5,
        )

    head = train("packed")
    train("alone", alone, len(texts))
    losses, expected_losses = (
        [row["loss"] for row in read_metrics(tmp_path / folder / "metrics.jsonl")]
        for folder in ("packed", "alone")
    )
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert losses[-1] < losses[0]
    loss, slopes = loss_of(head, packed(texts), phase(), base)
    expected, expected_slopes = loss_of(head, alone(texts), phase(), base)
    assert same(loss, expected, within=1e-5)
    torch.testing.assert_close(slopes, expected_slopes, rtol=1e-5, atol=1e-5)
    with power_cut(3 * steps // 5):
        train("parts")
    assert_equal(train("parts").state_dict(), head.state_dict())
    decoded = decode_prompts(base, head.eval(), PROMPTS, generation)
    assert [text.tokens for text in decoded] == answers
    replayed = [
        replay(guess_ranks(base, head, prompt, answer, width=1), chain)
        for prompt, answer in zip(PROMPTS, answers, strict=True)
    ]
    assert replayed == [text.counts for text in decoded]
    assert sum(sum(counts.accepted) for counts in replayed) > 0
