"""The model card of a trained head: what it is, what was measured, how to serve it, its limits."""

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from specheads.base.gguf import PACKAGE, is_package
from specheads.base.model import FrozenBase
from specheads.core.drafter import Head
from specheads.data.prompts import ON_HUB
from specheads.export.engines import engine_module, engines, objection
from specheads.export.hub.summary import Summary, read_summary
from specheads.export.plugins.hub_generate import three_lines
from specheads.measure.report import depth_rows, summary, verdict
from specheads.runs.directory import RunDirectory, write_atomic

KNOWN_LICENCES = {"python_stdlib": "PSF-2.0", "stdlib_instructions": "PSF-2.0"}
"""Licences of corpora that are the same everywhere; those of others only their owner knows."""

PICTURES = ("acceptance.png", "speed.png", "loss.png", "validation.png", "learning.png")
"""Pictures of the report, as far as it has them."""


def model_card(
    about: Summary,
    head: Head,
    base: FrozenBase,
    *,
    repo: str = "",
    licence: str = "unknown",
    data_licence: str = "",
    pictures: Sequence[str] = (),
) -> str:
    """Return README.md: the metadata that the Hub reads, and the card.

    Nothing is filled in by guess: what the run does not say is called unknown or not measured.
    `repo` is empty where the head is not published, `data_licence` where nothing more is known of
    the corpus. Pictures are files beside the card.
    """
    place = repo or "path/to/head"
    name = repo.rpartition("/")[2] or f"{head.kind} for {about.base_name}"
    parts = [
        f"# {name}\n\n{_what(about, head)}",
        f"## Measured\n\n{_measured(about, pictures)}",
        f"## Training\n\n{_training(about, data_licence)}",
        f"## Use\n\n{_use(about, place, published=bool(repo))}",
        f"## Engines\n\n{_engines(about, head, base, place)}",
        f"## Limits\n\n{_limits(about)}",
    ]
    metadata = _metadata(about, head, name, licence).to_yaml()
    return f"---\n{metadata}\n---\n\n" + "\n\n".join(parts) + "\n"


def write_card(
    run: RunDirectory, settings: Mapping[str, Any], head: Head, base: FrozenBase
) -> None:
    """Write the card of a run's head into its folder, for a head that is not published yet."""
    text = model_card(read_summary(run, settings, base), head, base)
    write_atomic(run.head / "README.md", text)


def _metadata(about: Summary, head: Head, name: str, licence: str) -> ModelCardData:
    data = about.settings["data"]
    return ModelCardData(
        base_model=about.base_id or None,
        # of the relations that the Hub knows (adapter, finetune, merge, quantized), that of what
        # is used beside a base as it is; without it the Hub would take the head for a finetune
        base_model_relation="adapter" if about.base_id else None,
        datasets=data["path"] if data["source"] == "hub" else None,
        license=licence,
        library_name="specheads",
        pipeline_tag="text-generation",
        tags=["speculative-decoding", "speculator", head.kind],
        model_name=name,
        eval_results=list(_evaluations(about)) or None,
    )


def _evaluations(about: Summary) -> Iterator[EvalResult]:
    results = about.results
    if results is None:
        return
    prompts, settings = results.prompts, results.settings
    known = ON_HUB.get(prompts.name)
    names = ("temperature", "tree", "dtype", "max_new_tokens")
    how = {name: getattr(settings, name) for name in names}
    for section, metric, name in (
        (results.offline, "tokens_per_forward", "Tokens per forward, offline replay"),
        (results.online, "tokens_per_forward", "Tokens per forward, online"),
        (results.speed, "speedup", "Speed-up over the base alone"),
    ):
        if not section:
            continue
        low, high = section.interval
        yield EvalResult(
            task_type="text-generation",
            dataset_type=known.dataset if known else prompts.name,
            dataset_name=prompts.name,
            dataset_args={"prompts": prompts.count, "version": prompts.version},
            metric_type=metric,
            metric_name=f"{name} (95 % interval {low:.3f} to {high:.3f})",
            metric_value=round(getattr(section, metric), 4),
            metric_args=how | {"hardware": str(results.provenance.hardware)},
        )


