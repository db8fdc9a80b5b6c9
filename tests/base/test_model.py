import copy
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from specheads.base.ends import FINAL_NORMS
from specheads.base.model import FrozenBase
from specheads.base.projection import projection_of
from specheads.core.errors import InputError
from specheads.core.tree import chain
from specheads.decoding.engine import Engine
from specheads.decoding.generate import generate
from specheads.decoding.request import Request
from tests import tiny

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = sorted(folder.name for folder in GOLDEN.glob("base_*"))
SHIPPED = Path(__file__).parents[2] / "recipes" / "tiny_code" / "base"


def assert_golden(values: Tensor, golden: Tensor) -> None:
    """Compare within the tolerance of the golden folder."""
    torch.testing.assert_close(values.float(), golden, atol=1e-4, rtol=1e-4)


def golden_base(case: str, dtype: torch.dtype, attention: str) -> FrozenBase:
    return FrozenBase(
        AutoModelForCausalLM.from_pretrained(
            GOLDEN / case, dtype=dtype, attn_implementation=attention
        )
    )


@pytest.mark.parametrize(
    ("dtype", "attention"), [(torch.float64, "eager"), (torch.float32, "sdpa")], ids=str
)
@pytest.mark.parametrize("case", CASES)
def test_golden_numbers_are_reproduced(case, dtype, attention):
    base = golden_base(case, dtype, attention)
    io = load_file(GOLDEN / case / "io.safetensors")
    prompts = [io[f"in.prompt.{row}"].tolist() for row in range(3)]
    continuations = [io[f"out.continuation.{row}"].tolist() for row in range(3)]

    text, positions = torch.tensor([prompts[0] + continuations[0]]), io["in.positions"]
    hidden = io["out.hidden_states.0"]
    features = base.read(text, aux_layers=(0, 2, base.num_layers))
    assert features.aux is not None
    assert_golden(features.hidden[0, positions], hidden[-1])
    *aux, last = features.aux[0, positions].chunk(3, dim=-1)
    assert_golden(torch.cat(aux, dim=-1), torch.cat([hidden[0], hidden[2]], dim=-1))
    # the stream after all layers is the input of the final norm
    children = dict(base.model.base_model.named_children())
    norm = next(children[name] for name in FINAL_NORMS if name in children)
    assert_golden(norm(last), hidden[-1])
    assert_golden(base.projection(features.hidden)[0, positions], io["out.logits.0"])

    assert (
        generate(base, None, prompts, max_new_tokens=len(continuations[0])).tokens == continuations
    )


def test_a_model_may_take_its_cache_by_its_name_of_transformers_5_24():
    model, prompts = tiny.own_base("llama").model, tiny.prompts()
    alone = generate(FrozenBase(model), None, prompts, max_new_tokens=8).tokens
    forward = model.base_model.forward

    names = signature(forward).parameters

    def renamed(cache: Any = None, **settings: Any) -> Any:
        assert settings.pop("past_key_values", None) is None
        old = {"past_key_values": cache} if "past_key_values" in names else {"cache": cache}
        return forward(**old, **settings)

    model.base_model.forward = renamed
    assert generate(FrozenBase(model), None, prompts, max_new_tokens=8).tokens == alone


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_verify_and_read_give_the_same_features(architecture):
    # a head trains on the features of `read` and drafts from those of `verify`
    base, prompt = tiny.base(architecture), tiny.prompts()[1]
    cache = base.cache(batch=1, capacity=len(prompt))
    front = torch.tensor([prompt[:-4]])
    base.prefill(front, cache, [front.shape[1]])
    verification = base.verify(chain(torch.tensor([prompt[-4:]])), cache, aux_layers=(1, 2))
    features = base.read(torch.tensor([prompt]), aux_layers=(1, 2))
    torch.testing.assert_close(verification.features.hidden, features.hidden[:, -4:])
    torch.testing.assert_close(
        verification.features.aux, None if features.aux is None else features.aux[:, -4:]
    )
    torch.testing.assert_close(verification.logits, base.projection(features.hidden[:, -4:]))


