"""Heads in transformers' own `generate`, from Python or from a Hub repository.

A call that would need another result than this loop gives is refused. See docs/transformers.md.
"""

import functools
import importlib.metadata
import inspect
import re
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation import logits_process as processors
from transformers.generation import stopping_criteria as stopping
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from specheads.base.model import FrozenBase
from specheads.base.selfcheck import check
from specheads.core.drafter import Drafter, Head
from specheads.core.errors import InputError
from specheads.decoding import accept
from specheads.decoding.engine import Engine, Stream
from specheads.decoding.generate import generate
from specheads.decoding.request import Request
from specheads.decoding.sampling import Sampling, expand_sampling
from specheads.decoding.suffix_decoding import SuffixAutomaton
from specheads.decoding.trees import policies
from specheads.heads.load import fit_to_base, load_head

Generated = Tensor | GenerateDecoderOnlyOutput
_checked: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()
"""Models that passed the check of tree attention."""


def custom_generate(
    head: Drafter,
    *,
    tree: policies.TreePolicy | None = None,
    acceptance: str | accept.AcceptanceRule = "match",
    coupled: bool = True,
    memory: SuffixAutomaton | None = None,
    force: bool = False,
) -> Callable[..., Generated]:
    """Return a function for `model.generate(..., custom_generate=...)`.

    The output has the tokens that `generate` gives without it, in fewer forward passes. Sampled
    tokens have the same distribution, except with the acceptance rule `typical`. Unsupported
    arguments are refused when the function is called.

    Args:
        head: Head; each call moves it to the device and dtype of the model.
        tree: As for `specheads.generate`; None is the tuned tree of the head, or a chain.
        acceptance: As for `specheads.generate`.
        coupled: As for `specheads.generate`.
        memory: As for `specheads.generate`: answers so far to copy from, shared by all calls.
        force: Accept a head that was trained on other weights.
    """

    def decode(
        model: PreTrainedModel,
        input_ids: Int[Tensor, "batch time"],
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Generated:
        """Decode with the arguments that transformers passes."""
        arguments, config = generate_arguments(), generation_config
        _refuse_unsupported(config, arguments, model_kwargs)
        padding = _count_padding(input_ids, model_kwargs)
        limit, eos_ids, criteria = _read_criteria(stopping_criteria, input_ids.shape[1])
        do_sample = bool(config.do_sample)
        sampling = _read_sampling(logits_processor, do_sample, input_ids, padding, eos_ids)
        streamer: BaseStreamer | None = arguments.get("streamer")
        if len(input_ids) > 1 and (criteria or streamer):
            raise InputError(
                f"{type(streamer or criteria[0]).__name__} can follow one prompt; generate one"
            )
        base = _wrap_model(model)
        if isinstance(head, Head):
            # at every call, because the model may have moved or be another one
            with torch.inference_mode(False):
                fit_to_base(head, base, force=force)
        rows = zip(input_ids.tolist(), padding.tolist(), strict=True)
        prompts = [row[num_padding:] for row, num_padding in rows]
        how: Any = {"tree": tree, "acceptance": acceptance, "coupled": coupled, "memory": memory}
        ends: Any = {"max_new_tokens": limit, "eos_ids": eos_ids}
        if criteria or streamer:
            (prompt,), (settings,) = prompts, expand_sampling(sampling, 1)
            engine = Engine(base, head, max_batch=1, max_length=len(prompt) + limit, **how)
            stream = engine.submit(Request(prompt=prompt, sampling=settings, **ends))
            continuations = [_follow_stream(stream, input_ids, criteria, streamer)]
        else:
            continuations = generate(base, head, prompts, sampling=sampling, **how, **ends).tokens
        # the default of transformers; without an end-of-text token no row ends early
        pad_id = next(iter(eos_ids), 0) if config.pad_token_id is None else config.pad_token_id
        width = max(map(len, continuations))
        padded = [tokens + [pad_id] * (width - len(tokens)) for tokens in continuations]
        text = torch.cat([input_ids, torch.tensor(padded, device=input_ids.device)], dim=1)
        output = GenerateDecoderOnlyOutput(sequences=cast(torch.LongTensor, text))
        return output if config.return_dict_in_generate else text

    return decode


def _wrap_model(model: PreTrainedModel) -> FrozenBase:
    """Wrap a user's model and leave it unchanged."""
    if any(module.training for module in model.modules()):
        raise InputError("decoding needs a model in eval mode; call model.eval() first")
    base = FrozenBase(model, name=model.name_or_path or "", compile=False, prepare=False)
    if model not in _checked:
        check(base.forwards)
        _checked.add(model)
    return base


def _follow_stream(
    stream: Stream,
    prompt: Int[Tensor, "1 time"],
    criteria: StoppingCriteriaList,
    streamer: BaseStreamer | None,
) -> list[int]:
    """Return the tokens of a stream up to the first at which a stopping criterion is met."""
    tokens: list[int] = []
    for token in (token for new_tokens, _ in stream for token in new_tokens):
        tokens.append(token)
        if streamer is not None:
            streamer.put(torch.tensor([token]))
        if criteria:
            text = torch.cat([prompt, torch.tensor([tokens], device=prompt.device)], dim=1)
            # transformers also passes None when scores are not recorded
            if criteria(text, None).all():  # pyright: ignore[reportArgumentType]
                stream.cancel()
                break
    if streamer is not None:
        streamer.end()
    return tokens


# --- the arguments of a call -------------------------------------------------------------------

_PROCESSORS: dict[type, tuple[str, str]] = {
    processors.SequenceBiasLogitsProcessor: ("logit_bias", "sequence_bias"),
    processors.RepetitionPenaltyLogitsProcessor: ("repetition_penalty", "penalty"),
    # the words are the keys
    processors.NoBadWordsLogitsProcessor: ("bad_words", "sequence_bias"),
    # transformers adds both for min_new_tokens
    processors.MinLengthLogitsProcessor: ("min_length", "min_length"),
    processors.MinNewTokensLengthLogitsProcessor: ("min_new_tokens", "min_new_tokens"),
    processors.PrefixConstrainedLogitsProcessor: (
        *("prefix_allowed_tokens_fn", "_prefix_allowed_tokens_fn"),
    ),
    processors.TemperatureLogitsWarper: ("temperature", "temperature"),
    processors.TopKLogitsWarper: ("top_k", "top_k"),
    processors.TopPLogitsWarper: ("top_p", "top_p"),
    processors.MinPLogitsWarper: ("min_p", "min_p"),
}
"""Supported processors in `Sampling`'s order: the setting, and the processor's attribute."""
_HARMLESS = {
    *("attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"),
    # other names of past_key_values: since transformers 5.24, and in Mamba
    *("cache", "cache_params"),
}
"""Arguments of the model that are checked here or do not change tokens."""
_RECORDS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


def _read_criteria(
    criteria: StoppingCriteriaList, width: int
) -> tuple[int, tuple[int, ...], StoppingCriteriaList]:
    """Return the largest number of new tokens, the end-of-text tokens, and the other criteria."""
    eos, length = stopping.EosTokenCriteria, stopping.MaxLengthCriteria
    ends = [criterion.eos_token_id for criterion in criteria if type(criterion) is eos]
    lengths = [criterion.max_length for criterion in criteria if type(criterion) is length]
    eos_ids = tuple(token for ids in ends for token in ids.tolist())
    further = [criterion for criterion in criteria if type(criterion) not in (eos, length)]
    return max(min(lengths) - width, 1), eos_ids, StoppingCriteriaList(further)


def generate_arguments() -> dict[str, Any]:
    """Return the local variables of the running `generate` of transformers.

    transformers does not pass on the streamer or the repository that `custom_generate` named.
    """
    code = inspect.unwrap(vars(GenerationMixin)["generate"]).__code__
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return {} if frame is None else frame.f_locals


def _refuse_unsupported(
    config: GenerationConfig, arguments: dict[str, Any], model_kwargs: dict[str, Any]
) -> None:
    """Refuse arguments that a head cannot follow."""
    mode = config.get_generation_mode(arguments.get("assistant_model"))
    caches = ("cache", "cache_params", "past_key_values")
    model_inputs = {name for name, value in model_kwargs.items() if value is not None}
    refused = {
        mode.value: mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE),
        **{name: getattr(config, name) for name in _RECORDS},
        "cache_implementation": config.cache_implementation == "quantized",
        "synced_gpus": arguments.get("synced_gpus"),
        "past_key_values": any(_has_read(model_kwargs.get(name)) for name in caches),
        **dict.fromkeys(sorted(model_inputs - _HARMLESS), True),
    }
    if names := [name for name, is_set in refused.items() if is_set]:
        raise InputError(
            "a head decodes from tokens alone, greedily or by sampling, in one process, with "
            f"caches of its own, and {names[0]} was given; leave out that or custom_generate"
        )


