"""Train the variants of one file of settings, and compare them on the same prompts.

    python scripts/bench_heads.py recipes/smollm2/heads.yaml                 into runs/heads
    python scripts/bench_heads.py recipes/smollm2/ablations.yaml --only as_it_is hard_labels
    python scripts/bench_heads.py FILE --set schedule.phases.distilled.steps=50 --record

    make speculators                                     an environment with that library
    .venv-speculators/bin/python scripts/bench_heads.py --speculators runs/smollm2 --out runs/theirs
    .venv-speculators/bin/python scripts/bench_heads.py recipes/smollm2_long/equal_data.yaml

A file has `recipe`; `train`, overrides of all trainings; `variants`, the overrides of each by name;
`compare`, overrides of `specheads compare` by the name of a comparison; and maybe `heads`, folders
of heads that were trained elsewhere, and `speculators`, the variant on whose text speculators' head
is trained too. {out} and {text} stand for --out and --text, the generated text that the variants
share. Finished parts are not repeated. OUT/FILE.json has the variants, what each training took, and
all comparisons; --record copies it into the recipe's folder and updates the tables. Training speed
is read from the logs, so nothing else should run at the same time.

--speculators trains the EAGLE-3 of the speculators library on the training text of a run: its
model, loss, optimizers and document layout, with the defaults of its command line (--set changes
them). The base's forward, the order of batches, the loss mask, the draft vocabulary and the depth
are those of the run. `load_head` reads OUT. Other than there, each batch is read once, the first
labels of a document that some depths cannot predict are left out, and weights are float32.
"""

# speculators is in no environment of ours
# pyright: reportMissingImports=false

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.progress import Progress
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from specheads.base.model import FrozenBase
from specheads.commands._call import read_run_settings
from specheads.config.commands import Train
from specheads.core.drafter import Head
from specheads.core.errors import InputError, first_line
from specheads.core.features import Features, document_lengths
from specheads.core.files import as_json, atomic_folder, dumps, to_json, write_atomic
from specheads.core.machine import dtype_name
from specheads.core.ranges import AUTO
from specheads.data.packing import TokenBatch
from specheads.decoding.noise import derive_seed
from specheads.heads.load import build_for_base, build_head, load_head
from specheads.measure.results import Comparison, read_results
from specheads.runs.directory import RunDirectory
from specheads.runs.progress import progress_display
from specheads.runs.provenance import collect_provenance, shorten_paths
from specheads.training.objective import draftable_labels, draw_labels
from specheads.training.phase_data import PhaseData
from specheads.training.processes import accelerator_of_environment, load_base
from specheads.training.schedule import schedule_phases

ROOT = Path(__file__).resolve().parents[1]
MOST_APART = 0.01
"""Largest divergence in nats of the logits that speculators computes; bfloat16 gives a tenth."""


