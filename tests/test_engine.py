"""Requests that come, go and stop when they like say what each would say alone."""

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specheads import grow, heads
from specheads.baselines import DraftModel, PromptLookup, Streaming
from specheads.decode import Decoding, generate
from specheads.drafter import Drafter
from specheads.engine import Engine
from specheads.graft import Graft, Hybrid, Lookup
from specheads.paged import BlockPool, PoolFullError
from specheads.sampled import Sampled
from specheads.sampling import Sampling
from specheads.stream import Piece, Request, Stream
from tests import tiny
from tests.test_detokenize import tokenizer

Arm = tuple[Drafter | None, grow.Policy | None]
NEW = 14
TREE = grow.Static([(0,), (1,), (0, 0)])


def head(**settings: Any) -> Drafter:
    """Return an untrained head, right about as often as chance has it."""
    torch.manual_seed(1)
    made = heads.build_for({"depth": 3, **settings}, tiny.base()).double().eval()
    for parameter in made.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return made


ARMS: dict[str, Callable[[], Arm]] = {
    "base alone": lambda: (None, None),
    "eagle3": lambda: (head(kind="eagle3"), TREE),
    "hydra with a prefix": lambda: (head(kind="hydra_heads", prefix=True), TREE),
    "draft model": lambda: (DraftModel(tiny.base(), 3, tiny.base()), grow.chain(3)),
    "window": lambda: (Streaming(tiny.base(), 2, sinks=2, window=9, max_nodes=16), TREE),
    "lookup": lambda: (PromptLookup(tiny.VOCAB, 4), Lookup(4)),
    "hybrid": lambda: (
        Hybrid(DraftModel(tiny.base(), 2, tiny.base()), PromptLookup(tiny.VOCAB, 4)),
        Graft(grow.chain(2), 3),
    ),
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
                seed=place,
            ),
        )
        for place in range(number)
    ]


@functools.cache
def alone(name: str) -> list[Decoding]:
    """Return what each of six requests gets when nobody stands beside it."""
    drafter, tree = ARMS[name]()
    return [
        generate(
            tiny.base(),
            drafter,
            [request.prompt],
            max_new_tokens=request.max_new_tokens,
            settings=[request.sampling],
            tree=tree,
        )
        for request in requests(6)
    ]


def ask(engine: Engine, **wanted: Any) -> Stream:
    """Submit the first tiny prompt, or what is wanted instead."""
    return engine.submit(Request(**{"prompt": tiny.prompts()[0], "max_new_tokens": NEW} | wanted))


@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
@pytest.mark.parametrize("name", ARMS)
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
        assert stream.steps == single.steps[0]
        assert stream.finish_reason == "length"
    if pool is not None:
        assert pool.num_free == pool.num_blocks
        assert pool.copied_blocks == 0


def test_rows_of_a_rule_that_tests_drafts_are_independent_of_their_neighbours():
    drafter = DraftModel(tiny.base("gpt2"), 2, tiny.base())
    wanted = [
        Request(prompt=prompt, max_new_tokens=8, sampling=Sampling(temperature=1.0, seed=place))
        for place, prompt in enumerate(tiny.prompts())
    ]

    def said(number: int) -> list[list[int]]:
        engine = Engine(
            tiny.base(), drafter, tree=Sampled((2, 1)), rule="rejection", max_batch=number
        )
        streams = [engine.submit(request) for request in wanted]
        engine.run()
        return [stream.tokens for stream in streams]

    assert said(1) == said(2) == said(3)


def test_prompts_in_turns_are_decoded_as_prompts_together():
    together = generate(tiny.base(), tiny.oracle(3), tiny.prompts(), max_new_tokens=30)
    in_turns = generate(tiny.base(), tiny.oracle(3), tiny.prompts(), max_new_tokens=30, max_batch=2)
    assert in_turns == together
    pool = blocks()
    paged = generate(tiny.base(), tiny.oracle(3), tiny.prompts(), max_new_tokens=30, pool=pool)
    assert paged == together
    assert pool.num_free == pool.num_blocks
    assert any(store.held is not None for store in pool.stores)


