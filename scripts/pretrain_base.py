"""Train a small Llama-architecture language model from text: the base of recipe tiny_code.

    python scripts/pretrain_base.py --data python_stdlib --out my_base
    python scripts/pretrain_base.py --data corpus.parquet --out better --init recipes/tiny_code/base

A byte-level BPE tokenizer is trained on the same text; matrices learn by Muon and the rest by
AdamW. The defaults are the shape and the schedule of the shipped base. Until it is finished the
run lives in OUT.partial, and the same command goes on from its last checkpoint. OUT appears at
the end, as a folder that AutoModelForCausalLM and AutoTokenizer load.
"""

import argparse
import json
import math
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from specheads.config import Data
from specheads.core.files import atomic_folder, write_atomic
from specheads.data.bpe import train_tokenizer
from specheads.data.files import JSONL, PARQUET
from specheads.data.packing import PackedText
from specheads.data.sources import read
from specheads.data.tokenise import tokenised
from specheads.runs import checkpoint
from specheads.runs.directory import RunDirectory
from specheads.runs.progress import progress
from specheads.training.muon import Muon

CONSOLE = Console(stderr=True, highlight=False)

SHAPE = {
    "vocab_size": 8192,
    "layers": 6,
    "width": 256,
    "heads": 4,
    "kv_heads": 2,
    "mlp_width": 688,
    "context": 2048,
}
"""The shipped base's: 6,450,432 parameters."""

HELD_OUT_BATCHES = 4
"""Batches of the validation split that the finished model is measured on."""


@dataclass(slots=True)
class Run:
    """What learns, what it reads, and how far it is."""

    options: argparse.Namespace
    work: RunDirectory
    model: Any
    tokenizer: Any
    text: PackedText
    held_out: PackedText | None
    optimizers: dict[str, torch.optim.Optimizer]
    step: int = 0
    cursor: dict[str, Any] | None = None
    loss: float = math.nan


def main(argv: list[str] | None = None) -> int:
    """Train; return 0 when done, 2 for a mistake in the request, 130 when interrupted."""
    transformers_logging.disable_progress_bar()
    options = parse(argv)
    try:
        run = prepare(options)
        with interruptible() as stop, progress(shown=True, console=CONSOLE) as bar:
            train(run, stop, bar)
        if run.step < options.steps:
            CONSOLE.print(f"stopped after step {run.step}; the same command goes on from there")
            return 130
        finish(run)
    except ValueError as error:
        CONSOLE.print(f"error: {error}", markup=False, soft_wrap=True)
        return 2
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", required=True, help="parquet, JSONL or a folder of text; or python_stdlib")
    add("--column", default="text", help="column that holds the text")
    add("--out", required=True, type=Path, help="folder to make")
    add("--init", default="", help="folder of a base to train further, with its tokenizer")
    for name, value in SHAPE.items():
        add(f"--{name.replace('_', '-')}", type=positive, help=f"default {value}")
    add("--steps", type=positive, default=2700, help="optimizer steps (default: 2700)")
    add("--batch-size", type=positive, default=8, help="rows of a step (default: 8)")
    add("--sequence-length", type=positive, default=512, help="tokens of a row (default: 512)")
    add("--muon-rate", type=float, default=0.012, help="peak for matrices (default: 0.012)")
    add("--adamw-rate", type=float, default=0.0025, help="peak for the rest (default: 0.0025)")
    add("--warmup-steps", type=int, default=50, help="of the learning rates (default: 50)")
    add("--checkpoint-every", type=positive, default=100, help="steps (default: 100)")
    add("--seed", type=int, default=0)
    return parser.parse_args(argv)


