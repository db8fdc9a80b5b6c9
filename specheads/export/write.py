"""Export a head to a serving engine's layout, after a check of the written folder.

An engine does not report a wrong layout: its output stays lossless and only acceptance falls. So
the folder is loaded with `load_head`, which reads every layout of this package. The trained and the
loaded head draft from every position of text that the base generated, and their logits must agree
within `TOLERANCE`.

The check covers the tensors and the settings that `load_head` reads. A few settings are read by one
engine only, such as SGLang's layer ids and TensorRT-LLM's options. Tests check those with
tests/oracles/, which reads each layout as its engine's sources do.
"""

import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from specheads.base.model import FrozenBase
from specheads.core.drafter import Features, Head
from specheads.core.errors import InputError
from specheads.core.files import as_json, atomic_folder, refuse_outside, sweep, writable_folder
from specheads.decoding.trees import policies
from specheads.export.layouts import find_layout
from specheads.export.layouts._shared import Folder
from specheads.heads.load import copy_head, load_head
from specheads.measure.counts import DepthCounts
from specheads.measure.generation import GenerationSettings, continue_prompts
from specheads.measure.offline import guess_ranks, replay
from specheads.measure.results import DraftCounts
from specheads.runs.progress import bar
from specheads.runs.provenance import provenance

RECORD = "specheads.json"
"""File in every export: the head, its base, and the result of the check. Engines ignore it."""
MERGED_BASE = "base"
"""Subfolder for a base with a merged adapter, which exists nowhere else."""
TOLERANCE = 1e-4
"""Largest difference between logits, relative to the largest logit: float32 rotary tables."""
NEW_TOKENS = 64
"""Tokens that the base generates after each prompt of the check."""
GateText = tuple[list[int], list[int]]
"""A prompt and its greedy continuation by the base."""
Lent = tuple[Tensor, Tensor, Tensor | None]
"""The base's embedding, and the matrix and bias of its vocabulary projection."""


@dataclass(frozen=True, slots=True)
class Parity:
    """Result of the check."""

    per_depth: list[DraftCounts]
    """Drafts offered and accepted at each depth of a chain."""
    tokens_per_forward: float
    largest_difference: float
    """Largest difference between two logits, relative to the largest logit."""


@dataclass(frozen=True, slots=True)
class LevelDraft:
    """The output of a head at one depth, for every position of a text."""

    logits: Float[Tensor, "time drafted"]
    """Rows too close to the end of the text to have read a token are meaningless."""
    ids: Int[Tensor, " drafted"]
    """The token of each column."""
    confidence: Float[Tensor, " time"] | None = None
    """Logit of the probability that the base accepts the draft, for heads that predict it."""


def gate_texts(
    head: Head, base: FrozenBase, engine: str, out: Path, prompts: list[list[int]]
) -> list[GateText]:
    """Return prompts and their greedy continuations by the base, for the check.

    What `export_head` would refuse is refused before any text is generated.
    """
    find_layout(head, base, engine)
    _target(out, base)
    # continue past end-of-text tokens: the check needs length, not sense
    how = GenerationSettings(
        max_new_tokens=max(NEW_TOKENS, head.depth + 2),
        batch_size=8,
        stop_at_eos=False,
        progress=True,
    )
    return list(zip(prompts, continue_prompts(base, prompts, how), strict=True))


