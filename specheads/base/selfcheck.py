"""What a base shows when it is loaded: its trees and its logits are what we take them for."""

import torch

from specheads.base.cache import KVCache
from specheads.base.forward import Forwards
from specheads.core.errors import InputError
from specheads.core.tree import TokenTree

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Largest difference of two ways to the same logits, as a share of the largest logit: 0.05 where
the base computes in 16 bits."""


@torch.no_grad()
def check(base: Forwards) -> None:
    """Read four tokens plainly, and once more among siblings in a tree: both must agree.

    Raises:
        ValueError: The model takes no tree, or reads a path among siblings differently, or its
            logits are not its vocabulary projection of the final hidden state.
    """
    model, device, kind = base.model, base.device, base.model.config.model_type
    try:
        projection = base.projection
        path = torch.arange(1, 5, device=device) % len(projection.weight)
        #  0 - 2 - 4 - 5     the path, with a wrong sibling beside its second and third token
        #   `- 1  `- 3
        tokens = path[torch.tensor([0, 3, 1, 0, 2, 3], device=device)][None]
        tree = TokenTree(tokens, torch.tensor([[-1, 0, 0, 2, 2, 4]], device=device))
        cache = KVCache(base.config.num_hidden_layers, 1, 6, device)
        plain = model(input_ids=path[None], use_cache=False).logits[0]
        projected = projection(base.read(path[None]).hidden)[0]
        verified = base.verify(tree, cache).logits[0]
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(
            f"tree verification needs a base that takes a 4D mask and positions; {kind!r} "
            f"fails with {str(error).splitlines()[0]!r}; choose another base"
        ) from error
    if not plain.isfinite().all():
        raise InputError(
            f"a base must say something, and the logits of {kind!r} are not finite; its weights "
            "are damaged, or too large for its dtype: load it again, or with dtype=float32"
        )
    bound = TOLERANCE.get(base.dtype, 0.05) * (1e-3 + plain.abs().max())
    if not (plain - projected).abs().max() <= bound:
        raise InputError(
            f"the logits of {kind!r} must be its vocabulary projection of the final hidden "
            "state, and are not; teach specheads.base.projection its rule"
        )
    if not (plain - verified[[0, 2, 4, 5]]).abs().max() <= bound:
        raise InputError(
            f"tree verification needs a base that knows tokens by mask and position; {kind!r} "
            "reads a path among siblings differently; choose another base"
        )


@torch.no_grad()
def check_exact(base: Forwards, *, compile: bool) -> None:
    """Have a base be exact from now on, once it has shown that it can be.

    A path of a tree is read again step by step: all logits must be the same, bit for bit.

    Raises:
        ValueError: They are not, or it is to be compiled, or it is not on a CPU, or its attention
            is another than sdpa.
    """
    for wrong, what in (
        (compile, "is compiled: leave compile=true out"),
        (base.device.type != "cpu", f"is on {base.device}: choose device=cpu"),
        (base.config._attn_implementation != "sdpa", "attends otherwise: choose attention=sdpa"),
    ):
        if wrong:
            raise InputError(f"exact=true takes a base as it is on a CPU, and this one {what}")
    base.exact = True
    tokens = torch.arange(3, 3 + 24)[None] * 7919 % len(base.projection.weight)
    text, nodes = tokens[:, :17], tokens[:, 17:]
    parents = [-1, 0, 0, 2, 2, 4, 4]
    cache = KVCache(base.config.num_hidden_layers, 1, 17 + 7)
    base.prefill(text, cache, [17])
    verified = base.verify(TokenTree(nodes, torch.tensor([parents])), cache).logits
    for node in (0, 2, 4, 6):
        step = base.verify(TokenTree(nodes[:, [node]], torch.tensor([[-1]])), cache).logits
        cache.commit([[0]])
        if not torch.equal(step[:, 0], verified[:, node]):
            raise InputError(
                f"exact=true needs products whose rows do not hang on how many there are, and in "
                f"{base.dtype} this machine's do; try another dtype, or leave exact out"
            )
