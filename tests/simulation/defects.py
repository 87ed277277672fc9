"""Deliberate defects, each of a line or two, of core, storage or driver. The simulator has to notice every one.

A checker that cannot fail is worthless: `tests/simulation/test_seeds.py` switches each on, one at a time, and runs
seeds until one catches it. `catching_seeds.toml` remembers which seed did, so that it is tried first.

A run catches a defect only if all of this holds (`Defect.is_caught`):

- a checker names what is wrong. A crash does not count: a defect that patches code which has changed since raises a
  TypeError or an AttributeError at its first call and would pass for caught;
- for a defect that breaks no promise but delays something (`late`), just that does not happen in its time;
- every patched function was called;
- something was acknowledged.
"""

import functools
import inspect
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from simulation.run_result import Result, Symptom
from tidelog.model.ids import NodeId, Offset
from tidelog.raft.applier import Applier
from tidelog.raft.core import RaftCore
from tidelog.raft.elections import Elections
from tidelog.raft.leader import LeaderState
from tidelog.raft.membership import Membership, VoterKey
from tidelog.raft.messages import AppendRequest, AppendResponse, Message
from tidelog.raft.observer import RaftObserver
from tidelog.raft.pending_requests import PendingRequests
from tidelog.raft.persistent_state import PersistentState
from tidelog.raft.persister import Persister
from tidelog.raft.raft_log import RaftLog
from tidelog.raft.storage import RaftStorage
from tidelog.raft.tail import Tail, TailEntries, TailState, decode_frame

Patch = tuple[type, str, Any]


@dataclass(frozen=True, slots=True)
class Defect:
    name: str
    stack: str
    what: str
    patches: tuple[Patch, ...]
    late: str = ""
    """What does not happen in its time, in the words of the simulation; empty for a defect that a checker names."""

    @contextmanager
    def switched_on(self) -> Iterator[Counter[str]]:
        """Gives how often each of the patched functions was called, by its name."""
        originals = [(owner, name, owner.__dict__[name]) for owner, name, _ in self.patches]
        calls: Counter[str] = Counter()
        try:
            for owner, name, replacement in self.patches:
                setattr(owner, name, _counted(replacement, name, calls))
            yield calls
        finally:
            for owner, name, original in originals:
                setattr(owner, name, original)

    def is_caught(self, result: Result, calls: Counter[str]) -> bool:
        """See the module. `StaleDefectError` if the defect itself does not fit the code any more."""
        if isinstance(result.error, TypeError | AttributeError | NameError):
            raise StaleDefectError(f"{self.name} does not fit the code that it patches: {result.error!r}")
        if result.acknowledged == 0 or not all(calls[name] for _, name, _ in self.patches):
            return False
        if self.late:
            return result.symptom is Symptom.PROGRESS and self.late in (result.failure or "")
        return result.symptom is Symptom.CHECKER

    def misfits(self) -> list[str]:
        """Patches that do not fit what they replace: it is gone, or is called in a way that the patch does not take."""
        return [f"{name}: {why}" for owner, name, patch in self.patches if (why := _misfit(owner, name, patch))]


class StaleDefectError(Exception):
    """A deliberate defect patches code that has changed since."""


def _counted(patch: Any, name: str, calls: Counter[str]) -> Any:
    if isinstance(patch, property):
        assert patch.fget is not None, "a property that is read"
        return property(_counted(patch.fget, name, calls))

    @functools.wraps(patch)
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return patch(*args, **kwargs)

    return counted


def _misfit(owner: Any, name: str, patch: Any) -> str | None:
    original = owner.__dict__.get(name)
    if original is None:
        return f"{owner.__name__} has none"
    if isinstance(original, property) or isinstance(patch, property):
        return None if isinstance(original, property) and isinstance(patch, property) else "one is a property"
    if inspect.iscoroutinefunction(original) != inspect.iscoroutinefunction(patch):
        return "one is a coroutine function"
    places: list[object] = []
    names: dict[str, object] = {}
    for parameter in inspect.signature(original).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            names[parameter.name] = None
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            places.append(None)
    try:
        inspect.signature(patch).bind(*places, **names)
    except TypeError as error:
        return str(error)
    return None


# Votes.


def _send_without_sync(self: RaftCore, to: NodeId, message: Message) -> None:
    if to == self.me.node:
        self._after_persist.append((to, message))
    else:
        self.send(to, message)


