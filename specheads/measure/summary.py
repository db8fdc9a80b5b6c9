"""Results in words and tables: for the report, the console and the model card."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from textwrap import fill

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from specheads.decoding.loop import PARTS
from specheads.measure.results import IDENTICAL, WRONG, EvaluationSettings, Lossless, Results

SummaryRows = list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class ConsoleTable:
    """A table if it fits the console, else several with some of its columns each."""

    title: str
    rows: Sequence[Sequence[str]]
    header: Sequence[str] = ()
    num_names: int = 1
    """The first columns, which name a row: every half of a wide table has them."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        """Yield the table, or its halves and theirs."""
        table, num_names = self.as_table(), self.num_names
        num_figures = len(self.header) - num_names
        width = Measurement.get(console, options.update(width=10_000), table).minimum
        if width <= options.max_width or num_figures < 2:
            yield table
            return
        middle = num_names + (num_figures + 1) // 2
        for first, last in (num_names, middle), (middle, len(self.header)):
            rows = [[*row[:num_names], *row[first:last]] for row in self.rows]
            header = [*self.header[:num_names], *self.header[first:last]]
            half = ConsoleTable(self.title, rows, header, num_names)
            yield from half.__rich_console__(console, options)

    def as_table(self) -> Table:
        """Return a table of rich that never narrows a figure."""
        table = Table(title=self.title, title_justify="left", show_header=bool(self.header))
        columns = [*zip(*self.rows, strict=True)]
        for index, (cells, name) in enumerate(zip_longest(columns, self.header, fillvalue="")):
            # a name takes several lines before it widens its column
            width = max(1, *map(cell_len, [*cells, *name.split()]))
            # only the last column may be broken, between words
            is_last = index == len(columns) - 1
            # rich narrows a column that may wrap, even below its minimum, and cuts the table's edge
            table.add_column(
                Text(fill(name, width)), min_width=None if is_last else width, no_wrap=not is_last
            )
        for row in self.rows:
            # Text does not parse a name in brackets as a style
            table.add_row(*map(Text, row))
        return table


def with_interval(value: float, interval: Sequence[float], form: str = ".2f") -> str:
    """Return a figure and the ends of its interval, if it has one."""
    ends = ", ".join(f"{end:{form}}" for end in interval)
    return f"{value:{form}}" + f" [{ends}]" * bool(ends)


def is_wrong(results: Results) -> bool:
    """Return whether a text differs from the base's own by more than rounding explains."""
    return results.lossless is not None and results.lossless.verdict == WRONG


def is_worthwhile(results: Results) -> bool:
    """Return whether decoding is right, and faster than the base alone if it was timed."""
    timed = not results.speed or results.speed.speedup > 1.0
    return results.settings.num_nodes > 1 and timed and not is_wrong(results)


def verdict(results: Results) -> str:
    """Return whether speculation pays on this machine and why; first whether it is wrong."""
    reason = "texts differ from the base's own by more than rounding explains"
    error = f"Decoding is wrong: {reason}. " if is_wrong(results) else ""
    return error + describe_gain(results)


def divergence_note(lossless: Lossless) -> str:
    """Return the note after the number of identical texts: why the others differ."""
    note = "" if lossless.verdict in ("", IDENTICAL) else f", {lossless.verdict}"
    if lossless.exact is not None:
        num_identical = lossless.identical + lossless.exact
        note += f"; with exact sums {num_identical} of {lossless.compared}"
    return note


