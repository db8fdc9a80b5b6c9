"""How a base and its tokenizer come from a folder or the Hub; no code of theirs is run."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from specheads.base.masks import refuse_attention


def load_model(
    source: str, *, revision: str, dtype: str, device: str, attention: str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load model and tokenizer; the arguments are those of `FrozenBase.load`.

    Raises:
        ValueError: The dtype or the attention is unknown, or transformers cannot load it.
    """
    refuse_attention(attention)
    place = torch.device(
        ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    )
    if dtype == "auto":
        dtype = "bfloat16" if place.type == "cuda" else "float32"
    if not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ValueError(f"dtype must name a torch dtype such as 'float32', got {dtype!r}")
    try:
        AutoConfig.from_pretrained(source, revision=revision)
        tokenizer = AutoTokenizer.from_pretrained(source, revision=revision)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"a base must be a folder or a Hub id that transformers can load, got "
            f"{source!r}: {str(error).splitlines()[0]}"
        ) from error
    loaded = AutoModelForCausalLM.from_pretrained(
        source,
        revision=revision,
        dtype=getattr(torch, dtype),
        attn_implementation=attention,
        use_safetensors=True,
    )
    # transformers wraps `to` in a way that hides from pyright what it is bound to
    loaded.to(place)  # pyright: ignore[reportArgumentType]
    return loaded, tokenizer
