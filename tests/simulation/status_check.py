"""What a Raft member reports of itself (status and counters), against what the simulator has seen it do in this life.

The core that it describes is checked by others; here only the report is. A counter that stands still, or a status that
names another node's progress, harms nobody but the operator who goes by it.
"""

from __future__ import annotations

from collections.abc import Callable

from tidelog.model.ids import Epoch, NodeId
from tidelog.raft.driver import RaftDriver
from tidelog.raft.effects import Role

STRIDE = 16
"""The report is compared with every so many changes of role, epoch or leader, and at least every `STRIDE**2` events."""
ROUNDING_MS = 2
"""For each time without a leader: its ends are whole milliseconds."""

Fail = Callable[[str, str], None]


class StatusCheck:
    """Of one process of a member."""

    def __init__(self, name: str, driver: RaftDriver, clock: Callable[[], float], fail: Fail) -> None:
        self.compared = 0
        self._name = name
        self._driver = driver
        self._clock = clock
        self._fail = fail
        self._seen: tuple[Epoch, Role, NodeId | None] | None = None
        self._events = self._changes = 0
        self._leaders: set[tuple[Epoch, NodeId]] = set()
        self._campaigns: set[Epoch] = set()
        self._without_s = 0.0
        """Total of the times without a leader that have ended."""
        self._since_s: float | None = clock()
        """Since when there is no leader."""
        self._outages = 1
        self._counters: dict[str, int] = {}

    def look(self) -> None:
        """After an event of this process."""
        self._events += 1
        core = self._driver.core
        seen = (core.epoch, core.role, core.leader)
        if seen != self._seen:
            self._seen = seen
            self._changed(*seen)
        elif self._events % STRIDE**2:
            return
        if not self._changes % STRIDE or not self._events % STRIDE**2:
            self.compare()

    def _changed(self, epoch: Epoch, role: Role, leader: NodeId | None) -> None:
        self._changes += 1
        if role is Role.CANDIDATE:
            self._campaigns.add(epoch)
        if leader is None and self._since_s is None:
            self._since_s, self._outages = self._clock(), self._outages + 1
        elif leader is not None:
            self._leaders.add((epoch, leader))
            if self._since_s is not None:
                self._without_s += self._clock() - self._since_s
                self._since_s = None

    def compare(self) -> None:
        self.compared += 1
        try:
            self._compare_counters()
            self._compare_status()
        except AssertionError as error:
            self._fail(self._name, f"Invariant of its status: {error}")

    def _compare_counters(self) -> None:
        driver = self._driver
        metrics = driver.metrics
        counters = {name: getattr(metrics, name) for name in metrics.__slots__}
        for name, before in self._counters.items():
            assert counters[name] >= before, f"{name} falls from {before} to {counters[name]}"
        self._counters = counters
        assert metrics.elections >= len(self._campaigns), f"{metrics.elections} elections, seen {self._campaigns}"
        assert metrics.leader_changes >= len(self._leaders), f"{metrics.leader_changes} leaders, seen {self._leaders}"
        parts = driver._snapshotter
        known = (
            parts.taken,
            parts.installed,
            parts.rejected,
            parts.failed,
            driver._peers.sent,
            driver._persister.rounds,
        )
        reported = (
            *(metrics.snapshots_taken, metrics.snapshots_installed, metrics.snapshots_rejected),
            *(metrics.snapshots_failed, metrics.messages_sent, metrics.persist_rounds),
        )
        assert reported == known, f"counts {reported}, and its parts {known}"
        lasts_s = 0.0 if self._since_s is None else self._clock() - self._since_s
        seen_ms, reported_ms = 1000 * (self._without_s + lasts_s), driver.without_leader_total_ms()
        assert abs(seen_ms - reported_ms) <= ROUNDING_MS * self._outages, (
            f"{reported_ms} ms without a leader, seen {seen_ms:.0f} ms"
        )

    def _compare_status(self) -> None:
        driver = self._driver
        core, status = driver.core, driver.describe()
        reported = (status.epoch, status.role, status.leader, status.commit, status.log_end, status.durable_end)
        assert reported == (core.epoch, core.role, core.leader, core.commit, core.log.end, core.durable_end), (
            f"{status}"
        )
        membership = core.log.membership
        voters = [member.node for member in status.members if member.is_voter]
        assert voters == [member.node for member in membership.voters], f"names the voters {voters} of {membership}"
        leads = core.role is Role.LEADER
        assert not leads or status.without_leader_ms == 0, "leads, and reports a time without a leader"
        for row in status.members:
            assert (row.match is not None) == leads, f"{row} of a {core.role.value}"
            if row.match is None or row.lag is None or row.stuck_ms is None:
                continue
            assert row.lag == core.log.end - row.match, f"{row} of a log that ends at {core.log.end}"
            assert row.stuck_ms == 0 or row.match < core.commit, f"{row} has what is committed up to {core.commit}"
            is_me = row.node == driver.me.node
            assert not is_me or (row.is_connected and row.counts and row.match == core.durable_end), f"me: {row}"
