"""Choose the draft tree of a head for this machine from measured costs and acceptance.

specheads tune run=runs/smollm2
specheads tune head=HEAD base=MODEL 'batch_sizes=[1,8]' 'contexts=[128,1024]'
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from specheads.base.model import FrozenBase
from specheads.commands._library import head_of, load_base, objects, own, settings_for
from specheads.config import Tune
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.core.files import dumps, local_path, writable_folder, write_atomic
from specheads.decoding.trees.tuned import FILE, Tuned
from specheads.measure.tune import table, tune_head
from specheads.runs.directory import RunDirectory


def run(settings: Tune, overrides: Sequence[str]) -> None:
    """Tune the head of a run, or any head on its base."""
    tuned = tune(settings=settings, overrides=overrides)
    console = Console()
    console.print(table(tuned))
    console.print(f"tuned: {head_folder(settings) / FILE}", soft_wrap=True, markup=False)


def tune(
    run: str | Path = "",
    overrides: Sequence[str] = (),
    *,
    settings: Tune | None = None,
    base: FrozenBase | None = None,
    head: Head | None = None,
) -> Tuned:
    """Choose the draft tree of a head for this machine.

    Args:
        run: Directory of the run.
        overrides: As on the command line: `["max_nodes=32", "contexts=[128,1024]"]`.
        settings: Typed settings.
        base: The loaded base, in place of the one in the settings.
        head: A loaded head. It keeps the result, and no file is written.

    Returns:
        The content of tuned.json, which is written into the folder of the head. Decoding reads it.
    """
    settings, words = settings_for(Tune, settings, overrides, head, run=run)
    if head is not None:
        base, head = objects(settings, base, head, "tune")
        head.tuned = _tune(base, head, settings)
        return head.tuned
    folder = writable_folder(head_folder(settings))
    if settings.run:
        made, trained = own(settings, words)
        made.refuse_unfinished("tuned")
        base = base or load_base(trained)
        head = head_of(made, base, force=settings.force)
        settings = replace(settings, data=trained.data, seed=trained.seed)
    else:
        base, head = objects(settings, base, None, "tune")
    tuned = _tune(base, head, settings)
    write_atomic(folder / FILE, dumps(tuned))
    return tuned


def _tune(base: FrozenBase, head: Head, settings: Tune) -> Tuned:
    names = "batch_sizes", "contexts", "max_nodes", "num_prompts", "new_tokens", "seed"
    values = {name: getattr(settings, name) for name in names}
    return tune_head(base, head, settings.data, **values)


def head_folder(settings: Tune) -> Path:
    """Return the folder of the head, which gets tuned.json."""
    if settings.run:
        return RunDirectory(Path(settings.run)).head
    if not settings.head_path:
        raise InputError("name what to tune: run=DIR, or head=PATH and base=PATH")
    if not (folder := local_path(settings.head_path)).is_dir():
        raise InputError(
            f"tuned.json is written into the head's folder, and {settings.head_path!r:.80} is not "
            "a folder; download the head and name its folder"
        )
    return folder
