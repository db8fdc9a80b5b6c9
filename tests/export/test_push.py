"""Publishing with the real huggingface_hub client against a local Hub server."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import ModelCard
from omegaconf import OmegaConf
from safetensors.torch import load_file

import specheads
from specheads.base.model import FrozenBase
from specheads.commands import push
from specheads.commands._call import read_run_settings
from specheads.config import compose, data_dir
from specheads.config.commands import Push, Train
from specheads.core.errors import InputError
from specheads.core.files import dumps
from specheads.export import card, hub
from specheads.export.card import read_summary
from specheads.export.layouts import engines, objection
from specheads.heads.load import build_for_base, kinds, load_head
from specheads.runs.directory import RunDirectory
from specheads.runs.provenance import cut_absolute_paths
from tests import tiny
from tests.export.hub_server import OWNER, TOKEN, Blob, HubServer, Repository
from tests.tuned import tuned as made_up

REPO = f"{OWNER}/head"
LICENCES = {"licence": "apache-2.0", "data_licence": "cc-by-4.0"}


@pytest.fixture
def server() -> Iterator[HubServer]:
    with HubServer() as running:
        yield running


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny_base"
    tiny.base(dtype=torch.float32).model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        source = data_dir("recipes") / "tiny_code" / "base" / name
        (folder / name).write_bytes(source.read_bytes())
    return folder


@pytest.fixture(scope="module")
def base(base_folder: Path) -> FrozenBase:
    return FrozenBase.load(base_folder)


@pytest.fixture(scope="module")
def trained_run(
    base: FrozenBase, base_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> RunDirectory:
    """Return a finished and evaluated run of a Medusa head."""
    run = RunDirectory(tmp_path_factory.mktemp("work") / "run")
    overrides = ["recipe=smoke", f"base.model={base_folder}", f"run_dir={run.path}"]
    settings = compose.settings_of("train", overrides)
    run.begin(compose.as_yaml(settings), {"base_fingerprint": base.fingerprint})
    run.end(build_for_base({"kind": "medusa", "depth": 3}, base))
    rows = [{"step": 6, "phase": "corpus", "tokens": 1536}]
    rows += [{"step": 10, "phase": "distilled", "tokens": 2560}]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    results = json.loads((data_dir("recipes") / "tiny_code" / "results.json").read_text())
    results["base"] |= {"name": str(base_folder), "fingerprint": base.fingerprint}
    results["head"]["kind"] = "medusa"
    results["provenance"]["command"] = [f"out={run.path}"]
    run.report.mkdir()
    (run.report / "results.json").write_text(json.dumps(results))
    return run


@pytest.fixture
def run(trained_run: RunDirectory, tmp_path: Path) -> RunDirectory:
    """Return a copy of that run, for tests that change it."""
    return RunDirectory(shutil.copytree(trained_run.path, tmp_path / "secret_place" / "run"))


@pytest.fixture
def owner(server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log in as the owner."""
    server.connect(monkeypatch, tmp_path / "home")


@pytest.fixture
def publish(
    owner: None, base: FrozenBase, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., None]:
    """Return a function that pushes that run as the owner with these settings."""
    del owner
    # loading the base takes most of the time
    monkeypatch.setattr(FrozenBase, "load", lambda *_, **__: base)

    def push_run(**settings: Any) -> None:
        push.run(Push(**{"run": str(run.path), "repo": REPO, **settings}))

    return push_run


def refusal(publish: Callable[..., None], **settings: Any) -> str:
    with pytest.raises(InputError, match=r"\w") as refused:
        publish(**settings)
    return str(refused.value)


@pytest.fixture
def files(run: RunDirectory) -> hub.Contents:
    """Return files of a push: from memory and from disk, small and large."""
    weights = run.head / "model.safetensors"
    card = b"---\nlicense: mit\n---\nA head"
    training = b'{"settings": {}, "provenance": {}}'
    return {"README.md": card, "model.safetensors": weights, "training.json": training}


