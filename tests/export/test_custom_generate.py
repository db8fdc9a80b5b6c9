"""transformers' own generate gives the same text with and without a head."""

import copy
import functools
import gc
import json
import weakref
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    StopStringCriteria,
    TopKLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer

import specheads
from specheads.decoding.draft_model import DraftModel
from specheads.decoding.sampling import Sampling
from specheads.decoding.trees import policies
from specheads.export import custom_generate as plugin
from specheads.export.custom_generate import hub_files
from specheads.heads.load import build_head
from tests import recurrent, tiny
from tests.decoding.test_detokenize import tokenizer
from tests.export.hub_server import TOKEN, HubServer
from tests.heads.test_heads import KINDS, make
from tests.oracle import Oracle
from tests.slow import SOME_KINDS, slow_except
from tests.test_wheel import ROOT, installed, run, wheel

__all__ = ["wheel"]

PAD, NEW = 45, 10
TREE = policies.Static([(0,), (1,), (0, 0), (0, 0, 0)])


def padded(prompts: list[list[int]]) -> dict[str, Tensor]:
    """Return prompts as tokenizer output with padding on the left."""
    width = max(map(len, prompts))
    empty = [width - len(prompt) for prompt in prompts]
    rows = zip(empty, prompts, strict=True)
    return {
        "input_ids": torch.tensor([[PAD] * count + prompt for count, prompt in rows]),
        "attention_mask": torch.tensor([[0] * n + [1] * (width - n) for n in empty]),
    }


ALONE, BATCH = padded(tiny.prompts()[:1]), padded(tiny.prompts())


