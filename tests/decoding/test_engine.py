"""Requests that join and leave a batch at any time get the text that each would get alone."""

import functools
import random
import re
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specheads.base.model import FrozenBase
from specheads.base.paged import BlockPool, PoolFullError
from specheads.core.drafter import Drafter
from specheads.decoding.draft_model import DraftModel, Streaming
from specheads.decoding.engine import Engine, Stream
from specheads.decoding.generate import Decoding, generate
from specheads.decoding.loop import DecodingStep
from specheads.decoding.request import Request
from specheads.decoding.sampling import Sampling
from specheads.decoding.trees import policies
from specheads.decoding.trees.hybrid import HybridTree, lookup_tree
from specheads.heads.load import build_for_base, fit_to_base
from tests import tiny
from tests.decoding.test_detokenize import PIECES, tokenizer
from tests.oracle import TextPositions
from tests.slow import slow_except

Arm = tuple[Drafter | None, policies.TreePolicy | None]
NEW = 14
TREE = policies.Static([(0,), (1,), (0, 0)])


def what(step: DecodingStep) -> tuple[list[int], ...]:
    """Return the result of a step, which must not depend on the other rows."""
    return step.tokens, step.path


def head(kind: str, **settings: Any) -> Drafter:
    """Return an untrained head, right about as often as chance has it."""
    torch.manual_seed(1)
    model_head = build_for_base({"kind": kind, "depth": 3, **settings}, tiny.base()).double().eval()
    for parameter in model_head.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return model_head


ARMS: dict[str, Callable[[], Arm]] = {
    "base alone": lambda: (None, None),
    "eagle3": lambda: (head("eagle3"), TREE),
    "beam": lambda: (head("hydra_heads", prefix=True), policies.Beam(2, 3)),
    "draft model": lambda: (DraftModel(tiny.base(), 3, tiny.base()), policies.chain(3)),
    "window": lambda: (Streaming(tiny.base(), 2, sinks=2, window=9, max_nodes=16), TREE),
    "lookup": lambda: (None, lookup_tree(4)),
    "hybrid": lambda: (DraftModel(tiny.base(), 2, tiny.base()), HybridTree(policies.chain(2), 3)),
}


def blocks(number: int = 64) -> BlockPool:
    return tiny.base().pool(number, block_size=4)


def requests(number: int) -> list[Request]:
    """Return ragged requests of different temperatures, seeds and limits."""
    generator = random.Random(number)
    return [
        Request(
            prompt=[generator.randrange(tiny.VOCAB) for _ in range(generator.randint(1, 20))],
            max_new_tokens=generator.randint(1, NEW),
            sampling=Sampling(
                temperature=generator.choice([0.0, 0.7]),
                repetition_penalty=generator.choice([1.0, 1.3]),
                seed=index,
            ),
        )
        for index in range(number)
    ]


@functools.cache
def alone(name: str) -> list[Decoding]:
    """Return what each of six requests gets when it is decoded alone."""
    drafter, tree = ARMS[name]()
    return [
        generate(
            tiny.base(),
            drafter,
            [request.prompt],
            max_new_tokens=request.max_new_tokens,
            sampling=[request.sampling],
            tree=tree,
        )
        for request in requests(6)
    ]


def ask(engine: Engine, **settings: Any) -> Stream:
    """Submit the first tiny prompt, or another request."""
    return engine.submit(Request(**{"prompt": tiny.prompts()[0], "max_new_tokens": NEW} | settings))


@pytest.mark.parametrize(
    ("name", "paged"),
    slow_except(
        [("eagle3", False), ("beam", False), *((name, True) for name in ARMS if name != "beam")],
        product(ARMS, (False, True)),
    ),
)
def test_requests_that_come_at_any_time_are_decoded_as_if_alone(name, paged):
    arm, pool = ARMS[name](), blocks() if paged else None
    engine = Engine(tiny.base(), arm[0], tree=arm[1], max_batch=3, max_length=40, pool=pool)
    late, streams = requests(6), []
    generator = random.Random(3)
    while late or engine.step():
        while late and generator.random() < 0.5:
            streams.append(engine.submit(late.pop(0)))
        assert len(engine.running) <= 3
        engine.step()
    for stream, single, plain in zip(streams, alone(name), alone("base alone"), strict=True):
        assert stream.tokens == single.tokens[0] == plain.tokens[0]
        # drafts do not depend on neighbours either, so memories were joined rightly
        assert [*map(what, stream.steps)] == [*map(what, single.steps[0])]
        assert stream.finish_reason == "length"
    if pool is not None:
        assert pool.num_free == pool.num_blocks


