"""The contract every head fulfils; the list of heads is the folder."""

import dataclasses
import importlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F  # noqa: N812

from specheads import grow, heads
from specheads.base import FrozenBase
from specheads.decode import generate
from specheads.drafter import Features, Head
from specheads.measure.offline import offline_logits
from tests import tiny

GOLDEN = Path(__file__).with_name("golden")
KINDS = heads.kinds()
TIME = 14


@pytest.fixture(scope="module")
def base() -> FrozenBase:
    return tiny.base("llama")


def make(kind: str, base: FrozenBase) -> Head:
    """Return an untrained head whose every tensor is random, in float64."""
    torch.manual_seed(1)
    head = heads.build_for({"kind": kind, "depth": 3}, base).double().eval()
    for parameter in head.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return head


def read(
    base: FrozenBase, taps: tuple[int, ...] = (), seed: int = 0
) -> tuple[Features, torch.Tensor]:
    tokens = torch.randint(base.vocab_size, (2, TIME), generator=torch.manual_seed(seed))
    return base.read(tokens, taps), tokens


def until(features: Features, time: int) -> Features:
    """Return the features of the first positions."""
    return features.at(torch.arange(time).expand(2, -1))


def test_the_folder_holds_the_kinds_of_the_first_release():
    assert {"medusa", "mlp_speculator"} <= set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_learns(kind: str, base: FrozenBase):
    head = make(kind, base)
    features, tokens = read(base, head.taps)
    logits = offline_logits(head, features, tokens)
    assert len(logits) == head.depth
    loss = sum(
        F.cross_entropy(one.flatten(0, 1), tokens[:, 2 + level :].flatten())
        for level, one in enumerate(logits)
    )
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    idle = [
        name
        for name, value in head.named_parameters()
        if value.grad is None or not value.grad.abs().max() > 0
    ]
    assert idle == []


