"""A base and its adapter load completely, or are refused in one line."""

import copy
import functools
import io
import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from specheads.base.loading import load_config
from specheads.base.lora import Adapter
from specheads.base.model import FrozenBase
from specheads.core.errors import InputError
from tests import tiny
from tests.base.test_model import SHIPPED

Damage = Callable[[Path], Any]
WEIGHTS, ADAPTER = "model.safetensors", "adapter_model.safetensors"
DEEP = b"[" * 100_000
WHOLE = "the weights of a base must match its config.json"


def refused(folder: object, **settings: Any) -> str:
    """Return the error message, which is one line."""
    with pytest.raises(InputError) as caught:
        FrozenBase.load(folder, **{"device": "cpu", **settings})  # pyright: ignore[reportArgumentType]
    return str(caught.value)


def says(file_name: str = "config.json", **changes: Any) -> Damage:
    """Return a function that changes settings in a JSON file of a folder."""

    def damage(folder: Path) -> None:
        file = folder / file_name
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return damage


def tensors(change: Callable[[dict[str, torch.Tensor]], Any], name: str = WEIGHTS) -> Damage:
    """Return a function that changes a folder's tensors in place."""

    def damage(folder: Path) -> None:
        weights = load_file(folder / name)
        change(weights)
        save_file(weights, folder / name, metadata={"format": "pt"})

    return damage


def write(name: str, content: bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(content)


def cut(name: str) -> Damage:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:150])


def remove(name: str) -> Damage:
    return lambda folder: next(folder.glob(name)).unlink()


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (says(num_hidden_layers=5), r"missing model\.layers\.3\..* and 16 more;"),
        (says(num_hidden_layers=2), r"unexpected model\.layers\.2\..* and 7 more;"),
        (
            tensors(lambda weights: weights.update(strange=weights.pop(UP))),
            f"missing {UP}; unexpected strange;",
        ),
        (
            tensors(lambda weights: weights.update({UP: weights[UP][:40].clone()})),
            rf"another shape {UP} of \[40, 32\] for \[48, 32\]; fix",
        ),
    ],
    ids=["more layers", "fewer layers", "renamed", "shape"],
)
def test_weights_that_do_not_match_the_config_are_refused_by_name(
    damage, message, tmp_path, caplog, capsys
):
    tiny.base().model.save_pretrained(tmp_path)
    capsys.readouterr()
    damage(tmp_path)
    with pytest.raises(InputError, match=f"{WHOLE}.*{message}"):
        FrozenBase.load(tmp_path, device="cpu")
    # transformers' own table of them is hidden
    assert "LOAD REPORT" not in caplog.text + capsys.readouterr().err


CONFIG, ENDS = "config.json", "generation_config.json"
BROKEN: dict[str, tuple[Damage, str]] = {
    "no config": (remove(CONFIG), "config.json"),
    "cut config": (cut(CONFIG), "config.json"),
    "deep config": (write(CONFIG, DEEP), "config.json"),
    "an unknown activation": (says(hidden_act="nope"), "weights"),
    "a library that is not here": (
        says(quantization_config={"quant_method": "gptq", "bits": 4}),
        "weights",
    ),
    "a million layers": (says(num_hidden_layers=10**6), "num_hidden_layers .* 1 to 1024"),
    "cut weights": (cut(WEIGHTS), "weights .*SafetensorError"),
    "weights that are not numbers": (
        tensors(lambda weights: weights["model.norm.weight"].mul_(float("nan"))),
        "must be finite",
    ),
    "weights of nobody": (
        lambda folder: (folder / WEIGHTS).unlink() or (folder / WEIGHTS).symlink_to("/nowhere"),
        "weights",
    ),
    "no weights": (remove(WEIGHTS), "no file named model.safetensors"),
    "pickled weights": (
        lambda folder: (folder / WEIGHTS).rename(folder / "pytorch_model.bin"),
        "no file named model.safetensors",
    ),
    "cut ends of text": (write(ENDS, b'{"eos'), ENDS),
    "an end of text in words": (write(ENDS, b'{"eos_token_id": "x"}'), "must be token ids"),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("model.layers.0.self_attn.q_proj.weight", torch.int8),
        ("model.layers.0.mlp.down_proj.weight", torch.uint8),
        ("model.embed_tokens.weight", torch.int8),
        ("model.layers.1.input_layernorm.weight", torch.int32),
        ("model.norm.weight", torch.int64),
        ("lm_head.weight", torch.bool),
    ],
)
def test_weights_that_are_integers_are_refused_by_name(name: str, dtype: torch.dtype, tmp_path):
    tiny.own_base("llama", tie_word_embeddings=False).model.save_pretrained(tmp_path)
    tensors(lambda weights: weights.update({name: (100 * weights[name]).to(dtype)}))(tmp_path)
    assert re.search(f"floating-point numbers, and {name} of .* has [BIU]", refused(tmp_path))


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_of_a_base_is_refused_by_name(name, tmp_path):
    damage, message = BROKEN[name]
    tiny.base().model.save_pretrained(tmp_path)
    damage(tmp_path)
    assert re.search(message, refused(tmp_path))


