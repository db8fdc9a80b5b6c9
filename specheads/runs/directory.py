"""The run directory: what lies where, what made it, and when it ended."""

import json
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from specheads.base import lora
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.runs.provenance import provenance


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Give a folder to fill that becomes `target` at once, or never.

    A folder that stands at `target` already is replaced.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}"
    scratch.mkdir()
    try:
        yield scratch
        old = target.parent / f".{target.name}.old"
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)
            target.rename(old)
        scratch.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file that is whole or absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.parent / f".{path.name}.{uuid.uuid4().hex[:8]}"
    try:
        scratch.write_bytes(content.encode() if isinstance(content, str) else content)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


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
        """Open a new run, or an unfinished one made with the very same settings, given as YAML.

        `identity` is what else must not change between stop and resume.
        """
        if self.finished:
            raise InputError(
                f"a finished run is never overwritten: {self.path} is finished; choose another "
                "name=, or remove it"
            )
        if self.config.is_file():
            if self.config.read_text(encoding="utf-8") != config_text:
                raise InputError(
                    f"an unfinished run resumes with its own settings only: those of {self.path} "
                    f"differ from {self.config.name}; choose another name=, or remove the folder"
                )
            before = self._provenance() if self.provenance.is_file() else identity
            for name, value in identity.items():
                if before.get(name) != value:
                    raise InputError(
                        f"an unfinished run resumes on the same {name.replace('_', ' ')} only: it "
                        f"was {before.get(name)}, now it is {value}; choose another name="
                    )
        elif self.path.is_dir() and any(self.path.iterdir()):
            raise InputError(
                f"a run needs a folder of its own: {self.path} holds other files; choose another "
                "run_dir="
            )
        if not self.provenance.is_file():
            made = {"start": _now(), "end": None, **identity, **asdict(provenance())}
            write_atomic(self.provenance, as_json(made))
        write_atomic(self.config, config_text)

    def end(self, head: Head) -> None:
        """Save the trained head and close the run.

        A head of joint training belongs to base and adapter together, and its folder says so.
        """
        known, owner = self._provenance(), {}
        if self.adapter.is_dir():
            owner["adapter_fingerprint"] = lora.fingerprint(self.adapter)
            # it was trained on the weights before the adapter is merged in, and fits those after
            head.base_fingerprint = ""
        with atomic_folder(self.head) as folder:
            head.save_pretrained(folder)
            if owner:
                fingerprint = {"base_fingerprint": known.get("base_fingerprint")}
                said = fingerprint | {"adapter": f"../{self.adapter.name}"} | owner
                (folder / "base.json").write_text(as_json(said), encoding="utf-8")
        write_atomic(self.provenance, as_json({**known, **owner, "end": _now()}))

    def _provenance(self) -> dict[str, Any]:
        return json.loads(self.provenance.read_text(encoding="utf-8"))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def as_json(value: Any) -> str:
    """Return the text of a file that people may read and compare."""
    return json.dumps(value, indent=2, sort_keys=True) + "\n"
