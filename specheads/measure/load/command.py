"""Loads that were asked for, simulated: what `specheads simulate` does."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from specheads.base.model import FrozenBase
from specheads.config import Hardware, Simulate
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.core.paths import local_path, writable_folder
from specheads.decoding.goodput import Goodput
from specheads.decoding.payoff import chains
from specheads.decoding.trees.tuned import FILE, Tuned
from specheads.heads.layers.block import BlockHead
from specheads.heads.untrusted import read_json
from specheads.measure.load import accepted, arrivals, results
from specheads.measure.load.hardware import ComputedCost, Machine, Size
from specheads.measure.load.simulate import System, simulate
from specheads.measure.store import dumps
from specheads.runs.directory import RunDirectory, write_atomic

MEASURED = "measured"

SHARES = 0.25, 0.5, 0.75, 0.95, 1.2
"""Loads where none is asked for, as shares of what the base alone can serve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What computed times are of."""

    parameters: int = 0
    draft_parameters: int = 0
    """Of one forward of the head."""
    draft_levels: int = 1
    """Levels that one forward of the head drafts."""
    position_numbers: int = 0
    """Numbers in the key-value cache for a position."""

    @classmethod
    def of(cls, base: FrozenBase, head: Head) -> "Sizes":
        """Return those of a base and a head.

        Heads whose levels share one projection read all they have at each, others their level's;
        a block is drafted at once.
        """
        own = sum(parameter.numel() for parameter in head.parameters())
        weights = [weight for weight, _ in head.projections()]
        is_shared = all(weight is weights[0] for weight in weights)
        is_own = any(weights[0] is parameter for parameter in head.parameters())
        # of one that is put together, the base's columns are borrowed and the others own
        lent = 0 if is_own else len(weights[0]) * head.width
        return cls(
            parameters=base.num_parameters,
            draft_parameters=(own if is_shared else own // head.depth) + lent,
            draft_levels=head.depth if isinstance(head, BlockHead) else 1,
            position_numbers=base.slot_bytes // base.dtype.itemsize,
        )


def head_folder(settings: Simulate) -> Path:
    """Return where the head lies; an empty name is no folder."""
    if settings.run:
        return RunDirectory(local_path(settings.run)).head
    if not settings.head_path:
        raise InputError("name whose requests to simulate: run=DIR or head=PATH")
    return local_path(settings.head_path)


def folder(settings: Simulate) -> Path:
    """Return where load.json goes."""
    if settings.run and not settings.out:
        return writable_folder(RunDirectory(local_path(settings.run)).report)
    return writable_folder(settings.out or head_folder(settings))


def needs_sizes(settings: Simulate) -> bool:
    """Return whether times are computed of a run's own base and head."""
    hardware = settings.hardware
    said = hardware.parameters and hardware.draft_parameters
    return bool(settings.run) and hardware.name != MEASURED and not said


def simulate_loads(settings: Simulate, sizes: Sizes | None = None) -> results.Load:
    """Return what requests wait for, with the base alone, fixed depths and goodput.

    Goodput is that of a tuned head, `Goodput.of`, with copied text too where that was tuned; it
    chooses among chains alone where acceptance is said.

    `sizes` are what computed times are of, as far as the settings do not say them.
    """
    rates, texts = _acceptance(settings)
    system = _system(settings, sizes, rates)
    depths = list(dict.fromkeys(settings.depths or [0, len(rates)]))
    if max(depths) > len(rates):
        raise InputError(
            f"depths can be at most {len(rates)}, as acceptance is known of, got {max(depths)}"
        )
    ways = [("none" if not one else f"depth {one}", system, one) for one in depths]
    ways += [(name, served, None) for name, served in _goodput(settings, system)]
    matches = measured(settings).acceptance.matches if _tuned(settings) else []
    # other chances than those of the head's own drafts
    copies = accepted.drawn_copies(matches, settings.seed + 1)
    rows = []
    for name, coming in _loads(settings, system):
        for draft, served, depth in ways:
            right = [accepted.recorded(texts)] if texts else []
            right = right or [accepted.drawn(one, settings.seed) for one in served.rates]
            found = simulate(served, coming, right, depth, copies)
            rows.append(results.summarise(name, draft, found))
    computed = settings.hardware.name != MEASURED
    return results.Load(
        times=f"computed for {settings.hardware.name}" if computed else "measured",
        computed=computed,
        acceptance="recorded" if texts else "drawn from rates",
        rates=rates,
        max_batch=settings.max_batch,
        seed=settings.seed,
        rows=rows,
    )


