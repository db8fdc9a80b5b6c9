"""How a base and its tokenizer come from a folder or the Hub; no code of theirs is run."""

from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from specheads.base.masks import refuse_attention
from specheads.core.errors import InputError

DTYPES = ("float32", "float64", "bfloat16", "float16")
TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken", "tekken.json")
"""Names of which a folder with a tokenizer has one at least."""


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
    try:
        AutoConfig.from_pretrained(source, revision=revision)
        folder, tokenizer = Path(source), None
        if not folder.is_dir() or any(any(folder.glob(name)) for name in TOKENIZER_FILES):
            tokenizer = AutoTokenizer.from_pretrained(source, revision=revision)
        if folder.is_dir() and not any(folder.glob("*.safetensors")):
            # unpickling would run a stranger's code
            found = min((path.name for path in folder.glob("*.bin")), default="none")
            raise InputError(
                f"weights must lie there in safetensors, and it has {found}; write them with "
                "save_pretrained of a model that you trust"
            )
        loaded = AutoModelForCausalLM.from_pretrained(
            source,
            revision=revision,
            dtype=getattr(torch, dtype),
            attn_implementation=attention,
            use_safetensors=True,
        )
    except (OSError, SafetensorError, ValueError) as error:
        raise InputError(
            f"a base must be a folder or a Hub id that transformers can load, got "
            f"{source!r}: {str(error).splitlines()[0]}"
        ) from error
    # transformers wraps `to` in a way that hides from pyright what it is bound to
    loaded.to(place)  # pyright: ignore[reportArgumentType]
    return loaded, tokenizer


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        # a name may be right, and no such device be here
        return torch.empty(0, device=name).device
    except (AssertionError, ImportError, NotImplementedError, RuntimeError) as error:
        raise InputError(
            f"device must name a torch device of this machine, got {name!r} "
            f"({str(error).splitlines()[0].partition('. ')[0]}); use 'cpu', or 'auto' for CUDA "
            "where there is one"
        ) from error