@dataclass(frozen=True, slots=True)
class Source:
    """The parts of a run that decide what is learned."""

    settings: Train
    base: FrozenBase
    texts: PhaseData
    head: Head
    """Head of the run, for its draft vocabulary and depth."""
    dtype: torch.dtype
    """Precision of the head."""
    layers: tuple[int, ...]
    """Layers of the base that the head reads."""

    def read(self, batch: TokenBatch) -> tuple[Features, Tensor]:
        """Return features, and the input of the base's last norm, which speculators normalises."""
        streams: list[Tensor] = []
        norm: Any = self.base.model.base_model.norm
        hook = norm.register_forward_pre_hook(lambda _, inputs: streams.append(inputs[0]))
        try:
            return self.base.read(batch.tokens, self.layers, batch.document_ids), streams.pop()
        finally:
            hook.remove()


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and compare; return the exit code."""
    options = _parse(arguments)
    try:
        if options.speculators:
            sys.stdout.write(train_speculators(options.speculators, options.out, options.set))
            return 0
        return bench(read_plan(options), options)
    except InputError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("file", type=Path, nargs="?", help="variants and comparisons, in YAML")
    add("--only", nargs="+", metavar="NAME", help="these variants; default: all")
    add("--speculators", type=Path, metavar="RUN", help="their head, not ours")
    add("--out", type=Path, default=ROOT / "runs" / "heads", help="folder of the runs")
    add("--text", type=Path, help="generated text; default: OUT/text")
    add("--set", nargs="*", default=[], help="further overrides for training")
    add("--measure", nargs="*", default=[], help="further overrides for comparing")
    add("--record", action="store_true", help="write the JSON and the tables of the recipe")
    return parser.parse_args(arguments)


def read_plan(options: argparse.Namespace) -> dict[str, Any]:
    """Return the file of settings, with the variants that are asked for."""
    if not options.file or not options.file.is_file():
        raise InputError(f"bench_heads needs a YAML file of variants, got {options.file}; name one")
    try:
        plan = yaml.safe_load(options.file.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError) as error:
        raise InputError(f"{options.file} must be YAML: {first_line(error)}; fix it") from error
    if not isinstance(plan, dict) or not {"recipe", "variants", "compare"} <= plan.keys():
        raise InputError(f"{options.file} must have recipe, variants and compare; add them")
    teachers = [plan["speculators"]] if "speculators" in plan else []
    # speculators' head needs the text of its variant
    chosen = dict.fromkeys([*(options.only or plan["variants"]), *teachers])
    if unknown := sorted(chosen.keys() - plan["variants"].keys()):
        names = ", ".join(plan["variants"])
        raise InputError(f"a variant must be among {names}, got {unknown[0]}; correct its name")
    if teachers:
        refuse_without_speculators()
    return plan | {"variants": {name: plan["variants"][name] for name in chosen}}


def bench(plan: Mapping[str, Any], options: argparse.Namespace) -> int:
    """Train the variants, compare them, and write one JSON after each part."""
    runs = {name: options.out / name for name in plan["variants"]}
    for name, run in runs.items():
        is_finished = (run / "head").is_dir()
        if not is_finished and (code := _run("train", *training_of(plan, name, options))):
            return code
    training = {name: trained(run) for name, run in runs.items()}
    compared = [*runs.values(), *plan.get("heads", [])]
    if "speculators" in plan:
        compared.append(options.out / "speculators")
        if not compared[-1].exists():
            print(train_speculators(runs[plan["speculators"]], compared[-1], []), end="")
    table: dict[str, Any] = {"schema": 3, **plan, "training": training}
    out = options.out / f"{options.file.stem}.json"
    heads = f"heads=[{','.join(map(str, compared))}]"
    for name, selection in plan["compare"].items():
        folder = options.out / f"{options.file.stem}-{name}"
        words = [heads, f"out={folder}", "drafters=[head]", *selection, *options.measure]
        if not (folder / "compare.json").is_file() and (code := _run("compare", *words)):
            return code
        table[name] = to_json(read_results(Comparison, folder / "compare.json"))
        write_atomic(out, dumps(table))
    print(f"wrote {out}")
    if options.record:
        write_atomic(ROOT / "recipes" / plan["recipe"] / out.name, out.read_bytes())
        subprocess.check_call([sys.executable, str(ROOT / "scripts" / "results_table.py")])
    return 0


def training_of(plan: Mapping[str, Any], name: str, options: argparse.Namespace) -> list[str]:
    """Return the overrides of `specheads train` for a variant."""
    words = [f"recipe={plan['recipe']}", f"name={name}", "run_dir={out}/" + name]
    words += ["evaluate_after=false", *plan.get("train", []), *plan["variants"][name]]
    text = (options.text or options.out / "text").resolve()
    placed = (
        word.replace("{out}", str(options.out)).replace("{text}", str(text)) for word in words
    )
    return [*placed, *options.set]


def _run(*words: str) -> int:
    """Run one command of specheads; return its exit code."""
    print(f"\n$ specheads {' '.join(words)}", flush=True)
    return subprocess.call([sys.executable, "-m", "specheads", *words])


def trained(run: Path) -> dict[str, Any]:
    """Return tokens, speed and peak memory of a training from its run directory."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [row for row in map(json.loads, lines) if "tokens_per_second" in row]
    return {
        "tokens": steps[-1]["tokens"],
        "tokens_per_second": statistics.median(row["tokens_per_second"] for row in steps[1:]),
        "peak_gib": max(row["peak_gib"] for row in steps),
    }


def refuse_without_speculators() -> None:
    """Refuse an environment without the library."""
    if find_spec("speculators") is None:
        raise InputError("speculators must be installed where this runs; make speculators does it")


def train_speculators(run: Path, out: Path, words: Sequence[str]) -> str:
    """Train the speculators model on the text of a run, save it, and return a summary."""
    refuse_without_speculators()
    if out.exists():
        raise InputError(f"--out must be a new folder, and {out} exists; remove it")
    source = opened(run)
    trainer, chosen = made(source, words)
    rows: list[dict[str, float]] = []
    with progress_display(shown=True) as bar:
        task = bar.add_task("speculators", total=trainer.config.max_steps, numbers="")
        for batch, labels in lessons(source, bar):
            began = time.perf_counter()
            if not rows:
                refuse_misread(source, trainer.model, batch)
            sizes = {"tokens": batch.tokens.numel(), "labels": int(labels.sum())}
            losses = step(trainer, collated(source, batch, labels), sizes["labels"])
            rows.append(losses | sizes | {"seconds": time.perf_counter() - began})
            bar.update(task, advance=1, numbers=f"loss {losses['loss']:.3f}")
    record = summary(rows) | {
        "run": shorten_paths(str(run)),
        "base": source.base.fingerprint,
        "speculators": {"version": metadata.version("speculators")} | chosen,
        "provenance": asdict(collect_provenance()),
    }
    with atomic_folder(out) as folder:
        trainer.model.save_pretrained(folder)
        (folder / "training.json").write_text(as_json(record), encoding="utf-8")
    return f"wrote {out} after {len(rows)} steps, at a loss of {rows[-1]['loss']:.3f}\n"


