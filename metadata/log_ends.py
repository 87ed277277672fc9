"""Log ends that brokers report for replicas that only an unclean election can elect. Pure.

An unclean election loses records. It elects the candidate that loses least: the one with the highest last epoch, then
with the longest log, as Raft compares logs. Metadata does not hold log ends, so brokers report the durable end, and the
epoch of the record before it, of each replica whose partition has no leader, or that is out of sync where its topic
allows unclean elections (`replication.log_end_reports`).

Reports are soft state of the active controller. They only choose between candidates, so an old or missing report cannot
make an election less safe. A replica without a report counts as empty. No election waits for a report, except an
admin's for `REPORT_WAIT_MS`.

Limits: a report is valid for `REPORT_AGE_MAX_MS`, in the same incarnation of its broker; at most `REPORTS_MAX` are
held.
"""

from uuid import UUID

REPORT_AGE_MAX_MS = 10_000
REPORT_WAIT_MS = 1_200
"""Time for which an admin's election waits for reports; below the 2 s after which callers give up."""
REPORTS_MAX = 200_000

LogEnd = tuple[int, int]
"""(epoch of the last record, end offset)"""
UNKNOWN: LogEnd = (-1, -1)


class LogEnds:
    """See the module. Times are of the controller's clock, in ms."""

    __slots__ = ("_reports",)

    def __init__(self) -> None:
        self._reports: dict[tuple[UUID, int, int], tuple[int, int, LogEnd]] = {}
        """By (topic id, partition, broker): broker epoch, report time, log end."""

    def __len__(self) -> int:
        return len(self._reports)

    def report(
        self, broker: int, broker_epoch: int, replicas: tuple[tuple[UUID, int, int, int], ...], *, now_ms: int
    ) -> None:
        """`replicas` are (topic id, partition, last epoch, end offset). What does not fit is ignored."""
        if len(self._reports) + len(replicas) > REPORTS_MAX:
            self._reports = {key: row for key, row in self._reports.items() if _is_recent(row[1], now_ms)}
        for topic_id, partition, last_epoch, end_offset in replicas:
            key = (topic_id, partition, broker)
            if key in self._reports or len(self._reports) < REPORTS_MAX:
                self._reports[key] = (broker_epoch, now_ms, (last_epoch, end_offset))

    def get(self, topic_id: UUID, partition: int, broker: int, broker_epoch: int, *, now_ms: int) -> LogEnd:
        """Returns what this incarnation of the broker has reported, or `UNKNOWN`."""
        row = self._reports.get((topic_id, partition, broker))
        if row is None or row[0] != broker_epoch or not _is_recent(row[1], now_ms):
            return UNKNOWN
        return row[2]

    def clear(self) -> None:
        self._reports = {}


def _is_recent(reported_ms: int, now_ms: int) -> bool:
    return abs(now_ms - reported_ms) <= REPORT_AGE_MAX_MS