# --- admission ---------------------------------------------------------------------------------


def test_a_full_pool_makes_requests_wait_and_serves_them_in_order():
    # each needs 5 + 14 tokens and a root: five blocks of four slots, so two fit into twelve
    engine = Engine(tiny.base(), pool=blocks(12))
    streams = [ask(engine) for _ in range(3)]
    engine.step()
    assert engine.running == streams[:2]
    assert engine.waiting == streams[2:]
    # memory follows use: six tokens per row are committed, and two blocks are in use
    assert engine.pool is not None
    assert engine.pool.num_free == 12 - 2 * 2
    engine.run()
    assert [stream.tokens for stream in streams] == [tiny.continuations()[0][:NEW]] * 3


def test_a_request_fits_a_pool_with_exactly_its_blocks():
    # 5 + 14 tokens and a tree of five nodes: six blocks of four
    engine = Engine(tiny.base(), tiny.oracle(4), pool=blocks(6))
    stream = ask(engine)
    engine.run()
    assert stream.tokens == tiny.continuations()[0][:NEW]
    with pytest.raises(ValueError, match=r"19 tokens and a tree of 5 need 6 blocks of 5; ask"):
        ask(Engine(tiny.base(), tiny.oracle(4), pool=blocks(5)))
    used = blocks(8)
    used.allocate(4)
    engine = Engine(tiny.base(), pool=used)
    ask(engine)
    with pytest.raises(PoolFullError, match="give an engine its own pool"):
        engine.step()


def test_cancelling_frees_blocks_at_once_wherever_the_request_is():
    engine = Engine(tiny.base(), pool=blocks(12), max_batch=2)
    streams = [ask(engine) for _ in range(4)]
    engine.step()
    assert engine.pool is not None
    free = engine.pool.num_free
    streams[2].cancel()
    assert engine.waiting == streams[3:]
    streams[0].cancel()
    assert engine.running == [streams[1]]
    assert engine.pool.num_free == free + 2
    engine.run()
    reasons = [stream.finish_reason for stream in streams]
    assert reasons == ["cancelled", "length", "cancelled", "length"]
    expected = tiny.continuations()[0][:NEW]
    assert [stream.tokens for stream in streams] == [expected[:2], expected, [], expected]
    streams[1].cancel()
    assert streams[1].finish_reason == "length"
    assert engine.pool.num_free == 12


VISITS = st.tuples(
    st.integers(1, 12),
    st.integers(0, 9),
    st.integers(0, 2),
    st.sampled_from("bcdw01"),
    st.integers(0, tiny.VOCAB - 1),
    st.one_of(st.none(), st.integers(0, 19)),
)
"""Prompt, limit, steps after the request came, stop string, end token, and which earlier request is
then cancelled."""
SERVERS: dict[str, Callable[[], Arm]] = {
    "base alone": lambda: (None, None),
    "beam": lambda: (tiny.oracle(2), policies.Beam(2, 2)),
    "hybrid": lambda: (tiny.oracle(2), HybridTree(policies.chain(2), 3)),
}
SERVED = {
    "num_blocks": st.sampled_from([7, 11, 16, 40]),
    "max_batch": st.integers(1, 5),
    "name": st.sampled_from([*SERVERS]),
}


@functools.cache
def base_with_tokenizer() -> FrozenBase:
    """Return the tiny base with a tokenizer, so that requests may have stop strings."""
    return FrozenBase(tiny.base().model, tokenizer())


@functools.cache
def base_continuation(prompt: int) -> list[int]:
    return generate(tiny.base(), None, [[prompt] * prompt], max_new_tokens=9).tokens[0]


def serve(visits: list[tuple[Any, ...]], num_blocks: int, max_batch: int, name: str) -> None:
    """Let requests come, stop as they like and be cancelled; all blocks must be free again."""
    pool, (drafter, tree) = blocks(num_blocks), SERVERS[name]()
    engine = Engine(base_with_tokenizer(), drafter, tree=tree, pool=pool, max_batch=max_batch)
    streams: list[Stream] = []
    for prompt, limit, steps, stop, eos, leaving in visits:
        ends: dict[str, Any] = {"stop": (stop,), "eos_ids": (eos,)}
        streams.append(ask(engine, prompt=[prompt] * prompt, max_new_tokens=limit, **ends))
        for _ in range(steps):
            engine.step()
            num_blocks = sum(stream.num_blocks for stream in engine.running)
            assert pool.num_blocks - pool.num_free <= num_blocks <= pool.num_blocks
        if leaving is not None:
            streams[leaving % len(streams)].cancel()
    engine.run()
    assert pool.num_free == pool.num_blocks
    for (prompt, limit, *_), stream in zip(visits, streams, strict=True):
        assert stream.finish_reason in ("length", "cancelled", "stop", "eos")
        assert stream.tokens == base_continuation(prompt)[: len(stream.tokens)]
        if stream.finish_reason == "length":
            assert len(stream.tokens) == limit


