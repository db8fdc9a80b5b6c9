"""Measure the fused loss against the dense one: peak extra memory and time.

    python scripts/bench_loss.py                  # K 4, 2,048 rows, 49,152 x 1,024, float32
    python scripts/bench_loss.py --device cuda    # K 5, 8,192 rows, 128,256 x 4,096, bfloat16

The dense version is what one would write without this library: logits of all depths together,
in float32, and autograd. Both are given the same states, projections and states of the base.

Peak extra memory is the high-water mark during one forward and backward, above what was held
before it, less the gradients that both leave behind. On the CPU it is the process's resident
set, with every variant in a process of its own; on CUDA the allocator's own count. Time is the
median over pairs of runs that take turns in one process: by the wall, and on the CPU also the
processor's own, which other programs disturb less.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from specheads.training.losses.depth_loss import KINDS, LABELS_ONLY, Targets, depth_loss

SIZES = {
    "cpu": {"depth": 4, "rows": 2048, "vocab": 49_152, "width": 1024, "dtype": "float32"},
    "cuda": {"depth": 5, "rows": 8192, "vocab": 128_256, "width": 4096, "dtype": "bfloat16"},
}
GIB = 2**30
Problem = tuple[list[Tensor], list[tuple[Tensor, None]], Any]


def dense_row_loss(kind: str, logits: Tensor, base_logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss of one depth, the way autograd differentiates it."""
    if kind == "cross_entropy":
        return F.cross_entropy(logits, labels)
    if kind == "argmax_cross_entropy":
        return F.cross_entropy(logits, base_logits.argmax(-1))
    base_probs = base_logits.softmax(-1)
    if kind == "soft_cross_entropy":
        return F.cross_entropy(logits, base_probs)
    log_probs, base_log_probs = logits.log_softmax(-1), base_logits.log_softmax(-1)
    divergence = F.kl_div(log_probs, base_log_probs, reduction="none", log_target=True).sum(-1)
    if kind == "kl":
        return divergence.mean()
    if kind == "reverse_kl":
        return (log_probs.exp() * (log_probs - base_log_probs)).sum(-1).mean()
    accepted = torch.minimum(log_probs.exp(), base_probs).sum(-1)
    if kind == "total_variation":
        return (1 - accepted).mean()
    if kind == "lk":
        return -accepted.log().mean()
    trust = torch.exp(-3 * accepted.detach())
    return (trust * divergence + (1 - trust) * (1 - accepted)).mean()


def dense(kind: str, problem: Problem) -> Tensor:
    """Return the loss of all depths from logits that are held together."""
    states, projections, targets = problem
    base_logits = targets.labels
    if targets.project is not None:
        base_logits = targets.project(targets.base_hidden).float()
    logits = torch.stack(
        [F.linear(state, *pair) for state, pair in zip(states, projections, strict=True)]
    )
    by_depth = [dense_row_loss(kind, each.float(), base_logits, targets.labels) for each in logits]
    return torch.stack(by_depth).sum()


def fused(kind: str, problem: Problem) -> Tensor:
    """Return the same from specheads.training.losses.depth_loss."""
    return depth_loss(*problem, kind=kind).total


VARIANTS: dict[str, Callable[[str, Problem], Tensor]] = {"dense": dense, "fused": fused}


def make(options: argparse.Namespace) -> Problem:
    """Draw states, projections and targets of the sizes asked for."""
    torch.manual_seed(0)
    how: dict[str, Any] = {"device": options.device, "dtype": getattr(torch, options.dtype)}
    states = [
        torch.randn(options.rows, options.width, **how).requires_grad_()
        for _ in range(options.depth)
    ]

    def weight() -> Tensor:
        return torch.randn(options.vocab, options.width, **how).mul_(options.width**-0.5)

    own = [weight().requires_grad_() for _ in range(1 if options.tied else options.depth)]
    base_weight = weight()
    labels = torch.randint(options.vocab, (options.rows,), device=options.device)
    hidden = torch.randn(options.rows, options.width, **how)

    @torch.no_grad()
    def project(rows: Tensor) -> Tensor:
        return F.linear(rows, base_weight)

    logits_of = None if options.kind in LABELS_ONLY else project
    projections: list[tuple[Tensor, None]] = [
        (own[0 if options.tied else level], None) for level in range(options.depth)
    ]
    return states, projections, Targets(labels, hidden, logits_of)


def leaves(problem: Problem) -> list[Tensor]:
    """Return what gets gradients, each once."""
    return list({id(leaf): leaf for leaf in [*problem[0], *(w for w, _ in problem[1])]}.values())


