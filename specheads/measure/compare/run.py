"""Ways of drafting measured beside each other: the same prompts, one process, turn by turn."""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import fields, replace

from specheads.base.model import FrozenBase
from specheads.config import Compare
from specheads.core.drafter import Drafter, Head
from specheads.data.prompts import PromptSet
from specheads.measure.compare.arms import Bench, chosen, load_draft_model
from specheads.measure.comparison import CompareSettings, Comparison, Condition, DrafterRow
from specheads.measure.counts import paired_gain
from specheads.measure.evaluation import check, subject, summary_of, told_by
from specheads.measure.how import Asked, How, how_of
from specheads.measure.online import Decoded, judge, lossless_in_float32, write_alone
from specheads.measure.rates import Gain
from specheads.measure.results import Acceptance
from specheads.measure.speed import (
    Arm,
    Way,
    paired_speed,
    summarise,
    time_arms,
    unit_sources,
)
from specheads.measure.tune.for_evaluation import decoded_context
from specheads.runs.provenance import nearby


def compare_heads(
    base: FrozenBase,
    heads: Mapping[str, Head],
    settings: Compare,
    asked: Asked | None = None,
    prompts: PromptSet | None = None,
) -> Comparison:
    """Compare heads of one base, and the drafters that the settings name, on the same prompts.

    Heads stand by what they are called, a single one as `head`. `asked` is what is measured, as a
    head's run has it; None is what `settings` say. Without prompts those that are named are loaded.
    """
    asked = asked or settings
    # it is timed whatever an evaluation of the run was asked for
    asked = replace(asked, evaluation=replace(asked.evaluation, mode="all"))
    prompts = check(asked, base, min(head.depth for head in heads.values()), prompts)
    model = load_draft_model(settings, base, chosen(settings))
    conditions = []
    for one in _conditions(settings, asked):
        context = decoded_context(one, prompts)
        bench = Bench.of(base, heads, settings, one, model, context)
        conditions.append(_measure(bench, prompts))
    shown = replace(settings, draft_model=nearby(settings.draft_model), seed=asked.seed)
    return Comparison(
        **subject(base, next(iter(heads.values())), prompts),
        heads={name: summary_of(head) for name, head in heads.items()},
        settings=CompareSettings(**told_by(CompareSettings, base, asked.evaluation, shown)),
        conditions=conditions,
    )


def _conditions(settings: Compare, asked: Asked) -> Iterator[Asked]:
    """Yield what is asked at each temperature and batch."""
    for temperature in settings.temperatures or [asked.evaluation.temperature]:
        for batch_size in settings.batch_sizes or [asked.evaluation.batch_size]:
            one = deepcopy(asked)
            one.evaluation.temperature, one.evaluation.batch_size = temperature, batch_size
            yield one


def _measure(bench: Bench, prompts: PromptSet) -> Condition:
    evaluation = bench.asked.evaluation
    # baselines are all held to the base's own tokens
    how = replace(
        how_of(evaluation, bench.asked.seed, [one.source for one in prompts.prompts]),
        acceptance="match",
    )
    tokens = [prompt.tokens for prompt in prompts.prompts]
    rows = compare_drafters(
        bench.base,
        bench.ways(),
        tokens,
        write_alone(bench.base, tokens, replace(how, batch_size=8)),
        how,
        [prompt.category for prompt in prompts.prompts],
        speed_prompts=evaluation.speed_prompts,
        repetitions=evaluation.repeats,
    )

    def arms(base: FrozenBase) -> dict[str, tuple[Drafter, How]]:
        own = bench.on(base).own()
        return {name: (arm.drafter, arm.how(how)) for name, arm in own.items()}

    for name, found in lossless_in_float32(bench.base, arms, tokens, how).items():
        held = replace(rows[name].lossless, float32=found)
        rows[name] = replace(rows[name], lossless=held)
    return condition(rows, evaluation.temperature, evaluation.batch_size)


def condition(rows: dict[str, DrafterRow], temperature: float, batch_size: int) -> Condition:
    """Return rows with their ranking."""
    ranking = sorted(rows, key=lambda name: -rows[name].speed.tokens_per_second)
    return Condition(temperature=temperature, batch_size=batch_size, ranking=ranking, drafters=rows)


def compare_drafters(
    base: FrozenBase,
    arms: Mapping[str, Way],
    prompts: list[list[int]],
    alone: list[list[int]],
    how: How,
    categories: Sequence[str] = (),
    *,
    speed_prompts: int,
    repetitions: int = 2,
) -> dict[str, DrafterRow]:
    """Measure every arm: what it is accepted, and how fast it is on the first prompts.

    `alone` is what `write_alone` gave each prompt, with the same limit and sampling; trees are the
    arms' own.
    """
    decoded = {name: arm.decode(base, prompts, how) for name, arm in arms.items()}
    found = {
        name: judge(
            base, texts, prompts, alone, how, categories, comparable=_comparable(arms[name], how)
        )
        for name, texts in decoded.items()
    }
    timed = prompts[:speed_prompts]
    timings = time_arms(base, arms, timed, how, repetitions=repetitions)
    sources = unit_sources(timed, how)
    return {
        name: DrafterRow(
            tree=arm.tree.name,
            num_nodes=arm.tree.num_nodes,
            **{item.name: getattr(found[name], item.name) for item in fields(Acceptance)},
            speed=replace(
                summarise(timings[None], timings[name], sources),
                draft_milliseconds=1e3 * arm.draft_seconds(base, timed[: how.batch_size], how),
                repetitions=repetitions,
            ),
            batches=arm.batches,
            over={
                other: paired_speed(timings[name], timings[other], sources)
                for other in arms
                if other != name
            },
            accepted_over=_accepted_over(name, decoded),
        )
        for name, arm in arms.items()
    }


def _accepted_over(name: str, decoded: Mapping[str, list[Decoded]]) -> dict[str, Gain]:
    """Return an arm's tokens per forward over those of each other, on the same prompts."""
    counts = {other: [one.counts for one in texts] for other, texts in decoded.items()}
    ours = counts.pop(name)
    return {other: paired_gain(ours, theirs) for other, theirs in counts.items()}


def _comparable(arm: Way, how: How) -> bool:
    """Return whether an arm says the base alone's own tokens, and not other draws."""
    if how.sampling.temperature == 0:
        return True
    return isinstance(arm, Arm) and arm.how(how).acceptance == "match"