def _what(about: Summary, head: Head) -> str:
    parameters = sum(parameter.numel() for parameter in head.parameters())
    base = f"[{about.base_id}](https://huggingface.co/{about.base_id})" if about.base_id else ""
    rows = [
        ("head", f"`{head.kind}`, depth {head.depth}, {parameters:,} parameters"),
        ("drafts", f"{head.drafted_size:,} of {head.vocab_size:,} tokens"),
        ("base", base or f"{_unpublished(about)}, under no Hub id"),
        *([("with", "an adapter that was trained along with it")] if about.adapted else []),
        ("revision of the base", about.base_revision or "unknown: it was loaded from a disk"),
        ("fingerprint of the base", f"`{about.provenance.get('base_fingerprint', 'unknown')}`"),
    ]
    return (
        f"A head for speculative decoding. It guesses up to {head.depth} tokens ahead, and "
        f"its base checks them in one forward. What is written stays the base's own; it takes "
        f"fewer forwards. Trained with specheads.\n\n{_table(['', ''], rows)}"
    )


def _unpublished(about: Summary) -> str:
    """Return in words what a base without a Hub id was loaded from."""
    name = about.base_name
    if is_package(name):
        return f"the GGUF file of the Python package `{name.removeprefix(PACKAGE)}`, dequantised"
    if name.lower().endswith(".gguf"):
        return f"a GGUF file named `{name}`, dequantised"
    return f"a folder named `{name}`"


def _measured(about: Summary, pictures: Sequence[str]) -> str:
    results = about.results
    if results is None:
        return "Nothing was measured on this head, so no number stands here."
    versions, settings = results.provenance.versions, results.settings
    rows = [
        # head and base stand above
        *(row for row in summary(results) if row[0] not in ("head", "base")),
        ("new tokens of a prompt, at most", str(settings.max_new_tokens)),
        ("temperature", f"{settings.temperature:g}"),
        ("precision", settings.dtype),
        ("hardware", str(results.provenance.hardware)),
        ("software", ", ".join(f"{name} {versions[name]}" for name in sorted(versions))),
    ]
    header, *depths = depth_rows(results)
    parts = [_table(["", ""], rows), _table(header, depths), verdict(results)]
    parts += [f"![{Path(name).stem}]({name})" for name in pictures]
    missing = [name for name in ("offline", "online", "speed") if not getattr(results, name)]
    if missing:
        parts.append(f"Not measured: {', '.join(missing)}.")
    return (
        "Brackets hold 95 % intervals over prompts. Tokens per forward count the token that the "
        "base adds itself: the base alone has 1.0.\n\n" + "\n\n".join(parts)
    )


def _training(about: Summary, data_licence: str) -> str:
    data, rows, before = about.settings["data"], [], 0
    for name, phase in about.settings["schedule"]["phases"].items():
        read = [row["tokens"] for row in about.history if row["phase"] == name]
        tokens = f"{read[-1] - before:,}" if read else "unknown"
        before = read[-1] if read else before
        written = ""
        if how := phase["distill"]:
            written = (
                f"{how['num_samples']:,} texts of {how['new_tokens']} tokens, "
                f"temperature {how['temperature']:g}"
            )
        cells = (phase["text"], phase["steps"], phase["batch_size"], tokens, phase["loss"])
        rows.append([name, *map(str, cells), f"{phase['learning_rate']:g}", written])
    header = ["phase", "text", "steps", "batch size", "tokens", "loss", "peak learning rate"]
    licence = data_licence or KNOWN_LICENCES.get(data["source"], "unknown")
    started = about.settings["init"]
    return "\n\n".join(
        [
            f"Corpus: {_corpus(data)}. Licence of the corpus: {licence}.",
            _table([*header, "written by the base"], rows),
            f"It started from `{started}`." if started else "It started from scratch.",
            "Text that the base wrote is its output: the base's licence says what may be done "
            "with it. All settings stand in `training.json`.",
        ]
    )


