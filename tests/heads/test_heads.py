"""The contract of every head; the folder is the list of kinds."""

import dataclasses
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F  # noqa: N812
from transformers import AutoConfig, AutoModelForCausalLM

from specheads.base.model import FrozenBase
from specheads.core.drafter import Features, Head
from specheads.core.features import Committed
from specheads.decoding.generate import generate
from specheads.decoding.trees import policies
from specheads.heads.load import build_for_base, build_head, copy_head, kinds, load_head
from specheads.measure.offline import offline_logits
from tests import tiny
from tests.slow import slow_except

GOLDEN = Path(__file__).parents[1] / "golden"
KINDS = kinds()
GROUPED = {"attention_heads": 4, "key_value_heads": 2, "num_layers": 2}
STRETCHED = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
GLM = {"model_type": "glm4_moe", "n_routed_experts": 3, "num_experts_per_tok": 2, "n_group": 1}
GLM |= {"n_shared_experts": 1, "moe_intermediate_size": 16, "topk_group": 1}
QWEN = {"model_type": "qwen3_next", "num_experts": 3, "num_experts_per_tok": 2}
QWEN |= {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "dflash": [
        {"sample_from_anchor": True, **GROUPED},
        {"sliding_window": 3, "causal": True},
        {"sliding_window": 8, "window_counts_slots": True, "attention_sink": True},
        {"num_layers": 2, "sliding_window": 3, "causal": True, "full_layers": [1]},
    ],
    "dflash2": [
        {"sample_from_anchor": True, "conv_kernel_size": 3, "selector_top_k": 4, **GROUPED},
        {"num_layers": 2, "sliding_window": 3, "causal": True, "full_layers": [1]},
    ],
    "domino": [
        {"sample_from_anchor": False, "gru_hidden_dim": 5, "emb_dim": 3, **GROUPED},
        {
            **{"num_layers": 2, "sliding_window": 3, "pure_draft_prefix_len": 0, "emb_dim": 3},
            **{"gru_hidden_dim": 6, "uncorrected_loss": 0.0},
        },
    ],
    "dspark": [
        {"sample_from_anchor": False, "markov_rank": 3, "mask_token": 5, **GROUPED},
        {"num_layers": 2, "sliding_window": 3},
        {
            **{"num_layers": 2, "sliding_window": 3, "full_layers": [0], "attention_sink": True},
            **{"full_layer_sinks": False, "confidence_head": False},
        },
    ],
    "eagle3": [
        {"norm_before_residual": True, "depth": 5, "attention_heads": 4, "key_value_heads": 2},
        {"num_layers": 3, "fc_norm": True, "norm_output": True},
        {"norm_before_fc": True, "rope_scaling": STRETCHED, "own_embedding": True},
        {"parallel": True, "mask_token": 5, "fc_norm": True, "own_embedding": True},
        {"num_layers": 2, "sliding_window": 3, "attention_sink": True},
        {"num_layers": 3, "sliding_window": 3, "full_layers": [0, 2]},
        {"parallel": True, "num_layers": 2, "sliding_window": 7, "full_layers": [1]},
    ],
    "eagle_gru": [
        {"attention_heads": 4, "key_value_heads": 2},
        {"sliding_window": 3, "attention_sink": True},
        {"text_attention": False},
    ],
    "hydra_heads": [
        {"prefix": False, "num_layers": 1, "aux_layers": []},
        {"aux_layers": [0, 3]},
    ],
    "medusa": [{"projection": "shared", "num_layers": 2}, {"projection": "low_rank", "rank": 3}],
    "mlp_speculator": [
        {"tie_weights": False, "inner_dim": 24, "aux_layers": []},
        {"state": "gated", "tie_weights": False, "inner_dim": 24, "scale_input": False},
    ],
    "mtp": [
        {"hidden_first": True, "attention_bias": True, "rope_scaling": STRETCHED},
        {"qk_norm": True, "attention_heads": 4, "key_value_heads": 2, "aux_layers": [1]},
        {"rotary_share": 0.5, "attention_heads": 4, "experts": GLM},
        {"output_gate": True, "qk_norm": True, "experts": QWEN},
    ],
    "redrafter": [{"rnn": False}, {"exit_dim": 24, "aux_layers": []}],
}
"""Settings that make another network of a kind; every kind is checked as it comes, too."""

