"""What a head's Hub repository holds, and how it gets there: in one commit, or not at all."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token

# HTTPError is its HTTP client's, which is another library in some versions
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,  # pyright: ignore[reportPrivateImportUsage]
)
from huggingface_hub.utils import validate_repo_id

from specheads.base.model import FrozenBase
from specheads.config import Push, Train
from specheads.core.errors import InputError
from specheads.decoding.trees.tuned import FILE
from specheads.export.hub.card import PICTURES, model_card
from specheads.export.hub.summary import read_summary
from specheads.export.plugins.hub_generate import hub_files
from specheads.heads.load import load_head
from specheads.heads.untrusted import first_line, refuse_outside
from specheads.measure.results import Results
from specheads.measure.store import read, to_json
from specheads.runs.directory import RunDirectory

Contents = dict[str, bytes | Path]
"""Files by their path in the repository: written here, or read from disk."""

GATES: dict[str, Literal["auto", "manual", False]] = {
    "auto": "auto",
    "manual": "manual",
    "false": False,
}

RESULTS = "results.json"
SETTINGS = "training.json"
"""Every push has it, and no other model's repository."""

MAX_PICTURE_BYTES = 2**20

SECRET = re.compile("TOKEN|SECRET|PASSW|CREDENTIAL|PRIVATE|KEY", re.IGNORECASE)
"""Names of environment variables whose values must never be uploaded."""

REMEDIES = {
    401: "log in with hf auth login, or set HF_TOKEN",
    403: "use a token that may write there, or a repo= of your own",
    404: "check repo=, and that the token may see it",
    409: "somebody else is changing it; try again",
    429: "the Hub asks for patience; try again later",
}


@dataclass(frozen=True, slots=True)
class Pushed:
    """What was uploaded, or would be."""

    files: dict[str, int]
    """Bytes of each file, by its path in the repository."""
    address: str
    """Address of the commit; empty where nothing was uploaded."""


def push_run(run: RunDirectory, trained: Train, settings: Push) -> Pushed:
    """Check that a run's head is whole and its base the right one, and upload it.

    Texts that hold a secret of the environment, or where on this machine something lies, are
    refused.
    """
    gated = settings.gated.lower()
    if gated and gated not in GATES:
        raise InputError(f"gated must be one of {', '.join(GATES)}, got {settings.gated!r}")
    for name, value in (("repo", settings.repo), ("base_repo", settings.base_repo)):
        _refuse_unnameable(name, value)
    files = _files(run, trained, settings)
    sizes = {
        path: len(content) if isinstance(content, bytes) else content.stat().st_size
        for path, content in files.items()
    }
    if settings.dry_run:
        return Pushed(sizes, "")
    return Pushed(sizes, push(settings.repo, files, private=settings.private, gated=gated))


def _refuse_unnameable(name: str, repo: str) -> None:
    """Refuse a name that the Hub never takes, before anything is loaded."""
    try:
        # empty is none
        validate_repo_id(repo or "none")
    except HFValidationError as error:
        raise InputError(
            f"{name} must be USER/NAME as the Hub takes it: {first_line(error)}"
        ) from error


def _files(run: RunDirectory, trained: Train, settings: Push) -> Contents:
    """Return what is to be uploaded, once the head has shown that it loads on its base."""
    run.refuse_unfinished("pushed")
    if run.adapter.is_dir() or trained.base.adapter:
        raise InputError(
            f"a pushed head has to fit a base that others can load, and that of {run.path} is one "
            "together with an adapter; merge the adapter into the base, publish that, and train on "
            "it: base.model=USER/MERGED init=HEAD"
        )
    base = _measured_base(run, trained)
    head = load_head(run.head, base)
    about = read_summary(run, asdict(trained), base, settings.base_repo)
    found = [run.report / name for name in PICTURES if (run.report / name).is_file()]
    pictures = [file.name for file in found if file.stat().st_size < MAX_PICTURE_BYTES]
    card = model_card(
        about,
        head,
        base,
        repo=settings.repo,
        licence=settings.licence,
        data_licence=settings.data_licence,
        pictures=pictures,
    )
    files: Contents = {
        "README.md": card.encode(),
        "config.json": run.head / "config.json",
        "model.safetensors": run.head / "model.safetensors",
        SETTINGS: _json({"settings": about.settings, "provenance": about.provenance}),
    }
    if head.tuned is not None:
        files[FILE] = run.head / FILE
    if about.results is not None:
        shown = to_json(about.results)
        del shown["provenance"]["command"]
        files[RESULTS] = _json(shown)
    files |= {path: text.encode() for path, text in hub_files(settings.repo).items()}
    files |= {name: run.report / name for name in pictures}
    for path, content in files.items():
        if isinstance(content, Path):
            if not content.is_file():
                raise InputError(
                    f"a pushed head needs {path}, and {content} is gone; save it again"
                )
            # a link would publish what lies elsewhere on this machine
            refuse_outside(content)
        if Path(path).suffix not in (".safetensors", ".png"):
            _refuse_secrets(path, content if isinstance(content, bytes) else content.read_bytes())
    return files


