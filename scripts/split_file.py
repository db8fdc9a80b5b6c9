"""Split a file into pieces of a given size, and join them again with a check of the SHA-256.

    python scripts/split_file.py split model.gguf --size 45M --out pieces
    python scripts/split_file.py join pieces --out model.gguf

Use it for a model that is larger than one transfer may be. The folder of pieces holds 000.piece,
001.piece, ... and pieces.json with the sizes and the SHA-256 of the whole file. `join` replaces the
output file only after the SHA-256 matches. Only the standard library is needed.
"""

import argparse
import hashlib
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

MANIFEST = "pieces.json"
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
BUFFER_BYTES = 2**20


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    splitter = commands.add_parser("split", help="write the pieces of a file into a new folder")
    splitter.add_argument("file", type=Path, metavar="FILE")
    splitter.add_argument(
        "--size", required=True, help="largest piece, in bytes or as 45M (10^6) or 45Mi (2^20)"
    )
    splitter.add_argument("--out", type=Path, required=True, metavar="DIR")
    splitter.set_defaults(run=lambda options: split(options.file, options.size, options.out))
    joiner = commands.add_parser("join", help="write the file that the pieces in a folder make")
    joiner.add_argument("folder", type=Path, metavar="DIR")
    joiner.add_argument("--out", type=Path, required=True, metavar="FILE")
    joiner.set_defaults(run=lambda options: join(options.folder, options.out))
    options = parser.parse_args(arguments)
    try:
        print(options.run(options))
    except (ValueError, OSError) as error:
        print(f"split_file.py: {error}", file=sys.stderr)
        return 2
    return 0


def split(file: Path, size: str, folder: Path) -> str:
    """Write the pieces of a file and the manifest, which is written last; return a summary.

    Raises:
        ValueError: The size is no positive number of bytes, the file does not exist, or the folder
            is not empty.
    """
    piece_bytes = parse_size(size)
    if not file.is_file():
        raise ValueError(f"FILE must be an existing file, got {str(file)!r}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"--out must be a new or empty folder, got {str(folder)!r}; remove it")
    folder.mkdir(parents=True, exist_ok=True)
    digest, total, number = hashlib.sha256(), 0, 0
    with file.open("rb") as source:
        while block := source.read(min(piece_bytes, BUFFER_BYTES)):
            remaining = piece_bytes
            with piece(folder, number).open("wb") as target:
                while block:
                    target.write(block)
                    digest.update(block)
                    total += len(block)
                    remaining -= len(block)
                    block = source.read(min(remaining, BUFFER_BYTES))
            number += 1
    manifest = {"bytes": total, "piece_bytes": piece_bytes, "sha256": digest.hexdigest()}
    (folder / MANIFEST).write_text(json.dumps(manifest) + "\n", encoding="utf-8")
    return f"{number} pieces of at most {piece_bytes:,} bytes in {folder}"


def join(folder: Path, file: Path) -> str:
    """Write the joined file; return a summary.

    Raises:
        ValueError: The manifest is missing or invalid, a piece is missing or has another size, the
            SHA-256 differs, or the output is a folder.
    """
    total, piece_bytes, sha256 = read_manifest(folder)
    if file.is_dir():
        raise ValueError(f"--out must be a file, and {str(file)!r} is a folder; name a file in it")
    pieces: list[Path] = []
    for number in range(-(-total // piece_bytes)):
        path = piece(folder, number)
        expected = min(piece_bytes, total - number * piece_bytes)
        found = path.stat().st_size if path.is_file() else None
        if found != expected:
            described = "does not exist" if found is None else f"has {found:,} bytes"
            raise ValueError(
                f"{path} must have {expected:,} bytes, and it {described}; copy it again"
            )
        pieces.append(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=f".{file.name}.") as scratch:
        whole = Path(scratch) / file.name
        digest = hashlib.sha256()
        with whole.open("wb") as target:
            for path in pieces:
                with path.open("rb") as source:
                    for block in blocks(source):
                        target.write(block)
                        digest.update(block)
        if digest.hexdigest() != sha256:
            raise ValueError(
                f"the pieces in {folder} must have the SHA-256 {sha256}, and they have "
                f"{digest.hexdigest()}; copy them again"
            )
        whole.replace(file)
    return f"{file}: {total:,} bytes from {len(pieces)} pieces, SHA-256 matches"


def parse_size(text: str) -> int:
    """Return a number of bytes; "45M" is 45 * 10^6 and "45Mi" is 45 * 2^20.

    Raises:
        ValueError: It is no positive number with a known unit.
    """
    match = re.fullmatch(r"([0-9]{1,15})([KMG]i?|)", text)
    if match is None or (size := int(match[1]) * UNITS[match[2]]) == 0:
        raise ValueError(
            f"--size must be a positive number of bytes or of K, M, G, Ki, Mi, Gi, got {text!r:.80}"
        )
    return size


def piece(folder: Path, number: int) -> Path:
    """Return the path of a piece."""
    return folder / f"{number:03d}.piece"


def read_manifest(folder: Path) -> tuple[int, int, str]:
    """Return the size of the file, the size of a piece and the SHA-256 of the file.

    Raises:
        ValueError: The manifest is missing or invalid.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(
            f"DIR must hold {MANIFEST}, and {str(folder)!r} does not; copy it or split again"
        )
    try:
        manifest = json.loads(path.read_bytes())
        total, piece_bytes = manifest["bytes"], manifest["piece_bytes"]
        sha256 = manifest["sha256"]
    except (ValueError, KeyError, TypeError, RecursionError):
        total = piece_bytes = sha256 = None
    if (
        not (type(total) is int and type(piece_bytes) is int and isinstance(sha256, str))
        or total < 0
        or piece_bytes < 1
    ):
        raise ValueError(
            f"{path} must have bytes, piece_bytes and sha256 of a split file; split it again"
        )
    return total, piece_bytes, sha256


def blocks(source: BinaryIO) -> Iterator[bytes]:
    """Yield the content of a file block by block."""
    while block := source.read(BUFFER_BYTES):
        yield block


if __name__ == "__main__":
    sys.exit(main())
