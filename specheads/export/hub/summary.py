"""What a run tells of its head, on its card and on the Hub: nothing of where it ran."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specheads.base.model import FrozenBase
from specheads.runs.directory import RunDirectory
from specheads.runs.trackers import read_metrics

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

TOLD_SETTINGS = ("seed", "base", "head", "init", "data", "schedule", "tree", "evaluation")
"""Settings that say how a head was made and measured. The others say where on which machine."""

TOLD_PROVENANCE = ("start", "end", "base_fingerprint", "draft_vocabulary", "versions", "git")
"""A command line is never told: it holds paths, and whatever else its author typed."""

ABSOLUTE = re.compile(r"(/|~|[A-Za-z]:[\\/]|\\\\|file:)")


@dataclass(frozen=True, slots=True)
class Facts:
    """A run as strangers may read it: absolute paths are cut to their last part."""

    base_id: str
    """Hub id of the base; empty where it was a folder, which says nothing to others."""
    base_name: str
    """For people: the Hub id, or the folder's own name."""
    base_revision: str
    """Asked for, and the commit where it is known; empty for a folder."""
    adapted: bool
    """Whether the head belongs to the base and an adapter together."""
    settings: dict[str, Any]
    """Of config.yaml, those that `TOLD_SETTINGS` names."""
    provenance: dict[str, Any]
    results: dict[str, Any] | None
    """None where the head was not evaluated."""
    history: list[dict[str, Any]]
    """Rows of metrics.jsonl."""

    @property
    def base_place(self) -> str:
        """What stands for the base in code."""
        return self.base_id or "path/to/base"


def read_facts(
    run: RunDirectory, settings: Mapping[str, Any], base: FrozenBase, base_repo: str = ""
) -> Facts:
    """Return what a run tells.

    Args:
        run: Its head is trained.
        settings: Its own, resolved.
        base: It was trained on.
        base_repo: Hub id under which others find that base; empty is what the run loaded.

    Raises:
        ValueError: `base_repo` is no Hub id.
    """
    if base_repo and not HUB_ID.fullmatch(base_repo):
        raise ValueError(f"base_repo must be a Hub id as USER/NAME, got {base_repo!r}")
    source = str(settings["base"]["model"])
    is_folder = Path(source).exists() or not HUB_ID.fullmatch(source)
    base_id = base_repo or ("" if is_folder else source)
    name = base_id or Path(source).name
    told = portable({key: settings[key] for key in TOLD_SETTINGS})
    told["base"]["model"] = name
    if told["data"]["source"] != "hub":
        told["data"]["path"] = Path(told["data"]["path"]).name
    known = json.loads(run.provenance.read_text(encoding="utf-8"))
    results = _results(run.report / "results.json", name)
    return Facts(
        base_id,
        name,
        "" if is_folder else _revision(base),
        bool(told["base"]["adapter"]) or run.adapter.is_dir(),
        told,
        portable({key: known[key] for key in TOLD_PROVENANCE if key in known}),
        results,
        read_metrics(run.metrics),
    )


def portable(value: Any) -> Any:
    """Return a JSON value in which absolute paths are cut to their last part."""
    if isinstance(value, Mapping):
        return {name: portable(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [portable(one) for one in value]
    if isinstance(value, str) and ABSOLUTE.match(value):
        return re.split(r"[\\/]", value.rstrip("\\/"))[-1]
    return value


def _revision(base: FrozenBase) -> str:
    commit = getattr(base.config, "_commit_hash", None)
    known = commit and commit != base.revision
    return f"{base.revision} (commit {commit})" if known else base.revision


def _results(file: Path, base_name: str) -> dict[str, Any] | None:
    if not file.is_file():
        return None
    results = portable(json.loads(file.read_text(encoding="utf-8")))
    results["base"]["name"] = base_name
    results["provenance"].pop("command", None)
    return results
