"""What `specheads compare` and `specheads.compare` call."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from specheads.base.model import FrozenBase
from specheads.commands._compared import comparison_folder, first_run, load_compared
from specheads.commands._library import (
    Prompts,
    own,
    prompt_set,
    refuse_unwritable,
    settings_for,
)
from specheads.config import Compare
from specheads.core.drafter import Head
from specheads.core.errors import InputError
from specheads.measure.compare import compare_heads, write_comparison
from specheads.measure.methods import chosen
from specheads.measure.results import Comparison


def compare(
    run: str | Path = "",
    overrides: Sequence[str] = (),
    *,
    settings: Compare | None = None,
    base: FrozenBase | None = None,
    head: Head | None = None,
    heads: Mapping[str, Head] | None = None,
    prompts: Prompts = None,
    out: str | Path = "",
) -> Comparison:
    """Hold heads of one base against each other and against what needs no training.

    Arguments are those of `evaluate`, and `["drafters=[head,hybrid]"]` is an override; `heads`
    are several, by what they are to be called, and `["heads=[DIR,DIR]"]` the same in words. Without
    a run both base and heads are needed. compare.json goes into the first run's report, or into
    `out`.
    """
    given = heads or ({"head": head} if head else {})
    first = next(iter(given.values()), None)
    settings, words = settings_for(Compare, settings, overrides, first, run=run, out=out)
    chosen(settings)
    refuse_unwritable(settings.out)
    asked = settings
    if not given:
        folder = comparison_folder(settings)
        if named := first_run(settings):
            _, asked = own(replace(settings, run=named), words)
        base, given = load_compared(settings, asked, base)
    elif base is None:
        raise InputError("name what to compare: run=DIR, or heads=[DIR,DIR]")
    else:
        folder = Path(settings.out) if settings.out else None
    comparison = compare_heads(base, given, settings, asked, prompt_set(prompts, asked))
    if folder:
        write_comparison(folder, comparison)
    return comparison