def opened(run_folder: Path) -> Source:
    """Open a run, finished or not; missing text is generated first."""
    run = RunDirectory(run_folder)
    if not run.config.is_file():
        raise InputError(
            f"--speculators must be a run's folder, and {run_folder} has no config.yaml; name one"
        )
    settings: Any = read_run_settings(run.config, Train)
    phases = settings.schedule.phases.values()
    if any(phase.joint or phase.batch_size == AUTO for phase in phases):
        raise InputError(
            f"choose a run without joint phase or batch_size=auto: {run_folder} has one"
        )
    accelerator = accelerator_of_environment(settings.base.dtype)
    base = load_base(settings.base, accelerator)
    if not hasattr(base.model.base_model, "norm"):
        raise InputError(f"a base needs model.norm, got {base.name}; choose another")
    texts = PhaseData(
        settings.schedule.phases,
        settings.data,
        base,
        run.text,
        accelerator,
        lambda _: None,
        settings.seed,
    )
    is_trained, counts = run.head.is_dir(), None
    if settings.head.get("draft_tokens") and not is_trained:
        counts = texts.count_tokens(lambda: None)
    head = load_head(run.head) if is_trained else build_for_base(settings.head, base, counts)
    dtype = torch.bfloat16 if accelerator.mixed_precision == "bf16" else torch.float32
    # that of ours which reads as speculators' does, where the base is not too shallow for that
    reader = (
        head if head.kind == "eagle3" else build_head({"kind": "eagle3"}, width=16, vocab_size=16)
    )
    reader.choose_aux_layers(base.num_layers)
    return Source(settings, base, texts, head, dtype, reader.aux_layers)


def lessons(source: Source, bar: Progress) -> Iterator[tuple[TokenBatch, Tensor]]:
    """Yield the batch of each step of the run, and its labels."""
    head, seed = source.head, source.settings.seed
    phases = [phase for phase in schedule_phases(source.settings.schedule) if phase.settings.steps]
    for phase in phases:
        text = source.texts.open_phase(phase, bar, lambda: None)
        for number, (batch, _) in zip(range(phase.first, phase.end), text.batches(), strict=False):
            loss_mask = batch.loss_mask
            if not head.num_anchors:
                loss_mask = draw_labels(batch, head, phase.settings, derive_seed(seed, number))
            yield batch, draftable_labels(loss_mask, batch.document_ids, head.depth)


def collated(source: Source, batch: TokenBatch, labels: Tensor) -> Iterator[dict[str, Any]]:
    """Yield each row with labels, its documents packed as by the loader of speculators."""
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.data import CollateFn

    features, last = source.read(batch.to(source.base.device))
    assert features.aux is not None
    positions = features.positions().expand(labels.shape)
    for row in range(len(labels)):
        # its mask marks the token before the predicted one, ours the predicted one
        columns = (batch.tokens[row], features.aux[row], last[row], labels[row].roll(-1))
        lengths = document_lengths(positions[row : row + 1])
        columns_by_document = zip(*(column.cpu().split(lengths) for column in columns), strict=True)
        if samples := [_sample(*columns) for columns in columns_by_document if columns[-1].any()]:
            sizes = sum(len(sample["input_ids"]) - 1 for sample in samples), source.base.width
            yield CollateFn(*sizes, len(source.layers), source.dtype, shift_batch)(samples)


def _sample(*columns: Tensor) -> dict[str, Tensor]:
    """Return a document as the dataset of speculators does, up to its last label."""
    time = int(columns[-1].nonzero()[-1]) + 1
    names = ("input_ids", "hidden_states", "verifier_last_hidden_states", "loss_mask")
    sample = {name: column[:time] for name, column in zip(names, columns, strict=True)}
    return sample | {"lengths": torch.tensor([time]), "position_ids": torch.arange(time)}


