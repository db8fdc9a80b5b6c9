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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from specheads.base.model import FrozenBase
from specheads.core.drafter import Features, Head
from specheads.core.errors import InputError
from specheads.core.files import (
    as_json,
    atomic_folder,
    read_json,
    refuse_outside,
    remove_incomplete,
    writable_folder,
)
from specheads.decoding.trees import policies
from specheads.export.layouts import find_layout
from specheads.export.layouts._shared import Folder
from specheads.heads.checkpoint import read_rope_settings
from specheads.heads.layers.attention import Attention
from specheads.heads.layers.rotary import rope
from specheads.heads.load import bind_to_base, copy_head, load_head
from specheads.measure.counts import DepthCounts
from specheads.measure.generation import GenerationSettings, continue_prompts
from specheads.measure.offline import guess_ranks, replay
from specheads.measure.results import DraftCounts, Results
from specheads.runs.progress import progress_bar
from specheads.runs.provenance import collect_provenance

RECORD = "specheads.json"
"""File in every export: the head, its base, the result of the check, and acceptance rates. Engines
ignore it."""
MERGED_BASE = "base"
"""Subfolder for a base with a merged adapter, which exists nowhere else."""
TOLERANCE = 1e-4
"""Largest difference between logits, relative to the largest logit: float32 rotary tables."""
NEW_TOKENS = 64
"""Tokens that the base generates after each prompt of the check."""
CheckText = tuple[list[int], list[int]]
"""A prompt and the base's greedy text after it, on which a head and its export must agree."""


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


def generate_check_texts(
    head: Head, base: FrozenBase, engine: str, out: Path, prompts: list[list[int]]
) -> list[CheckText]:
    """Return prompts and their greedy continuations by the base, for the check.

    What `export_head` would refuse is refused before any text is generated.
    """
    find_layout(head, base, engine)
    _output_folder(out, base)
    # continue past end-of-text tokens: the check needs length, not sense
    new_tokens = max(NEW_TOKENS, head.depth + 2)
    generation = GenerationSettings(
        max_new_tokens=new_tokens, batch_size=8, stop_at_eos=False, progress=True
    )
    return list(zip(prompts, continue_prompts(base, prompts, generation), strict=True))


def acceptance_profile(head: Head, results: Results | None) -> dict[str, Any]:
    """Return how often drafts of each depth are accepted, and how that was measured.

    An evaluation is better than the measurement of `tune`. Without either the profile is empty.
    """
    measured = results and (results.online or results.offline)
    if results and measured:
        settings = asdict(results.settings)
        names = ("temperature", "acceptance", "tree", "num_nodes", "copied_tokens")
        return {
            "measured_by": "specheads evaluate",
            "rates": [depth.rate for depth in measured.conditional_acceptance],
            "intervals": [depth.interval for depth in measured.conditional_acceptance],
            "tokens_per_forward": measured.tokens_per_forward,
            "prompts": asdict(results.prompts),
            "settings": {name: settings[name] for name in (*names, "max_new_tokens", "dtype")},
        }
    if head.tuned is None:
        return {}
    return {
        "measured_by": "specheads tune",
        "rates": head.tuned.acceptance.per_depth,
        "settings": {"temperature": 0.0, "tree": "chain", "dtype": head.tuned.machine.dtype},
    }


def scale_positions(head: Head, base: FrozenBase) -> Head:
    """Return a copy of a head without scaled positions that has the scaling of the base.

    A head that was trained on short texts then drafts at the positions that the base serves. It has
    no tuned trees: they were measured without the scaling.
    """
    scaling = read_rope_settings(base.config.to_dict())["rope_scaling"]
    if not scaling or getattr(head.config, "rope_scaling", None) != {}:
        raise InputError(
            "rope_scaling=base needs a base that scales its positions and a head, such as eagle3, "
            f"that does not and can, got {scaling or 'no scaling'} and {head.kind}; leave it out"
        )
    scaled = copy_head(head)
    scaled.config, scaled.tuned = replace(head.config, rope_scaling=scaling), None
    for module in scaled.modules():
        if isinstance(module, Attention):
            module.rope = rope(scaled.config.rope_theta, scaling)
    return scaled


def export_head(
    head: Head,
    base: FrozenBase,
    engine: str,
    out: Path,
    texts: Sequence[CheckText],
    profile: Mapping[str, Any] | None = None,
) -> tuple[tuple[str, ...], Parity]:
    """Write a head for an engine; return the command lines that serve it and the check's result.

    The folder holds weights, settings, the base's name, the check's result and the head's `profile`
    (see `acceptance_profile`), and nothing from the environment. It replaces an earlier export. A
    base with a merged adapter is written to the subfolder `base`.

    Raises:
        ValueError: The engine cannot serve this head, `out` holds other files, or the check fails.
            Nothing is written then.
    """
    layout, out = find_layout(head, base, engine), _output_folder(out, base)
    is_merged = bool(base.adapter)
    if is_merged:
        base.location = str(out / MERGED_BASE)
    folder = layout.make_folder(head, base, out)
    if folder.copied and out.is_relative_to(folder.copied.resolve()):
        raise InputError(
            f"out= must not be inside the base's folder, which is copied, got {out}; name another"
        )
    head = folder.stored or head
    remove_incomplete(out.parent, out.name)
    with atomic_folder(out) as scratch:
        _save(folder, scratch)
        if is_merged:
            base.model.save_pretrained(scratch / MERGED_BASE)
            if base.tokenizer is not None:
                base.tokenizer.save_pretrained(scratch / MERGED_BASE)
        exported = load_export(scratch, head, base, copied=bool(folder.copied))
        parity = check_parity(head, exported, base, texts)
        record = {
            "engine": engine,
            "head": {"kind": head.kind, "depth": head.depth},
            "base": {"name": base.name, "revision": base.revision, "fingerprint": base.fingerprint},
            "parity": {"texts": len(texts), **asdict(parity)},
            "acceptance": profile or {},
            "specheads": collect_provenance().versions["specheads"],
            "files": _list_files(scratch),
        }
        (scratch / RECORD).write_text(as_json(record), encoding="utf-8")
    return folder.serve, parity


