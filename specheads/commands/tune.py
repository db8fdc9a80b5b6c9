"""Choose the draft tree of a head for this machine from measured costs and acceptance.

specheads tune run=runs/smollm2
specheads tune head=HEAD base=MODEL 'batch_sizes=[1,8]' 'contexts=[128,1024]'
specheads tune engine=vllm head=served base=MODEL 'batch_sizes=[1,2,4,8,16]' python=VLLM_PYTHON
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from specheads.base.gguf import load_path
from specheads.base.loading import load_config
from specheads.base.model import FrozenBase
from specheads.commands._call import checked_settings
from specheads.commands._library import load_base_and_head
from specheads.config.commands import Tune
from specheads.core.errors import InputError
from specheads.core.files import dumps, from_json, local_path, writable_folder, write_atomic
from specheads.core.machine import dtype_name
from specheads.decoding.trees.tuned import FILE, Machine, Tuned
from specheads.export.layouts.vllm import HEAD_VARIABLE
from specheads.export.vllm_adapter import COST_FILE, ServingCost
from specheads.heads.load import load_head
from specheads.measure.step_times import (
    CostError,
    fit_ragged,
    fit_server_cost,
    measure_until_it_fits,
)
from specheads.measure.tune import CONTEXTS, tune_head, tuning_table
from specheads.runs.directory import RunDirectory
from specheads.runs.progress import progress_display
from specheads.training.memory import server_dtype

ROOM = 512
"""Most tokens that vLLM generates after a prompt while its steps are timed."""


def run(settings: Tune) -> None:
    """Tune the head of a run, or any head on its base."""
    if settings.engine:
        served = tune_vllm(settings)
        verify, draft, error = served.cost.verify, served.cost.draft, served.cost_error
        sys.stdout.write(
            f"{served.engine}: {1e3 * verify.fixed:.2f} ms a step and {1e3 * verify.token:.2f} ms "
            f"a verified token; {1e3 * draft.fixed:.2f} ms a drafted level and "
            f"{1e3 * draft.token:.2f} ms a request of it; median error {error['median']:.1%} over "
            f"{error['points']} points\ntuned: {head_folder(settings) / COST_FILE}\n"
        )
        return
    Console().print(tuning_table(tune(settings=settings)))
    sys.stdout.write(f"tuned: {head_folder(settings) / FILE}\n")
    if settings.run:
        sys.stdout.write(
            f"next: specheads evaluate run={settings.run}, or specheads export run={settings.run} "
            "engine=ENGINE out=FOLDER\n"
        )


def tune(
    run: str | Path = "",
    overrides: Sequence[str] = (),
    *,
    settings: Tune | None = None,
    base: FrozenBase | None = None,
) -> Tuned:
    """Choose the draft tree of a head for this machine.

    `overrides` are like `["max_nodes=32", "contexts=[128,1024]"]`.

    Returns:
        The content of tuned.json, which is written into the folder of the head. Decoding reads it.
    """
    settings = settings or checked_settings(Tune, overrides, run=run)
    if settings.engine:
        raise InputError("engine=vllm chooses no trees, got it in `tune`; call `tune_vllm`")
    folder = writable_folder(head_folder(settings))
    base, head = load_base_and_head(settings, base)
    names = "batch_sizes", "contexts", "max_nodes", "num_prompts", "new_tokens", "seed"
    options = {name: getattr(settings, name) for name in names}
    tuned = tune_head(base, head, settings.data, **options)
    write_atomic(folder / FILE, dumps(tuned))
    return tuned


def tune_vllm(settings: Tune) -> ServingCost:
    """Time steps of vLLM with an exported head; return vllm.json, written into its folder.

    Raises:
        InputError: The head was not tuned, vLLM cannot serve it, or its step times are noisy.
    """
    folder = writable_folder(head_folder(settings))
    head, base = load_head(folder), settings.base
    if head.tuned is None or not head.tuned.acceptance.curves:
        raise InputError(
            f"engine=vllm needs a calibrated head, and {folder / FILE} has no calibration; run "
            "specheads tune on the head, with more num_prompts= or after more training if that did "
            "not calibrate it, and export it again"
        )
    config = load_config(load_path(base.model), revision=base.revision)
    longest = config.get_text_config().max_position_embeddings - ROOM
    job = {
        "model": load_path(base.model),
        "dtype": dtype_name(server_dtype(base.dtype)),
        "depth": head.depth,
        "batch_sizes": settings.batch_sizes,
        "contexts": settings.contexts or [context for context in CONTEXTS if context <= longest],
    }
    python = settings.python or sys.executable
    served, _ = measure_until_it_fits(partial(time_vllm, python, folder, job))
    write_atomic(folder / COST_FILE, dumps(served))
    return served


def time_vllm(python: str, folder: Path, job: dict[str, Any]) -> tuple[ServingCost, CostError]:
    """Time steps of vLLM in the environment of an interpreter; return the cost and its error."""
    num_loads = len(job["contexts"]) * len(job["batch_sizes"])
    sys.stderr.write(f"starting vLLM with {job['model']}, to time its steps at {num_loads} loads\n")
    # without a size of its cache vLLM takes nearly all memory of a CPU, and fails if it is in use
    environment = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1"} | os.environ
    # vLLM in this process: another one could not return the times
    changes = {HEAD_VARIABLE: str(folder), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    with progress_display(shown=True, transient=True) as display:
        display.add_task("vLLM compiles its model, then runs", total=None, numbers="")
        process = subprocess.run(
            [python, "-m", "specheads.export.vllm_cost"],
            input=json.dumps(job),
            env=environment | changes,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
    if process.returncode:
        raise InputError(
            f"vLLM must run the head, and failed as above; if {python} has no vLLM or no "
            "specheads, name another interpreter as python=PATH; if memory is short, set "
            f"VLLM_CPU_KVCACHE_SPACE (GiB of cache, {environment['VLLM_CPU_KVCACHE_SPACE']} here)"
        )
    answer = json.loads(process.stdout)
    cost, error = fit_server_cost(answer["steps"])
    served = ServingCost(
        engine=answer["engine"],
        machine=from_json(Machine, answer["machine"]),
        cost=cost,
        cost_error=error,
        ragged=fit_ragged(answer["steps"], answer["ragged"], cost),
    )
    return served, error


def head_folder(settings: Tune) -> Path:
    """Return the folder of the head, which gets tuned.json."""
    if settings.run:
        return RunDirectory(Path(settings.run)).head
    folder = local_path(settings.head_path)
    if not settings.head_path or not folder.is_dir():
        raise InputError(
            "tuned.json is written into the head's folder: name run=DIR, or head=FOLDER and "
            f"base=PATH; got head={settings.head_path!r:.80}"
        )
    return folder
