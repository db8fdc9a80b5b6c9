"""Block drafting, shared by DFlash, DFlash 2, Domino and DSpark: one forward drafts all levels.

Source: arXiv:2602.06036.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from specheads.core.drafter import (
    Anchors,
    Guesses,
    Hidden,
    Nodes,
    Projection,
    State,
    States,
    Tokens,
)
from specheads.core.errors import InputError
from specheads.core.features import Committed, Features
from specheads.core.foreign import LAYERS, SECTIONS, SPECULATORS, refuse_unused
from specheads.core.ranges import Depth, LayerIndex, PositiveFloat, PositiveInt, TokenId, is_allowed
from specheads.heads.checkpoint import (
    PLAIN,
    check_weights,
    draft_window,
    fill_head,
    read_layer_settings,
    read_rope_settings,
)
from specheads.heads.layers.attention import (
    AttentionConfig,
    AttentionContext,
    HeadCache,
    LlamaLayer,
    check_full_layers,
    layer_windows,
    limit_to_window,
)
from specheads.heads.layers.common import BorrowingHead, RMSNorm, pick_parents


@dataclass(kw_only=True, slots=True)
class BlockConfig(AttentionConfig):
    """Settings of a block head; the defaults are those of DeepSpec for 7 tokens."""

    depth: Depth = 7
    """Number of levels it drafts, all in one forward."""
    num_layers: Depth = 5
    """Number of layers."""
    aux_layers: list[LayerIndex] = field(default_factory=list)
    """Base layers it reads, in increasing order: k is the residual stream after k layers. Empty
    selects num_layers ones, evenly from 2 to n - 2 of n, or 1 to n - 1 of a shallow base."""
    rope_theta: PositiveFloat = 1_000_000.0
    """Base of the rotary position embedding."""
    epsilon: PositiveFloat = 1e-6
    """Epsilon of the norms."""
    mask_token: TokenId = -1
    """Token whose embedding is used for masks; choose one that is rare in text. -1 is the last
    token of the vocabulary."""
    sample_from_anchor: bool = False
    """Whether the anchor's slot drafts the first level, and each slot the token after it. Otherwise
    each mask drafts the token at its own position."""
    num_anchors: PositiveInt = 512
    """Number of positions per sequence from which a training step drafts, sampled at each step."""
    sliding_window: PositiveInt | None = None
    """Number of positions before the anchor that all slots of its block see. Null is all."""
    full_layers: list[LayerIndex] = field(default_factory=list)
    """Layers without the window, counted from zero; `causal` does not apply to them either."""
    full_layer_sinks: bool = True
    """Whether `attention_sink` applies to `full_layers`."""
    causal: bool = False
    """Whether a slot sees only the slots of its block up to itself, as in speculators with a
    window."""
    window_counts_slots: bool = False
    """Whether the window of a slot ends at that slot, as in vLLM and ModelOpt: slot j sees j + 1
    positions of the text fewer."""
    attention_sink: bool = False
    """Whether each attention head learns a logit without a value, its sink."""
    qk_norm: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name, minimum in (("causal", 1), ("window_counts_slots", self.num_slots)):
            if getattr(self, name) and (self.sliding_window or 0) < minimum:
                raise InputError(
                    f"head.{name}=true needs head.sliding_window of at least {minimum}, got "
                    f"{self.sliding_window}; set it, or leave {name} out"
                )
        check_full_layers(self)

    @property
    def num_slots(self) -> int:
        """Number of slots of a block: its levels, and the anchor unless it is sampled from."""
        return self.depth + (not self.sample_from_anchor)


@dataclass(frozen=True, slots=True)
class BlockDraft:
    """State of a draft."""

    hidden: Float[Tensor, "batch depth width"]
    """Hidden states of all levels."""
    level: int
    """The last level whose logits were returned."""
    states: Float[Tensor, "batch node state"]
    """States of the nodes of that level."""
    summary: Float[Tensor, "batch node summary"]
    """Summary of the tokens of each node's path."""