CASES = [{"kind": kind, **variant} for kind in KINDS for variant in [{}, *VARIANTS.get(kind, [])]]
TIME = 14


def told(settings: dict[str, Any]) -> str:
    """Return the name of a case in pytest's output."""
    names = (
        value.get("model_type", value) if isinstance(value, dict) else value
        for value in settings.values()
    )
    return "-".join(map(str, names))


def rounding(settings: dict[str, Any]) -> float:
    """Return the tolerance in float64: transformers routes to experts in float32."""
    return 1e-6 if "experts" in settings else 1e-12


each_case = pytest.mark.parametrize("settings", CASES, ids=told)


@pytest.fixture(scope="module")
def base() -> FrozenBase:
    return tiny.base("llama")


def make(settings: dict[str, Any], base: FrozenBase) -> Head:
    """Return an untrained head with random tensors in float64."""
    torch.manual_seed(1)
    head = build_for_base({"depth": 3, **settings}, base).double().eval()
    for parameter in head.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return head


def read(
    base: FrozenBase, aux_layers: tuple[int, ...] = (), seed: int = 0
) -> tuple[Features, torch.Tensor]:
    tokens = torch.randint(base.vocab_size, (2, TIME), generator=torch.manual_seed(seed))
    return base.read(tokens, aux_layers), tokens


def calibration_rows(features: Features) -> list[Features]:
    """Return the features of all positions in two parts."""
    masks = torch.zeros(2, *features.hidden.shape[:2], dtype=torch.bool)
    masks[0, :, :3], masks[1, :, 3:] = True, True
    return [features.select_positions(mask) for mask in masks]


def until(features: Features, time: int) -> Features:
    """Return the features of the first positions."""
    return features.gather(torch.arange(time).expand(2, -1))


@each_case
def test_every_parameter_gets_a_gradient(settings: dict, base: FrozenBase):
    head = make(settings, base)
    features, tokens = read(base, head.aux_layers)
    logits = offline_logits(head, features, tokens)
    assert len(logits) == head.depth
    loss = sum(
        F.cross_entropy(value.flatten(0, 1), tokens[:, 2 + level :].flatten())
        for level, value in enumerate(logits)
    )
    assert isinstance(loss, torch.Tensor)
    text = [head.confidence_logits(state) for state in head.states(features, tokens)]
    sum((value.sum() for value in text if value is not None), loss).backward()
    idle = [
        name
        for name, value in head.named_parameters()
        if value.grad is None or not value.grad.abs().max() > 0
    ]
    assert idle == []


@each_case
def test_states_at_anchors_equal_states_without_anchors(settings: dict, base: FrozenBase):
    head = make(settings, base)
    features, tokens = read(base, head.aux_layers)
    anchors = torch.rand(tokens.shape, generator=torch.manual_seed(5)) < 0.3
    # ragged: as random anchors are
    assert len(set(anchors.sum(1).tolist())) > 1
    everywhere = list(head.states(features, tokens))
    selected_states = list(head.states(features, tokens, anchors))
    assert len(selected_states) == len(everywhere) == head.depth
    for selected, all_of_them in zip(selected_states, everywhere, strict=True):
        torch.testing.assert_close(selected[anchors], all_of_them[anchors], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "settings", slow_except([{"kind": kind} for kind in KINDS], CASES), ids=told
)
def test_16_bit_features_and_float32_weights_give_no_warning(settings: dict):
    # warnings are errors in the tests, and torch shows this one once per process
    base = tiny.base(dtype=torch.bfloat16)
    head = build_for_base(settings, base).train()
    assert {value.dtype for value in head.parameters()} == {torch.float32}
    features, tokens = read(base, head.aux_layers)
    torch.set_warn_always(True)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            logits = offline_logits(head, features, tokens)
    finally:
        torch.set_warn_always(False)
    assert all(value.isfinite().all() for value in logits)


