"""EAGLE-3: attention over hidden states of the base, fed back on its own output, or in one pass.

Source: Li et al. 2025, arXiv:2503.01840; SafeAILab/EAGLE, vllm-project/speculators; P-EAGLE:
arXiv:2602.01469.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from specheads.core.drafter import Guesses, Nodes, Projection, State, Tokens
from specheads.core.errors import InputError
from specheads.core.features import Committed, Features
from specheads.core.foreign import LAYERS, SECTIONS, SPECULATORS, refuse_unused
from specheads.core.ranges import Depth, LayerIndex, NonNegativeInt, PositiveFloat, PositiveInt
from specheads.heads.checkpoint import (
    PLAIN,
    check_weights,
    draft_window,
    fill_head,
    read_layer_settings,
)
from specheads.heads.layers.attention import (
    AttentionConfig,
    HeadCache,
    LlamaLayer,
    check_full_layers,
    layer_windows,
)
from specheads.heads.layers.common import NUM_FUSED_LAYERS, RMSNorm
from specheads.heads.layers.feedback import FeedbackHead


@dataclass(kw_only=True, slots=True)
class Config(AttentionConfig):
    """Settings of an EAGLE-3 head; the defaults are the published ones."""

    depth: Depth = 7
    """Number of levels it drafts, and of steps in its training-time test."""
    aux_layers: list[LayerIndex] = field(default_factory=list)
    """Base layers it reads, in increasing order: k is the residual stream after k layers. Empty
    selects 2, n // 2 and n - 3 of n, as serving engines do, or others for a shallow base."""
    num_layers: PositiveInt = 1
    """Number of layers: the first reads tokens and features, the others are plain Llama layers."""
    norm_before_residual: bool = False
    """Whether the residual starts from the normalised features, as in some checkpoints."""
    norm_before_fc: bool = False
    """Whether the features are normalised, all layers together."""
    fc_norm: bool = False
    """Whether the features are normalised, each layer separately (EAGLE-3.1)."""
    norm_output: bool = False
    """Whether a round reads the normalised output of the previous one (EAGLE-3.1)."""
    parallel: bool = False
    """Whether it drafts all levels in one pass, from masks (P-EAGLE)."""
    mask_token: NonNegativeInt = 0
    """Token whose embedding is used for masks, with `parallel`."""
    own_embedding: bool = False
    """Whether it trains its own embedding, initialised from the base's, as P-EAGLE does."""
    init_from_base: bool = False
    """Whether its first layer starts as the base's last one, with its sizes and rotary embedding
    unless they are set. Trained heads do not store this."""
    rope_theta: PositiveFloat = 10_000.0
    """Base of the rotary position embedding."""
    rope_scaling: dict[str, Any] = field(default_factory=dict)
    """Scaling of the rotary embedding for longer texts, as in a Llama's config.json, by rope_type:
    linear, llama3 or yarn. Empty is no scaling."""
    epsilon: PositiveFloat = 1e-5
    """Epsilon of the norms."""
    sliding_window: PositiveInt | None = None
    """Number of positions of the text that its layers see, up to the last one that the base has
    read. Drafted positions are always seen, and with `parallel` they count. Null is all."""
    full_layers: list[LayerIndex] = field(default_factory=list)
    """Layers without the window, counted from zero."""
    attention_sink: bool = False
    """Whether each attention head learns a logit without a value, its sink."""

    def __post_init__(self) -> None:
        # serving engines read the list as a sorted set
        if self.aux_layers != sorted(set(self.aux_layers)):
            raise InputError(
                f"aux_layers must increase, got {self.aux_layers}; set head.aux_layers"
            )
        if self.norm_before_fc and self.fc_norm:
            raise InputError(
                "eagle3 normalises its features once, got norm_before_fc and fc_norm; leave one out"
            )
        check_full_layers(self)
        if self.parallel and self.sliding_window and self.sliding_window < self.depth:
            raise InputError(
                f"eagle3 with parallel needs a sliding_window of at least its depth {self.depth}, "
                f"got {self.sliding_window}; raise head.sliding_window"
            )


