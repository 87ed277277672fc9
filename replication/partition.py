"""High watermark and in-sync set of one partition on one broker, as leader and as follower. Pure.

Leader (`LeaderState`, one leader epoch of one incarnation; the next epoch has a new one):

    state         committed ISR and min ISR     as the controller last reported, at `partition_epoch`
                  proposals                     one in flight at most, and unresolved ones (outcome unknown)
                  progress of each follower     durable end (None: no ack in this epoch), incarnation, lag
                  log end, durable end, high watermark, epoch start (the log end at election)

    appended, durable, acked                    progress; may advance the high watermark
    check_lag, next_proposal -> sent            a proposal is in flight
      -> answered                               accepted or rejected; either answer has the partition state
      -> failed(may_be_done=False)              as if never sent
      -> failed(may_be_done=True)               unresolved
    metadata_changed                            the partition of an image; the newer partition epoch counts

Rules:
- High watermark = minimum durable end over the *maximal* ISR: the committed members and the members of every proposal
  that is in flight or unresolved. It never moves back. It does not move while fewer than min ISR are committed: members
  that leave then stay eligible to lead without being in sync. A member without an ack in this epoch holds it back.
- Any state with a newer partition epoch resolves a proposal: the controller accepts a proposal only on top of the
  partition epoch that it names. A rejection resolves only the proposal that it answers: an earlier one without an
  answer may still arrive, and counts. When no other change is due, a *barrier* (the committed set again, with
  `is_barrier`) makes the controller raise the partition epoch, which resolves every proposal.
- A follower joins when its durable end has reached max(high watermark, epoch start) and its acking incarnation is the
  registered one. It leaves when it lags, when that incarnation is gone, or when it acks less than the high watermark
  (a damaged log that was truncated).
- Lag is the time since the durable end last reached the log end of that moment. One sample (log end, time) is kept
  until it is reached, so a follower that is always slightly behind counts as following; the measured lag is less than
  twice the true lag. A follower with the whole log does not lag, however long it is silent.
- The epoch is confirmed when the high watermark has reached the epoch start.

Follower (`FollowerState`, one leader epoch; the next has a new one, with the high watermark carried over):

    subscribed      a query (`divergence.epoch_query`) is sent under a new number
    pushed          the leader has accepted this log as a prefix of its own, and continues at its end
    durable         a sync has ended, and is acked
    truncated       the leader has rejected it: the log was truncated or reset, and the query is sent again

- High watermark = min(the leader's, own durable end); it moves back only when the log is truncated or reset below it.

Duties of the caller: `appended` before anything is pushed; acks of the follower's newest subscription only, whose log
is a prefix of the leader's (an ack may be lower than the one before, and counts); each proposal is sent once (a
transport that repeats a call would send two); some time passes between a rejection and the next `next_proposal`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tidelog.metadata.image import Partition
from tidelog.metadata.partitions import PartitionState
from tidelog.model.errors import ErrorCode, InvalidRequestError, NotEnoughReplicasError
from tidelog.model.ids import NO_OFFSET, Offset

ACKS_ALL = -1
NO_SUBSCRIPTION = -1


@dataclass(frozen=True, slots=True)
class Progress:
    """The leader's knowledge of one follower."""

    durable_end: Offset | None
    """None until its first ack in this epoch."""
    broker_epoch: int
    """The incarnation that acked; -1 before the first."""
    caught_up_ms: int
    """When the follower is known to have last had the whole log of that moment."""
    sample_end: Offset
    sample_ms: int
    """The log ended at `sample_end` at `sample_ms`: reaching it proves that much."""


@dataclass(frozen=True, slots=True)
class IsrProposal:
    """`isr` has (broker, its broker epoch) of each member, the leader's too."""

    leader_epoch: int
    partition_epoch: int
    isr: tuple[tuple[int, int], ...]
    is_barrier: bool = False
    """Proposes the committed set, only to make the controller raise the partition epoch."""

    @property
    def members(self) -> frozenset[int]:
        return frozenset(broker for broker, _ in self.isr)


