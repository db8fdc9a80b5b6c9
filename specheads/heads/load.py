"""Build heads, and load trained ones: ours, or a public checkpoint.

Each module of heads/kinds/ is one kind, and its file name is the kind's name: there is no registry.
A module has `Config`, `Head(config, width, vocab_size)` and, if its original project published
checkpoints, `read_public(config, tensors)`, which returns None for the layout of another project.
See docs/add_a_head.md.
"""

import dataclasses
import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from huggingface_hub import snapshot_download

# HTTPError is that of its HTTP client, which differs between versions
from huggingface_hub.errors import HTTPError  # pyright: ignore[reportPrivateImportUsage]
from jaxtyping import Float
from torch import Tensor

from specheads.base.ends import BaseEnds, ServedBase
from specheads.base.fingerprint import base_fingerprint, tables_fingerprint
from specheads.base.model import FrozenBase
from specheads.core.cpu.weight_layout import optimise_for_few_rows
from specheads.core.drafter import Head
from specheads.core.errors import InputError, first_line
from specheads.core.files import local_path, read_json
from specheads.core.machine import host_bytes
from specheads.core.ranges import check_value, setting_hints
from specheads.decoding.trees import tuned
from specheads.heads.checkpoint import (
    INDEX_SUFFIX,
    SIZES,
    WEIGHT_FILES,
    fill_head,
    read_rope_settings,
    read_settings,
    read_tensors,
)
from specheads.heads.layers.attention import AttentionContext, LlamaLayer
from specheads.heads.layers.feedback import FeedbackHead

FEW_TOKENS = 8
"""Tokens with which a copy of a base's layer is compared with it: fewer than any window."""
MAX_DIFFERENCE = 0.05
"""Largest mean difference between the updates of both layers, relative to the update's mean."""


def kinds() -> list[str]:
    """Return the kinds of head: the modules in heads/kinds/."""
    folder = str(Path(__file__).with_name("kinds"))
    return sorted(module.name for module in pkgutil.iter_modules([folder]))


def _import_kind(kind: Any) -> ModuleType:
    if kind not in kinds():
        raise InputError(f"head kind must be one of {', '.join(kinds())}; got {kind!r:.80}")
    return importlib.import_module(f"specheads.heads.kinds.{kind}")


def configure(settings: Mapping[str, Any]) -> Any:
    """Return the `Config` of `kind` for its settings; refuse unknown and invalid ones."""
    values = dict(settings)
    module = _import_kind(values.pop("kind", None))
    names = sorted(field.name for field in dataclasses.fields(module.Config))
    if unknown := sorted(set(values) - {*names}):
        raise InputError(
            f"head={settings['kind']} has no setting {unknown[0]!r}; it has {', '.join(names)}"
        )
    # before the dataclass is made, because tests check its annotations at runtime
    for name, hint in setting_hints(module.Config).items():
        if name in values:
            check_value(f"head.{name}", values[name], hint)
    return module.Config(**values)


def build_head(settings: Mapping[str, Any], *, width: int, vocab_size: int) -> Head:
    """Make an untrained head of `kind` for these settings and sizes of the base.

    `vocab_size` is the number of rows of the base's vocabulary projection. Errors are those of
    `configure`.
    """
    config = configure(settings)
    return _import_kind(settings["kind"]).Head(config, width=width, vocab_size=vocab_size)


def head_sizes(base: BaseEnds) -> dict[str, int]:
    """Return the sizes of a base that `build_head` needs; refuse a base that no head fits."""
    if (rows := len(base.embedding)) != base.vocab_size:
        raise InputError(
            f"a head needs a base with logits for every token, and {base.config.model_type!r} has "
            f"{base.vocab_size} logits for {rows} rows of its embedding; choose another base"
        )
    if (columns := base.projection.weight.shape[1]) != base.width:
        raise InputError(
            f"a head needs a base whose final hidden state has the width of its layers, and that "
            f"of {base.config.model_type!r} has {columns} of {base.width} channels; choose another "
            "base"
        )
    return {"width": base.width, "vocab_size": base.vocab_size}


def build_for_base(
    settings: Mapping[str, Any], base: BaseEnds, counts: Tensor | None = None
) -> Head:
    """Make an untrained head, initialised from the base's tensors, on the base's device.

    `counts` are the occurrences of each token in the training text, for a reduced draft vocabulary;
    None selects the first tokens. A head that is too large to train is refused.
    """
    sizes = head_sizes(base)
    from_base = settings.get("init_from_base")
    settings = _fill_sizes(settings, base) if from_base else settings
    with on_meta_device("head settings"):
        shapes = build_head(settings, **sizes)
    refuse_too_large(shapes, base.device)
    head = build_head(settings, **sizes)
    if counts is not None:
        head.choose_vocabulary(counts)
    # heads train in float32, because small updates vanish in bfloat16
    embedding, projection = base.embedding.float(), base.projection.scaled_weight.float()
    head.to(base.device)
    head.initialise(embedding, head.projection_rows(projection))
    if from_base:
        assert isinstance(head, FeedbackHead)
        assert isinstance(base, FrozenBase)
        layers: Any = base.model.base_model.layers
        tensors = dict(layers[-1].named_parameters())
        _refuse_other_layer(head.blocks()[0], tensors, base)
        head.initialise_layer(tensors, base.final_norm.get_parameter("weight"))
        head.config = dataclasses.replace(head.config, init_from_base=False)
    bind_to_base(head, base)
    head.base_fingerprint = _fingerprint(base)
    return head


