"""What the vLLM plug-in loads: the head, bound to the served base, and the cost of its steps."""

import importlib
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specheads.base.fingerprint import tables_fingerprint
from specheads.base.projection import projection_of
from specheads.core.cpu.weight_layout import optimise_for_few_rows
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.core.files import from_json, read_json
from specheads.core.ranges import NonNegativeFloat
from specheads.decoding.chain_budget import ChainBudget
from specheads.decoding.cost import StepCost
from specheads.decoding.trees.tuned import Machine
from specheads.export.layouts.vllm import FORCE_VARIABLE, HEAD_VARIABLE
from specheads.heads.load import load_head, refuse_misfit

LOGGER = logging.getLogger(__name__)
EMBEDDING = "vllm.model_executor.layers.vocab_parallel_embedding"
PARALLEL = "vllm.distributed"
UNNORMED = ("MiMoForCausalLM", "Step3p5ForCausalLM")
"""Models of vLLM that apply their final norm with the projection, after their hidden states."""
COST_FILE = "vllm.json"
"""Its name in an exported folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingCost:
    """Content of vllm.json: what `specheads tune engine=vllm` measured."""

    engine: str
    """vLLM and its version."""
    machine: Machine
    cost: StepCost
    cost_error: dict[str, float | int]
    """As in `Tuned`."""
    ragged: NonNegativeFloat = 0.0
    """Further seconds per request of a step that verifies unequal numbers of drafts."""


def load_served_head(target_model: Any, model_config: Any, depth: int) -> Head:
    """Load the head of `SPECHEADS_HEAD` and bind it to the tensors of a model of vLLM.

    Args:
        target_model: The model that vLLM serves. It is told which layers the head reads.
        model_config: vLLM's `ModelConfig`.
        depth: Levels that vLLM wants to draft.

    Raises:
        InputError: The plug-in cannot serve this head with this model.
    """
    head = load_head(os.environ[HEAD_VARIABLE])
    embedding, projection, bias = gather_tables(target_model)
    model_name = type(target_model).__name__
    if head.num_anchors:
        raise InputError(
            f"the plug-in serves heads that draft token by token, and {head.kind} drafts "
            "blocks; export it with engine=speculators, which vLLM loads itself"
        )
    if model_name in UNNORMED:
        raise InputError(
            "a head reads states after the base's final norm, and vLLM gives those before it "
            f"for {model_name}; serve another base"
        )
    if head.aux_layers:
        if not hasattr(target_model, "set_aux_hidden_state_layers"):
            raise InputError(
                f"{head.kind} reads earlier layers, which vLLM does not return for "
                f"{model_name}; use a head without aux_layers"
            )
        target_model.set_aux_hidden_state_layers(head.aux_layers)
    if depth > head.depth:
        raise InputError(
            f"num_speculative_tokens must be at most {head.depth}, the head's depth, got {depth}"
        )
    # only these two tables: the engine fuses and shards the layers between them
    is_forced = os.environ.get(FORCE_VARIABLE) == "true"
    fingerprint = "" if is_forced else tables_fingerprint(embedding, projection)
    refuse_misfit(head, embedding, fingerprint)
    head.to(embedding.device, model_config.dtype)
    optimise_for_few_rows(head)
    base_projection = projection_of(model_config.hf_text_config, projection, bias)
    head.bind(embedding, base_projection.scaled_weight, base_projection.scaled_bias)
    return head


def gather_tables(target_model: torch.nn.Module) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gather the input embedding, the vocabulary projection and its bias from all devices."""
    layers = importlib.import_module(EMBEDDING)
    gather = importlib.import_module(PARALLEL).tensor_model_parallel_all_gather
    tables = [
        module
        for module in target_model.modules()
        if isinstance(module, layers.VocabParallelEmbedding)
    ]
    inputs = [table for table in tables if not isinstance(table, layers.ParallelLMHead)]
    if not inputs:
        raise InputError(
            "a head needs its base's input embedding on the device that samples; serve without "
            "pipeline parallelism"
        )
    # a base with tied embeddings has no ParallelLMHead
    outputs = [table for table in tables if table not in inputs] or inputs
    pair = inputs[0], outputs[0]
    weights = [getattr(table, "weight", torch.empty(0, dtype=torch.uint8)) for table in pair]
    if any(weight.dtype.itemsize < 2 for weight in weights):
        raise InputError(
            "a head needs its base's embedding and lm_head in 16 or 32 bits, and this base has a "
            "quantised one; serve a base that keeps both"
        )
    embedding, projection = (
        gather(weight.data, 0)[: table.org_vocab_size]
        for weight, table in zip(weights, pair, strict=True)
    )
    if (bias := getattr(outputs[0], "bias", None)) is not None:
        bias = gather(bias.data, 0)[: len(projection)]
    return embedding, projection, bias


def load_budget(head: Head, machine: Machine, depth: int) -> ChainBudget | None:
    """Return the budget of a calibrated head whose cost was measured on this machine, else None."""
    file, tuned = Path(os.environ[HEAD_VARIABLE]) / COST_FILE, head.tuned
    if not file.is_file() or tuned is None or not tuned.acceptance.curves:
        return None
    serving = from_json(ServingCost, read_json(file), str(file))
    if serving.machine != machine:
        LOGGER.warning(
            "%s was measured on %s and this is %s: every request gets %d drafts; measure again "
            "with specheads tune engine=vllm",
            *(file, serving.machine, machine, depth),
        )
        return None
    acceptance = tuned.acceptance
    return ChainBudget(serving.cost, acceptance.per_depth, acceptance.curves, serving.ragged)