class Head(FeedbackHead):
    """Features of three layers, fused, then `depth` rounds of its layers over their own output.

    Each round reads the last drafted token, and attends to the committed positions and to the
    earlier rounds on its path. With `parallel` the later rounds read masks, all in one pass.
    """

    has_own_fusion = True
    has_copy = False
    """Whether `embedding` is of its checkpoint, where it is most often a copy of the base's."""

    def __init__(self, config: Config, width: int, vocab_size: int) -> None:
        super().__init__(config, width, vocab_size)
        num_aux, epsilon = len(self.aux_layers) or NUM_FUSED_LAYERS, config.epsilon
        if config.mask_token >= vocab_size:
            raise InputError(
                f"head.mask_token must be below {vocab_size}, got {config.mask_token}; lower it"
            )
        self.input_norm = RMSNorm(num_aux * width, epsilon) if config.norm_before_fc else None
        norms = (RMSNorm(width, epsilon) for _ in range(num_aux * config.fc_norm))
        self.fc_norm = nn.ModuleList(norms)
        self.fc = nn.Linear(num_aux * width, width, bias=False)
        self.midlayer = LlamaLayer(config, width, reads_tokens=True)
        # numbered from 1, as in public checkpoints
        names = (str(index) for index in range(1, config.num_layers))
        self.layers = nn.ModuleDict({name: LlamaLayer(config, width) for name in names})
        self.norm, self.feeds_normed = RMSNorm(width, epsilon), config.norm_output
        self.lm_head = nn.Linear(width, self.drafted_size, bias=False)
        self.embed_tokens = nn.Embedding(vocab_size, width) if config.own_embedding else None
        self.mask_hidden = nn.Parameter(torch.randn(num_aux * width)) if config.parallel else None

    def initialise(self, embedding: Tensor, projection: Tensor) -> None:
        """Initialise the vocabulary projection and its own embedding from the base's."""
        if self.embed_tokens is not None:
            self.embed_tokens.weight.data.copy_(embedding)
        self.lm_head.weight.data.copy_(projection)
        self.scales_streams = not (self.config.norm_before_fc or self.config.fc_norm)

    @torch.no_grad()
    def initialise_layer(self, tensors: Mapping[str, Tensor], norm: Tensor) -> None:
        """Start as the base's last layer and norm over the last stream that it reads."""
        super().initialise_layer(tensors, norm)
        self.scales_streams = False
        self.norm.weight.copy_(norm)
        nn.init.zeros_(self.fc.weight)
        nn.init.eye_(self.fc.weight[:, -self.width :])

    def blocks(self) -> list[LlamaLayer]:
        """Return its layers, of which the first reads tokens."""
        return [self.midlayer, *cast(Iterable[LlamaLayer], self.layers.values())]

    @torch.no_grad()
    def fold_streams(self) -> None:
        """Move the scale of the streams into `fc`, and out of the features that replace them."""
        if self.stream_scale is not None and self.mask_hidden is not None:
            self.mask_hidden *= self.stream_scale.repeat_interleave(self.width)
        super().fold_streams()

    def windows(self, level: int) -> list[int | None]:
        """Return the number of positions of the text that a level sees in each layer."""
        windows = layer_windows(self.config, self.config.num_layers)
        # speculators counts P-EAGLE's masks, and not what EAGLE-3 has drafted
        level = level if self.config.parallel else 0
        return [window - level if window else None for window in windows]

    def bind(
        self, embedding: Tensor, projection: Tensor | None = None, bias: Tensor | None = None
    ) -> None:
        """Borrow the base's embedding; one of its checkpoint that differs becomes its own."""
        copy, self.has_copy = self.embedding if self.has_copy else None, False
        # a plan has shapes only
        if copy is not None and not copy.is_meta and not torch.equal(copy.to(embedding), embedding):
            self.embed_tokens = nn.Embedding.from_pretrained(copy, freeze=False)
            self.config = replace(self.config, own_embedding=True)
        super().bind(embedding, projection, bias)

    def embed(self, tokens: Int[Tensor, "*any"], like: Tensor) -> Float[Tensor, "*any width"]:
        """Return embeddings from its own table, if it has one, or from the base's."""
        table = self.embed_tokens
        return super().embed(tokens, like) if table is None else table(tokens)

    def embed_rounds(self, tokens: Tokens) -> Iterator[Float[Tensor, "batch time width"]]:
        """Yield the embeddings that each round of training reads: masks, with `parallel`."""
        rounds = super().embed_rounds(tokens)
        if not self.config.parallel:
            return rounds
        masks = self.embed_in_layer_dtype(torch.full_like(tokens, self.config.mask_token))
        return (masks if level else embedded for level, embedded in enumerate(rounds))

    def projection(self, level: int) -> Projection:
        """Return the projection to the draft vocabulary, the same at every level."""
        return Projection(self.lm_head.weight)

    @torch.no_grad()
    def begin(self, committed: Committed, memory: HeadCache) -> Guesses:
        """Store the keys and values of all positions; return the logits after the last.

        With `parallel` the state is the logits of the other levels, which read masks.
        """
        if not self.config.parallel:
            return super().begin(committed, memory)
        hidden, tokens = self.first_input(committed.features), committed.next_tokens
        mask_shape = (len(tokens), self.depth - 1)
        tokens = torch.cat([tokens, tokens.new_full(mask_shape, self.config.mask_token)], dim=1)
        masks = self.next_input(hidden[:, :1]).expand(*mask_shape, -1)
        hidden = torch.cat([hidden, masks], dim=1)
        logits, _ = self.guess(self.run_committed(hidden, tokens, committed, memory))
        return logits[:, :1], logits[:, 1:]

    @torch.no_grad()
    def extend(self, state: State, tokens: Nodes, parents: Nodes) -> Guesses:
        """Read each node after its parent's state, with attention to its path."""
        if not self.config.parallel:
            return super().extend(state, tokens, parents)
        return state[:, :1].expand(-1, tokens.shape[1], -1), state[:, 1:]

    def next_input(self, hidden: Tensor) -> Tensor:
        """Return the input of the next round; with `parallel` it does not depend on this one."""
        if self.mask_hidden is None:
            return super().next_input(hidden)
        return self._fuse(self.mask_hidden).expand(*hidden.shape[:2], -1)

    def first_input(self, features: Features) -> Float[Tensor, "batch time width"]:
        """Return the fused residual streams of the base."""
        return self._fuse(self.streams(features))

    def _fuse(self, aux: Tensor) -> Tensor:
        normed = aux if self.input_norm is None else self.input_norm(aux)
        if self.fc_norm:
            streams = zip(self.fc_norm, normed.chunk(len(self.fc_norm), dim=-1), strict=True)
            normed = torch.cat([norm(stream) for norm, stream in streams], dim=-1)
        return self.fc(normed)