def describe_gain(results: Results) -> str:
    """Return whether speculation is faster than the base alone, and why."""
    speed, online = results.speed, results.online
    remedy = "A cheaper head or a better one, or a larger base would change that."
    # the fastest of the timed trees may be empty
    if results.settings.num_nodes == 1:
        return (
            "Speculation does not pay on this machine: no way to draft was faster than the base "
            f"alone, so nothing was drafted. {remedy}"
        )
    if not speed or not online:
        return "Speed was not measured."
    ratio, (low, high) = speed.speedup, speed.interval
    gain = f"{ratio:.2f}x the speed of the base alone (95 % interval {low:.2f} to {high:.2f})"
    if head := speed.head_alone:
        head_gain = f"{head.ratio:.2f}x ({head.interval[0]:.2f} to {head.interval[1]:.2f})"
        gain += f"; head alone {head_gain}, with prompt lookup {ratio:.2f}x"
    elif results.settings.tree == "lookup":
        gain += "; by prompt lookup alone, as the head's drafts do not pay here"
    reason = f"a step gives {online.tokens_per_forward:.2f} tokens"
    if speed.step_overhead is not None:
        reason += f" and takes {speed.step_overhead:.2f} times as long as a step of the base alone"
    if ratio <= 1.0:
        return (
            f"Speculation does not pay on this machine: {gain}. The reason: {reason}. A smaller "
            f"tree, {remedy[0].lower()}{remedy[1:]}"
        )
    if low <= 1.0:
        return (
            f"Speculation may pay on this machine, but the interval includes 1: {gain}; {reason}."
        )
    return f"Speculation pays on this machine: {gain}; {reason}."


format_figure = partial(with_interval, form=".3f")


def summary_rows(results: Results) -> SummaryRows:
    """Return the main table of the report: names and figures."""
    return [*setting_rows(results), *acceptance_rows(results), *speed_rows(results)]


def setting_rows(results: Results) -> Iterator[tuple[str, str]]:
    """Yield the rows on head, base, prompts and decoding."""
    head, base, settings = results.head, results.base, results.settings
    adapter = f" + {base.adapter}" if base.adapter else ""
    yield "head", f"{head.kind}, depth {head.depth}, {head.parameters:,} parameters"
    yield "base", f"{base.name}{adapter}, {base.parameters:,} parameters"
    yield "prompts", f"{results.prompts.count} of {results.prompts.name}"
    yield "tree", describe_tree(settings)
    if settings.temperature:
        law = "lossless" if settings.lossless else "LOSSY: not the base's own distribution"
        rule = f"acceptance {settings.acceptance} ({law})"
        yield "sampling", f"temperature {settings.temperature:g}, {rule}"
    if (vocabulary := results.draft_vocabulary) and (share := vocabulary.coverage) != 1.0:
        coverage = "" if share is None else f", {share:.1%} of the training text"
        yield "draft vocabulary", f"{vocabulary.size:,} tokens{coverage}"


def describe_tree(settings: EvaluationSettings) -> str:
    """Return the name of the tree and its size, if anything is drafted."""
    if settings.num_nodes == 1:
        return "none, nothing is drafted"
    return f"{settings.tree}, {settings.num_nodes} nodes"


def acceptance_rows(results: Results) -> Iterator[tuple[str, str]]:
    """Yield the rows on accepted drafts, and on the base's own quality."""
    for name, rate in (("offline", results.offline), ("online", results.online)):
        if rate:
            yield (
                f"tokens per forward, {name}",
                format_figure(rate.tokens_per_forward, rate.interval),
            )
    if depths := results.calibration:
        errors = ", ".join(f"{depth.error:.3f}" for depth in depths)
        before = ", ".join(f"{depth.error_before:.3f}" for depth in depths)
        yield "calibration error by depth", f"{errors} (before calibration {before})"
    for phase in results.phases:
        name = f"tokens per forward after phase {phase.phase}"
        yield name, f"{phase.tokens_per_forward:.3f}"
    names = {"before": "nats per token, base", "after": "nats per token, base + adapter"}
    names["change"] = "change of the base's nats per token"
    for key, quality in (results.base_quality or {}).items():
        form = "+.4f" if key == "change" else ".4f"
        yield names[key], with_interval(quality.cross_entropy, quality.cross_entropy_interval, form)