INDEX = "model.safetensors.index.json"


def test_threads_load_a_base_whose_projection_is_tied(tmp_path: Path):
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "vocab_size": 61,
    }
    config = LlamaConfig(**sizes, num_attention_heads=4, tie_word_embeddings=True)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    with ThreadPoolExecutor(4) as threads:
        bases = list(
            threads.map(lambda _: FrozenBase.load(str(tmp_path), dtype="float32"), range(12))
        )
    embedding = load_file(tmp_path / WEIGHTS)["model.embed_tokens.weight"]
    assert all(base.projection.weight.float().equal(embedding) for base in bases)


@pytest.mark.parametrize(
    "damage",
    [
        remove("model-00002*"),
        cut("model-00002-of-00017.safetensors"),
        remove(INDEX),
        write(INDEX, b'{"metadata": {}, "weight_map": {"a": "../../../etc/passwd"}}'),
    ],
)
def test_missing_shards_are_refused(damage, tmp_path):
    tiny.base().model.save_pretrained(tmp_path, max_shard_size="20KB")
    damage(tmp_path)
    assert "whose weights it cannot read" in refused(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        cut("tokenizer.json"),
        write("tokenizer.json", DEEP),
        remove("tokenizer.json"),
        write("tokenizer_config.json", b'{"tokenizer_class": 3}'),
    ],
)
def test_a_broken_tokenizer_is_refused(damage, tmp_path):
    for file in SHIPPED.iterdir():
        if "safetensors" not in file.name:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    damage(tmp_path)
    assert "whose tokenizer it cannot read" in refused(tmp_path)


CODE = "from transformers import *\nopen({ran!r}, 'w')\nclass Own({parent}): model_type = 'own'\n"
MODEL = {"AutoConfig": "code.Own", "AutoModelForCausalLM": "code.Own"}


def with_code(folder: Path, parent: str, *damages: Damage) -> Path:
    """Copy the shipped base with a `code.py`; return the file that the code would write."""
    for file in SHIPPED.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    ran = folder / "ran"
    (folder / "code.py").write_text(CODE.format(ran=str(ran), parent=parent))
    for damage in damages:
        damage(folder)
    return ran


@pytest.mark.parametrize(
    ("parent", "damage", "cause"),
    [
        (
            "LlamaConfig",
            says(model_type="own", auto_map=MODEL),
            "config.json .* model_type is 'own'",
        ),
        (
            "CLIPModel",
            says(model_type="clip", auto_map=MODEL),
            "config.json .* model_type is 'clip'",
        ),
        (
            "PreTrainedTokenizerFast",
            says(
                "tokenizer_config.json",
                tokenizer_class="Own",
                auto_map={"AutoTokenizer": ["code.Own", None]},
            ),
            "tokenizer_config.json .* tokenizer_class is 'Own'",
        ),
        (
            "LlamaConfig",
            says(model_type="own", auto_map={"AutoModel": "somebody/code--code.Own"}),
            "config.json .* model_type is 'own'",
        ),
        # an older form
        (
            "PreTrainedTokenizerFast",
            says("tokenizer_config.json", tokenizer_class=None, auto_map=["code.Own", None]),
            "tokenizer_config.json .* tokenizer_class is None",
        ),
    ],
)
def test_a_base_that_needs_its_own_code_is_refused_without_a_prompt(
    parent, damage, cause, tmp_path, monkeypatch, capsys
):
    ran = with_code(tmp_path, parent, damage)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    assert re.search(f"code that comes with a base never runs.*{cause}", refused(tmp_path))
    if cause.startswith("config"):
        with pytest.raises(InputError, match=cause):
            load_config(str(tmp_path), revision="main")
    assert not ran.exists()
    assert "run the custom code" not in capsys.readouterr().out