def blobs(files: hub.Contents) -> dict[str, Blob]:
    loaded = {
        name: content if isinstance(content, bytes) else content.read_bytes()
        for name, content in files.items()
    }
    return {name: Blob(data, large=name == "model.safetensors") for name, data in loaded.items()}


def test_download_equals_push(publish, server, run, capsys):
    publish(base_repo="ada/base", **LICENCES)
    assert f"pushed: {server.url}/{REPO}/commit/" in capsys.readouterr().out
    uploaded = server.files(REPO)
    assert set(uploaded) == {
        "README.md", "config.json", "custom_generate/generate.py", "results.json",
        "custom_generate/requirements.txt", "model.safetensors", "training.json",
    }  # fmt: skip
    folder = Path(huggingface_hub.snapshot_download(REPO))
    files = {str(file.relative_to(folder)): file for file in folder.rglob("*") if file.is_file()}
    assert {name: file.read_bytes() for name, file in files.items()} == uploaded
    for name in ("config.json", "model.safetensors"):
        assert uploaded[name] == (run.head / name).read_bytes()
    local_head, hub_head = load_head(run.head), specheads.load_head(REPO)
    assert (hub_head.kind, hub_head.config) == ("medusa", local_head.config)
    for name, value in local_head.state_dict().items():
        assert torch.equal(hub_head.state_dict()[name], value)


def test_card_has_the_measurements_as_metadata_and_as_text(publish, server, run):
    publish(base_repo="ada/base", **LICENCES)
    card = ModelCard(server.files(REPO)["README.md"].decode())
    results = json.loads((run.report / "results.json").read_text())
    metadata = card.data.to_dict()
    assert (metadata["base_model"], metadata["base_model_relation"]) == ("ada/base", "adapter")
    assert (metadata["license"], metadata["library_name"]) == ("apache-2.0", "specheads")
    assert metadata["tags"] == ["speculative-decoding", "speculator", "medusa"]
    metrics = metadata["model-index"][0]["results"][0]["metrics"]
    assert {metric["name"].partition(" (")[0]: metric["value"] for metric in metrics} == {
        "Tokens per forward, offline replay": round(results["offline"]["tokens_per_forward"], 4),
        "Tokens per forward, online": round(results["online"]["tokens_per_forward"], 4),
        "Speed-up over the base alone": round(results["speed"]["speedup"], 4),
    }
    low, high = results["online"]["interval"]
    value = results["online"]["tokens_per_forward"]
    for line in (
        f"| tokens per forward, online | {value:.3f} [{low:.3f}, {high:.3f}] |",
        "| distilled | distilled | 4 | 4 | 1,024 | soft_cross_entropy | 0.0001 |",
        "Licence of the corpus: cc-by-4.0.",
        f"specheads export head={REPO} base=ada/base engine=vllm out=served",
        f"fingerprint of the base | `{results['base']['fingerprint']}`",
        f'load_head("{REPO}", base)',
        "custom_generate=",
        "text loops on 23 of the prompts",
    ):
        assert line in card.text, line


@pytest.mark.parametrize("kind", kinds())
def test_card_has_the_commands_of_every_engine_that_serves_the_head(kind, trained_run, base):
    settings = asdict(read_run_settings(trained_run.config, Train))
    about = read_summary(trained_run, settings, base, "ada/base")
    head = build_for_base({"kind": kind, "depth": 3}, base)
    text = card.model_card(about, head, base)
    served_by = re.findall(r"engine=(\w+) out=served$", text, re.MULTILINE)
    # a copy of the base is not for the head's repository
    able = [name for name in engines() if not objection(head, base, name)]
    assert served_by == [name for name in able if name != "base"]
    # vLLM serves every other kind, by its plug-in or in the speculators format
    assert {"vllm", "speculators"} & {*served_by} or (kind, served_by) == ("domino", ["sglang"])


def test_access_is_set_before_any_file_is_public(publish, server):
    publish(private=True)
    assert server.repositories[REPO].private
    requests = [line.split()[-1] for line in server.requests]
    settings = requests.index(f"/api/models/{REPO}/settings")
    assert settings < requests.index(f"/api/models/{REPO}/commit/main")
    publish()
    assert server.repositories[REPO].private