class BlockHead(BorrowingHead):
    """Drafts a block from the fused features of the base and the embedding of the anchor.

    The anchor is the token after the position to draft from. Masks follow it. All slots of a block
    see one another and every position before the anchor, unless a window or a causal block limits
    them. The frozen projection of the base turns slots into logits.
    """

    borrows_projection = True
    has_own_fusion = True
    drafts_blocks = True
    layer_class: type[LlamaLayer] = LlamaLayer
    summary_size: int = 0
    """Width of its summary of the tokens of a path; zero for a head without it."""

    def __init__(self, config: BlockConfig, width: int, vocab_size: int) -> None:
        super().__init__(config, width, vocab_size)
        self.num_anchors = config.num_anchors
        if not -1 <= config.mask_token < vocab_size:
            raise InputError(
                f"head.mask_token must be -1 to {vocab_size - 1}, got {config.mask_token}; set it"
            )
        self.mask_token = config.mask_token % vocab_size
        self.fc = nn.Linear((len(self.aux_layers) or config.num_layers) * width, width, bias=False)
        self.hidden_norm = RMSNorm(width, config.epsilon)
        layers = (self.layer_class(config, width) for _ in range(config.num_layers))
        self.layers = nn.ModuleList(layers)
        if not config.full_layer_sinks:
            for index in config.full_layers:
                self.blocks()[index].self_attn.attention_sink_bias = None
        self.norm = RMSNorm(width, config.epsilon)

    def choose_aux_layers(self, num_layers: int) -> None:
        """Choose as many base layers as the head has layers, evenly from 2 to n - 2.

        A shallow base gives all layers but the last.
        """
        if self.aux_layers:
            return
        num_drafter_layers = self.config.num_layers
        # engines do not export the output of the last layer before the final norm
        inner, outer = (2, num_layers - 2), (1, max(num_layers - 1, 1))
        first, last = inner if num_layers - 4 >= num_drafter_layers - 1 else outer
        count = min(num_drafter_layers, last - first + 1)
        if count == 1:
            self.set_aux_layers([min(num_layers // 2 + 1, last)])
        else:
            step = (last - first) / (count - 1)
            self.set_aux_layers([round(first + index * step) for index in range(count)])
        if count < num_drafter_layers:
            device = self.fc.weight.device
            self.fc = nn.Linear(count * self.width, self.width, bias=False, device=device)

    def node_states(
        self, hidden: Tensor, tokens: Nodes, summary: Tensor, level: int
    ) -> Float[Tensor, "batch alike state"]:
        """Return the states after these tokens: here the hidden states of their level."""
        return hidden

    def read_tokens(self, tokens: Nodes, summary: Tensor) -> Float[Tensor, "batch node summary"]:
        """Return the summaries of paths that these tokens continue."""
        return summary

    def empty_summary(self, anchors: Nodes) -> Float[Tensor, "batch node summary"]:
        """Return the summaries of paths before their first tokens, the anchors."""
        return self.fc.weight.new_zeros(*anchors.shape, self.summary_size)

    def states(self, features: Features, tokens: Tokens, anchors: Anchors | None = None) -> States:
        """Draft one block from each anchor; other states are zero."""
        is_anchor = torch.ones_like(tokens, dtype=torch.bool) if anchors is None else anchors
        # rows with fewer anchors also draft from other positions, whose states are ignored
        # the meta device has no counts: use the positions before a label
        max_anchors = min(self.num_anchors, is_anchor.shape[1] - 2)
        num_anchors = max_anchors if is_anchor.is_meta else int(is_anchor.sum(1).max())
        columns = is_anchor.int().argsort(dim=1, descending=True, stable=True)
        columns = columns[:, :num_anchors].sort(1).values
        rows = torch.arange(len(tokens), device=tokens.device)[:, None]
        positions, fused = features.positions().expand_as(tokens), self._fuse(features)

        def mask(window: int | None) -> Bool[Tensor, "batch query time"]:
            visible = limit_to_window(features.causal_mask(), window)
            visible = visible.expand(len(tokens), -1, -1)[rows, columns]
            visible = visible.repeat_interleave(self.config.num_slots, dim=1)
            if window and self.config.window_counts_slots:
                ends = (columns[..., None] + 1 + self._slots()).flatten(1)[..., None]
                visible &= torch.arange(tokens.shape[1], device=tokens.device) > ends - window
            return visible

        texts = (layer.self_attn.project_keys_values(fused, positions) for layer in self.blocks())
        roots = tokens.roll(-1, 1)[rows, columns]
        hidden = self.draft_blocks(roots, positions[rows, columns] + 1, texts, mask)
        summary = self.empty_summary(roots)
        for level in range(self.depth):
            before = tokens.roll(-1 - level, 1)[rows, columns]
            summary = self.read_tokens(before, summary)
            states = self.node_states(hidden[:, :, level], before, summary, level)
            zeros = states.new_zeros(*tokens.shape, states.shape[-1])
            yield zeros.index_put((rows, columns), states)

    def memory(self, batch: int, capacity: int) -> HeadCache:
        """Return empty slots for the keys and values of committed positions in all layers."""
        windows = layer_windows(self.config, self.config.num_layers)
        return HeadCache.empty(self.blocks(), batch, capacity, windows)

    @torch.no_grad()
    def begin(self, committed: Committed, memory: HeadCache) -> Guesses:
        """Store the keys and values of all positions; draft the whole block after the root."""
        fused, root = self._fuse(committed.features), committed.root()
        positions, layers = memory.advance(fused.shape[1], committed.counts), self.blocks()
        fresh = [layer.self_attn.project_keys_values(fused, positions) for layer in layers]
        memory.write(torch.cat(fresh, dim=1), positions)

        def mask(window: int | None) -> Bool[Tensor, "batch query time"]:
            counts_slots = window and self.config.window_counts_slots
            ends = memory.lengths[:, None] + self._slots() if counts_slots else None
            return memory.visible(ends, window)

        texts = map(memory.text, range(len(layers)))
        hidden = self.draft_blocks(root, memory.lengths[:, None], texts, mask)
        return self.guess_level(hidden[:, 0], 0, root, self.empty_summary(root))

    @torch.no_grad()
    def extend(self, state: State, tokens: Nodes, parents: Nodes) -> Guesses:
        """Return the logits of the next level, which depend on each node's own path at most."""
        summary = pick_parents(state.summary, parents)
        return self.guess_level(state.hidden, state.level + 1, tokens, summary)

    def guess_level(self, hidden: Tensor, level: int, tokens: Tensor, summary: Tensor) -> Guesses:
        """Return the logits of a level, given the hidden states of all levels."""
        summary = self.read_tokens(tokens, summary)
        states = self.node_states(hidden[:, level : level + 1], tokens, summary, level)
        logits = self.logits(states, level).expand(-1, tokens.shape[1], -1)
        states = states.expand(-1, tokens.shape[1], -1)
        return logits, BlockDraft(hidden, level, states, summary)

    def draft_blocks(
        self,
        roots: Int[Tensor, "batch anchor"],
        starts: Int[Tensor, "batch anchor"],
        texts: Iterable[Tensor],
        mask: Callable[[int | None], Tensor],
    ) -> Float[Tensor, "batch anchor depth width"]:
        """Return the hidden states of the levels of blocks, with anchors `roots` at `starts`.

        `texts` are the keys and values of the features for each layer. `mask` returns that of a
        window over the features (batch, query, time); its query axis may be one.
        """
        windows, slots = layer_windows(self.config, self.config.num_layers), self._slots()
        masks = {
            window: block_mask(mask(window), len(slots), causal=bool(window) and self.config.causal)
            for window in {*windows}
        }
        tokens = torch.where(slots == 0, roots[..., None], self.mask_token)
        stream = self.embed(tokens, self.fc.weight).flatten(1, 2)
        positions = (starts[..., None] + slots).flatten(1)
        for layer, text, window in zip(self.blocks(), texts, windows, strict=True):
            inputs = layer.prepare(stream, positions)
            keys_values = torch.cat([text, inputs.keys_values], dim=3)
            stream = layer(inputs, AttentionContext(keys_values, masks[window]))
        hidden = self.norm(stream).unflatten(1, tokens.shape[1:])
        return hidden[:, :, self.config.num_slots - self.depth :]

    def blocks(self) -> list[LlamaLayer]:
        """Return its layers."""
        return cast(list[LlamaLayer], [*self.layers])

    def _slots(self) -> Int[Tensor, " slot"]:
        return torch.arange(self.config.num_slots, device=self.fc.weight.device)

    def _fuse(self, features: Features) -> Tensor:
        return self.hidden_norm(self.fc(self.streams(features)))


class CorrectedHead(BlockHead):
    """A state is [h, e]: the hidden state of its level, and the inputs of a linear correction.

    Its logits are W h + C e, with the base's projection W, so its own projection is [W, C].
    """

    adds_to_base_logits = True
    correction_name: ClassVar[str]
    """Name of the layer that computes C e."""

    def projection(self, level: int) -> Projection:
        """Return the projections of the base and of the correction, concatenated."""
        return self.corrected_projection(self.get_submodule(self.correction_name))

    def projections(self) -> list[Projection]:
        """Return the same projection for every level, concatenated once."""
        return [self.projection(0)] * self.depth

    def logits(self, state: Hidden, level: int) -> Float[Tensor, "*batch vocab"]:
        """Return the logits of a state of this level."""
        return self.corrected_logits(state, self.get_submodule(self.correction_name))


def join_hidden(
    hidden: Float[Tensor, "batch alike width"], inputs: Float[Tensor, "batch node rank"]
) -> Float[Tensor, "batch node state"]:
    """Return the hidden states of a level, concatenated with the inputs of a correction."""
    return torch.cat([hidden.expand(-1, inputs.shape[1], -1).to(inputs.dtype), inputs], dim=-1)


def block_mask(
    visible: Bool[Tensor, "batch alike time"], slots: int, *, causal: bool = False
) -> Bool[Tensor, "batch query key"]:
    """Append to a mask of slots over the text that over the slots of their block.

    A mask of one query is that of all slots of one block. With `causal` a slot sees its block up to
    itself.
    """
    if visible.shape[1] == 1:
        if not causal:
            return nn.functional.pad(visible, (0, slots), value=True)
        visible = visible.expand(-1, slots, -1)
    blocks = torch.arange(visible.shape[1], device=visible.device) // slots
    is_same = blocks[:, None] == blocks
    is_same = (is_same.tril() if causal else is_same).expand(len(visible), -1, -1)
    return torch.cat([visible, is_same], dim=2)


FIXED = PLAIN | {
    "attention_bias": False,
    "rope_type": "default",
    "use_aux_hidden_state": True,
    "attention_mode": "gqa",
    "output_multiplier": 1,
}
"""Settings of public checkpoints with the only supported value of each."""
OWN_SETTINGS: dict[str, tuple[str, ...]] = {
    "dflash": (),
    "dflash2": ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
    "domino": ("gru_hidden_dim", "emb_dim", "pure_draft_prefix_len"),
    "dspark": ("markov_rank",),
}
"""Settings of each kind that have the same name here and in public checkpoints."""
NETWORKS = {"dspark": "markov_rank", "dflash2": "selector_rank", "domino": "gru_hidden_dim"}
"""The setting that tells a network from DFlash."""
FIXED_MARKOV = {"markov_head_type": "vanilla", "confidence_head_with_markov": True}
"""The same for folders with a Markov head."""
CONFIDENCE = ("enable_confidence_head", "use_confidence_head")
"""Names of the setting of a confidence head: DeepSpec's and ModelOpt's."""
ANCHORED = ("sample_from_anchor", "shift_label")
"""Names of the setting of drafts from the anchor's slot, which Domino always has: speculators' and
ModelOpt's."""
SINK = ("attention_sink_bias", "add_swa_attention_sink_bias")
"""Names of the setting of sinks: ModelOpt's and that of bases, which vLLM reads in both places."""
USED = (
    *("block_size", "target_layer_ids", "aux_hidden_state_layer_ids", "mask_token_id"),
    *("sample_from_anchor", "draft_vocab_size", "dflash_config", "markov_rank"),
    # the next ones describe the base or the training
    *("num_target_layers", "num_anchors", "confidence_head_alpha", "shift_label"),
    *("loss_decay_gamma", "attention_backend"),
    # it is about layers with a window
    "sliding_window_non_causal",
    *SINK,
)
MODELOPT = ("use_swa", "swa_window_size", "causal")
"""Settings of a window in ModelOpt's folders."""
BY_DEEPSPEC = {"Qwen3DSparkModel", "LingDSparkModel", "DSparkDraftModel"}
"""Class names of one network, DeepSpec's and two more."""
BY_TRANSFORMERS = "muse_glimmer_assistant"
"""The `model_type` of transformers' only class of a DFlash head."""
RENAMED = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
"""Tensors of that class, and our names."""
BY_MODELOPT = ("markov_w1.", "markov_w2.", "confidence_proj.")
"""Starts of names of tensors in ModelOpt's folders of DSpark."""
COPIES = (
    *("embed_tokens.weight", "lm_head.weight"),
    *("verifier_lm_head.weight", "verifier_norm.weight"),
)
"""Copies of the base's tensors."""


def read_block(
    head: type[BlockHead], kind: type[BlockConfig], config: dict[str, Any], tensors: dict[str, Any]
) -> BlockHead | None:
    """Read a folder of z-lab, DeepSpec, speculators or transformers; None for another layout.

    A setting with an unsupported value is refused.
    """
    by_speculators = config.get("speculators_model_type", "")
    class_names = set(config.get("architectures") or ())
    by_deepspec = not by_speculators and bool(class_names & BY_DEEPSPEC)
    by_others = "dflash_config" in config or config.get("model_type") == BY_TRANSFORMERS
    is_read = by_speculators in OWN_SETTINGS or by_deepspec or by_others
    settings = config.get("transformer_layer_config", {}) | config.get("dflash_config", {}) | config
    network = next((kind for kind, name in NETWORKS.items() if settings.get(name)), "dflash")
    if not is_read or head.__module__.rpartition(".")[2] != network:
        return None
    window, fixed, used = _read_window(settings, network, by_deepspec=by_deepspec)
    weights = {_our_name(name): value for name, value in tensors.items()}
    sinks = [name for name in weights if name.endswith("attention_sink_bias")]
    has_confidence = any(name.startswith("confidence_head.") for name in weights)
    by_default = by_deepspec or by_speculators == "dspark"
    own = dict.fromkeys(ANCHORED, True) if network == "domino" else {}
    if network == "dspark":
        # the tensors decide
        own = FIXED_MARKOV | dict.fromkeys(CONFIDENCE, has_confidence)
    fixed |= FIXED | own | {"projector_type": "dspark" if by_default else network}
    scaling = read_rope_settings(settings)["rope_scaling"]
    refuse_unused(
        network,
        config,
        *(config.get(name, {}) for name in (*SECTIONS, "dflash_config")),
        {"rope_type": scaling.get("rope_type")},
        used=(*LAYERS, *SPECULATORS, *USED, *FIXED_MARKOV, *OWN_SETTINGS[network], *used),
        fixed=fixed | {"target_hidden_size": settings["hidden_size"]},
    )
    # in ModelOpt's and RadixArk's folders null is no choice
    shifted = settings.get("shift_label")
    shifted = by_default or network == "domino" if shifted is None else shifted
    anchored = settings.get("sample_from_anchor", shifted)
    # their ids count layer outputs from zero; here k is the residual stream after k layers
    layers = [layer + 1 for layer in settings.get("target_layer_ids") or ()]
    values = {
        # the default of Qwen3 in transformers
        "rope_theta": 10_000.0,
        **read_layer_settings(settings),
        # the other formats count the anchor's slot, which drafts nothing
        "depth": settings["block_size"] - (not (by_deepspec or anchored)),
        "num_layers": settings["num_hidden_layers"],
        "aux_layers": list(settings.get("aux_hidden_state_layer_ids") or layers),
        "mask_token": settings["mask_token_id"],
        "sample_from_anchor": anchored,
        **window,
        "full_layer_sinks": len(sinks) in (0, settings["num_hidden_layers"]),
        "attention_sink": any(settings.get(name) for name in SINK),
        **{name: settings[name] for name in OWN_SETTINGS[network]},
        **({"confidence_head": has_confidence} if network == "dspark" else {}),
    }
    # refused unless it is empty
    del values["rope_scaling"]
    block_head = head(kind(**values), settings["hidden_size"], settings["vocab_size"])
    copies = {name: weights.pop(name) for name in COPIES if name in weights}
    fill_head(block_head, weights)
    check_weights(copies)
    embedding, projection = map(copies.get, COPIES[:2])
    if embedding is not None and projection is not None and len(projection) == len(embedding):
        block_head.bind(embedding, projection)
    return block_head


def _read_window(
    settings: dict[str, Any], network: str, *, by_deepspec: bool
) -> tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]:
    """Return the settings of a window, the only values of others, and the names of used ones."""
    window, full_layers, fixed = draft_window(settings, settings.get("num_hidden_layers", 0))
    by_speculators, causal, used = bool(settings.get("speculators_model_type")), False, ()
    if by_speculators:
        bidirectional = settings.get("sliding_window_non_causal", network == "dflash2")
        causal = bool(window) and not bidirectional
    elif settings.get("use_swa"):
        # ModelOpt's window of all layers, which are still named full
        window, full_layers = settings.get("swa_window_size"), []
        window = window if is_allowed(PositiveInt, window) else None
        fixed, used = {"layer_types": "full_attention"}, MODELOPT
        # an explicit is_causal has priority, and must be false
        causal = bool(settings.get("causal")) and settings.get("is_causal") is None
    elif window and not by_deepspec and settings.get("model_type") != BY_TRANSFORMERS:
        # z-lab's layers with a window, and only they, are causal by default (sglang#34524)
        causal = settings.get("is_causal", settings.get("causal")) is not False
        used = ("is_causal", "causal") if causal and not full_layers else ()
    values = {
        "sliding_window": window,
        "full_layers": full_layers,
        "causal": causal,
        # attention that is not causal has the window on both sides of a slot in z-lab's code
        "window_counts_slots": bool(window) and not by_speculators,
    }
    return values, fixed, used


def _our_name(name: str) -> str:
    """Return our name of a tensor."""
    if name.startswith(BY_MODELOPT):
        name = name.replace("confidence_proj.", "confidence_head.proj.")
        return name if name.startswith("confidence") else f"markov_head.{name}"
    return RENAMED.get(name, name)
