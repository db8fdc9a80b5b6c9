"""The local engine: the same text with any batch, with or without a head."""

from dataclasses import replace
from pathlib import Path

import pytest

from specheads.decoding.generate import generate
from specheads.decoding.sampling import Sampling
from specheads.heads.load import build_for
from specheads.training.distill.engine import GenerationRequest
from specheads.training.distill.engines import local
from specheads.training.distill.run import write_text
from tests import tiny
from tests.training.distill import author
from tests.training.distill.pens import Talks, job, shards

HEAD = {"kind": "mlp_speculator", "depth": 3, "inner_dim": 16}


class Uneven(Talks):
    """The same with prompts of two, four and six tokens."""

    def first(self, number: int) -> list[int]:
        return super().first(number) * (1 + number % 3)


def write(folder: Path, batch_size: int = 4, head=None, max_length: int = 0, **changes) -> None:
    settings = replace(author.SETTINGS, num_samples=8, drop=[], **changes)
    asked = job(folder, settings=settings, prompts=Uneven())
    engine = local.build(replace(settings, batch_size=batch_size), tiny.base(), head, max_length)
    for _ in write_text(asked, lambda _: engine):
        pass


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_text_does_not_depend_on_batch_head_and_memory(temperature, tmp_path, monkeypatch):
    head = build_for(HEAD, tiny.base()).double().eval()
    write(tmp_path / "one", 1, temperature=temperature)
    write(tmp_path / "many", 8, temperature=temperature)
    write(tmp_path / "rows", 3, max_length=100, temperature=temperature)
    write(tmp_path / "drafted", 3, head, temperature=temperature)
    monkeypatch.setattr(local, "COMMON_TOKENS", 4)
    write(tmp_path / "pooled", 3, head, temperature=temperature)
    for name in ("many", "rows", "drafted", "pooled"):
        assert shards(tmp_path / name) == shards(tmp_path / "one"), name


def test_answer_equals_generate_with_the_same_seed():
    request = GenerationRequest(5, [3, 4, 5], 12, Sampling(temperature=0.9, seed=7))
    waiting = [request]
    engine = local.build(author.SETTINGS, tiny.base())
    (answer,) = engine(lambda: waiting.pop() if waiting else None)
    said = generate(
        tiny.base(), None, [request.tokens], max_new_tokens=12, sampling=[request.sampling]
    )
    assert answer.tokens == said.tokens[0]
