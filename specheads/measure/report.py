"""The report of an evaluation: files, page and console. See docs/evaluate.md."""

import base64
import csv
import hashlib
import io
import json
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from math import sqrt
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from specheads.core.errors import InputError
from specheads.core.files import dumps, read_json, to_json, writable_folder, write_atomic
from specheads.decoding.loop import BASE_ORIGIN, Origin, node_origins
from specheads.measure.plots import PLOTS, draw_plots
from specheads.measure.results import DecodedText, Interval, Online, Results, TextStep
from specheads.measure.summary import (
    depth_rows,
    describe_tree,
    group_rows,
    is_worthwhile,
    summary_rows,
    verdict,
)

OPTIONAL = {"texts.json", "acceptance.csv", *(f"{name}.png" for name in PLOTS)}
"""Files that only some reports have."""


def refuse_other_files(folder: Path) -> None:
    """Refuse a folder in which a report would replace files that no report wrote."""
    file = folder / "results.json"
    with suppress(InputError):
        if file.is_file() and {"schema", "head", "base"} <= read_json(file).keys():
            return
    names = ("report.html", file.name, *sorted(OPTIONAL))
    if others := [name for name in names if (folder / name).exists()]:
        raise InputError(
            f"out= replaces the files of an earlier report, and {folder} holds {others[0]}, which "
            "no report wrote; name another folder"
        )


def write_report(folder: Path, results: Results, history: Sequence[Mapping[str, Any]]) -> Path:
    """Write the report and the files next to it; return the page.

    Every file is written atomically. results.json is written last: when it exists, the report is
    complete. Files of an earlier report that this one lacks are then removed. `history` are the
    rows of metrics.jsonl; it is empty if the head was not trained here.
    """
    folder, plots = writable_folder(folder), draw_plots(results, history)
    files: dict[str, str | bytes] = {f"{name}.png": picture for name, picture in plots.items()}
    files["report.html"] = render(results, plots)
    if results.texts:
        texts = {"schema": 1, "texts": [asdict(text) for text in results.texts]}
        files["texts.json"] = json.dumps(texts) + "\n"
    if results.online:
        files["acceptance.csv"] = acceptance_csv(results.prompts.name, results.online)
    files["results.json"] = dumps(results)
    for name, content in files.items():
        write_atomic(folder / name, content)
    for name in OPTIONAL - files.keys():
        (folder / name).unlink(missing_ok=True)
    return folder / "report.html"


VLLM_COLUMNS = (
    *("mean_acceptance_length", "draft_acceptance_rate"),
    *("num_drafts", "num_draft_tokens", "num_accepted_tokens"),
)


