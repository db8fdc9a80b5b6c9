"""The tokenizer that a GGUF file describes: text is split as its merges were learned."""

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from specheads.core.errors import InputError

CONTROL, USER_DEFINED = 3, 4
"""Types of tokens that are never cut; text that looks like a control token is one."""

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""GPT-4's too."""
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class Splitting:
    """How one family of byte-level tokenizers prepares text for its merges."""

    pattern: str = ""
    """Regular expression of the pieces; empty is GPT-2's."""
    digits: bool = False
    """Whether every digit is a piece of its own first."""
    composes: bool = False
    """Whether text is put into Unicode's composed form (NFC) first."""
    ignores_merges: bool = False
    """Whether a piece that is a token is taken whole, whatever the merges say."""
    adds_bos: bool = False
    """Whether a text begins with the token for that where the file does not say."""

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """Return what cuts text into pieces, and spells their bytes."""
        if self.pattern:
            first = pre_tokenizers.Split(Regex(self.pattern), behavior="isolated")
            bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            return pre_tokenizers.Sequence([first, bytes_])
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        if not self.digits:
            return plain
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, plain])


_GPT2, _DIGITS = Splitting(), Splitting(digits=True)
_LLAMA3 = Splitting(LLAMA3, ignores_merges=True, adds_bos=True)

SPLITTINGS = {
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "qwen2": Splitting(QWEN2, composes=True),
    "tekken": Splitting(TEKKEN, ignores_merges=True, adds_bos=True),
}
"""By `tokenizer.ggml.pre`, as src/llama-vocab.cpp of llama.cpp (00ad355) and the tokenizer.json of
the models have them. transformers 5.23 knows some of them, and splits the others as GPT-2 did,
which puts other tokens before digits than a model like SmolLM2 has learned."""


def make_tokenizer(file: Path, fields: dict[str, Any]) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a GGUF file, with its chat template.

    Args:
        file: The file, for the sentencepiece kind, which transformers reads itself.
        fields: What the file says, by its names.

    Raises:
        ValueError: It is of a kind, or splits text in a way, that is not known here.
    """
    kind, way = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if kind == "llama":
        # transformers would also read the settings that are next to the file, and code they name
        with TemporaryDirectory() as empty:
            read = AutoTokenizer.from_pretrained(
                empty, gguf_file=str(file), trust_remote_code=False
            )
        # transformers 5.17 passes over what the file says of them
        read.backend_tokenizer.post_processor = _ends(fields, adds_bos=True)
        return read
    if kind != "gpt2" or way not in SPLITTINGS:
        name, value = ("pre", way) if kind == "gpt2" else ("model", kind)
        known = ", ".join(SPLITTINGS) if kind == "gpt2" else "gpt2, llama"
        raise InputError(
            f"tokenizer.ggml.{name} of a GGUF file must be one of {known}, got {value!r:.80}: "
            "text would be cut into wrong tokens; take the base's own folder or Hub id"
        )
    tokens = fields["tokenizer.ggml.tokens"]
    special = {
        name: tokens[place]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if (place := fields.get(f"tokenizer.ggml.{key}_token_id")) is not None
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=_byte_level(fields, SPLITTINGS[way]),
        chat_template=fields.get("tokenizer.chat_template"),
        model_max_length=fields[f"{fields['general.architecture']}.context_length"],
        clean_up_tokenization_spaces=False,
        **{f"{name}_token": token for name, token in special.items()},
    )


def _byte_level(fields: dict[str, Any], splitting: Splitting) -> Tokenizer:
    tokens = fields["tokenizer.ggml.tokens"]
    vocab = {token: number for number, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise InputError(
            f"tokenizer.ggml.tokens of a GGUF file must differ, and {len(tokens) - len(vocab)} "
            "stand there twice; take the base's own folder or Hub id"
        )
    pairs = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(BPE(vocab, pairs, ignore_merges=splitting.ignores_merges))
    if splitting.composes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = splitting.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    types = fields.get("tokenizer.ggml.token_type") or [0] * len(tokens)
    whole = [
        AddedToken(token, normalized=False, special=kind == CONTROL)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (CONTROL, USER_DEFINED)
    ]
    tokenizer.add_tokens(whole)
    tokenizer.add_special_tokens([token for token in whole if token.special])
    tokenizer.post_processor = _ends(fields, adds_bos=splitting.adds_bos)
    return tokenizer


def _ends(fields: dict[str, Any], *, adds_bos: bool) -> TemplateProcessing:
    """Return what puts the tokens around a text that the file wants there."""
    places = {
        name: fields[f"tokenizer.ggml.{name}_token_id"]
        for name, default in (("bos", adds_bos), ("eos", False))
        if fields.get(f"tokenizer.ggml.add_{name}_token", default)
        and f"tokenizer.ggml.{name}_token_id" in fields
    }
    known = {name: fields["tokenizer.ggml.tokens"][place] for name, place in places.items()}
    before, after = known.get("bos", ""), known.get("eos", "")
    return TemplateProcessing(
        single=" ".join(filter(None, [before, "$A", after])),
        pair=" ".join(filter(None, [before, "$A", after, before, "$B:1", after])),
        special_tokens=[*{known[name]: place for name, place in places.items()}.items()],
    )
