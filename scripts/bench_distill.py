"""Time what phase two is written with: our loop, transformers and vLLM on the same prompts.

    python scripts/bench_distill.py --model FOLDER                 our loop and transformers
    python scripts/bench_distill.py --model FOLDER --arms local transformers vllm \
        --vllm-python .venv-vllm/bin/python --out FILE             ... and vLLM; keep the numbers
    python scripts/bench_distill.py --model FOLDER --stop-at-eos   rows leave and are refilled
    python scripts/bench_distill.py --model FOLDER --head runs/x/head --arms local head \
        --batch 1 2 4 --repeats 8                                  with a trained head and without

Arms take turns on the same prompts, each repeat on others: a machine that slows down slows all of
them. Prompts are instructions about the standard library, or the first turns of
--conversations FILE, in the model's own chat template. Ratios
carry 95 % bootstrap intervals over repeats. transformers takes prompts in waves of the batch, the
other arms refill what is free. vLLM lives in a process of its own, started once, and sleeps while
the others are timed; its prefix cache is off, for repeats would find their prompts there.
"""

import argparse
import importlib
import inspect
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from bench_vllm import Engine
from transformers import AutoModelForCausalLM

from specheads.base.model import FrozenBase
from specheads.core.machine import dtype_name
from specheads.core.records import to_json
from specheads.decoding.generate import generate
from specheads.decoding.sampling import Sampling
from specheads.decoding.trees.policies import chain
from specheads.heads.load import load_head
from specheads.measure.counts import bootstrap_interval
from specheads.runs.provenance import nearby, provenance

MODULES = (
    *("argparse", "ast", "base64", "bisect", "calendar", "collections", "colorsys", "configparser"),
    *("contextlib", "copy", "csv", "datetime", "difflib", "fnmatch", "fractions", "functools"),
    *("heapq", "inspect", "ipaddress", "itertools", "json", "logging", "mimetypes", "operator"),
    *("os.path", "pathlib", "random", "re", "shlex", "shutil", "statistics", "string", "tempfile"),
    *("textwrap", "threading", "tokenize", "traceback", "unicodedata", "urllib.parse", "zipfile"),
)
ASKS = (
    "Write a Python function `{name}{signature}` that does the following.\n\n{says}",
    "Explain what Python's `{module}.{name}{signature}` does, and show two examples.\n\n{says}",
    "Write unit tests for this Python function.\n\n```python\ndef {name}{signature}:\n"
    '    """{says}"""\n```',
    "When would you use `{name}` from the Python module {module}, and when something else?",
)
WARM_UP = 16
"""Tokens of each text that is written before anything is timed."""

Texts = list[list[int]]
Decode = Callable[[Texts, int], tuple[float, Texts]]
"""Takes prompts and how many may run together; gives seconds and each prompt's new tokens."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Time the arms asked for; return the exit code."""
    options = _parse(arguments)
    torch.set_num_threads(options.threads)
    base = FrozenBase.load(
        options.model, dtype=options.dtype, device="cpu", compile=options.compile
    )
    results: dict[str, Any] = {"schema": 1, "machine": _machine(base, options), "runs": []}
    arms = {name: ARMS[name](base, options) for name in options.arms}
    prompts = _prompts(base, _first_turns(options.conversations) or _instructions())
    for batch in options.batch:
        count = options.prompts or (2 * batch if options.stop_at_eos else batch)
        _warm_up(arms, prompts[-batch:], batch, options)
        run = _alternate(arms, prompts, batch, count, options.repeats)
        results["runs"].append(run)
        sys.stdout.write(json.dumps(run["arms"], indent=1) + "\n")
        sys.stdout.flush()
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--model", required=True, help="folder of the base, with a tokenizer and its template")
    add("--arms", nargs="+", choices=[*ARMS], default=["local", "transformers"])
    add("--head", help="folder of a trained head, for the arm 'head'")
    add("--draft", type=int, default=0, help="tokens it drafts a step, in a chain; 0: its depth")
    add("--vllm-python", default=".venv-vllm/bin/python", help="interpreter that has vLLM")
    add("--vllm-eager", action="store_true", help="have vLLM not compile its model")
    add("--batch", type=int, nargs="+", default=[64], help="prompts that run together")
    add("--prompts", type=int, default=0, help="a repeat; 0 is the batch, or two with eos")
    add("--conversations", type=Path, help="JSON lines whose first turns are the prompts")
    add("--new-tokens", type=int, default=256)
    add("--stop-at-eos", action="store_true", help="end a text where the model ends it")
    add("--temperature", type=float, default=0.0)
    add("--compile", action="store_true", help="compile the forwards of our loop")
    add("--pool", action="store_true", help="keep our keys and values in blocks")
    add("--repeats", type=int, default=3)
    add("--dtype", default="bfloat16")
    add("--threads", type=int, default=len(os.sched_getaffinity(0)))
    add("--out", type=Path, help="JSON file for the numbers")
    return parser.parse_args(arguments)