def write(where: Path, load: results.Load) -> None:
    """Write load.png and load.json, which appears last."""
    write_atomic(where / "load.png", results.draw(load))
    write_atomic(where / "load.json", dumps(load))


def measured(settings: Simulate) -> Tuned:
    """Return what `specheads tune` measured of the head."""
    file = head_folder(settings) / FILE
    if not file.is_file():
        raise InputError(
            f"a simulation needs measured times and acceptance, and {file} is not there; run "
            "specheads tune first, or give acceptance=[...] and hardware=NAME"
        )
    return Tuned.read(read_json(file), str(file))


def _acceptance(settings: Simulate) -> tuple[list[float], list[list[int]]]:
    """Return conditional rates by depth, and recorded lengths where there are any."""
    if settings.accepted:
        texts = accepted.read_accepted(settings.accepted)
        return accepted.rates_of(texts, max(map(max, texts))), texts
    return list(settings.acceptance) or measured(settings).acceptance.per_depth, []


def _tuned(settings: Simulate) -> bool:
    """Return whether acceptance is that of a tuned head, and not said."""
    return not settings.accepted and not settings.acceptance


def _goodput(settings: Simulate, system: System) -> Iterator[tuple[str, System]]:
    """Yield what goodput chooses from: without copied text, and with it where that was tuned."""
    if not _tuned(settings):
        yield "goodput", system
        return
    tuned = measured(settings)
    yield "goodput", choosing(system, replace(tuned, acceptance=tuned.acceptance.alone()))
    if tuned.acceptance.matches:
        yield "goodput+lookup", choosing(system, tuned)


def choosing(system: System, tuned: Tuned) -> System:
    """Return a system that drafts in the ways that goodput chooses from in an engine."""
    policy = Goodput.of(tuned)
    return replace(system, rates=policy.rates, drafts=policy.drafts, copied=policy.copied_rates)


def _system(settings: Simulate, base: Sizes | None, rates: list[float]) -> System:
    if settings.hardware.name == MEASURED:
        cost = measured(settings).cost
        prefill: Callable[[int], float] = partial(cost.verify.seconds, context=0.0)
    else:
        cost = _computed(settings.hardware, base or Sizes(), len(rates))
        prefill = cost.prefill
    return System(
        cost=cost,
        prefill=prefill,
        rates=[rates],
        drafts=chains(len(rates)),
        max_batch=settings.max_batch,
    )


def _computed(hardware: Hardware, known: Sizes, depth: int) -> ComputedCost:
    """Return a machine's times of a base and a head, of what is said and else of what is known."""
    parameters = int(hardware.parameters) or known.parameters
    drafting = int(hardware.draft_parameters) or known.draft_parameters
    if not parameters or (depth and not drafting):
        raise InputError(
            "computed times need a base and what drafts; name run=DIR, or give "
            "hardware.parameters and hardware.draft_parameters"
        )
    size = hardware.weight_bytes
    return ComputedCost(
        machine=Machine(bandwidth=hardware.bandwidth, flops=hardware.flops),
        base=Size(
            parameters=parameters,
            weight_bytes=parameters * size,
            position_bytes=hardware.position_bytes or known.position_numbers * size,
        ),
        draft=Size(
            parameters=drafting,
            weight_bytes=drafting * size,
            position_bytes=hardware.draft_position_bytes,
        ),
        window=float(hardware.window or math.inf),
        levels=1 if hardware.draft_parameters else known.draft_levels,
    )


def _loads(settings: Simulate, system: System) -> Iterator[tuple[str, list[arrivals.Arrival]]]:
    """Yield each load by name."""
    if settings.arrivals:
        yield Path(settings.arrivals).name, arrivals.read_arrivals(settings.arrivals)
        return
    for rate in dict.fromkeys(settings.rates or _usual_rates(settings, system)):
        yield (
            f"{rate:.15g}",
            arrivals.poisson(
                rate,
                settings.num_requests,
                prompt_tokens=settings.prompt_tokens,
                new_tokens=settings.new_tokens,
                parts=settings.parts,
                seed=settings.seed,
            ),
        )


def _usual_rates(settings: Simulate, system: System) -> list[float]:
    """Return five loads, from a quarter of what the base alone can serve to more than that."""
    context = settings.prompt_tokens + settings.new_tokens / 2
    step = system.cost.seconds(settings.max_batch, context, 1, 0)
    # what a request has of the system's time
    seconds = (
        system.prefill(settings.prompt_tokens) + settings.new_tokens * step / settings.max_batch
    )
    mean = sum(settings.parts) / len(settings.parts)
    # of three digits, as they are shown
    return [float(f"{share / seconds / mean:.3g}") for share in SHARES]
