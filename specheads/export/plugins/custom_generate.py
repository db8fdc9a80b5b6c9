"""A head in transformers' own `generate`: in process, or from the head's Hub repository.

See docs/transformers.md.
"""

import functools
import importlib.metadata
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

from specheads.base.model import FrozenBase
from specheads.base.selfcheck import check
from specheads.core.drafter import Drafter, Head
from specheads.decoding.acceptance import rules
from specheads.decoding.acceptance.sampling import each_prompt
from specheads.decoding.engine import Engine
from specheads.decoding.generate import refuse_unfit
from specheads.decoding.request import Request, Stream
from specheads.decoding.trees import policies
from specheads.export.plugins.generate_call import Call, caller, read_call
from specheads.heads.load import fit, load_head

Generated = Tensor | GenerateDecoderOnlyOutput

_tried: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()
"""Models that have shown that they read trees right, as long as they are alive."""

_GENERATE = '''\
"""Decode with the speculator head of this repository; the card has the lines that do.

Output is the base's own. Needs `pip install specheads`.
"""

from typing import Any

from specheads.export.custom_generate import hub_generate

REPOSITORY = {repo!r}


def generate(inputs: Any = None, *, model: Any, **arguments: Any) -> Any:
    """Do what `model.generate(inputs, **arguments)` does, several tokens a forward."""
    return hub_generate(model, inputs, __file__, REPOSITORY, **arguments)
'''

