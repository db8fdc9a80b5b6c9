"""Corpora: where plain text comes from, and which of its documents may be trained on."""

import hashlib
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets import Dataset

from specheads.config import Data
from specheads.config.parts import SOURCES
from specheads.core.errors import InputError
from specheads.core.paths import local_path
from specheads.data.jsonl import names, read_jsonl

TEXT = datasets.Features(text=datasets.Value("string"))
SPLITS = ("train", "validation", "prompts")
SUFFIXES = {"jsonl": (".jsonl", ".jsonl.gz", ".json"), "parquet": (".parquet",)}

STDLIB_LEFT_OUT = {
    *("site-packages", "dist-packages", "test", "tests"),
    *("idlelib", "idle_test", "__pycache__"),
}
"""Folders below the standard library that are other people's code, or tests of it."""

STDLIB_MIN_CHARACTERS = 400
"""Shorter files are little more than an import or a licence line."""


def split_of(text: str) -> str:
    """Return the split a document belongs to: prompts 5 %, validation 2 %, train the rest.

    Only the text itself decides, so duplicates share a split wherever they came from, and text
    that prompts are cut from is never trained on.
    """
    place = int(hashlib.sha256(text.encode()).hexdigest(), 16) % 100
    return "prompts" if place < 5 else "validation" if place < 7 else "train"


def load_corpus(corpus: Data, split: str = "train", seed: int = 0) -> Dataset:
    """Load the documents of one split, shuffled, as one column `text`.

    The split is made by `split_of` for every source alike; of a Hub dataset its own "train" is what
    gets split, and it is streamed where documents are bounded, so that hardly more is downloaded.
    The seed decides the order, and which documents are taken where they are bounded.
    """
    source, most = corpus.source, corpus.max_documents
    for name, value, known in (("source", source, SOURCES), ("split", split, SPLITS)):
        if value not in known:
            raise InputError(f"a corpus {name} must be one of {', '.join(known)}; got {value!r}")
    if source == "python_stdlib":
        documents = _in_memory(_stdlib_texts())
    elif source == "hub":
        documents = _hub(corpus, seed)
    elif source == "files":
        documents = _in_memory(_folder_texts(corpus.path, corpus.patterns or ("**/*",)))
    else:
        documents = _local(source, corpus.path, corpus.column)
    rng = np.random.default_rng(seed)
    if 0 < most < len(documents):
        documents = documents.select(np.sort(rng.permutation(len(documents))[:most]))
    try:
        rows = [
            row
            for row, text in enumerate(texts_of(documents))
            if text and not text.isspace() and split_of(text) == split
        ]
    except UnicodeDecodeError as error:
        # nobody looked at the text of a parquet file before
        raise InputError(
            f"a corpus must be UTF-8 text, {source} {corpus.path} is not: {error}; convert it"
        ) from error
    if not rows:
        raise InputError(
            f"a corpus needs at least one document in its {split} split, {source} {corpus.path} "
            f"has none among {len(documents)}; give more documents"
        )
    return documents.select(rng.permutation(rows), keep_in_memory=True)


def texts_of(documents: Dataset) -> Iterator[str | None]:
    """Yield the texts of a corpus in its order; a row of a file may have none."""
    for batch in documents.iter(batch_size=1000):
        yield from dict(batch)["text"]


def _in_memory(texts: Iterator[str]) -> Dataset:
    # the type is given, because none can be told from an empty list
    return Dataset.from_dict({"text": list(texts)}, features=TEXT)


def _stdlib_texts() -> Iterator[str]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(root.rglob("*.py")):
        if STDLIB_LEFT_OUT.isdisjoint(file.relative_to(root).parts):
            text = _utf8(file)
            if text is not None and len(text) >= STDLIB_MIN_CHARACTERS:
                yield text


def _folder_texts(path: str, patterns: Sequence[str]) -> Iterator[str]:
    root = local_path(path)
    if not path or not root.is_dir():
        raise InputError(f"source 'files' needs a folder of text files, got path {path!r}")
    found = {file for pattern in patterns for file in _glob(root, pattern)}
    if not found:
        named = " or ".join(map(repr, patterns))
        raise InputError(f"no file below {path} matches {named}; change patterns")
    for file in sorted(found):
        hidden = any(part.startswith(".") for part in file.relative_to(root).parts)
        if not hidden and (text := _utf8(file)) is not None:
            yield text


def _glob(root: Path, pattern: str) -> list[Path]:
    """Return the files below a folder that match."""
    try:
        if ".." not in Path(pattern).parts:
            return [file for file in root.glob(pattern) if file.is_file()]
        reason = "it leads out of there"
    # what is wrong with a pattern tells itself in many ways
    except (IndexError, NotImplementedError, OSError, ValueError) as error:
        reason = _told(error)
    raise InputError(
        f"a pattern must be a glob below {root}, as **/*.txt, got {pattern!r:.80}: {reason:.120}"
    )


