"""Write a trained head in a serving engine's layout, once it drafts there what it drafts here.

specheads export run=runs/smollm2 engine=vllm out=served
specheads export head=HEAD base=MODEL engine=sglang out=served
"""

import sys
from collections.abc import Sequence

from rich.console import Console

from specheads.commands import _library
from specheads.config import Export


def run(settings: Export, overrides: Sequence[str]) -> None:
    """Export a run's head, or any head with the base it was made for."""
    made = _library.export(settings=settings, overrides=overrides)
    accepted = " ".join(f"{one.accepted}/{one.offered}" for one in made.parity.per_depth)
    Console(stderr=True).print(
        f"{made.folder}: read back, it accepts {accepted} drafts by depth, as the run's head "
        f"does, {made.parity.tokens_per_forward:.2f} tokens per forward",
        markup=False,
    )
    # whole lines, to be copied: a console would wrap them
    sys.stdout.write("".join(f"{line}\n" for line in made.serve))