def positive(text: str) -> int:
    """Read a whole number of at least one."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def prepare(options: argparse.Namespace) -> Run:
    """Load or make all that a run needs, at its last checkpoint if it has one.

    Raises:
        ValueError: The request cannot be met. Nothing has been written then.
    """
    if options.out.exists():
        raise ValueError(f"--out must not exist yet, {options.out} does; choose another folder")
    work = RunDirectory(options.out.with_name(options.out.name + ".partial"))
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    refuse_other_settings(work.path, settings)
    corpus = corpus_of(options)
    torch.manual_seed(options.seed)
    model, tokenizer = build(options, work.path / "tokenizer", corpus)

    def pack(split: str) -> PackedText:
        return PackedText(
            tokenised(corpus, split, tokenizer, options.seed, bar=bar),
            sequence_length=options.sequence_length,
            batch_size=options.batch_size,
            packing="stream",
            seed=options.seed,
        )

    with progress(shown=True, transient=True) as bar:
        text = pack("train")
        try:
            held_out = pack("validation")
        except ValueError:
            # a hash makes the splits, so a corpus of few documents may have none held out
            held_out = None
    model = model.to("cuda" if torch.cuda.is_available() else "cpu").train()
    optimizers = make_optimizers(model, options)
    run = Run(options, work, model, tokenizer, text, held_out, optimizers)
    if not work.path.exists():
        with atomic_folder(work.path) as folder:
            tokenizer.save_pretrained(folder / "tokenizer")
            write_atomic(folder / "settings.json", json.dumps(settings, indent=2) + "\n")
    resume(run)
    return run


def refuse_other_settings(work: Path, settings: dict[str, Any]) -> None:
    """Raise ValueError where the unfinished run in this folder was begun with other settings."""
    if not work.exists():
        return
    begun = json.loads((work / "settings.json").read_text(encoding="utf-8"))
    for name, value in settings.items():
        if begun.get(name) != value:
            raise ValueError(
                f"{work} holds an unfinished run with --{name.replace('_', '-')} "
                f"{begun.get(name)}, this one asks for {value}; repeat that, or delete the folder"
            )


def corpus_of(options: argparse.Namespace) -> Data:
    """Return the corpus that was asked for."""
    source = source_of(options.data)
    path = "" if source == options.data else options.data
    return Data(source=source, path=path, column=options.column)


def source_of(data: str) -> str:
    """Return which corpus source reads this file, folder or glob."""
    if data == "python_stdlib":
        return data
    inside = [file.name for file in Path(data).rglob("*")] if Path(data).is_dir() else [data]
    for source, suffixes in (("jsonl", JSONL), ("parquet", PARQUET)):
        if any(name.endswith(suffixes) for name in inside):
            return source
    return "files"


def build(options: argparse.Namespace, saved: Path, corpus: Data) -> tuple[Any, Any]:
    """Return the model as it is before the first step, and its tokenizer.

    Raises:
        ValueError: `--init` is no base, or is given together with a shape; or the shape's
            numbers do not fit each other.
    """
    asked = {name: getattr(options, name) for name in SHAPE}
    if not options.init:
        shape = {name: value or SHAPE[name] for name, value in asked.items()}
        refuse_shape(shape)
        if saved.exists():
            tokenizer = AutoTokenizer.from_pretrained(saved, trust_remote_code=False)
        else:
            CONSOLE.print("training the tokenizer")
            texts = (row["text"] for _, row in read(corpus, "train"))
            tokenizer = train_tokenizer(texts, shape["vocab_size"], shape["context"])
        return make_model(shape, tokenizer), tokenizer
    if given := [name for name, value in asked.items() if value is not None]:
        flag = "--" + given[0].replace("_", "-")
        raise ValueError(f"--init brings the shape of its base, got {flag} too; drop one")
    try:
        model = AutoModelForCausalLM.from_pretrained(
            options.init, dtype=torch.float32, trust_remote_code=False
        )
        return model, AutoTokenizer.from_pretrained(options.init, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--init must be a base that loads: {str(error).splitlines()[0]}"
        ) from error


def refuse_shape(shape: dict[str, int]) -> None:
    """Raise ValueError where width, heads and key-value heads do not divide."""
    width, heads, kv_heads = shape["width"], shape["heads"], shape["kv_heads"]
    if width % (2 * heads) or heads % kv_heads:
        raise ValueError(
            "--width must be a multiple of twice --heads, and --heads of --kv-heads; got "
            f"{width}, {heads} and {kv_heads}"
        )


def make_model(shape: dict[str, int], tokenizer: Any) -> LlamaForCausalLM:
    """Return an untrained model of this shape."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=shape["width"],
            intermediate_size=shape["mlp_width"],
            num_hidden_layers=shape["layers"],
            num_attention_heads=shape["heads"],
            num_key_value_heads=shape["kv_heads"],
            head_dim=shape["width"] // shape["heads"],
            max_position_embeddings=shape["context"],
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def make_optimizers(model: Any, options: argparse.Namespace) -> dict[str, torch.optim.Optimizer]:
    """Return Muon for the matrices between the layers and AdamW for embeddings and norms."""
    outer = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    inner: list[Tensor] = []
    rest: list[Tensor] = []
    for value in model.parameters():
        (inner if value.ndim == 2 and id(value) not in outer else rest).append(value)
    return {
        "muon": Muon(inner, lr=options.muon_rate, weight_decay=0.0),
        "adamw": torch.optim.AdamW(
            rest, lr=options.adamw_rate, betas=(0.9, 0.95), weight_decay=0.0
        ),
    }