@each_case
def test_ragged_rows_read_in_pieces_draft_as_trained(settings: dict, base: FrozenBase):
    """begin and extend along the true tokens give the logits that states() trains."""
    head = make(settings, base)
    features, tokens = read(base, head.aux_layers)
    memory, ends = head.memory(2, 32), torch.zeros(2, dtype=torch.long)
    for counts in (torch.tensor([2, 5]), torch.tensor([4, 1])):
        steps = torch.arange(int(counts.max()))
        positions = ends[:, None] + steps
        # the padding of a row must not be visible
        padding, piece = (steps >= counts[:, None])[..., None], features.gather(positions)
        aux = None if piece.aux is None else piece.aux.masked_fill(padding, 9.0)
        piece = Features(piece.hidden.masked_fill(padding, 9.0), aux)
        committed = Committed(piece, tokens.gather(1, positions + 1), counts)
        logits, state = head.begin(committed, memory)
        ends = ends + counts
    for level, trained in enumerate(offline_logits(head, features, tokens)):
        reference = trained[torch.arange(2), ends - 1]
        torch.testing.assert_close(logits[:, 0], reference, rtol=0, atol=rounding(settings))
        node = tokens.gather(1, ends[:, None] + 1 + level)
        if level + 1 < head.depth:
            logits, state = head.extend(state, node, torch.zeros_like(node))


@each_case
def test_siblings_are_drafted_from_their_own_parent(settings: dict, base: FrozenBase):
    """Each node of a level has the logits of drafting it alone."""
    head = make(settings, base)
    features, tokens = read(base, head.aux_layers)
    count = torch.full((2,), TIME - 1)
    committed = Committed(until(features, TIME - 1), tokens[:, 1:], count)
    nodes = torch.tensor([[3, 9, 27], [4, 16, 1]])
    _, state = head.begin(committed, head.memory(2, 64))
    _, state = head.extend(state, nodes, torch.zeros_like(nodes))
    below = torch.tensor([[5, 6], [7, 8]])
    parents = torch.tensor([[2, 0], [1, 2]])
    together, _ = head.extend(state, below, parents)
    for index in range(2):
        _, alone = head.begin(committed, head.memory(2, 64))
        above = nodes.gather(1, parents[:, index : index + 1])
        _, alone = head.extend(alone, above, torch.zeros_like(above))
        value = below[:, index : index + 1]
        logits, _ = head.extend(alone, value, torch.zeros_like(value))
        torch.testing.assert_close(
            together[:, index], logits[:, 0], rtol=0, atol=rounding(settings)
        )


@each_case
def test_no_depth_reads_later_tokens(settings: dict, base: FrozenBase):
    """Depth k at position t has read tokens up to t + 1 + k: later ones change nothing."""
    head = make(settings, base)
    features, tokens = read(base, head.aux_layers)
    # a row for each text and each position from which on it is changed
    first = torch.arange(2, TIME).repeat_interleave(len(tokens))[:, None]
    copies = TIME - 2, 1, 1
    hidden, tokens = features.hidden.repeat(copies), tokens.repeat(copies[:2])
    aux = None if features.aux is None else features.aux.repeat(copies)
    before = offline_logits(head, Features(hidden, aux), tokens)
    later = (torch.arange(TIME) >= first)[..., None].double()
    changed = torch.where(torch.arange(TIME) == first, (tokens + 1) % base.vocab_size, tokens)
    aux = None if aux is None else aux + later
    after = offline_logits(head, Features(hidden + later, aux), changed)
    for level, (old, new) in enumerate(zip(before, after, strict=True)):
        is_before = torch.arange(old.shape[1]) < first - 1 - level
        assert is_before.any()
        torch.testing.assert_close(old[is_before], new[is_before], rtol=0, atol=0)