# --- admission ---------------------------------------------------------------------------------


def test_a_full_pool_makes_requests_wait_and_serves_them_in_order():
    # each needs 5 + 14 tokens and a root: five blocks of four slots, so two fit into twelve
    engine = Engine(tiny.base(), pool=blocks(12))
    streams = [ask(engine) for _ in range(3)]
    engine.step()
    assert engine.running == streams[:2]
    assert engine.waiting == streams[2:]
    # memory follows what is used: six tokens a row are committed, and two blocks are held
    assert engine.pool is not None
    assert engine.pool.num_free == 12 - 2 * 2
    engine.run()
    assert [stream.tokens for stream in streams] == [tiny.continuations()[0][:NEW]] * 3


def test_the_longest_promise_is_kept_where_the_pool_is_just_large_enough():
    # 5 + 14 tokens and a tree of five nodes: six blocks of four
    engine = Engine(tiny.base(), tiny.oracle(4), pool=blocks(6))
    stream = ask(engine)
    engine.run()
    assert stream.tokens == tiny.continuations()[0][:NEW]
    with pytest.raises(ValueError, match=r"19 tokens and a tree of 5 need 6 blocks of 5; ask"):
        ask(Engine(tiny.base(), tiny.oracle(4), pool=blocks(5)))


def test_a_pool_that_others_hold_is_told_and_not_waited_for():
    pool = blocks(8)
    pool.take(4)
    engine = Engine(tiny.base(), pool=pool)
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
    said = tiny.continuations()[0][:NEW]
    assert [stream.tokens for stream in streams] == [said[:2], said, [], said]
    streams[1].cancel()
    assert streams[1].finish_reason == "length"
    assert engine.pool.num_free == 12


MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 12), st.integers(0, 6)),
        st.tuples(st.just("cancel"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("step"), st.just(0), st.just(0)),
    ),
    min_size=20,
    max_size=60,
)


@settings(max_examples=8)
@given(MOVES)
def test_after_any_submissions_and_cancellations_every_block_is_free(moves):
    pool = blocks(16)
    engine = Engine(tiny.base(), tiny.oracle(2), pool=pool, max_batch=4)
    streams: list[Stream] = []
    for move, first, second in moves:
        if move == "submit":
            streams.append(ask(engine, prompt=[first] * first, max_new_tokens=second))
        elif move == "step":
            engine.step()
        elif streams:
            streams[first % len(streams)].cancel()
        held = sum(one.num_blocks for one in engine.running)
        assert pool.num_blocks - pool.num_free <= held <= pool.num_blocks
    engine.run()
    assert pool.num_free == pool.num_blocks
    assert not any(pool.references)
    for stream in streams:
        assert stream.finish_reason in ("length", "cancelled")
        if stream.finish_reason == "length":
            assert len(stream.tokens) == stream.request.max_new_tokens


# --- why requests end --------------------------------------------------------------------------


def test_an_end_of_text_inside_a_drafted_path_ends_the_row_there():
    said = tiny.continuations()[0]
    # the first token comes with the prompt, and each forward brings five
    place = next(place for place in range(7, 10) if said[place] not in said[:place])
    engine = Engine(tiny.base(), tiny.oracle(4))
    ended, ignored = ask(engine, eos_ids=(said[place],)), ask(engine, eos_ids=())
    engine.run()
    assert ended.tokens == said[: place + 1]
    assert ended.finish_reason == "eos"
    assert len(ended.steps[-1].tokens) == 5
    assert ignored.finish_reason == "length"


def test_a_request_of_nothing_gets_it_at_once():
    engine = Engine(tiny.base())
    stream = ask(engine, max_new_tokens=0)
    assert (stream.tokens, stream.finish_reason, list(stream)) == ([], "length", [])
    assert engine.step() is False