_init = RaftCore.__init__


def _forget_vote(self: RaftCore, *args: Any, **kwargs: Any) -> None:
    _init(self, *args, **kwargs)
    self.voted_for = None


def _forget_loss(self: RaftCore, *args: Any, **kwargs: Any) -> None:
    _init(self, *args, **kwargs)
    self.recovering_until = None


_on_vote_request = Elections.on_vote_request


def _vote_while_recovering(self: Elections, request: Any, now_ms: int) -> None:
    until, self.core.recovering_until = self.core.recovering_until, None
    _on_vote_request(self, request, now_ms)
    self.core.recovering_until = until


def _vote_again(self: Elections, request: Any, now_ms: int) -> None:
    if request.epoch == self.core.epoch:
        self.core.voted_for = None
    _on_vote_request(self, request, now_ms)


_on_pre_vote_request = Elections.on_pre_vote_request


def _pre_vote_is_contact(self: Elections, request: Any, now_ms: int) -> None:
    """Only lateness shows this: every vote and every commit stays right, and an election that never begins leaves no
    wrong state for a checker. A checker of `contact_ms` itself would repeat the rule that it checks."""
    _on_pre_vote_request(self, request, now_ms)
    self.contact_ms = now_ms
    self.restart(now_ms)


def _any_log_is_up_to_date(_self: Elections, _end: Offset, _last_epoch: int) -> bool:
    return True


def _has_voter_by_node(self: Membership, key: VoterKey) -> bool:
    return self.voter(key.node) is not None


def _vote_for_any_directory(self: Elections, request: Any, now_ms: int) -> None:
    _on_vote_request(self, request._replace(to_directory=self.core.me.directory), now_ms)


def _pre_vote_for_any_directory(self: Elections, request: Any, now_ms: int) -> None:
    _on_pre_vote_request(self, request._replace(to_directory=self.core.me.directory), now_ms)


# Following.

_on_append_request = RaftCore._on_append_request


def _accept_stale_leader(self: RaftCore, request: AppendRequest, now_ms: int) -> None:
    if request.epoch < self.epoch and self.leader_state is None:
        request = request._replace(epoch=self.epoch)
    _on_append_request(self, request, now_ms)


_truncate = RaftCore._truncate


def _truncate_committed(self: RaftCore, end: Offset) -> None:
    """The core would stop before it cuts what is committed."""
    self.commit = min(self.commit, end)
    _truncate(self, end)


def _commit_all_that_matches(self: RaftCore, request: AppendRequest, now_ms: int) -> None:
    _on_append_request(self, request._replace(commit=Offset(1 << 40)), now_ms)


def _commit_what_is_there(self: RaftCore, request: AppendRequest, now_ms: int) -> None:
    _on_append_request(self, request, now_ms)
    if request.epoch == self.epoch:
        self.advance_commit(min(request.commit, self.log.end))


_append_ack = RaftCore._append_ack


def _ack_before_sync(self: RaftCore) -> AppendResponse:
    return _append_ack(self)._replace(match=self._matched)


def _count_while_recovering(self: RaftCore) -> AppendResponse:
    return _append_ack(self)._replace(counts=True)


_adopt = RaftCore.become_follower


def _truncate_to_commit(self: RaftCore, epoch: Any, leader: Any, now_ms: int) -> None:
    is_new = epoch > self.epoch
    _adopt(self, epoch, leader, now_ms)
    if is_new and self.log.end > self.commit:
        self._truncate(self.commit)


# Leading.


def _may_commit_any_epoch(_self: LeaderState, _offset: Offset) -> bool:
    return True


_synced_by = LeaderState._synced_by


def _count_own_unsynced(self: LeaderState, member: Any) -> Offset:
    if member.node == self.core.me.node:
        return self.core.log.end
    return _synced_by(self, member)


def _answer_reads_at_once(self: LeaderState) -> None:
    while self._reads:
        _, offset, token = self._reads.popleft()
        self.core.out.reads.append((token, offset))


_change_rejection = LeaderState._change_rejection


def _change_before_commit(self: LeaderState) -> Any:
    start, self.epoch_start = self.epoch_start, Offset(-1)
    rejection = _change_rejection(self)
    self.epoch_start = start
    return rejection


def _several_changes(_self: LeaderState) -> None:
    return None


# Membership and snapshots.


def _oldest_membership(self: RaftLog, _offset: Offset) -> Membership:
    return self.memberships[0][1]


