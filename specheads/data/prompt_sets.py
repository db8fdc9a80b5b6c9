"""Rows of public prompt sets and of users' files, as they are published."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from specheads.config.data import PATHLESS_SOURCES, SourceSettings
from specheads.core.errors import InputError
from specheads.core.files import local_path
from specheads.data.bad_rows import BadRows, locate_errors
from specheads.data.files import JSONL, TABLES, rows_of
from specheads.data.sources import HubDataset


def _hub_set(path: str, **settings: Any) -> SourceSettings:
    return SourceSettings(source="hub", path=path, **settings)


PUBLIC_PROMPT_SETS = {
    "humaneval": _hub_set("openai/openai_humaneval", split="test"),
    "mbpp": _hub_set("google-research-datasets/mbpp", config="full", split="test"),
    "gsm8k": _hub_set("openai/gsm8k", config="main", split="test"),
    "math500": _hub_set("HuggingFaceH4/MATH-500", split="test"),
    "aime": _hub_set("math-ai/aime25", split="test"),
    "mt_bench": _hub_set("HuggingFaceH4/mt_bench_prompts"),
    "alpaca": _hub_set("tatsu-lab/alpaca"),
    "arena_hard": _hub_set(
        "lmarena-ai/arena-hard-auto", patterns=["data/arena-hard-v2.0/question.jsonl"]
    ),
    # datasets does not run this set's script, so its newest file (release_v6) is read
    "livecodebench": _hub_set(
        "json",
        patterns=[
            "https://huggingface.co/datasets/livecodebench/code_generation_lite/resolve/"
            "0fe84c3912ea0c4d4a78037083943e8f0c4dd505/test6.jsonl"
        ],
    ),
    # this one is in its own repository and not on the Hub
    "spec_bench": _hub_set(
        "json",
        patterns=[
            "https://raw.githubusercontent.com/hemingkx/Spec-Bench/"
            "fd2c1cd7d2201ef71db4c5f4e455008f017967bf/data/spec_bench/question.jsonl"
        ],
    ),
}
"""Public sets by name. A local file in the same format works too."""
PROMPT_NAMES = (*PATHLESS_SOURCES, "held_out", *PUBLIC_PROMPT_SETS)
SPEED_BENCH = re.compile(r"qualitative|throughput_(\d+k)")
"""Names of SPEED-Bench's subsets: files or folders, as its scripts write them."""
UNRESOLVED = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
"""Replaces text that may not be redistributed in SPEED-Bench's rows on the Hub."""


def read_prompt_rows(name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each row of a set, file or folder with its location, which error messages name."""
    if name in PUBLIC_PROMPT_SETS:
        yield from HubDataset(PUBLIC_PROMPT_SETS[name]).rows(0, BadRows())
        return
    path = local_path(name)
    candidates = sorted(filter(_match_subset, path.rglob("*"))) if path.is_dir() else [path]
    files = [
        file for file in candidates if file.name.endswith((*JSONL, *TABLES)) and file.is_file()
    ]
    if not files:
        raise InputError(
            f"prompts must be {', '.join(PROMPT_NAMES)}, a folder of SPEED-Bench with "
            "qualitative.jsonl or throughput_1k.jsonl, or a .jsonl or .parquet file that exists; "
            f"got {name!r}"
        )
    for file in files:
        subset = _match_subset(file)
        for location, row in rows_of([file]):
            yield location, _with_turns(row, location, subset[1] or "") if subset else row


def _match_subset(file: Path) -> re.Match[str] | None:
    """Match the subset of SPEED-Bench that a file holds: NAME.jsonl, or NAME/test.parquet."""
    stem = file.name.partition(".")[0]
    return SPEED_BENCH.fullmatch(stem) or SPEED_BENCH.fullmatch(file.parent.name)


def _with_turns(row: dict[str, Any], location: str, input_length: str) -> dict[str, Any]:
    """Return a row of SPEED-Bench with `turns`, which its scripts also write as `messages`."""
    messages, turns = row.get("messages"), row.get("turns")
    if isinstance(messages, list) and all(
        isinstance(message, dict) and message.get("role") == "user" for message in messages
    ):
        turns = [message.get("content") for message in messages]
    with locate_errors(location):
        if UNRESOLVED in str(turns):
            raise InputError(
                "rows of SPEED-Bench must hold their prompts (write the folder with the prepare "
                "script of NeMo-Skills or ModelOpt, which fetches them)",
                fault="has a placeholder",
            )
    columns = {name: value for name, value in row.items() if name != "messages"}
    return columns | {"turns": turns, "input_length": input_length}