_LINES = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained({base!r}, dtype={dtype!r})
tokenizer = AutoTokenizer.from_pretrained({base!r})
output = model.generate(
    **tokenizer("The", return_tensors="pt"),
    custom_generate={repo!r},
    trust_remote_code=True,
    max_new_tokens=64,
)
"""


def custom_generate(
    head: Drafter,
    *,
    tree: policies.TreePolicy | None = None,
    acceptance: str | rules.AcceptanceRule = "match",
) -> Callable[..., Generated]:
    """Return what `model.generate(..., custom_generate=...)` calls in place of its own loop.

    The tokens are those that `generate` would give without it, several a forward where the head
    guesses right; sampled ones have the same law, but with the rule `typical`. What it cannot do
    it refuses when called.

    Args:
        head: What guesses. It moves to the device and dtype of the model it is called with.
        tree: How drafts grow; None is a chain as deep as the head.
        acceptance: What is kept of a verified tree: as for `specheads.generate`.
    """

    def decode(
        model: PreTrainedModel,
        input_ids: Int[Tensor, "batch time"],
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Generated:
        call = read_call(
            input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs
        )
        base = _base(model)
        if isinstance(head, Head):
            # every time: the model may have moved, or it may be another one
            with torch.inference_mode(False):
                fit(head, base)
        rows = _decode(base, head, tree, acceptance, call, input_ids)
        width = max(map(len, rows))
        padded = [row + [call.pad_id] * (width - len(row)) for row in rows]
        text = torch.cat([input_ids, torch.tensor(padded, device=input_ids.device)], dim=1)
        sequences = cast(torch.LongTensor, text)
        return GenerateDecoderOnlyOutput(sequences=sequences) if call.as_dict else sequences

    return decode


def _base(model: PreTrainedModel) -> FrozenBase:
    """Return the base that a user's model is, and leave the model as it is.

    Raises:
        ValueError: It is in training mode, or no base: see `FrozenBase`.
    """
    if any(module.training for module in model.modules()):
        raise ValueError("decoding needs a model in eval mode; call model.eval() first")
    base = FrozenBase(model, name=model.name_or_path or "", owned=False)
    if model not in _tried:
        check(model)
        _tried.add(model)
    return base


def _decode(
    base: FrozenBase,
    head: Drafter,
    tree: policies.TreePolicy | None,
    acceptance: str | rules.AcceptanceRule,
    call: Call,
    input_ids: Int[Tensor, "batch time"],
) -> list[list[int]]:
    """Return the new tokens of each row."""
    refuse_unfit(base, call.prompts, call.max_new_tokens)
    batch, longest = len(call.prompts), max(map(len, call.prompts)) + call.max_new_tokens
    engine = Engine(
        base, head, tree=tree, acceptance=acceptance, max_batch=batch, max_length=longest
    )
    requests = [
        Request(
            prompt=prompt,
            max_new_tokens=call.max_new_tokens,
            sampling=sampling,
            eos_ids=call.eos_ids,
        )
        for prompt, sampling in zip(call.prompts, each_prompt(call.sampling, batch), strict=True)
    ]
    rows = [
        _Row(engine.submit(request), call, text)
        for request, text in zip(requests, input_ids, strict=True)
    ]
    more = True
    while more:
        more = engine.step()
        for row in rows:
            row.follow()
    if call.streamer is not None:
        call.streamer.end()
    return [row.said for row in rows]


class _Row:
    """What a row has said, as far as it may: stopping criteria look at every token.

    Args:
        stream: Of the engine.
        call: Has the criteria, and whoever listens.
        text: The prompt as transformers has it, padding included.
    """

    def __init__(self, stream: Stream, call: Call, text: Int[Tensor, " time"]) -> None:
        self.said: list[int] = []
        self._stream, self._call, self._text = stream, call, text
        self._ended = False

    def follow(self) -> None:
        """Take over what the engine has added."""
        for token in self._stream.tokens[len(self.said) :]:
            if self._ended:
                return
            self.said.append(token)
            if self._call.streamer is not None:
                self._call.streamer.put(torch.tensor([token]))
            if self._call.criteria and self._is_over():
                self._ended = True
                self._stream.cancel()

    def _is_over(self) -> bool:
        said = torch.tensor(self.said, device=self._text.device)
        text = torch.cat([self._text, said])[None]
        # transformers gives None too, where scores are not recorded
        return bool(self._call.criteria(text, None).all())  # pyright: ignore[reportArgumentType]


def hub_files(repo: str) -> dict[str, str]:
    """Return the texts that make `custom_generate=repo` work, by their paths in the repository."""
    return {
        "custom_generate/generate.py": _GENERATE.format(repo=repo),
        "custom_generate/requirements.txt": f"{_requirement()}\n",
    }


def _requirement() -> str:
    """Return the package as transformers can check it: it reads no suffix of a version."""
    version = importlib.metadata.version("specheads")
    return f"specheads>={version}" if re.fullmatch(r"[\d.]+", version) else "specheads"


def three_lines(base_name: str, repo: str, dtype: str = "float32") -> str:
    """Return the code that decodes with a pushed head: model, tokenizer, generate.

    Args:
        base_name: Folder or Hub id of the base.
        repo: Hub id of the head, or a folder that holds it with its `hub_files`.
        dtype: What the base is to compute in. In 16 bits several tokens are often equally likely
            but for rounding, and then text may differ from that of `generate` alone.
    """
    return _LINES.format(base=base_name, repo=repo, dtype=dtype)


def hub_generate(
    model: PreTrainedModel,
    inputs: Tensor | None,
    code: str,
    repo: str,
    *,
    head: str | Path | Drafter | None = None,
    stop_strings: str | list[str] | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    **arguments: Any,
) -> Generated:
    """Do what a repository's `custom_generate/generate.py` is for; pushed repositories call this.

    Args:
        model: Whose `generate` was called.
        inputs: As for `generate`.
        code: Where generate.py lies. Code of a commit loads the weights of the same commit.
        repo: The repository it was pushed to. The name that the caller gave goes before it: a
            folder, a copy or a fork.
        head: Folder, Hub id or head, in place of the repository's own.
        stop_strings: As for `generate`.
        stopping_criteria: As for `generate`.
        **arguments: As for `generate`, and `revision` of the head.

    Raises:
        ValueError: As `load_head` and as `custom_generate`.
    """
    if arguments.pop("token", None) is not None:
        raise ValueError(
            "the head is downloaded with the token that huggingface_hub knows; leave token out and "
            "set HF_TOKEN, or run hf auth login"
        )
    revision = arguments.pop("revision", None)
    if not isinstance(head, Drafter):
        commit = Path(code).parents[1].name
        here = head is None and re.fullmatch(r"[\da-f]{40}", commit)
        found = str(head or caller().get("custom_generate") or repo)
        head = _load(found, revision or (commit if here else "main"))
    if stop_strings is not None and arguments.get("tokenizer") is not None:
        # it would not hand the tokenizer on, and then miss it
        stops = StopStringCriteria(arguments.pop("tokenizer"), stop_strings)
        stopping_criteria = StoppingCriteriaList([*(stopping_criteria or []), stops])
    elif stop_strings is not None:
        arguments["stop_strings"] = stop_strings
    # not model.generate, which is this very code where the model's own repository carries it
    return cast(Any, type(model)).generate(
        model,
        inputs,
        stopping_criteria=stopping_criteria,
        custom_generate=custom_generate(head),
        **arguments,
    )


@functools.lru_cache(maxsize=4)
def _load(path: str, revision: str) -> Head:
    return load_head(path, revision=revision)