class LeaderState:
    """See the module. Times are milliseconds of one monotonic clock.

    Invariants (`validate`): high watermark <= durable end <= log end; epoch start <= log end; this broker is in the
    committed ISR; the maximal ISR is the committed one and the members of every proposal that may be accepted; the high
    watermark is not below what all of them have; an acked end belongs to an incarnation.
    """

    __slots__ = (
        "_eligible",
        "_inflight",
        "_is_superseded",
        "_isr",
        "_lag_max_ms",
        "_lagging",
        "_log_end",
        "_maximal",
        "_me",
        "_min_isr",
        "_my_broker_epoch",
        "_progress",
        "_replicas",
        "_unresolved",
        "durable_end",
        "epoch_start",
        "high_watermark",
        "leader_epoch",
        "partition_epoch",
    )

    def __init__(
        self,
        *,
        me: int,
        my_broker_epoch: int,
        partition: Partition,
        min_isr: int,
        log_end: Offset,
        durable_end: Offset,
        high_watermark: Offset,
        now_ms: int,
        lag_max_ms: int,
    ) -> None:
        """`high_watermark` is what this replica knew before; it may be above only in a log that lost its end."""
        assert partition.leader == me, f"{me} does not lead: {partition}"
        assert 0 <= durable_end <= log_end, f"durable to {durable_end} of {log_end}"
        self._me = me
        self._my_broker_epoch = my_broker_epoch
        self._lag_max_ms = lag_max_ms
        self.leader_epoch = partition.leader_epoch
        self.partition_epoch = partition.partition_epoch
        self._log_end = log_end
        self.durable_end = durable_end
        self.epoch_start = log_end
        self.high_watermark = min(high_watermark, durable_end)
        self._min_isr = min_isr
        self._isr: frozenset[int] = frozenset()
        self._eligible = partition.eligible
        self._replicas = partition.replicas
        self._progress: dict[int, Progress] = {}
        self._inflight: IsrProposal | None = None
        self._unresolved: frozenset[int] = frozenset()
        """Members of unresolved proposals on this partition epoch."""
        self._maximal: tuple[int, ...] = ()
        """The followers in the maximal ISR."""
        self._lagging: frozenset[int] = frozenset()
        self._is_superseded = False
        self._install(frozenset(partition.isr), now_ms)
        self._advance()

    # Queries.

    @property
    def isr(self) -> frozenset[int]:
        """The committed in-sync set."""
        return self._isr

    @property
    def maximal_isr(self) -> frozenset[int]:
        """All brokers that the controller may elect, as far as this broker can know."""
        return frozenset((self._me, *self._maximal))

    @property
    def min_isr(self) -> int:
        return self._min_isr

    @property
    def log_end(self) -> Offset:
        return self._log_end

    @property
    def is_confirmed(self) -> bool:
        """Whether all records from before this epoch are known to be committed: offsets may be returned to clients."""
        return self.high_watermark >= self.epoch_start

    @property
    def is_superseded(self) -> bool:
        """Whether a newer leader epoch is known: nothing advances and nothing is proposed any more."""
        return self._is_superseded

    @property
    def has_unresolved_proposal(self) -> bool:
        """Whether an unanswered proposal may have been accepted, or may still be."""
        return bool(self._unresolved)

    def progress(self, follower: int) -> Progress | None:
        """Return the progress of a follower; None for a broker without a replica."""
        return self._progress.get(follower)

    def check_acks(self, acks: int) -> None:
        """Raise NotEnoughReplicasError if a write with these acks could not be acknowledged."""
        if acks == ACKS_ALL and len(self._isr) < self._min_isr:
            raise NotEnoughReplicasError(
                f"{len(self._isr)} replicas are in sync ({sorted(self._isr)}), min.insync.replicas is {self._min_isr}"
            )

    def set_lag_max(self, lag_max_ms: int) -> None:
        """Take a new `replica.lag.time.max.ms`."""
        self._lag_max_ms = lag_max_ms

    # Progress.

    def appended(self, end: Offset, now_ms: int) -> None:
        """Note the new log end."""
        before = self._log_end
        assert end >= before, f"the leader's log shrank from {before} to {end}"
        if end == before:
            return
        self._log_end = end
        for follower, known in self._progress.items():
            if known.durable_end is not None and known.durable_end >= before:
                # The follower had the whole log until this moment.
                self._progress[follower] = Progress(known.durable_end, known.broker_epoch, now_ms, end, now_ms)

    def durable(self, end: Offset, now_ms: int) -> bool:
        """Note this broker's own durable end. Return whether the high watermark advanced."""
        assert end <= self._log_end, f"durable to {end} of {self._log_end}"
        if end <= self.durable_end:
            return False
        self.durable_end = end
        return self._advance()

    def acked(self, follower: int, broker_epoch: int, durable_end: Offset, now_ms: int) -> bool:
        """Note a follower's durable end. Return whether the high watermark advanced.

        Ignores acks of a former incarnation, or of a broker without a replica.
        """
        known = self._progress.get(follower)
        if known is None or broker_epoch < known.broker_epoch:
            return False
        if not 0 <= durable_end <= self._log_end:
            raise InvalidRequestError(f"broker {follower} acks {durable_end} of a log that ends at {self._log_end}")
        caught_up_ms, sample_end, sample_ms = known.caught_up_ms, known.sample_end, known.sample_ms
        if durable_end >= self._log_end:
            caught_up_ms, sample_end, sample_ms = now_ms, self._log_end, now_ms
        elif durable_end >= sample_end:
            caught_up_ms, sample_end, sample_ms = max(caught_up_ms, sample_ms), self._log_end, now_ms
        self._progress[follower] = Progress(durable_end, broker_epoch, caught_up_ms, sample_end, sample_ms)
        return self._advance()

    def _advance(self) -> bool:
        """Advance the high watermark by the rule; return whether it moved."""
        if self._is_superseded or len(self._isr) < self._min_isr or self._eligible:
            return False
        least = self.durable_end
        for follower in self._maximal:
            end = self._progress[follower].durable_end
            if end is None:
                return False
            if end < least:
                least = end
        if least <= self.high_watermark:
            return False
        self.high_watermark = least
        return True

    # The in-sync set.

    def check_lag(self, now_ms: int) -> None:
        """Update the set of lagging members; the next proposal leaves them out."""
        self._lagging = frozenset(member for member in self._isr if self._lags(member, now_ms))

    def _lags(self, member: int, now_ms: int) -> bool:
        if member == self._me:
            return False
        known = self._progress[member]
        if known.durable_end is not None and known.durable_end >= self._log_end:
            return False
        return now_ms - known.caught_up_ms > self._lag_max_ms

    def next_proposal(self, live: Callable[[int], int | None], now_ms: int) -> IsrProposal | None:
        """Return the proposal that is due, or None: call `sent` with it at once, or discard it and call again later.

        `live(broker)` is the broker epoch of a broker that may be in sync (broker and directory work), else None.
        Returns None while a proposal is in flight.
        """
        if self._inflight is not None or self._is_superseded:
            return None
        self.check_lag(now_ms)
        isr = [(self._me, self._my_broker_epoch)]
        for follower in self._replicas:
            if follower != self._me:
                epoch = self._epoch_in_sync(follower, live(follower))
                if epoch is not None:
                    isr.append((follower, epoch))
        is_same = frozenset(broker for broker, _ in isr) == self._isr
        if is_same and not self._unresolved - self._isr:
            return None
        return IsrProposal(self.leader_epoch, self.partition_epoch, tuple(isr), is_barrier=is_same)

    def _epoch_in_sync(self, follower: int, live_epoch: int | None) -> int | None:
        """Return the broker epoch to propose a follower with; None if it is not in sync."""
        known = self._progress[follower]
        if live_epoch is None:
            return None
        if follower in self._isr:
            if follower in self._lagging:
                return None
            if known.durable_end is None:
                return live_epoch
            is_whole = known.durable_end >= self.high_watermark
            return live_epoch if is_whole and known.broker_epoch == live_epoch else None
        if known.durable_end is None or known.broker_epoch != live_epoch:
            return None
        return live_epoch if known.durable_end >= max(self.high_watermark, self.epoch_start) else None

    def sent(self, proposal: IsrProposal) -> None:
        """Note that the proposal is in flight: it may be accepted from now on. Called before it is sent, in the same
        step as `next_proposal`."""
        assert self._inflight is None, "one proposal at a time"
        assert proposal.leader_epoch == self.leader_epoch, "the proposal has this leader epoch"
        assert proposal.partition_epoch == self.partition_epoch, "the proposal has this partition epoch"
        self._inflight = proposal
        self._count()

    def answered(self, state: PartitionState, now_ms: int) -> bool:
        """Take the controller's answer to the proposal in flight. Return whether the high watermark advanced."""
        proposal, self._inflight = self._inflight, None
        if state.leader_epoch > self.leader_epoch or state.error in _SUPERSEDED:
            self._is_superseded = True
        elif state.leader_epoch == self.leader_epoch and state.partition_epoch > self.partition_epoch:
            self.partition_epoch = state.partition_epoch
            self._min_isr = state.min_isr
            self._eligible = ()  # the answer has none; the min ISR rule covers it
            self._install(frozenset(state.isr), now_ms)
        elif state.error is None or state.error is ErrorCode.NOT_CONTROLLER:
            # A controller with older state cannot know. An accepted proposal, a barrier too, raises the partition
            # epoch: an acceptance without a newer one is not trusted.
            self._keep_unresolved(proposal)
        self._count()
        return self._advance()

    def failed(self, *, may_be_done: bool) -> bool:
        """Note that the proposal in flight got no answer. `may_be_done=False` only if it certainly was not accepted and
        never will be. Return whether the high watermark advanced."""
        proposal, self._inflight = self._inflight, None
        if may_be_done:
            self._keep_unresolved(proposal)
        self._count()
        return self._advance()

    def _keep_unresolved(self, proposal: IsrProposal | None) -> None:
        """Keep the proposal as unresolved, unless a newer partition epoch has resolved it."""
        if proposal is not None and proposal.partition_epoch == self.partition_epoch:
            self._unresolved |= proposal.members

    def metadata_changed(self, partition: Partition, min_isr: int, now_ms: int) -> bool:
        """Take the partition and min ISR of one image. Return whether the high watermark advanced.

        Ignores an image of an older partition epoch than a known answer. The same partition epoch may bring other
        settings. A newer leader epoch ends this state.
        """
        if partition.leader_epoch > self.leader_epoch:
            self._is_superseded = True
            return False
        if partition.leader_epoch < self.leader_epoch or partition.partition_epoch < self.partition_epoch:
            return False
        isr = frozenset(partition.isr)
        is_newer = partition.partition_epoch > self.partition_epoch
        assert is_newer or isr == self._isr, f"two in-sync sets in partition epoch {self.partition_epoch}"
        self.partition_epoch = partition.partition_epoch
        self._min_isr = min_isr
        self._eligible = partition.eligible
        self._replicas = partition.replicas
        if is_newer:
            # The proposal in flight names an older partition epoch: it is done already, or will be rejected.
            self._install(isr, now_ms)
        else:
            self._track(now_ms)
            self._count()
        return self._advance()

    def _install(self, isr: frozenset[int], now_ms: int) -> None:
        """Take the committed set of a newer partition epoch, which resolves every proposal on top of an older one."""
        joined = isr - self._isr
        self._isr = isr
        self._lagging &= isr
        self._unresolved = frozenset()
        self._track(now_ms)
        for member in joined:
            known = self._progress.get(member)
            if known is not None:
                # A new member has `lag_max_ms` to reach the log end; otherwise it would leave again at once.
                self._progress[member] = Progress(known.durable_end, known.broker_epoch, now_ms, self._log_end, now_ms)
        self._count()

    def _track(self, now_ms: int) -> None:
        """Keep progress of exactly the current followers."""
        followers = {*self._replicas, *self._isr} - {self._me}
        self._progress = {
            follower: self._progress.get(follower) or Progress(None, -1, now_ms, self._log_end, now_ms)
            for follower in sorted(followers)
        }

    def _count(self) -> None:
        """Recompute the maximal ISR. A proposal on top of an older partition epoch can no longer be accepted."""
        maximal = self._isr | self._unresolved
        if self._inflight is not None and self._inflight.partition_epoch == self.partition_epoch:
            maximal |= self._inflight.members
        # The controller rejects a member without a replica.
        self._maximal = tuple(sorted(maximal & self._progress.keys()))

    def validate(self) -> None:
        assert self.high_watermark <= self.durable_end <= self._log_end, "high watermark, durable end, log end"
        assert self.epoch_start <= self._log_end, "a leader's log only grows"
        assert self._me in self._isr or self._is_superseded, "the leader is in sync"
        assert self._progress.keys() == {*self._replicas, *self._isr} - {self._me}, "progress of the followers"
        counting = self._isr | self._unresolved
        proposal = self._inflight
        if proposal is not None:
            assert proposal.leader_epoch == self.leader_epoch, "a proposal of another leader epoch"
            assert proposal.partition_epoch <= self.partition_epoch, "a proposal of the future"
            if proposal.partition_epoch == self.partition_epoch:
                counting |= proposal.members
        assert self._maximal == tuple(sorted(counting & self._progress.keys())), (
            f"{self._maximal} count besides {self._me}; {sorted(counting)} are or may be in sync"
        )
        self._validate_high_watermark()
        assert self._lagging <= self._isr, "only members lag"
        for follower, known in self._progress.items():
            assert follower != self._me, "this broker's own end is not progress"
            assert known.durable_end is None or known.durable_end <= self._log_end, "a follower has what we have"
            assert (known.durable_end is None) == (known.broker_epoch == -1), "an ack has an incarnation"
            assert known.sample_end <= self._log_end, "a sample is of the past"

    def _validate_high_watermark(self) -> None:
        if self._is_superseded or self._eligible or len(self._isr) < self._min_isr:
            return
        ends = [self._progress[follower].durable_end for follower in self._maximal]
        known = [end for end in ends if end is not None]
        if len(known) == len(ends):
            due = min((*known, self.durable_end))
            assert due <= self.high_watermark, f"everything below {due} is replicated, not only {self.high_watermark}"