def test_nothing_of_this_machine_is_uploaded_or_printed(publish, server, run, capsys):
    settings = OmegaConf.load(run.config)
    distill = settings.schedule.phases.distilled.distill
    distill.engine, distill.url = "openai", "http://ann:pw@gpu17.internal:8000/v1"
    distill.served_as = "secret-name"
    run.config.write_text(OmegaConf.to_yaml(settings))
    server.fail_at = 3
    refused = refusal(publish)
    server.fail_at = None
    publish()
    printed = capsys.readouterr()
    assert TOKEN not in printed.out + printed.err + refused
    hidden = ("secret_place", str(run.path), "/models", "gpu17", "secret-name", TOKEN)
    for name, data in server.files(REPO).items():
        assert not [text for text in hidden if text.encode() in data], name
    settings = json.loads(server.files(REPO)["training.json"])["settings"]
    assert settings["base"]["model"] == "tiny_base"
    assert "command" not in json.loads(server.files(REPO)["results.json"])["provenance"]
    assert cut_absolute_paths({"a": ["/home/eve/x.jsonl", "~/y", "C:\\z\\w", "b/c", 1]}) == {
        "a": ["x.jsonl", "y", "w", "b/c", 1]
    }


def test_later_push_removes_results_and_trees_of_an_earlier_one(publish, server, run):
    tuned = made_up()
    (run.head / "tuned.json").write_text(dumps(tuned))
    publish()
    before = server.files(REPO)
    assert before["tuned.json"] == (run.head / "tuned.json").read_bytes()
    assert specheads.load_head(REPO).tuned == tuned
    (run.head / "tuned.json").unlink()
    shutil.rmtree(run.report)
    publish()
    assert set(before) - set(server.files(REPO)) == {"results.json", "tuned.json"}


