"""Randomly damaged heads, and a process that observes what loading them does.

As a module it prints a JSON object: outcomes, and everything that must not happen.
"""

import json
import os
import pickle
import resource
import shutil
import struct
import sys
import zipfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from specheads.core.errors import InputError
from specheads.heads.load import build_head, kinds, load_head

GOLDEN = Path(__file__).parents[1] / "golden"
PUBLIC = (
    *("medusa_heads", "mlp_speculator_untied", "mlp_speculator_tied_scaled", "redrafter_rnn"),
    *("redrafter_sum", "hydra_mlp", "hydra_prefix_mlp", "eagle3_chain", "eagle3_speculators_ttt"),
    *("mtp_mimo", "mtp_speculators"),
)
VALUES: list[Any] = [
    *(None, True, False, -1, 0, 1, 2, 7, 64, 65, 2**31, 10**18, 10**30, 1.5, -0.5, 1e308),
    *(float("nan"), float("inf"), "", "3", "three", "medusa", "os.system", "\ud800", "x" * 10_000),
    *([], [1], [[]], {}, {"a": 1}, {"_target_": "os.system"}, [2, 4, 5], [-1], [10**9] * 3),
]
NAMES = (
    *("kind", "auto_map", "depth", "width", "vocab_size", "base_fingerprint", "model_type"),
    *("draft_tokens", "num_layers", "medusa_num_heads", "hydra_num_heads", "eagle_config"),
    *("speculators_config", "transformer_layer_config", "rope_scaling", "method", "architectures"),
)
SHAPES = ([10**6, 10**6], [0], [], [2**62, 4], [1] * 70, [-1], ["a"], [2**64], [1.5], [[[]]])
OFFSETS = ([0, 10**15], [-1, 4], [8, 4], [0, 0], ["a", "b"], [2**63, 2**64], [0])


