"""The local engine: the same text with any batch, with or without a head."""

from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import pytest

from specheads.decoding.generate import generate
from specheads.decoding.sampling import Sampling
from specheads.heads.load import build_for
from specheads.training.distill.engine import GenerationRequest
from specheads.training.distill.engines import local
from specheads.training.distill.engines.local import Local
from specheads.training.distill.run import write_text
from tests import tiny
from tests.training.distill import author
from tests.training.distill.pens import Talks, job, rows, shards

HEAD = {"kind": "mlp_speculator", "depth": 3, "inner_dim": 16}


class Uneven(Talks):
    """The same with prompts of two, four and six tokens."""

    def first(self, number: int) -> list[int]:
        return super().first(number) * (1 + number % 3)


def write(folder: Path, batch_size: int = 4, head=None, max_length: int = 0, **changes) -> None:
    settings = replace(author.SETTINGS, num_samples=8, drop=[], **changes)
    asked = job(folder, settings=settings, prompts=Uneven())
    engine = Local(tiny.base(), head, batch_size, max_length)
    for _ in write_text(asked, lambda _: engine):
        pass


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_text_does_not_depend_on_batch_head_and_memory(
    temperature: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    head = build_for(HEAD, tiny.base()).double().eval()
    write(tmp_path / "one", 1, temperature=temperature)
    write(tmp_path / "many", 8, temperature=temperature)
    write(tmp_path / "rows", 3, max_length=100, temperature=temperature)
    write(tmp_path / "drafted", 3, head, temperature=temperature)
    made: list[bool] = []
    make = Local._engine
    monkeypatch.setattr(Local, "_engine", lambda its, long: made.append(long) or make(its, long))
    monkeypatch.setattr(local, "COMMON_TOKENS", 16)
    write(tmp_path / "both", 3, temperature=temperature)
    assert set(made) == {False, True}
    monkeypatch.setattr(local, "COMMON_TOKENS", 4)
    write(tmp_path / "pooled", 3, head, temperature=temperature)
    assert made[2:] == [True]
    for name in ("many", "rows", "drafted", "both", "pooled"):
        assert shards(tmp_path / name) == shards(tmp_path / "one"), name


def test_answer_equals_generate_with_the_same_seed(tmp_path: Path):
    asked = job(tmp_path, settings=replace(author.SETTINGS, num_samples=8, drop=[]))
    pulled: list[GenerationRequest | None] = []

    def keep(ask: GenerationRequest) -> GenerationRequest:
        pulled.append(ask)
        return ask

    class Kept(Local):
        def answers(self, pull):
            yield from super().answers(lambda: (ask := pull()) and keep(ask))

    for _ in write_text(
        replace(asked, folder=tmp_path / "kept"), lambda _: Kept(tiny.base(), None, 2)
    ):
        pass
    first = next(ask for ask in pulled if ask and ask.number == 5)
    said = generate(
        tiny.base(), None, [first.tokens], max_new_tokens=first.new_tokens,
        sampling=[first.sampling],
    )  # fmt: skip
    row = next(row for row in rows(tmp_path / "kept") if row["number"] == 5)
    assert row["tokens"][2:14] == said.tokens[0]


def test_text_waits_for_a_full_pool_and_closing_frees_it(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(local, "COMMON_TOKENS", 4)
    engine = Local(tiny.base(), None, 4)
    asks = [
        GenerationRequest(number, [1, 2, 3], 20, Sampling(temperature=1.0, seed=number))
        for number in range(6)
    ]
    answers = engine.answers(lambda: asks.pop(0) if asks else None)
    first = next(answers)
    assert len(first.tokens) == 20
    assert first.finish == "length"
    assert isinstance(answers, Generator)
    answers.close()