_commit_known: dict[int, Offset] = {}
_advance_commit = RaftCore.advance_commit


def _note_commit(self: RaftCore, commit: Offset) -> None:
    _advance_commit(self, commit)
    _commit_known[id(self.log)] = self.commit


def _committed_membership(self: RaftLog) -> Membership:
    commit = _commit_known.get(id(self), self.start)
    found = self.memberships[0][1]
    for at, membership in self.memberships[1:]:
        if at < commit:
            found = membership
    return found


_on_snapshot_installed = RaftCore._on_snapshot_installed


def _keep_log_under_snapshot(self: RaftCore, event: Any, now_ms: int) -> None:
    """A log that contradicts the snapshot, but is long enough, is kept."""
    log = self.log
    if log.start < event.snapshot.offset <= log.end:
        event = event._replace(snapshot=event.snapshot._replace(epoch=log.epoch_before(event.snapshot.offset)))
    _on_snapshot_installed(self, event, now_ms)


# Storage and driver.

_commit_state = RaftStorage._commit


async def _commit_without_vote(self: RaftStorage, state: PersistentState, *more: Any) -> None:
    if replace(state, hard_state=self._state.hard_state) == self._state and not any(more):
        self._state = state
        return
    await _commit_state(self, state, *more)


_read_state = RaftStorage._read_state


def _read_without_vote(self: RaftStorage) -> PersistentState:
    state = _read_state(self)
    return replace(state, hard_state=state.hard_state._replace(voted_for=None))


def _read_without_synced_end(self: RaftStorage) -> PersistentState:
    return replace(_read_state(self), synced_end=Offset(0))


async def _persisted_too_early(self: Persister) -> None:
    batch, self._waiting = self._waiting, []
    self._persisted(batch[-1].number)
    await self._storage.persist(batch)


_accepted = PendingRequests.accepted


def _answer_before_commit(self: PendingRequests, token: int, offset: Offset, epoch: Any) -> None:
    future = self._pending[token]
    _accepted(self, token, offset, epoch)
    if not future.done():
        future.set_result(offset)


_write_snapshot = RaftStorage.write_snapshot


async def _write_snapshot_without_members(
    self: RaftStorage, snapshot: Any, membership: Membership, data: bytes
) -> None:
    await _write_snapshot(self, snapshot, Membership(membership.voters[:1], membership.learners), data)


def _load_nothing(self: Applier, snapshot: Any) -> None:
    self.applied = snapshot.offset


# Observers.

_take_frame = RaftObserver._process


async def _move_back(self: RaftObserver, data: bytes) -> None:
    frame = decode_frame(data)
    if isinstance(frame, TailState) and frame.commit < self.offset:
        self.offset = frame.commit
    await _take_frame(self, data)


_take_entries = Tail._take


def _take_uncommitted(self: Tail, _commit: Offset) -> TailEntries:
    return _take_entries(self, self._driver.core.log.end)


def _on(owner: type, name: str, replacement: Any) -> tuple[Patch, ...]:
    return ((owner, name, replacement),)