def acceptance_csv(name: str, online: Online) -> str:
    """Return acceptance.csv: the prompts of each subset once, with speculators' columns too."""
    rows = []
    for labels, rate in online.subsets:
        positions = enumerate(rate.per_position_acceptance_rates)
        low, high = rate.interval
        rows.append(
            {"subset": "/".join([name, *filter(None, labels.values())]), **labels}
            | {"prompts": rate.count, "tokens_per_forward": rate.tokens_per_forward}
            | {"interval_low": low, "interval_high": high}
            | {column: getattr(rate, column) for column in VLLM_COLUMNS}
            | {"acceptance_length": rate.mean_acceptance_length}
            | {f"acceptance_at_pos_{position}": share for position, share in positions}
        )
    stream = io.StringIO()
    table = csv.DictWriter(stream, [*rows[0]] if rows else [], lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return stream.getvalue()


# --- the page ----------------------------------------------------------------------------------


def render(results: Results, plots: Mapping[str, bytes]) -> str:
    """Return the page as one file that loads nothing and runs only its own script."""
    tokens = [origin_tokens(text) for text in results.texts]
    fields = to_json(results)
    is_sure = results.speed and results.speed.interval[0] > 1.0
    return _template().render(
        title=f"{results.head.kind} on {results.base.name}",
        results=results,
        tree=describe_tree(results.settings),
        mood="no" if not is_worthwhile(results) else "yes" if is_sure else "maybe",
        verdict=verdict(results),
        headlines=list(headlines(results)),
        plots={name: base64.b64encode(plot).decode() for name, plot in plots.items()},
        tokens=tokens,
        legend=legend_rows([origin for text in tokens for _, _, origin in text]),
        steps=[[script_step(step) for step in text.steps] for text in results.texts],
        summary=summary_rows(results),
        depths=depth_rows(results),
        groups=group_rows(results),
        settings={
            "Settings": fields["settings"],
            "Subject": {name: fields[name] for name in ("head", "base", "prompts")},
            "Provenance": fields["provenance"],
        },
    )


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("specheads.measure", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        # text from models and files passes through here; markup is the template's own
        finalize=lambda value: value if isinstance(value, Markup) else visible(str(value)),
    )
    environment.filters["css_class"] = _css_class
    environment.filters["sha256"] = lambda script: (
        "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    )
    return environment.get_template("report.html.j2")


HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
"""Unicode categories without a glyph, or that change the direction of the text around them."""
JOINERS = "\N{ZERO WIDTH NON-JOINER}\N{ZERO WIDTH JOINER}"
"""Characters of `HIDDEN` that letters and emoji need."""


def visible(text: str) -> str:
    """Replace every hidden character by a visible sign; newlines and tabs stay.

    A control character becomes its Unicode picture, any other its code point. Model output
    then cannot hide text or reverse the line around it.
    """
    visible_text = ""
    for letter in text:
        is_hidden = unicodedata.category(letter) in HIDDEN and letter not in f"\n\t{JOINERS}"
        code = ord(letter)
        sign = chr(0x2400 + code) if code < 32 else f"⟨U+{code:04X}⟩"
        visible_text += sign if is_hidden else letter
    return visible_text


# --- the first screen --------------------------------------------------------------------------

NORMAL = 1.959964
"""Standard deviations that contain 95 % of a normal distribution."""


def wilson(successes: int, trials: int) -> Interval:
    """Return the 95 % interval of a share, also valid near 0 and 1 and for few trials.

    Source: Wilson 1927, Journal of the American Statistical Association 22.
    """
    share, square = successes / trials, NORMAL**2
    center = (share + square / (2 * trials)) / (1 + square / trials)
    deviation = sqrt(share * (1 - share) / trials + square / (4 * trials**2))
    half = NORMAL * deviation / (1 + square / trials)
    return max(center - half, 0.0), min(center + half, 1.0)


@dataclass(frozen=True, slots=True)
class Headline:
    """One of the most important figures."""

    name: str
    text: str
    """The figure as it is printed."""
    value: float
    interval: Interval
    meaning: str
    is_share: bool = False
    """Whether the value is in [0, 1] and the interval in percent; otherwise 1 means no gain."""


def headlines(results: Results) -> Iterator[Headline]:
    """Yield the most important of the measured figures."""
    if speed := results.speed:
        text = f"{speed.speedup:.2f}×"  # noqa: RUF001
        meaning = "Time of the base alone over that with the head, for the same text."
        yield Headline("speed-up", text, speed.speedup, speed.interval, meaning)
    if rate := results.online or results.offline:
        name = "tokens per forward" if results.online else "tokens per forward, replayed"
        meaning = "Tokens from one forward of the base. The base alone gives 1."
        value = rate.tokens_per_forward
        yield Headline(name, f"{value:.2f}", value, rate.interval, meaning)
    if (lossless := results.lossless) and (total := lossless.compared):
        count = lossless.identical
        meaning = "Token for token; rounding may separate two texts at a tie."
        if lossless.exact is not None:
            meaning = (
                f"Token for token, with exact sums (base.exact=true). Without them {count}: "
                "rounding separates the others at a tie."
            )
            count += lossless.exact
        text, interval = f"{count} of {total}", wilson(count, total)
        name = "texts identical to the base alone"
        yield Headline(name, text, count / total, interval, meaning, is_share=True)


# --- decoded texts -----------------------------------------------------------------------------

DEEPEST = 6
"""Depth from which all drafts have the same colour."""
SIGNS = str.maketrans({"\n": "↵", "\t": "⇥", " ": "␣"})
"""Signs for blanks in the tree."""


def origin_tokens(text: DecodedText) -> list[tuple[str, int, Origin]]:
    """Return each new token with the number of its step and its origin."""
    tokens = [(text.first, 0, BASE_ORIGIN)]
    for number, step in enumerate(text.steps, start=1):
        origins = node_origins(step.parents, step.num_copied)
        tokens += [(step.tokens[node], number, origins[node]) for node in step.path[1:]]
        tokens.append((step.bonus, number, BASE_ORIGIN))
    return tokens[: text.num_tokens]


def _css_class(origin: Origin) -> str:
    if origin.kind == "base":
        return "b"
    return "c" if origin.kind == "copied" else f"d{min(origin.depth, DEEPEST)}"


def legend_rows(origins: Sequence[Origin]) -> list[tuple[str, str, int, float]]:
    """Return class, name, count and share of every kind of token that occurs."""
    counts = Counter(map(_css_class, origins))
    names = {"b": "the base's own"}
    names |= {f"d{depth}": f"depth {depth}" for depth in range(1, DEEPEST)}
    names |= {f"d{DEEPEST}": f"depth {DEEPEST} or more", "c": "copied"}
    return [
        (css_class, name, counts[css_class], counts[css_class] / len(origins))
        for css_class, name in names.items()
        if counts[css_class]
    ]


def script_step(step: TextStep) -> dict[str, Any]:
    """Return a step for the script of the page."""
    tokens = [visible(token).translate(SIGNS) for token in (*step.tokens, step.bonus)]
    return asdict(step) | {"tokens": tokens[:-1], "bonus": tokens[-1]}
