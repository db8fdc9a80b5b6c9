"""LoRA on the base: train adapter layers while its weights stay frozen. Only this module uses peft.

peft is imported on first use. See docs/train.md. Source: Hu et al. 2021, arXiv:2106.09685.
"""

import hashlib
import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from specheads.base.file_checks import reason
from specheads.core.errors import InputError
from specheads.core.foreign import refuse_unused

SETTINGS, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
HONOURED = (
    *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "fan_in_fan_out"),
    *("target_modules", "exclude_modules", "target_parameters", "modules_to_save"),
    *("layers_to_transform", "layers_pattern", "trainable_token_indices"),
    *("use_dora", "use_qalora", "qalora_group_size"),
)
"""Settings of an adapter that peft merges exactly; a test compares each with peft's own layers."""
TRAINING = (
    *("peft_type", "peft_version", "task_type", "inference_mode", "revision", "auto_mapping"),
    *("megatron_config", "megatron_core", "runtime_config", "velora_config"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),
)
"""Settings of how an adapter is stored or was trained; `merge` checks `megatron_config`."""
OWN = re.compile("lora_|modules_to_save|trainable_tokens")
"""Names of an adapter's tensors in a wrapped base."""
STARTS = (True, False, "gaussian", "eva", "orthogonal")
"""Initialisations of an adapter that leave the weights of the base unchanged, unlike pissa."""


class Dropout(nn.Module):
    """Dropout that depends on a key per position, not on the composition of the batch.

    The product modulo 2**64 of two random odd numbers, of the position and the channel, is random.
    """

    factors: Tensor

    def __init__(self, probability: float, width: int, generator: torch.Generator) -> None:
        super().__init__()
        self.probability, self.threshold = probability, int((probability - 0.5) * 2**64)
        self.keys: Int64[Tensor, ...] = torch.zeros((), dtype=torch.int64)
        """Random bits for each position of the next forward."""
        factors = torch.randint(-(2**63), 2**63 - 1, (width,), generator=generator)
        self.register_buffer("factors", factors | 1, persistent=False)

    def forward(self, inputs: Float[Tensor, "... width"]) -> Float[Tensor, "... width"]:
        """Zero some inputs in training."""
        if not self.training:
            return inputs
        if self.keys.numel() * inputs.shape[-1] != inputs.numel():
            # an expert of a mixture reads an unknown subset of the positions
            return F.dropout(inputs, self.probability)
        keys = self.keys.reshape(*inputs.shape[:-1], 1)
        random_bits = (keys | 1) * self.factors.to(inputs.device)
        return inputs.where(random_bits >= self.threshold, 0.0) / (1 - self.probability)


class Adapter:
    """LoRA layers inside a model in eval mode; they start as zero and can be removed.

    The A matrices are sampled from the seed; the B matrices are zero.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        rank: int = 32,
        alpha: float = 16.0,
        dropout: float = 0.05,
        target_modules: Sequence[str] = (),
        seed: int = 0,
    ) -> None:
        from peft import LoraConfig, get_peft_model

        names = targets(model, target_modules)
        config = LoraConfig(
            task_type="CAUSAL_LM",
            r=rank,
            lora_alpha=alpha,  # pyright: ignore[reportArgumentType]
            lora_dropout=dropout,
            target_modules=names,
        )
        with torch.random.fork_rng(devices=[]), _quiet():
            torch.manual_seed(seed)
            self._wrapped = get_peft_model(model, config)
        self.parameters = [value for value in model.parameters() if value.requires_grad]
        self.dropouts = self._replace_dropout(dropout, torch.Generator().manual_seed(seed))
        self.learn(False)

    def _replace_dropout(self, probability: float, generator: torch.Generator) -> list[Dropout]:
        """Replace the dropout of the layers by `Dropout`."""
        from peft.tuners.lora import LoraLayer

        dropouts: list[Dropout] = []
        for layer in self._wrapped.modules():
            if probability and isinstance(layer, LoraLayer) and layer.in_features:
                dropouts.append(Dropout(probability, layer.in_features, generator))
                layer.lora_dropout = nn.ModuleDict({"default": dropouts[-1]})
        return dropouts

    def draw_by(self, keys: Int64[Tensor, "..."]) -> None:
        """Set the random bits that dropout uses for each position of the next forward."""
        for dropout in self.dropouts:
            dropout.keys = keys

    def learn(self, on: bool) -> None:
        """Enable or disable gradients and dropout of the layers."""
        from peft.tuners.lora import LoraLayer

        self.learning = on
        for layer in self._wrapped.modules():
            if isinstance(layer, LoraLayer):
                layer.lora_dropout.train(on)
        for value in self.parameters:
            value.requires_grad_(on)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Disable the layers in this context."""
        try:
            with self._wrapped.disable_adapter():
                yield
        finally:
            self.learn(self.learning)

    def weights(self) -> dict[str, Tensor]:
        """Return its tensors by peft's names."""
        from peft.utils import get_peft_model_state_dict

        return get_peft_model_state_dict(self._wrapped, save_embedding_layers=False)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Load tensors that `weights` returned."""
        from peft.utils import set_peft_model_state_dict

        set_peft_model_state_dict(self._wrapped, dict(weights))

    def save(self, folder: Path) -> None:
        """Write it in peft's layout: adapter_config.json and safetensors."""
        # embeddings are not trained, and "auto" would send a request to the Hub
        self._wrapped.save_pretrained(str(folder), save_embedding_layers=False)

    def remove(self) -> None:
        """Remove the layers; the model is then bit for bit what it was."""
        self._wrapped.unload()


