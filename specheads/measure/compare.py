"""Compare methods on the same prompts, in one process, in turns: see docs/compare.md."""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import fields, replace
from pathlib import Path

from specheads.base.model import FrozenBase
from specheads.config import Compare
from specheads.core.drafter import Drafter, Head
from specheads.core.files import dumps, write_atomic
from specheads.core.paths import writable_folder
from specheads.data.prompts import PromptSet
from specheads.measure.counts import paired_gain
from specheads.measure.evaluation import check, head_summary, settings_section, subject
from specheads.measure.generation import (
    Decoded,
    EvaluationConfig,
    GenerationSettings,
    generation_settings,
    write_alone,
)
from specheads.measure.methods import MethodFactory, chosen, load_draft_model
from specheads.measure.online import lossless_in_float32, online_sections
from specheads.measure.plots import draw_comparison
from specheads.measure.results import (
    CompareSettings,
    Comparison,
    Condition,
    Gain,
    MethodResults,
    OnlineSections,
)
from specheads.measure.speed import (
    DraftMethod,
    Method,
    paired_speed,
    summarise,
    time_methods,
    unit_sources,
)
from specheads.measure.summary import divergence_note
from specheads.measure.tables import ConsoleTable, with_interval
from specheads.measure.tune import decoded_context
from specheads.runs.provenance import nearby


def compare_heads(
    base: FrozenBase,
    heads: Mapping[str, Head],
    settings: Compare,
    evaluated: EvaluationConfig | None = None,
    prompts: PromptSet | None = None,
) -> Comparison:
    """Compare heads of one base and the methods in the settings on the same prompts.

    A single head is called `head`. `evaluated` has the evaluation settings, such as those of a
    head's run; None takes `settings`. Without `prompts` those that the settings name are loaded.
    """
    evaluated = evaluated or settings
    # a comparison is timed, whatever mode the run's own evaluation has
    evaluated = replace(evaluated, evaluation=replace(evaluated.evaluation, mode="all"))
    prompts = check(evaluated, base, min(head.depth for head in heads.values()), prompts)
    model = load_draft_model(settings, base, chosen(settings))
    conditions = []
    for one in _conditions(settings, evaluated):
        context = decoded_context(one, prompts)
        factory = MethodFactory.of(base, heads, settings, one, model, context)
        conditions.append(_measure(factory, prompts))
    shown = replace(settings, draft_model=nearby(settings.draft_model), seed=evaluated.seed)
    section = settings_section(CompareSettings, base, evaluated.evaluation, shown)
    return Comparison(
        **subject(base, next(iter(heads.values())), prompts),
        heads={name: head_summary(head) for name, head in heads.items()},
        settings=CompareSettings(**section),
        conditions=conditions,
    )


def _conditions(settings: Compare, evaluated: EvaluationConfig) -> Iterator[EvaluationConfig]:
    """Yield the evaluation settings of each temperature and batch size."""
    for temperature in settings.temperatures or [evaluated.evaluation.temperature]:
        for batch_size in settings.batch_sizes or [evaluated.evaluation.batch_size]:
            one = deepcopy(evaluated)
            one.evaluation.temperature, one.evaluation.batch_size = temperature, batch_size
            yield one


def _measure(factory: MethodFactory, prompts: PromptSet) -> Condition:
    evaluation, seed = factory.evaluated.evaluation, factory.evaluated.seed
    # baselines are compared with the base's own tokens
    generation = replace(
        generation_settings(evaluation, seed, [one.source for one in prompts.prompts]),
        acceptance="match",
    )
    tokens = [prompt.tokens for prompt in prompts.prompts]
    rows = compare_methods(
        factory.base,
        factory.methods(),
        tokens,
        write_alone(factory.base, tokens, replace(generation, batch_size=8)),
        generation,
        [prompt.category for prompt in prompts.prompts],
        speed_prompts=evaluation.speed_prompts,
        repetitions=evaluation.repeats,
    )

    def methods(base: FrozenBase) -> dict[str, tuple[Drafter, GenerationSettings]]:
        own = factory.on(base).draft_methods()
        return {name: (one.drafter, one.settings(generation)) for name, one in own.items()}

    for name, found in lossless_in_float32(factory.base, methods, tokens, generation).items():
        lossless = replace(rows[name].lossless, float32=found)
        rows[name] = replace(rows[name], lossless=lossless)
    return condition(rows, evaluation.temperature, evaluation.batch_size)


def condition(rows: dict[str, MethodResults], temperature: float, batch_size: int) -> Condition:
    """Return rows with their ranking."""
    ranking = sorted(rows, key=lambda name: -rows[name].speed.tokens_per_second)
    return Condition(temperature=temperature, batch_size=batch_size, ranking=ranking, drafters=rows)