DEFECTS: tuple[Defect, ...] = (
    Defect(
        "vote_not_synced", "core", "a vote leaves before it is durable",
        _on(RaftCore, "send_after_persist", _send_without_sync),
    ),
    Defect(
        "vote_forgotten", "core", "a restart forgets the vote",
        _on(RaftCore, "__init__", _forget_vote),
    ),
    Defect(
        "vote_again", "core", "a second candidate of an epoch gets a vote too",
        _on(Elections, "on_vote_request", _vote_again),
    ),
    Defect(
        "vote_not_stored", "driver", "an epoch and vote without entries are not written to the store",
        _on(RaftStorage, "_commit", _commit_without_vote),
    ),
    Defect(
        "vote_not_read", "driver", "the stored vote is not read at the start",
        _on(RaftStorage, "_read_state", _read_without_vote),
    ),
    Defect(
        "up_to_date_skipped", "core", "a vote does not ask whether the candidate's log is as new as the own",
        _on(Elections, "_is_up_to_date", _any_log_is_up_to_date),
    ),
    Defect(
        "pre_vote_is_contact", "core", "a pre-vote request refreshes leader contact (R3)",
        _on(Elections, "on_pre_vote_request", _pre_vote_is_contact), late="nobody leads",
    ),
    Defect(
        "directory_ignored", "core", "a voter with another disk is taken for the one that it was (R10)",
        (
            (Membership, "has_voter", _has_voter_by_node),
            (Elections, "on_vote_request", _vote_for_any_directory),
            (Elections, "on_pre_vote_request", _pre_vote_for_any_directory),
        ),
    ),
    Defect(
        "recovering_votes", "core", "a voter that lost synced data votes",
        _on(Elections, "on_vote_request", _vote_while_recovering),
    ),
    Defect(
        "recovering_counts", "core", "a voter that lost synced data counts",
        _on(RaftCore, "_append_ack", _count_while_recovering),
    ),
    Defect(
        "loss_forgotten", "core", "a loss of synced data is not remembered",
        _on(RaftCore, "__init__", _forget_loss),
    ),
    Defect(
        "loss_not_noticed", "driver", "the log is not compared with the synced end",
        _on(RaftStorage, "_read_state", _read_without_synced_end),
    ),
    Defect(
        "stale_leader_accepted", "core", "the epoch of an append is not checked",
        (*_on(RaftCore, "_on_append_request", _accept_stale_leader), *_on(RaftCore, "_truncate", _truncate_committed)),
    ),
    Defect(
        "ack_before_sync", "core", "a follower acknowledges what it has not synced",
        _on(RaftCore, "_append_ack", _ack_before_sync),
    ),
    Defect(
        "persisted_too_early", "driver", "the core learns of a persist before it is done",
        _on(Persister, "_persist", _persisted_too_early),
    ),
    Defect(
        "commit_older_epoch", "core", "entries of an older epoch commit by counting (figure 8)",
        _on(LeaderState, "_may_commit", _may_commit_any_epoch),
    ),
    Defect(
        "leader_counts_unsynced", "core", "a leader counts itself before its sync",
        _on(LeaderState, "_synced_by", _count_own_unsynced),
    ),
    Defect(
        "truncate_to_commit", "core", "a new epoch cuts the log to the commit offset",
        _on(RaftCore, "become_follower", _truncate_to_commit),
    ),
    Defect(
        "commit_unmatched", "core", "a follower commits what is in its log, equal to the leader's or not",
        _on(RaftCore, "_on_append_request", _commit_what_is_there),
    ),
    Defect(
        "apply_uncommitted", "core", "a follower applies entries that are not committed",
        _on(RaftCore, "_on_append_request", _commit_all_that_matches),
    ),
    Defect(
        "read_without_round", "core", "a read is answered without a round of heartbeats",
        _on(LeaderState, "_answer_reads", _answer_reads_at_once),
    ),
    Defect(
        "answer_before_commit", "driver", "a proposal is answered when it is in the leader's log",
        _on(PendingRequests, "accepted", _answer_before_commit),
    ),
    Defect(
        "change_before_commit", "core", "a membership changes before an entry of the epoch has committed (R7)",
        _on(LeaderState, "_change_rejection", _change_before_commit),
    ),
    Defect(
        "several_changes", "core", "a membership changes while the last change is not committed",
        _on(LeaderState, "_change_rejection", _several_changes),
    ),
    Defect(
        "membership_at_commit", "core", "a membership is in force only when it is committed",
        ((RaftCore, "advance_commit", _note_commit), (RaftLog, "membership", property(_committed_membership))),
    ),
    Defect(
        "snapshot_old_membership", "core", "a snapshot carries the membership of the log's start",
        _on(RaftLog, "membership_at", _oldest_membership),
    ),
    Defect(
        "snapshot_without_members", "driver", "a snapshot is stored without its configuration",
        _on(RaftStorage, "write_snapshot", _write_snapshot_without_members),
    ),
    Defect(
        "snapshot_over_conflict", "core", "a log that contradicts an installed snapshot is kept",
        _on(RaftCore, "_on_snapshot_installed", _keep_log_under_snapshot),
    ),
    Defect(
        "snapshot_not_loaded", "driver", "an installed snapshot is not loaded into the state machine",
        _on(Applier, "load", _load_nothing),
    ),
    Defect(
        "observer_moves_back", "driver", "an observer goes back to the end of a source that is behind it",
        _on(RaftObserver, "_process", _move_back),
    ),
    Defect(
        "tail_uncommitted", "driver", "a source sends its observers what is in its log, committed or not",
        _on(Tail, "_take", _take_uncommitted),
    ),
)  # fmt: skip
