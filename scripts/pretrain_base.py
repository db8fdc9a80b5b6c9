"""Train a small language model from text, such as the base of tiny_code.

    python scripts/pretrain_base.py --data python_stdlib --out my_base

A byte-level BPE tokenizer is trained on the same text. transformers' Trainer does the rest. Until
it is finished the run lives in OUT.partial, and the same command goes on from its last checkpoint.
OUT appears at the end: AutoModelForCausalLM and AutoTokenizer load it. The defaults have the shape
of the shipped base, 6,450,432 parameters; its matrices were trained with Muon.
"""

import argparse
import json
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, load_dataset
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    default_data_collator,
)
from transformers.trainer_utils import get_last_checkpoint

from specheads.core.files import atomic_folder, write_atomic
from specheads.core.machine import computes_bfloat16

END = "<|endoftext|>"
SHAPE = {"vocab_size": 8192, "layers": 6, "width": 256, "heads": 4, "kv_heads": 2}
SHAPE |= {"mlp_width": 688, "context": 2048}
SIZES = {"steps": 2700, "batch_size": 8, "sequence_length": 512, "checkpoint_every": 100}
HELD_OUT_SHARE = 0.02


def main(arguments: Sequence[str] | None = None) -> int:
    """Train; return 0 when done, 2 for a mistake in the request, 130 when interrupted."""
    options = parse(arguments)
    try:
        train(options)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from the last checkpoint", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--data", required=True, help="parquet or JSONL file, folder of text, or python_stdlib")
    add("--column", default="text", help="column that holds the text")
    add("--out", required=True, type=Path, help="folder to make")
    for name, value in (SHAPE | SIZES).items():
        add(f"--{name.replace('_', '-')}", type=int, default=value, help="(%(default)s)")
    add("--architecture", default="llama", help="model_type of transformers (%(default)s)")
    add("--settings", type=json.loads, default={}, help="JSON of further settings of its config")
    add("--learning-rate", type=float, default=2.5e-3, help="peak (%(default)s)")
    add("--warmup-steps", type=int, default=50, help="of the learning rate (%(default)s)")
    add("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def train(options: argparse.Namespace) -> None:
    """Train, measure on held-out text, and write the folder; ValueError is a mistake in it."""
    if options.out.exists():
        raise ValueError(f"--out must not exist yet, {options.out} does; choose another folder")
    work = options.out.with_name(f"{options.out.name}.partial")
    settings = json.dumps(vars(options), default=str) + "\n"
    if (work / "settings.json").is_file() and (work / "settings.json").read_text() != settings:
        raise ValueError(
            f"{work} has a run of other settings to finish; repeat those, or remove it"
        )
    texts = load_texts(options.data, options.column)
    torch.manual_seed(options.seed)
    model, tokenizer = build_base(options, texts)
    rows = pack_rows(texts, tokenizer, options.sequence_length)
    if len(rows) < 2 * options.batch_size:
        raise ValueError(
            f"the text must fill two batches of {options.batch_size} x {options.sequence_length} "
            f"tokens, it fills {len(rows)} rows; lower --batch-size or --sequence-length"
        )
    work.mkdir(exist_ok=True)
    write_atomic(work / "settings.json", settings)
    split = rows.train_test_split(HELD_OUT_SHARE, seed=options.seed)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(work),
            max_steps=options.steps,
            per_device_train_batch_size=options.batch_size,
            learning_rate=options.learning_rate,
            lr_scheduler_type="cosine_with_min_lr",
            lr_scheduler_kwargs={"min_lr_rate": 0.05},
            warmup_steps=options.warmup_steps,
            weight_decay=0.0,
            adam_beta2=0.95,
            use_cpu=not torch.cuda.is_available(),
            bf16=torch.cuda.is_available() or computes_bfloat16(),
            save_steps=options.checkpoint_every,
            save_total_limit=1,
            logging_steps=options.checkpoint_every,
            seed=options.seed,
            dataloader_pin_memory=torch.cuda.is_available(),
            report_to=[],
        ),
        train_dataset=split["train"],
        eval_dataset=split["test"],
        data_collator=default_data_collator,
    )
    loss = trainer.train(resume_from_checkpoint=get_last_checkpoint(str(work))).training_loss
    tokens = options.steps * options.batch_size * options.sequence_length
    measured = {"data": options.data, "tokens": tokens, "train_loss": loss}
    measured |= {"held_out_loss": trainer.evaluate()["eval_loss"]}
    with atomic_folder(options.out) as folder:
        model.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        write_atomic(folder / "pretraining.json", json.dumps(measured, indent=2) + "\n")
    shutil.rmtree(work)


def load_texts(data: str, column: str) -> Dataset:
    """Return the texts of a file, of all files of a folder, or of the standard library."""
    if data.endswith((".parquet", ".jsonl")):
        kind = "parquet" if data.endswith(".parquet") else "json"
        return load_dataset(kind, data_files=data, split="train").select_columns(column)
    folder = Path(sysconfig.get_path("stdlib") if data == "python_stdlib" else data)
    pattern = "*.py" if data == "python_stdlib" else "**/*"
    if not (files := sorted(str(file) for file in folder.glob(pattern) if file.is_file())):
        raise ValueError(f"--data must be a file, a folder of text or python_stdlib, got {data}")
    return load_dataset(
        "text", data_files=files, split="train", sample_by="document", encoding_errors="ignore"
    )


def build_base(options: argparse.Namespace, texts: Dataset) -> tuple[Any, Any]:
    """Return the model before its first step, and its tokenizer."""
    width, heads, kv_heads = options.width, options.heads, options.kv_heads
    if width % (2 * heads) or heads % kv_heads:
        raise ValueError(
            "--width must be a multiple of twice --heads, and --heads of --kv-heads; got "
            f"{width}, {heads} and {kv_heads}"
        )
    trained = ByteLevelBPETokenizer()
    lines: Any = texts[texts.column_names[0]]
    trained.train_from_iterator(lines, options.vocab_size, special_tokens=[END])
    end: Any = trained.token_to_id(END)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=trained._tokenizer,
        bos_token=END,
        eos_token=END,
        model_max_length=options.context,
    )
    config = AutoConfig.for_model(
        options.architecture,
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=options.mlp_width,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=width // heads,
        max_position_embeddings=options.context,
        tie_word_embeddings=True,
        **{"bos_token_id": end, "eos_token_id": end, "pad_token_id": None},
        **options.settings,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32), tokenizer


def pack_rows(texts: Dataset, tokenizer: Any, length: int) -> Dataset:
    """Return rows of `length` tokens of one long text, documents divided by the end token."""

    def pack(batch: Mapping[str, list[str]]) -> dict[str, list[list[int]]]:
        (column,) = batch.values()
        documents: Iterator[list[int]] = iter(tokenizer(column)["input_ids"])
        tokens = list(chain.from_iterable([*ids, tokenizer.eos_token_id] for ids in documents))
        starts = range(0, len(tokens) - length + 1, length)
        rows = [tokens[start : start + length] for start in starts]
        return {"input_ids": rows, "labels": rows}

    return texts.map(pack, batched=True, remove_columns=texts.column_names)


if __name__ == "__main__":
    raise SystemExit(main())
