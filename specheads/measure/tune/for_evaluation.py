"""The tree that an evaluation decodes with: as asked for, as tuned, or chosen here and now."""

import statistics
from dataclasses import fields, replace

from specheads.base.model import FrozenBase
from specheads.core.drafter import Head
from specheads.data.prompts import Prompt, PromptSet
from specheads.decoding.trees import policies
from specheads.decoding.trees.named import fixed_policy
from specheads.decoding.trees.tuned import Tuned
from specheads.measure.how import Asked, how_of
from specheads.measure.results import Candidate
from specheads.measure.tune.cost import room
from specheads.measure.tune.finals import Effort
from specheads.measure.tune.run import choose
from specheads.measure.tune.texts import prompts_for, write

TUNING_TOKENS = 64
"""Tokens that the base writes after each prompt that a tree is chosen on."""

QUICK = Effort(max_nodes=16, grid_rounds=3, rounds=6, decodes=False)
"""What an evaluation spends on the choice; what it decodes with can be replayed."""


def decoded_context(settings: Asked, prompts: PromptSet) -> int:
    """Return the tokens of a usual text of an evaluation while it is decoded."""
    lengths = [len(prompt.tokens) for prompt in prompts.prompts]
    return round(statistics.median(lengths) + settings.evaluation.max_new_tokens / 2)


def choose_tree(
    base: FrozenBase, head: Head, settings: Asked, context: int
) -> tuple[policies.TreePolicy, Tuned | None]:
    """Return the tree that was asked for, and what was measured here where that is the best one.

    What `specheads tune` chose counts where it was measured on a machine like this one, greedily:
    the tree of the batch and of this context, throughout, so that it can be replayed. Else the
    same is measured here for them alone, with fewer steps, as tokens are drawn and drafts see it.
    """
    if (tree := fixed_policy(settings.tree, head.depth)) is not None:
        return tree, None
    asked = settings.evaluation
    if head.tuned and head.tuned.fits(base.device, base.dtype) and asked.temperature == 0:
        return head.tuned.best(asked.batch_size, context).policy(), None
    prompts = tuning_prompts(settings, base)
    how = how_of(asked, settings.seed, [one.source for one in prompts])
    how = replace(how, max_new_tokens=TUNING_TOKENS)
    context = max(min(context, base.max_length - room(head.depth)), 1)
    texts = write(base, head, [one.tokens for one in prompts], context, how)
    tuned = choose(base, head, [texts], [asked.batch_size], how, QUICK)
    return tuned.trees[0].policy(), tuned


def candidates(tuned: Tuned) -> list[Candidate]:
    """Return what was timed as results.json has it."""
    names = [item.name for item in fields(Candidate)]
    return [Candidate(**{name: getattr(row, name) for name in names}) for row in tuned.tried]


def tuning_prompts(settings: Asked, base: FrozenBase) -> list[Prompt]:
    """Return validation prompts, on which trees are chosen."""
    assert base.tokenizer is not None
    evaluation = settings.evaluation
    length, number = evaluation.prompt_tokens, evaluation.tune_prompts
    found = prompts_for(settings.data, base.tokenizer, length, number, settings.seed)
    return [one for one in found if len(one.tokens) <= base.max_length // 2] or found[:1]
