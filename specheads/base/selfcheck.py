"""Checks of a base when it is loaded: tree verification and the vocabulary projection work."""

from contextlib import suppress
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from specheads.base.forward import Forwards
from specheads.base.projection import vocabulary_projection
from specheads.core.cpu.exact_attention import BLOCK, keeps_order
from specheads.core.errors import InputError, first_line
from specheads.core.tree import TokenTree, chain

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Largest relative difference between two ways to compute the same logits; 0.05 for 16 bits."""
MAX_CHECKED_WINDOW = 512
"""Longest window behind which a base is checked: longer ones would delay every start."""
MAX_TRIES = 3
"""Texts with which a base with experts is checked. Rounding can send a token to another expert,
which changes its logits by more than `TOLERANCE`; a wrong mask fails with every text."""


@torch.no_grad()
def check(forwards: Forwards) -> None:
    """Compare the logits of four tokens with those of the same tokens as a path of a tree.

    The tokens follow a text that is longer than the windows of the base. With states they are two
    chains, after a part of the first is rolled back. A ValueError is raised if the logits differ,
    or are not the vocabulary projection of the final hidden state.
    """
    kind = forwards.model.config.model_type
    for number in range(MAX_TRIES if forwards.experts else 1):
        try:
            plain, projected, decoded, verified = _logits_in_four_ways(forwards, 17 * number)
        except Exception as error:
            # a model that does not know masks or positions can raise any error
            raise InputError(
                f"tree verification needs a base that takes a 4D mask and positions; {kind!r} "
                f"fails with {first_line(error)!r}; choose another base"
            ) from error
        if not plain.isfinite().all():
            raise InputError(
                f"the logits of a base must be finite, and those of {kind!r} are not; its weights "
                "are damaged, or too large for its dtype: load it again, or with dtype=float32"
            )
        dtype = forwards.model.dtype
        if forwards.mixers and dtype == torch.float64:
            # transformers computes their states in float32
            dtype = torch.float32
        bound = TOLERANCE.get(dtype, 0.05) * (1e-3 + plain.abs().max())
        if not (plain - projected).abs().max() <= bound:
            raise InputError(
                f"the logits of {kind!r} must be its vocabulary projection of the final hidden "
                "state, and are not: it scales or changes them in its own way; choose another base"
            )
        if (decoded - verified).abs().max() <= bound:
            return
    raise InputError(
        f"{kind!r} does not compute a path in a tree as it computes a text; choose another base"
    )


def _logits_in_four_ways(forwards: Forwards, shift: int) -> tuple[Tensor, ...]:
    """Return the logits of four tokens: of the model, of their hidden states, decoded, in a tree.

    Some mixers read single positions in another way than a whole text; other bases do not decode.
    """
    model, device = forwards.model, forwards.model.device
    projection = vocabulary_projection(model)
    vocab_size = len(projection.weight)
    path = torch.arange(1 + shift, 5 + shift, device=device) % vocab_size
    #  0 - 2 - 4 - 5     the path, with a wrong sibling of its second and third token
    #   `- 1  `- 3
    tokens = path[torch.tensor([0, 3, 1, 0, 2, 3], device=device)][None]
    tree = TokenTree(tokens, torch.tensor([[-1, 0, 0, 2, 2, 4]], device=device))
    windows = [
        window for window in forwards.windows.values() if window and window <= MAX_CHECKED_WINDOW
    ]
    length = max(windows, default=0) + 1
    text = torch.arange(5 + shift, 5 + shift + length, device=device)[None] % vocab_size
    cache = forwards.cache(1, length + 6)
    forwards.prefill(text, cache, [length])
    text_and_path = torch.cat([text, path[None]], dim=1)
    # with a vocabulary of 262k the logits of a whole window take half a gigabyte
    may_keep = "logits_to_keep" in signature(model.forward).parameters
    last = {"logits_to_keep": 4} if may_keep else {}
    plain = model(input_ids=text_and_path, use_cache=False, **last).logits[0, -4:]
    projected = projection(forwards.read(text_and_path).hidden[:, -4:])[0]
    if not forwards.mixers:
        return plain, projected, plain, forwards.verify(tree, cache).logits[0, [0, 2, 4, 5]]
    # only the first token of the chain is kept, so that its states are rolled back
    first = forwards.verify(chain(path[None, [0, 3, 2]]), cache).logits[0, :1]
    cache.commit([[0]])
    verified = torch.cat([first, forwards.verify(chain(path[None, 1:]), cache).logits[0]])
    return plain, projected, _decode(forwards, text, path), verified


def _decode(forwards: Forwards, text: Tensor, path: Tensor) -> Tensor:
    """Return the logits of tokens that transformers alone reads one at a time after a text."""
    logits, model, position = [], forwards.model, 0
    inputs: dict[str, Any] = {forwards.cache_argument: DynamicCache(config=forwards.config)}
    for tokens in (text, *path[None].split(1, dim=1)):
        # Mamba has no positions, and Bamba counts from zero without them
        if "position_ids" in signature(model.base_model.forward).parameters:
            positions = position + torch.arange(tokens.shape[1], device=text.device)[None]
            inputs["position_ids"] = positions
        logits.append(model(input_ids=tokens, use_cache=True, **inputs).logits[0, -1])
        position += tokens.shape[1]
    return torch.stack(logits[1:])


@torch.no_grad()
def check_exact(forwards: Forwards, *, compile: bool = False) -> None:
    """Make a base exact; raise a ValueError if it cannot be, and leave it as it was."""
    if forwards.kinds:
        raise InputError(
            "exact=true needs layers with keys and values only, and those of "
            f"{forwards.config.model_type!r} keep states; leave exact out"
        )
    attention = forwards.config._attn_implementation
    compile = compile or forwards.is_compiled
    if compile or forwards.model.device.type != "cpu" or attention != "sdpa":
        raise InputError(
            "exact=true needs compile=false, device=cpu and attention=sdpa, got "
            f"compile={compile}, device={forwards.model.device} and attention={attention}; change "
            "them, or leave exact out"
        )
    if not forwards.count_attention_calls():
        raise InputError(
            "exact=true needs layers that pass arguments on to their attention, and those of "
            f"{forwards.config.model_type!r} do not; leave exact out"
        )
    is_exact = False
    forwards.exact = True
    try:
        is_exact = keeps_order(forwards.model.dtype) and _decodes_exactly(forwards)
    except RuntimeError as error:
        raise InputError(
            "exact=true needs attention that torch's flash kernel computes; "
            f"{forwards.config.model_type!r} fails with {first_line(error)!r}; leave exact out"
        ) from error
    finally:
        forwards.exact = is_exact
    if not is_exact:
        raise InputError(
            f"exact=true needs matrix products that do not depend on the number of rows, and "
            f"in {forwards.model.dtype} this machine's do; set MKL_ENABLE_INSTRUCTIONS=AVX512 in "
            "the environment on an Intel CPU, try another dtype, or leave exact out"
        )


def make_exact(forwards: Forwards) -> bool:
    """Make a base in bfloat16 exact where it and the machine can; return whether it has changed."""
    if forwards.exact or forwards.model.dtype != torch.bfloat16:
        return False
    with suppress(InputError):
        check_exact(forwards)
    return forwards.exact


def _decodes_exactly(forwards: Forwards) -> bool:
    """Return whether a path of a tree has the logits of its tokens one by one, bit for bit."""
    # the levels of the tree are on both sides of a multiple of the blocks of exact attention
    length = 3 * BLOCK - 2
    vocab_size = len(vocabulary_projection(forwards.model).weight)
    tokens = torch.arange(3, 3 + length + 7)[None] * 7919 % vocab_size
    text, nodes = tokens[:, :length], tokens[:, length:]
    parents = [-1, 0, 0, 2, 2, 4, 4]
    cache = forwards.cache(1, length + 7)
    forwards.prefill(text, cache, [length])
    verified = forwards.verify(TokenTree(nodes, torch.tensor([parents])), cache).logits
    for node in (0, 2, 4, 6):
        step = forwards.verify(TokenTree(nodes[:, [node]], torch.tensor([[-1]])), cache).logits
        cache.commit([[0]])
        if not torch.equal(step[:, 0], verified[:, node]):
            return False
    return True
