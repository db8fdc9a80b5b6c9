"""A folder of self-distilled text, written by all processes of a run together, with its report."""

from collections.abc import Callable
from contextlib import closing

from rich.progress import Progress

from specheads.training.distill.drafting import with_drafter
from specheads.training.distill.engine import Engine
from specheads.training.distill.report import Report, report_of, write_report
from specheads.training.distill.run import Job, Written, decoder, engine_for, write_text
from specheads.training.processes import together


def write_together(job: Job, bar: Progress, halt: Callable[[], None]) -> Report | None:
    """Have the base write what a folder lacks, this process its share; return the report.

    Args:
        job: What is to be written.
        bar: Shows how far all are.
        halt: Called on all processes together now and again; it raises where writing is to stop.

    Returns:
        The report that lies beside the text now; on all processes but the first, None.
    """
    task = bar.add_task("text by the base", total=job.settings.num_samples, numbers="")
    latest: dict[int, Written] = {}
    with closing(write_text(job, _engine)) as writer:

        def go_on() -> Written | None:
            return next(writer, None)

        # processes that have written their share wait for the others
        while True:
            told = together(go_on)
            if not any(told):
                break
            latest |= {rank: one for rank, one in enumerate(told) if one}
            speed = _speed(latest)
            dropped = sum(one.dropped for one in latest.values())
            bar.update(
                task,
                completed=sum(one.texts for one in latest.values()),
                numbers=f"{speed or 0:,.0f} tokens/s  {dropped:,} dropped",
            )
            halt()
    # of text that was there already nothing is told
    bar.update(task, completed=job.settings.num_samples)
    if job.rank:
        return None
    speed = _speed(latest)
    report = report_of(job.folder, job.settings.num_samples, decoder(job.base), speed)
    if speed or not (job.folder / "report.md").is_file():
        write_report(job.folder, report)
    return report


def _speed(latest: dict[int, Written]) -> float | None:
    """Return tokens a second of all processes; None where nothing was written."""
    seconds = max((one.seconds for one in latest.values()), default=0.0)
    return sum(one.tokens for one in latest.values()) / seconds if seconds else None


def _engine(job: Job) -> Engine:
    return engine_for(with_drafter(job))
