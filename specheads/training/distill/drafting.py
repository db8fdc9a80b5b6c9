"""Which head drafts while the base writes: the one trained so far, where that is faster."""

import time
from dataclasses import replace

from specheads.core.drafter import Head
from specheads.decoding.generate import generate
from specheads.decoding.sampling import each_prompt
from specheads.heads.load import drafter_of
from specheads.training.distill.run import Job, sampling_of

TRIAL_TOKENS = 32
"""Tokens that each text of a trial gets."""


def with_drafter(job: Job) -> Job:
    """Return a job with the head that it is to draft with, or with none; the text is the same.

    `auto` has both ways write the beginnings of a batch of texts, and takes the faster one. The
    head may be in training: it is left as it is.
    """
    settings, head = job.settings, job.head
    wanted = settings.use_head.lower()
    if head is None or wanted == "false" or settings.engine != "local":
        return replace(job, head=None)
    drafter = drafter_of(head, job.base)
    faster = wanted == "true" or _is_faster(job, drafter)
    return replace(job, head=drafter if faster else None)


def _is_faster(job: Job, head: Head) -> bool:
    most = max(1, job.base.max_length - TRIAL_TOKENS)
    firsts = (job.prompts.first(number)[:most] for number in range(job.settings.batch_size))
    prompts = [tokens for tokens in firsts if tokens]
    if not prompts:
        return False

    def rate(drafter: Head | None) -> float:
        began = time.perf_counter()
        sampling = each_prompt(sampling_of(job), len(prompts))
        new = min(TRIAL_TOKENS, job.settings.new_tokens)
        out = generate(job.base, drafter, prompts, max_new_tokens=new, sampling=sampling)
        return sum(map(len, out.tokens)) / (time.perf_counter() - began)

    for drafter in (None, head):
        # the first call of each is slower than those that follow
        rate(drafter)
    return rate(head) > rate(None)