POLICIES = {
    "static": policies.Static([(0,), (1,), (0, 0), (1, 2), (0, 0, 1)]),
    "chain": policies.chain(3),
    "best_first": policies.BestFirst(9, 3),
}
STATIC = [(case, "static") for case in CASES]
OTHERS = [({"kind": kind}, policy) for kind in KINDS for policy in ("chain", "best_first")]


@pytest.mark.parametrize(
    ("settings", "policy"),
    # every network with one tree
    slow_except([*STATIC, ({"kind": "eagle3"}, "best_first")], [*STATIC, *OTHERS]),
    ids=lambda choice: choice if isinstance(choice, str) else told(choice),
)
def test_tree_decoding_reproduces_greedy(settings: dict, policy: str, base: FrozenBase):
    head = make(settings, base)
    prompts = tiny.prompts()
    result = generate(base, head, prompts, max_new_tokens=14, tree=POLICIES[policy])
    assert result.tokens == [text[:14] for text in tiny.continuations()]


@each_case
def test_borrowed_tensors_are_neither_trained_nor_saved(settings: dict, base: FrozenBase):
    head = make(settings, base)
    lent = {base.embedding.data_ptr(), base.projection.weight.data_ptr()}
    own = [*head.parameters(), *head.state_dict().values()]
    assert not {value.data_ptr() for value in own} & lent
    borrowed = dict(head.named_buffers()).keys() - head.state_dict().keys()
    assert {head.get_buffer(name).data_ptr() for name in borrowed} <= lent


@pytest.mark.parametrize("architecture", ["llama", "granite"])
@pytest.mark.parametrize(
    "settings",
    [
        {"kind": "hydra_heads", "prefix": False},
        *({"kind": "medusa", "projection": choice} for choice in ("own", "shared", "low_rank")),
        *({"kind": "redrafter", "exit_dim": choice} for choice in (0, 32, 40)),
    ],
    ids=told,
)
def test_an_untrained_head_gives_the_logits_of_the_base(settings: dict, architecture: str):
    """This includes Granite, which scales its logits after the projection."""
    base = tiny.base(architecture)
    head = build_for_base(settings, base).double()
    features, tokens = read(base)
    base_logits = base.projection(features.hidden)
    for level, logits in enumerate(offline_logits(head, features, tokens)):
        # the head starts from float32 copies of the base's tensors
        torch.testing.assert_close(logits, base_logits[:, : TIME - 2 - level], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("projection", ["shared", "low_rank"])
def test_an_untrained_head_has_the_bias_of_the_projection_it_borrows(projection: str):
    base = tiny.biased()
    head = build_for_base({"kind": "medusa", "projection": projection}, base).double()
    features, tokens = read(base)
    base_logits = base.logits_of(features.hidden)
    for level, logits in enumerate(offline_logits(head, features, tokens)):
        torch.testing.assert_close(logits, base_logits[:, : TIME - 2 - level], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        *(
            {"kind": kind, "draft_tokens": size}
            for kind in ("dflash", "dspark")
            for size in (0, 20)
        ),
        *({"kind": "medusa", "projection": choice} for choice in ("shared", "low_rank")),
        {"kind": "mtp"},
    ],
    ids=told,
)
def test_a_borrowed_bias_counts_in_the_loss_and_in_drafts(settings: dict):
    base = tiny.biased()
    head = make(
        {"attention_heads": 4, **settings} if settings["kind"] != "medusa" else settings, base
    )
    bias = base.projection.bias
    assert bias is not None
    bias = bias if head.draft_ids is None else bias[head.draft_ids]
    features, tokens = read(base, head.aux_layers)
    with torch.no_grad():
        state = next(head.states(features, tokens))
    weight, added = head.projection(0)
    assert added is not None
    assert torch.equal(added, bias)
    torch.testing.assert_close(head.logits(state, 0), state @ weight.T + bias)
    assert not [name for name in head.state_dict() if "borrowed" in name]