def _has_read(cache: Any) -> bool:
    """Return whether a cache is the user's, or has read tokens."""
    if getattr(cache, "_is_user_defined", False):
        return True
    with suppress(ValueError):
        return bool(cache and cache.get_seq_length())
    # one of states only has no length
    return cache.has_previous_state()


def _count_padding(
    input_ids: Int[Tensor, "batch time"], model_kwargs: dict[str, Any]
) -> Int[Tensor, " batch"]:
    """Return the number of padding tokens on the left of each row."""
    mask = model_kwargs.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask.to(input_ids.device)
    padding = (mask == 0).sum(1)
    positions = torch.arange(input_ids.shape[1], device=input_ids.device)
    is_text, counted = positions >= padding[:, None], positions - padding[:, None]
    position_ids = model_kwargs.get("position_ids", counted)
    position_ids = counted if position_ids is None else position_ids.to(counted.device)
    is_plain = mask.shape == input_ids.shape and is_text[:, -1:].all()
    is_plain = is_plain and (mask.bool() == is_text).all() and position_ids.ndim == 2
    if not is_plain or ((position_ids != counted) & is_text).any():
        raise InputError(
            "attention_mask may leave out padding on the left only, position_ids must count the "
            "other tokens; set padding_side='left', and leave a token in each prompt"
        )
    return padding


