"""The fused loss and the dense loss on equal tensors: peak extra memory and time.

gpu.py measures both in its stage `train`. The dense variant computes the logits of all depths
together in float32 and uses autograd. Peak extra memory is the highest memory during one forward
and backward, minus the memory before it and the gradients that both variants leave: on the CPU the
resident set of the process, on CUDA the allocator's count.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from specheads.training.losses.depth_loss import LABELS_ONLY, Targets, depth_loss

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
    """Return the loss of all depths from logits that are in memory together."""
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
    """Return the loss of all depths from `depth_loss`."""
    return depth_loss(*problem, kind=kind).total


VARIANTS: dict[str, Callable[[str, Problem], Tensor]] = {"dense": dense, "fused": fused}


def make(options: argparse.Namespace) -> Problem:
    """Draw states, projections and targets of these sizes."""
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
    """Return the tensors that get gradients, each once."""
    return list({id(leaf): leaf for leaf in [*problem[0], *(w for w, _ in problem[1])]}.values())


def resident(field: str) -> int:
    """Return bytes of this process: VmRSS is current, VmHWM the peak since its reset."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}: peak memory needs Linux")


def peak_extra(options: argparse.Namespace, variant: str) -> int:
    """Return the peak bytes above inputs, parameters and their gradients."""
    problem = make(options)
    # the first products start threads and allocate buffers of libraries: run some before
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
    """Return wall and CPU seconds of one forward and backward."""
    for leaf in leaves(problem):
        leaf.grad = None
    if options.device == "cuda":
        torch.cuda.synchronize()
    wall, cpu = time.perf_counter(), time.process_time()
    VARIANTS[variant](options.kind, problem).backward()
    if options.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - wall, time.process_time() - cpu
