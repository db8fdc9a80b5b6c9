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
from datasets.exceptions import DatasetsError

from specheads.config import Data
from specheads.core.errors import InputError

SOURCES = ("python_stdlib", "files", "jsonl", "parquet", "hub")
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
        documents = _tables(source, corpus.path, corpus.column)
    rng = np.random.default_rng(seed)
    if 0 < most < len(documents):
        documents = documents.select(np.sort(rng.permutation(len(documents))[:most]))
    rows = [
        row
        for row, text in enumerate(texts_of(documents))
        if text and not text.isspace() and split_of(text) == split
    ]
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
    features = datasets.Features(text=datasets.Value("string"))
    return Dataset.from_dict({"text": list(texts)}, features=features)


def _stdlib_texts() -> Iterator[str]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(root.rglob("*.py")):
        if STDLIB_LEFT_OUT.isdisjoint(file.relative_to(root).parts):
            text = _utf8(file)
            if text is not None and len(text) >= STDLIB_MIN_CHARACTERS:
                yield text


def _folder_texts(path: str, patterns: Sequence[str]) -> Iterator[str]:
    root = Path(path).expanduser()
    if not path or not root.is_dir():
        raise InputError(f"source 'files' needs a folder of text files, got path {path!r}")
    for file in sorted({file for pattern in patterns for file in root.glob(pattern)}):
        hidden = any(part.startswith(".") for part in file.relative_to(root).parts)
        if file.is_file() and not hidden and (text := _utf8(file)) is not None:
            yield text


def _utf8(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


def _tables(source: str, path: str, column: str) -> Dataset:
    files = _find(path, SUFFIXES[source]) if path else []
    if not files:
        raise InputError(
            f"source {source!r} needs a file, a folder or a glob that holds "
            f"{' or '.join(SUFFIXES[source])} files, got path {path!r}"
        )
    kind = "json" if source == "jsonl" else source
    try:
        with _quiet():
            table = datasets.load_dataset(kind, data_files=files, split="train")
    except (DatasetsError, OSError, ValueError) as error:
        raise InputError(f"cannot read {path!r} as {source}: {_first_line(error)}") from error
    assert isinstance(table, Dataset)
    return _one_column(table, column, f"{source} {path}")


def _find(path: str, suffixes: tuple[str, ...]) -> list[str]:
    place = Path(path).expanduser()
    if place.is_dir():
        found = [file for file in place.rglob("*") if file.name.endswith(suffixes)]
    elif place.is_file():
        found = [place]
    else:
        found = Path(place.anchor or ".").glob(str(place.relative_to(place.anchor)))
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
        rows = Dataset.from_list(list(shuffled))
    return _one_column(rows, corpus.column, f"dataset {corpus.path}")


def load_from_hub(path: str, **choices: Any) -> Any:
    """Call `datasets.load_dataset`; a Hub that cannot be reached is a ValueError of one line."""
    try:
        return datasets.load_dataset(path, **choices)
    except (DatasetsError, OSError, ValueError) as error:
        raise InputError(
            f"cannot load {path!r} from the Hub: {_first_line(error)}; pass a local file instead"
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


def _first_line(error: BaseException) -> str:
    return (str(error.__cause__ or error) or type(error).__name__).splitlines()[0]


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
