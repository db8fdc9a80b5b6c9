"""How a base and its tokenizer come from a folder or the Hub; no code of theirs is run."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from huggingface_hub.utils import are_progress_bars_disabled
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils import logging

from specheads.base.masks import refuse_attention
from specheads.core.errors import InputError

DTYPES = ("float32", "float64", "bfloat16", "float16")
TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken", "tekken.json")
"""Names of which a folder with a tokenizer has one at least."""

MOST = {"num_hidden_layers": 1024, "num_labels": 2**20, "max_position_embeddings": 2**40}
"""Sizes that nobody means above this: the first two take memory before any weight is read."""


def load_model(
    source: str, *, revision: str, dtype: str, device: str, attention: str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Load a model and its tokenizer; a folder without tokenizer files has none.

    The revision is one of the Hub, and ignored for a folder. The dtype is one of `DTYPES`, or
    "auto": bfloat16 on CUDA and float32 elsewhere; the device "auto" is CUDA where there is one.
    """
    refuse_attention(attention)
    place = _device(device)
    if dtype == "auto":
        dtype = "bfloat16" if place.type == "cuda" else "float32"
    if dtype not in DTYPES:
        raise InputError(
            f"dtype must name a torch dtype such as {', '.join(map(repr, DTYPES))}, got {dtype!r}"
        )
    with _reading("config.json", source):
        _refuse_file(source)
        sizes, _ = PreTrainedConfig.get_config_dict(source, revision=revision)
        _refuse_sizes(sizes)
        AutoConfig.from_pretrained(source, revision=revision)
    folder, tokenizer = Path(source), load_tokenizer(source, revision=revision)
    if (folder / "generation_config.json").is_file():
        # transformers would pass over a damaged one, and with it over what ends a text
        with _reading("generation_config.json", source):
            _refuse_ends(GenerationConfig.from_pretrained(source))
    with _reading("weights", source):
        if folder.is_dir() and not any(folder.glob("*.safetensors")):
            # unpickling would run a stranger's code
            found = min((path.name for path in folder.glob("*.bin")), default="none")
            raise InputError(
                f"weights must lie in {source!r} in safetensors, and it has {found}; write them "
                "with save_pretrained of a model that you trust"
            )
        # pyright does not know that it returns what it was asked to tell too
        read: Any = AutoModelForCausalLM.from_pretrained
        loaded, told = read(
            source,
            revision=revision,
            dtype=getattr(torch, dtype),
            attn_implementation=attention,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
        _refuse_unwhole(source, told)
    return loaded.to(place), tokenizer


def load_tokenizer(source: str, *, revision: str) -> PreTrainedTokenizerBase | None:
    """Load a base's tokenizer alone; a folder without tokenizer files has none."""
    folder = Path(source)
    if folder.is_dir() and not any(any(folder.glob(name)) for name in TOKENIZER_FILES):
        return None
    with _reading("tokenizer", source):
        return AutoTokenizer.from_pretrained(source, revision=revision)


@contextmanager
def _reading(part: str, source: str) -> Iterator[None]:
    """Tell by name which part of a base cannot be read; keep transformers' tables and bars back."""
    # transformers' switch turns the Hub client's bars too, and not every reader has those on
    shows_bars = logging.is_progress_bar_enabled() and not are_progress_bars_disabled()
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        # a damaged file brings any error out of transformers, and a bare one out of tokenizers
        raise InputError(
            f"a base must be a folder or a Hub id that transformers can load, got "
            f"{source!r:.200}, whose {part} it cannot read ({reason(error)}); name another, or "
            "write the folder anew with save_pretrained"
        ) from error
    finally:
        logging.set_verbosity(level)
        if shows_bars:
            logging.enable_progress_bar()


def reason(error: Exception) -> str:
    """Return in one short line what a library says of a file."""
    return f"{type(error).__name__}: {shorten(str(error), 160)}"


def _refuse_file(source: str) -> None:
    if Path(source).is_file():
        raise InputError(f"a base must be a folder, and {source!r} is a file; name its folder")


def _refuse_sizes(settings: dict[str, Any]) -> None:
    for name, most in MOST.items():
        if isinstance(size := settings.get(name), int) and not 1 <= size <= most:
            raise InputError(f"{name} of config.json must be 1 to {most}, got {size:.4g}; mend it")


def _refuse_ends(generation: GenerationConfig) -> None:
    ids = generation.eos_token_id
    if not all(type(one) is int for one in (ids if isinstance(ids, list) else [ids or 0])):
        raise InputError(
            f"eos_token_id of generation_config.json must be token ids, got {ids!r}; mend it there"
        )


def _refuse_unwhole(source: str, told: dict[str, Any]) -> None:
    """Refuse weights that are not those of config.json: what is lacking would be random."""
    shapes = [f"{name} of {[*has]} for {[*wants]}" for name, has, wants in told["mismatched_keys"]]
    parts = {
        "lack": sorted(told["missing_keys"]),
        "have too much with": sorted(told["unexpected_keys"]),
        "have in another shape": sorted(shapes),
    }
    if strange := {what: names for what, names in parts.items() if names}:
        listed = ", and ".join(
            f"{what} {', '.join(names[:2])}{f' and {len(names) - 2} more' if names[2:] else ''}"
            for what, names in strange.items()
        )
        raise InputError(
            f"a base must be whole: beside its config.json the weights of {source!r} {listed}; "
            "mend config.json, or write both anew with save_pretrained"
        )


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        if torch.device(name).type == "meta":
            raise RuntimeError("it holds no numbers")
        # a name may be right, and no such device be here
        return torch.empty(0, device=name).device
    except (AssertionError, ImportError, NotImplementedError, RuntimeError, TypeError) as error:
        raise InputError(
            f"device must name a torch device of this machine, got {name!r} "
            f"({str(error).splitlines()[0].partition('. ')[0]:.80}); use 'cpu', or 'auto' for CUDA "
            "where there is one"
        ) from error