def settings(**changes: Any) -> dict[str, Any]:
    return {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": PAD} | changes


def token_of(prompt: int, index: int) -> int:
    """Return the token that the base generates at this index in a row of `BATCH`."""
    return tiny.continuations()[prompt][index]


def model() -> Any:
    return tiny.base().model


def fresh_model(**changes: Any) -> Any:
    """Return a new model."""
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(tiny.config("llama", **changes)).eval()


def small_head(kind: str = "medusa") -> Any:
    return make({"kind": kind}, tiny.base())


def plain(inputs: dict[str, Tensor] = ALONE, **changes: Any) -> Any:
    return model().generate(**inputs, **settings(**changes))


def speculated(
    inputs: dict[str, Tensor] = ALONE, head: Any = None, tree: Any = None, **changes: Any
) -> Any:
    """Generate with a head; the default is a drafter that is always right."""
    custom = specheads.custom_generate(head or tiny.oracle(3), tree=tree)
    return model().generate(**inputs, **settings(**changes), custom_generate=custom)


INPUTS = {"one prompt": ALONE, "ragged batch": BATCH}


@pytest.mark.parametrize(
    ("kind", "name"),
    slow_except(
        [("medusa", "one prompt"), *((kind, "ragged batch") for kind in SOME_KINDS)],
        product(KINDS, INPUTS),
    ),
)
def test_greedy_output_equals_generate_for_every_head(kind: str, name: str):
    inputs = INPUTS[name]
    ends = {"eos_token_id": token_of(0, 4), "max_new_tokens": 7}
    assert torch.equal(speculated(inputs, small_head(kind), TREE, **ends), plain(inputs, **ends))


def test_the_cache_may_have_its_name_of_transformers_5_24():
    decode = specheads.custom_generate(tiny.oracle(3))

    def renamed(*args: Any, **keywords: Any) -> Any:
        cache = keywords.pop("past_key_values", None)
        return decode(*args, **{"cache": cache} | keywords)

    assert torch.equal(model().generate(**ALONE, **settings(), custom_generate=renamed), plain())


@pytest.mark.parametrize("architecture", slow_except(["gpt2", "gemma3"], tiny.ARCHITECTURES[1:]))
def test_greedy_output_equals_generate_on_every_architecture(architecture: str):
    base: Any = tiny.base(architecture).model
    expected = base.generate(**BATCH, **settings())
    rows = zip(expected.tolist(), BATCH["attention_mask"].sum(1).tolist(), strict=True)
    texts = [row[-NEW - length :] for row, length in rows]
    custom = specheads.custom_generate(Oracle(texts, 4, tiny.VOCAB, rate=0.8))
    assert torch.equal(base.generate(**BATCH, **settings(), custom_generate=custom), expected)


@pytest.mark.parametrize("kind", ["mamba", "falcon_h1"])
def test_greedy_output_equals_generate_on_a_base_with_states(kind: str):
    base: Any = recurrent.base(kind, torch.float32)
    ids = torch.tensor(recurrent.prompts(9))
    expected = base.model.generate(ids, **settings())
    custom = specheads.custom_generate(DraftModel(base, 3, base), tree=policies.chain(3))
    assert torch.equal(base.model.generate(ids, **settings(), custom_generate=custom), expected)
    # Mamba's name of a cache, which has no length
    name = "cache_params" if kind == "mamba" else "past_key_values"
    cache = {name: DynamicCache(config=base.model.config)}
    with pytest.raises(ValueError, match="past_key_values was given"):
        base.model.generate(ids, **settings(), **cache, custom_generate=custom)


def test_correct_drafts_save_forwards():
    forwards = []
    speculated(max_new_tokens=1)
    handle = model().base_model.register_forward_hook(lambda *_: forwards.append(1))
    speculated(max_new_tokens=13)
    handle.remove()
    # the first forward reads the prompt
    assert len(forwards) - 1 == 12 / 4


def even_or_odd(row: int, tokens: Tensor) -> list[int]:
    """Allow tokens by the row and by its length with padding, as transformers passes them."""
    return [*range((row + len(tokens)) % 2, tiny.VOCAB, 2)]


# decoded when they are called, and not when pytest collects this file
SETTINGS: dict[str, Callable[[], dict[str, Any]]] = {
    "two ends": lambda: {"eos_token_id": [token_of(0, 5), token_of(1, 2)]},
    "an end": lambda: {"eos_token_id": token_of(0, 0)},
    "one token": lambda: {"max_new_tokens": 1},
    "max_length": lambda: {"max_new_tokens": None, "max_length": 24},
    "repetition_penalty": lambda: {"repetition_penalty": 1.4},
    "generation_config": lambda: {
        "generation_config": GenerationConfig(max_new_tokens=7, repetition_penalty=1.2)
    },
    "sequence_bias": lambda: {
        "sequence_bias": {(token_of(0, 2),): -5.0, (token_of(0, 0), 7): 30.0}
    },
    "bad_words_ids": lambda: {
        "bad_words_ids": [[token_of(0, 1)], [token_of(1, 0), token_of(1, 1)]]
    },
    **{
        name: lambda limit=limit: limit | {"eos_token_id": [token_of(0, 2), token_of(1, 1)]}
        for name, limit in (
            ("min_new_tokens", {"min_new_tokens": 4}),
            ("min_length", {"min_length": 24}),
        )
    },
    "prefix_allowed_tokens_fn": lambda: {
        "prefix_allowed_tokens_fn": even_or_odd, "repetition_penalty": 1.3
    },
    "logits_processor": lambda: {"logits_processor": LogitsProcessorList([TopKLogitsWarper(2)])},
    "use_cache": lambda: {"use_cache": False},
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_generate_give_the_same_output(name: str):
    changes = SETTINGS[name]()
    assert torch.equal(speculated(BATCH, **changes), plain(BATCH, **changes))


def stops(*strings: str) -> StoppingCriteriaList:
    return StoppingCriteriaList([StopStringCriteria(tokenizer(), list(strings))])


@pytest.mark.parametrize("ends", [{"stopping_criteria": stops("日本")}, {"max_time": 0.0}])
def test_stopping_criteria_end_a_prompt_as_in_generate(ends: dict[str, Any]):
    expected = plain(**ends)
    assert expected.shape[1] < ALONE["input_ids"].shape[1] + NEW
    assert torch.equal(speculated(**ends), expected)


class Listener(BaseStreamer):
    """Streamer that records its calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def put(self, value: Tensor) -> None:
        self.calls.append(value.tolist())

    def end(self) -> None:
        self.calls.append("end")


def test_streamer_gets_the_same_calls():
    expected, actual = Listener(), Listener()
    plain(streamer=expected, eos_token_id=token_of(0, 9))
    speculated(streamer=actual, eos_token_id=token_of(0, 9))
    assert actual.calls == expected.calls


LAW = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.2}


def test_samples_depend_on_the_seed_of_torch_and_equal_those_of_the_base():
    head = small_head()
    texts = [
        speculated(BATCH, head, do_sample=True, **LAW)
        for seed in (5, 5, 6)
        if torch.manual_seed(seed)
    ]
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])
    torch.manual_seed(5)
    seed = int(torch.randint(2**63 - 1, ()))
    alone = specheads.generate(
        tiny.base(), None, tiny.prompts(), max_new_tokens=NEW, sampling=Sampling(**LAW, seed=seed)
    )
    assert texts[0][:, -NEW:].tolist() == alone.tokens


def test_samples_have_the_distribution_of_generate():
    count = 1000
    output = plain(
        do_sample=True, max_new_tokens=1, output_scores=True, return_dict_in_generate=True, **LAW
    )
    law = output.scores[0][0].softmax(-1)
    sampled = speculated(
        head=small_head(), do_sample=True, max_new_tokens=1, num_return_sequences=count, **LAW
    )
    expected = count * law[law > 0]
    counts = sampled[:, -1].bincount(minlength=tiny.VOCAB)
    assert counts[law == 0].sum() == 0
    assert 3 < len(expected) < 21
    # the 0.1 % quantile of chi-squared with 20 degrees of freedom
    assert ((counts[law > 0] - expected) ** 2 / expected).sum() < 45


def changed(name: str, value: Any, inputs: dict[str, Tensor] = ALONE) -> dict[str, Any]:
    return {"inputs": inputs | {name: value}}


FIVE = torch.arange(5)[None]
SAMPLED, DICT = {"do_sample": True}, {"return_dict_in_generate": True}
SHORT_PENALTY = RepetitionPenaltyLogitsProcessor(1.2, prompt_ignore_length=5)


def head_of_another_base() -> Any:
    return build_head({"kind": "medusa", "depth": 2}, width=8, vocab_size=tiny.VOCAB)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"num_beams": 2}, "beam_search"),
    ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive_search"),
    ({"prompt_lookup_num_tokens": 2}, "assisted_generation"),
    ({"assistant_model": fresh_model}, "assisted_generation"),
    ({"synced_gpus": True}, "synced_gpus was given"),
    ({"output_scores": True, **DICT}, "output_scores"),
    ({"output_hidden_states": True}, "output_hidden_states"),
    ({"no_repeat_ngram_size": 2}, "NoRepeatNGram"),
    ({"guidance_scale": 1.5}, "Guidance"),
    ({"logits_processor": [MinLengthLogitsProcessor(9, 1)]}, "MinLength"),
    ({"typical_p": 0.5, **SAMPLED}, "TypicalLogitsWarper"),
    ({"logits_processor": [lambda _, scores: -scores]}, "function"),
    ({"logits_processor": [TopKLogitsWarper(2)], **SAMPLED, "temperature": 0.5}, "Temperature"),
    ({"logits_processor": [TopKLogitsWarper(2, filter_value=-1.0)]}, "TopKLogitsWarper"),
    ({"logits_processor": [SHORT_PENALTY]}, "RepetitionPenalty"),
    ({"past_key_values": DynamicCache()}, "past_key_values was given"),
    ({"inputs": {"inputs_embeds": torch.zeros(1, 5, 32).double()}}, "inputs_embeds"),
    (changed("position_ids", FIVE + 3), "position_ids"),
    (changed("attention_mask", (FIVE < 4).long()), "padding_side='left'"),
    (changed("attention_mask", (FIVE != 2).long()), "padding on the left"),
    (changed("attention_mask", 0 * FIVE), "leave a token in each prompt"),
    ({"max_new_tokens": 124}, "exceed 128"),
    ({"inputs": BATCH, "streamer": Listener()}, "Listener can follow one prompt"),
    ({"inputs": BATCH, "stopping_criteria": stops("a")}, "can follow one prompt"),
    ({"tree": policies.chain(5)}, "choose a shallower tree"),
    ({"head": head_of_another_base}, "this base has .*; load the base it was trained on"),
]


@pytest.mark.parametrize(("changes", "rule"), REFUSED, ids=[rule for _, rule in REFUSED])
@pytest.mark.filterwarnings("ignore:.*is deprecated")
def test_unsupported_argument_is_refused_in_one_line(changes: dict[str, Any], rule: str):
    for name, value in changes.items():
        if value is fresh_model or value is head_of_another_base:
            changes = changes | {name: value()}
    with pytest.raises(ValueError, match=rule):
        speculated(**changes)


def test_model_of_the_user_is_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model, head, tries = fresh_model(), small_head(), []
    try_out = plugin.check
    monkeypatch.setattr(
        plugin, "check", lambda candidate: (tries.append(candidate.model), try_out(candidate))
    )
    strides = {name: value.stride() for name, value in model.named_parameters()}
    model.lm_head.weight.requires_grad_(False)
    weights, learning = copy.deepcopy(model.state_dict()), trainable(model)
    expected = model.generate(**ALONE, **settings())
    for _ in range(2):
        # a new function per call, in a mode that marks tensors
        with torch.inference_mode():
            custom = specheads.custom_generate(head, force=True)
            assert torch.equal(
                model.generate(**ALONE, **settings(), custom_generate=custom), expected
            )
    assert tries == [model]
    assert not any(
        candidate._forward_pre_hooks or candidate._forward_hooks for candidate in model.modules()
    )
    assert not any(candidate.training for candidate in model.modules())
    assert {name: value.stride() for name, value in model.named_parameters()} == strides
    assert trainable(model) == learning
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    model.train()
    model(**ALONE, labels=ALONE["input_ids"]).loss.backward()
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").is_file()
    with pytest.raises(ValueError, match=r"call model\.eval\(\) first"):
        model.generate(**ALONE, **settings(), custom_generate=specheads.custom_generate(head))


def trainable(model: PreTrainedModel) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_model_is_freed_after_use():
    first_model, head = fresh_model(), small_head()
    custom = specheads.custom_generate(head, force=True)
    first_model.generate(**ALONE, **settings(), custom_generate=custom)
    reference = weakref.ref(first_model)
    # the head is bound to the embedding of `first_model` until another model is used
    model().generate(**ALONE, **settings(), custom_generate=custom)
    del first_model
    gc.collect()
    assert reference() is None


def test_head_follows_the_dtype_of_the_model():
    model = fresh_model()
    custom = specheads.custom_generate(small_head("hydra_heads"), force=True)
    for dtype in (torch.float32, torch.float64):
        model.to(dtype)
        expected = model.generate(**ALONE, **settings())
        assert torch.equal(model.generate(**ALONE, **settings(), custom_generate=custom), expected)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="needs attention of"):
        model.generate(**ALONE, **settings(), custom_generate=custom)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a head and its code; transformers gets its own module cache."""
    folder = tmp_path / "head"
    small_head().save_pretrained(folder)
    for path, text in hub_files("ada/absent").items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "hf"))
    return folder


