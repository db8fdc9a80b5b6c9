"""Publish a head on the Hugging Face Hub, in one commit or not at all."""

import json
import os
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token

# HTTPError belongs to the HTTP client, which differs between versions
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,  # pyright: ignore[reportPrivateImportUsage]
)
from huggingface_hub.utils import validate_repo_id

from specheads.base.model import FrozenBase
from specheads.core.errors import InputError, causes, first_line, one_line
from specheads.core.files import as_json, refuse_outside, to_json
from specheads.decoding.trees.tuned import FILE
from specheads.export.card import model_card, read_summary, text_hash
from specheads.export.custom_generate import hub_files
from specheads.heads.load import load_head
from specheads.runs.directory import RunDirectory

Contents = dict[str, bytes | Path]
"""Files by their path in the repository: the bytes of a text, or the local file of weights."""
RESULTS = "results.json"
SETTINGS = "training.json"
"""Every push contains this file, so it identifies a repository of specheads."""
SECRET = re.compile(
    "(TOKENS?|SECRETS?|PASSWORDS?|PASSWD|PASSPHRASE|CREDENTIALS?|APIKEY|(?<![A-Z])(KEY|PRIVATE))([_\\d]|$)",
    re.IGNORECASE,
)
"""Words in names of environment variables whose values must never be uploaded."""


@dataclass(frozen=True, slots=True)
class Upload:
    """Files that were uploaded, or would be in a dry run."""

    files: dict[str, int]
    """Bytes of each file, by its path in the repository."""
    address: str
    """Address of the commit; empty in a dry run."""


def push_run(
    run: RunDirectory,
    settings: Mapping[str, Any],
    repo: str,
    *,
    private: bool | None = None,
    base_repo: str = "",
    licence: str = "unknown",
    data_licence: str = "",
    overwrite: bool = False,
    dry_run: bool = False,
) -> Upload:
    """Check a run's head and base, and upload the head with its card.

    Files that contain a secret of the environment or a path of this machine are refused.

    `settings` are the run's. A visibility of None keeps that of a repository and makes a new one
    public. `base_repo` is the Hub id of the base, if the run loaded it from elsewhere. `overwrite`
    replaces files that somebody else wrote or edited. A dry run returns the files and contacts
    nothing.
    """
    for name, value in (("repo", repo), ("base_repo", base_repo)):
        try:
            validate_repo_id(value or "none")
        except HFValidationError as error:
            raise InputError(
                f"{name} must be USER/NAME as the Hub takes it: {first_line(error)}"
            ) from error
    run.refuse_unfinished("pushed")
    if run.adapter.is_dir() or settings["base"]["adapter"]:
        raise InputError(
            f"a pushed head needs a base that others can load, {run.path} trained an adapter; "
            "merge the adapter, publish that, and train on it: base.model=USER/MERGED init=HEAD"
        )
    base = FrozenBase.load(**settings["base"])
    # refuses a base that changed after the training
    head = load_head(run.head, base)
    about = read_summary(run, settings, base, base_repo)
    card = model_card(about, head, base, repo=repo, licence=licence, data_licence=data_licence)
    weights = _file_of(run, "model.safetensors")
    texts = {
        "README.md": card.encode(),
        "config.json": _file_of(run, "config.json").read_bytes(),
        **{path: text.encode() for path, text in hub_files(repo).items()},
    }
    if head.tuned is not None:
        texts[FILE] = _file_of(run, FILE).read_bytes()
    if about.results is not None:
        results = to_json(about.results)
        del results["provenance"]["command"]
        texts[RESULTS] = as_json(results).encode()
    training = {"settings": about.settings, "provenance": about.provenance}
    training["files"] = {path: text_hash(text) for path, text in texts.items()}
    texts[SETTINGS] = as_json(training).encode()
    for path, text in texts.items():
        _refuse_secrets(path, text, {repo, about.base_id})
    sizes = {path: len(text) for path, text in texts.items()}
    sizes[weights.name] = weights.stat().st_size
    if dry_run:
        return Upload(sizes, "")
    files = {**texts, weights.name: weights}
    return Upload(sizes, push(repo, files, private=private, overwrite=overwrite))


def _file_of(run: RunDirectory, name: str) -> Path:
    """Return a file of a run's head; refuse a missing one, and a link to elsewhere."""
    if not (file := run.head / name).is_file():
        raise InputError(f"a pushed head needs {name}, and {file} is missing; save it again")
    # a symbolic link could publish any file of this machine
    refuse_outside(file)
    return file