def export_head(
    head: Head, base: FrozenBase, engine: str, out: Path, texts: Sequence[GateText]
) -> tuple[tuple[str, ...], Parity]:
    """Write a head for an engine; return the command lines that serve it and the check's result.

    The folder holds weights, settings, the base's name and the check's result, and nothing from the
    environment. It replaces an earlier export. A base with a merged adapter is written to the
    subfolder `base`.

    Raises:
        ValueError: The engine cannot serve this head, `out` holds other files, or the check fails.
            Nothing is written then.
    """
    layout, out = find_layout(head, base, engine), _target(out, base)
    merged = bool(base.adapter)
    if merged:
        base.place = str(out / MERGED_BASE)
    folder = layout.write(head, base, out)
    if folder.copied and out.is_relative_to(folder.copied.resolve()):
        raise InputError(
            f"out= must not be inside the base's folder, which is copied, got {out}; name another"
        )
    head = folder.stored or head
    sweep(out.parent, out.name)
    with atomic_folder(out) as scratch:
        _save(folder, scratch)
        if merged:
            base.model.save_pretrained(scratch / MERGED_BASE)
            if base.tokenizer is not None:
                base.tokenizer.save_pretrained(scratch / MERGED_BASE)
        lent = tables(base)
        trained = widened(copy_head(head), lent)
        loaded = widened(load_export(scratch, head, base, copied=bool(folder.copied)), lent)
        read = bar(read_texts(head, base, texts), "drafts", shown=True)
        difference = largest_difference((drafts(trained, one), drafts(loaded, one)) for one in read)
        chain = policies.chain(head.depth)
        walked = [replay(guess_ranks(base, head, *text, width=1), chain) for text in texts]
        total = DepthCounts.total(walked, head.depth)
        parity = Parity(total.per_depth(), total.tokens_per_forward, difference)
        record = {
            "engine": engine,
            "head": {"kind": head.kind, "depth": head.depth},
            "base": {"name": base.name, "revision": base.revision, "fingerprint": base.fingerprint},
            "parity": {"texts": len(texts), **asdict(parity)},
            "specheads": provenance().versions["specheads"],
        }
        (scratch / RECORD).write_text(as_json(record), encoding="utf-8")
    return folder.serve, parity


def _target(out: Path, base: FrozenBase) -> Path:
    """Return the output folder; refuse one that an export may not replace."""
    out = writable_folder(out)
    if not out.exists():
        return out
    if not (out / RECORD).is_file() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(
            f"out= must be a new or empty folder, or an earlier export; {out} holds other files"
        )
    # the new folder is filled next to the old one and then takes its place
    writable_folder(out.parent)
    in_use = [Path.cwd()] if base.adapter else [Path.cwd(), Path(base.place).resolve()]
    if held := [place for place in in_use if place.is_relative_to(out)]:
        raise InputError(
            f"out= is replaced as a whole, and {out} holds {held[0]}, which is in use; name another"
        )
    return out


def _save(folder: Folder, target: Path) -> None:
    """Write the files of an export into an existing folder."""
    if folder.copied:
        _copy(folder.copied, target, folder.tensors)
        return
    (target / "config.json").write_text(as_json(folder.config), encoding="utf-8")
    # safetensors refuses tensors that share memory, and tied tensors do
    copies = {
        name: value.detach().cpu().clone().contiguous() for name, value in folder.tensors.items()
    }
    save_file(copies, target / folder.weights_file, metadata={"format": "pt"})
    for name, text in folder.files.items():
        (target / name).write_text(text, encoding="utf-8")


def _copy(source: Path, target: Path, changed: Mapping[str, Tensor]) -> None:
    """Copy a checkpoint with some tensors replaced."""
    for file in source.rglob("*"):
        part = file.relative_to(source)
        if not file.is_file() or any(name.startswith(".") for name in part.parts):
            continue
        refuse_outside(file, source)
        place = target / part
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, place)
        if file.suffix == ".safetensors":
            with safe_open(file, "pt") as stored:
                names, metadata = changed.keys() & stored.keys(), stored.metadata()
            if names:
                save_file(
                    load_file(file) | {name: changed[name] for name in names}, place, metadata
                )


# --- the check ---------------------------------------------------------------------------------


def read_texts(head: Head, base: FrozenBase, texts: Sequence[GateText]) -> list[Features]:
    """Return the features that a head reads of each text, in float64 on the CPU."""
    tokens = [torch.tensor([prompt + new]) for prompt, new in texts]
    read = [base.read(one.to(base.device), head.aux_layers) for one in tokens]
    return [
        Features(_wide(one.hidden), None if one.aux is None else _wide(one.aux), text)
        for one, text in zip(read, tokens, strict=True)
    ]


