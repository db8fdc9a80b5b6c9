"""Model card of a trained head: description, measurements, serving commands and limits.

`card.md.jinja` holds the text, and `read_summary` removes what identifies the machine.
"""

import hashlib
import warnings
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from specheads.base.ends import BaseEnds
from specheads.base.file_checks import auto_class
from specheads.base.gguf import PACKAGE
from specheads.core.drafter import Head
from specheads.core.files import HUB_ID, from_json, read_json, write_atomic
from specheads.data.prompts import PUBLIC_PROMPT_SETS
from specheads.data.sources import is_on_hub
from specheads.export.layouts import engine_module, engines, objection
from specheads.measure.results import Results
from specheads.measure.summary import depth_rows, summary_rows, verdict
from specheads.runs.directory import RunDirectory
from specheads.runs.provenance import cut_absolute_paths
from specheads.runs.trackers import read_metrics

TEMPLATE = Path(__file__).with_name("card.md.jinja")
KNOWN_LICENCES = {"python_stdlib": "PSF-2.0", "stdlib_questions.jsonl.gz": "PSF-2.0"}
"""Licences of the corpora that are part of Python, by source or file."""
PUBLIC_SETTINGS = ("seed", "base", "head", "init", "data", "schedule", "tree", "evaluation")
"""Settings that describe training and measurement. The others describe the machine."""
PUBLIC_PROVENANCE = ("start", "end", "base_fingerprint", "draft_vocabulary", "versions", "git")
"""The command line is never published: it can hold paths and secrets."""


@dataclass(frozen=True, slots=True)
class Summary:
    """The public part of a run: absolute paths are cut to their last component."""

    base_id: str
    """Hub id of the base; empty for a local folder or file."""
    base_name: str
    """Name for readers: the Hub id, `package:NAME`, or the name of the folder or file."""
    base_revision: str
    """The requested revision and, if known, its commit; empty for a local base."""
    base_pin: str
    """Revision that readers must request; empty if `main` is right."""
    adapted: bool
    """Whether the head needs the base together with an adapter."""
    settings: dict[str, Any]
    """Settings of config.yaml that are in `PUBLIC_SETTINGS`."""
    provenance: dict[str, Any]
    results: Results | None
    """None if the head was not evaluated."""
    history: list[dict[str, Any]]
    """Rows of metrics.jsonl."""

    @property
    def base_in_code(self) -> str:
        """The base's name in code that any reader can run."""
        return self.base_id or "path/to/base"

    @property
    def base_in_specheads(self) -> str:
        """The base's name in code that uses specheads, which also finds packages."""
        return self.base_name if self.base_name.startswith(PACKAGE) else self.base_in_code


def read_summary(
    run: RunDirectory, settings: Mapping[str, Any], base: BaseEnds, base_repo: str = ""
) -> Summary:
    """Return the public part of a run.

    `base_repo` is the Hub id of the base for readers; empty is the one that the run loaded.
    """
    source = str(settings["base"]["model"])
    is_local = Path(source).exists() or not HUB_ID.fullmatch(source)
    base_id = base_repo or ("" if is_local else source)
    name = base_id or Path(source).name
    public = cut_absolute_paths({key: settings[key] for key in PUBLIC_SETTINGS})
    public["base"]["model"] = name
    for phase in public["schedule"]["phases"].values():
        if phase["distill"]:
            # the address of a server can hold a password
            phase["distill"] |= {"url": "", "served_as": ""}
    for source in corpus_sources(public["data"]):
        if not hub_id(source):
            source["path"] = Path(source["path"]).name
    revision, commit = base.revision, getattr(base.config, "_commit_hash", None)
    pin = "" if is_local or base_repo or revision == "main" else revision
    if commit and commit != revision:
        revision = f"{revision} (commit {commit})"
    record, results = read_json(run.provenance), None
    provenance = {key: record[key] for key in PUBLIC_PROVENANCE if key in record}
    file = run.report / "results.json"
    if file.is_file():
        # files of older versions hold absolute paths, and users can type them
        results = from_json(Results, cut_absolute_paths(read_json(file)), str(file))
        subject, origin = replace(results.base, name=name), replace(results.provenance, command=[])
        results = replace(results, base=subject, provenance=origin)
    return Summary(
        base_id,
        name,
        "" if is_local else revision,
        pin,
        bool(public["base"]["adapter"]) or run.adapter.is_dir(),
        public,
        cut_absolute_paths(provenance),
        results,
        read_metrics(run.metrics),
    )


