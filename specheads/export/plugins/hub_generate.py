"""A head's Hub repository as transformers' `custom_generate`. See docs/transformers.md."""

import functools
import importlib.metadata
import re
from pathlib import Path
from typing import Any, cast

from torch import Tensor
from transformers import PreTrainedModel, StoppingCriteriaList, StopStringCriteria

from specheads.core.drafter import Drafter
from specheads.core.errors import InputError
from specheads.export.plugins.custom_generate import Generated, custom_generate
from specheads.export.plugins.generate_call import caller
from specheads.heads.load import load_head

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

model = AutoModelForCausalLM.from_pretrained({base!r}, dtype={dtype!r}{revision})
tokenizer = AutoTokenizer.from_pretrained({base!r}{revision})
output = model.generate(
    **tokenizer("The", return_tensors="pt"),
    custom_generate={repo!r},
    trust_remote_code=True,
    max_new_tokens=64,
)
"""


def hub_files(repo: str) -> dict[str, str]:
    """Return the texts that make `custom_generate=repo` work, by their paths in the repository."""
    version = importlib.metadata.version("specheads")
    # transformers checks it, and reads no suffix of a version
    least = f">={version}" if re.fullmatch(r"[\d.]+", version) else ""
    return {
        "custom_generate/generate.py": _GENERATE.format(repo=repo),
        "custom_generate/requirements.txt": f"specheads{least}\n",
    }


def three_lines(base_name: str, repo: str, dtype: str = "float32", revision: str = "") -> str:
    """Return the code that decodes with a pushed head: model, tokenizer, generate.

    `repo` may be a folder that holds the head with its `hub_files`. In 16 bits several tokens are
    often equally likely but for rounding, and then text may differ from that of `generate` alone.
    """
    asked = f", revision={revision!r}" if revision else ""
    return _LINES.format(base=base_name, repo=repo, dtype=dtype, revision=asked)


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

    Arguments are those of `model.generate`, and `revision` and `force` for the head. `code` is
    where generate.py lies: code of a commit loads the weights of the same commit. `repo` is what
    it was pushed to; the name that the caller gave goes before it: a folder, a copy or a fork.
    `head` takes the place of the repository's own. Errors are those of `load_head` and of
    `custom_generate`.
    """
    if arguments.pop("token", None) is not None:
        raise InputError(
            "the head is downloaded with the token that huggingface_hub knows; leave token out and "
            "set HF_TOKEN, or run hf auth login"
        )
    revision, force = arguments.pop("revision", None), arguments.pop("force", False)
    if isinstance(head, Drafter):
        drafter = head
    else:
        commit = Path(code).parents[1].name
        here = head is None and re.fullmatch(r"[\da-f]{40}", commit)
        found = str(head or caller().get("custom_generate") or repo)
        drafter = _load(found, revision=revision or (commit if here else "main"))
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
        custom_generate=custom_generate(drafter, force=force),
        **arguments,
    )


_load = functools.lru_cache(maxsize=4)(load_head)