def test_code_of_a_base_does_not_run_if_transformers_has_the_class(tmp_path, monkeypatch, capsys):
    model_code = says(auto_map=MODEL)
    fast = says("tokenizer_config.json", auto_map={"AutoTokenizer": ["code.Own", "code.Own"]})
    ran = with_code(tmp_path, "LlamaConfig", model_code, fast)
    # transformers would run this as the model's own `generate`
    (tmp_path / "custom_generate").mkdir()
    (tmp_path / "custom_generate" / "generate.py").write_text(f"open({str(ran)!r}, 'w')\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    base = FrozenBase.load(tmp_path, device="cpu", dtype="float32")
    assert type(base.model).__module__.startswith("transformers.")
    assert not ran.exists()
    assert "run the custom code" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (SHIPPED / "config.json", "config.json' is a file; name its folder"),
        ("/" + "a/" * 3000, "'/a/"),
        ("a\nb", r"'a\nb'"),
        ("", "got ''"),
    ],
)
def test_an_invalid_name_of_a_base_is_refused(name, message):
    assert message in refused(name)


@functools.cache
def adapter_files() -> dict[str, bytes]:
    """Return the files of a valid adapter of the tiny base."""
    import tempfile

    adapter = Adapter(copy.deepcopy(tiny.base().model), target_modules=["q_proj"], rank=2)
    with tempfile.TemporaryDirectory() as folder:
        adapter.save(Path(folder))
        return {file.name: file.read_bytes() for file in Path(folder).iterdir()}


def adapter_says(**changes: Any) -> Damage:
    return says("adapter_config.json", **changes)


def each(change: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    return tensors(
        lambda weights: weights.update({name: change(weight) for name, weight in weights.items()}),
        ADAPTER,
    )


@pytest.mark.parametrize(
    "damage",
    [
        remove(ADAPTER),
        lambda folder: (folder / ADAPTER).rename(folder / "adapter_model.bin"),
        cut(ADAPTER),
        each(lambda value: value * float("nan")),
        tensors(lambda weights: weights.popitem(), ADAPTER),
        tensors(lambda weights: weights.update(strange=torch.ones(2)), ADAPTER),
        cut("adapter_config.json"),
        write("adapter_config.json", DEEP),
        adapter_says(peft_type="NOPE"),
        adapter_says(r=10**9),
        adapter_says(megatron_config={"layers": 1}, megatron_core="transformers.models"),
    ],
)
def test_a_broken_adapter_is_refused_and_leaves_the_base_unchanged(damage, tmp_path):
    for name, content in adapter_files().items():
        (tmp_path / name).write_bytes(content)
    damage(tmp_path)
    base = FrozenBase(copy.deepcopy(tiny.base().model))
    modules, before = [*dict(base.model.named_modules())], base.fingerprint
    with pytest.raises(InputError, match=r"base\.adapter must be a LoRA adapter"):
        base.merge(tmp_path)
    assert [*dict(base.model.named_modules())] == modules
    assert base.fingerprint == before


@pytest.mark.parametrize(
    ("has", "newest", "expected"),
    [
        (True, "DEFAULT", torch.bfloat16),
        (True, "AVX512_CORE_AMX", torch.bfloat16),
        (True, "AVX512_CORE", torch.float32),
        (False, "DEFAULT", torch.float32),
    ],
)
def test_the_default_dtype_depends_on_the_cpu(has, newest, expected, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has, raising=False)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", newest)
    assert FrozenBase.load(SHIPPED, device="cpu").dtype == expected