def _corpus(data: Mapping[str, Any]) -> str:
    if data["source"] == "python_stdlib":
        return "the standard library of Python"
    if data["source"] == "stdlib_instructions":
        return "instructions about the standard library of Python"
    if data["source"] == "mixture":
        shares = ((one["weight"], _corpus(one)) for one in data["sources"].values())
        return " and ".join(f"{weight:g} parts {corpus}" for weight, corpus in shares if weight)
    if data["source"] == "hub":
        name = f"[{data['path']}](https://huggingface.co/datasets/{data['path']})"
        return f"{name}, configuration {data['config'] or 'default'}, revision {data['revision']}"
    return f"local text that is not published (`{data['path']}`, {data['source']})"


def _use(about: Summary, place: str, *, published: bool) -> str:
    more = f", revision={about.base_pin!r}" if about.base_pin else ""
    more += ', adapter="path/to/adapter"' if about.adapted else ""
    ours = (
        "import specheads\n\n"
        f'base = specheads.FrozenBase.load("{about.our_base_place}"{more})\n'
        f'head = specheads.load_head("{place}", base)\n'
        'prompt = base.tokenizer("The")["input_ids"]\n'
        "out = specheads.generate(base, head, [prompt], max_new_tokens=64)\n"
        "print(base.tokenizer.decode(out.tokens[0]))\n"
    )
    parts = [f"With specheads:\n\n{_code('python', ours)}"]
    if published:
        measured = about.results.settings.dtype if about.results else "float32"
        lines = three_lines(about.base_place, place, measured, about.base_pin)
        parts.insert(0, f"In transformers' own `generate`:\n\n{_code('python', lines)}")
    if not about.base_id:
        parts.append(
            f"`path/to/base` is the folder of the base, which has no Hub id: {_unpublished(about)}."
        )
    return "\n\n".join(parts)


def _engines(about: Summary, head: Head, base: FrozenBase, place: str) -> str:
    if about.adapted:
        return "None as it is: engines load whole bases. Merge the adapter into the base first."
    rows, blocks, shown = [], [], copy(base)
    shown.place, shown.revision = about.base_place, about.base_pin or "main"
    ours = about.our_base_place + (f" base.revision={about.base_pin}" if about.base_pin else "")
    for engine in engines():
        module = engine_module(engine)
        layout = module.LAYOUTS.get(head.kind)
        reason = objection(head, base, layout)
        ran = "run: " if layout and layout.verified == "run" else "not run here: "
        served = f"no: {reason}" if reason or not layout else f"yes; {ran}{layout.note}"
        rows.append([f"`{engine}`", module.ABOUT, served])
        if layout and not reason:
            written = f"specheads export head={place} base={ours} engine={engine} out=served"
            lines = layout.write(head, shown, Path("served")).serve
            block = _code("sh", "\n".join([written, *lines]) + "\n")
            blocks.append(f"`{engine}`:\n\n{block}")
    table = _table(["engine", "", "serves this head"], rows)
    if not blocks:
        return table
    return (
        f"{table}\n\nEach export is read back by independent code before it is written, and must "
        "draft what the head drafts here.\n\n" + "\n\n".join(blocks)
    )


def _limits(about: Summary) -> str:
    lines = [
        "Greedy text is the base's own, token for token, up to near-ties that rounding decides; "
        "sampled text has the base's own distribution. `acceptance=typical` gives that up.",
        "It was made for this base alone. On another the text stays that base's own, and the "
        "guesses are seldom right.",
        "The figures hold for the prompts, the precision and the hardware above. Where no figure "
        "stands, nothing was measured.",
    ]
    loops = about.results.degenerate if about.results else None
    if loops and loops.flagged:
        lines.append(
            f"The base's own text loops on {loops.flagged} of the prompts. Loops are easy to "
            "guess, so the table also has the figure without those."
        )
    return "\n".join(f"- {line}" for line in lines)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines
    )


def _code(language: str, text: str) -> str:
    return f"```{language}\n{text}```"
