"""The optimizers of a head: AdamW, or Muon for its hidden matrices."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from specheads.config.training import Schedule
from specheads.core.drafter import Head
from specheads.core.machine import computes_bfloat16

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic Newton-Schulz iteration, as in torch."""
ITERATIONS = 5
BETAS = (0.9, 0.95)
"""Betas of AdamW."""


def roles(
    head: Head, schedule: Schedule, adapter: Sequence[nn.Parameter] = ()
) -> dict[str, list[nn.Parameter]]:
    """Return the trained parameters by role, which selects their learning rate.

    Role `hidden` has the matrices without a vocabulary axis, which Muon updates.
    """
    parameters: dict[str, list[nn.Parameter]] = {"head": [], "base": list(adapter), "hidden": []}
    vocabulary_sizes = {head.vocab_size, head.drafted_size}
    for parameter in head.parameters():
        is_hidden = parameter.ndim == 2 and not vocabulary_sizes & set(parameter.shape)
        if parameter.requires_grad:
            by_muon = schedule.muon_learning_rate > 0 and is_hidden
            parameters["hidden" if by_muon else "head"].append(parameter)
    return parameters


def optimizers(
    head: Head, schedule: Schedule, adapter: Sequence[nn.Parameter] = ()
) -> list[torch.optim.Optimizer]:
    """Return AdamW for all parameters, or Muon for the hidden matrices and AdamW for the others.

    The adapter of joint phases has its own AdamW. The `role` of a group selects its learning rate.
    """
    groups = [
        {"params": parameters, "role": role}
        for role, parameters in roles(head, schedule, adapter).items()
        if parameters
    ]
    decay = schedule.weight_decay
    return [
        Muon([group], lr=1.0, weight_decay=decay)
        if group["role"] == "hidden"
        else torch.optim.AdamW([group], lr=1.0, betas=BETAS, weight_decay=decay, fused=True)
        for group in groups
    ]


class Muon(torch.optim.Muon):
    """`torch.optim.Muon`, with float32 iterations on a CPU that emulates bfloat16.

    torch always iterates in bfloat16. On a CPU with AVX2 only, a whole training step of
    recipe=tiny_code then takes twice as long (3.7 s instead of 1.9 s). On other devices this is
    `torch.optim.Muon` bit for bit.

    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take an optimizer step."""
        parameters = [value for group in self.param_groups for value in group["params"]]
        if computes_bfloat16() or any(value.device.type != "cpu" for value in parameters):
            return super().step(closure)
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if (gradient := parameter.grad) is None:
                    continue
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(gradient)
                momentum = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
                update = orthogonalize(gradient.lerp(momentum, group["momentum"]).float())
                rows, columns = parameter.shape
                rate = group["lr"] * max(1.0, rows / columns) ** 0.5
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(update.to(parameter.dtype), alpha=-rate)
        return loss


def orthogonalize(matrix: Float[Tensor, "width aux"]) -> Float[Tensor, "width aux"]:
    """Return a matrix with the same singular vectors and singular values between 0.7 and 1.2."""
    first, second, third = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    out = matrix.T if is_tall else matrix
    out = out / out.norm().clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = out @ out.T
        update = torch.addmm(gram, gram, gram, beta=second, alpha=third)
        out = torch.addmm(out, update, out, beta=first)
    return out.T if is_tall else out