def _read_sampling(
    logits_processors: LogitsProcessorList,
    do_sample: bool,
    input_ids: Int[Tensor, "batch time"],
    padding: Int[Tensor, " batch"],
    eos_ids: tuple[int, ...],
) -> Sampling:
    """Return `Sampling` settings equal to these processors, with a seed from torch's generator."""
    order, last = list(_PROCESSORS), -1
    settings: dict[str, Any] = {"temperature": 1.0}
    for processor in logits_processors:
        kind = type(processor)
        rank = order.index(kind) if kind in order else -1
        ignored = getattr(processor, "prompt_ignore_length", None)
        ends = getattr(processor, "eos_token_id", None)
        # other options of the processor must have their default values
        is_plain = (
            getattr(processor, "min_tokens_to_keep", 1) == 1
            and getattr(processor, "filter_value", -torch.inf) == -torch.inf
            and (ignored is None or bool((torch.as_tensor(ignored).to(padding) == padding).all()))
            and (ends is None or {*torch.as_tensor(ends).tolist()} == {*eos_ids})
        )
        if rank <= last or not is_plain:
            raise InputError(
                "a head can change logits by sequence_bias, repetition_penalty, bad_words_ids, "
                "min_new_tokens, prefix_allowed_tokens_fn, temperature, top_k, top_p, min_p, each "
                f"once, got {kind.__name__}; leave out that or custom_generate"
            )
        name, attribute = _PROCESSORS[kind]
        settings[name], last = getattr(processor, attribute), rank
    settings["bad_words"] = [list(word) for word in settings.get("bad_words", ())]
    min_length = settings.pop("min_length", 0) - input_ids.shape[1]
    settings["min_new_tokens"] = max(settings.get("min_new_tokens", 0), min_length, 0)
    if (function := settings.get("prefix_allowed_tokens_fn")) is not None:

        def allowed_tokens(index: int, tokens: Tensor) -> Any:
            # the function gets the row with its padding, as from transformers
            row_padding = input_ids[index, : padding[index]]
            return function(index, torch.cat([row_padding, tokens.to(input_ids.device)]))

        settings["prefix_allowed_tokens_fn"] = allowed_tokens
    if do_sample:
        # so that torch.manual_seed determines the tokens, as in transformers
        settings["seed"] = int(torch.randint(2**63 - 1, ()))
    else:
        settings["temperature"] = 0.0
    return Sampling(**settings)


# --- a head's repository on the Hub ------------------------------------------------------------

_GENERATE = '''\
"""Decode with the speculator head of this repository; its card has an example.

The output is the base's own. Needs `pip install specheads`.
"""

from typing import Any

from specheads.export.custom_generate import hub_generate

REPOSITORY = {repo!r}


def generate(inputs: Any = None, *, model: Any, **arguments: Any) -> Any:
    """Return the result of `model.generate(inputs, **arguments)` in fewer forward passes."""
    return hub_generate(model, inputs, __file__, REPOSITORY, **arguments)
'''


def hub_files(repo: str) -> dict[str, str]:
    """Return the files that make `custom_generate=repo` work, by their path in the repository."""
    version = importlib.metadata.version("specheads")
    # transformers checks the version, and cannot parse a suffix
    minimum = f">={version}" if re.fullmatch(r"[\d.]+", version) else ""
    return {
        "custom_generate/generate.py": _GENERATE.format(repo=repo),
        "custom_generate/requirements.txt": f"specheads{minimum}\n",
    }


def hub_generate(
    model: PreTrainedModel,
    inputs: Tensor | None,
    code: str,
    repo: str,
    *,
    revision: str | None = None,
    force: bool = False,
    stop_strings: str | list[str] | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    **arguments: Any,
) -> Generated:
    """Decode for a repository's `custom_generate/generate.py`; pushed repositories call this.

    `code` is the path of generate.py: code of one commit loads the weights of the same commit. The
    repository in the user's call has priority over `repo`, because it may be a copy or a fork.
    """
    commit = Path(code).parents[1].name
    same_commit = commit if re.fullmatch(r"[\da-f]{40}", commit) else "main"
    name = str(generate_arguments().get("custom_generate") or repo)
    head = _load(name, revision=revision or same_commit)
    if stop_strings is not None and arguments.get("tokenizer") is not None:
        # transformers requires the tokenizer for stop strings, and does not pass it on
        stops = StopStringCriteria(arguments.pop("tokenizer"), stop_strings)
        stopping_criteria = StoppingCriteriaList([*(stopping_criteria or []), stops])
    elif stop_strings is not None:
        arguments["stop_strings"] = stop_strings
    # not model.generate: if the model's own repository has this code, that is this function
    return cast(Any, type(model)).generate(
        model,
        inputs,
        stopping_criteria=stopping_criteria,
        custom_generate=custom_generate(head, force=force),
        **arguments,
    )


_load = functools.lru_cache(maxsize=4)(load_head)
