"""A simple model of one transactional id: what each request has to do, in the words of decision 32.

It keeps no epochs of markers, no statuses and no records: an owner, the one before, and at most one transaction.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tidelog.coordinator.transactions.records import EPOCH_MAX, ProducerIdentity

COMMIT, ABORT, LOST = "commit", "abort", "lost"
"""How a transaction ended; LOST: a timeout or an operator has aborted it."""
FENCED, MAPPING, STATE = "PRODUCER_FENCED", "INVALID_PRODUCER_ID_MAPPING", "INVALID_TXN_STATE"
CONCURRENT, ABORTABLE = "CONCURRENT_TRANSACTIONS", "TRANSACTION_ABORTABLE"


@dataclass
class OpenTransaction:
    number: int
    version: int
    owner: ProducerIdentity
    """Of its batches."""
    partitions: dict[int, set[int]] = field(default_factory=dict)
    """By producer id, of the owner and of all members."""
    is_prepared: bool = False
    ended: str = ""
    named: set[int] = field(default_factory=set)

    def commits(self) -> dict[int, bool]:
        """Whether the records of each producer commit, of those that have some."""
        is_commit = self.ended == COMMIT
        return {
            producer_id: is_commit and (producer_id == self.owner[0] or producer_id in self.named)
            for producer_id, partitions in self.partitions.items()
            if partitions
        }


@dataclass
class TransactionalId:
    owner: ProducerIdentity
    previous: ProducerIdentity | None = None
    how: str = ""
    """How the transaction of `previous` ended, if its end made the present owner."""
    earlier: frozenset[ProducerIdentity] = frozenset()
    """Those before `previous` that the owner may still have: it missed several ends in a row."""
    open: OpenTransaction | None = None
    """The transaction that is open, or whose markers are being written."""
    last_v1: str = ""
    """How the last transaction ended, if that was of version 1 and kept the epoch."""
    token: bytes = b""
    count: int = 0

    @property
    def is_ending(self) -> bool:
        return self.open is not None and bool(self.open.ended)

    @property
    def is_open(self) -> bool:
        return self.open is not None and not self.open.ended

    def members(self) -> set[int]:
        return set() if self.open is None else set(self.open.partitions) - {self.open.owner[0]}

    # Who it is.

    def identity_error(self, who: ProducerIdentity) -> str:
        """The error for an identity that is neither the owner nor the one before; empty for these."""
        if who in (self.owner, self.previous, *self.earlier):
            return ""
        known = {self.owner[0], self.previous[0] if self.previous else -1, self.open.owner[0] if self.open else -1}
        known |= {producer_id for producer_id, _ in self.earlier}
        return FENCED if who[0] in known else MAPPING

    def late(self, version: int) -> str:
        """The error for a request of the previous identity that would add to a transaction."""
        return ABORTABLE if self.how == LOST and version == 2 else FENCED

    # Requests: each returns the error that is expected, or changes the model and returns "".

    def add(self, who: ProducerIdentity, partitions: set[int], *, version: int, verifies: bool) -> str:
        is_member = who[0] in self.members()
        if is_member and (who[1] != 0 or self.is_ending):
            return FENCED
        if not is_member:
            error = (
                self.identity_error(who)
                or (who != self.owner and self.late(version))
                or (self.is_ending and CONCURRENT)
            )
            if error:
                return str(error)
        held = self.open.partitions.get(who[0], set()) if self.open else set()
        if verifies and not partitions <= held:
            return ABORTABLE
        if self.open is None:
            self.begin(version)
        assert self.open is not None
        if self.open.version != version or self.open.is_prepared:
            return STATE
        self.open.partitions.setdefault(who[0], set()).update(partitions)
        return ""

    def begin(self, version: int) -> None:
        self.count += 1
        self.open = OpenTransaction(self.count, version, self.owner)
        self.last_v1 = ""

    def join(self, member: int) -> str:
        if self.is_ending:
            return CONCURRENT
        if self.open is not None and (self.open.version == 1 or self.open.is_prepared):
            return STATE
        if self.open is None:
            self.begin(2)
        assert self.open is not None
        self.open.partitions[member] = set()
        return ""

    def prepare(self, who: ProducerIdentity) -> str:
        error = self.identity_error(who) or (who != self.owner and self.late(2)) or (self.is_ending and CONCURRENT)
        if error:
            return str(error)
        if self.open is None or self.open.version == 1:
            return STATE
        self.open.is_prepared = True
        return ""

    def end(
        self, who: ProducerIdentity, *, is_commit: bool, version: int, named: set[int], token: bytes, new_id: int
    ) -> str:
        if (token or named) and not (is_commit and version == 2):
            return "INVALID_REQUEST"
        error = self.identity_error(who)
        if error:
            return error
        if token and token == self.token:
            return ""
        if who != self.owner:
            return self._end_repeated(is_commit=is_commit, version=version, token=token)
        if version == 1 and self.last_v1:
            return "" if self.last_v1 == (COMMIT if is_commit else ABORT) else STATE
        if self.is_ending:
            return CONCURRENT
        if self.open is not None and self.open.version != version:
            return STATE
        if named - self.members():
            return ABORTABLE
        if self.open is None and (version == 1 or (is_commit and not token)):
            return STATE
        if self.open is None and not is_commit:
            self.replace_owner(self.owner, new_id, how=ABORT)
            return ""
        if self.open is None:
            self.begin(2)
        assert self.open is not None
        self.open.named = named
        self.token = token or self.token
        if version == 1:
            self.open.ended = self.last_v1 = COMMIT if is_commit else ABORT
            self.how = ABORT if self.how == LOST else self.how  # only the last transaction's end is known
        else:
            self.decide(COMMIT if is_commit else ABORT, new_id)
        return ""

    def _end_repeated(self, *, is_commit: bool, version: int, token: bytes) -> str:
        if version == 1:
            return FENCED
        if is_commit and self.how == COMMIT:
            return STATE if token else ""  # the stored token was looked at before
        if not is_commit and self.how in (ABORT, LOST):
            return ""
        return ABORTABLE if self.how == LOST else STATE

    def decide(self, how: str, new_id: int, *, is_replaced: bool = False) -> None:
        assert self.open is not None
        self.open.ended = COMMIT if how == COMMIT else ABORT
        is_seen = self.open.is_prepared or self.open.partitions.get(self.open.owner[0])
        earlier = self.earlier
        if self.previous is not None:
            earlier |= {self.previous}
        is_missed = how == self.how == LOST and self.previous is not None and not is_seen
        self.replace_owner(None if is_replaced else self.owner, new_id, how=how)
        if is_missed:
            self.earlier = earlier

    def replace_owner(self, previous: ProducerIdentity | None, new_id: int, *, how: str = "") -> None:
        producer_id, epoch = self.owner
        self.owner = (producer_id, epoch + 1) if epoch + 1 < EPOCH_MAX else (new_id, 0)
        self.previous, self.how, self.last_v1, self.earlier = previous, how, "", frozenset()

    def init(self, who: ProducerIdentity | None, *, keeps: bool, new_id: int) -> str:
        """ "" also if the request is to be repeated later."""
        error = "" if who is None else self.identity_error(who)
        if error or self.is_ending or (who is not None and who != self.owner):
            return error
        if self.open is not None and not (keeps and self.open.is_prepared):
            self.decide(ABORT, new_id, is_replaced=who is None)
        else:
            self.replace_owner(who, new_id)
        return ""

    def complete(self) -> None:
        assert self.open is not None
        self.open = None
