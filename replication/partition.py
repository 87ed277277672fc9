"""One partition on one broker, as its leader and as a follower: high watermark and in-sync set. Pure.

Leading (`LeaderState`, one leader epoch of one incarnation; made anew for the next):

    state         committed ISR and min ISR     as the controller last said, at `partition_epoch`
                  proposals                     one in flight at most, and those whose outcome is not known
                  progress of each follower     durable end (None: has not said in this epoch), incarnation, lag
                  log end, durable end, high watermark, epoch start (the log end at election)

    appended, durable, acked                    progress; the high watermark follows
    check_lag, wanted_isr -> sent               a proposal goes out
      -> answered                               done, or refused; the answer tells the state in either case
      -> failed(may_be_done=False)              as if never sent
      -> failed(may_be_done=True)               outcome unknown
    metadata_changed                            the controller's word by the other way; the newer of the two counts

Rules (design, rules of safety 1 to 3):
- High watermark = minimum durable end over the *maximal* ISR: the committed members and whoever an unsettled proposal
  names. It never moves back, and does not move while fewer than min ISR are committed: members that leave then are
  eligible to lead without being in sync. Who has said nothing in this epoch holds it where it is.
- A proposal is settled by any state with a newer partition epoch: the controller takes a proposal only on top of the
  partition epoch that it names. A refusal settles only the proposal that it answers: one that was sent before and not
  answered may still arrive, and counts. When nothing else is wanted, a *barrier* (the committed set once more, with
  `is_barrier`) makes the controller raise the partition epoch, and with that ends the doubt.
- A follower joins when its durable end has reached max(high watermark, epoch start) and the incarnation that said so is
  the one that lives. It leaves when it lags, when that incarnation is gone, or when it says that it has less than the
  high watermark (a damaged log that was cut).
- Lag is the time since the durable end last reached the log end of that moment. One sample (log end, time) is kept
  until it is reached, so that a follower that is always a little behind is still seen to follow; what is measured is
  less than twice the true lag. Who has the whole log does not lag, however long nothing is said.
- The epoch is confirmed when the high watermark has reached the epoch start.

Following (`FollowerState`, one leader epoch; made anew for the next, the high watermark carried over):

    subscribed      a question is out (`divergence.asks`), under a new number
    pushed          the leader has found our log to be a prefix of its own, and goes on from its end
    durable         a sync has ended; that is acked
    truncated       the answer was another: the log was cut or reset, and the question is asked again

- High watermark = min(the leader's, own durable end); it moves back only when the log is cut or reset below it.

Asked of the shell: `appended` before anything is pushed; acks of the follower's newest subscription only, as its log is
then a prefix of ours (an ack may say less than the one before: it is believed); each proposal is sent once (a call that
the transport repeats by itself would be two); some time passes between a refusal and the next `wanted_isr`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tidelog.metadata.image import Partition
from tidelog.metadata.partitions import PartitionState
from tidelog.model.errors import ErrorCode, InvalidRequestError, NotEnoughReplicasError
from tidelog.model.ids import NO_OFFSET, Offset
from tidelog.replication.divergence import divergence

__all__ = ["FollowerState", "IsrProposal", "LeaderState", "Progress", "divergence"]

ACKS_ALL = -1
NO_SUBSCRIPTION = -1


@dataclass(frozen=True, slots=True)
class Progress:
    """What the leader knows of one follower."""

    durable_end: Offset | None
    """None until its first ack in this epoch."""
    broker_epoch: int
    """The incarnation that acked; -1 before the first."""
    caught_up_ms: int
    """When, as far as is known, it last had the whole log of that moment."""
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
    """The set is the committed one: the controller shall raise the partition epoch all the same."""

    @property
    def members(self) -> frozenset[int]:
        return frozenset(broker for broker, _ in self.isr)


class LeaderState:
    """See the module. Times are of one monotonic clock, in ms.

    Invariants (`validate`): high watermark <= durable end <= log end; epoch start <= log end; this broker is in the
    committed ISR, and the committed ISR in the maximal one; an end that was acked belongs to an incarnation.
    """

    __slots__ = (
        "_doubtful",
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
        self._doubtful: frozenset[int] = frozenset()
        """Named by proposals on this partition epoch whose outcome is not known."""
        self._maximal: tuple[int, ...] = ()
        """The followers among the maximal ISR."""
        self._lagging: frozenset[int] = frozenset()
        self._is_superseded = False
        self._install(frozenset(partition.isr), now_ms)
        self._advance()

    # What it knows.

    @property
    def isr(self) -> frozenset[int]:
        """The committed in-sync set."""
        return self._isr

    @property
    def maximal_isr(self) -> frozenset[int]:
        """Everybody from whom the controller may elect, as far as it can be known here."""
        return frozenset((self._me, *self._maximal))

    @property
    def min_isr(self) -> int:
        return self._min_isr

    @property
    def log_end(self) -> Offset:
        return self._log_end

    @property
    def is_confirmed(self) -> bool:
        """Whether everything from before this epoch is known to be committed: offsets may be told."""
        return self.high_watermark >= self.epoch_start

    @property
    def is_superseded(self) -> bool:
        """A newer leader epoch was heard of: nothing advances here any more, nothing is proposed."""
        return self._is_superseded

    @property
    def is_proposal_in_flight(self) -> bool:
        return self._inflight is not None

    @property
    def is_in_doubt(self) -> bool:
        """Whether a proposal may have been done, or may yet be, that nobody has answered."""
        return bool(self._doubtful)

    def progress(self, follower: int) -> Progress | None:
        """None for whoever holds no replica."""
        return self._progress.get(follower)

    def check_acks(self, acks: int) -> None:
        """Raises NotEnoughReplicasError for a write that could not be acknowledged as asked."""
        if acks == ACKS_ALL and len(self._isr) < self._min_isr:
            raise NotEnoughReplicasError(
                f"{len(self._isr)} replicas are in sync ({sorted(self._isr)}), min.insync.replicas is {self._min_isr}"
            )

    def set_lag_max(self, lag_max_ms: int) -> None:
        """`replica.lag.time.max.ms` is another now."""
        self._lag_max_ms = lag_max_ms

    # Progress.

    def appended(self, end: Offset, now_ms: int) -> None:
        """The log ends at `end` now."""
        before = self._log_end
        assert end >= before, f"a leader's log went back from {before} to {end}"
        if end == before:
            return
        self._log_end = end
        for follower, known in self._progress.items():
            if known.durable_end is not None and known.durable_end >= before:
                # It had everything until this moment.
                self._progress[follower] = Progress(known.durable_end, known.broker_epoch, now_ms, end, now_ms)

    def durable(self, end: Offset, now_ms: int) -> bool:
        """Below `end` this broker's own log is safe. True if the high watermark advanced."""
        assert end <= self._log_end, f"durable to {end} of {self._log_end}"
        if end <= self.durable_end:
            return False
        self.durable_end = end
        return self._advance()

    def acked(self, follower: int, broker_epoch: int, durable_end: Offset, now_ms: int) -> bool:
        """The follower's log is ours, and safe there, below `durable_end`. True if the high watermark advanced.

        What comes from a former incarnation, or from a broker without a replica, is ignored.
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
        """The high watermark by the rule; whether it moved."""
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
        """Look who lags now; a proposal without them may be wanted."""
        self._lagging = frozenset(member for member in self._isr if self._lags(member, now_ms))

    def _lags(self, member: int, now_ms: int) -> bool:
        if member == self._me:
            return False
        known = self._progress[member]
        if known.durable_end is not None and known.durable_end >= self._log_end:
            return False
        return now_ms - known.caught_up_ms > self._lag_max_ms

    def wanted_isr(self, live: Callable[[int], int | None], now_ms: int) -> IsrProposal | None:
        """What to propose to the controller now, if anything: `sent` it at once, or ask again later.

        `live(broker)` is the broker epoch of a broker that may be in sync (it lives, its directory too), else None.
        None while a proposal is in flight.
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
        if is_same and not self._doubtful - self._isr:
            return None
        return IsrProposal(self.leader_epoch, self.partition_epoch, tuple(isr), is_barrier=is_same)

    def _epoch_in_sync(self, follower: int, lives_as: int | None) -> int | None:
        """The broker epoch to propose a follower with; None if it does not belong into the set."""
        known = self._progress[follower]
        if lives_as is None:
            return None
        if follower in self._isr:
            if follower in self._lagging:
                return None
            if known.durable_end is None:
                return lives_as
            is_whole = known.durable_end >= self.high_watermark
            return lives_as if is_whole and known.broker_epoch == lives_as else None
        if known.durable_end is None or known.broker_epoch != lives_as:
            return None
        return lives_as if known.durable_end >= max(self.high_watermark, self.epoch_start) else None

    def sent(self, proposal: IsrProposal) -> None:
        """It is under way: from now on it may be done. To be called before it leaves, in the same step as
        `wanted_isr`."""
        assert self._inflight is None, "one proposal at a time"
        assert proposal.leader_epoch == self.leader_epoch, "a proposal of another epoch"
        assert proposal.partition_epoch == self.partition_epoch, "a proposal on top of another state"
        self._inflight = proposal
        self._count()

    def answered(self, state: PartitionState, now_ms: int) -> bool:
        """The controller's answer to what is in flight, done or refused. True if the high watermark advanced."""
        proposal, self._inflight = self._inflight, None
        if state.leader_epoch > self.leader_epoch or state.error in _SUPERSEDED:
            self._is_superseded = True
        elif state.leader_epoch == self.leader_epoch and state.partition_epoch > self.partition_epoch:
            self.partition_epoch = state.partition_epoch
            self._min_isr = state.min_isr
            self._eligible = ()  # not told here; what min ISR says about it holds
            self._install(frozenset(state.isr), now_ms)
        elif state.error is None or state.error is ErrorCode.NOT_CONTROLLER:
            # A controller that is behind us cannot know. And a proposal that was taken, a barrier too, raises the
            # partition epoch: an answer that says so and shows none is not believed.
            self._doubt(proposal)
        self._count()
        return self._advance()

    def failed(self, *, may_be_done: bool) -> bool:
        """No answer to what is in flight. `may_be_done=False` only where it certainly was not carried out, and will not
        be. True if the high watermark advanced."""
        proposal, self._inflight = self._inflight, None
        if may_be_done:
            self._doubt(proposal)
        self._count()
        return self._advance()

    def _doubt(self, proposal: IsrProposal | None) -> None:
        """Its outcome is open, unless a newer partition epoch has settled it meanwhile."""
        if proposal is not None and proposal.partition_epoch == self.partition_epoch:
            self._doubtful |= proposal.members

    def metadata_changed(self, partition: Partition, min_isr: int, now_ms: int) -> bool:
        """The partition, and min ISR, of one image. True if the high watermark advanced.

        An image of an older partition epoch than we know by an answer is ignored. One of the same may bring other
        settings. A newer leader epoch is the end of this state.
        """
        if partition.leader_epoch > self.leader_epoch:
            self._is_superseded = True
            return False
        if partition.leader_epoch < self.leader_epoch or partition.partition_epoch < self.partition_epoch:
            return False
        isr = frozenset(partition.isr)
        is_news = partition.partition_epoch > self.partition_epoch
        assert is_news or isr == self._isr, f"two in-sync sets in partition epoch {self.partition_epoch}"
        self.partition_epoch = partition.partition_epoch
        self._min_isr = min_isr
        self._eligible = partition.eligible
        self._replicas = partition.replicas
        if is_news:
            # What is in flight names an older partition epoch: it was done before this, or will be refused.
            self._install(isr, now_ms)
        else:
            self._track(now_ms)
            self._count()
        return self._advance()

    def _install(self, isr: frozenset[int], now_ms: int) -> None:
        """The committed set of a newer partition epoch: every proposal on top of an older one is settled."""
        joined = isr - self._isr
        self._isr = isr
        self._lagging &= isr
        self._doubtful = frozenset()
        self._track(now_ms)
        for member in joined:
            known = self._progress.get(member)
            if known is not None:
                # It has `lag_max_ms` from here to reach the log end, or it would leave again at once.
                self._progress[member] = Progress(known.durable_end, known.broker_epoch, now_ms, self._log_end, now_ms)
        self._count()

    def _track(self, now_ms: int) -> None:
        """Progress of exactly the followers that there are."""
        followers = {*self._replicas, *self._isr} - {self._me}
        self._progress = {
            follower: self._progress.get(follower) or Progress(None, -1, now_ms, self._log_end, now_ms)
            for follower in sorted(followers)
        }

    def _count(self) -> None:
        """Who is in the maximal ISR. A proposal in flight on top of an older state can no longer be done."""
        maximal = self._isr | self._doubtful
        if self._inflight is not None and self._inflight.partition_epoch == self.partition_epoch:
            maximal |= self._inflight.members
        # Whoever holds no replica any more is refused by the controller, whatever was proposed.
        self._maximal = tuple(sorted(maximal & self._progress.keys()))

    def validate(self) -> None:
        assert self.high_watermark <= self.durable_end <= self._log_end, "high watermark, durable end, log end"
        assert self.epoch_start <= self._log_end, "a leader's log only grows"
        assert self._me in self._isr or self._is_superseded, "the leader is in sync"
        assert self._isr <= self.maximal_isr, "the committed set counts"
        assert self._lagging <= self._isr, "only members lag"
        for follower, known in self._progress.items():
            assert follower != self._me, "this broker's own end is not progress"
            assert known.durable_end is None or known.durable_end <= self._log_end, "a follower has what we have"
            assert (known.durable_end is None) == (known.broker_epoch == -1), "an ack has an incarnation"
            assert known.sample_end <= self._log_end, "a sample is of the past"


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
        """As this leader told, perhaps ahead of our log. What former leaders told beyond our own high watermark is not
        carried over: our records up there may be others than those that were committed."""
        self.subscription = NO_SUBSCRIPTION

    def subscribed(self, number: int) -> None:
        """A question is out under this number; what carries a former one is void."""
        assert number > self.subscription, f"subscription {number} after {self.subscription}"
        self.subscription = number

    def is_current(self, *, leader_epoch: int, subscription: int) -> bool:
        """Whether a message is of this leader epoch and subscription. What is not is late, and must change nothing."""
        return leader_epoch == self.leader_epoch and subscription == self.subscription != NO_SUBSCRIPTION

    def pushed(self, high_watermark: Offset, end: Offset) -> bool:
        """The leader pushed, under the present subscription: our log is a prefix of its own, and ends at `end` now.

        True if the high watermark advanced.
        """
        assert self.subscription != NO_SUBSCRIPTION, "a push without a subscription"
        assert end >= self.known_end, f"a push took the log from {self.known_end} to {end}"
        self.known_end = end
        self.leader_high_watermark = max(self.leader_high_watermark, high_watermark)
        return self._advance()

    def durable(self, end: Offset) -> bool:
        """Below `end` our log is safe. True if the high watermark advanced."""
        assert end <= self.known_end, f"durable to {end} of {self.known_end}"
        self.durable_end = max(self.durable_end, end)
        return self._advance()

    def truncated(self, end: Offset, durable_end: Offset, *, log_start: Offset = NO_OFFSET) -> bool:
        """The log was cut to `end`, or reset to it (then it is longer than before, or `log_start` says so).

        Below the start of a log all is committed: it is the leader's start, or was below the high watermark. True if
        records that this replica knew as committed went: an unclean election, or damage.
        """
        assert 0 <= durable_end <= end, f"durable to {durable_end} of {end}"
        committed = max(log_start, end if end > self.known_end else NO_OFFSET, self.high_watermark)
        is_loss = self.high_watermark > durable_end
        self.known_end, self.durable_end = end, durable_end
        self.high_watermark = min(committed, durable_end)
        if is_loss:
            # The records that come instead are others: they are committed when this leader says so again.
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