class Evil:
    """Writes a file if it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


def seeds(folder: Path) -> list[Path]:
    """Make one valid head of each kind, and copy the public ones."""
    folders = []
    for kind in kinds():
        head = build_head({"kind": kind, "depth": 2, "draft_tokens": 20}, width=48, vocab_size=211)
        head.save_pretrained(folder / kind)
        folders.append(folder / kind)
    for case in PUBLIC:
        folders.append(Path(shutil.copytree(GOLDEN / case, folder / case)))
        (folder / case / "expected.safetensors").unlink(missing_ok=True)
    return folders


def weights(folder: Path) -> Path:
    return next(folder.glob("*.safetensors"))


def spoil_settings(folder: Path, rng: Random) -> None:
    file = folder / "config.json"
    settings = json.loads(file.read_text())
    for _ in range(rng.choice([1, 1, 2])):
        inner = [
            settings,
            *(section for section in settings.values() if isinstance(section, dict) and section),
        ]
        position = rng.choice(inner)
        name = rng.choice(sorted(position))
        damage = rng.choice(["change", "change", "drop", "rename", "add"])
        if damage in ("drop", "rename"):
            value = position.pop(name)
            if damage == "rename":
                position[name + "\n"] = value
        else:
            position[name if damage == "change" else rng.choice(NAMES)] = rng.choice(VALUES)
        if not settings:
            break
    file.write_text(json.dumps(settings))


def spoil_bytes(folder: Path, rng: Random) -> None:
    file = rng.choice(sorted(folder.iterdir()))
    content = bytearray(file.read_bytes())
    position = rng.randrange(min(len(content), 800))
    damage = rng.choice(["flip", "cut", "longer", "zero", "turn"])
    if damage == "flip":
        content[position] ^= 1 << rng.randrange(8)
    elif damage == "cut":
        del content[rng.randrange(len(content)) :]
    elif damage == "longer":
        content += bytes(rng.randrange(1, 5000))
    elif damage == "zero":
        content[position : position + 64] = bytes(64)
    else:
        content = content[position:] + content[:position]
    file.write_bytes(content)


def spoil_header(folder: Path, rng: Random) -> None:
    """Falsify the header of a safetensors file."""
    file = weights(folder)
    content = file.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    table, body = json.loads(content[8 : 8 + size]), content[8 + size :]
    name = rng.choice(sorted(set(table) - {"__metadata__"}))
    size = None
    match rng.choice(["shape", "dtype", "offsets", "name", "size", "many", "twice"]):
        case "shape":
            table[name]["shape"] = rng.choice(SHAPES)
        case "dtype":
            table[name]["dtype"] = rng.choice(["F64", "I8", "BOOL", "F8_E4M3", "XX", 3, None])
        case "offsets":
            table[name]["data_offsets"] = rng.choice(OFFSETS)
        case "name":
            table[rng.choice(["../x", "", "a\0b", "x" * 5000, "0.0.0.0"])] = table.pop(name)
        case "size":
            size = rng.choice([2**63, 2**64 - 1, 0, 10**9])
        case "many":
            none = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
            table |= {f"z{number}": none for number in range(2000)}
        case "twice":
            table[f"{name}x"] = table[name]
    text = json.dumps(table).encode()
    file.write_bytes(struct.pack("<Q", len(text) if size is None else size) + text + body)


def spoil_tensors(folder: Path, rng: Random) -> None:
    tensors = load_file(weights(folder))
    name = rng.choice(sorted(tensors))
    value = tensors[name]
    match rng.choice(["nan", "flat", "dtype", "none", "rename", "drop", "map"]):
        case "nan":
            tensors[name] = torch.full(value.shape, torch.nan)
        case "flat":
            tensors[name] = value.reshape(-1)
        case "dtype":
            tensors[name] = value.to(rng.choice([torch.int8, torch.bool, torch.int64]))
        case "none":
            tensors[name] = torch.zeros(0)
        case "rename":
            tensors[rng.choice(["0.0.0", "head", "a.b.c.d", "x", "lm_head.9.weight"])] = value
            del tensors[name]
        case "drop":
            del tensors[name]
        case "map":
            ids = rng.choice([torch.full((20,), 2**62), torch.zeros(0), torch.tensor(5)])
            tensors[rng.choice(["d2t", "t2d", "draft_ids"])] = ids
    save_file(tensors, weights(folder), metadata={"format": "pt"})


def spoil_pickle(folder: Path, rng: Random, mark: Path) -> None:
    tensors = load_file(weights(folder))
    weights(folder).unlink()
    file = folder / rng.choice(["model.bin", "pytorch_model.bin", "medusa_lm_head.pt", "x.pt"])
    damage = rng.choice(["flip", "old", "evil", "raw", "inner", "module", "wide", "bomb", "deep"])
    content: Any = {"w": Evil(mark)}
    if damage == "module":
        content = {"w": torch.nn.Linear(2, 2)}
    elif damage == "wide":
        content = {"w": torch.zeros(1).expand(10**12)}
    elif damage in ("flip", "old", "inner"):
        content = tensors
    torch.save(content, file, _use_new_zipfile_serialization=damage != "old")
    if damage in ("flip", "old"):
        content = bytearray(file.read_bytes())
        content[rng.randrange(min(len(content), 2000))] = rng.randrange(256)
        file.write_bytes(content)
    elif damage == "raw":
        file.write_bytes(pickle.dumps(content, protocol=rng.randrange(6)))
    elif damage == "deep":
        file.write_bytes(b"\x80\x04N" + b"\x85" * 100_000 + b".")
    elif damage == "bomb":
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("archive/data.pkl", bytes(10**8))
    elif damage == "inner":
        with zipfile.ZipFile(file) as archive:
            entries = {entry: archive.read(entry) for entry in archive.namelist()}
        with zipfile.ZipFile(file, "w") as archive:
            for entry, content in entries.items():
                evil = entry.endswith("data.pkl")
                archive.writestr(entry, pickle.dumps({"w": Evil(mark)}) if evil else content)


def spoil_folder(folder: Path, rng: Random, secret: Path) -> None:
    """Replace files by links, folders and pipes, and add unexpected files."""
    if rng.random() < 0.5:
        file = rng.choice([folder / "config.json", weights(folder)])
        file.unlink()
        put: list[Callable[[], None]] = [
            lambda: file.symlink_to(secret),
            lambda: file.symlink_to("/dev/zero"),
            lambda: file.symlink_to(file.name),
            lambda: file.mkdir(),
            lambda: os.mkfifo(file),
        ]
        rng.choice(put)()
        return
    for name in ("tuned.json", "base.json", rng.choice(["a.json", "model-2.safetensors"])):
        (folder / name).symlink_to(secret)
    if rng.random() < 0.6:
        file_name = rng.choice(["../secret", ["x"], "\0", "x" * 5000, ".", "", "\ud800", None])
        index = rng.choice([{"weight_map": {"a": file_name}}, {"weight_map": [1]}, []])
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def spoil(folder: Path, rng: Random, mark: Path, secret: Path) -> None:
    """Damage a head in one or two ways."""
    plain: list[Callable[[Path, Random], None]] = [spoil_settings, spoil_header, spoil_tensors]
    if rng.random() < 0.3:
        rng.choice(plain)(folder, rng)
        if rng.random() < 0.5:
            return
    pickled, moved = partial(spoil_pickle, mark=mark), partial(spoil_folder, secret=secret)
    last = rng.choice([*plain, spoil_bytes, pickled, moved])
    try:
        last(folder, rng)
    except (ValueError, struct.error, RuntimeError) as error:
        # a file may be too damaged for a second change; safetensors raises no ValueError
        del error
    except Exception as error:
        if type(error).__name__ != "SafetensorError":
            raise


def outcome(folder: Path) -> str:
    """Return the outcome of loading: "head", "refused", or an unexpected error."""
    try:
        load_head(folder)
    except InputError as error:
        text = str(error)
        return f"not one line: {text[:200]!r}" if "\n" in text else "refused"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return "head"


def watch(folder: Path, count: int, seed: int) -> dict[str, Any]:
    """Load damaged heads; return outcomes, unexpected files, started programs and MiB used."""
    rng, seed_folders, work = Random(seed), seeds(folder / "seeds"), folder / "work" / "head"
    mark, secret = folder / "mark", folder / "secret"
    shutil.copy(weights(seed_folders[0]), secret)
    strange: set[str] = set()
    watching = False
    # files of libraries and of the system are expected
    allowed_paths = (
        str(work),
        sys.prefix,
        sys.base_prefix,
        str(GOLDEN.parents[1]),
        "/usr/lib",
        "/proc/",
    )

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if not watching:
            return
        if event in (
            "os.system",
            "subprocess.Popen",
            "os.exec",
            "os.posix_spawn",
            "socket.connect",
        ):
            strange.add(f"{event} {arguments!r:.200}")
        elif event == "open" and isinstance(arguments[0], str):
            real = os.path.realpath(arguments[0])
            if not real.startswith(allowed_paths):
                strange.add(real)

    sys.addaudithook(hear)
    load_head(seed_folders[0])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcomes: Counter[str] = Counter()
    for _ in range(count):
        shutil.rmtree(work.parent, ignore_errors=True)
        shutil.copytree(rng.choice(seed_folders), work)
        spoil(work, rng, mark, secret)
        watching = True
        outcomes[outcome(work)] += 1
        watching = False
    used_megabytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return {
        "outcomes": dict(outcomes),
        "strange": sorted(strange),
        "executed": mark.exists(),
        "mebibytes": used_megabytes,
    }


if __name__ == "__main__":
    sys.stdout.write(
        json.dumps(watch(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))) + "\n"
    )
