"""Text engine for any OpenAI-compatible server, with token ids as prompts.

`/v1/completions` of vLLM, SGLang and llama.cpp accepts token ids as prompt. vLLM (since 0.10.2) and
SGLang (since July 2026) return token ids if `return_token_ids` is set; llama.cpp and others return
text only.
Source: vllm-project/vllm#22587, sgl-project/sglang#736 and #30917, ggml-org/llama.cpp#15001.
"""

import os
import re
from collections.abc import Callable, Generator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from ipaddress import ip_address
from json import JSONDecodeError
from typing import Any, NoReturn, TypeVar
from urllib.parse import urlsplit

from anyio.from_thread import start_blocking_portal
from openai import APIError, APIStatusError, AsyncOpenAI, DefaultAsyncHttpxClient, Omit

from specheads.base.ends import BaseEnds
from specheads.config.training import DistillSettings
from specheads.core.errors import InputError, first_line
from specheads.training.distill.engines import GeneratedAnswer, GenerationRequest, NextRequest

KEY_VARIABLE = "OPENAI_API_KEY"
RETRIES = 5
"""Retries of a failed request, with growing waits."""
KEY = f"set the environment variable {KEY_VARIABLE} to the server's key"
REMEDIES = {
    401: KEY,
    403: KEY,
    404: "give its url up to /v1, and set served_as to the model's name at the server",
    400: "lower prompt_tokens or new_tokens to fit its context, or change the sampling",
}
"""What to do after a refusal, by HTTP status."""
RESUME = "fix the server and run the command again to resume, or raise timeout_seconds"


class CompletionsEngine:
    """Sends up to `batch_size` concurrent requests; the client retries them.

    If an answer has text only, the base's tokenizer gives the token ids, which may differ from
    those that the server sampled.
    """

    def __init__(self, settings: DistillSettings, base: BaseEnds) -> None:
        self.settings, self.base = settings, base
        self.address, self._key = public_address(settings.url), read_api_key(KEY_VARIABLE)
        tokenizer_end = getattr(base.tokenizer, "eos_token_id", None)
        # the tokenizer's own first, which chat models use
        self._end_ids = sorted(base.eos_ids, key=lambda id: id != tokenizer_end)

    def answers(self, next_request: NextRequest) -> Generator[GeneratedAnswer, None, None]:
        """Yield answers, as `TextEngine`."""
        pending: set[Future[GeneratedAnswer]] = set()
        failure: BaseException | None = None
        # requests continue in a thread while the caller is busy
        with start_blocking_portal() as portal:
            settings = self.settings
            http = http_client(settings.url, DefaultAsyncHttpxClient)
            options = client_options(self._key, settings.timeout_seconds, RETRIES)
            client = AsyncOpenAI(base_url=settings.url, http_client=http, **options)
            try:
                while True:
                    while failure is None and len(pending) < self.settings.batch_size:
                        if (request := next_request()) is None:
                            break
                        pending.add(portal.start_task_soon(self._request_answer, client, request))
                    if not pending:
                        break
                    finished, pending = wait(pending, return_when=FIRST_COMPLETED)
                    for future in finished:
                        if (error := future.exception()) is None:
                            yield future.result()
                        else:
                            failure = failure or error
                if failure is not None:
                    raise failure
            finally:
                for future in pending:
                    future.cancel()
                portal.call(client.close)

    async def _request_answer(
        self, client: AsyncOpenAI, request: GenerationRequest
    ) -> GeneratedAnswer:
        sampling = request.sampling
        try:
            # all parameters, because servers take defaults from the model
            reply: Any = await client.completions.create(
                model=self.settings.served_as or self.base.name,
                prompt=request.tokens,
                max_tokens=request.new_tokens,
                n=1,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                presence_penalty=0.0,
                frequency_penalty=0.0,
                seed=sampling.seed,
                extra_headers={} if self._key else {"Authorization": Omit()},
                extra_body={
                    # SGLang refuses zero; -1 disables it everywhere
                    "top_k": sampling.top_k or -1,
                    "min_p": sampling.min_p,
                    "repetition_penalty": sampling.repetition_penalty,
                    # llama.cpp's name for it; -1 covers the whole text
                    "repeat_penalty": sampling.repetition_penalty,
                    "repeat_last_n": -1,
                    "stop_token_ids": self._end_ids,
                    "add_special_tokens": False,
                    "skip_special_tokens": False,
                    "return_token_ids": True,
                },
            )
        except (APIError, JSONDecodeError) as error:
            message, status = str(error), 0
            if isinstance(error, APIStatusError):
                status = error.status_code
                message = f"status {status}, {error.response.text}"
            self._refuse("answer each request", message, REMEDIES.get(status, RESUME))
        return self._parse_answer(request, reply)

    def _refuse(self, rule: str, message: str, remedy: str) -> NoReturn:
        remedy += proxy_note(self.settings.url)
        refuse_server(rule, f"{self.address} did not: {quote_message(message, self._key)}", remedy)

    def _parse_answer(self, request: GenerationRequest, reply: Any) -> GeneratedAnswer:
        """Return the answer in a reply."""
        try:
            (choice,) = reply.choices
            text, tokens = str(choice.text), getattr(choice, "token_ids", None)
            if choice.finish_reason not in ("stop", "length"):
                raise ValueError
            if any(token < 0 for token in tokens or ()):
                raise ValueError
            prompt = getattr(choice, "prompt_token_ids", None)
            length = getattr(reply.usage, "prompt_tokens", None) if prompt is None else len(prompt)
        except (AttributeError, TypeError, ValueError):
            remedy = "use a server with /v1/completions"
            self._refuse("return one complete answer", str(reply), remedy)
        if length not in (None, len(request.tokens)) or prompt not in (None, request.tokens):
            message = (
                f"it read {length} in place of the {len(request.tokens)} of text {request.number}"
            )
            self._refuse("use the prompt's token ids", message, "use one that takes token ids")
        if tokens is None:
            reader = f"{self.address} returns text without token ids, which"
            tokens = self.base.tokenizer_for(reader)(text, add_special_tokens=False)["input_ids"]
        if (largest := max(tokens, default=0)) >= self.base.vocab_size:
            message = f"it returned token {largest} of a vocabulary of {self.base.vocab_size}"
            self._refuse("serve the base", message, f"serve {self.base.name!r}")
        # the end token is missing in text; vLLM names it if it is not the model's first one, SGLang
        # always
        stop_id = getattr(choice, "stop_reason", None) or getattr(choice, "matched_stop", None)
        end_ids = [stop_id] if isinstance(stop_id, int) else self._end_ids
        is_complete = choice.finish_reason == "stop"
        if is_complete and end_ids and not {*tokens[-1:]} & {*end_ids}:
            tokens = [*tokens, end_ids[0]]
        finish = "eos" if is_complete and len(tokens) <= request.new_tokens else "length"
        return GeneratedAnswer(request.number, tokens[: request.new_tokens], finish)