def push(
    repo: str, files: Contents, *, private: bool | None = None, overwrite: bool = False
) -> str:
    """Upload the files in one commit and return its address.

    Visibility is set before any file is uploaded, and a missing repository is created. Large files
    are uploaded before the commit that refers to them, so a reader always finds one whole push.
    `upload_folder` cannot give this guarantee, because it may split its commit.
    """
    if get_token() is None:
        raise InputError("a push needs a token of the Hub: run hf auth login, or set HF_TOKEN")
    try:
        api = HfApi()
        api.create_repo(repo, private=private, exist_ok=True)
        if private is not None:
            api.update_repo_settings(repo, private=private)
        present = {*api.list_repo_files(repo)}
        hashes = _pushed_hashes(api, repo) if SETTINGS in present else None
        replaced = () if hashes is None else files
        weights = [name for name in present if re.fullmatch(r"[^/]+\.(safetensors|bin|pt)", name)]
        if foreign := sorted(name for name in weights if name not in replaced):
            raise InputError(
                f"a head needs a repository of its own, and {repo} holds {foreign[0]}; name another"
            )
        # remove results of an earlier push, because they describe another head
        old = [] if hashes is None else [*present.intersection((RESULTS, FILE)).difference(files)]
        if not overwrite:
            ours = {SETTINGS} if hashes is not None else set()
            texts = {path: text for path, text in files.items() if isinstance(text, bytes)}
            texts |= dict.fromkeys(old, b"")
            for path in sorted(present.intersection(texts) - ours):
                published = _download(api, repo, path)
                if published != texts[path] and text_hash(published) != (hashes or {}).get(path):
                    raise InputError(
                        f"a push replaces no text of others, and {repo} holds {path}, which "
                        "specheads did not write or which was edited; save it, and push with "
                        "overwrite=true"
                    )
        operations = [
            *(CommitOperationAdd(path, content) for path, content in files.items()),
            *(CommitOperationDelete(name) for name in old),
        ]
        message = "Upload a head of specheads"
        return api.create_commit(repo, operations, commit_message=message).commit_url
    except InputError:
        raise
    # huggingface_hub wraps errors of its upload threads, and refuses invalid card metadata
    except (HTTPError, OSError, RuntimeError, ValueError) as error:
        raise InputError(_explain(repo, error)) from error


def _download(api: HfApi, repo: str, path: str) -> bytes:
    with TemporaryDirectory() as folder:
        file = api.hf_hub_download(repo, path, local_dir=folder, force_download=True)
        return Path(file).read_bytes()


def _pushed_hashes(api: HfApi, repo: str) -> dict[str, str] | None:
    """Return the hashes of the texts of the last push; None if training.json is another file."""
    with suppress(ValueError, AttributeError, TypeError):
        training = json.loads(_download(api, repo, SETTINGS))
        if {"settings", "provenance"} <= training.keys():
            return {**training.get("files", {})}
    return None


def _explain(repo: str, error: BaseException) -> str:
    """Return the cause and a remedy, without the addresses in the original message."""
    answer = next((cause for cause in causes(error) if isinstance(cause, HfHubHTTPError)), None)
    if answer is not None:
        reason = (answer.server_message or "without a reason").splitlines()[0]
        cause = f"the Hub answered {answer.response.status_code} ({reason})"
    elif type(error) is ValueError:
        cause = one_line(error)
    else:
        cause = f"the upload broke off ({type(error.__cause__ or error).__name__})"
    return (
        f"{repo} holds either all of this push or the content from before: {cause}; check repo=, "
        "the token (hf auth login) and the network, and push again"
    )


def _refuse_secrets(path: str, data: bytes, public: Collection[str]) -> None:
    """Refuse a text that contains the token, a secret variable's value, or a local path.

    Values in `public` are those that the user asked to publish: they are no secrets.
    """
    patterns = {
        f"the value of {name}": re.escape(value)
        for name, value in os.environ.items()
        if SECRET.search(name) and len(value) >= 8 and value not in public
    }
    if token := get_token():
        patterns["the token"] = re.escape(token)
    # without a home folder `~` stays
    home = Path(os.path.expanduser("~"))  # noqa: PTH111
    for name, folder in (("the home folder", home), ("the working folder", Path.cwd())):
        if folder.is_absolute() and folder != Path(folder.anchor):
            # only whole paths, and not parts of longer names
            patterns[name] = rf"(?<![\w.:/-]){re.escape(str(folder))}(?![\w.-])"
    for secret, pattern in patterns.items():
        if re.search(pattern.encode(), data):
            raise InputError(
                f"a push must not describe this machine, {path} holds {secret}; change the "
                "settings, or unset the variable if its value is no secret"
            )