def _fill_sizes(settings: Mapping[str, Any], base: BaseEnds) -> dict[str, Any]:
    """Return settings with the base's rotary embedding, and its sizes where they are zero."""
    if not isinstance(base, FrozenBase) or not hasattr(base.model.base_model, "layers"):
        raise InputError(
            "head.init_from_base=true needs the layers of a base like Llama in this process, and "
            f"{base.name} does not have them; leave it out"
        )
    config = base.config.to_dict()
    sizes = {name: settings.get(name) or config.get(public) or 0 for name, public in SIZES.items()}
    return {**settings, **sizes, **read_rope_settings(config)}


@torch.no_grad()
def _refuse_other_layer(layer: LlamaLayer, tensors: Mapping[str, Tensor], base: FrozenBase) -> None:
    """Refuse a base whose last layer computes something else than a Llama layer of its tensors.

    Gemma's norms, Granite's multipliers, interleaved rotary embeddings and layers without one have
    the same tensors.
    """
    layer = deepcopy(layer)
    # the base has no such settings
    layer.norm_before_residual, layer.self_attn.attention_sink_bias = False, None
    layer.copy_layer(tensors)
    tokens = torch.arange(FEW_TOKENS, device=base.device)[None] % base.vocab_size
    streams = base.read(tokens, (base.num_layers - 1, base.num_layers)).aux
    assert streams is not None
    before, after = streams.float().chunk(2, dim=-1)
    positions = torch.arange(FEW_TOKENS, device=base.device)[None]
    inputs = layer.prepare(before, positions, torch.zeros_like(before))
    visible = positions[..., None] >= positions
    difference = (layer(inputs, AttentionContext(inputs.keys_values, visible)) - after).abs().mean()
    rounding = 4 * torch.finfo(base.dtype).eps * after.abs().mean()
    if not difference <= MAX_DIFFERENCE * (after - before).abs().mean() + rounding:
        raise InputError(
            "head.init_from_base=true needs a base whose last layer computes what a Llama layer "
            f"does, and that of {base.config.model_type!r} does not; leave it out"
        )


def resume_head(path: str | Path, base: BaseEnds, kind: str) -> Head:
    """Load a head of this kind for further training: in float32, bound to the base."""
    head = load_head(path)
    if head.kind != kind:
        raise InputError(f"init={path} is a head of kind {head.kind}: set head={head.kind}")
    refuse_misfit(head, base.embedding)
    head.to(base.device).train()
    bind_to_base(head, base)
    head.base_fingerprint, head.tuned = _fingerprint(base), None
    return head


def copy_head(head: Head) -> Head:
    """Return a copy with its own parameters; the read-only buffers are shared."""
    return deepcopy(head, {id(buffer): buffer for buffer in head.buffers()})


def copy_for_drafting(head: Head, base: BaseEnds) -> Head:
    """Return a copy of a head for drafting; the head itself, perhaps in training, is unchanged."""
    drafter = copy_head(head).eval().requires_grad_(False)
    fit_to_base(drafter, base, force=True)
    return drafter


def load_head(
    path: str | Path, base: BaseEnds | None = None, *, revision: str = "main", force: bool = False
) -> Head:
    """Load a trained head: ours, or a public checkpoint in the layout of its project.

    Args:
        path: Folder or Hub id; its config.json identifies the layout.
        base: Base to bind the head to. A head for another width, vocabulary or weights is refused.
        revision: Hub revision; ignored for a folder.
        force: Whether to accept a head trained on other weights of the same sizes.

    Raises:
        ValueError: The folder is incomplete, unsafe (see checkpoint.py) or of an unknown layout,
            the head does not fit the base, or tuned.json is damaged or of another head.
    """
    folder = _find_folder(path, revision)
    config, tensors = read_settings(folder), read_tensors(folder)
    # on the meta device until the sizes in config.json are checked against the tensors
    with on_meta_device(f"config.json and tensors of {folder}"):
        head = _read_head(config, tensors)
    if head is None:
        raise InputError(
            f"{folder} must be a checkpoint of {', '.join(kinds())}, and its config.json names "
            f"{config.get('architectures') or config.get('model_type')!r:.80}; choose another"
        )
    if (file := folder / tuned.FILE).is_file():
        head.tuned = tuned.Tuned.read(read_json(file), str(file), head.depth)
    if base is not None:
        fit_to_base(head, base, force=force)
    return head.eval()