def made(source: Source, words: Sequence[str]) -> tuple[Any, dict[str, Any]]:
    """Return the trainer of a new speculators model, and its settings."""
    from speculators.models.eagle3 import Eagle3DraftModel
    from speculators.train.cli import build_draft_model, set_seed
    from speculators.train.trainer import Trainer, TrainerConfig

    config = _config(source, words)
    flat = config.flatten()
    set_seed(flat["seed"])
    d2t, t2d = source.head.draft_maps()
    arguments = argparse.Namespace(**flat)
    model = build_draft_model(arguments, Eagle3DraftModel, t2d, d2t, source.head.drafted_size)
    config_values = {name: flat[name] for name in TrainerConfig._fields if name in flat}
    call, _ = Eagle3DraftModel.get_trainer_kwargs(**flat)
    config_values |= {
        "hidden_states_dtype": source.dtype,
        "num_epochs": 1,
        "train_call_kwargs": call,
    }

    class Here(Trainer):
        """Trains on the device of the base, not on the first accelerator."""

        def setup_trainer(self) -> None:
            self.local_rank = source.base.device

    stages = ("draft", "loss", "optimizer", "scheduler")
    # it needs only the length of the data, and stops at max_steps
    trainer = Here(model.train(), TrainerConfig(**config_values), range(flat["max_steps"]))
    return trainer, {name: getattr(config, name).model_dump() for name in stages}


def _config(source: Source, words: Sequence[str]) -> Any:
    """Return the settings of `speculators train`: defaults, those of the run, and --set."""
    from speculators.train.config import TrainConfig
    from speculators.train.config.schema import CONFIG_DESTS

    chosen = {name: value for name, _, value in (word.partition("=") for word in words)}
    settings: dict[str, Any] = {
        "verifier_name_or_path": source.base.location,
        "target_layer_ids": [*source.layers],
        "mask_token_id": 0,
        # the defaults are kernels for GPUs
        "draft_attn_impl": "sdpa",
        "loss_implementation": "eager",
        "hidden_states_dtype": dtype_name(source.dtype),
        # its default is a window of 2,048 positions; the head next to it attends to all of them
        "full_attention_indices": [*range(int(chosen.get("num_layers", 1)))],
        "ttt_steps": source.head.depth,
        "max_steps": sum(phase.steps for phase in source.settings.schedule.phases.values()),
        "seed": source.settings.seed,
    }
    if unknown := sorted(chosen.keys() - (CONFIG_DESTS - settings.keys())):
        raise InputError(
            f"--set must be a setting of speculators, got {unknown[0]!r}; leave it out"
        )
    try:
        return TrainConfig.from_flat(settings | chosen)
    except ValueError as error:
        raise InputError(f"speculators refuses --set: {' '.join(str(error).split())}") from error


def step(trainer: Any, rows: Iterable[Mapping[str, Any]], labels: int) -> dict[str, float]:
    """Make one optimizer step as Trainer.train_epoch does; return what it logs.

    That one needs an accelerator's clock. Rows follow one another: by the share of their labels
    their means make the mean of all, and no row's attention has to leave out the others.
    """
    from speculators.train.utils import normalize_counted_metrics

    device, dtype = trainer.local_rank, trainer.config.hidden_states_dtype
    logged = {"learning_rate": trainer.optimizers[0].param_groups[0]["lr"], "loss": 0.0}
    trainer._optimizers_zero_grad()
    for row in rows:
        inputs = {
            name: value.to(device) for name, value in row.items() if isinstance(value, Tensor)
        }
        with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
            _, loss, metrics = trainer.model(**inputs, **trainer.config.train_call_kwargs)
        share = int(row["loss_mask"].sum()) / labels
        (loss * share).backward()
        means = normalize_counted_metrics({name: value.item() for name, value in metrics.items()})
        logged |= {name: logged.get(name, 0.0) + share * mean for name, mean in means.items()}
    torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
    trainer._optimizers_step()
    trainer._schedulers_step()
    return logged


@torch.no_grad()
def refuse_misread(source: Source, model: Any, batch: TokenBatch) -> None:
    """Refuse a base whose logits differ from those that speculators computes."""
    row = next(batch.split(len(batch.tokens)))
    features, last = source.read(row.to(source.base.device))
    base_logits = source.base.projection.rows(source.head.draft_ids)(features.hidden).float()
    verifier_logits = model.verifier_lm_head(model.verifier_norm(last.float()))
    verifier_log_probs, base_log_probs = (
        logits.log_softmax(-1).flatten(0, 1) for logits in (verifier_logits, base_logits)
    )
    apart = F.kl_div(verifier_log_probs, base_log_probs, log_target=True, reduction="batchmean")
    if not apart <= MOST_APART:
        raise InputError(
            f"speculators must compute the logits of the base, and those of {source.base.name} "
            f"differ by {apart:.3g} nats; choose a base that does not scale or cap its logits"
        )


def summary(rows: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Return the totals of all steps, and the loss of each."""
    totals = {name: sum(row[name] for row in rows) for name in ("tokens", "labels", "seconds")}
    totals["tokens_per_second"] = totals["tokens"] / totals["seconds"]
    return {"schema": 2, "steps": len(rows), **totals, "losses": [row["loss"] for row in rows]}


if __name__ == "__main__":
    raise SystemExit(main())
