"""Second implementations of each head, as test oracles for exports.

One module per family of heads, with plain functions over stored tensors. Each follows an engine's
source code or documentation: tensor names, layer ids, tying, vocabulary maps and formulas. They
share no code with the heads. An oracle takes every stored tensor, and refuses one that is missing,
unknown or of another shape.
"""

from tests.oracles import blocks, eagle3, medusa, mlp_speculator
from tests.oracles.shared import DraftOracle

ORACLES: dict[tuple[str, str], DraftOracle] = {
    ("medusa", "tgi"): medusa.tgi,
    ("mlp_speculator", "tgi"): mlp_speculator.tgi,
    ("eagle3", "vllm"): eagle3.vllm,
    ("eagle3", "speculators"): eagle3.speculators,
    ("eagle3", "sglang"): eagle3.sglang,
    ("eagle3", "tensorrt_llm"): eagle3.tensorrt_llm,
    ("eagle3", "llama_cpp"): eagle3.llama_cpp,
    ("dflash", "speculators"): blocks.dflash,
    ("dspark", "speculators"): blocks.dspark,
    ("dflash2", "speculators"): blocks.dflash2,
    ("dflash2", "sglang"): blocks.sglang_dflash2,
    ("dflash2", "vllm"): blocks.vllm_dflash,
    ("domino", "sglang"): blocks.sglang_domino,
    ("dflash", "sglang"): blocks.sglang_dflash,
    ("dflash", "vllm"): blocks.vllm_dflash,
    ("dspark", "sglang"): blocks.sglang_dspark,
    ("dflash", "transformers"): blocks.transformers,
    ("dflash", "llama_cpp"): blocks.llama_cpp,
    ("dspark", "llama_cpp"): blocks.llama_cpp,
}
"""The oracle for each kind of head and engine. A new layout needs an entry. Our own needs none:
our plug-in for vLLM reads it with the heads themselves."""