def _output_folder(out: Path, base: FrozenBase) -> Path:
    """Return the output folder; refuse one that an export may not replace."""
    out = writable_folder(out)
    if not out.exists():
        return out
    if not (out / RECORD).is_file() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(
            f"out= must be a new or empty folder, or an earlier export; {out} holds other files"
        )
    written = read_json(out / RECORD).get("files") if (out / RECORD).is_file() else None
    if others := [file for file in _list_files(out) if file not in (RECORD, *(written or [file]))]:
        raise InputError(
            f"out= is replaced as a whole, and {out} holds {others[0]}, which no export wrote; "
            "move it, or name another"
        )
    # the new folder is filled next to the old one and then takes its place
    writable_folder(out.parent)
    in_use = [Path.cwd()] if base.adapter else [Path.cwd(), Path(base.location).resolve()]
    if inside := [folder for folder in in_use if folder.is_relative_to(out)]:
        raise InputError(
            f"out= is replaced as a whole, and {out} holds {inside[0]}, which is in use; "
            "name another"
        )
    return out


def _list_files(folder: Path) -> list[str]:
    files = (file for file in folder.rglob("*") if file.is_file())
    return sorted(file.relative_to(folder).as_posix() for file in files)


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


def _copy(source: Path, target: Path, tensors: Mapping[str, Tensor]) -> None:
    """Copy a checkpoint with some tensors replaced."""
    for file in source.rglob("*"):
        path = file.relative_to(source)
        if not file.is_file() or any(name.startswith(".") for name in path.parts):
            continue
        refuse_outside(file, source)
        copy = target / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
        if file.suffix == ".safetensors":
            with safe_open(file, "pt") as checkpoint:
                names, metadata = tensors.keys() & checkpoint.keys(), checkpoint.metadata()
            if names:
                replaced = load_file(file) | {name: tensors[name] for name in names}
                save_file(replaced, copy, metadata)


# --- the check ---------------------------------------------------------------------------------


def check_parity(
    head: Head, exported: Head, base: FrozenBase, texts: Sequence[CheckText]
) -> Parity:
    """Compare the logits of a head and of its export along texts, and replay chains of the head."""
    features = progress_bar(read_features(head, base, texts), "drafts", shown=True)
    trained, loaded = in_float64(copy_head(head), base), in_float64(exported, base)
    difference = largest_difference(
        (level_drafts(trained, text), level_drafts(loaded, text)) for text in features
    )
    chain = policies.chain(head.depth)
    replays = [replay(guess_ranks(base, head, *text, width=1), chain) for text in texts]
    total = DepthCounts.total(replays, head.depth)
    return Parity(total.per_depth(), total.tokens_per_forward, difference)


def read_features(head: Head, base: FrozenBase, texts: Sequence[CheckText]) -> list[Features]:
    """Return the features that a head reads of each text, in float64 on the CPU."""
    features = []
    for prompt, continuation in texts:
        tokens = torch.tensor([prompt + continuation])
        text = base.read(tokens.to(base.device), head.aux_layers)
        aux = None if text.aux is None else text.aux.detach().cpu().double()
        features.append(Features(text.hidden.detach().cpu().double(), aux, tokens))
    return features


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
        trained, exported = getattr(head, name), getattr(loaded, name)
        if trained != exported:
            raise InputError(
                f"the export loads with {name}={exported}, the head has {trained}; nothing was "
                "written"
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
        is_copy = name in copies and name not in head.state_dict()
        if is_copy and not torch.equal(value, copies[name].detach().cpu().to(value.dtype)):
            raise InputError(
                f"{name!r} in the export differs from the base's tensor; nothing was written"
            )
    return loaded


@torch.no_grad()
def level_drafts(head: Head, features: Features) -> list[LevelDraft]:
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
    largest = 0.0
    for pair in pairs:
        for depth, levels in enumerate(zip(*pair, strict=True)):
            difference = _difference(*levels, depth)
            # in this form NaN is refused too
            if not difference <= TOLERANCE:
                raise InputError(
                    f"the export's logits at depth {depth} are {difference:.1e} of the largest one "
                    f"away from the run's, rounding explains {TOLERANCE:.1e}; nothing was written"
                )
            largest = max(largest, difference)
    return largest


def in_float64(head: Head, base: FrozenBase) -> Head:
    """Bind a head to its base, and move it with what it borrows to float64 on the CPU."""
    bind_to_base(head.to(base.device), base)
    return head.cpu().double().eval()


def _difference(trained: LevelDraft, exported: LevelDraft, level: int) -> float:
    """Return the largest difference between two logits, relative to the largest logit.

    Rows whose next token is beyond the text are left out.
    """
    if not torch.equal(trained.ids, exported.ids):
        raise InputError(
            f"the export drafts other tokens than the run at depth {level}; nothing was written"
        )
    num_rows = len(trained.logits) - 2 - level
    pairs = [(trained.logits[:num_rows], exported.logits[:num_rows])]
    if trained.confidence is not None and exported.confidence is not None:
        pairs.append((trained.confidence[:num_rows], exported.confidence[:num_rows]))
    relative = [(a - b).abs().max() / a.abs().max() for a, b in pairs]
    return torch.stack(relative).max().item()