def speed_rows(results: Results) -> Iterator[tuple[str, str]]:
    """Yield the rows that compare text and speed with those of the base alone."""
    if loops := results.degenerate:
        yield "prompts whose text loops", f"{loops.flagged}"
        if loops.flagged and (rate := loops.without):
            text = format_figure(rate.tokens_per_forward, rate.interval)
            yield "tokens per forward without those", text
    if (lossless := results.lossless) and lossless.compared:
        text = f"{lossless.identical} of {lossless.compared} prompts{divergence_note(lossless)}"
        if (gap := lossless.first_divergence_logit_gap) is not None:
            text += f"; largest logit gap at a first difference {gap:.2g}"
        yield "identical to the base alone", text
    if speed := results.speed:
        yield "tokens per second, base alone", f"{speed.base_tokens_per_second:.1f}"
        yield "tokens per second, with head", f"{speed.tokens_per_second:.1f}"
        yield "speed-up", format_figure(speed.speedup, speed.interval)
        if head := speed.head_alone:
            text = format_figure(head.ratio, head.interval)
            yield "speed-up of the head alone, without prompt lookup", text
        if speed.step_overhead is not None:
            yield "time of a step over the base's", f"{speed.step_overhead:.3f}"
    if ledger := results.ledger:
        seconds = {part: getattr(ledger, part) for part in PARTS}
        text = ", ".join(f"{part} {1e3 * value:.2f}" for part, value in seconds.items())
        yield f"milliseconds of a step, mean of {ledger.num_steps}", text


def depth_rows(results: Results) -> list[list[str]]:
    """Return the table by depth, its header first."""
    top = results.offline.top_k_accuracy if results.offline else []
    sections = results.offline, results.online
    counts = [section.per_depth if section else [] for section in sections]
    header = ["depth", "offline accepted / offered", "online accepted / offered"]
    header += [f"top {k + 1}" for k in range(len(top[0]) if top else 0)]
    rows = [header]
    for depth in range(max(len(top), *map(len, counts))):
        cells = [
            f"{depths[depth].accepted} / {depths[depth].offered}" if depth < len(depths) else ""
            for depths in counts
        ]
        accuracy = [f"{value:.3f}" for value in top[depth]] if depth < len(top) else []
        # prompt-lookup tokens reach deeper than the head drafts
        row = [str(depth + 1), *cells, *accuracy]
        rows.append(row + [""] * (len(header) - len(row)))
    return rows


def group_rows(results: Results) -> dict[str, list[list[str]]]:
    """Return the tables by groups of prompts, each with its header first, by their titles."""
    tables = {}
    for name in ("category", "input length", "thinking"):
        rates = getattr(results.online, f"by_{name.replace(' ', '_')}", {})
        rows = [
            [
                label or f"no {name}",
                str(rate.count),
                format_figure(rate.tokens_per_forward, rate.interval),
            ]
            for label, rate in rates.items()
        ]
        # a single category is all prompts
        if len(rows) > (name == "category"):
            tables[f"by {name}"] = [[name, "prompts", "tokens per forward"], *rows]
    if results.contexts:
        tables["by context length"] = context_rows(results)
    return tables


def context_rows(results: Results) -> list[list[str]]:
    """Return the table by context length, its header first."""
    header = ["context", "tokens per forward", "over the first"]
    if any(rate.speed for rate in results.contexts):
        header += ["tokens/s, base", "tokens/s, head", "speed-up", "prompt, s"]
    rows = []
    for rate in results.contexts:
        row = [f"{rate.context:,}", with_interval(rate.tokens_per_forward, rate.interval)]
        row.append(with_interval(rate.over_first.ratio, rate.over_first.interval))
        if speed := rate.speed:
            row += [f"{speed.base_tokens_per_second:.1f}", f"{speed.tokens_per_second:.1f}"]
            row += [with_interval(speed.speedup, speed.interval), f"{speed.prompt_seconds:.1f}"]
        rows.append(row)
    return [header, *rows]


def print_results(
    results: Results, console: Console | None = None, page: Path | None = None
) -> None:
    """Print the main table, the table by depth, the verdict and the path of the page."""
    console = console or Console()
    console.print(ConsoleTable("specheads evaluation", summary_rows(results)))
    header, *rows = depth_rows(results)
    # short names let the table fit 80 columns
    short = [name.removesuffix(" accepted / offered") for name in header]
    console.print(ConsoleTable("accepted / offered drafts, and accuracy, by depth", rows, short))
    for title, (header, *rows) in group_rows(results).items():
        console.print(ConsoleTable(title, rows, header))
    console.print(verdict(results), style="bold" if is_worthwhile(results) else "bold red")
    if page is not None:
        # on one line, so that it can be copied
        console.print(f"report: {page}", markup=False, soft_wrap=True)
