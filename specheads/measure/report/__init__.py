"""The report of an evaluation: see docs/evaluate.md."""

from specheads.measure.report.words import depth_rows, pays, summary, verdict
from specheads.measure.report.write import record, record_folder, show, write_report

__all__ = [
    "depth_rows",
    "pays",
    "record",
    "record_folder",
    "show",
    "summary",
    "verdict",
    "write_report",
]
