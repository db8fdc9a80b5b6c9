"""Compare methods on the same prompts, in one process, in turns: see docs/compare.md."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

from specheads.base.model import FrozenBase
from specheads.measure.counts import paired_gain
from specheads.measure.generation import Continuations, GenerationSettings
from specheads.measure.methods import DraftMethod, Method
from specheads.measure.online import online_sections
from specheads.measure.results import Comparison, Condition, Gain, Lossless, MethodResults
from specheads.measure.speed import paired_speed, summarise, time_in_turns
from specheads.measure.summary import divergence_note
from specheads.measure.tables import ConsoleTable, with_interval


def condition(rows: dict[str, MethodResults], temperature: float, batch_size: int) -> Condition:
    """Return rows with their ranking."""
    ranking = sorted(rows, key=lambda name: -rows[name].speed.tokens_per_second)
    return Condition(temperature=temperature, batch_size=batch_size, ranking=ranking, drafters=rows)


def compare_methods(
    base: FrozenBase,
    methods: Mapping[str, Method],
    texts: Continuations,
    generation: GenerationSettings,
    *,
    speed_prompts: int,
    repetitions: int = 2,
) -> dict[str, MethodResults]:
    """Measure acceptance of every method, and its speed on the first prompts.

    Each method has a tree of its own.
    """
    decoded = {name: one.decode(base, texts.prompts, generation) for name, one in methods.items()}
    counts = {name: [one.counts for one in found] for name, found in decoded.items()}
    timed = texts.prompts[:speed_prompts]
    runs = {name: partial(one.time, base, generation=generation) for name, one in methods.items()}
    timings = time_in_turns(base, runs, timed, generation, repetitions=repetitions)
    rows = {}
    for name, method in methods.items():
        speed = replace(summarise(timings[None], timings[name]), repetitions=repetitions)
        # above temperature zero, transformers writes another sample
        comparable = generation.sampling.temperature == 0 or isinstance(method, DraftMethod)
        online, lossless, degenerate = online_sections(
            base, decoded[name], texts, generation, comparable=comparable
        )
        others = [other for other in methods if other != name]
        rows[name] = MethodResults(
            online=online,
            lossless=lossless,
            degenerate=degenerate,
            tree=method.tree.name,
            num_nodes=method.tree.num_nodes,
            speed=speed,
            batches=method.batches,
            over={other: paired_speed(timings[name], timings[other]) for other in others},
            accepted_over={other: paired_gain(counts[name], counts[other]) for other in others},
        )
    return rows


# --- tables ------------------------------------------------------------------------------------

COLUMNS = ("drafter", "tokens per second", "speed-up", "fastest over it", "tokens per forward")


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
            _text(row.lossless),
        )
        for name, row in rows.items()
    ]
    alone = f"{rows[first].speed.base_tokens_per_second:.1f}"
    lines.append(("base alone", alone, "1.00", "", "1.00", ""))
    title = f"drafters at temperature {condition.temperature:g}, batch {batch}"
    return ConsoleTable(title, lines, (*COLUMNS, "text of the base"))


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


def _text(same: Lossless) -> str:
    if not same.compared:
        return "other draws"
    return f"{same.identical} of {same.compared}{divergence_note(same)}"