def _prompts(base: FrozenBase, texts: list[str]) -> Texts:
    """Return what a user says, shuffled, as token ids of the model's own chat template."""
    tokenizer: Any = base.tokenizer
    random.Random(0).shuffle(texts)
    chats = [[{"role": "user", "content": text}] for text in texts]
    rendered = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=True)
    return rendered["input_ids"]


def _first_turns(path: Path | None) -> list[str]:
    """Return what users say first in a file of conversations."""
    if path is None:
        return []
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    said = [[one["content"] for one in row["messages"] if one["role"] == "user"] for row in rows]
    return sorted({turns[0] for turns in said})


def _instructions() -> list[str]:
    """Return instructions about functions of the standard library."""
    return sorted(
        ASKS[number % len(ASKS)].format(module=module, name=name, signature=signature, says=says)
        for number, (module, name, signature, says) in enumerate(_functions())
    )


def _functions() -> Iterator[tuple[str, str, str, str]]:
    """Yield module, name, signature and the docstring's first paragraph of public functions."""
    for module in MODULES:
        for name, value in sorted(vars(importlib.import_module(module)).items()):
            if name.startswith("_") or not inspect.isfunction(value):
                continue
            says = (inspect.getdoc(value) or "").partition("\n\n")[0]
            signature = str(inspect.signature(value))
            # a default may print as long as a book
            if 40 <= len(says) <= 400 and len(signature) <= 120:
                yield module, name, signature, says


def _warm_up(
    arms: dict[str, Decode], prompts: Texts, batch: int, options: argparse.Namespace
) -> None:
    """Have each arm write a little: what is made on first use is not what is compared."""
    asked, options.new_tokens = options.new_tokens, WARM_UP
    for decode in arms.values():
        decode(prompts, batch)
    options.new_tokens = asked


