"""What a card and a Hub repository say of a run: nothing of where it ran."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specheads.base.gguf import is_package
from specheads.base.model import FrozenBase
from specheads.core.errors import InputError
from specheads.core.paths import HUB_ID
from specheads.heads.untrusted import read_json
from specheads.measure.results import Results
from specheads.measure.store import from_json
from specheads.runs.directory import RunDirectory
from specheads.runs.provenance import portable
from specheads.runs.trackers import read_metrics

PUBLIC_SETTINGS = ("seed", "base", "head", "init", "data", "schedule", "tree", "evaluation")
"""Settings that say how a head was made and measured. The others say where on which machine."""

PUBLIC_PROVENANCE = ("start", "end", "base_fingerprint", "draft_vocabulary", "versions", "git")
"""A command line is never published: it holds paths, and whatever else its author typed."""


@dataclass(frozen=True, slots=True)
class Summary:
    """A run as strangers may read it: absolute paths are cut to their last part."""

    base_id: str
    """Hub id of the base; empty where it was a folder or a file, which says nothing to others."""
    base_name: str
    """For people: the Hub id, `package:NAME`, or the folder's or file's own name."""
    base_revision: str
    """Asked for, and the commit where it is known; empty for a folder."""
    base_pin: str
    """What everybody's code has to ask for; empty where `main` will do."""
    adapted: bool
    """Whether the head belongs to the base and an adapter together."""
    settings: dict[str, Any]
    """Settings of config.yaml that `PUBLIC_SETTINGS` names."""
    provenance: dict[str, Any]
    results: Results | None
    """None where the head was not evaluated."""
    history: list[dict[str, Any]]
    """Rows of metrics.jsonl."""

    @property
    def base_place(self) -> str:
        """What stands for the base in everybody's code."""
        return self.base_id or "path/to/base"

    @property
    def our_base_place(self) -> str:
        """What stands for the base in our own code, which finds packages too."""
        return self.base_name if is_package(self.base_name) else self.base_place


def read_summary(
    run: RunDirectory, settings: Mapping[str, Any], base: FrozenBase, base_repo: str = ""
) -> Summary:
    """Return a run as strangers may read it.

    `base_repo` is the Hub id under which others find its base; empty is what the run loaded.
    """
    if base_repo and not HUB_ID.fullmatch(base_repo):
        raise InputError(f"base_repo must be a Hub id as USER/NAME, got {base_repo!r}")
    source = str(settings["base"]["model"])
    is_folder = Path(source).exists() or not HUB_ID.fullmatch(source)
    base_id = base_repo or ("" if is_folder else source)
    name = base_id or Path(source).name
    shown = portable({key: settings[key] for key in PUBLIC_SETTINGS})
    shown["base"]["model"] = name
    for phase in shown["schedule"]["phases"].values():
        if phase["distill"]:
            # of a server: its address may hold a password
            phase["distill"] |= {"url": "", "served_as": ""}
    if shown["data"]["source"] != "hub":
        shown["data"]["path"] = Path(shown["data"]["path"]).name
    revision, commit = base.revision, getattr(base.config, "_commit_hash", None)
    pin = "" if is_folder or base_repo or revision == "main" else revision
    if commit and commit != revision:
        revision = f"{revision} (commit {commit})"
    known = read_json(run.provenance)
    results = _results(run.report / "results.json", name)
    return Summary(
        base_id,
        name,
        "" if is_folder else revision,
        pin,
        bool(shown["base"]["adapter"]) or run.adapter.is_dir(),
        shown,
        portable({key: known[key] for key in PUBLIC_PROVENANCE if key in known}),
        results,
        read_metrics(run.metrics),
    )


def _results(file: Path, base_name: str) -> Results | None:
    if not file.is_file():
        return None
    # files of before hold absolute paths, and so may what a user typed
    found = from_json(Results, portable(read_json(file)), str(file))
    return replace(
        found,
        base=replace(found.base, name=base_name),
        provenance=replace(found.provenance, command=[]),
    )