def from_folder(folder: Path, inputs: dict[str, Tensor] = ALONE, **changes: Any) -> Any:
    code = {"custom_generate": str(folder), "trust_remote_code": True}
    return model().generate(**inputs, **settings(**changes), **code)


def test_folder_with_code_decodes_with_its_own_head(folder: Path):
    eos = token_of(0, 6)
    assert torch.equal(from_folder(folder, BATCH, eos_token_id=eos), plain(BATCH, eos_token_id=eos))
    (folder / "model.safetensors").unlink()
    copy_head = folder.rename(folder.with_name("moved"))
    # the name in the call has priority over the repository in the code, so no Hub is needed
    with pytest.raises(ValueError, match="moved has none"):
        from_folder(copy_head)


def test_code_of_a_repository_passes_on_all_arguments(folder: Path):
    expected, actual = Listener(), Listener()
    ends = {"stop_strings": ["日本"], "tokenizer": tokenizer()}
    plain_output = model().generate(ALONE["input_ids"], **settings(**ends), streamer=expected)
    code = {"custom_generate": str(folder), "trust_remote_code": True}
    output = model().generate(ALONE["input_ids"], **settings(**ends), streamer=actual, **code)
    assert torch.equal(output, plain_output)
    assert output.shape[1] == ALONE["input_ids"].shape[1] + 4
    assert actual.calls == expected.calls


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"token": "secret"}, "token"),
        ({"stop_strings": ["a"]}, "tokenizer"),
        ({"num_beams": 2}, "beam_search"),
        ({"local_files_onli": True}, "local_files_onli"),
    ],
)
def test_code_of_a_repository_refuses_unsupported_arguments(
    folder: Path, changes: dict[str, Any], rule: str
):
    with pytest.raises(ValueError, match=rule) as caught:
        from_folder(folder, **changes)
    assert "secret" not in str(caught.value)


