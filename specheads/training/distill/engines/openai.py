"""Text engine for any OpenAI-compatible server, with token ids as prompts.

`/v1/completions` of vLLM, SGLang and llama.cpp accepts token ids as prompt. vLLM (since 0.10.2) and
SGLang (since July 2026) return token ids if `return_token_ids` is set; llama.cpp and others return
text only.
Source: vllm-project/vllm#22587, sgl-project/sglang#736 and #30917, ggml-org/llama.cpp#15001.
"""

import asyncio
from collections.abc import Callable, Generator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import cached_property, partial
from typing import Any

from specheads.core.errors import InputError
from specheads.training.distill.engine import Answer, EngineOptions, GenerationRequest
from specheads.training.distill.server import PassingError, Server


class Completions:
    """Sends up to `batch_size` concurrent requests to a server, with retries.

    If an answer has text only, the base's tokenizer gives the token ids, which may differ from
    those that the server sampled. Not thread-safe.
    """

    def __init__(self, options: EngineOptions) -> None:
        self.options, self.base = options, options.base
        self.server = Server(
            options.url, options.api_key_env, options.timeout_seconds, options.retries
        )
        self._max_length = options.max_length or options.base.max_length

    def answers(
        self, pull: Callable[[], GenerationRequest | None]
    ) -> Generator[Answer, None, None]:
        """Yield answers, as `TextEngine.answers`; a text without room for a token is empty.

        Raises:
            ValueError: The server refuses a request, or all attempts failed. Earlier answers are
                yielded first.
        """
        pending: set[Future[Answer]] = set()
        with self.server.connected(self.options.batch_size) as (client, loop):
            while True:
                while len(pending) < self.options.batch_size and (request := pull()) is not None:
                    if self._room(request) <= 0:
                        yield Answer(request.number, [], "length")
                        continue
                    body, read = self._body(request), partial(self._read, request)
                    answer = self.server.answer(client, "/completions", body, read)
                    pending.add(asyncio.run_coroutine_threadsafe(answer, loop))
                if not pending:
                    return
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                # answers before the exception that ends the iteration
                for one in sorted(done, key=lambda one: one.exception() is not None):
                    yield one.result()

    def _room(self, request: GenerationRequest) -> int:
        return min(request.new_tokens, self._max_length - len(request.tokens))

    def _body(self, request: GenerationRequest) -> dict[str, Any]:
        """Return the body: all parameters, because servers take defaults from the model."""
        sampling = request.sampling
        return {
            "model": self.options.model,
            "prompt": request.tokens,
            "max_tokens": self._room(request),
            "n": 1,
            "stream": False,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            # SGLang refuses zero; -1 disables it everywhere
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": sampling.repetition_penalty,
            # llama.cpp's name for it; -1 covers the whole text
            "repeat_penalty": sampling.repetition_penalty,
            "repeat_last_n": -1,
            "seed": sampling.seed,
            "stop_token_ids": self._ends,
            "add_special_tokens": False,
            "skip_special_tokens": False,
            "return_token_ids": True,
        }

    def _read(self, request: GenerationRequest, reply: Any) -> Answer:
        """Return the answer in a reply; raise PassingError if it is not a completion."""
        try:
            (choice,) = reply["choices"]
            reason, text, tokens = choice["finish_reason"], choice["text"], choice.get("token_ids")
            read, usage = choice.get("prompt_token_ids"), reply.get("usage") or {}
            length = usage.get("prompt_tokens") if read is None else len(read)
        except (AttributeError, LookupError, TypeError, ValueError):
            raise PassingError(f"no completion, {self.server.quote(str(reply))}") from None
        if reason not in ("stop", "length") or not isinstance(text, str) or not _are_ids(tokens):
            raise PassingError(f"no complete answer, {self.server.quote(str(choice))}")
        prompt = request.tokens
        if (read or prompt) != prompt or (length or len(prompt)) != len(prompt):
            raise InputError(
                f"a server must use the prompt's token ids, but {self.server.shown} read {length} "
                f"in place of the {len(prompt)} of text {request.number}; use a server that takes "
                "token ids as prompt and does not change them"
            )
        if tokens is None:
            tokens = self._tokenised(text)
        if reason == "stop":
            tokens = self._ended(tokens, choice)
        self._refuse_unknown(tokens)
        room = self._room(request)
        finish = "eos" if reason == "stop" and len(tokens) <= room else "length"
        return Answer(request.number, tokens[:room], finish)

    def _refuse_unknown(self, tokens: list[int]) -> None:
        if max(tokens, default=0) >= self.base.vocab_size:
            raise InputError(
                f"a server must serve the base, but {self.server.shown} returned token "
                f"{max(tokens)} of a vocabulary of {self.base.vocab_size}; serve "
                f"{self.options.model!r}"
            )

    def _ended(self, tokens: list[int], choice: dict[str, Any]) -> list[int]:
        """Append the end token if it is missing, as it always is in text."""
        # vLLM reports it if it is not the model's first one, SGLang always
        named = choice.get("stop_reason") or choice.get("matched_stop")
        ends = [named] if type(named) is int else self._ends
        return tokens if not ends or tokens[-1:] in [[end] for end in ends] else [*tokens, ends[0]]

    @cached_property
    def _ends(self) -> list[int]:
        """End-of-text tokens; the tokenizer's own first, which chat models use."""
        own = getattr(self.base.tokenizer, "eos_token_id", None)
        return sorted(self.base.eos_ids, key=lambda end: end != own)

    def _tokenised(self, text: str) -> list[int]:
        if self.base.tokenizer is None:
            raise InputError(
                f"{self.server.shown} returns text without token ids, but the base "
                f"{self.base.name} has no tokenizer; use a base folder that has one"
            )
        return self.base.tokenizer(text, add_special_tokens=False)["input_ids"]


def build(options: EngineOptions) -> Completions:
    """Return an engine for the server; it sends nothing before the first request.

    Raises:
        ValueError: The URL is invalid, or the key is not printable ASCII.
    """
    return Completions(options)


def _are_ids(given: Any) -> bool:
    """Return whether a value is a list of token ids, or None."""
    known = given is None or isinstance(given, list)
    return known and all(type(one) is int and one >= 0 for one in given or ())
