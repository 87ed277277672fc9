"""The life cycle of brokers in the controller: registration, heartbeats, fencing, controlled shutdown, drain. Pure.

    (unknown) --register--> fenced --heartbeat, caught up--> live --silent or refused--> fenced
                              ^                               |
                              |                               +--requests shutdown--> leaving --all moved--> fenced
                              +---- register: a new incarnation, a higher broker epoch, from any state

Rules:
- A broker epoch is the log offset of the registration: it rises with every incarnation.
- Another incarnation cannot register under the id of a live broker (duplicate id); the same incarnation may repeat its
  request.
- A new incarnation raises the leader epoch of every partition that the broker led, before it is unfenced, even if it is
  elected again: a leader epoch belongs to one incarnation of one broker.
- Before unfencing, replicas that may have lost data leave ISR and eligible leaders: reported as damaged or missing, on
  a directory other than the recorded one, or with `flush.mode=page-cache` (its present value) after an unclean stop. A
  broker that has not synced yet what it acknowledged under an earlier flush mode reports it as missing.
- A broker registers without waiting for its logs: if some are not open, those of its replicas that could be elected are
  marked as recovering, until the broker reports that the log is open (`metadata.recovering_replicas`).
- A broker that is to be fenced and is in too many ISRs for one decision is *leaving* meanwhile: marked in the first
  step, after which it joins no ISR and leads nothing new, and fenced in the last one. It becomes live again only after
  it was fenced; the active controller takes the steps (`metadata.controller_node`), whichever controller began them.
- Other large decisions have several steps, too (`has_more`): leaders for the partitions of an unfenced broker, the
  replicas of an offline directory, a drain. A directory that works again stays marked until the last of its replicas
  has left the ISR.
- A fenced or stopping broker leaves every ISR; where that makes the ISR smaller than `min.insync.replicas` it stays an
  eligible leader. So do the replicas of a stalled directory; those of a failed one are not eligible.
- A full directory is not offline: it is readable. Other replicas take over the partitions that the broker leads there,
  if enough of them are in sync without it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from uuid import UUID

from tidelog.metadata.configs import is_page_cache, is_unclean_allowed, min_isr
from tidelog.metadata.decision import Context, Decision, Done, Draft
from tidelog.metadata.image import NIL, Broker, ClusterImage
from tidelog.metadata.partition_changes import (
    Candidates,
    build_change,
    elect_missing_leaders,
    leave_all_isrs,
    move_leaderships,
    recovered,
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
"""Partitions that one decision changes for a broker: some 50 ms of the event loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Register:
    """A broker process registers."""

    cluster_id: str
    broker: int
    incarnation: UUID
    endpoints: tuple[tuple[str, str, str, int], ...]
    rack: str | None = None
    directories: tuple[UUID, ...] = ()
    features: tuple[tuple[str, int, int], ...] = ()
    clean_stop_epoch: int = -1
    """The broker epoch of the last incarnation if it stopped cleanly, else -1."""
    lost: tuple[tuple[UUID, int], ...] = ()
    """Replicas (topic id, partition) that it found damaged or missing."""
    is_recovering: bool = False
    """Some of its logs are not open yet: more may be damaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    broker_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """The state of a broker. Liveness is soft state of the active controller (`metadata.broker_sessions`)."""

    broker: int
    broker_epoch: int
    metadata_offset: int
    """The broker has applied the log up to here."""
    wants_fence: bool = False
    wants_shutdown: bool = False
    failed_directories: tuple[UUID, ...] = ()
    """Log directories that returned an error: closed until the broker restarts."""
    stalled_directories: tuple[UUID, ...] = ()
    """Log directories that stall."""
    full_directories: tuple[UUID, ...] = ()
    """Log directories without space for appends, from the first rejected append until there is space again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatReply:
    is_fenced: bool
    may_shut_down: bool
    """Other brokers lead its partitions: it may stop now."""
    is_caught_up: bool
    has_more: bool = False
    """The heartbeat needs more than one decision: the controller decides it again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """Requested by the controller itself: the broker is silent, or its address refuses connections."""

    broker: int
    broker_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Unregister:
    """Removes the registration of a broker, which must hold no replicas."""

    broker: int
    validate_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """Excludes a broker from placement and moves its leaderships away (`on=False` ends it)."""

    broker: int
    on: bool = True
    validate_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """Numbers of what is left on the broker: partitions that no other broker can lead, and all replicas."""

    leads: int
    replicas: int
    has_more: bool = False
    """Other brokers can lead more of its partitions: the controller repeats the request."""


def known_broker(image: ClusterImage, broker: int, broker_epoch: int | None = None) -> Broker:
    known = image.brokers.get(broker)
    if known is None:
        raise BrokerNotRegisteredError(f"broker {broker} is not registered")
    if broker_epoch is not None and broker_epoch != known.broker_epoch:
        raise StaleBrokerEpochError(
            f"broker {broker} is in broker epoch {known.broker_epoch}; the request is of epoch {broker_epoch}"
        )
    return known


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
    """Removes replicas that may have lost data from the ISR, marks those whose log is not open yet, and ends the leader
    epochs of the former incarnation. Also removes that incarnation's marks of recovering replicas."""
    lost = set(request.lost)
    # A replica without a recorded directory cannot be compared; if a directory is gone, the replica may have been
    # there.
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
        # Where there is no leader, an admin may elect any other replica: the election must know of this mark, too.
        is_leaderless = partition.leader == NO_LEADER
        is_candidate = request.broker in after.eligible or is_unclean_allowed(image, topic_id)
        if request.is_recovering and (is_candidate or (is_leaderless and (topic_id, number) not in lost)):
            after = after._replace(recovering=(*after.recovering, request.broker))
        if after is partition:
            continue  # the usual case: it was fenced, and left the ISR before
        record = build_change(image, topic_id, number, partition, after, new_epoch=leads, context=context)
        if record is not None:
            yield record


