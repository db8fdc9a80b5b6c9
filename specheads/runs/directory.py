"""The run directory: its files, its provenance, and its state."""

import shutil
import uuid
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from specheads.base import lora
from specheads.config.validation import differences, parse_settings, read_settings
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.core.files import (
    as_json,
    atomic_folder,
    is_lock_or_incomplete,
    read_json,
    remove_incomplete,
    write_atomic,
)
from specheads.heads.load import load_head
from specheads.runs import checkpoint
from specheads.runs.provenance import collect_provenance

PROVENANCE_TYPES: dict[str, Any] = {
    "end": str | None,
    "run_id": str,
    "card": str,
    "base_fingerprint": str,
    "base_config": str,
    "data": str,
    "draft_vocabulary": dict,
    "diverged": dict,
    "fixes": list,
}
"""Fields that are read from provenance.json, and their types."""


class RunDirectory:
    """The folder of one run, which need not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.provenance = path / "provenance.json"
        self.metrics = path / "metrics.jsonl"
        self.text = path / "text"
        self.checkpoints = path / "checkpoints"
        self.phases = path / "phases"
        self.head = path / "head"
        self.adapter = path / "adapter"
        self.report = path / "report"
        self.best = path / "best"
        self.best_score = self.best / "best.json"

    @property
    def finished(self) -> bool:
        """Whether training ended and its head was saved."""
        return self.provenance.is_file() and bool(self._provenance().get("end"))

    @property
    def run_id(self) -> str:
        """Id of this run folder for trackers, kept on resume; empty for an older run."""
        return self._provenance().get("run_id", "")

    def refuse_unfinished(self, verb: str) -> None:
        """Raise if training has not ended; the message says that a run cannot be `verb`."""
        if not self.finished:
            raise InputError(
                f"only a finished run can be {verb}, and {self.path} is not; train it to its end"
            )

    def begin(self, config_text: str, identity: dict[str, Any], *, evaluates: bool = False) -> None:
        """Open a new run, or resume an unfinished one; only the process with the lock may do this.

        If it `evaluates`, a run without results resumes too, although its training has ended.

        The settings in YAML that change training, and the other facts of `identity`, must be the
        same. Incomplete files of a killed process are removed.
        """
        is_measured = (self.report / "results.json").is_file()
        if self.finished and (is_measured or not evaluates):
            measure = "" if is_measured else f"measure it with specheads evaluate run={self.path}, "
            raise InputError(
                f"a finished run is never overwritten, and {self.path} is finished; {measure}"
                "choose another name=, or remove it"
            )
        fixes: list[dict[str, Any]] = []
        if self.config.is_file():
            fixes = self._refuse_changed(config_text, identity)
        elif self.path.is_dir() and not all(
            is_lock_or_incomplete(item.name) for item in self.path.iterdir()
        ):
            raise InputError(
                f"a run needs its own folder, {self.path} has other files; choose another run_dir="
            )
        for folder in (self.path, self.checkpoints, self.phases, self.head):
            remove_incomplete(folder)
        # first, because config.yaml marks the folder as a run
        write_atomic(self.config, config_text)
        record = {"start": _now(), "end": None, "run_id": uuid.uuid4().hex[:8], **identity}
        record |= asdict(collect_provenance())
        if self.provenance.is_file():
            # keep facts that training added
            record = {**identity, **self._provenance()}
        if fixes:
            record |= {"base_fingerprint": identity["base_fingerprint"]}
            record["fixes"] = [*record.get("fixes", []), *fixes]
            del record["diverged"]
        write_atomic(self.provenance, as_json(record))

    def mark_diverged(self, step: int, *, by_base: bool) -> None:
        """Record the first step that was not finite, so that its cause may change on resume.

        The base's hidden states were the cause, or else the weights before this step were.
        """
        if self.provenance.is_file():
            self.record(diverged={"step": step, "by_base": by_base})

    def _refuse_changed(self, config_text: str, identity: dict[str, Any]) -> list[dict[str, Any]]:
        """Raise if a setting or fact changed; return the changes that fix a divergence."""
        settings = read_settings(self.config, resumes=True), parse_settings(config_text)
        record = self._provenance() if self.provenance.is_file() else identity
        diverged = record.get("diverged", {})
        for name, former, value in differences(*settings, after_divergence=bool(diverged)):
            raise InputError(
                f"an unfinished run resumes with its own settings: {name} was {former}, now "
                f"{value}; choose another name=, or remove {self.path}"
            )
        fixes = [
            {"setting": name, "was": former, "now": value, "diverged": diverged}
            for name, former, value in differences(*settings)
        ]
        has_other_dtype = any(fix["setting"] == "base.dtype" for fix in fixes)
        for name, value in identity.items():
            if has_other_dtype and name == "base_fingerprint":
                continue
            if record.get(name, value) != value:
                raise InputError(
                    f"an unfinished run resumes with the same {name.replace('_', ' ')}: it was "
                    f"{record[name]}, now {value}; restore it, or choose another name="
                )
        if fixes and not diverged.get("by_base"):
            checkpoint.remove_from(self.checkpoints, int(diverged.get("step", 0)))
        return fixes

    def end(self, head: Head, *, is_best: bool = False) -> None:
        """Save the trained head, with a reference to its adapter, and close the run.

        With `is_best` the head in best/ replaces it, if there is one.
        """
        if is_best and self.best_score.is_file():
            head.load_state_dict(load_head(self.best).state_dict())
            if (adapter := self.best / "adapter").is_dir():
                with atomic_folder(self.adapter) as folder:
                    shutil.copytree(adapter, folder, dirs_exist_ok=True)
        with atomic_folder(self.head) as folder:
            owner = self._save(head, folder, self.adapter, f"../{self.adapter.name}")
        # training may have it in another form
        head.load_state_dict(load_head(self.head).state_dict())
        self.record(**owner, end=_now())

    def keep_best(self, head: Head, adapter: lora.Adapter | None, score: dict[str, Any]) -> None:
        """Save a head, which may be in training, with its adapter and score in best/."""
        with atomic_folder(self.best) as folder:
            if adapter is not None:
                adapter.save(folder / "adapter")
            self._save(head, folder, folder / "adapter", "adapter")
            (folder / self.best_score.name).write_text(as_json(score), encoding="utf-8")

    def _save(self, head: Head, folder: Path, adapter: Path, adapter_path: str) -> dict[str, str]:
        """Save a head; return the fingerprint of the adapter that it belongs to, if there is one.

        base.json next to the head then names the adapter by its `place`.
        """
        if not adapter.is_dir():
            head.save_pretrained(folder)
            return {}
        adapter_record = {"adapter_fingerprint": lora.fingerprint(adapter)}
        fingerprint = {"base_fingerprint": self._provenance().get("base_fingerprint")}
        about = as_json(fingerprint | {"adapter": adapter_path} | adapter_record)
        (folder / "base.json").write_text(about, encoding="utf-8")
        # the head fits the weights with the merged adapter, not the fingerprint of those without
        made_for, head.base_fingerprint = head.base_fingerprint, ""
        head.save_pretrained(folder)
        head.base_fingerprint = made_for
        return adapter_record

    def record(self, **facts: Any) -> None:
        """Add facts to provenance.json."""
        write_atomic(self.provenance, as_json({**self._provenance(), **facts}))

    @property
    def card_hash(self) -> str:
        """Hash of the card that was written last; empty for an older run."""
        return self._provenance().get("card", "")

    def _provenance(self) -> dict[str, Any]:
        record = read_json(self.provenance)
        for name in PROVENANCE_TYPES.keys() & record.keys():
            if not isinstance(record[name], PROVENANCE_TYPES[name]):
                raise InputError(
                    f"{self.provenance} has a {name} that training did not write; restore the file"
                )
        return record


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