def load_export(folder: Path, head: Head, base: FrozenBase, *, copied: bool = False) -> Head:
    """Load an export as a user does.

    `load_head` ignores the copies of the base's tensors that some layouts need, so they are
    compared here. A copied base has all tensors and no depth: engines get it on the command line.

    Raises:
        ValueError: The folder cannot be loaded, is another head, or holds a wrong copy.
    """
    loaded = load_head(folder)
    loaded.depth = head.depth if copied else loaded.depth
    loaded.choose_aux_layers(base.num_layers)
    for name in ("kind", "depth", "aux_layers"):
        ours, theirs = getattr(head, name), getattr(loaded, name)
        if ours != theirs:
            raise InputError(
                f"the export loads with {name}={theirs}, the head has {ours}; nothing was written"
            )
    if copied:
        return loaded
    (file,) = folder.glob("*.safetensors")
    ids = head.to_tokens(torch.arange(head.drafted_size, device=base.device))
    copies = {
        "embed_tokens.weight": base.embedding,
        "lm_head.weight": base.projection.scaled_weight[ids],
    }
    for name, value in load_file(file).items():
        copied = name in copies and name not in head.state_dict()
        if copied and not torch.equal(value, copies[name].detach().cpu().to(value.dtype)):
            raise InputError(
                f"{name!r} in the export differs from the base's tensor; nothing was written"
            )
    return loaded


@torch.no_grad()
def drafts(head: Head, features: Features) -> list[LevelDraft]:
    """Return the drafts of a head along one text, at every depth."""
    tokens = features.tokens
    assert tokens is not None
    ids = head.to_tokens(torch.arange(head.drafted_size))
    return [
        LevelDraft(head.logits(state[0], level), ids, head.confidence_logits(state[0]))
        for level, state in enumerate(head.states(features, tokens))
    ]


def largest_difference(pairs: Iterable[tuple[list[LevelDraft], list[LevelDraft]]]) -> float:
    """Return the largest relative difference between the logits of a head and of its export.

    A pair has the drafts of both for one text.

    Raises:
        ValueError: The difference is above `TOLERANCE`, or the tokens of the columns differ.
    """
    found = [
        [_difference(*levels, depth) for depth, levels in enumerate(zip(*pair, strict=True))]
        for pair in pairs
    ]
    worst = torch.tensor(found).amax(0)
    for depth, difference in enumerate(worst.tolist()):
        # in this form NaN is refused too
        if not difference <= TOLERANCE:
            raise InputError(
                f"the export's logits at depth {depth} are {difference:.1e} of the largest one "
                f"away from the run's, rounding explains {TOLERANCE:.1e}; nothing was written"
            )
    return worst.max().item()


def tables(base: FrozenBase) -> Lent:
    """Return the tensors that a base lends, in float64 on the CPU."""
    own = base.projection
    bias = None if own.scaled_bias is None else _wide(own.scaled_bias)
    return _wide(base.embedding), _wide(own.scaled_weight), bias


def _wide(values: Tensor) -> Tensor:
    return values.detach().cpu().double()


def widened(head: Head, lent: Lent) -> Head:
    """Move a head to float64 on the CPU and bind it to the base's tensors."""
    head.cpu().bind(*lent)
    return head.double().eval()


def _difference(ours: LevelDraft, theirs: LevelDraft, level: int) -> float:
    """Return the largest difference between two logits, relative to the largest logit.

    Rows whose next token is beyond the text are left out.
    """
    if not torch.equal(ours.ids, theirs.ids):
        raise InputError(
            f"the export drafts other tokens than the run at depth {level}; nothing was written"
        )
    known = len(ours.logits) - 2 - level
    pairs = [(ours.logits[:known], theirs.logits[:known])]
    if ours.confidence is not None and theirs.confidence is not None:
        pairs.append((ours.confidence[:known], theirs.confidence[:known]))
    relative = [(own - other).abs().max() / own.abs().max() for own, other in pairs]
    return torch.stack(relative).max().item()
