"""What a call of transformers' `generate` asks for, in the terms of this library's loop.

What would change the output and cannot be done here is refused, never passed over: see
docs/transformers.md.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)
from transformers.generation.streamers import BaseStreamer

from specheads.core.errors import InputError
from specheads.decoding.acceptance.sampling import Sampling

_CHANGES: dict[type, tuple[str, str]] = {
    RepetitionPenaltyLogitsProcessor: ("repetition_penalty", "penalty"),
    TemperatureLogitsWarper: ("temperature", "temperature"),
    TopKLogitsWarper: ("top_k", "top_k"),
    TopPLogitsWarper: ("top_p", "top_p"),
    MinPLogitsWarper: ("min_p", "min_p"),
}
"""What may change logits, in `Sampling`'s order: its setting, and where it has it."""

_HARMLESS = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"}
"""Arguments of the model that are looked at here, or change no token."""

_RECORDS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


@dataclass(frozen=True, slots=True)
class Call:
    """What one call asks for."""

    prompts: list[list[int]]
    """Without their padding."""
    max_new_tokens: int
    eos_ids: tuple[int, ...]
    pad_id: int
    """Follows a row that ended before others."""
    sampling: Sampling
    criteria: StoppingCriteriaList
    """When a row ends, besides its length and its end-of-text tokens."""
    streamer: BaseStreamer | None
    as_dict: bool
    """Whether a `ModelOutput` is wanted."""


def read_call(
    input_ids: Int[Tensor, "batch time"],
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> Call:
    """Return what a call asks for; the arguments are what transformers hands a function."""
    given = caller()
    _refuse(config, given, model_kwargs)
    batch, width = input_ids.shape
    padding = _padding(input_ids, model_kwargs)
    rows = zip(input_ids.tolist(), padding.tolist(), strict=True)
    sampling = _sampling(processors, bool(config.do_sample), padding)
    ends = [one.eos_token_id for one in criteria if type(one) is EosTokenCriteria]
    eos_ids = tuple(token for ids in ends for token in ids.tolist())
    lengths = [one.max_length for one in criteria if type(one) is MaxLengthCriteria]
    others = [one for one in criteria if type(one) not in (EosTokenCriteria, MaxLengthCriteria)]
    streamer = given.get("streamer")
    # the rows of a batch advance each at a pace of its own, and nothing may tie them together
    whole = [one for one in others if type(one) not in (StopStringCriteria, MaxTimeCriteria)]
    if batch > 1 and (whole or streamer is not None):
        raise InputError(
            f"{type((whole or [streamer])[0]).__name__} can follow one prompt at a time; generate "
            "for each prompt alone"
        )
    if batch > 1 and others and not eos_ids:
        raise InputError(
            f"{type(others[0]).__name__} can end the rows of a batch where padding follows them; "
            "set eos_token_id, or generate for each prompt alone"
        )
    pad_id = config.pad_token_id
    return Call(
        prompts=[row[empty:] for row, empty in rows],
        max_new_tokens=max(min(lengths) - width, 1),
        eos_ids=eos_ids,
        # as transformers has it; without an end-of-text token no row ends early
        pad_id=pad_id if pad_id is not None else next(iter(eos_ids), 0),
        sampling=sampling,
        criteria=StoppingCriteriaList(others),
        streamer=streamer,
        as_dict=bool(config.return_dict_in_generate),
    )


def caller() -> dict[str, Any]:
    """Return what the `generate` of transformers that is running was called with.

    It keeps some of its arguments from the functions it calls: a streamer it was given would wait
    for ever, and code from a repository does not learn which repository it is from.
    """
    code = inspect.unwrap(vars(GenerationMixin)["generate"]).__code__
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return {} if frame is None else frame.f_locals


def _refuse(config: GenerationConfig, given: dict[str, Any], model_kwargs: dict[str, Any]) -> None:
    mode = config.get_generation_mode(given.get("assistant_model"))
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise InputError(
            f"a head decodes greedily or by sampling, and this asks for {mode.value}; leave out "
            "what asks for it, or leave out custom_generate"
        )
    if recorded := [name for name in _RECORDS if getattr(config, name)]:
        raise InputError(
            f"a head leaves no record of each token: {recorded[0]} cannot be had; leave it out, "
            "or leave out custom_generate"
        )
    if config.cache_implementation == "quantized":
        raise InputError("a head decodes with exact caches; leave out cache_implementation")
    if given.get("synced_gpus"):
        raise InputError("a head decodes on one process; leave out synced_gpus")
    cache = model_kwargs.get("past_key_values")
    if cache is not None and (getattr(cache, "_is_user_defined", False) or cache.get_seq_length()):
        raise InputError(
            "a head keeps a cache of its own, and past_key_values was given; pass the whole text "
            "and no cache"
        )
    unknown = {name for name, value in model_kwargs.items() if value is not None} - _HARMLESS
    if unknown:
        raise InputError(
            f"a head decodes from tokens alone, and {min(unknown)} was given; leave it out, or "
            "leave out custom_generate"
        )


def _padding(
    input_ids: Int[Tensor, "batch time"], model_kwargs: dict[str, Any]
) -> Int[Tensor, " batch"]:
    """Return how many tokens of each row are padding, which is on the left."""
    mask = model_kwargs.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask.to(input_ids.device)
    padding = (mask == 0).sum(1)
    places = torch.arange(input_ids.shape[1], device=input_ids.device)
    counted = places >= padding[:, None]
    if mask.shape != input_ids.shape or not counted[:, -1:].all() or (mask.bool() != counted).any():
        raise InputError(
            "attention_mask may leave out padding on the left of a prompt, and nothing else; set "
            "padding_side='left' in the tokenizer, and leave a token in each prompt"
        )
    positions = model_kwargs.get("position_ids")
    if positions is not None:
        wanted = places - padding[:, None]
        if positions.ndim != 2 or ((positions.to(wanted.device) != wanted) & counted).any():
            raise InputError(
                "a head decodes from tokens alone, and position_ids counts them otherwise than "
                "one by one; leave it out, or leave out custom_generate"
            )
    return padding


def _sampling(
    processors: LogitsProcessorList, do_sample: bool, padding: Int[Tensor, " batch"]
) -> Sampling:
    """Return the settings that mean what these processors do, with a seed from torch's own."""
    order, last = list(_CHANGES), -1
    settings: dict[str, Any] = {"temperature": 1.0}
    for processor in processors:
        kind = type(processor)
        place = order.index(kind) if kind in order else -1
        ignored = getattr(processor, "prompt_ignore_length", None)
        # whether it does what its one setting says
        is_plain = (
            getattr(processor, "min_tokens_to_keep", 1) == 1
            and getattr(processor, "filter_value", -torch.inf) == -torch.inf
            and (ignored is None or bool((torch.as_tensor(ignored).to(padding) == padding).all()))
        )
        if place <= last or not is_plain:
            raise InputError(
                "a head can change logits by repetition_penalty, temperature, top_k, top_p and "
                f"min_p only, each once, got {kind.__name__}; leave it out, or leave out "
                "custom_generate"
            )
        name, attribute = _CHANGES[kind]
        settings[name], last = getattr(processor, attribute), place
    if not do_sample:
        return Sampling(repetition_penalty=settings.get("repetition_penalty", 1.0))
    # drawn where transformers would draw its tokens, so that torch.manual_seed settles both
    return Sampling(**settings, seed=int(torch.randint(2**63 - 1, ())))