def refuse_server(rule: str, failure: str, remedy: str) -> NoReturn:
    """Raise an error about a server: what it must do, what happened, and the remedy."""
    raise InputError(f"a server must {rule}, but {failure}; {remedy}") from None


def quote_message(text: str, key: str) -> str:
    """Return a server's message as one short line without the key."""
    text = text.replace(key, "***") if key else text
    return f"{' '.join(text.split()) or 'no message':.200}"


def public_address(url: str) -> str:
    """Return a server's address without a password or a token; raise if it is not one."""
    address = url.rpartition("@")[2].partition("?")[0]
    try:
        fields = urlsplit(url)
        if fields.scheme in ("http", "https") and fields.hostname and fields.port != 0:
            return f"{fields.scheme}://{address.rpartition('://')[2]}"
    except ValueError:
        pass
    raise InputError(
        "a server's url must begin with http:// or https:// and name a host, got "
        f"{address!r:.80}; give one such as http://127.0.0.1:8000/v1"
    )


def client_options(key: str, timeout_seconds: float, retries: int) -> dict[str, Any]:
    """Return options of a client of a server."""
    # with an empty key the client would look into the environment
    return {"api_key": key or "none", "timeout": timeout_seconds, "max_retries": retries}


Client = TypeVar("Client")


def http_client(url: str, kind: Callable[..., Client]) -> Client:
    """Return a client that reaches this machine without a proxy."""
    try:
        return kind(trust_env=not is_loopback(url))
    # socksio is not installed, or the variable is no address
    except (ImportError, ValueError) as error:
        raise InputError(
            f"a proxy must be one that the client can use: {first_line(error)}; unset "
            f"{', '.join(proxy_variables()) or 'ALL_PROXY'}, or add the server's host to NO_PROXY"
        ) from error


def is_loopback(url: str) -> bool:
    """Return whether a server is on this machine."""
    host = (urlsplit(url).hostname or "").rstrip(".")
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return host == "localhost" or host.endswith(".localhost")


def proxy_variables() -> list[str]:
    """Return the environment variables that name a proxy."""
    return [name for name in os.environ if re.fullmatch("(https?|all)_proxy", name, re.IGNORECASE)]


def proxy_note(url: str) -> str:
    """Return what to do about a proxy between this machine and a server; nothing without one."""
    if is_loopback(url) or not (names := proxy_variables()):
        return ""
    return f"; if the proxy of {', '.join(names)} is the cause, add the host to NO_PROXY"


def read_api_key(variable: str) -> str:
    """Return the key in an environment variable; no message may contain it."""
    key = os.environ.get(variable, "").strip() if variable else ""
    if not key.isascii() or not key.isprintable():
        raise InputError(
            f"an API key must be printable ASCII, but the one in {variable} is not; set it again"
        )
    return key
