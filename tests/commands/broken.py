"""Broken bases, corpora and prompts for tests."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file

BASE = Path(__file__).parents[2] / "recipes" / "tiny_code" / "base"

Damage = Callable[[Path], object]


def _config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def _tensors(folder: Path, change: Callable[[dict], object]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    file.unlink()
    save_file(tensors, file, metadata={"format": "pt"})


def _cut(file: Path, size: int) -> None:
    whole = file.read_bytes()
    file.unlink()
    file.write_bytes(whole[:size])


def _pickle_only(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


BASES: dict[str, tuple[Damage, str]] = {
    "more layers than weights": (lambda at: _config(at, num_hidden_layers=8), "layers.6"),
    "fewer layers than weights": (lambda at: _config(at, num_hidden_layers=4), "layers.4"),
    "another width": (lambda at: _config(at, intermediate_size=99), "mlp"),
    "a tensor missing": (
        lambda at: _tensors(at, lambda held: held.pop("model.layers.1.mlp.up_proj.weight")),
        "model.layers.1.mlp.up_proj.weight",
    ),
    "a tensor renamed": (
        lambda at: _tensors(at, lambda held: held.update(odd=held.pop("model.norm.weight"))),
        "model.norm.weight",
    ),
    "no weights": (lambda at: (at / "model.safetensors").unlink(), "safetensors"),
    "a pickle only": (_pickle_only, "no file named model.safetensors"),
    "weights cut short": (lambda at: _cut(at / "model.safetensors", 1000), "weights"),
    "weights empty": (lambda at: _cut(at / "model.safetensors", 0), "weights"),
    "no config": (lambda at: (at / "config.json").unlink(), "config.json"),
    "config cut short": (lambda at: _cut(at / "config.json", 30), "config.json"),
    "config empty": (lambda at: _cut(at / "config.json", 0), "config.json"),
    "config of nonsense": (lambda at: _config(at, hidden_size="wide"), "hidden_size"),
    "no tokenizer": (lambda at: [one.unlink() for one in at.glob("tokenizer*")], "tokenizer"),
    "tokenizer cut short": (lambda at: _cut(at / "tokenizer.json", 100), "tokenizer"),
}
"""Damages of a complete base, and the word that each message must contain."""


def base(folder: Path, damage: str) -> Path:
    """Copy the shipped base with this damage; return the folder."""
    target = folder / "base"
    shutil.copytree(BASE, target)
    BASES[damage][0](target)
    return target


DEEP = '{"text": ' + "[" * 5000 + "]" * 5000 + "}"

FILES: dict[str, bytes] = {
    "empty.jsonl": b"",
    "blank.jsonl": b"\n\n  \n",
    "notjson.jsonl": b"hello\n",
    "half.jsonl": b'{"text": "a"}\n{"text": \n',
    "list.jsonl": b"[1, 2]\n",
    "deep.jsonl": DEEP.encode() + b"\n",
    "surrogate.jsonl": b'{"text": "\\ud800 x", "prompt": "\\ud800 x"}\n' * 50,
    "column.jsonl": b'{"body": "x"}\n',
    "numbers.jsonl": b'{"text": 3, "prompt": 3}\n',
    "latin.jsonl": b'{"text": "\xff\xfe", "prompt": "\xff\xfe"}\n',
    "torn.jsonl.gz": b"\x1f\x8b\x08\x00garbage",
    "torn.parquet": b"PAR1garbage",
    "empty.parquet": b"",
}


def files(folder: Path) -> None:
    """Write every broken file, and a folder where a file should be."""
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    (folder / "folder.jsonl").mkdir()
    (folder / "nothing").mkdir()
