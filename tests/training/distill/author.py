"""Generates a folder of text with a tiny base and the local engine; forked by test_kills.py."""

from dataclasses import replace
from pathlib import Path

import torch

from specheads.training.distill.run import write_text
from specheads.training.settings import Distill
from tests.training.distill.pens import Talks, job

SETTINGS = Distill(num_samples=24, new_tokens=12, batch_size=4, shard_size=4, temperature=0.9)


def main(folder: Path, rank: int = 0, world_size: int = 1) -> None:
    torch.set_num_threads(1)
    # the tiny base never ends a text: every answer has maximum length and is kept
    asked = job(folder, settings=replace(SETTINGS, drop=[]), prompts=Talks())
    for _ in write_text(replace(asked, rank=rank, world_size=world_size)):
        pass