def fence(image: ClusterImage, request: Fence, context: Context) -> Decision[Done]:
    """Fences a broker; repeated until it is fenced, if it is in very many ISRs (`_leave`)."""
    broker = known_broker(image, request.broker, request.broker_epoch)
    draft = Draft(image)
    if not broker.fenced:
        _leave(draft, broker, context)
    return draft.decide(Done())


def _leave(draft: Draft, broker: Broker, context: Context, *, is_stopping: bool = False) -> None:
    """The broker leads nothing, is in no ISR, and is fenced; or it is leaving, if that needs more than one decision.

    Each step is sound on its own, as if the leaders had dropped the broker. It cannot rejoin in between (`can_serve`),
    so the number of steps is bounded by its partitions. It leads its partitions until their step.
    """
    number, epoch = broker.broker, broker.broker_epoch
    departures = list(islice(leave_all_isrs(draft.image, number, context), DEPARTURES_MAX + 1))
    is_last = len(departures) <= DEPARTURES_MAX
    if (is_stopping or not is_last) and not broker.in_controlled_shutdown:
        draft.add([ChangeBroker(broker=number, broker_epoch=epoch, in_controlled_shutdown=True)])
    draft.add(departures[:DEPARTURES_MAX])
    if is_last:
        draft.add([ChangeBroker(broker=number, broker_epoch=epoch, fenced=True)])


def _unfence(draft: Draft, broker: Broker, context: Context) -> bool:
    """Unfences the broker, and elects leaders for leaderless partitions that it may lead. Returns whether there are
    more of them."""
    draft.add(
        [
            ChangeBroker(
                broker=broker.broker, broker_epoch=broker.broker_epoch, fenced=False, in_controlled_shutdown=False
            )
        ]
    )
    return _elect_leaders(draft, broker, context)


def _elect_leaders(draft: Draft, broker: Broker, context: Context) -> bool:
    return _add_limited(draft, elect_missing_leaders(draft.image, draft.image.partitions_on(broker.broker), context))


def _add_limited(draft: Draft, records: Iterator[Record]) -> bool:
    """Adds as many records as one decision takes; returns whether there are more."""
    batch = list(islice(records, DEPARTURES_MAX + 1))
    draft.add(batch[:DEPARTURES_MAX])
    return len(batch) > DEPARTURES_MAX