def _utf8(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}; change patterns") from error


def _local(source: str, path: str, column: str) -> Dataset:
    files = _find(path, SUFFIXES[source]) if path else []
    if not files:
        raise InputError(
            f"source {source!r} needs a file, a folder or a glob that holds "
            f"{' or '.join(SUFFIXES[source])} files, got path {path!r}"
        )
    try:
        with _quiet():
            if source == "jsonl":
                stamped = [(file, _stamp(Path(file))) for file in files]
                table = Dataset.from_generator(
                    _jsonl_texts, features=TEXT, gen_kwargs={"files": stamped, "column": column}
                )
            else:
                table = datasets.load_dataset(source, data_files=files, split="train")
    except Exception as error:
        # what reads the file can raise whatever there is
        if isinstance(error.__cause__, InputError):
            raise error.__cause__ from None
        raise InputError(
            f"cannot read {path!r} as {source}: {_told(error)}; write or download it anew"
        ) from error
    assert isinstance(table, Dataset)
    return table if source == "jsonl" else _one_column(table, column, f"{source} {path}")


def _stamp(file: Path) -> str:
    """Return what changes with a file: by its name alone an older one's rows would be found."""
    known = file.stat()
    return f"{file.absolute()} {known.st_mtime_ns} {known.st_size}"


def _jsonl_texts(files: Sequence[tuple[str, str]], column: str) -> Iterator[dict[str, str | None]]:
    """Yield the texts of .jsonl files; a row may lack the column, a whole file may not."""
    num_rows = 0
    for file, _ in files:
        known: dict[str, None] = {}
        for where, row in read_jsonl(Path(file)):
            text = row.get(column)
            if not isinstance(text, str | None):
                raise InputError(
                    f"column {column!r} of {where} must hold text, it holds {type(text).__name__}"
                )
            known |= dict.fromkeys(row)
            num_rows += 1
            yield {"text": text}
        if known and column not in known:
            raise InputError(f"{file} has no column {column!r}; it has {names(known)}")
    if not num_rows:
        raise InputError(f"{files[0][0]} holds no row; give documents, one JSON object a line")


def _find(path: str, suffixes: tuple[str, ...]) -> list[str]:
    place = local_path(path)
    if place.is_dir():
        found = [file for file in place.rglob("*") if file.name.endswith(suffixes)]
    elif place.is_file():
        found = [place]
    else:
        found = _glob(Path(place.anchor or "."), str(place.relative_to(place.anchor)))
    return sorted(str(file) for file in found if file.is_file())


def _hub(corpus: Data, seed: int) -> Dataset:
    if not corpus.path:
        raise InputError("source 'hub' needs the id of a dataset as its path, got none")
    rows = load_from_hub(
        corpus.path,
        name=corpus.config or None,
        revision=corpus.revision,
        split="train",
        data_files=list(corpus.patterns) or None,
        streaming=corpus.max_documents > 0,
    )
    if not isinstance(rows, Dataset):
        shuffled = rows.shuffle(seed=seed, buffer_size=1000).take(corpus.max_documents)
        # what a stream's columns are is known only once a row has come
        with _reachable(corpus.path):
            rows = Dataset.from_list(list(shuffled))
    return _one_column(rows, corpus.column, f"dataset {corpus.path}")


def load_from_hub(path: str, **choices: Any) -> Any:
    """Call `datasets.load_dataset`; a Hub that cannot be reached is a ValueError of one line."""
    with _reachable(path):
        return datasets.load_dataset(path, **choices)


@contextmanager
def _reachable(path: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # the network, the Hub and every format's reader raise errors of their own
        raise InputError(
            f"cannot load {path!r:.80} from the Hub: {_told(error)}; check the id and the network, "
            "or pass a local file instead"
        ) from error


def _one_column(table: Dataset, column: str, where: str) -> Dataset:
    if column not in table.column_names:
        raise InputError(
            f"{where} has no column {column!r}; it has {', '.join(table.column_names)}"
        )
    kind = table.features[column]
    if getattr(kind, "dtype", "") not in ("string", "large_string"):
        raise InputError(f"column {column!r} of {where} must hold text, it holds {kind}")
    return table.select_columns([column]).rename_columns(
        {column: "text"} if column != "text" else {}
    )


def _told(error: BaseException) -> str:
    """Return an error in one line: the first, and the last where that is another."""
    lines = str(error.__cause__ or error).split("\n")
    return " ".join(dict.fromkeys([lines[0], lines[-1]])).strip() or type(error).__name__


@contextmanager
def _quiet() -> Iterator[None]:
    """Hold back the progress bars and log lines that datasets writes for every local file."""
    shown, level = not datasets.are_progress_bars_disabled(), datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        if shown:
            datasets.enable_progress_bars()
