"""The run log, the audit of a run, its picture and its page."""

from .auditing import audit
from .page import write_report
from .run_log import RunLog, read_records, started_runs

__all__ = [
    "RunLog",
    "audit",
    "read_records",
    "started_runs",
    "write_report",
]