def _read_head(config: dict[str, Any], tensors: dict[str, Tensor]) -> Head | None:
    """Return the head of a checkpoint; None if no kind reads its layout."""
    if "kind" not in config:
        readers = (getattr(_import_kind(kind), "read_public", None) for kind in kinds())
        heads = (read_public(config, tensors) for read_public in readers if read_public)
        return next((head for head in heads if head is not None), None)
    sizes = {name: config.pop(name, 0) for name in ("width", "vocab_size")}
    fingerprint = config.pop("base_fingerprint", "")
    head = build_head(config, **sizes)
    head.base_fingerprint = str(fingerprint)
    fill_head(head, tensors)
    return head


def fit_to_base(head: Head, base: BaseEnds, *, force: bool = False) -> None:
    """Move a head to its base's device and bind it to the base's tensors; `force` as `load_head`.

    A head for another width, vocabulary or weights, or for more layers, is refused.
    """
    is_checked = head.base_fingerprint and not force
    refuse_misfit(head, base.embedding, _fingerprint(base) if is_checked else "")
    head.to(base.device, base.dtype)
    optimise_for_few_rows(head)
    bind_to_base(head, base)


def refuse_misfit(
    head: Head, embedding: Float[Tensor, "vocab width"], fingerprint: str = ""
) -> None:
    """Refuse a base of other sizes or weights than those of the head's own base.

    `fingerprint` is that of this base, or only its first half; empty compares sizes only. Older and
    public heads have none.
    """
    for name, size in zip(("width", "vocab_size"), reversed(embedding.shape), strict=True):
        if size != (head_size := getattr(head, name)):
            raise InputError(
                f"the head was made for a base of {name} {head_size}, this base has {size}; "
                "load the base it was trained on"
            )
    if not head.matches_fingerprint(fingerprint):
        trained_on = head.base_fingerprint[: len(fingerprint)]
        raise InputError(
            f"a head fits the weights it was trained on: those are {trained_on}, this base has "
            f"{fingerprint}; load its own base, train it on this one (init=), or override with "
            "force=true"
        )


def _fingerprint(base: BaseEnds) -> str:
    tables = base.embedding, base.projection.weight
    if isinstance(base, ServedBase):
        return tables_fingerprint(*tables)
    return base_fingerprint(base.model, *tables)


def bind_to_base(head: Head, base: BaseEnds) -> None:
    """Bind a head to its base: choose the layers that it reads and set borrowed tensors."""
    choose_layers(head, base.num_layers)
    projection = base.projection
    head.bind(base.embedding, projection.scaled_weight, projection.scaled_bias)


def choose_layers(head: Head, num_layers: int) -> None:
    """Choose the layers of the base that a head reads, and refuse those that it does not have."""
    head.choose_aux_layers(num_layers)
    if max(head.aux_layers, default=0) > num_layers:
        raise InputError(
            f"the head reads the base after {max(head.aux_layers)} layers, this base has "
            f"{num_layers}; load the base it was trained on, or set other aux_layers"
        )


def _find_folder(path: str | Path, revision: str) -> Path:
    """Return the folder; from the Hub, download the settings and the weights."""
    folder = local_path(path)
    if folder.is_dir():
        return folder
    patterns = ["config.json", tuned.FILE, f"*{INDEX_SUFFIX}", *WEIGHT_FILES]
    try:
        snapshot = snapshot_download(
            str(path), revision=revision, allow_patterns=patterns, ignore_patterns="*/*"
        )
        return Path(snapshot)
    except (HTTPError, OSError, ValueError) as error:
        raise InputError(
            f"{str(path)!r} must be a folder or a reachable Hub id: {first_line(error)}; fix it"
        ) from error


TRAINING_BYTES = 16
"""Bytes per trained parameter: the value, its gradient and the two moments of AdamW, in float32."""
SIZE_ERRORS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors that settings of an impossible head raise."""


@contextmanager
def on_meta_device(source: str) -> Iterator[None]:
    """Make heads on the meta device; report any error of their sizes and names in one line."""
    try:
        with torch.device("meta"):
            yield
    except InputError:
        raise
    except SIZE_ERRORS as error:
        raise InputError(
            f"{source} do not describe a head: {type(error).__name__} {first_line(error)}; fix them"
        ) from error


def refuse_too_large(head: Head, device: torch.device) -> None:
    """Refuse a head that is too large to train in the memory of a device."""
    parameters = sum(parameter.numel() for parameter in head.parameters())
    memory = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else host_bytes()
    if (required := TRAINING_BYTES * parameters) > memory:
        raise InputError(
            f"a head must fit in memory, and one with {parameters:,} parameters needs "
            f"{required / 2**30:,.1f} of {memory / 2**30:,.1f} GiB; lower the sizes under head="
        )
