"""Valid inputs of the targets: what production writes, so that a fuzzer begins behind the first check."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from struct import pack
from uuid import UUID

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID
from support.kafka.invalid_requests import Strange
from support.metadata.controller import Cluster
from support.raft.core_cluster import Cluster as RaftCluster
from support.security.logins import ALL, SHA256, SHA512, Users, pass_frame, server_of

from tidelog.coordinator import consumer_protocol
from tidelog.coordinator import records as group_records
from tidelog.coordinator.transactions import records as transactions
from tidelog.log import kept_copies, producer_snapshot, stored_state
from tidelog.log.batch import Codec, ControlKind, Record, encode, encode_control
from tidelog.log.epochs import EpochHistory
from tidelog.metadata.brokers import Fence, Heartbeat
from tidelog.metadata.config_changes import AlterConfigs, ConfigChange, ResourceChange
from tidelog.metadata.requests import encode_reply, encode_request
from tidelog.metadata.snapshot import snapshot_bytes
from tidelog.metadata.topics import CreateTopics, DeleteTopics, NewTopic
from tidelog.model.errors import NotLeaderError
from tidelog.model.ids import Epoch, NodeId, Offset, PartitionId, ProducerId, TopicId
from tidelog.raft import entries, peers, snapshots, tail
from tidelog.raft import wire as raft_wire
from tidelog.raft.membership import Member, Membership
from tidelog.raft.messages import SnapshotId
from tidelog.replication import messages as replication
from tidelog.replication import wire as replication_wire
from tidelog.rpc.grpc.methods import METHODS, Kind
from tidelog.rpc.kafka.messages import APIS
from tidelog.rpc.v1 import admin_pb2, groups_pb2, log_pb2
from tidelog.security.sasl.client import begin_as_client
from tidelog.security.sasl.exchange import Failed
from tidelog.security.secrets import Secret
from tidelog.world.transport import encode_error

TOPIC = TopicId(UUID(int=7))
EXAMPLES = Path(__file__).parents[2] / "deploy" / "examples"


def batches() -> list[bytes]:
    records = [Record(at, 1_000 + at, b"key-%d" % at, b"value" * at, (("h", b"x"), ("n", None))) for at in range(5)]
    found = [encode(records, codec=codec, producer_id=4, producer_epoch=0, base_sequence=5) for codec in Codec]
    found.append(encode([Record(0, 1, None, None)], is_transactional=True, producer_id=9))
    found += [
        encode_control(kind, coordinator_epoch=1, timestamp=9, producer_id=4, producer_epoch=0)
        for kind in (ControlKind.COMMIT, ControlKind.ABORT)
    ]
    return found


def segments() -> list[bytes]:
    index = pack(">iiii", 0, 0, 5, 300)
    times = pack(">qiqi", 1_000, 0, 2_000, 5)
    return [b"\0" + b"".join(batches()), b"\1" + index, b"\2" + times, b"\3" + pack(">hqqqq", 0, 4, 0, 5, 9)]


def indexes() -> list[bytes]:
    return [pack(">q", 5) + pack(">iiii", 0, 0, 5, 300), pack(">q", 1_000) + pack(">qiqi", 1_000, 0, 2_000, 5)]


def stored_state_values() -> list[bytes]:
    return list(_stored_states())


def _stored_states() -> Iterator[bytes]:
    yield stored_state.encode_epochs(EpochHistory([(0, 0), (2, 40)]))
    yield stored_state.encode_lineage(40, 2, ((0, 0), (2, 40)))
    yield stored_state.encode_number("high_watermark", 7)
    yield stored_state.encode_damage(40, "a batch at 900 has a wrong CRC")
    yield kept_copies.encode_note(kept_copies.KeptRecords(0, 5, ((0, 0),)), reason="truncated", now_ms=5)
    row = producer_snapshot.ProducerRow(ProducerId(4), 0, -1, 1_000, Offset(9), 0, None, ((4, 8, 4, 1_000),))
    yield producer_snapshot.encode_snapshot([producer_snapshot.encode_row(row)], [(5, 9)], {})


def raft() -> list[bytes]:
    """The first byte chooses the reader, in the order of `targets.read_raft`."""
    cluster = RaftCluster(3)
    messages = []
    cluster.wait(1_000)
    cluster.tick(1)
    cluster.propose(1)
    while cluster.network:
        envelope = cluster.network[0]
        messages.append(envelope.message)
        cluster.deliver(envelope)
        if len(messages) > 40:
            break
    membership = Membership((Member(NodeId(1), bytes(16), (("CONTROLLER", "host:9192"),)),))
    snapshot = SnapshotId(Offset(5), Epoch(2))
    log = [entry for core in cluster.cores().values() for entry in core.log.entries][:3]
    found = [b"\0" + raft_wire.encode(message) for message in messages]
    found.append(b"\1" + peers.encode_frame(messages[:5]))
    found.append(b"\2" + tail.encode_frame(tail.TailEntries(Offset(0), tuple(log))))
    found.append(b"\3" + tail.encode_follow(Offset(5), Epoch(2)))
    found.append(b"\4" + b"".join(snapshots.encode_file(snapshot, membership, b"state")))
    found.append(b"\5" + membership.encode())
    found.append(b"\6" + b"".join(snapshots.encode_file(snapshot, membership, b"state")))
    found.append(b"\7" + b"".join(entries.encode_entries(Offset(0), log, now_ms=5)))
    return found


def replication_frames() -> list[bytes]:
    """The first byte chooses the reader, in the order of `targets.read_replication`."""
    from_follower: list[replication.FromFollower] = [
        replication.Acks(300, (replication.Ack(1, 2, 40),)),
        replication.Unsubscribe(number=1),
    ]
    from_leader: list[replication.FromLeader] = [
        replication.Pushed([replication.Push(1, 40, batches()[0], 40)]),
        replication.Ended(number=1, reason=replication.Reason.DIVERGED, epoch=2, offset=40),
        replication.Histories((replication.History(1, 40, ((0, 0), (2, 40))),)),
    ]
    found = [b"\0" + replication_wire.encode(message) for message in from_follower]
    found += [b"\1" + replication_wire.encode(message) for message in from_leader]
    return [*found, b"\2" + encode_error(NotLeaderError("another leads"))]


def metadata_cluster() -> Cluster:
    cluster = Cluster(3)
    cluster.made("orders", (0, 1, 2), (1, 2, 0), cleanup_policy="compact")
    cluster.made("second", (0, 1))
    cluster.crash(1)
    cluster.start(1)
    return cluster


def metadata_records() -> list[bytes]:
    return metadata_cluster().log


def metadata_requests() -> list[bytes]:
    change = ConfigChange(key="retention.ms", operation="set", value="1000")
    asked = [
        CreateTopics(topics=(NewTopic(name="a", partitions=2, replication_factor=2),)),
        DeleteTopics(names=("a",)),
        Fence(broker=1, broker_epoch=4),
        Heartbeat(broker=1, broker_epoch=4, metadata_offset=9),
        AlterConfigs(resources=(ResourceChange(resource_type="topic", resource="orders", changes=(change,)),)),
    ]
    cluster = metadata_cluster()
    replies = [encode_reply(cluster.decide(asked[0]).reply)]
    return [b"\1" + encode_request(request) for request in asked] + [b"\0" + reply for reply in replies]


def metadata_snapshots() -> list[bytes]:
    return [snapshot_bytes(metadata_cluster().image)]


def group_entries() -> list[bytes]:
    partition = PartitionId(TOPIC, 3)
    pairs = [
        (group_records.offset_key("g", partition), group_records.OffsetValue(offset=9, leader_epoch=2, metadata="m")),
        (group_records.group_key("g"), group_records.GroupValue(epoch=4)),
        (group_records.pending_key("g", 5, partition), group_records.PendingValue(offset=9, epoch=2, number=1)),
        (group_records.fence_key(5), group_records.FenceValue(epoch=3, number=1)),
    ]
    found = []
    for key, value in pairs:
        raw_key = group_records.encode_key(key)
        found.append(bytes([len(raw_key)]) + raw_key + group_records.encode_value(value))
    return found


def transaction_records() -> list[bytes]:
    partitions = frozenset(PartitionId(TOPIC, number) for number in range(3))
    values = [
        transactions.Transaction(producer_id=5),
        transactions.Transaction(
            producer_id=5, status=1, partitions=partitions, members=(transactions.Member(6, "task", partitions),)
        ),
        transactions.Transaction(
            producer_id=5, epoch=9, status=2, members=(transactions.Member(6),), committed=(6,), last_token=b"7"
        ),
    ]
    raw_key = transactions.encode_key("orders")
    return [bytes([len(raw_key)]) + raw_key + transactions.encode_value(value) for value in values]


def consumer_protocols() -> list[bytes]:
    subscription = pack(">hi", 1, 1) + pack(">h", 6) + b"orders" + pack(">i", -1) + pack(">i", 0)
    return [consumer_protocol.encode_assignment({"orders": [0, 1]}), subscription]


def kafka_requests() -> list[bytes]:
    draw = random.Random(5)
    strange = Strange(draw, lambda: [TOPIC.bytes], "own")
    found = []
    for key, api in sorted(APIS.items()):
        versions = [version for version in range(30) if api.serves(version)]
        for version in {versions[0], versions[-1]}:
            found += [strange.frame(key, version, 7)[4:] for _ in range(3)]
    return found


def grpc_requests() -> list[bytes]:
    """One of each unary method: empty ones, and some that mean something."""
    numbers = {method.name: number for number, method in enumerate(m for m in METHODS.values() if m.kind is Kind.UNARY)}
    found = [bytes([number]) for number in numbers.values()]
    made = {
        "CreateTopics": admin_pb2.CreateTopicsRequest(topics=[admin_pb2.NewTopic(name="orders", partitions=1)]),
        "Fetch": log_pb2.FetchRequest(partitions=[log_pb2.FetchPartition(topic="orders")]),
        "FetchOffsets": groups_pb2.FetchOffsetsRequest(group="g"),
    }
    return found + [bytes([numbers[name]]) + message.SerializeToString() for name, message in made.items()]


def configurations() -> list[bytes]:
    files = [b"b" + path.read_bytes() for path in sorted(EXAMPLES.glob("*.toml"))]
    properties = b"Anode.id=1\nprocess.roles=broker,controller\nlisteners=PLAINTEXT://:9092\nlog.dirs=/tmp/x\n"
    return [*files, properties]


def addresses() -> list[bytes]:
    return [b"localhost:9092", b"[::1]:9192", b"PLAINTEXT://host:9092", b"1@a:9192,2@b:9192", b"CLIENT://:9292"]


# Logins.

USER, PASSWORD = "alice", "a password"
CLIENT_SEED, SERVER_SEED = 7, 8
VALIDITY = datetime(2026, 1, 1, tzinfo=UTC), datetime(2027, 1, 1, tzinfo=UTC)


@cache
def users() -> Users:
    return Users((USER, SHA256, PASSWORD), (USER, SHA512, PASSWORD))


def logins() -> list[bytes]:
    """For each mechanism the frames of the client, and those of the server."""
    found = []
    for number, mechanism in enumerate(ALL):
        client = begin_as_client(mechanism, USER, Secret(PASSWORD), random.Random(CLIENT_SEED))
        server = server_of(users(), mechanism, seed=SERVER_SEED)
        sent, received = [client.first()], []
        while not client.is_complete:
            outcome = pass_frame(server, sent[-1])
            assert not isinstance(outcome, Failed), "the password is right"
            received.append(outcome.frame)
            frame = client.step(outcome.frame)
            sent += [] if frame is None else [frame]
        found += [bytes([number]) + _framed(sent), bytes([_of_client(number)]) + _framed(received)]
        found.append(bytes([number]) + _framed(sent[:1]))
    return found


def _of_client(number: int) -> int:
    return next(kind for kind in range(0x80, 0x100) if kind % len(ALL) == number)


def _framed(frames: list[bytes]) -> bytes:
    return b"".join(pack(">H", len(frame)) + frame for frame in frames)


def certificates() -> list[bytes]:
    rules = (b"DEFAULT", b"RULE:^CN=([^,]+),.*$/$1/L,DEFAULT", rb"RULE:^(.*),O=(\w+)$/$2 $1/U, RULE:.*/x/")
    subjects = (
        [(NameOID.ORGANIZATION_NAME, "Org, and more"), (NameOID.COMMON_NAME, "duke")],
        [(NameOID.ORGANIZATION_NAME, "Org"), (NameOID.EMAIL_ADDRESS, "a@b.c"), (NameOID.COMMON_NAME, '"Zo\u00eb" #1 ')],
    )
    return [bytes([len(rule)]) + rule + _certificate(subject) for rule in rules for subject in subjects]


def _certificate(subject: list[tuple[x509.ObjectIdentifier, str]]) -> bytes:
    """The same bytes in each run."""
    key = Ed25519PrivateKey.from_private_bytes(bytes(32))
    name = x509.Name([x509.NameAttribute(oid, value) for oid, value in subject])
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, *VALIDITY)
    return builder.sign(key, None).public_bytes(Encoding.DER)


CERTIFICATES = certificates()
"""Made at the import: `cryptography` keeps the class `datetime` that it sees first, and a simulation replaces it."""