def _measured_base(run: RunDirectory, trained: Train) -> FrozenBase:
    """Return the run's base; where the run was evaluated, exactly the one that was measured."""
    file = run.report / RESULTS
    measured = read(Results, file)
    if measured is None:
        return FrozenBase.load(**asdict(trained.base))
    base = FrozenBase.load(**asdict(replace(trained.base, dtype=measured.settings.dtype)))
    if base.fingerprint != measured.base.fingerprint:
        raise InputError(
            f"a card shows what was measured on the base it names, and {base.name} has changed "
            f"since {file} was written; measure again with specheads evaluate run={run.path}"
        )
    return base


def push(repo: str, files: Contents, *, private: bool | None = None, gated: str = "") -> str:
    """Upload the files in one commit; return its address.

    Who may see and read the repository is settled before anything is in it; where it is missing,
    it is made. Large files are stored before the commit that names them, so whoever loads the head
    at any time finds all of one push or all of the one before.
    """
    if get_token() is None:
        raise InputError("a push needs a token of the Hub: run hf auth login, or set HF_TOKEN")
    try:
        api = HfApi()
        api.create_repo(repo, private=private, exist_ok=True)
        if private is not None or gated:
            api.update_repo_settings(repo, private=private, gated=GATES[gated] if gated else None)
        there = api.list_repo_files(repo)
        _refuse_another_model(repo, files, there)
        # figures of an earlier push must not stand beside a head they are not of
        old = [name for name in (RESULTS, FILE, *PICTURES) if name in there and name not in files]
        operations = [
            *(CommitOperationAdd(path, content) for path, content in files.items()),
            *(CommitOperationDelete(name) for name in old),
        ]
        message = "Upload a head of specheads"
        return api.create_commit(repo, operations, commit_message=message).commit_url
    except InputError:
        raise
    # huggingface_hub wraps what goes wrong in its upload threads, and refuses a card's metadata
    except (HTTPError, OSError, RuntimeError, ValueError) as error:
        raise InputError(_explain(repo, error)) from error


def _refuse_another_model(repo: str, files: Contents, there: list[str]) -> None:
    """Refuse to replace another model's weights, or to mix a head's with them."""
    own = files if SETTINGS in there else ()
    others = [
        name
        for name in there
        if "/" not in name and name.endswith((".safetensors", ".bin", ".pt")) and name not in own
    ]
    if others:
        raise InputError(
            f"a head needs a repository of its own, and {repo} holds {others[0]}; name another"
        )


def _explain(repo: str, error: BaseException) -> str:
    """Say what went wrong, and what to do, without the addresses that such errors hold."""
    answer: BaseException | None = error
    while answer is not None and not isinstance(answer, HfHubHTTPError):
        answer = answer.__cause__
    if answer is None and type(error) is ValueError:
        what, remedy = " ".join(str(error).split()), "change that setting"
    elif answer is None:
        what = f"the upload broke off ({type(error.__cause__ or error).__name__})"
        remedy = "check the network and HF_ENDPOINT, and push again"
    else:
        status = answer.response.status_code
        said = (answer.server_message or "without a reason").splitlines()[0]
        what = f"the Hub answered {status} ({said})"
        remedy = REMEDIES.get(status, "push again later")
    return f"{repo} holds either all of this push or what it held before: {what}; {remedy}"


def _refuse_secrets(path: str, data: bytes) -> None:
    secrets = {
        f"the value of {name}": re.escape(value)
        for name, value in os.environ.items()
        if SECRET.search(name) and len(value) >= 8
    }
    # a path begins a word, and ends with a part of its own
    places = {
        what: rf"(?<![\w.:/-]){re.escape(str(place))}(?![\w.-])"
        for what, place in (("the home folder", Path.home()), ("the working folder", Path.cwd()))
        if place != Path(place.anchor)
    }
    token = {"the token": re.escape(known)} if (known := get_token()) else {}
    for what, pattern in (token | secrets | places).items():
        if re.search(pattern.encode(), data):
            raise InputError(
                f"a push says nothing of its machine, and {path} holds {what}; take it out of the "
                "run's settings"
            )


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()