def targets(model: PreTrainedModel, requested: Sequence[str] = ()) -> list[str]:
    """Return the full names of the linear layers that get LoRA.

    `requested` lists full names or suffixes such as `q_proj`; empty is all of them, except a
    vocabulary projection tied to the input embedding, which an update would change too.
    """
    _refuse_quantised(model)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = head if head is not None and head.weight is embedding.weight else None
    linear_layers = [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear | Conv1D) and layer is not tied
    ]
    names = [
        name
        for name in linear_layers
        if not requested or any(_has_suffix(name, suffix) for suffix in requested)
    ]
    unmatched = [
        suffix
        for suffix in requested
        if not any(_has_suffix(name, suffix) for name in linear_layers)
    ]
    if unmatched or not names:
        ends = ", ".join(sorted({name.rpartition(".")[2] for name in linear_layers})) or "none"
        raise InputError(
            "joint.target_modules must name linear layers of the base (a vocabulary projection "
            f"tied to the embedding is none), got "
            f"{unmatched[0] if unmatched else 'a base without'!r}; it has {ends}"
        )
    return names


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence two warnings of peft: a deprecated name, and `fan_in_fan_out`."""
    with warnings.catch_warnings():
        old = "`is_gradient_checkpointing` is deprecated|fan_in_fan_out is set"
        warnings.filterwarnings("ignore", message=old)
        yield


def _has_suffix(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")


def adapts(layer: nn.Module) -> bool:
    """Return whether LoRA changes the output of this layer."""
    # only a layer wrapped by an adapter has this attribute
    return not getattr(layer, "disable_adapters", True)


@torch.no_grad()
def whole_weight(layer: nn.Module) -> Float[Tensor, "vocab width"]:
    """Return a layer's matrix, with the LoRA update if it is enabled."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    if not adapts(layer):
        return weight
    adapted: Any = layer
    for name in adapted.active_adapters:
        weight = (weight + adapted.get_delta_weight(name)).to(weight.dtype)
    return weight


def _refuse_quantised(model: PreTrainedModel) -> None:
    if getattr(model.config, "quantization_config", None) is not None:
        raise InputError(
            "an adapter needs an unquantised base, got a quantised one; load an unquantised base"
        )


def merge(model: PreTrainedModel, adapter: str | Path) -> None:
    """Merge an adapter, a folder or Hub id in peft's layout, into a model's weights permanently."""
    from peft import PeftConfig, get_peft_model

    _refuse_quantised(model)
    wrapped = None
    try:
        # peft would also load a pickle
        if Path(adapter).is_dir() and not (Path(adapter) / WEIGHTS).is_file():
            raise ValueError(f"an adapter's folder needs {WEIGHTS}")
        _refuse_settings(adapter)
        with _quiet():
            config: Any = PeftConfig.from_pretrained(str(adapter))
            # peft would import the module that megatron_core names
            if config.megatron_config:
                raise ValueError("it has code")
            if config.r > (width := model.config.get_text_config().hidden_size):
                raise ValueError(f"its rank {config.r:.4g} exceeds the base's width {width}")
            wrapped = get_peft_model(model, config)
            result = wrapped.load_adapter(str(adapter), "default")
        # peft loads the tensors that fit and ignores the rest
        lacking = [name for name in result.missing_keys if OWN.search(name)]
        if strange := lacking + result.unexpected_keys:
            raise ValueError(f"its tensors do not match the base: {strange[0]}")
        # peft merges layer by layer, and would stop in between
        new = [value for name, value in wrapped.named_parameters() if OWN.search(name)]
        if not all(value.isfinite().all() for value in new):
            raise ValueError("its weights are not finite")
    except InputError:
        raise
    except Exception as error:
        # a damaged folder can raise any error in peft
        if wrapped is not None:
            wrapped.unload()
        raise InputError(
            "base.adapter must be a LoRA adapter that peft can load onto this base, got "
            f"{str(adapter)!r:.200} ({reason(error)}); name a run's adapter/"
        ) from error
    _untie(model)
    wrapped.merge_and_unload(safe_merge=True)
    model.eval().requires_grad_(False)


def _untie(model: PreTrainedModel) -> None:
    """Give the projection a matrix of its own if an adapter changes it or the tied embedding.

    The adapter changes the output of one of them, and peft would merge it into the matrix of both.
    """
    from peft.tuners.lora import LoraLayer

    head: Any = model.get_output_embeddings()
    embedding: Any = model.get_input_embeddings()
    adapted = isinstance(head, LoraLayer) or isinstance(embedding, LoraLayer)
    if adapted and head.weight is embedding.weight:
        plain = head.get_base_layer() if isinstance(head, LoraLayer) else head
        plain.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        for config in (model.config, model.config.get_text_config()):
            config.tie_word_embeddings = False


def _refuse_settings(adapter: str | Path) -> None:
    """Refuse an adapter with settings that peft would drop or cannot merge."""
    file = Path(adapter) / SETTINGS
    path = file if file.is_file() else hf_hub_download(str(adapter), SETTINGS)
    settings = json.loads(Path(path).read_text(encoding="utf-8"))
    if settings["peft_type"] != "LORA":
        raise ValueError(f"it is {settings['peft_type']}, no LoRA")
    start = settings.pop("init_lora_weights", True)
    changes = {} if start in STARTS else {"init_lora_weights": start}
    remedy = "merge it with the code that trained it, and name the merged folder as base.model"
    refuse_unused("base.adapter", settings, changes, used=(*HONOURED, *TRAINING), remedy=remedy)


def fingerprint(adapter: Path) -> str:
    """Return the hash of a saved adapter's weights."""
    return hashlib.sha256((adapter / WEIGHTS).read_bytes()).hexdigest()[:32]
