"""The run directory: what lies where, what made it, and when it ended."""

import json
import shutil
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from specheads.base import lora
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.core.files import atomic_folder, is_ours, read_json, sweep, write_atomic
from specheads.heads.load import load_head
from specheads.runs.provenance import provenance
from specheads.runs.settings import first_difference, parse, read_settings

KNOWN: dict[str, Any] = {"end": str | None, "base_fingerprint": str, "draft_vocabulary": dict}
"""What is looked up in provenance.json, and what it is."""


class RunDirectory:
    """One run's folder, laid out as the README's room map says; it need not exist yet."""

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

    def refuse_unfinished(self, what: str) -> None:
        """Refuse to do this with a run whose training has not ended."""
        if not self.finished:
            raise InputError(
                f"only a finished run can be {what}: {self.path} is not; finish it with the same "
                "specheads train command"
            )

    def begin(self, config_text: str, identity: dict[str, Any]) -> None:
        """Open a new run, or an unfinished one whose training the settings, as YAML, do not change.

        `identity` is what else must not change between stop and resume. What a killed process left
        half-written is removed, so only one that holds the lock may call this.
        """
        if self.finished:
            raise InputError(
                f"a finished run is never overwritten: {self.path} is finished; choose another "
                "name=, or remove it"
            )
        if self.config.is_file():
            self._refuse_changed(config_text, identity)
        elif self.path.is_dir() and not all(is_ours(item.name) for item in self.path.iterdir()):
            raise InputError(
                f"a run needs a folder of its own: {self.path} holds other files; choose another "
                "run_dir="
            )
        for folder in (self.path, self.checkpoints, self.phases, self.head):
            sweep(folder)
        # the settings say that the folder is a run's, and come first
        write_atomic(self.config, config_text)
        made = {"start": _now(), "end": None, **identity, **asdict(provenance())}
        if self.provenance.is_file():
            # more may be known of a run than when it began
            made = {**identity, **self._provenance()}
        write_atomic(self.provenance, as_json(made))

    def _refuse_changed(self, config_text: str, identity: dict[str, Any]) -> None:
        if found := first_difference(read_settings(self.config), parse(config_text)):
            name, was, now = found
            raise InputError(
                f"an unfinished run resumes with its own settings only: {name} was {was}, now "
                f"{now}; choose another name=, or remove {self.path}"
            )
        before = self._provenance() if self.provenance.is_file() else identity
        for name, value in identity.items():
            if before.get(name, value) != value:
                raise InputError(
                    f"an unfinished run resumes on the same {name.replace('_', ' ')} only: it "
                    f"was {before[name]}, now it is {value}; choose another name="
                )

    def end(self, head: Head) -> None:
        """Save the trained head and close the run.

        A head of joint training belongs to base and adapter together, and its folder says so.
        """
        owner: dict[str, str] = {}
        with atomic_folder(self.head) as folder:
            if self.adapter.is_dir():
                owner = self._say_owner(head, folder, f"../{self.adapter.name}", self.adapter)
            head.save_pretrained(folder)
        write_atomic(self.provenance, as_json({**self._provenance(), **owner, "end": _now()}))

    def keep_best(self, head: Head, adapter: lora.Adapter | None, told: dict[str, Any]) -> None:
        """Keep a head that may be in training, with its adapter and what is told of it, in best/.

        It replaces the one before, all of it at once.
        """
        made_for = head.base_fingerprint
        try:
            with atomic_folder(self.best) as folder:
                if adapter is not None:
                    adapter.save(folder / "adapter")
                    self._say_owner(head, folder, "adapter", folder / "adapter")
                head.save_pretrained(folder)
                (folder / self.best_score.name).write_text(as_json(told), encoding="utf-8")
        finally:
            head.base_fingerprint = made_for

    def take_best(self, head: Head) -> None:
        """Put what is in best/ in the place of the head that training ended with."""
        if not self.best_score.is_file():
            return
        head.load_state_dict(load_head(self.best).state_dict())
        if (adapter := self.best / "adapter").is_dir():
            with atomic_folder(self.adapter) as folder:
                shutil.copytree(adapter, folder, dirs_exist_ok=True)

    def _say_owner(self, head: Head, folder: Path, place: str, adapter: Path) -> dict[str, str]:
        """Say in a head's folder which adapter it belongs to; return that."""
        # it was trained on the weights before the adapter is merged in, and fits those after
        head.base_fingerprint = ""
        owner = {"adapter_fingerprint": lora.fingerprint(adapter)}
        fingerprint = {"base_fingerprint": self._provenance().get("base_fingerprint")}
        said = fingerprint | {"adapter": place} | owner
        (folder / "base.json").write_text(as_json(said), encoding="utf-8")
        return owner

    def _provenance(self) -> dict[str, Any]:
        known = read_json(self.provenance)
        for name in KNOWN.keys() & known.keys():
            if not isinstance(known[name], KNOWN[name]):
                raise InputError(
                    f"{self.provenance} holds a {name} that training never wrote; put back its file"
                )
        return known


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def as_json(value: Any) -> str:
    """Return the text of a file that people may read and compare."""
    return json.dumps(value, indent=2, sort_keys=True) + "\n"