@settings(max_examples=6)
@given(visits=st.lists(VISITS, min_size=8, max_size=8), **SERVED)
def test_after_any_submissions_and_cancellations_every_block_is_free(**served):
    serve(**served)


# --- errors ------------------------------------------------------------------------------------


PLACES = ("_make_cache", "prefill", "verify", "begin", "join", "keep")


@pytest.mark.parametrize(
    ("place", "paged"),
    slow_except(
        [*((place, True) for place in PLACES), ("keep", False)], product(PLACES, (False, True))
    ),
)
def test_an_error_ends_only_the_rows_of_its_step(place, paged, monkeypatch):
    drafter, pool = tiny.oracle(2), blocks(24) if paged else None
    engine = Engine(tiny.base(), drafter, max_batch=2, max_length=40, pool=pool)
    limits = (4, 14, 9, 12, 6, 14)
    streams = [
        ask(engine, prompt=prompt, max_new_tokens=limit)
        for prompt, limit in zip(tiny.prompts() * 2, limits, strict=True)
    ]
    engine.step()

    def raising(*_: Any) -> None:
        monkeypatch.undo()
        raise MemoryError("there is no more")

    raises = {
        "_make_cache": engine,
        "prefill": engine.base,
        "verify": engine.base,
        "begin": drafter,
    }
    monkeypatch.setattr(raises.get(place, TextPositions), place, raising)
    with pytest.raises(MemoryError):
        engine.run()
    failed = [stream for stream in streams if stream.finish_reason == "failed"]
    assert failed
    assert not {*failed} & {*engine.running, *engine.waiting}
    assert engine.waiting
    engine.run()
    for stream, expected, limit in zip(streams, tiny.continuations() * 2, limits, strict=True):
        assert stream.tokens == expected[: len(stream.tokens)]
        assert stream in failed or (stream.finish_reason, len(stream.tokens)) == ("length", limit)
    if pool is not None:
        assert pool.num_free == pool.num_blocks


# --- why requests end --------------------------------------------------------------------------


def test_an_end_of_text_inside_a_drafted_path_ends_the_row_there():
    expected = tiny.continuations()[0]
    # the first token comes with the prompt, and each forward brings five
    end = next(end for end in range(7, 10) if expected[end] not in expected[:end])
    engine = Engine(tiny.base(), tiny.oracle(4))
    ended, ignored = ask(engine, eos_ids=(expected[end],)), ask(engine, eos_ids=())
    engine.run()
    assert ended.tokens == expected[: end + 1]
    assert ended.finish_reason == "eos"
    assert len(ended.steps[-1].tokens) == 5
    assert ignored.finish_reason == "length"


def test_a_limit_of_zero_and_a_full_context_end_the_row():
    engine = Engine(tiny.base(), tiny.oracle(4), max_length=12)
    nothing = ask(engine, max_new_tokens=0)
    assert (nothing.tokens, nothing.finish_reason, list(nothing)) == ([], "length", [])
    assert engine.step() is False
    stream, full = ask(engine), ask(engine, prompt=[1] * 12)
    engine.run()
    assert stream.tokens == tiny.continuations()[0][:7]
    assert stream.finish_reason == "context"
    assert (full.tokens, full.finish_reason) == ([], "context")


# --- streams -----------------------------------------------------------------------------------


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tiny.base(), "tokenizer", tokenizer())
    return tiny.base()


def joined(pieces: list[tuple[list[int], str]]) -> tuple[list[int], str]:
    return [token for tokens, _ in pieces for token in tokens], "".join(text for _, text in pieces)


@pytest.mark.parametrize("depth", [0, 4])
def test_streamed_text_is_the_text_however_many_tokens_come_at_once(depth, base):
    engine = Engine(base, tiny.oracle(depth) if depth else None)
    for prompt, expected in zip(tiny.prompts(), tiny.continuations(), strict=True):
        stream = ask(engine, prompt=prompt, max_new_tokens=tiny.NEW_TOKENS)
        pieces = list(stream)
        assert len(pieces) > 5
        assert joined(pieces) == (stream.tokens, stream.text)
        assert stream.tokens == expected
        before = base.tokenizer.decode(prompt).rstrip("\N{REPLACEMENT CHARACTER}")
        text = base.tokenizer.decode(prompt + expected, skip_special_tokens=True)
        assert text == before + stream.text