def _small(kind: str, **settings: object) -> FrozenBase:
    """Return a random base of two layers with the names of Llama's sizes."""
    sizes = {"hidden_size": 32, "vocab_size": 61, "num_attention_heads": 4, "num_hidden_layers": 2}
    config = AutoConfig.for_model(kind, **sizes, **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return FrozenBase(AutoModelForCausalLM.from_config(config, dtype=torch.float64))


def test_the_last_stream_of_a_base_that_norms_its_embedding_too_is_that_of_its_layers():
    # NanoChat norms its embedding and its last stream with one module
    base = _small("nanochat", intermediate_size=48, num_key_value_heads=2)
    out: list[Tensor] = []
    model: Any = base.model.base_model
    layer = model.layers[-1]
    hook = layer.register_forward_hook(lambda *call: out.append(call[-1]))
    features = base.read(torch.arange(3, 12)[None], aux_layers=(2,))
    hook.remove()
    assert features.aux is not None
    torch.testing.assert_close(features.aux, out[0])


def test_layers_of_a_base_with_several_residual_streams_are_refused():
    base = _small(
        "gemma3n_text",
        intermediate_size=48,
        head_dim=8,
        num_key_value_heads=2,
        layer_types=["sliding_attention", "full_attention"],
        num_kv_shared_layers=0,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=61,
        activation_sparsity_pattern=[0.5, 0.0],
        laurel_rank=4,
    )
    for layers in (1,), (1, 2):
        with pytest.raises(InputError, match=r"one residual stream of 32 channels.*without"):
            base.read(torch.arange(3, 12)[None], layers)


def test_a_base_whose_trees_cannot_be_verified_is_refused():
    # ALiBi depends on the slot of the key, and siblings have different slots
    config = transformers.BloomConfig(hidden_size=32, n_head=4, vocab_size=61, n_layer=2)
    with pytest.raises(ValueError, match="choose another base"):
        FrozenBase(AutoModelForCausalLM.from_config(config))


def test_logits_that_are_not_the_projection_are_refused():
    model = AutoModelForCausalLM.from_config(tiny.config("granite"))
    model.lm_head.register_forward_hook(lambda *call: 2 * call[-1])
    with pytest.raises(ValueError, match="'granite' must be its vocabulary projection"):
        FrozenBase(model)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "/nowhere/to/be/found"}, "there is no such folder"),
        ({"model": SHIPPED, "dtype": "float33"}, "dtype must name a torch dtype .* 'float33'"),
        ({"model": SHIPPED, "dtype": "int8"}, "dtype must name a torch dtype .* 'int8'"),
        ({"model": "/nowhere", "attention": "flash_attention_2"}, "'flash_attention_2'; load"),
        ({"model": SHIPPED, "device": "cuda:99"}, "device must name a torch device .* 'cuda:99'"),
    ],
)
def test_loading_errors_are_one_line(settings, message):
    with pytest.raises(ValueError, match=message):
        FrozenBase.load(**settings)


@pytest.mark.parametrize("chunk", [1, 4, 7])
@pytest.mark.parametrize("architecture", ["granite", "gpt2", "gemma3"])
def test_chunked_prefill_equals_prefill_in_one_forward(architecture, chunk):
    base, prompts = tiny.base(architecture), tiny.prompts()
    counts = [*map(len, prompts)]
    padded = torch.tensor([prompt + [0] * (max(counts) - len(prompt)) for prompt in prompts])
    chunk_sizes: list[int] = []
    handle = base.model.base_model.register_forward_pre_hook(
        lambda *call: chunk_sizes.append(call[-1]["input_ids"].shape[1]), with_kwargs=True
    )
    cache = base.cache(3, max(counts) + 1)
    logits, features = base.prefill(padded, cache, counts, aux_layers=(1, 2), chunk=chunk)
    handle.remove()
    assert max(chunk_sizes) == chunk
    assert sum(chunk_sizes) == max(counts)
    assert cache.row_lengths == counts
    assert features.aux is not None
    for row, prompt in enumerate(prompts):
        expected = base.read(torch.tensor([prompt]), aux_layers=(1, 2))
        assert expected.aux is not None
        torch.testing.assert_close(features.hidden[row, : len(prompt)], expected.hidden[0])
        torch.testing.assert_close(features.aux[row, : len(prompt)], expected.aux[0])
        plain = base.model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, -1]
        torch.testing.assert_close(logits[row], plain)
    # decoding continues the committed text
    root = logits.argmax(-1)
    seen_next = base.verify(chain(root[:, None]), cache).logits[:, 0]
    assert root.tolist() == [continuation[0] for continuation in tiny.continuations(architecture)]
    assert seen_next.argmax(-1).tolist() == [
        continuation[1] for continuation in tiny.continuations(architecture)
    ]