@pytest.mark.parametrize("kind", KINDS)
def test_drafting_a_chain_agrees_with_training(kind: str, base: FrozenBase):
    """begin/extend along the true tokens give the logits that states() trains."""
    head = make(kind, base)
    features, tokens = read(base, head.taps)
    place = 7
    trained = [logits[:, place] for logits in offline_logits(head, features, tokens)]
    committed = until(features, place + 1)
    count = torch.full((2,), place + 1)
    logits, state = head.begin(
        committed, tokens[:, 1 : place + 2], count, head.memory(2, capacity=64)
    )
    drafted = [logits[:, 0]]
    for level in range(1, head.depth):
        node = tokens[:, place + 1 + level][:, None]
        logits, state = head.extend(state, node, torch.zeros_like(node))
        drafted.append(logits[:, 0])
    for ours, theirs in zip(drafted, trained, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_siblings_are_drafted_from_their_own_parent(kind: str, base: FrozenBase):
    """A level of several nodes gives each the logits it has when drafted alone."""
    head = make(kind, base)
    features, tokens = read(base, head.taps)
    count = torch.full((2,), TIME - 1)
    arguments = (until(features, TIME - 1), tokens[:, 1:], count)
    nodes = torch.tensor([[3, 9, 27], [4, 16, 1]])
    _, state = head.begin(*arguments, head.memory(2, 64))
    _, state = head.extend(state, nodes, torch.zeros_like(nodes))
    below = torch.tensor([[5, 6], [7, 8]])
    parents = torch.tensor([[2, 0], [1, 2]])
    together, _ = head.extend(state, below, parents)
    for place in range(2):
        _, alone = head.begin(*arguments, head.memory(2, 64))
        above = nodes.gather(1, parents[:, place : place + 1])
        _, alone = head.extend(alone, above, torch.zeros_like(above))
        one = below[:, place : place + 1]
        logits, _ = head.extend(alone, one, torch.zeros_like(one))
        torch.testing.assert_close(together[:, place], logits[:, 0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_no_depth_reads_a_token_it_must_not_have_read(kind: str, base: FrozenBase):
    """Depth k at position t has read tokens up to t + 1 + k: later ones change nothing."""
    head = make(kind, base)
    features, tokens = read(base, head.taps)
    before = offline_logits(head, features, tokens)
    for changed in range(2, TIME):
        other = tokens.clone()
        other[:, changed] = (other[:, changed] + 1) % base.vocab_size
        later = (torch.arange(TIME) >= changed)[:, None].double()
        taps = None if features.taps is None else features.taps + later
        after = offline_logits(head, Features(features.hidden + later, taps), other)
        for level, (old, new) in enumerate(zip(before, after, strict=True)):
            free = max(changed - 1 - level, 0)
            torch.testing.assert_close(old[:, :free], new[:, :free], rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "policy",
    [grow.chain(3), grow.Static([(0,), (1,), (0, 0), (1, 2), (0, 0, 1)]), grow.BestFirst(9, 3)],
    ids=["chain", "static", "best_first"],
)
def test_tree_decoding_reproduces_greedy(kind: str, policy: grow.Policy, base: FrozenBase):
    head = make(kind, base)
    prompts = tiny.prompts()
    alone = generate(base, None, prompts, max_new_tokens=24)
    ours = generate(base, head, prompts, max_new_tokens=24, tree=policy)
    assert ours.tokens == alone.tokens
    assert alone.forwards == [23, 23, 23]


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_head_comes_back_the_same(kind: str, base: FrozenBase, tmp_path: Path):
    head = make(kind, base).float()
    head.save_pretrained(tmp_path)
    again = heads.load_head(tmp_path, tiny.base("llama", dtype=torch.float32))
    assert again.kind == kind
    for name, value in head.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    features, tokens = read(tiny.base("llama", dtype=torch.float32), head.taps)
    for ours, theirs in zip(
        offline_logits(head, features, tokens), offline_logits(again, features, tokens), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_at_step_zero_medusa_says_what_the_base_says():
    """Also on Granite, whose logits are scaled after the projection."""
    for architecture in ("llama", "granite"):
        base = tiny.base(architecture)
        head = heads.build_for({"kind": "medusa"}, base).double()
        features, tokens = read(base)
        own = base.project(features.hidden)
        for level, logits in enumerate(offline_logits(head, features, tokens)):
            # the head starts from float32 copies of the base's tensors
            torch.testing.assert_close(logits, own[:, : TIME - 2 - level], rtol=1e-5, atol=1e-5)


def test_one_more_medusa_layer_adds_its_own_parameters():
    one = heads.build({"kind": "medusa", "num_layers": 1}, width=8, vocab_size=11)
    two = heads.build({"kind": "medusa", "num_layers": 2}, width=8, vocab_size=11)
    counts = [sum(value.numel() for value in head.parameters()) for head in (one, two)]
    assert counts[1] - counts[0] == 5 * (8 * 8 + 8)


@pytest.mark.parametrize(
    ("settings", "width", "vocab_size", "parameters"),
    [
        # llama-13b-accelerator, granite-20b-code, llama3-8b, llama3-70b as published
        ({"inner_dim": 4096, "tie_weights": False}, 5120, 32000, 840_982_528),
        (
            {"inner_dim": 4096, "tie_weights": False, "depth": 4},
            6144,
            49152,
            1_686_142_976,
        ),
        (
            {"inner_dim": 3072, "tie_weights": False, "depth": 4},
            4096,
            128256,
            3_192_938_496,
        ),
        ({"inner_dim": 3584, "tie_weights": True, "depth": 4}, 8192, 128256, 961_551_360),
    ],
)
def test_an_mlp_speculator_has_the_published_number_of_parameters(
    settings: dict, width: int, vocab_size: int, parameters: int
):
    with torch.device("meta"):
        head = heads.build(
            {"kind": "mlp_speculator", **settings}, width=width, vocab_size=vocab_size
        )
    assert sum(value.numel() for value in head.parameters()) == parameters


@pytest.mark.parametrize(
    ("depth", "inner", "state_weight", "token_weight"),
    [
        (3, 4096, 0.890899, 20.554837),
        (4, 3072, 0.917004, 15.632757),
        (5, 6144, 0.933033, 19.941632),
    ],
)
def test_old_and_new_are_weighed_as_published(
    depth: int, inner: int, state_weight: float, token_weight: float
):
    with torch.device("meta"):
        head = heads.build(
            {"kind": "mlp_speculator", "depth": depth, "inner_dim": inner},
            width=8,
            vocab_size=11,
        )
    assert head.state_weight == pytest.approx(state_weight, abs=1e-6)
    assert head.token_weight == pytest.approx(token_weight, abs=1e-5)


@pytest.mark.parametrize("case", ["mlp_speculator_tied_scaled", "mlp_speculator_untied"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.float64, 1e-9)], ids=["f32", "f64"]
)
def test_a_public_mlp_speculator_gives_its_project_s_logits(
    case: str, dtype: torch.dtype, tolerance: float
):
    head = heads.load_head(GOLDEN / case).to(dtype)
    golden = load_file(GOLDEN / case / "expected.safetensors")
    time = golden["in.hidden"].shape[1]
    # there inds[:, t] is the token at t + 1; the token at 0 is read by nobody
    tokens = F.pad(golden["in.inds"], (1, 0))
    hidden = F.pad(golden["in.hidden"], (0, 0, 0, tokens.shape[1] - time)).to(dtype)
    for level, logits in enumerate(offline_logits(head, Features(hidden), tokens)):
        wanted = golden["out64.logits"][level].to(dtype)
        torch.testing.assert_close(logits[:, :time], wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.float64, 1e-9)], ids=["f32", "f64"]
)
def test_a_public_medusa_gives_its_project_s_logits(dtype: torch.dtype, tolerance: float):
    head = heads.load_head(GOLDEN / "medusa_heads").to(dtype)
    golden = load_file(GOLDEN / "medusa_heads" / "expected.safetensors")
    hidden = golden["in.hidden"].to(dtype)
    tokens = torch.zeros(hidden.shape[:2], dtype=torch.long)
    states = head.states(Features(hidden), tokens)
    for level, state in enumerate(states):
        wanted = golden["out64.logits"][level].to(dtype)
        torch.testing.assert_close(
            head.logits(state, level), wanted, rtol=tolerance, atol=tolerance
        )


def test_tied_copies_that_differ_are_refused(tmp_path: Path):
    source = GOLDEN / "mlp_speculator_tied_scaled"
    tensors = load_file(source / "model.safetensors")
    tensors["speculator.emb.2.weight"] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    with pytest.raises(ValueError, match=r"'emb\.2\.weight' differs from 'emb\.0\.weight'"):
        heads.load_head(tmp_path)


def _mlp(folder: Path) -> Path:
    heads.build({"kind": "mlp_speculator"}, width=8, vocab_size=11).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("ln.0.bias"), r"lacks 'ln\.0\.bias'"),
        (lambda t: t.update({"ln.9.bias": torch.ones(8)}), r"has 'ln\.9\.bias', which"),
        (lambda t: t.update({"proj.0.weight": torch.ones(8, 9)}), r"shape \(8, 8\), got \(8, 9\)"),
    ],
    ids=["missing", "left over", "misshapen"],
)
def test_a_checkpoint_that_does_not_fit_is_refused(change, message: str, tmp_path: Path):
    tensors = load_file(_mlp(tmp_path) / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        heads.load_head(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "os.system"}, "head kind must be one of"),
        ({"kind": "medusa", "inner_dim": 3}, "'medusa' does not know the setting 'inner_dim'"),
        ({"depth": 3}, "got None"),
        ({"kind": "medusa", "depth": 0}, "depth >= 1"),
    ],
)
def test_settings_a_head_does_not_have_are_refused_by_name(settings: dict, message: str):
    with pytest.raises(ValueError, match=message):
        heads.build(settings, width=8, vocab_size=11)