@pytest.mark.parametrize("kind", ["hydra_heads", "mlp_speculator", "mtp", "redrafter"])
def test_a_head_with_aux_layers_starts_as_the_head_without_them(kind: str, base: FrozenBase):
    plain = build_for_base({"kind": kind}, base).double()
    head: Any = build_for_base({"kind": kind, "aux_layers": []}, base).double()
    assert head.aux_layers == (0, 1, 2)
    missing = head.load_state_dict(plain.state_dict(), strict=False)
    assert missing == (["fc.weight"], [])
    features, tokens = read(base, head.aux_layers)
    pairs = zip(*(offline_logits(value, features, tokens) for value in (plain, head)), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    # a trained one reads each stream divided by its RMS
    nn.init.eye_(head.fc.weight.data[:, base.width :])
    assert features.aux is not None
    stream = features.aux[..., base.width : 2 * base.width]
    normed = stream / stream.square().mean(-1, keepdim=True).sqrt()
    fused = head.fuse_streams(features).hidden - features.hidden
    torch.testing.assert_close(fused, normed, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_init_from_base_starts_as_the_last_layer_of_the_base(kind: str, base: FrozenBase):
    head: Any = build_for_base(
        {"kind": kind, "aux_layers": [2], "init_from_base": True}, base
    ).double()
    assert not head.settings()["init_from_base"]
    attention = head.blocks()[0].self_attn
    assert (attention.num_key_value_heads, attention.head_dim) == (2, 8)
    features, tokens = read(base, head.aux_layers)
    # the stream before the last layer gives the base's own next tokens, whatever the token read
    for level, logits in enumerate(offline_logits(head, features, tokens)[:1]):
        base_logits = base.projection(features.hidden)[:, : TIME - 2 - level]
        assert torch.equal(logits.argmax(-1), base_logits.argmax(-1))


@pytest.mark.parametrize("parallel", [False, True], ids=["eagle3", "peagle"])
def test_a_saved_head_drafts_from_unscaled_streams_as_the_trained_one(
    parallel: bool, base: FrozenBase, tmp_path: Path
):
    head: Any = make({"kind": "eagle3", "parallel": parallel}, base)
    features, tokens = read(base, head.aux_layers)
    before = offline_logits(head, features, tokens)
    head.calibrate(calibration_rows(features), lambda sums: sums)
    assert features.aux is not None
    streams = features.aux.unflatten(-1, (-1, head.width))
    rms = streams.square().mean(-1).sqrt()
    torch.testing.assert_close(head.stream_scale.double(), rms.log().mean((0, 1)).exp())
    scaled = offline_logits(head, features, tokens)
    assert not any(torch.allclose(*pair) for pair in zip(before, scaled, strict=True))
    head.save_pretrained(tmp_path)
    assert "stream_scale" not in load_file(tmp_path / "model.safetensors")
    again: Any = load_head(tmp_path, base)
    for pair in zip(scaled, offline_logits(again, features, tokens), strict=True):
        # weights are loaded in float32
        torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("settings", [{"norm_before_fc": True}, {"fc_norm": True}], ids=told)
def test_streams_that_a_norm_follows_are_not_scaled(settings: dict, base: FrozenBase):
    head: Any = build_for_base({"kind": "eagle3", **settings}, base)
    features, _ = read(base, head.aux_layers)
    head.calibrate(calibration_rows(features), lambda sums: sums)
    assert head.stream_scale is None


@pytest.mark.parametrize(
    ("settings", "architecture", "message"),
    [
        (
            {"kind": "eagle3", "inner_dim": 40},
            "llama",
            r"down_proj.weight of \(32, 48\)",
        ),
        ({"kind": "mtp"}, "qwen3", r"self_attn.k_norm.weight of \(8,\) in the base and None"),
        ({"kind": "mtp"}, "gpt2", "needs the layers of a base like Llama"),
    ],
)
def test_init_from_base_refuses_a_layer_of_another_shape(
    settings: dict, architecture: str, message: str
):
    with pytest.raises(ValueError, match=message):
        build_for_base({**settings, "init_from_base": True}, tiny.base(architecture))


def test_a_base_with_fewer_logits_than_embeddings_is_refused():
    base = tiny.own_base()
    base.model.lm_head.weight.data = base.model.lm_head.weight[:50].clone()
    with pytest.raises(ValueError, match="'llama' has 50 logits for 61 rows"):
        build_for_base({"kind": "medusa"}, FrozenBase(base.model))


def test_a_base_whose_final_states_are_narrower_than_its_layers_is_refused():
    # OPT-350m has layers of 1024 channels, and projects the last stream to 512
    sizes = {"hidden_size": 32, "ffn_dim": 48, "num_attention_heads": 4, "num_hidden_layers": 2}
    config = AutoConfig.for_model("opt", **sizes, vocab_size=61, word_embed_proj_dim=16)
    with torch.random.fork_rng(devices=[]):
        base = FrozenBase(AutoModelForCausalLM.from_config(config, dtype=torch.float64))
    with pytest.raises(ValueError, match="'opt' has 16 of 32 channels"):
        build_for_base({"kind": "medusa"}, base)


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("granite", {}),
        ("smollm3", {"no_rope_layers": [1, 1, 0]}),
        ("llama", {"hidden_act": "gelu"}),
    ],
)
def test_init_from_base_refuses_a_layer_that_computes_something_else(
    architecture: str, changes: dict, kind: str
):
    base = tiny.own_base(architecture, **changes)
    with pytest.raises(ValueError, match="computes what a Llama layer does"):
        build_for_base({"kind": kind, "init_from_base": True}, base)