# 0 | ing | F | d | c d     the second string begins within a token and ends within another
@pytest.mark.parametrize("stop", ["0ingF", "ngFdc"])
@pytest.mark.parametrize("depth", [0, 4])
def test_a_stop_string_ends_the_text_right_before_it(depth, stop, base):
    expected = tiny.continuations()[0]
    text = ask(Engine(base), max_new_tokens=30)
    list(text)
    assert [PIECES[token] for token in expected[6:11]] == [b"0", b"ing", b"F", b"d", b"c d"]
    start = text.text.index(stop)
    engine = Engine(base, tiny.oracle(depth) if depth else None, pool=base.pool(40, 4))
    stream = ask(engine, max_new_tokens=30, stop=("never said", stop))
    pieces = list(stream)
    assert stream.finish_reason == "stop"
    assert stream.text == text.text[:start]
    assert joined(pieces) == (stream.tokens, stream.text)
    assert expected[: len(stream.tokens)] == stream.tokens
    assert engine.pool is not None
    assert engine.pool.num_free == 40
    # text that could have begun a stop string is written at the end
    unstopped = ask(engine, max_new_tokens=30, stop=(stop[:-1] + "?never",))
    assert joined(list(unstopped)) == (expected[:30], text.text)
    assert unstopped.finish_reason == "length"


def test_a_stop_string_that_is_a_special_token_ends_the_text_at_it(base):
    special, number = base.tokenizer.eos_token, base.tokenizer.eos_token_id
    tokens = tiny.continuations()[0][:3]
    for stop, expected in (
        (special, [*tokens, number]),
        ("never said", [*tokens, number, *tokens]),
    ):
        stream = ask(Engine(base), max_new_tokens=7, eos_ids=(), stop=("never", stop))
        stream.append_tokens([*tokens, number, *tokens])
        assert stream.tokens == expected
        assert stream.finish_reason == ("eos" if stop == special else "length")


def test_a_stop_string_with_a_special_token_among_others_is_refused(base):
    special = base.tokenizer.eos_token
    with pytest.raises(ValueError, match=f"got 'a{re.escape(special)}'; name the token alone"):
        ask(Engine(base), max_new_tokens=3, stop=("fine", f"a{special}"))


def test_a_head_in_another_dtype_is_refused_before_torch_fails():
    base = tiny.base(dtype=torch.bfloat16)
    head = build_for_base({"kind": "medusa", "depth": 2}, base).eval()
    with pytest.raises(ValueError, match=r"float32 on cpu for a base in .*bfloat16.*load_head"):
        Engine(base, head)
    fit_to_base(head, base)
    assert head.projection(0)[0].dtype == base.dtype
    Engine(base, head)


def test_prompts_of_very_different_length_are_not_padded_to_the_longest(monkeypatch):
    base, prefills = tiny.base(), []
    prefill = FrozenBase.prefill

    def record_prefill(self, tokens, *arguments):
        prefills.append(tuple(tokens.shape))
        return prefill(self, tokens, *arguments)

    monkeypatch.setattr(FrozenBase, "prefill", record_prefill)
    lengths = [120, 5, 90, 110, 30]
    prompts = [(torch.arange(length) % tiny.VOCAB).tolist() for length in lengths]
    engine = Engine(base, None, max_batch=5, max_length=125)
    streams = [engine.submit(Request(prompt=prompt, max_new_tokens=4)) for prompt in prompts]
    engine.step()
    assert prefills == [(3, 90), (2, 120)]
    assert {*engine.running} == {*streams}
    engine.run()
    for stream, prompt in zip(streams, prompts, strict=True):
        assert stream.tokens == generate(base, None, [prompt], max_new_tokens=4).tokens[0]


def test_no_more_rows_are_decoded_together_than_memory_holds(monkeypatch):
    # two caches of 42 slots a row, and one node: room for three rows and a half
    base = tiny.base()
    room = 3.5 * (2 * 42 * base.slot_bytes + (40 + 1 + tiny.VOCAB) * 8 + 1)
    monkeypatch.setattr("specheads.decoding.engine.device_bytes", lambda _: room)
    engine = Engine(base, None, max_batch=5, max_length=40)
    streams = [engine.submit(Request(prompt=[1, 2, at], max_new_tokens=4)) for at in range(5)]
    engine.step()
    assert engine.running == streams[:3]
    engine.run()
    assert [len(stream.tokens) for stream in streams] == [4] * 5
    # one row is always tried
    monkeypatch.setattr("specheads.decoding.engine.device_bytes", lambda _: 0)
    assert Engine(base, None, max_batch=5, max_length=40).max_batch == 1