def corpus_sources(data: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the sources of the training text, as plain settings: those of a mixture, or itself."""
    if data["source"] != "mixture":
        return [data]
    return [source for source in data["sources"].values() if source["weight"]]


def hub_id(source: Mapping[str, Any]) -> str:
    """Return the id of a source's data set on the Hub; empty if its text is elsewhere."""
    return source["path"] if is_on_hub(source["source"], source["path"]) else ""


def write_card(run: RunDirectory, settings: Mapping[str, Any], head: Head, base: BaseEnds) -> None:
    """Write README.md of a run's head before it is published; keep one that was edited."""
    file, text = run.head / "README.md", model_card(read_summary(run, settings, base), head, base)
    if file.is_file() and run.card_hash not in ("", text_hash(file.read_bytes())):
        warnings.warn(f"{file} was edited, so it is kept; remove it for a new one", stacklevel=2)
        return
    write_atomic(file, text)
    run.record(card=text_hash(text.encode()))


def text_hash(data: bytes) -> str:
    """Return the SHA-256 of a text in hex digits."""
    return hashlib.sha256(data).hexdigest()


def model_card(
    about: Summary,
    head: Head,
    base: BaseEnds,
    *,
    repo: str = "",
    licence: str = "unknown",
    data_licence: str = "",
) -> str:
    """Return README.md: the metadata for the Hub, and the card.

    Missing information is called unknown or not measured. `repo` is empty before publication. An
    empty `data_licence` is the one of `KNOWN_LICENCES`, or unknown.
    """
    head_path = repo or "path/to/head"
    name = repo.rpartition("/")[2] or f"{head.kind} for {about.base_name}"
    data = about.settings["data"]
    # metrics.jsonl counts tokens from the start of the training
    ends = {row["phase"]: row["tokens"] for row in about.history}
    phases = [phase for phase in about.settings["schedule"]["phases"] if phase in ends]
    starts = [0, *(ends[phase] for phase in phases)]
    metadata = ModelCardData(
        base_model=about.base_id or None,
        # the Hub's relation for weights used next to an unchanged base; its default is finetune
        base_model_relation="adapter" if about.base_id else None,
        datasets=list(filter(None, map(hub_id, corpus_sources(data)))) or None,
        license=licence,
        library_name="specheads",
        pipeline_tag="text-generation",
        tags=["speculative-decoding", "speculator", head.kind],
        model_name=name,
        eval_results=list(_evaluations(about)) or None,
    )
    card = ModelCard.from_template(
        metadata,
        str(TEMPLATE),
        about=about,
        name=name,
        repo=repo,
        head_path=head_path,
        head=head,
        parameters=sum(parameter.numel() for parameter in head.parameters()),
        results=about.results,
        hub_id=hub_id,
        summary_rows=summary_rows,
        depth_rows=depth_rows,
        verdict=verdict,
        data_licence=data_licence or licence_of(data),
        tokens={
            phase: f"{ends[phase] - start:,}" for phase, start in zip(phases, starts, strict=False)
        },
        auto=auto_class(base.model.config).__name__,
        engines=[] if about.adapted else list(_engines(about, head, base, head_path)),
    )
    return f"{card}\n"


def licence_of(data: Mapping[str, Any]) -> str:
    """Return the licence of a corpus, or "unknown"."""
    names = data["source"], Path(data["path"]).name
    return next((KNOWN_LICENCES[name] for name in names if name in KNOWN_LICENCES), "unknown")


def _evaluations(about: Summary) -> Iterator[EvalResult]:
    results = about.results
    if results is None:
        return
    prompts, settings = results.prompts, results.settings
    hub_set = PUBLIC_PROMPT_SETS.get(prompts.name)
    names = ("temperature", "tree", "dtype", "max_new_tokens")
    conditions = {name: getattr(settings, name) for name in names}
    for section, metric, name in (
        (results.offline, "tokens_per_forward", "Tokens per forward, offline replay"),
        (results.online, "tokens_per_forward", "Tokens per forward, online"),
        (results.speed, "speedup", "Speed-up over the base alone"),
    ):
        if not section:
            continue
        low, high = section.interval
        yield EvalResult(
            task_type="text-generation",
            dataset_type=hub_set.path if hub_set else prompts.name,
            dataset_name=prompts.name,
            dataset_args={"prompts": prompts.count, "version": prompts.version},
            metric_type=metric,
            metric_name=f"{name} (95 % interval {low:.3f} to {high:.3f})",
            metric_value=round(getattr(section, metric), 4),
            metric_args=conditions | {"hardware": str(results.provenance.hardware)},
        )


def _engines(
    about: Summary, head: Head, base: BaseEnds, head_path: str
) -> Iterator[tuple[str, str, list[str]]]:
    """Yield each engine that serves the head, whether it was run, and the commands."""
    public_base = copy(base)
    public_base.location, public_base.revision = about.base_in_code, about.base_pin or "main"
    base_words = about.base_in_specheads
    base_words += f" base.revision={about.base_pin}" if about.base_pin else ""
    # a copy of the base belongs in the base's repository
    for engine in (name for name in engines() if name != "base"):
        module = engine_module(engine)
        if not objection(head, base, engine):
            layout = module.LAYOUTS[head.kind]
            status = "run" if layout.verified == "run" else "not run here"
            export = (
                f"specheads export head={head_path} base={base_words} engine={engine} out=served"
            )
            lines = [export, *layout.make_folder(head, public_base, Path("served")).serve]
            yield module.ABOUT, f"{status}: {layout.note}", lines