def test_repository_of_the_base_can_hold_the_code(folder: Path):
    model, code = fresh_model(), folder / "custom_generate" / "generate.py"
    names: dict[str, Any] = {"__file__": str(code)}
    exec(compile(hub_files(str(folder))["custom_generate/generate.py"], code, "exec"), names)
    expected = model.generate(ALONE["input_ids"], **settings())
    # transformers does this for a model with trust_remote_code
    model.generate = functools.partial(names["generate"], model=model)
    with pytest.raises(ValueError, match="a head fits the weights it was trained on"):
        model.generate(ALONE["input_ids"], **settings())
    assert torch.equal(model.generate(ALONE["input_ids"], **settings(), force=True), expected)


def push(hub: HubServer, repo: str, folder: Path) -> None:
    """Upload a folder."""
    api = huggingface_hub.HfApi(endpoint=hub.url, token=TOKEN)
    api.create_repo(repo)
    api.upload_folder(repo_id=repo, folder_path=folder, ignore_patterns="README.md")


@pytest.mark.slow
def test_example_of_the_card_works_in_a_clean_environment(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    python = installed(wheel, tmp_path)
    work, empty = tmp_path / "work", tmp_path / "empty"
    work.mkdir()
    empty.mkdir()
    specheads = python.with_name("specheads")
    run(specheads, "train", "recipe=smoke", "name=smoke", "evaluate_after=false", folder=work)
    base = ROOT / "recipes" / "tiny_code" / "base"
    with HubServer() as hub:
        hub.connect(monkeypatch, tmp_path / "owner")
        push(hub, "ada/base", base)
        owner = hub.environment(tmp_path / "owner", TOKEN)
        words = ("run=runs/smoke", "repo=ada/smoke", "base_repo=ada/base")
        run(specheads, "push", *words, folder=work, **owner)
        card = hub.files("ada/smoke")["README.md"].decode()
        lines = next(block for block in card.split("```python\n") if "custom_generate=" in block)
        script = lines.partition("```")[0] + "print(output.tolist())\n"
        hub.requests.clear()
        user = hub.environment(tmp_path / "user")
        printed = run(python, "-c", script, folder=empty, **user)
        requested = {line.split("/resolve/")[-1] for line in hub.requests if "ada/smoke" in line}
        commit = hub.repositories["ada/smoke"].head
    # the weights are from the commit whose code ran
    assert f"{commit}/model.safetensors" in requested
    alone: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    inputs = AutoTokenizer.from_pretrained(base)("The", return_tensors="pt")
    expected = alone.generate(**inputs, max_new_tokens=64)
    assert json.loads(printed.splitlines()[-1]) == expected.tolist()
    assert expected.shape[1] > 32