IDS = "eagle_aux_hidden_state_layer_ids"

FIXED = PLAIN | {
    "attention_bias": False,
    "position_embedding_type": "rope",
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
}
"""Settings of public checkpoints with the only supported value of each."""
USED = (
    *(IDS, "eagle_config", "embed_requires_grad", "draft_vocab_size", "speculative_tokens"),
    # settings that describe the base or that the tensors decide: experts have other tensors
    *("num_aux_hidden_states", "parallel_draft_heads_num_layers", "has_lm_head"),
    *("num_local_experts", "experts_per_token", "num_experts_per_tok"),
    *("target_model_type", "modal_type"),
    *("decoder_sparse_step", "router_aux_loss_coef"),
    # the same of Hunyuan
    *("attention_head_dim", "cla_share_factor", "class_num", "dense_list", "mask_init_id"),
    *("im_start_id", "im_end_id", "im_newline_id", "text_start_id", "text_end_id", "pad_id"),
    *("norm_type", "org_vocab_size", "pool_type", "use_qk_norm", "use_rotary_pos_emb"),
)
MASKS = ("mask_token_id", "pard_token", "ptd_token_id")
"""Names of P-EAGLE's mask token."""
SAME = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""Settings with the same name and meaning in public checkpoints and here."""


def read_public(config: dict[str, Any], tensors: dict[str, Tensor]) -> Head | None:
    """Read a folder of SafeAILab's EAGLE, SpecForge or vllm-project's speculators."""
    weights = {name.replace("layers.0.", "midlayer."): value for name, value in tensors.items()}
    kind = config.get("speculators_model_type", "eagle3")
    if kind not in ("eagle3", "peagle") or "midlayer.hidden_norm.weight" not in weights:
        return None
    nested = dict(config.get("eagle_config", {}))
    if IDS in nested and IDS not in config:
        nested[IDS] = _streams_of(nested[IDS])
    settings = config.get("transformer_layer_config", {}) | nested | config
    # in the config of a head with one layer, the number may be that of its base's layers
    is_deep = any(name.startswith("layers.") for name in weights)
    num_layers = settings["num_hidden_layers"] if is_deep else 1
    window, full_layers, plain = draft_window(settings, num_layers)
    refuse_unused(
        "eagle3",
        config,
        *(config.get(name, {}) for name in SECTIONS),
        nested,
        used=(*LAYERS, *SPECULATORS, *SAME, *MASKS, *USED),
        fixed=FIXED | {"target_hidden_size": settings["hidden_size"]} | plain,
    )
    values: dict[str, Any] = {
        **read_layer_settings(settings),
        "aux_layers": sorted(set(settings.get(IDS) or ())),
        "num_layers": num_layers,
        "sliding_window": window,
        "full_layers": full_layers,
        **{name: bool(settings.get(name)) for name in SAME},
    }
    if (mask := weights.get("mask_hidden")) is not None:
        weights["mask_hidden"] = mask.flatten()
        tokens = [settings[name] for name in MASKS if settings.get(name) is not None]
        if not tokens:
            raise InputError(f"mask_hidden needs one of {', '.join(MASKS)} in config.json; add it")
        values |= {"parallel": True, "mask_token": tokens[0]}
    embedding = None
    if not settings.get("embed_requires_grad", kind == "peagle"):
        # a copy of the base's, unless `bind` finds another one
        embedding = weights.pop("embed_tokens.weight", None)
    values["own_embedding"] = "embed_tokens.weight" in weights
    head = Head(Config(**values), settings["hidden_size"], settings["vocab_size"])
    fill_head(head, weights)
    if embedding is not None:
        check_weights({"embed_tokens.weight": embedding})
        head.bind(embedding)
        head.has_copy = True
    return head


def _streams_of(ids: list[int]) -> list[int]:
    """Return the streams that ids in `eagle_config` mean: k is the stream after k layers.

    SpecForge and SGLang store the numbers of layers whose output is read, and their first one is 1.
    Some heads of SafeAILab's EAGLE store the numbers of layers whose input is read.
    """
    outputs = [layer + 1 for layer in ids]
    if min(ids, default=1) != 1:
        raise InputError(
            f"{IDS} in eagle_config must start with 1 to name outputs of layers, got {ids}, which "
            f"can be inputs or outputs; add {IDS} to the top level of config.json: {ids} if they "
            f"are inputs, {outputs} if they are outputs"
        )
    return outputs
