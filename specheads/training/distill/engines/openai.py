"""Any OpenAI-compatible server: token ids go there and come back, many texts at once.

`/v1/completions` takes token ids as prompt from vLLM, SGLang and llama.cpp. vLLM (since 0.10.2)
and SGLang (since July 2026) give token ids back where `return_token_ids` asks; llama.cpp and
others give text alone.
Source: vllm-project/vllm#22587, sgl-project/sglang#736 and #30917, ggml-org/llama.cpp#15001.
"""

import asyncio
from collections.abc import Callable, Generator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import cached_property, partial
from typing import Any

from specheads.core.errors import InputError
from specheads.training.distill.engine import Answer, Ask, Writing
from specheads.training.distill.server import PassingError, Server


class Completions:
    """Asks a server, as many texts at once as it is told, each until it is answered.

    Of an answer that comes as text alone the base's tokenizer gives the token ids: these may differ
    from what the base chose. Not for several threads.
    """

    def __init__(self, how: Writing) -> None:
        self.how, self.base = how, how.base
        self.server = Server(how.url, how.api_key_env, how.timeout_seconds, how.retries)
        self._max_length = how.max_length or how.base.max_length

    def answers(self, pull: Callable[[], Ask | None]) -> Generator[Answer, None, None]:
        """Yield answers, as `Engine.answers`; a text without room for a token is empty.

        Raises:
            ValueError: The server refuses a text, or has not answered it in all attempts. What
                was answered before is yielded first.
        """
        flying: set[Future[Answer]] = set()
        with self.server.connected(self.how.batch_size) as (client, loop):
            while True:
                while len(flying) < self.how.batch_size and (ask := pull()) is not None:
                    if self._room(ask) <= 0:
                        yield Answer(ask.number, [], "length")
                        continue
                    request, read = self._request(ask), partial(self._read, ask)
                    answer = self.server.answer(client, "/completions", request, read)
                    flying.add(asyncio.run_coroutine_threadsafe(answer, loop))
                if not flying:
                    return
                done, flying = wait(flying, return_when=FIRST_COMPLETED)
                # a failure ends it all, so what came with it goes first
                for one in sorted(done, key=lambda one: one.exception() is not None):
                    yield one.result()

    def _room(self, ask: Ask) -> int:
        return min(ask.new_tokens, self._max_length - len(ask.tokens))

    def _request(self, ask: Ask) -> dict[str, Any]:
        """Return what is asked: all of it, for servers fill in what the model's author likes."""
        sampling = ask.sampling
        return {
            "model": self.how.model,
            "prompt": ask.tokens,
            "max_tokens": self._room(ask),
            "n": 1,
            "stream": False,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            # SGLang refuses zero; by -1 they all mean none
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": sampling.repetition_penalty,
            # llama.cpp's name for it, and how far back it looks: to the start
            "repeat_penalty": sampling.repetition_penalty,
            "repeat_last_n": -1,
            "seed": sampling.seed,
            "stop_token_ids": self._ends,
            "add_special_tokens": False,
            "skip_special_tokens": False,
            "return_token_ids": True,
        }

    def _read(self, ask: Ask, reply: Any) -> Answer:
        """Return the answer in a reply; one that is no completion counts as none."""
        try:
            (choice,) = reply["choices"]
            reason, text, tokens = choice["finish_reason"], choice["text"], choice.get("token_ids")
            read, usage = choice.get("prompt_token_ids"), reply.get("usage") or {}
            length = usage.get("prompt_tokens") if read is None else len(read)
        except (AttributeError, LookupError, TypeError, ValueError):
            raise PassingError(f"no completion, {self.server.told(str(reply))}") from None
        if reason not in ("stop", "length") or not isinstance(text, str) or not _are_ids(tokens):
            raise PassingError(f"no whole completion, {self.server.told(str(choice))}")
        if (read or ask.tokens) != ask.tokens or (length or len(ask.tokens)) != len(ask.tokens):
            raise InputError(
                f"a server must read token ids as they are, and {self.server.shown} read {length} "
                f"in place of the {len(ask.tokens)} of text {ask.number}; use one that takes them "
                "as prompt, and neither cuts them nor adds to them"
            )
        if tokens is None:
            tokens = self._tokenised(text)
        if reason == "stop":
            tokens = self._ended(tokens, choice)
        self._refuse_unknown(tokens)
        room = self._room(ask)
        finish = "eos" if reason == "stop" and len(tokens) <= room else "length"
        return Answer(ask.number, tokens[:room], finish)

    def _refuse_unknown(self, tokens: list[int]) -> None:
        if max(tokens, default=0) >= self.base.vocab_size:
            raise InputError(
                f"a server must serve the base, and {self.server.shown} wrote token {max(tokens)} "
                f"of a vocabulary of {self.base.vocab_size}; have it serve {self.how.model!r}"
            )

    def _ended(self, tokens: list[int], choice: dict[str, Any]) -> list[int]:
        """Return the tokens with the one that ended them, which text never has."""
        # vLLM names it where it is not the model's first, SGLang always
        named = choice.get("stop_reason") or choice.get("matched_stop")
        ends = [named] if type(named) is int else self._ends
        return tokens if not ends or tokens[-1:] in [[end] for end in ends] else [*tokens, ends[0]]

    @cached_property
    def _ends(self) -> list[int]:
        """Tokens that end a text; the tokenizer's own first, for chat has it named there."""
        own = getattr(self.base.tokenizer, "eos_token_id", None)
        return sorted(self.base.eos_ids, key=lambda end: end != own)

    def _tokenised(self, text: str) -> list[int]:
        if self.base.tokenizer is None:
            raise InputError(
                f"{self.server.shown} gives text without token ids, and the base {self.base.name} "
                "has no tokenizer for it; name the base by a folder that has one"
            )
        return self.base.tokenizer(text, add_special_tokens=False)["input_ids"]


def build(how: Writing) -> Completions:
    """Return an engine that asks the server it is told of, and nothing before the first text.

    Raises:
        ValueError: The address is none, or the key is none that a request can carry.
    """
    return Completions(how)


def _are_ids(given: Any) -> bool:
    """Return whether these are token ids, or none given."""
    known = given is None or isinstance(given, list)
    return known and all(type(one) is int and one >= 0 for one in given or ())
