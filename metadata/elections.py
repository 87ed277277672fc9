"""Partition leader election and the effect of lost replicas on the ISR: pure functions of one partition. Pure.

Rules (eligible leader replicas are those of KIP-966):
- A clean leader is the first live in-sync replica in assignment order; otherwise the first live eligible leader
  replica. Eligible replicas left the ISR while it was smaller than `min.insync.replicas`: the high watermark does not
  advance then, so they hold everything that was acknowledged.
- Only with unclean election may another live replica lead, and then the ISR is that replica alone. It is the one with
  the best known log (`log_ends`), the first in assignment order among equals. The epoch of that election is recorded: a
  replica with records from before it keeps what it has to truncate (`log.kept_copies`).
- When the ISR is at least `min.insync.replicas` again, the set of eligible leaders becomes empty.
- A change of leader, or of the leader's incarnation, raises the leader epoch.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from operator import attrgetter
from uuid import UUID

from tidelog.metadata.image import Partition
from tidelog.metadata.log_ends import LogEnd
from tidelog.metadata.records import NO_LEADER, ChangePartition


@dataclass(frozen=True, slots=True)
class Elected:
    leader: int
    is_unclean: bool = False


def elect(
    partition: Partition,
    can_lead: Callable[[int], bool],
    *,
    unclean: bool,
    prefer: int | None = None,
    is_avoided: Callable[[int], bool] | None = None,
    log_end: Callable[[int], LogEnd] | None = None,
) -> Elected | None:
    """Returns the leader by these rules, or None.

    `prefer` leads if it may lead cleanly (it leads already, or a preferred election requests it). Replicas for which
    `is_avoided` is true (draining brokers) lead only if no other can lead cleanly. `log_end` returns the reported log
    end of a replica.
    """
    clean = [b for b in partition.replicas if b in partition.isr and can_lead(b)]
    if not clean:
        clean = [b for b in partition.replicas if b in partition.eligible and can_lead(b)]
    if clean:
        if prefer is not None and prefer in clean:
            return Elected(prefer)
        preferable = [b for b in clean if not is_avoided(b)] if is_avoided is not None else clean
        return Elected((preferable or clean)[0])
    if unclean:
        alive = [b for b in partition.replicas if can_lead(b)]
        if alive:
            best = alive[0] if log_end is None else max(alive, key=log_end)  # the first of equals
            return Elected(best, is_unclean=True)
    return None


def with_isr(partition: Partition, isr: Collection[int], *, min_isr: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns ISR and eligible leaders for a new ISR, both in assignment order.

    A replica that leaves an ISR which becomes smaller than `min_isr` holds everything acknowledged, and is eligible.
    Leaving and falling below may happen at once: until then the high watermark waited for every leaving replica.
    """
    stays = tuple([b for b in partition.replicas if b in isr])
    if len(stays) >= min_isr:
        return stays, ()
    held = {*partition.isr, *partition.eligible}.difference(stays)
    return stays, tuple([b for b in partition.replicas if b in held])


def led_by(partition: Partition, elected: Elected | None, *, min_isr: int) -> Partition:
    """Returns the partition under this leader, with its ISR and eligible leaders. `change` sets the epochs."""
    leader = NO_LEADER if elected is None else elected.leader
    isr, eligible = partition.isr, partition.eligible
    if elected is not None and elected.is_unclean:
        isr, eligible = (leader,), ()
    elif elected is not None and leader not in isr:
        isr = (leader,)  # an eligible one: it is in sync with itself, the others must catch up
    if len(isr) >= min_isr:
        eligible = ()
    if eligible:
        eligible = tuple([b for b in eligible if b not in isr])
    after = partition.led(leader, isr=isr, eligible=eligible)
    if elected is not None and elected.is_unclean:
        return after._replace(unclean_epoch=partition.leader_epoch + 1)
    return after


_SET = (
    "replicas", "directories", "isr", "eligible", "leader", "adding", "removing", "start_offset", "target",
    "recovering", "unclean_epoch",
)  # fmt: skip
_values = attrgetter(*_SET)


def change(
    topic_id: UUID, number: int, before: Partition, after: Partition, *, new_epoch: bool = False
) -> ChangePartition | None:
    """Returns the record that changes a partition from one state to another; None if they are equal.

    The leader epoch rises when the leader changes, and with `new_epoch` even if it stays (a new incarnation of the
    leader, or replicas that must not follow any more).
    """
    # Unchanged values are mostly identical: compared as such first, since fencing a broker does this for thousands.
    changes = {
        name: now
        for name, now, was in zip(_SET, _values(after), _values(before), strict=True)
        if now is not was and now != was
    }
    epoch_rises = "leader" in changes or new_epoch
    if not changes and not epoch_rises:
        return None
    if "replicas" in changes and after.directories == tuple(before.directory_of(b) for b in after.replicas):
        changes.pop("directories", None)  # applying the record derives them
    return ChangePartition(
        topic_id=topic_id,
        partition=number,
        leader_epoch=before.leader_epoch + 1 if epoch_rises else None,
        **changes,
    )