def resident(field: str) -> int:
    """Return bytes of this process: VmRSS now, or VmHWM at most since the mark was reset."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status tells no {field}: peak memory is measured on Linux only")


def peak_extra(options: argparse.Namespace, variant: str) -> int:
    """Return the bytes held at most above inputs, parameters and their gradients."""
    problem = make(options)
    # threads, and the libraries' own buffers, come with the first products; they are no one's
    small = [torch.randn(64, 64, device=options.device, requires_grad=True) for _ in range(2)]
    F.cross_entropy(
        small[0] @ small[1], torch.zeros(64, dtype=torch.long, device=options.device)
    ).backward()
    gradients = sum(leaf.nbytes for leaf in leaves(problem))
    if options.device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        VARIANTS[variant](options.kind, problem).backward()
        return torch.cuda.max_memory_allocated() - before - gradients
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = resident("VmRSS")
    VARIANTS[variant](options.kind, problem).backward()
    return resident("VmHWM") - before - gradients


def once(options: argparse.Namespace, variant: str, problem: Problem) -> tuple[float, float]:
    """Return wall and processor seconds of one forward and backward."""
    for leaf in leaves(problem):
        leaf.grad = None
    if options.device == "cuda":
        torch.cuda.synchronize()
    wall, processor = time.perf_counter(), time.process_time()
    VARIANTS[variant](options.kind, problem).backward()
    if options.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - wall, time.process_time() - processor


def paired_times(options: argparse.Namespace) -> dict[str, Any]:
    """Return medians over pairs that take turns at going first."""
    problem = make(options)
    taken: dict[str, list[tuple[float, float]]] = {variant: [] for variant in VARIANTS}
    for pair in range(options.pairs + 1):
        for variant in sorted(VARIANTS, reverse=bool(pair % 2)):
            taken[variant].append(once(options, variant, problem))
    found: dict[str, Any] = {}
    for place, clock in enumerate(("wall", "processor")):
        # the first pair warms up caches and allocators
        of = {variant: [run[place] for run in runs[1:]] for variant, runs in taken.items()}
        found |= {f"{variant}_{clock}_seconds": median(runs) for variant, runs in of.items()}
        ratios = [ours / theirs for ours, theirs in zip(of["fused"], of["dense"], strict=True)]
        found[f"{clock}_ratio"] = median(ratios)
    return found


def measured(what: str) -> Any:
    """Run one measurement in a process of its own."""
    command = [sys.executable, __file__, "--measure", what, *sys.argv[1:]]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def hardware(options: argparse.Namespace) -> dict[str, Any]:
    """Return what the numbers were measured on."""
    if options.device == "cuda":
        name = torch.cuda.get_device_name()
    else:
        models = [
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
            if line.startswith("model name")
        ]
        name = models[0] if models else platform.machine()
    return {
        "device": name,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def parse() -> argparse.Namespace:
    """Read the command line; sizes default to the device's case."""
    parser = argparse.ArgumentParser(description="Measure the fused loss against the dense.")
    parser.add_argument("--device", choices=tuple(SIZES), default="cpu")
    parser.add_argument("--kind", choices=tuple(KINDS), default="soft_cross_entropy")
    for name in ("depth", "rows", "vocab", "width"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"))
    parser.add_argument("--tied", action="store_true", help="one projection for all depths")
    parser.add_argument("--pairs", type=int, default=3, help="timed pairs, after one to warm up")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    for name, value in SIZES[options.device].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def main() -> None:
    """Measure each variant, and print a table."""
    options = parse()
    if options.measure == "time":
        print(json.dumps(paired_times(options)))
        return
    if options.measure:
        print(json.dumps(peak_extra(options, options.measure)))
        return
    result: dict[str, Any] = {f"{name}_peak_extra_bytes": measured(name) for name in VARIANTS}
    result["memory_ratio"] = result["fused_peak_extra_bytes"] / result["dense_peak_extra_bytes"]
    result |= measured("time")
    sizes = {name: getattr(options, name) for name in ("kind", *SIZES["cpu"], "tied", "pairs")}
    report = {"schema": 1, "sizes": sizes, "hardware": hardware(options), "result": result}
    print(", ".join(f"{name} {value}" for name, value in {**sizes, **report["hardware"]}.items()))
    print(f"{'':8}{'peak extra GiB':>16}{'wall s':>10}{'processor s':>13}")
    for name in VARIANTS:
        print(
            f"{name:8}{result[f'{name}_peak_extra_bytes'] / GIB:16.3f}"
            f"{result[f'{name}_wall_seconds']:10.2f}{result[f'{name}_processor_seconds']:13.2f}"
        )
    print(
        f"{'ratio':8}{result['memory_ratio']:16.3f}{result['wall_ratio']:10.2f}"
        f"{result['processor_ratio']:13.2f}"
    )
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
