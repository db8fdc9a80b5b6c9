"""Load a base and its tokenizer from a folder, the Hub or GGUF. Code of a checkpoint never runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.tokenization_auto import (
    get_tokenizer_config,
    tokenizer_class_from_name,
)
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from specheads.base.file_checks import (
    attention_of,
    auto_class,
    honour_tokenizer,
    reading,
    refuse_ignored,
    refuse_mismatch,
)
from specheads.base.gguf import load_path
from specheads.base.masks import refuse_attention
from specheads.base.sharding import Sharding
from specheads.core.errors import InputError, first_line
from specheads.core.machine import computes_bfloat16

DTYPES = ("float32", "float64", "bfloat16", "float16")
TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken", "tekken.json")
"""A folder with a tokenizer has at least one of these."""
LOADING = Lock()
"""transformers changes torch's modules while it loads a model, so threads load one by one."""
MAX_SIZES = {"num_hidden_layers": 1024, "num_labels": 2**20, "max_position_embeddings": 2**40}
"""Largest plausible sizes: the first two allocate memory before any weight is read."""


def load_model(
    source: str,
    *,
    revision: str,
    dtype: str,
    device: str | Sharding,
    attention: str,
    ends_only: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Load a model and its tokenizer; the tokenizer is None if the folder has no tokenizer files.

    The dtype "auto" is bfloat16 if the device computes it, else float32. The device "auto" is CUDA
    if available. With a `Sharding` the model is loaded on the CPU first. `ends_only` reads no
    layer; the config keeps their number.
    """
    refuse_attention(attention)
    sharded = isinstance(device, Sharding)
    torch_device = device.device if isinstance(device, Sharding) else device_of(device)
    direct = torch_device.type == "cuda" and not sharded
    source = load_path(source)
    config = load_config(source, revision=revision)
    folder, tokenizer = Path(source), load_tokenizer(source, revision=revision)
    text_config = config.get_text_config()
    num_layers = text_config.num_hidden_layers
    if ends_only:
        text_config.num_hidden_layers = 0
    if (folder / "generation_config.json").is_file():
        # transformers ignores a damaged file, and with it the tokens that end a text
        with reading("generation_config.json", source):
            ends = GenerationConfig.from_pretrained(source).eos_token_id
            ids = ends if isinstance(ends, list) else [ends or 0]
            if not all(type(id) is int for id in ids):
                raise InputError(f"eos_token_id must be token ids, got {ends!r}; fix it there")
    with reading("weights", source), LOADING:
        # output_loading_info adds a result that pyright does not know
        from_pretrained: Any = auto_class(config).from_pretrained
        loaded, info = from_pretrained(
            source,
            config=config if ends_only else None,
            revision=revision,
            dtype=_torch_dtype(dtype, torch_device),
            attn_implementation=attention_of(config, attention),
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            trust_remote_code=False,
            # reads 16 GB several times faster
            device_map={"": torch_device} if direct else None,
        )
        if ends_only:
            info["unexpected_keys"] = []
            loaded.config.get_text_config().num_hidden_layers = num_layers
        refuse_mismatch(source, info)
        if getattr(loaded.config, "quantization_config", None) is None:
            _refuse_integers(source, revision)
    return loaded if direct or sharded else loaded.to(torch_device), tokenizer


def _refuse_integers(source: str, revision: str) -> None:
    """Refuse weights that are integers, which transformers converts without their scales."""
    folder = Path(source)
    if not folder.is_dir():
        pattern = "*.safetensors"
        snapshot = snapshot_download(
            source, revision=revision, allow_patterns=pattern, local_files_only=True
        )
        folder = Path(snapshot)
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                dtype = tensors.get_slice(name).get_dtype()
                if name.endswith("weight") and not dtype.startswith(("F", "BF")):
                    raise InputError(
                        f"the weights of a base must be floating-point numbers, and {name} of "
                        f"{source!r:.200} has {dtype}; choose a base that is not quantised"
                    )


def load_config(source: str, *, revision: str) -> PreTrainedConfig:
    """Load the config.json of a base's folder or Hub id, whose settings must be honoured."""
    with reading("config.json", source):
        if Path(source).is_file():
            raise InputError(f"a base must be a folder, and {source!r} is a file; name its folder")
        settings, _ = PreTrainedConfig.get_config_dict(source, revision=revision)
        for name, maximum in MAX_SIZES.items():
            if isinstance(size := settings.get(name), int) and not 1 <= size <= maximum:
                raise InputError(f"{name} of config.json must be 1 to {maximum}, got {size:.4g}")
        kind, code = settings.get("model_type"), bool(settings.get("auto_map"))
        if code and kind not in CONFIG_MAPPING:
            _refuse_code(source, "config.json", f"model_type is {kind!r:.80}")
        config = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
        if auto_class(config) is None:
            if code:
                _refuse_code(source, "config.json", f"model_type is {kind!r:.80}")
            raise InputError(
                f"transformers has no class that generates text for {kind!r:.80}; name another base"
            )
        refuse_ignored(config, settings)
        return config


def _torch_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        computed = device.type == "cuda" or (device.type == "cpu" and computes_bfloat16())
        name = "bfloat16" if computed else "float32"
    if name not in DTYPES:
        raise InputError(
            f"dtype must name a torch dtype such as {', '.join(map(repr, DTYPES))}, got {name!r}"
        )
    return getattr(torch, name)


def load_tokenizer(source: str, *, revision: str) -> PreTrainedTokenizerBase | None:
    """Load only the tokenizer of a base; None if the folder has no tokenizer files."""
    source = load_path(source)
    folder = Path(source)
    if folder.is_dir() and not any(any(folder.glob(name)) for name in TOKENIZER_FILES):
        return None
    with reading("tokenizer", source):
        settings = get_tokenizer_config(source, revision=revision)
        # transformers would fall back to a class that splits text differently
        name, code = settings.get("tokenizer_class"), settings.get("auto_map") or {}
        if (isinstance(code, list) or "AutoTokenizer" in code) and not _has_tokenizer_class(name):
            _refuse_code(source, "tokenizer_config.json", f"tokenizer_class is {name!r:.80}")
        tokenizer = AutoTokenizer.from_pretrained(
            source, revision=revision, trust_remote_code=False
        )
        honour_tokenizer(tokenizer, settings)
        return tokenizer


def _has_tokenizer_class(tokenizer: object) -> bool:
    """Return whether transformers has a tokenizer class of this name."""
    name = tokenizer if isinstance(tokenizer, str) else ""
    names = (name, name.removesuffix("Fast"), f"{name}Fast") if name else ()
    return any(tokenizer_class_from_name(class_name) is not None for class_name in names)


def _refuse_code(source: str, file: str, unknown: str) -> None:
    raise InputError(
        f"code that comes with a base never runs, and {file} of {source!r:.200} needs it "
        f"(auto_map, and {unknown}, for which transformers has no class); use a base that "
        "transformers supports, or convert this one"
    )


def device_of(name: str) -> torch.device:
    """Return a device by its name; "auto" is CUDA if available."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        # a valid name need not be a device of this machine
        return torch.empty(0, device=name).device
    except (AssertionError, ImportError, NotImplementedError, RuntimeError, TypeError) as error:
        raise InputError(
            f"device must name a torch device of this machine, got {name!r} "
            f"({first_line(error):.80}); use 'cpu' or 'auto'"
        ) from error


@contextmanager
def without_generation_config(model: PreTrainedModel) -> Iterator[None]:
    """Temporarily hide the model's `generation_config`, which transformers uses as defaults."""
    before = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = before