def test_dry_run_lists_every_file_without_a_request(publish, server, capsys, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    publish(dry_run=True)
    listed = capsys.readouterr().out.splitlines()
    assert server.requests == []
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    publish()
    uploaded = server.files(REPO)
    sizes = {line.split()[1]: int(line.split()[0].replace(",", "")) for line in listed[:-1]}
    assert sizes == {name: len(data) for name, data in uploaded.items()}
    assert listed[-1].split()[0].replace(",", "") == str(sum(sizes.values()))


@pytest.mark.usefixtures("owner")
@pytest.mark.parametrize(
    ("loses_replies", "earlier"),
    [(False, False), (True, True)],
    ids=["requests to a new repository", "replies after an earlier push"],
)
def test_interrupted_upload_leaves_the_old_or_the_new_content(
    loses_replies, earlier, files, server
):
    after = {name: blob.data for name, blob in blobs(files).items()}
    older = blobs(files) | {"model.safetensors": Blob(b"of an earlier push", large=True)}
    before = {name: blob.data for name, blob in older.items()} if earlier else {}
    refused: list[str] = []
    while True:
        server.repositories.clear()
        server.objects.clear()
        server.requests.clear()
        if earlier:
            server.repositories[REPO] = Repository(private=False)
            server.repositories[REPO].commit(older)
        server.fail_at, server.loses_replies = len(refused) + 1, loses_replies
        try:
            hub.push(REPO, files, private=True)
            break
        except ValueError as error:
            refused.append(str(error))
        assert server.files(REPO) in (before, after)
    assert server.files(REPO) == after
    # every request of a push was the first lost one in one round
    assert len(refused) == len(server.requests)
    assert "commit" in server.requests[-1]
    for message in refused:
        assert "push again" in message
        assert "\n" not in message


@pytest.mark.parametrize(
    ("setting", "secret"),
    [("swordfish99", "the value of STORE_API_KEY"), ("see {home}/corpus", "the home folder")],
)
def test_secret_in_the_settings_is_refused(setting, secret, publish, server, run, monkeypatch):
    monkeypatch.setenv("STORE_API_KEY", "swordfish99")
    setting = setting.format(home=Path.home())
    settings = OmegaConf.load(run.config)
    settings.data.config = setting
    run.config.write_text(OmegaConf.to_yaml(settings))
    message = refusal(publish)
    assert f"holds {secret}" in message
    assert setting not in message
    assert server.requests == []


@pytest.mark.parametrize(
    ("name", "value", "is_secret"),
    [
        ("TOKENIZER_PATH", "ada/base-model", False),
        ("SORT_KEY", "ada/base-model", False),
        ("HFTOKEN", "speculative-decoding", True),
        ("DB_PASSWORD2", "speculative-decoding", True),
        ("openai_key", "speculative-decoding", True),
        ("AZURE_CREDENTIALS", "speculative-decoding", True),
        ("SSH_PRIVATE_KEY", "speculative-decoding", True),
    ],
)
def test_variables_are_secret_by_whole_words(name, value, is_secret, publish, monkeypatch):
    monkeypatch.setenv(name, value)
    settings = {"base_repo": "ada/base-model", "dry_run": True}
    if is_secret:
        assert f"holds the value of {name}" in refusal(publish, **settings)
    else:
        publish(**settings)


FOREIGN = [
    *("README.md", "config.json", "results.json", "training.json"),
    *("custom_generate/generate.py", "custom_generate/requirements.txt"),
]


@pytest.mark.parametrize(
    ("path", "is_ours"), [*((path, False) for path in FOREIGN), ("README.md", True)]
)
def test_text_of_others_is_replaced_only_if_asked(path, is_ours, publish, server):
    if is_ours:
        publish()
    else:
        server.repositories[REPO] = Repository(private=False)
    repository = server.repositories[REPO]
    before = repository.commits[repository.head] if is_ours else {}
    repository.commit(before | {path: Blob(b"by hand", large=False)})
    message = refusal(publish)
    assert f"{REPO} holds {path}" in message
    assert "overwrite=true" in message
    assert server.files(REPO)[path] == b"by hand"
    publish(overwrite=True)
    assert server.files(REPO)[path] != b"by hand"
    # the push that replaced it knows its own files
    publish()


@pytest.mark.parametrize(
    ("source", "path", "expected"),
    [
        ("chat", "acme/chats", "acme/chats"),
        ("traces", "acme/traces", "acme/traces"),
        ("hub", "acme/texts", "acme/texts"),
        ("chat", "acme/chats.jsonl", ""),
        ("jsonl", "acme/chats", ""),
        ("chat", "deep/er/folder", ""),
        ("python_stdlib", "", ""),
    ],
)
def test_card_names_data_sets_of_the_hub(source, path, expected):
    settings = {"source": source, "path": path, "weight": 1.0}
    assert card.hub_id(settings) == expected
    mixture = {"source": "mixture", "path": "", "sources": {"a": settings, "b": settings}}
    assert card.corpus_sources(mixture) == [settings, settings]


def unfinish(run: RunDirectory, *_: Any) -> None:
    run.provenance.write_text(json.dumps(json.loads(run.provenance.read_text()) | {"end": None}))


def cut_weights(run: RunDirectory, *_: Any) -> None:
    file = run.head / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def take_weights(run: RunDirectory, *_: Any) -> None:
    """Replace the weights by a pickle, which loads but is not uploaded."""
    file = run.head / "model.safetensors"
    torch.save(load_file(file), file.with_suffix(".bin"))
    file.unlink()


def write_results(text: str) -> Callable[..., Any]:
    return lambda run, _: (run.report / "results.json").write_text(text)


SPOILT: dict[str, tuple[Callable[..., Any], str]] = {
    "unfinished": (unfinish, "only a finished run can be pushed"),
    "damaged": (cut_weights, "must hold complete tensors by name"),
    "adapter": (lambda run, _: run.adapter.mkdir(), "merge the adapter"),
    "weights gone": (take_weights, "a pushed head needs model.safetensors"),
    "results cut": (write_results('{"head":'), "results.json is not readable JSON"),
    "results made up": (write_results('{"head": [1]}'), "must have a valid value of"),
    "no token": (lambda _, patch: patch.delenv("HF_TOKEN"), "hf auth login"),
    "no Hub": (
        lambda _, patch: patch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9"),
        "the upload broke off (ConnectError)",
    ),
}


@pytest.mark.parametrize("change", SPOILT)
def test_unfit_run_is_refused_without_a_request(change, publish, server, run, monkeypatch):
    spoil, expected = SPOILT[change]
    spoil(run, monkeypatch)
    assert expected in refusal(publish)
    assert server.requests == []


MISTAKES: dict[str, tuple[dict[str, str], str]] = {
    "no run": ({"run": ""}, "run=DIR"),
    "not a run": ({"run": "no/such"}, "config.yaml"),
    "no repository": ({"repo": "head"}, "repo=USER/NAME"),
    "no name of the Hub": ({"repo": "ada/head.git"}, "repo must be USER/NAME as the Hub takes it"),
    "base_repo": ({"base_repo": "../x"}, "base_repo must be USER/NAME"),
    "repository of another user": ({"repo": "eve/head"}, "under eve); check repo="),
}


@pytest.mark.parametrize("training", [None, b"{}", b'{"args": 1}', b"[]", b"text"])
def test_results_of_another_project_stay(training, publish, server, run):
    shutil.rmtree(run.report)
    repository = server.repositories[REPO] = Repository(private=False)
    others = {"results.json": b"others", "tuned.json": b"others"}
    others |= {"training.json": training} if training else {}
    repository.commit({path: Blob(data, large=False) for path, data in others.items()})
    if training:
        assert f"{REPO} holds training.json" in refusal(publish)
        assert server.files(REPO) == others
    else:
        publish()
        assert {"README.md", "model.safetensors"} < {*server.files(REPO)}
    assert others.items() - {("training.json", training)} <= server.files(REPO).items()


@pytest.mark.parametrize("path", ["results.json", "tuned.json"])
def test_results_that_were_edited_are_removed_only_if_asked(path, publish, server, run):
    (run.head / "tuned.json").write_text(dumps(made_up()))
    publish()
    repository = server.repositories[REPO]
    edited = {path: Blob(b"by hand", large=False)}
    repository.commit(repository.commits[repository.head] | edited)
    (run.head / "tuned.json").unlink()
    shutil.rmtree(run.report)
    assert f"{REPO} holds {path}" in refusal(publish)
    assert server.files(REPO)[path] == b"by hand"
    publish(overwrite=True)
    assert path not in server.files(REPO)


def test_weights_of_another_project_with_a_training_json_stay(publish, server):
    repository = server.repositories[REPO] = Repository(private=False)
    others = {"training.json": b'{"epochs": 3}', "model.safetensors": b"others"}
    repository.commit({path: Blob(data, large=False) for path, data in others.items()})
    assert "a repository of its own" in refusal(publish, overwrite=True)
    assert server.files(REPO) == others


def test_card_that_was_edited_is_kept(run, base):
    settings = asdict(read_run_settings(run.config, Train))
    head, file = load_head(run.head), run.head / "README.md"
    card.write_card(run, settings, head, base)
    written = file.read_text()
    card.write_card(run, settings, head, base)
    file.write_text(f"{written}My own words.\n")
    with pytest.warns(UserWarning, match="README.md was edited, so it is kept; remove it"):
        card.write_card(run, settings, head, base)
    assert file.read_text().endswith("My own words.\n")
    file.unlink()
    card.write_card(run, settings, head, base)
    assert file.read_text() == written


@pytest.mark.parametrize("mistake", MISTAKES)
def test_wrong_setting_uploads_nothing(mistake, publish, server):
    settings, expected = MISTAKES[mistake]
    assert expected in refusal(publish, **settings)
    assert server.files(settings.get("repo", REPO)) == {}


@pytest.mark.parametrize("name", ["model.safetensors", "model-00001-of-00002.safetensors"])
def test_repository_of_another_model_is_refused(name, publish, server):
    api = huggingface_hub.HfApi()
    api.create_repo(REPO)
    weights = huggingface_hub.CommitOperationAdd(name, b"others")
    api.create_commit(REPO, [weights], commit_message="Another model")
    before = server.files(REPO)
    assert "a repository of its own" in refusal(publish)
    assert server.files(REPO) == before