def heartbeat(image: ClusterImage, request: Heartbeat, context: Context) -> Decision[HeartbeatReply]:
    broker = known_broker(image, request.broker, request.broker_epoch)
    draft = Draft(image)
    # The registration is at offset `broker_epoch`: a broker that has applied more has seen its own registration.
    caught_up = request.metadata_offset > broker.broker_epoch
    is_more = _note_directories(draft, broker, request, context)
    full = tuple(directory for directory in broker.directories if directory in request.full_directories)
    if full != broker.full:
        draft.add([ChangeBroker(broker=broker.broker, broker_epoch=broker.broker_epoch, full=full)])
    if full:
        is_more |= _add_limited(draft, _leave_full_directories(draft.image, broker.broker, full))
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
            has_more=is_more,
        )
    )


def _note_directories(draft: Draft, broker: Broker, request: Heartbeat, context: Context) -> bool:
    """Replicas in a failed or stalled directory neither lead nor are in sync; those of a directory that works again may
    lead. Returns whether one decision is not enough."""
    named = (*request.failed_directories, *request.stalled_directories, *request.full_directories)
    unknown = [d for d in named if d not in broker.directories]
    if unknown:
        raise InvalidRequestError(f"broker {broker.broker} has no log directory {unknown[0]}")
    reported = {*request.failed_directories, *request.stalled_directories}
    unfinished = _still_in_sync(draft.image, broker, set(broker.offline) - reported)
    offline = tuple(d for d in broker.directories if d in reported or d in unfinished)
    if offline != broker.offline:
        draft.add([ChangeBroker(broker=broker.broker, broker_epoch=broker.broker_epoch, offline=offline)])
    is_more = bool(unfinished)
    if offline:
        is_more |= _add_limited(
            draft, _leave_offline_directories(draft.image, broker.broker, offline, request.failed_directories, context)
        )
    # Not for a broker that is about to leave: an election, perhaps an unclean one, would be pointless.
    is_leaving = request.wants_fence or request.wants_shutdown
    if set(broker.offline) - set(offline) and not is_leaving:
        is_more |= _elect_leaders(draft, broker, context)
    return is_more


def _still_in_sync(image: ClusterImage, broker: Broker, directories: set[UUID]) -> set[UUID]:
    """Returns the directories with a replica that is still in the ISR."""
    number = broker.broker
    if not directories:
        return set()
    return {
        directory
        for _, _, partition in image.partitions_on(number)
        if number in partition.isr and (directory := partition.directory_of(number)) in directories
    }


def _leave_offline_directories(
    image: ClusterImage, broker: int, offline: tuple[UUID, ...], failed: tuple[UUID, ...], context: Context
) -> Iterator[Record]:
    """Replicas there leave the ISR; those of a failed directory are unreadable, so they are not eligible."""
    candidates = Candidates(image)
    for topic_id, number, partition in image.partitions_on(broker):
        directory = partition.directory_of(broker)
        is_lost = directory in failed
        if directory in offline and (broker in partition.isr or (is_lost and broker in partition.eligible)):
            after = without(image, topic_id, partition, broker, has_lost_data=is_lost)
            record = build_change(image, topic_id, number, partition, after, candidates=candidates, context=context)
            if record is not None:
                yield record


def _leave_full_directories(image: ClusterImage, broker: int, full: tuple[UUID, ...]) -> Iterator[Record]:
    """Other replicas take over what it leads there, if enough are in sync without it: it leaves the ISR until it has
    space. Otherwise it keeps leading: its data is readable."""
    candidates = Candidates(image, excluded=(broker,))
    for topic_id, number, partition in image.partitions_on(broker):
        if partition.leader != broker or partition.directory_of(broker) not in full:
            continue
        after = without(image, topic_id, partition, broker)
        is_enough = len(after.isr) >= min_isr(image, topic_id, after)
        if is_enough and any(map(candidates.of(after), after.isr)):
            record = build_change(image, topic_id, number, partition, after, candidates=candidates)
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
    """Marks the broker and moves its leaderships; a reassignment moves its replicas."""
    broker = known_broker(image, request.broker)
    draft = Draft(image)
    if broker.draining != request.on:
        draft.add([ChangeBroker(broker=broker.broker, broker_epoch=broker.broker_epoch, draining=request.on)])
    is_more = request.on and _add_limited(draft, move_leaderships(draft.image, broker.broker))
    leads = sum(1 for _, _, partition in draft.image.partitions_on(broker.broker) if partition.leader == broker.broker)
    return draft.decide(Drained(leads=leads, replicas=draft.image.replica_count(broker.broker), has_more=is_more))