def rate_scale(step: int, steps: int, warmup_steps: int) -> float:
    """Return the share of the peak learning rate at this step: linear up, cosine down to 5 %."""
    warm = min(1.0, (step + 1) / (warmup_steps + 1))
    return warm * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def train(run: Run, stop: threading.Event, bar: Progress) -> None:
    """Take the steps that are left; on a stop, write a checkpoint after the step at hand."""
    options = run.options
    started, first = time.monotonic(), run.step
    task = bar.add_task("base", total=options.steps, completed=run.step, numbers="")
    batches = run.text.batches(run.cursor)
    while run.step < options.steps and not stop.is_set():
        batch, run.cursor = next(batches)
        run.loss = take_step(run, batch.tokens)
        run.step += 1
        read = (run.step - first) * batch.tokens.numel()
        numbers = f"loss {run.loss:.3f}  {read / (time.monotonic() - started):,.0f} tokens/s"
        bar.update(task, completed=run.step, numbers=numbers)
        if run.step % options.checkpoint_every == 0 or stop.is_set():
            save(run)
            bar.console.print(f"step {run.step}/{options.steps}  {numbers}")


def take_step(run: Run, tokens: Tensor) -> float:
    """Learn from one batch; return its loss in nats per token.

    Raises:
        ValueError: The loss is not finite.
    """
    options = run.options
    loss = loss_of(run.model, tokens)
    value = loss.item()
    if not math.isfinite(value):
        raise ValueError(
            f"the loss must stay finite, it is {value} after step {run.step}; lower "
            "--muon-rate and --adamw-rate"
        )
    loss.backward()
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    scale = rate_scale(run.step, options.steps, options.warmup_steps)
    for name, optimizer in run.optimizers.items():
        optimizer.param_groups[0]["lr"] = getattr(options, f"{name}_rate") * scale
        optimizer.step()
        optimizer.zero_grad()
    return value


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    """Return the mean next-token loss."""
    tokens = tokens.to(model.device)
    with torch.autocast(model.device.type, torch.bfloat16, enabled=has_bfloat16(model.device)):
        return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def has_bfloat16(device: torch.device) -> bool:
    """Return whether the machine itself multiplies bfloat16; emulation would only cost time."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported()
    return bool(getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)())


def save(run: Run) -> None:
    """Write a checkpoint."""
    state = {"step": run.step, "cursor": run.cursor, "loss": run.loss}
    optimizer = {name: one.state_dict() for name, one in run.optimizers.items()}
    # parameters, not the state dict: tied tensors are there once
    weights = {name: value.detach() for name, value in run.model.named_parameters()}
    checkpoint.save(run.work.checkpoints, checkpoint.Checkpoint(state, weights, optimizer, {}))


def resume(run: Run) -> None:
    """Go on from the newest checkpoint, if there is one."""
    if (found := checkpoint.newest(run.work.checkpoints)) is None:
        return
    state, weights, optimizers, _ = found
    run.step, run.cursor, run.loss = state["step"], state["cursor"], state["loss"]
    parameters = dict(run.model.named_parameters())
    for name, value in weights.items():
        parameters[name].data.copy_(value)
    for name, value in optimizers.items():
        run.optimizers[name].load_state_dict(value)
    CONSOLE.print(f"resuming after step {run.step}")


@torch.no_grad()
def finish(run: Run) -> None:
    """Measure the model on held-out text, write it in bfloat16, and drop the checkpoints."""
    options = run.options
    tokens_read = run.step * options.batch_size * options.sequence_length
    measured: dict[str, Any] = {"data": options.data, "steps": run.step, "tokens": tokens_read}
    measured["train_loss"] = run.loss
    if run.held_out is not None:
        pairs = zip(range(HELD_OUT_BATCHES), run.held_out.batches(), strict=False)
        losses = [loss_of(run.model.eval(), batch.tokens).item() for _, (batch, _) in pairs]
        measured["held_out_loss"] = sum(losses) / len(losses)
    with atomic_folder(options.out) as folder:
        run.model.to(torch.bfloat16).save_pretrained(folder)
        run.tokenizer.save_pretrained(folder)
        write_atomic(folder / "pretraining.json", json.dumps(measured, indent=2) + "\n")
    shutil.rmtree(run.work.path)
    CONSOLE.print(f"{options.out}: {json.dumps(measured)}", soft_wrap=True)


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Turn Ctrl-C and SIGTERM into an event that training checks between steps."""
    stop = threading.Event()
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda *_: stop.set()) for number in numbers]
    try:
        yield stop
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


if __name__ == "__main__":
    raise SystemExit(main())