@pytest.mark.parametrize("settings", CASES, ids=told)
def test_a_saved_head_is_loaded_unchanged(settings: dict, base: FrozenBase, tmp_path: Path):
    head = make(settings, base).float()
    head.save_pretrained(tmp_path)
    again = load_head(tmp_path, tiny.base("llama", dtype=torch.float32))
    assert again.kind == settings["kind"]
    for name, value in head.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    features, tokens = read(tiny.base("llama", dtype=torch.float32), head.aux_layers)
    for result, reference in zip(
        offline_logits(head, features, tokens), offline_logits(again, features, tokens), strict=True
    ):
        # a loaded head has another memory layout, so sums may round differently
        torch.testing.assert_close(result, reference)


def _mlp(folder: Path) -> Path:
    build_head({"kind": "mlp_speculator"}, width=8, vocab_size=11).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("ln.0.bias"), r'Missing key.* "ln\.0\.bias"'),
        (lambda t: t.update({"ln.9.bias": torch.ones(8)}), r'Unexpected key.* "ln\.9\.bias"'),
        (
            lambda t: t.update({"proj.0.weight": torch.ones(8, 9)}),
            r"mismatch for proj\.0\.weight.*\[8, 9\].*\[8, 8\]",
        ),
    ],
    ids=["missing", "left over", "misshapen"],
)
def test_a_checkpoint_that_does_not_fit_is_refused(change, message: str, tmp_path: Path):
    tensors = load_file(_mlp(tmp_path) / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load_head(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "os.system"}, "head kind must be one of"),
        ({"kind": "medusa", "inner_dim": 3}, "head=medusa has no setting 'inner_dim'"),
        ({"depth": 3}, "got None"),
        ({"kind": "medusa", "depth": 0}, "depth must be a whole number, at least 1"),
    ],
)
def test_settings_a_head_does_not_have_are_refused_by_name(settings: dict, message: str):
    with pytest.raises(ValueError, match=message):
        build_head(settings, width=8, vocab_size=11)


