"""Show what a training will take: tables on a terminal, YAML to a file or another program."""

import sys
from dataclasses import asdict

import yaml
from rich.console import Console

# what a run imports is a part of what it holds
from specheads.commands import _compose, _library  # noqa: F401
from specheads.config import Train
from specheads.measure.tables import ConsoleTable
from specheads.training.plan.whole import Plan, plan
from specheads.training.processes import accelerator_of_environment

GIB = 2**30


def show(settings: Train) -> None:
    """Print the settings, then the plan: a second document of the same YAML where nobody looks."""
    accelerator = accelerator_of_environment(settings.base.dtype)
    if accelerator.is_main_process:
        sys.stdout.write(_compose.as_yaml(settings))
        sys.stdout.flush()
    found = plan(settings, accelerator)
    if not accelerator.is_main_process:
        return
    if not sys.stdout.isatty():
        sys.stdout.write("---\n" + yaml.safe_dump(as_values(found), sort_keys=False, width=1000))
        return
    console = Console(markup=False, highlight=False)
    for one in tables(found):
        console.print(one)
    for line in lines(found):
        console.print(line, soft_wrap=True)


def as_values(found: Plan) -> dict[str, object]:
    """Return a plan as plain values."""
    more = {"fits": found.fits, "peak": found.peak.name, "peak_bytes": found.peak.total}
    return {"plan": asdict(found) | more | {"hours": found.hours}}


def tables(found: Plan) -> list[ConsoleTable]:
    """Return memory, phases and disk as tables."""
    parts = list(dict.fromkeys(part for stage in found.stages for part in stage.memory))
    memory = [[part, *(_gib(one.memory.get(part)) for one in found.stages)] for part in parts]
    memory.append(["at most", *(_gib(one.total) for one in found.stages)])
    phases = [
        [
            one.name, f"{one.steps:,}", f"{one.batch_size:,}", f"{one.tokens:,}",
            _hours(one.hours), _hours(one.writing_hours),
        ]
        for one in found.phases
    ]  # fmt: skip
    names = ["part", *(one.name for one in found.stages)]
    head = ["phase", "steps", "batch", "tokens", "hours", "hours of writing"]
    disk = [[name, _gib(size)] for name, size in found.disk.items()]
    each = "" if found.processes == 1 else f", each of {found.processes} processes"
    return [
        ConsoleTable(f"memory of {found.device}{each}, GiB", memory, names),
        ConsoleTable("phases", phases, head),
        ConsoleTable("disk, GiB", disk, ["what", "GiB"]),
    ]


def lines(found: Plan) -> list[str]:
    """Return what a plan comes to."""
    peak, said = found.peak, list(found.notes)
    needs = f"{peak.name} holds {_gib(peak.total)} GiB at most"
    if found.room is None:
        said.append(f"{needs}; {found.device} is not here, so nobody knows whether that fits")
    else:
        fits = "fits" if found.fits else "does NOT fit"
        said.append(f"{needs}: it {fits} the {_gib(found.room)} GiB that {found.device} has")
    said += [f"change: {change}" for change in found.changes]
    if found.hours is not None:
        said.append(f"{_hours(found.hours)} hours in all, by a few steps of this machine")
    return said


def _gib(size: int | None) -> str:
    return "" if size is None else f"{size / GIB:,.3f}"


def _hours(hours: float | None) -> str:
    return "" if hours is None else f"{hours:,.3f}"
