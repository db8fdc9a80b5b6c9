"""Phase two's text: what the frozen base itself writes, kept in shards and written once.

See docs/two_phases.md.
"""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from specheads.config import Distill
from specheads.core.errors import InputError
from specheads.data.packing import Text, TokenBatch

Write = Callable[[list[list[int]], int], list[list[int]]]
"""(prompts, seed) -> the new tokens of each."""


def write_shards(
    folder: Path,
    prompts: Text,
    write: Write,
    settings: Distill,
    identity: dict[str, Any],
    *,
    seed: int = 0,
    rank: int = 0,
    world_size: int = 1,
) -> Iterator[int]:
    """Have the base continue corpus prompts; yield how many texts are done, after each shard.

    Every shard is drawn from a seed of its own, so stopping and going on, in this call or in a
    later one, gives the same text as never stopping. Each process writes shards of its own,
    `shard-RANK-NUMBER.parquet`. The first `prompt_tokens` of each row are continued, so rows as
    long as the text to be written spread the prompts over more documents.

    Raises:
        ValueError: The folder holds text that other settings or another `identity` decided: what
            else decides it, by name, see `text_identity`.
    """
    # where the text is kept does not decide what it says
    decisive = {name: value for name, value in asdict(settings).items() if name != "folder"}
    _claim(folder, identity | decisive | {"seed": seed})
    wanted = -(-settings.num_samples // world_size)
    progress = folder / f"progress-{rank}.json"
    done: dict[str, Any] = {"texts": 0, "shards": 0, "cursor": None}
    if progress.is_file():
        done = json.loads(progress.read_text(encoding="utf-8"))
    batches = prompts.batches(done["cursor"])
    while done["texts"] < wanted:
        batch, cursor = next(batches)
        rows = batch.tokens[: wanted - done["texts"], : settings.prompt_tokens].tolist()
        number = done["shards"]
        written = write(rows, (seed * 1_000 + rank) * 1_000_000 + number)
        _write_shard(folder / f"shard-{rank}-{number:05d}.parquet", rows, written)
        done = {"texts": done["texts"] + len(rows), "shards": number + 1, "cursor": cursor}
        _replace(progress, json.dumps(done))
        yield done["texts"]


class DistilledText:
    """Batches of self-distilled text, epoch after epoch, in an order drawn from the seed.

    The folder holds the shards of all ranks; processes read disjoint rows of them. `padding_id`
    fills rows that the base ended early and is never counted; a `sequence_length` of zero keeps
    whole rows.
    """

    def __init__(
        self,
        folder: Path,
        batch_size: int,
        padding_id: int,
        *,
        sequence_length: int = 0,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        files = sorted(folder.glob("shard-*.parquet"))
        table = pa.concat_tables([pq.read_table(file) for file in files]) if files else None
        num_rows = table.num_rows if table is not None else 0
        self.batch_size, self.seed, self.rank, self.world_size = batch_size, seed, rank, world_size
        self.batches_per_epoch = num_rows // (batch_size * world_size)
        if table is None or self.batches_per_epoch == 0:
            raise InputError(
                f"a batch needs {batch_size} texts on each of {world_size} processes; "
                f"{folder} holds {num_rows}; write more (num_samples) or use a smaller batch_size"
            )
        texts = table["tokens"].combine_chunks()
        lengths = torch.from_numpy(texts.value_lengths().to_numpy().copy())[:, None]
        starts = torch.from_numpy(table["prompt_tokens"].to_numpy().copy())[:, None]
        place = torch.arange(int(lengths.max()))
        self.tokens = torch.full((num_rows, len(place)), padding_id)
        self.tokens[place < lengths] = torch.from_numpy(texts.flatten().to_numpy().copy()).long()
        self.counted = (place >= starts) & (place < lengths)
        if sequence_length:
            self.tokens = self.tokens[:, :sequence_length]
            self.counted = self.counted[:, :sequence_length]

    def batches(
        self, cursor: dict[str, Any] | None = None
    ) -> Iterator[tuple[TokenBatch, dict[str, Any]]]:
        """Yield batches for ever, each with the cursor from which the next one follows."""
        batch = int(cursor["batch"]) if cursor else 0
        while True:
            epoch, place = divmod(batch, self.batches_per_epoch)
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            order = torch.randperm(len(self.tokens), generator=generator)
            start = (place * self.world_size + self.rank) * self.batch_size
            rows = order[start : start + self.batch_size]
            batch += 1
            yield TokenBatch(self.tokens[rows], self.counted[rows]), {"batch": batch}


def _claim(folder: Path, identity: dict[str, Any]) -> None:
    """Mark the folder as holding this text, or refuse it when it holds another."""
    mark = folder / "fingerprint.json"
    written = json.dumps(identity, indent=1, sort_keys=True)
    if not mark.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        _replace(mark, written)
        return
    before, now = json.loads(mark.read_text(encoding="utf-8")), json.loads(written)
    for name in now:
        # text of earlier versions has one hash of all, and that left the corpus's content out
        if before.get(name) != now[name]:
            raise InputError(
                "self-distilled text is used with the base, the corpus and the settings that wrote "
                f"it only: {folder} was written with {name} {before.get(name)}, wanted "
                f"{now[name]}; remove it or choose another folder"
            )


def _replace(path: Path, text: str) -> None:
    """Write a file whole or not at all; several processes may, with the same text."""
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    scratch.write_text(text + "\n", encoding="utf-8")
    scratch.replace(path)


def _write_shard(path: Path, prompts: list[list[int]], written: list[list[int]]) -> None:
    table = pa.table(
        {
            "tokens": pa.array(
                [row + new for row, new in zip(prompts, written, strict=True)],
                pa.list_(pa.int32()),
            ),
            "prompt_tokens": pa.array([len(row) for row in prompts], pa.int32()),
        }
    )
    scratch = path.with_suffix(".tmp")
    pq.write_table(table, scratch)
    scratch.replace(path)