def compare_methods(
    base: FrozenBase,
    methods: Mapping[str, Method],
    prompts: list[list[int]],
    alone: list[list[int]],
    generation: GenerationSettings,
    categories: Sequence[str] = (),
    *,
    speed_prompts: int,
    repetitions: int = 2,
) -> dict[str, MethodResults]:
    """Measure acceptance of every method, and its speed on the first prompts.

    `alone` is the output of `write_alone` with the same limit and sampling. Each method has a tree
    of its own.
    """
    decoded = {name: one.decode(base, prompts, generation) for name, one in methods.items()}
    found = {
        name: online_sections(
            base, texts, prompts, alone, generation, categories,
            comparable=_comparable(methods[name], generation),
        )
        for name, texts in decoded.items()
    }  # fmt: skip
    timed = prompts[:speed_prompts]
    timings = time_methods(base, methods, timed, generation, repetitions=repetitions)
    sources = unit_sources(timed, generation)
    first = timed[: generation.batch_size]
    return {
        name: MethodResults(
            tree=method.tree.name,
            num_nodes=method.tree.num_nodes,
            **{item.name: getattr(found[name], item.name) for item in fields(OnlineSections)},
            speed=replace(
                summarise(timings[None], timings[name], sources),
                draft_milliseconds=1e3 * method.draft_seconds(base, first, generation),
                repetitions=repetitions,
            ),
            batches=method.batches,
            over={
                other: paired_speed(timings[name], timings[other], sources)
                for other in methods
                if other != name
            },
            accepted_over=_accepted_over(name, decoded),
        )
        for name, method in methods.items()
    }


def _accepted_over(name: str, decoded: Mapping[str, list[Decoded]]) -> dict[str, Gain]:
    """Return the ratio of a method's tokens per forward to those of each other method."""
    counts = {other: [one.counts for one in texts] for other, texts in decoded.items()}
    ours = counts.pop(name)
    return {other: paired_gain(ours, theirs) for other, theirs in counts.items()}


def _comparable(method: Method, generation: GenerationSettings) -> bool:
    """Return whether a method writes the base's own tokens, and not another sample."""
    if generation.sampling.temperature == 0:
        return True
    return isinstance(method, DraftMethod) and method.settings(generation).acceptance == "match"


# --- tables and files --------------------------------------------------------------------------

COLUMNS = (
    "drafter",
    "tokens per second",
    "speed-up",
    "fastest over it",
    "tokens per forward",
    "without loops",
    "draft + rest, ms",
    "text of the base",
)


def tables(comparison: Comparison) -> Iterator[ConsoleTable]:
    """Yield a table for each condition, and for several heads their ratios to each other."""
    names = [*comparison.heads]
    for condition in comparison.conditions:
        yield table(condition)
        if len(names) > 1:
            yield ratios(condition, names, "second")
            yield ratios(condition, names, "forward")


def table(condition: Condition) -> ConsoleTable:
    """Return the methods of a condition, the fastest first, and the base alone."""
    rows = {name: condition.drafters[name] for name in condition.ranking}
    first, batch = condition.ranking[0], condition.batch_size
    lines = [
        (
            # transformers drafts for one prompt at a time
            name if row.batches or batch == 1 else f"{name} (cannot batch: one by one)",
            f"{row.speed.tokens_per_second:.1f}",
            with_interval(row.speed.speedup, row.speed.interval),
            _over(rows[first].over, name),
            with_interval(row.online.tokens_per_forward, row.online.interval),
            _without_loops(row),
            _step(row.speed.draft_milliseconds or 0.0, row.speed.step_milliseconds),
            _text(row),
        )
        for name, row in rows.items()
    ]
    speed = rows[first].speed
    step = _step(0.0, speed.base_step_milliseconds)
    alone = f"{speed.base_tokens_per_second:.1f}"
    lines.append(("base alone", alone, "1.00", "", "1.00", "", step, ""))
    title = f"drafters at temperature {condition.temperature:g}, batch {batch}"
    return ConsoleTable(title, lines, COLUMNS)


def ratios(condition: Condition, names: list[str], unit: str) -> ConsoleTable:
    """Return tokens per second or forward of each head (row) over each other head (column)."""
    rows = {name: condition.drafters[name] for name in condition.ranking if name in names}
    gains = {
        name: row.over if unit == "second" else row.accepted_over for name, row in rows.items()
    }
    # the ratio of a head to itself is empty
    lines = [(name, *(_over(over, other) for other in gains)) for name, over in gains.items()]
    return ConsoleTable(f"tokens per {unit}, row over column", lines, ("head", *gains))


def _over(over: Mapping[str, Gain], other: str) -> str:
    gain = over.get(other)
    return with_interval(gain.ratio, gain.interval) if gain else ""


def _without_loops(row: MethodResults) -> str:
    rest = row.degenerate.without
    return with_interval(rest.tokens_per_forward, rest.interval) if rest else "none left"


def _step(draft: float, whole: float | None) -> str:
    return "no second step" if whole is None else f"{draft:.2f} + {max(whole - draft, 0):.2f}"


def _text(row: MethodResults) -> str:
    same = row.lossless
    if not same.compared:
        return "other draws"
    return f"{same.identical} of {same.compared}{divergence_note(same)}"


def write_comparison(folder: Path, comparison: Comparison) -> Path:
    """Write compare.png and then compare.json; return the latter."""
    folder = writable_folder(folder)
    write_atomic(folder / "compare.png", draw_comparison(comparison.conditions))
    path = folder / "compare.json"
    write_atomic(path, dumps(comparison))
    return path