def _alternate(
    arms: dict[str, Decode], prompts: Texts, batch: int, count: int, repeats: int
) -> dict[str, Any]:
    """Have the arms take turns on the same prompts; return what each took and their ratios."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    written: dict[str, list[Texts]] = {name: [] for name in arms}
    for repeat in range(repeats):
        turn = [prompts[(repeat * count + place) % len(prompts)] for place in range(count)]
        for name in arms if repeat % 2 == 0 else [*arms][::-1]:
            taken, texts = arms[name](turn, batch)
            seconds[name].append(taken)
            written[name].append(texts)
            sys.stderr.write(f"{name}: {_tokens([texts]) / taken:.1f} tokens/s\n")
    first = next(iter(arms))
    return {
        "batch": batch,
        "prompts": count,
        "prompt_tokens": statistics.mean(map(len, prompts)),
        "arms": [
            {
                "arm": name,
                "tokens_per_second": _tokens(written[name]) / sum(seconds[name]),
                "seconds": seconds[name],
                "tokens": [_tokens([texts]) for texts in written[name]],
                **_against(first, name, seconds, written),
            }
            for name in arms
        ],
    }


def _against(
    first: str, name: str, seconds: dict[str, list[float]], written: dict[str, list[Texts]]
) -> dict[str, Any]:
    """Return how much faster an arm is than the first, and how many texts are the same."""
    if name == first:
        return {}

    def each(arm: str) -> list[float]:
        pairs = zip(seconds[arm], written[arm], strict=True)
        return [taken / _tokens([texts]) for taken, texts in pairs]

    pairs = [
        own == other
        for texts, others in zip(written[first], written[name], strict=True)
        for own, other in zip(texts, others, strict=True)
    ]
    low, high = bootstrap_interval(each(first), each(name))
    speed = sum(each(first)) / sum(each(name))
    return {
        f"over_{first}": speed,
        f"over_{first}_interval": [low, high],
        f"{first}_over_it": 1 / speed,
        f"{first}_over_it_interval": [1 / high, 1 / low],
        f"texts_like_{first}": sum(pairs) / len(pairs),
    }


def _tokens(repeats: list[Texts]) -> int:
    return sum(len(text) for texts in repeats for text in texts)


def _local(base: FrozenBase, options: argparse.Namespace, drafter: Any = None) -> Decode:
    def decode(prompts: Texts, batch: int) -> tuple[float, Texts]:
        slots = max(map(len, prompts)) + options.new_tokens + 16
        pool = base.pool(batch * -(-slots // 16)) if options.pool else None
        began = time.perf_counter()
        out = generate(
            base,
            drafter,
            prompts,
            tree=chain(options.draft) if drafter and options.draft else None,
            max_new_tokens=options.new_tokens,
            sampling=Sampling(temperature=options.temperature),
            stop_at_eos=options.stop_at_eos,
            max_batch=batch,
            pool=pool,
        )
        return time.perf_counter() - began, out.tokens

    return decode


def _head(base: FrozenBase, options: argparse.Namespace) -> Decode:
    if not options.head:
        raise SystemExit("error: the arm 'head' needs --head FOLDER")
    return _local(base, options, load_head(options.head, base))


def _transformers(base: FrozenBase, options: argparse.Namespace) -> Decode:
    # a model of its own: ours keeps its matrices in another order
    read: Any = AutoModelForCausalLM.from_pretrained
    model = read(
        options.model, dtype=base.dtype, attn_implementation="sdpa", trust_remote_code=False
    ).eval()
    ends = base.eos_ids if options.stop_at_eos else ()
    settings = {"do_sample": True, "temperature": options.temperature, "top_k": 0, "top_p": 1.0}
    model.generation_config.eos_token_id = list(ends) or None

    def decode(prompts: Texts, batch: int) -> tuple[float, Texts]:
        began, texts = time.perf_counter(), []
        for first in range(0, len(prompts), batch):
            wave = prompts[first : first + batch]
            width = max(map(len, wave))
            tokens = torch.tensor([[0] * (width - len(one)) + one for one in wave])
            seen = torch.tensor([[0] * (width - len(one)) + [1] * len(one) for one in wave])
            out = model.generate(
                tokens,
                attention_mask=seen,
                max_new_tokens=options.new_tokens,
                pad_token_id=0,
                **(settings if options.temperature else {"do_sample": False}),
            )
            texts += [_ended(text, ends) for text in out[:, width:].tolist()]
        return time.perf_counter() - began, texts

    return decode


def _ended(text: list[int], ends: Sequence[int]) -> list[int]:
    """Return a text up to the first token that ends it, that one included."""
    return text[: next((at for at, token in enumerate(text, 1) if token in ends), len(text))]


def _vllm(base: FrozenBase, options: argparse.Namespace) -> Decode:
    arguments = {
        "model": str(options.model),
        "dtype": dtype_name(base.dtype),
        "max_num_seqs": max(options.batch),
        "max_model_len": 2048,
        "enable_prefix_caching": False,
        "enforce_eager": options.vllm_eager,
        "seed": 0,
    }
    engine = Engine(options.vllm_python, arguments, options.threads, cache_gib=4)

    def decode(prompts: Texts, batch: int) -> tuple[float, Texts]:
        del batch
        sampling = {
            "temperature": options.temperature,
            "max_tokens": options.new_tokens,
            "ignore_eos": not options.stop_at_eos,
            "detokenize": False,
        }
        answer = engine.ask({"prompts": prompts, "sampling": sampling})
        return answer["seconds"], answer["tokens"]

    return decode


ARMS: dict[str, Callable[[FrozenBase, argparse.Namespace], Decode]] = {
    "local": _local,
    "head": _head,
    "transformers": _transformers,
    "vllm": _vllm,
}


def _machine(base: FrozenBase, options: argparse.Namespace) -> dict[str, Any]:
    return {
        "base": nearby(base.name),
        "dtype": dtype_name(base.dtype),
        "new_tokens": options.new_tokens,
        "conversations": options.conversations and options.conversations.name,
        "stop_at_eos": options.stop_at_eos,
        "temperature": options.temperature,
        "head": nearby(options.head or ""),
        "draft": options.draft,
        "pool": options.pool,
        "compile": options.compile,
        **to_json(provenance()),
    }


if __name__ == "__main__":
    raise SystemExit(main())
