"""Text that is written token by token is the text of all its tokens, and never taken back."""

import random

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from specheads.decoding.detokenize import TextStream, token_text

PIECES = [
    *(letter.encode() for letter in "abcdefghijklmnopqrstuvwxyz ABCDEF0123"),
    *(b"ab", b"bc", b"c d", b" the", b"ing", b"\n\n", "é".encode(), "日本".encode()),
    # parts of é and of €, ends that are beginnings too, and an emoji
    *(b"\xc3", b"\xa9", b"\xe2", b"\x82", b"\xac", b"\xe2\x82", b"\xac\xc3", b"\xa9b"),
    *(b"\xf0", b"\x9f", b"\x98", b"\x80", b"\xf0\x9f\x98", b"a\xe2", b"\x82\xac"),
]
END = len(PIECES)
SAME = [*range(33, 127), *range(161, 173), *range(174, 256)]
OTHERS = [byte for byte in range(256) if byte not in SAME]
NAMES = {byte: chr(byte) for byte in SAME} | {byte: chr(256 + n) for n, byte in enumerate(OTHERS)}
"""What byte-level vocabularies call each byte."""


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of as many tokens as the tiny bases have; some cut characters."""
    vocab = {"".join(map(NAMES.__getitem__, piece)): index for index, piece in enumerate(PIECES)}
    bpe = Tokenizer(models.BPE(vocab | {"<end>": END}, []))
    bpe.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<end>")


def ids(*pieces: bytes) -> list[int]:
    return [PIECES.index(piece) for piece in pieces]


def written(tokens: list[int], stop: tuple[str, ...] = ()) -> TextStream:
    text = TextStream(tokenizer(), ids(b"x"), stop)
    for token in tokens:
        if not text.is_over:
            text.push(token)
    return text


@pytest.mark.parametrize("seed", range(8))
def test_any_tokens_are_written_as_they_are_decoded_together(seed):
    generator = random.Random(seed)
    tokens = [generator.randrange(END) for _ in range(60)]
    text = TextStream(tokenizer(), ids(b"x"))
    for token in tokens:
        _, before = text.count_final()
        stands = text.written[:before]
        text.push(token)
        assert text.written.startswith(stands)
    text.close()
    assert text.written == tokenizer().decode(tokens)
    assert text.count_final() == (60, len(text.written))


def test_a_character_that_the_prompt_began_belongs_to_the_text():
    text = TextStream(tokenizer(), ids(b"x", b"\xe2\x82"))
    text.push(*ids(b"\xac"))
    assert text.written == "€"


def test_text_that_may_begin_a_stop_string_waits():
    #  x y c     the stop strings are "cd" and "yc!"
    text = written(ids(b"x", b"y", b"c"), ("cd", "yc!"))
    assert text.count_final() == (1, 1)
    text.push(*ids(b"a"))
    assert text.count_final() == (4, 4)


def test_of_two_stop_strings_the_one_completed_first_counts():
    assert written(ids(b"a", b"b", b"c"), ("abcd", "bc")).written == "a"
    assert written(ids(b"ab", b"c d"), ("b", "ab")).written == ""


def test_each_token_has_a_text_of_its_own_or_a_name():
    cut = ids(b"a", b"\xe2", b"\x82\xac", b"\xf0\x9f\x98", b" the")
    texts = [token_text(tokenizer(), cut[:end], token) for end, token in enumerate(cut)]
    assert texts == ["a", "⟨â⟩", "€", "⟨ðŁĺ⟩", "\N{REPLACEMENT CHARACTER} the"]
    assert token_text(tokenizer(), cut, END) == "⟨<end>⟩"


def test_a_blank_before_a_word_is_the_words_own_wherever_the_vocabulary_has_it():
    words = Tokenizer(models.BPE({"▁the": 0, "▁cat": 1, "s": 2, "<0xE2>": 3}, []))
    words.decoder = decoders.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=words)
    assert token_text(fast, [0], 1) == " cat"
    assert token_text(fast, [0, 1], 2) == "s"
    assert token_text(fast, [0], 3) == "⟨<0xE2>⟩"