def test_a_head_for_another_base_is_refused(base: FrozenBase, tmp_path: Path):
    with pytest.raises(ValueError, match="made for a base of width 8, this base has 32"):
        heads.load_head(_mlp(tmp_path), base)


def test_a_folder_without_a_known_layout_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"needs a config\.json"):
        heads.load_head(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ValueError, match="needs weights"):
        heads.load_head(tmp_path)
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="'llama'"):
        heads.load_head(tmp_path)


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path):
    class Payload:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 1}))
    torch.save({"0.0.linear.weight": Payload()}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ValueError, match=r"medusa_lm_head\.pt"):
        heads.load_head(tmp_path)
    assert not (tmp_path / "ran").exists()


def _reducible(kind: str) -> bool:
    module = importlib.import_module(f"specheads.heads.{kind}")
    return "draft_tokens" in {field.name for field in dataclasses.fields(module.Config)}


REDUCED = [kind for kind in KINDS if _reducible(kind)]


@pytest.mark.parametrize("kind", REDUCED)
def test_a_reduced_vocabulary_drafts_its_own_tokens_and_stays_lossless(kind: str, base: FrozenBase):
    counts = torch.randint(1, 100, (base.vocab_size,), generator=torch.manual_seed(2))
    head = heads.build_for({"kind": kind, "draft_tokens": 20}, base, counts).double().eval()
    allowed = set(counts.topk(20).indices.tolist())
    assert head.draft_ids is not None
    assert set(head.draft_ids.tolist()) == allowed
    assert head.projection(0)[0].shape[0] == 20
    prompts = tiny.prompts()
    for policy in (grow.Static([(0,), (1,), (0, 0)]), grow.BestFirst(6, 2)):
        ours = generate(base, head, prompts, max_new_tokens=20, tree=policy)
        assert ours.tokens == generate(base, None, prompts, max_new_tokens=20).tokens
        features, tokens = read(base, head.taps)
        count = torch.full((2,), TIME - 1)
        before = until(features, TIME - 1)
        tree = policy.grow(head, before, tokens[:, 1:], count, head.memory(2, 64))
        assert set(tree.tokens[:, 1:].flatten().tolist()) <= allowed


@pytest.mark.parametrize("kind", REDUCED)
def test_a_reduced_vocabulary_comes_back_with_the_head(kind: str, base: FrozenBase, tmp_path: Path):
    counts = torch.arange(base.vocab_size)
    head = heads.build_for({"kind": kind, "draft_tokens": 20}, base, counts)
    head.save_pretrained(tmp_path)
    again = heads.load_head(tmp_path)
    assert again.draft_ids is not None
    assert again.draft_ids.tolist() == list(range(base.vocab_size - 20, base.vocab_size))
    assert again.coverage(counts) == pytest.approx(sum(range(41, 61)) / sum(range(61)))


def test_tokens_and_columns_translate_into_each_other():
    #  tokens   0 1 2 3 4 5       drafted  1 4 5   in columns  0 1 2
    head = heads.build({"kind": "medusa", "draft_tokens": 3}, width=4, vocab_size=6)
    head.choose_vocabulary(torch.tensor([0, 9, 0, 0, 7, 8]))
    assert head.to_drafted(torch.arange(6)).tolist() == [-1, 0, -1, -1, 1, 2]
    assert head.to_tokens(torch.arange(3)).tolist() == [1, 4, 5]