def test_a_head_for_another_base_is_refused(base: FrozenBase, tmp_path: Path):
    with pytest.raises(ValueError, match="made for a base of width 8, this base has 32"):
        load_head(_mlp(tmp_path), base)
    build_head({"kind": "medusa"}, width=32, vocab_size=67).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="made for a base of vocab_size 67, this base has 61"):
        load_head(tmp_path, base)


def test_a_folder_without_a_known_layout_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"needs a config\.json, and .* has none; .*RUN/head"):
        load_head(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ValueError, match="needs weights"):
        load_head(tmp_path)
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="'llama'"):
        load_head(tmp_path)


def _reducible(settings: dict) -> bool:
    module = importlib.import_module(f"specheads.heads.kinds.{settings['kind']}")
    return "draft_tokens" in {field.name for field in dataclasses.fields(module.Config)}


each_reduced = pytest.mark.parametrize(
    "settings", [{**case, "draft_tokens": 20} for case in CASES if _reducible(case)], ids=told
)


@each_reduced
def test_a_reduced_vocabulary_drafts_its_own_tokens_and_stays_lossless(
    settings: dict, base: FrozenBase
):
    counts = torch.randint(1, 100, (base.vocab_size,), generator=torch.manual_seed(2))
    head = build_for_base(settings, base, counts).double().eval()
    allowed = set(counts.topk(20).indices.tolist())
    assert head.draft_ids is not None
    assert set(head.draft_ids.tolist()) == allowed
    assert head.projection(0)[0].shape[0] == 20
    prompts = tiny.prompts()
    alone = [text[:6] for text in tiny.continuations()]
    selected = policies.BestFirst(6, 2), policies.Beam(3, 2), policies.Static([(0,), (1,), (0, 0)])
    # all of them with each kind as it comes
    for policy in selected if len(settings) == 2 else selected[:1]:
        assert generate(base, head, prompts, max_new_tokens=6, tree=policy).tokens == alone
        features, tokens = read(base, head.aux_layers)
        count = torch.full((2,), TIME - 1)
        before = until(features, TIME - 1)
        tree = policy.grow(head, Committed(before, tokens[:, 1:], count), head.memory(2, 64))
        assert set(tree.tokens[:, 1:].flatten().tolist()) <= allowed


def test_a_copy_shares_borrowed_tensors_and_no_parameters(base: FrozenBase):
    head = build_for_base({"kind": "eagle3", "depth": 2, "draft_tokens": 20}, base)
    copy = copy_head(head)
    assert dict(copy.named_buffers()) == dict(head.named_buffers())
    pairs = zip(copy.parameters(), head.parameters(), strict=True)
    assert not [1 for result, reference in pairs if result.data_ptr() == reference.data_ptr()]


@each_reduced
def test_a_reduced_vocabulary_is_saved_with_the_head(
    settings: dict, base: FrozenBase, tmp_path: Path
):
    counts = torch.arange(base.vocab_size)
    head = build_for_base(settings, base, counts)
    head.save_pretrained(tmp_path)
    again = load_head(tmp_path)
    assert again.draft_ids is not None
    assert again.draft_ids.tolist() == list(range(base.vocab_size - 20, base.vocab_size))
    assert again.coverage(counts) == pytest.approx(sum(range(41, 61)) / sum(range(61)))
    d2t, t2d = again.draft_maps()
    assert d2t.tolist() == [base.vocab_size - 20] * 20
    assert t2d.nonzero()[:, 0].tolist() == again.draft_ids.tolist()


def test_tokens_and_columns_convert_both_ways():
    #  tokens   0 1 2 3 4 5       drafted  1 4 5   in columns  0 1 2
    head = build_head({"kind": "medusa", "draft_tokens": 3}, width=4, vocab_size=6)
    head.choose_vocabulary(torch.tensor([0, 9, 0, 0, 7, 8]))
    assert head.to_drafted(torch.arange(6)).tolist() == [-1, 0, -1, -1, 1, 2]
    assert head.to_tokens(torch.arange(3)).tolist() == [1, 4, 5]
