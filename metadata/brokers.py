"""The life of a broker as the controller sees it: registration, heartbeats, fencing, controlled shutdown, drain.

    (unknown) --register--> fenced --heartbeat, caught up--> live --silent or refused--> fenced
                              ^                               |
                              |                               +--asks to stop--> leaving --all moved--> fenced
                              +---- register: a new incarnation, a higher broker epoch, from any state

Rules (design: safety 5, decisions 2.7 and 2.8):
- A broker epoch is the log offset of the registration: it rises with every incarnation.
- A live broker's id is refused to another incarnation (duplicate id); the same incarnation may repeat its request.
- A new incarnation raises the leader epoch of every partition that the broker led, before it is unfenced, even if it is
  elected again: a leader epoch belongs to one incarnation of one broker.
- Before unfencing, replicas that cannot hold what they held leave ISR and eligible leaders: reported as damaged or
  missing, on a directory other than the recorded one, or with `flush.mode=page-cache` after an unclean stop. That mode
  is the one of now. A broker that has not synced yet what it acknowledged under a former one reports it as missing.
- A broker need not wait for its logs: if some were not open when it registered, those of its replicas that could be
  elected are marked as recovering, and are not before it has said of each that its log is open (`metadata.recoveries`).
- Who is to be fenced and is in too many ISRs for one decision is *leaving* meanwhile: marked in the first step, from
  which on it joins and leads nothing new, and fenced in the last one. There is no way back from that but through being
  fenced; the active controller takes the steps (`metadata.shell`), whoever began them.
- Other large decisions go in steps, too, and say so (`is_more_to_do`): leaders for the partitions of a broker that is
  let in, the replicas of a directory that is offline, a drain. A directory that runs again stays marked until the last
  of its replicas has left: the broker is believed again when everything that was said of it is done.
- A fenced or stopping broker leaves every ISR; where that makes the ISR smaller than `min.insync.replicas` it stays an
  eligible leader. So do the replicas of a directory that stands still; those of one that failed are not eligible.
- A directory that is full is not offline: it can be read. What the broker leads there, others lead, if enough of them
  are in sync without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from uuid import UUID

from tidelog.metadata.configs import is_page_cache, is_unclean_allowed, min_isr
from tidelog.metadata.decision import Context, Decision, Done, Draft
from tidelog.metadata.image import NIL, Broker, ClusterImage
from tidelog.metadata.leadership import (
    Candidates,
    find_leaders,
    leave_all,
    moved_leaderships,
    recovered,
    shifted,
    without,
)
from tidelog.metadata.records import NO_LEADER, ChangeBroker, Record, RegisterBroker, UnregisterBroker
from tidelog.model.errors import (
    BrokerNotRegisteredError,
    DuplicateBrokerError,
    InconsistentClusterIdError,
    InvalidRequestError,
    StaleBrokerEpochError,
    UnsupportedVersionError,
)

BROKER_ID_MAX = (1 << 31) - 1
ENDPOINTS_MAX = 16
DIRECTORIES_MAX = 64
NAME_LENGTH_MAX = 255
FEATURES_MAX = 100
FEATURE_LEVEL_MAX = 32_767
DEPARTURES_MAX = 2_500
"""Partitions that change in one decision on a broker's account: some 50 ms of the event loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Register:
    """A broker process announces itself."""

    cluster_id: str
    broker: int
    incarnation: UUID
    endpoints: tuple[tuple[str, str, str, int], ...]
    rack: str | None = None
    directories: tuple[UUID, ...] = ()
    features: tuple[tuple[str, int, int], ...] = ()
    clean_stop_epoch: int = -1
    """The broker epoch in which its last life ended cleanly; -1 if it did not."""
    lost: tuple[tuple[UUID, int], ...] = ()
    """Replicas (topic id, partition) that it found damaged or missing."""
    is_recovering: bool = False
    """Some of its logs are not open yet: what else is damaged it does not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    broker_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """What a broker says of itself; liveness itself is soft state of the active controller (`metadata.sessions`)."""

    broker: int
    broker_epoch: int
    metadata_offset: int
    """It has applied the log up to here."""
    wants_fence: bool = False
    wants_shutdown: bool = False
    failed_directories: tuple[UUID, ...] = ()
    """Log directories that returned an error: closed until the broker starts anew."""
    stalled_directories: tuple[UUID, ...] = ()
    """Log directories that do not answer for now."""
    full_directories: tuple[UUID, ...] = ()
    """Log directories without room for appends, from the first refused append until there is room again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatReply:
    is_fenced: bool
    may_shut_down: bool
    """Its leaderships are elsewhere: it may stop now."""
    is_caught_up: bool
    is_more_to_do: bool = False
    """The heartbeat asks for more than one decision takes: it is to be decided again (by the controller itself)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """Decided by the controller itself: the broker is silent, or its address refuses connections."""

    broker: int
    broker_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Unregister:
    """Forget a broker that will not come back; it must not hold replicas."""

    broker: int
    validate_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """Take a broker out of placement and move its leaderships away (`on=False` ends it)."""

    broker: int
    on: bool = True
    validate_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """What is left on the broker: partitions that it leads since nobody else can, and replicas of any kind."""

    leads: int
    replicas: int
    is_more_to_do: bool = False
    """Of what it leads, others can lead some: the request is to be repeated (by the controller itself)."""


def known_broker(image: ClusterImage, broker: int, broker_epoch: int | None = None) -> Broker:
    found = image.brokers.get(broker)
    if found is None:
        raise BrokerNotRegisteredError(f"broker {broker} is not registered")
    if broker_epoch is not None and broker_epoch != found.broker_epoch:
        raise StaleBrokerEpochError(
            f"broker {broker} is in epoch {found.broker_epoch}, the request is of {broker_epoch}"
        )
    return found


def _is_name(text: str) -> bool:
    return 0 < len(text) <= NAME_LENGTH_MAX and text.isprintable()


def _check_registration(image: ClusterImage, request: Register, cluster_id: str) -> None:
    if request.cluster_id != cluster_id:
        raise InconsistentClusterIdError(
            f"broker {request.broker} was formatted for cluster {request.cluster_id!r}, this is {cluster_id!r}"
        )
    if not 0 <= request.broker <= BROKER_ID_MAX:
        raise InvalidRequestError(f"node.id {request.broker}: 0 to {BROKER_ID_MAX}")
    if not 1 <= len(request.endpoints) <= ENDPOINTS_MAX:
        raise InvalidRequestError(
            f"broker {request.broker} gives {len(request.endpoints)} endpoints: 1 to {ENDPOINTS_MAX}"
        )
    for listener, protocol, host, port in request.endpoints:
        names = (listener, protocol, host)
        if not all(_is_name(name) for name in names) or not 0 < port < 65536:
            raise InvalidRequestError(f"broker {request.broker}: endpoint {listener}://{host}:{port} is not an address")
    if len({listener for listener, _, _, _ in request.endpoints}) != len(request.endpoints):
        raise InvalidRequestError(f"broker {request.broker} names a listener twice")
    if request.rack is not None and not _is_name(request.rack):
        raise InvalidRequestError(f"broker {request.broker}: a rack has 1 to {NAME_LENGTH_MAX} printable characters")
    directories = request.directories
    if len(set(directories)) != len(directories) or len(directories) > DIRECTORIES_MAX or NIL in directories:
        raise InvalidRequestError(f"broker {request.broker}: directory ids are distinct, at most {DIRECTORIES_MAX}")
    supported = {name: (low, high) for name, low, high in request.features}
    if len(supported) != len(request.features) or len(supported) > FEATURES_MAX:
        raise InvalidRequestError(f"broker {request.broker}: features are named once, at most {FEATURES_MAX}")
    for name, (low, high) in sorted(supported.items()):
        if not _is_name(name) or not 0 <= low <= high <= FEATURE_LEVEL_MAX:
            raise InvalidRequestError(f"broker {request.broker}: feature {name[:40]!r} {low} to {high} is not a range")
    for name, level in sorted(image.features.items()):
        low, high = supported.get(name, (0, 0))
        if not low <= level <= high:
            raise UnsupportedVersionError(
                f"broker {request.broker} supports {name} {low} to {high}, the cluster is at {level}"
            )


def register(image: ClusterImage, request: Register, context: Context, *, cluster_id: str) -> Decision[Registered]:
    _check_registration(image, request, cluster_id)
    known = image.brokers.get(request.broker)
    if known is not None and known.incarnation == request.incarnation:
        return Decision((), Registered(broker_epoch=known.broker_epoch))
    if known is not None and not known.fenced:
        how = "leaving" if known.is_leaving else "live"
        raise DuplicateBrokerError(
            f"broker {request.broker} is {how} as another process at {_address(known)}; "
            "stop it, or wait until its session has ended"
        )
    draft = Draft(image)
    clean = known is not None and request.clean_stop_epoch == known.broker_epoch
    epoch = max(context.next_offset, known.broker_epoch + 1 if known is not None else 0)
    draft.add(
        [
            RegisterBroker(
                broker=request.broker,
                broker_epoch=epoch,
                incarnation=request.incarnation,
                endpoints=request.endpoints,
                rack=request.rack,
                directories=request.directories,
                features=request.features,
            )
        ]
    )
    draft.add(_after_registration(draft.image, request, known, context, is_clean=clean))
    return draft.decide(Registered(broker_epoch=epoch))


def _address(broker: Broker) -> str:
    _, _, host, port = broker.endpoints[0]
    return f"{host}:{port}"


def _after_registration(
    image: ClusterImage, request: Register, former: Broker | None, context: Context, *, is_clean: bool
) -> Iterator[Record]:
    """Take out what the new incarnation cannot vouch for, mark what it cannot vouch for yet, and end the epochs that
    its former life led. The marks of that life are over."""
    lost = set(request.lost)
    # A replica that no directory is recorded of yet cannot be compared; if a directory is gone, it may have been there.
    has_lost_a_directory = former is not None and not set(former.directories) <= set(request.directories)
    for topic_id, number, partition in image.partitions_on(request.broker):
        directory = partition.directory_of(request.broker)
        has_lost_data = (
            (topic_id, number) in lost
            or (has_lost_a_directory if directory == NIL else directory not in request.directories)
            or (not is_clean and is_page_cache(image, topic_id))
        )
        leads = partition.leader == request.broker
        loses = has_lost_data and request.broker in partition.eligible
        after = recovered(partition, request.broker) if request.broker in partition.recovering else partition
        if leads or loses or request.broker in partition.isr:
            after = without(image, topic_id, after, request.broker, has_lost_data=has_lost_data)
        # No other replica of it can be elected but by an admin's call, where nobody leads: that must know too.
        is_leaderless = partition.leader == NO_LEADER
        is_candidate = request.broker in after.eligible or is_unclean_allowed(image, topic_id)
        if request.is_recovering and (is_candidate or (is_leaderless and (topic_id, number) not in lost)):
            after = after._replace(recovering=(*after.recovering, request.broker))
        if after is partition:
            continue  # the usual case: it was fenced, and has left before
        record = shifted(image, topic_id, number, partition, after, new_epoch=leads, context=context)
        if record is not None:
            yield record


def fence(image: ClusterImage, request: Fence, context: Context) -> Decision[Done]:
    """To be repeated until the broker is fenced, if it is in very many in-sync sets (`_leave`)."""
    broker = known_broker(image, request.broker, request.broker_epoch)
    draft = Draft(image)
    if not broker.fenced:
        _leave(draft, broker, context)
    return draft.decide(Done())


def _leave(draft: Draft, broker: Broker, context: Context, *, is_stopping: bool = False) -> None:
    """The broker leads nothing, is in no ISR, and is fenced; or it is leaving, if that is more than one decision takes.

    Each step is sound by itself, as if the leaders had dropped it. Nobody takes it back in between (`can_serve`), so
    there are as many steps as its partitions need. What it still leads it goes on leading until its step.
    """
    number, epoch = broker.broker, broker.broker_epoch
    departures = list(islice(leave_all(draft.image, number, context), DEPARTURES_MAX + 1))
    is_last = len(departures) <= DEPARTURES_MAX
    if (is_stopping or not is_last) and not broker.in_controlled_shutdown:
        draft.add([ChangeBroker(broker=number, broker_epoch=epoch, in_controlled_shutdown=True)])
    draft.add(departures[:DEPARTURES_MAX])
    if is_last:
        draft.add([ChangeBroker(broker=number, broker_epoch=epoch, fenced=True)])


def _unfence(draft: Draft, broker: Broker, context: Context) -> bool:
    """The broker is live: partitions without a leader that it may lead get one. Whether there are more of them."""
    draft.add(
        [
            ChangeBroker(
                broker=broker.broker, broker_epoch=broker.broker_epoch, fenced=False, in_controlled_shutdown=False
            )
        ]
    )
    return _find_leaders(draft, broker, context)


def _find_leaders(draft: Draft, broker: Broker, context: Context) -> bool:
    return _add_some(draft, find_leaders(draft.image, draft.image.partitions_on(broker.broker), context))


def _add_some(draft: Draft, records: Iterator[Record]) -> bool:
    """As many as one decision takes; whether there are more."""
    found = list(islice(records, DEPARTURES_MAX + 1))
    draft.add(found[:DEPARTURES_MAX])
    return len(found) > DEPARTURES_MAX


def heartbeat(image: ClusterImage, request: Heartbeat, context: Context) -> Decision[HeartbeatReply]:
    broker = known_broker(image, request.broker, request.broker_epoch)
    draft = Draft(image)
    # The registration stands at offset `broker_epoch`: who has applied more than that has seen itself registered.
    caught_up = request.metadata_offset > max(context.caught_up_from - 1, broker.broker_epoch)
    is_more = _note_directories(draft, broker, request, context)
    full = tuple(directory for directory in broker.directories if directory in request.full_directories)
    if full != broker.full:
        draft.add([ChangeBroker(broker=broker.broker, broker_epoch=broker.broker_epoch, full=full)])
    if full:
        is_more |= _add_some(draft, _out_of_full(draft.image, broker.broker, full))
    is_leaving = broker.is_leaving or request.wants_fence or request.wants_shutdown
    if is_leaving and not broker.fenced:
        _leave(draft, broker, context, is_stopping=request.wants_shutdown)
    elif broker.fenced and caught_up and not request.wants_fence and not request.wants_shutdown:
        is_more |= _unfence(draft, broker, context)
    after = draft.image.brokers[broker.broker]
    return draft.decide(
        HeartbeatReply(
            is_fenced=after.fenced,
            may_shut_down=request.wants_shutdown and after.fenced,
            is_caught_up=caught_up,
            is_more_to_do=is_more,
        )
    )


def _note_directories(draft: Draft, broker: Broker, request: Heartbeat, context: Context) -> bool:
    """Nothing in a failed or stalled directory leads or is in sync; one that runs again may lead again. Whether there
    is more to do than one decision takes."""
    named = (*request.failed_directories, *request.stalled_directories, *request.full_directories)
    unknown = [d for d in named if d not in broker.directories]
    if unknown:
        raise InvalidRequestError(f"broker {broker.broker} has no log directory {unknown[0]}")
    told = {*request.failed_directories, *request.stalled_directories}
    unfinished = _still_in_sync(draft.image, broker, set(broker.offline) - told)
    offline = tuple(d for d in broker.directories if d in told or d in unfinished)
    if offline != broker.offline:
        draft.add([ChangeBroker(broker=broker.broker, broker_epoch=broker.broker_epoch, offline=offline)])
    is_more = bool(unfinished)
    if offline:
        is_more |= _add_some(
            draft, _out_of_directories(draft.image, broker.broker, offline, request.failed_directories, context)
        )
    # Not for a broker that is about to leave: it would be elected, perhaps uncleanly, for nothing.
    is_leaving = request.wants_fence or request.wants_shutdown
    if set(broker.offline) - set(offline) and not is_leaving:
        is_more |= _find_leaders(draft, broker, context)
    return is_more


def _still_in_sync(image: ClusterImage, broker: Broker, directories: set[UUID]) -> set[UUID]:
    """Those of the directories with a replica that has not left its in-sync set."""
    number = broker.broker
    if not directories:
        return set()
    return {
        directory
        for _, _, partition in image.partitions_on(number)
        if number in partition.isr and (directory := partition.directory_of(number)) in directories
    }


def _out_of_directories(
    image: ClusterImage, broker: int, offline: tuple[UUID, ...], failed: tuple[UUID, ...], context: Context
) -> Iterator[Record]:
    """Replicas there leave the ISR; in a failed directory what they hold cannot be read, so they are not eligible."""
    candidates = Candidates(image)
    for topic_id, number, partition in image.partitions_on(broker):
        directory = partition.directory_of(broker)
        is_lost = directory in failed
        if directory in offline and (broker in partition.isr or (is_lost and broker in partition.eligible)):
            after = without(image, topic_id, partition, broker, has_lost_data=is_lost)
            record = shifted(image, topic_id, number, partition, after, candidates=candidates, context=context)
            if record is not None:
                yield record


def _out_of_full(image: ClusterImage, broker: int, full: tuple[UUID, ...]) -> Iterator[Record]:
    """What it leads there goes to others, if they can go on without it: then it is not in sync until it has room.

    Where they are too few, it stays: nothing would be won, and what is there can be read.
    """
    candidates = Candidates(image, excluded=(broker,))
    for topic_id, number, partition in image.partitions_on(broker):
        if partition.leader != broker or partition.directory_of(broker) not in full:
            continue
        after = without(image, topic_id, partition, broker)
        is_enough = len(after.isr) >= min_isr(image, topic_id, after)
        if is_enough and any(map(candidates.of(after), after.isr)):
            record = shifted(image, topic_id, number, partition, after, candidates=candidates)
            if record is not None:
                yield record


def unregister(image: ClusterImage, request: Unregister, _context: Context) -> Decision[Done]:
    broker = known_broker(image, request.broker)
    if not broker.fenced:
        raise InvalidRequestError(f"broker {request.broker} is live; stop it first")
    held = image.replica_count(request.broker)
    if held:
        raise InvalidRequestError(
            f"broker {request.broker} holds {held} replicas; move them first: tidelog reassign plan --remove-broker "
            f"{request.broker}"
        )
    return Decision((UnregisterBroker(broker=request.broker, broker_epoch=broker.broker_epoch),), Done())


def drain(image: ClusterImage, request: Drain, _context: Context) -> Decision[Drained]:
    """Marks the broker and moves its leaderships; its replicas move by reassignment."""
    broker = known_broker(image, request.broker)
    draft = Draft(image)
    if broker.draining != request.on:
        draft.add([ChangeBroker(broker=broker.broker, broker_epoch=broker.broker_epoch, draining=request.on)])
    is_more = request.on and _add_some(draft, moved_leaderships(draft.image, broker.broker))
    leads = sum(1 for _, _, partition in draft.image.partitions_on(broker.broker) if partition.leader == broker.broker)
    return draft.decide(Drained(leads=leads, replicas=draft.image.replica_count(broker.broker), is_more_to_do=is_more))