def test_a_longrope_base_is_exact_up_to_its_original_context_and_refused_beyond():
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 24}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    config = tiny.config("llama", max_position_embeddings=64, rope_parameters=rope)
    base = FrozenBase(AutoModelForCausalLM.from_config(config, dtype=torch.float64))
    prompt = tiny.prompts()[2]
    assert base.max_length == 24
    continuation = generate(base, None, [prompt], max_new_tokens=24 - len(prompt)).tokens[0]
    text = torch.tensor([prompt + continuation])
    logits = base.model(input_ids=text, use_cache=False).logits[0, len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == continuation
    with pytest.raises(ValueError, match=r"exceed 24; shorten"):
        generate(base, None, [prompt], max_new_tokens=25 - len(prompt))


@pytest.mark.parametrize(
    ("config", "scale", "cap"),
    [
        (tiny.config("granite"), 2.0, None),
        (transformers.Gemma2Config(hidden_size=8, final_logit_softcapping=3.0), 1.0, 3.0),
        (transformers.CohereConfig(hidden_size=8, logit_scale=0.25), 4.0, None),
        (transformers.Cohere2Config(hidden_size=8, logit_scale=2.0), 0.5, None),
        (transformers.Gemma3TextConfig(hidden_size=8, final_logit_softcapping=5.0), 1.0, 5.0),
        (transformers.NanoChatConfig(hidden_size=8), 1.0, 15.0),
        (tiny.config("granitemoe"), 2.0, None),
        (tiny.config("llama"), 1.0, None),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_a_projection_scales_and_caps_like_its_base(config, scale, cap):
    weight, hidden = torch.randn(5, 8), torch.randn(3, 8)
    projection = projection_of(config, weight, bias := torch.randn(5))
    assert (projection.scale, projection.cap) == (scale, cap)
    expected = (hidden @ weight.T + bias) / scale
    uncapped = hidden @ projection.scaled_weight.T + bias / scale
    torch.testing.assert_close(uncapped, expected)
    expected = expected if cap is None else cap * (expected / cap).tanh()
    torch.testing.assert_close(projection(hidden), expected)
    tokens = torch.tensor([4, 1])
    torch.testing.assert_close(projection.rows(tokens)(hidden), expected[:, tokens])
    assert projection.rows(tokens).tokens is tokens
    assert projection.rows(None) is projection


def test_a_model_in_training_mode_is_refused_at_the_next_use():
    base, prompts = FrozenBase(copy.deepcopy(tiny.base().model)), tiny.prompts()
    engine = Engine(base)
    stream = engine.submit(Request(prompt=prompts[0], max_new_tokens=4))
    base.model.train()
    for use in (
        lambda: base.read(torch.tensor([[1, 2]])),
        lambda: base.verify(chain(torch.tensor([[1, 2]])), base.cache(1, 4)),
        lambda: generate(base, None, prompts, max_new_tokens=2),
        engine.run,
    ):
        with pytest.raises(ValueError, match=r"training mode; call model\.eval\(\)"):
            use()
    assert stream.finish_reason == "failed"
