"""Choose the draft tree of a head for this machine from measured costs and acceptance.

specheads tune run=runs/smollm2
specheads tune head=HEAD base=MODEL 'batch_sizes=[1,8]' 'contexts=[128,1024]'
"""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from specheads.base.model import FrozenBase
from specheads.commands._call import settings_for
from specheads.commands._library import objects
from specheads.config.commands import Tune
from specheads.core.errors import InputError
from specheads.core.files import dumps, local_path, writable_folder, write_atomic
from specheads.decoding.trees.tuned import FILE, Tuned
from specheads.measure.tune import table, tune_head
from specheads.runs.directory import RunDirectory


def run(settings: Tune) -> None:
    """Tune the head of a run, or any head on its base."""
    tuned = tune(settings=settings)
    console = Console()
    console.print(table(tuned))
    console.print(f"tuned: {head_folder(settings) / FILE}", soft_wrap=True, markup=False)


def tune(
    run: str | Path = "",
    overrides: Sequence[str] = (),
    *,
    settings: Tune | None = None,
    base: FrozenBase | None = None,
) -> Tuned:
    """Choose the draft tree of a head for this machine.

    Args:
        run: Directory of the run.
        overrides: As on the command line: `["max_nodes=32", "contexts=[128,1024]"]`.
        settings: Checked settings, in place of the run and the overrides.
        base: The loaded base, in place of the one in the settings.

    Returns:
        The content of tuned.json, which is written into the folder of the head. Decoding reads it.
    """
    settings = settings or settings_for(Tune, overrides, run=run)
    folder = writable_folder(head_folder(settings))
    base, head = objects(settings, base)
    names = "batch_sizes", "contexts", "max_nodes", "num_prompts", "new_tokens", "seed"
    values = {name: getattr(settings, name) for name in names}
    tuned = tune_head(base, head, settings.data, **values)
    write_atomic(folder / FILE, dumps(tuned))
    return tuned


def head_folder(settings: Tune) -> Path:
    """Return the folder of the head, which gets tuned.json."""
    if settings.run:
        return RunDirectory(Path(settings.run)).head
    folder = local_path(settings.head_path)
    if not settings.head_path or not folder.is_dir():
        raise InputError(
            "tuned.json is written into the head's folder: name run=DIR, or head=FOLDER and "
            f"base=PATH; got head={settings.head_path!r:.80}"
        )
    return folder