_SUPERSEDED = (ErrorCode.FENCED_LEADER_EPOCH, ErrorCode.NEW_LEADER_ELECTED)


class FollowerState:
    """See the module.

    Invariants (`validate`): high watermark <= durable end <= log end; high watermark <= the leader's.
    """

    __slots__ = (
        "durable_end",
        "high_watermark",
        "known_end",
        "leader",
        "leader_epoch",
        "leader_high_watermark",
        "subscription",
    )

    def __init__(
        self, *, leader: int, leader_epoch: int, log_end: Offset, durable_end: Offset, high_watermark: Offset
    ) -> None:
        """`high_watermark` is what this replica knew before; it may be above only in a log that lost its end."""
        assert 0 <= durable_end <= log_end, f"durable to {durable_end} of {log_end}"
        self.leader = leader
        self.leader_epoch = leader_epoch
        self.known_end = log_end
        """The log end: the next offset that the leader is to push."""
        self.durable_end = durable_end
        self.high_watermark = min(high_watermark, durable_end)
        self.leader_high_watermark = self.high_watermark
        """The high watermark that this leader sent, possibly past the log end. Values of former leaders past the own
        high watermark are not carried over: the records there may differ from the committed ones."""
        self.subscription = NO_SUBSCRIPTION

    def subscribed(self, number: int) -> None:
        """Note a subscription; messages under a former number are void."""
        assert number > self.subscription, f"subscription {number} after {self.subscription}"
        self.subscription = number

    def is_current(self, *, leader_epoch: int, subscription: int) -> bool:
        """Return whether a message belongs to this leader epoch and subscription. Late messages change nothing."""
        return leader_epoch == self.leader_epoch and subscription == self.subscription != NO_SUBSCRIPTION

    def pushed(self, high_watermark: Offset, end: Offset) -> bool:
        """Note a push of the current subscription: this log is a prefix of the leader's and ends at `end` now.

        Return whether the high watermark advanced.
        """
        assert self.subscription != NO_SUBSCRIPTION, "a push has a subscription"
        assert end >= self.known_end, f"a push took the log from {self.known_end} to {end}"
        self.known_end = end
        self.leader_high_watermark = max(self.leader_high_watermark, high_watermark)
        return self._advance()

    def durable(self, end: Offset) -> bool:
        """Note the durable end. Return whether the high watermark advanced."""
        assert end <= self.known_end, f"durable to {end} of {self.known_end}"
        self.durable_end = max(self.durable_end, end)
        return self._advance()

    def truncated(self, end: Offset, durable_end: Offset, *, log_start: Offset = NO_OFFSET) -> bool:
        """Note that the log was truncated or reset to `end` (after a reset it is longer, or `log_start` shows it).

        Everything below a log start is committed: it is the leader's start, or was below the high watermark. Return
        whether records were lost that this replica knew as committed: by an unclean election, or damage.
        """
        assert 0 <= durable_end <= end, f"durable to {durable_end} of {end}"
        committed = max(log_start, end if end > self.known_end else NO_OFFSET, self.high_watermark)
        is_loss = self.high_watermark > durable_end
        self.known_end, self.durable_end = end, durable_end
        self.high_watermark = min(committed, durable_end)
        if is_loss:
            # Other records replace them: they are committed once this leader sends a high watermark past them.
            self.leader_high_watermark = self.high_watermark
        self.leader_high_watermark = max(self.leader_high_watermark, self.high_watermark)
        return is_loss

    def _advance(self) -> bool:
        after = min(self.leader_high_watermark, self.durable_end)
        if after <= self.high_watermark:
            return False
        self.high_watermark = after
        return True

    def validate(self) -> None:
        assert self.high_watermark <= self.durable_end <= self.known_end, "high watermark, durable end, log end"
        assert self.high_watermark <= self.leader_high_watermark, "the leader knows first"