def test_a_full_context_ends_the_row():
    engine = Engine(tiny.base(), tiny.oracle(4), max_length=12)
    stream, full = ask(engine), ask(engine, prompt=[1] * 12)
    engine.run()
    assert stream.tokens == tiny.continuations()[0][:7]
    assert stream.finish_reason == "context"
    assert (full.tokens, full.finish_reason) == ([], "context")


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"prompt": []}, "a prompt needs at least one token"),
        ({"prompt": [1] * 129}, "129 tokens exceed 128; shorten it"),
        ({"max_new_tokens": -1}, "at least 0, got -1"),
        ({"stop": ("",)}, "at least one character"),
        ({"stop": ("a",)}, "need a base with a tokenizer, and 'tiny-llama' has none"),
    ],
)
def test_what_can_never_be_decoded_is_refused_when_it_is_submitted(wanted, message):
    engine = Engine(tiny.base())
    with pytest.raises(ValueError, match=message):
        ask(engine, **wanted)
    assert engine.waiting == []


def test_an_engine_without_rows_is_refused():
    with pytest.raises(ValueError, match="max_batch must be at least 1, got 0"):
        Engine(tiny.base(), max_batch=0)


# --- streams -----------------------------------------------------------------------------------


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tiny.base(), "tokenizer", tokenizer())
    return tiny.base()


def joined(pieces: list[Piece]) -> tuple[list[int], str]:
    return [token for piece in pieces for token in piece.tokens], "".join(p.text for p in pieces)


def test_a_stream_yields_tokens_as_they_come_and_drives_the_others():
    engine = Engine(tiny.base(), tiny.oracle(3))
    streams = [ask(engine, prompt=prompt, max_new_tokens=9) for prompt in tiny.prompts()]
    pieces = list(streams[0])
    assert [len(piece.tokens) for piece in pieces] == [5, 4]
    assert all(piece.text == "" for piece in pieces)
    assert [stream.tokens for stream in streams] == [said[:9] for said in tiny.continuations()]


@pytest.mark.parametrize("depth", [0, 4])
def test_streamed_text_is_the_text_however_many_tokens_come_at_once(depth, base):
    engine = Engine(base, tiny.oracle(depth) if depth else None)
    for prompt, said in zip(tiny.prompts(), tiny.continuations(), strict=True):
        stream = ask(engine, prompt=prompt, max_new_tokens=tiny.NEW_TOKENS)
        pieces = list(stream)
        assert len(pieces) > 5
        assert joined(pieces) == (stream.tokens, stream.text)
        assert stream.tokens == said
        before = base.tokenizer.decode(prompt).rstrip("\N{REPLACEMENT CHARACTER}")
        whole = base.tokenizer.decode(prompt + said, skip_special_tokens=True)
        assert whole == before + stream.text


@pytest.mark.parametrize("depth", [0, 4])
def test_a_stop_string_ends_the_text_right_before_it(depth, base):
    said = tiny.continuations()[0]
    text = ask(Engine(base), max_new_tokens=30)
    list(text)
    # a string that stands once, from the middle of the text, over several tokens
    start = next(n for n in range(9, 25) if text.text.find(text.text[n : n + 5]) == n)
    stop = text.text[start : start + 5]
    engine = Engine(base, tiny.oracle(depth) if depth else None, pool=base.pool(40, 4))
    stream = ask(engine, max_new_tokens=30, stop=("never said", stop))
    pieces = list(stream)
    assert stream.finish_reason == "stop"
    assert stream.text == text.text[:start]
    assert joined(pieces) == (stream.tokens, stream.text)
    assert said[: len(stream.tokens)] == stream.tokens
    assert engine.pool is not None
    assert engine.pool.num_free == 40
    # what might have begun a stop string and did not is said in the end
    other = ask(engine, max_new_tokens=30, stop=(stop[:-1] + "?never",))
    assert joined(list(other)) == (said[:30], text.text)
    assert other.finish_reason == "length"
