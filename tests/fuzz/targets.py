"""The readers that are fuzzed: a function of bytes for each, which raises only what its caller expects.

A target returns for valid input, and raises an error of the catalogue (`TidelogError`) or a documented one for anything
else. What it returns is encoded again where there is an encoder: the copy has to read as the same.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from support.grpc_api.simulated_nodes import ApiCluster
from support.security.logins import ALL, pass_frame, server_of

from fuzz import seeds
from tidelog.coordinator import consumer_protocol
from tidelog.coordinator import records as group_records
from tidelog.coordinator.transactions import records as transaction_records
from tidelog.log import batch, dump, index, kept_copies, key_map, producer_snapshot, stored_state
from tidelog.log.batch import Codec
from tidelog.metadata import records, requests, snapshot
from tidelog.model.admin_errors import SaslAuthenticationError
from tidelog.model.errors import ErrorCode, RemoteError, TidelogError
from tidelog.model.ids import Epoch, NodeId, Offset
from tidelog.raft import entries, membership, observer, peers, snapshots, tail
from tidelog.raft import wire as raft_wire
from tidelog.replication import wire as replication_wire
from tidelog.rpc.grpc.methods import METHODS, Kind, Method
from tidelog.rpc.kafka.headers import read_request_header
from tidelog.rpc.kafka.messages import APIS
from tidelog.rpc.kafka.wire import MalformedError
from tidelog.security.principals import MappingRulesError, NoPrincipalError, PrincipalMapping
from tidelog.security.sasl.client import begin_as_client
from tidelog.security.sasl.exchange import FAILURE_TEXT, Done, Failed
from tidelog.security.secrets import Secret
from tidelog.server import config, known_controllers, listeners, storage
from tidelog.server.config_sources import SourceError
from tidelog.world import transport
from tidelog.world.simulated import SimNode

DECOMPRESSED_MAX = 1 << 20


@dataclass(frozen=True)
class Target:
    run: Callable[[bytes], object]
    seeds: Callable[[], list[bytes]]
    errors: tuple[type[Exception], ...] = (TidelogError,)
    """What input that is not valid may raise."""

    def check(self, data: bytes) -> bool:
        """Returns whether the input was valid; raises what no input may raise."""
        try:
            self.run(data)
        except self.errors:
            return False
        return True


# Logs.


def read_batch(data: bytes) -> None:
    for work in (
        lambda: batch.check_batch(data, size_max=1 << 20, from_client=True),
        lambda: list(batch.split_batches(data)),
        lambda: batch.parse_control(data),
        lambda: batch.validate_records(data, decompressed_bytes_max=DECOMPRESSED_MAX, needs_keys=True),
        lambda: group_records.decode_batch(data),
        lambda: transaction_records.decode_batch(data),
    ):
        with contextlib.suppress(TidelogError):
            work()
    found = batch.decode(data, decompressed_bytes_max=DECOMPRESSED_MAX)
    columns = batch.decode_columns(data, decompressed_bytes_max=DECOMPRESSED_MAX)
    assert len(columns) == len(found), "rows and columns agree"
    again = batch.recompress(data, Codec.ZSTD, decompressed_bytes_max=DECOMPRESSED_MAX)
    assert batch.decode(again, decompressed_bytes_max=DECOMPRESSED_MAX) == found, "another codec keeps the records"


def read_segment(data: bytes) -> None:
    """`tidelog log dump` of a file of a log: the first byte says of which kind it is."""
    source = _BytesSource(data[1:])
    list(_DUMPS[data[0] % len(_DUMPS) if data else 0](source))


class _BytesSource:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size = len(data)

    def read(self, position: int, length: int) -> bytes:
        return self._data[position : position + length]


_DUMPS: tuple[Callable[[dump.Source], Iterator[object]], ...] = (
    lambda source: dump.read_batches(source, "fuzzed"),
    lambda source: dump.read_offset_index(source, "fuzzed", Offset(0)),
    lambda source: dump.read_time_index(source, "fuzzed", Offset(0)),
    lambda source: dump.read_transaction_index(source, "fuzzed"),
)


def read_index(data: bytes) -> None:
    number = int.from_bytes(data[:8], "big", signed=True)
    block = data[8:]
    index.decode_offset_entries(block, base_offset=number)
    index.decode_time_entries(block, base_offset=number)
    index.offset_floor(block, number, base_offset=0)
    index.position_floor(block, number, base_offset=0)
    index.time_floor(block, number, base_offset=0)


def read_stored_state(data: bytes) -> None:
    readers = (
        stored_state.decode_mark,
        stored_state.decode_segment,
        stored_state.decode_epochs,
        stored_state.decode_lineage,
        stored_state.decode_damage,
        stored_state.decode_intent,
        producer_snapshot.decode_snapshot,
        kept_copies.decode_note,
        key_map.KeyMap.from_bytes,
        known_controllers.decode_rows,
    )
    is_valid = False
    for reader in readers:
        with contextlib.suppress(TidelogError):
            reader(data)
            is_valid = True
    if not is_valid:
        raise TidelogError("valid for none of them")


# Controllers and brokers.


def read_raft(data: bytes) -> None:
    readers: tuple[Callable[[bytes], object], ...] = (
        raft_wire.decode,
        peers.decode_frame,
        tail.decode_frame,
        tail._decode_follow,
        observer.decode_received,
        membership.Membership.decode,
        lambda raw: snapshots.decode_file(raw, path="fuzzed"),
        lambda raw: list(entries.decode_entries(raw, first=Offset(0), last_epoch=Epoch(0))),
    )
    _read_with_any(readers, data)


def read_replication(data: bytes) -> None:
    readers = (replication_wire.decode_from_follower, replication_wire.decode_from_leader, transport.decode_error)
    _read_with_any(readers, data)


def _read_with_any(readers: tuple[Callable[[bytes], object], ...], data: bytes) -> None:
    """The first byte chooses the reader, so that an input belongs to one."""
    readers[data[0] % len(readers) if data else 0](data[1:])


def read_metadata_records(data: bytes) -> None:
    found = records.decode_records(data)
    if found:
        again = records.split_decision(found, name="fuzzed")
        assert tuple(row for entry in again for row in records.decode_records(entry)) == found


def read_metadata_request(data: bytes) -> None:
    if data[:1] == b"\0":
        requests.decode_reply(data[1:])
    else:
        found = requests.decode_request(data[1:])
        assert requests.decode_request(requests.encode_request(found)) == found


def read_metadata_snapshot(data: bytes) -> None:
    image = snapshot.decode_snapshot(data).image
    assert snapshot.decode_snapshot(snapshot.snapshot_bytes(image)).image == image


def read_group_records(data: bytes) -> None:
    """A key and a value, with the length of the key in front."""
    size = data[0] if data else 0
    raw_key, raw_value = data[1 : 1 + size], data[1 + size :]
    with contextlib.suppress(TidelogError):
        group_records.decode_record(raw_key, raw_value)
    key, value = group_records.decode_key(raw_key), group_records.decode_value(raw_value)
    if key is not None:
        assert group_records.decode_key(group_records.encode_key(key)) == key
    if value is not None:
        assert group_records.decode_value(group_records.encode_value(value)) == value


def read_transaction_records(data: bytes) -> None:
    """A key and a value, with the length of the key in front."""
    size = data[0] if data else 0
    record = transaction_records.decode_record(data[1 : 1 + size], data[1 + size :])
    if record is not None and record.value is not None:
        raw_key = transaction_records.encode_key(record.transactional_id)
        assert transaction_records.decode_record(raw_key, transaction_records.encode_value(record.value)) == record


def read_consumer_protocol(data: bytes) -> None:
    with contextlib.suppress(TidelogError):
        consumer_protocol.parse_assignment(data)
    consumer_protocol.subscribed_topics(data)
    consumer_protocol.parse_subscription(data)


# APIs.


def read_kafka_request(data: bytes) -> None:
    header = read_request_header(data)
    api = APIS.get(header.api_key)
    if api is None or not api.serves(header.api_version):
        raise MalformedError("no such API")
    found = api.decode_request(header.api_version, data, header.body)
    again = b"".join(api.encode_request(header.api_version, found))
    assert api.decode_request(header.api_version, again) == found, "what was read can be written"


UNARY = [method for method in METHODS.values() if method.kind is Kind.UNARY]
BROKER = NodeId(11)
CALLS_PER_CLUSTER = 2_000
"""A cluster keeps the topics and groups that requests made: after so many calls, another one takes its place."""


class _ApiCalls:
    def __init__(self) -> None:
        self._cluster: ApiCluster | None = None
        self._left = 0

    def call(self, method: Method, request: bytes) -> None:
        cluster = self._cluster
        if cluster is None or self._left == 0:
            self.close()
            cluster = self._cluster = ApiCluster(seed=1, brokers=[BROKER]).__enter__()
            self._left = CALLS_PER_CLUSTER
        self._left -= 1

        async def call(_: SimNode) -> None:
            await cluster.admin_transport.call(BROKER, method.wire_name, request, timeout_ms=5_000)

        cluster.world.run(cluster.admin, call, timeout=60)

    def close(self) -> None:
        if self._cluster is not None:
            cluster, self._cluster = self._cluster, None
            cluster.__exit__(None, None, None)


API_CALLS = _ApiCalls()


def call_grpc(data: bytes) -> None:
    """The whole path of a request, on a simulated cluster: the first byte chooses the method."""
    method = UNARY[data[0] % len(UNARY) if data else 0]
    try:
        API_CALLS.call(method, data[1:])
    except RemoteError as error:
        if error.code is ErrorCode.UNKNOWN_SERVER_ERROR:
            raise AssertionError(f"{method.full_name}: {error}") from error
        raise


# Logins.


def log_in(data: bytes) -> None:
    """The first byte chooses the mechanism and the side; each further frame has its length in two bytes in front."""
    kind, frames = data[0] if data else 0, _frames(data[1:])
    mechanism = ALL[kind % len(ALL)]
    if kind & 0x80:
        client = begin_as_client(mechanism, seeds.USER, Secret(seeds.PASSWORD), random.Random(seeds.CLIENT_SEED))
        client.first()
        sent = [client.step(frame) for frame in frames]
        assert client.is_complete == (None in sent)
        return
    server = server_of(seeds.users(), mechanism, seed=seeds.SERVER_SEED)
    outcomes = [pass_frame(server, frame) for frame in frames]
    for outcome in outcomes:
        if isinstance(outcome, Done):
            assert outcome.principal.name == seeds.USER
    if not outcomes or isinstance(outcomes[-1], Failed):
        raise SaslAuthenticationError(FAILURE_TEXT)


def _frames(data: bytes) -> Iterator[bytes]:
    while len(data) > 2:
        end = 2 + int.from_bytes(data[:2], "big")
        yield data[2:end]
        data = data[end:]


def read_certificate(data: bytes) -> None:
    """Mapping rules, with their length in front, and a certificate."""
    size = data[0] if data else 0
    try:
        mapping = PrincipalMapping(data[1 : 1 + size].decode("utf-8", "replace"))
        assert mapping.principal(data[1 + size :]).name
    except UserWarning:
        raise NoPrincipalError("an attribute is longer than X.520 allows") from None


# Configuration.


@cache
def _directory() -> Path:
    return Path(tempfile.mkdtemp(prefix="tidelog-fuzz-"))


def read_configuration(data: bytes) -> None:
    """A node's file: TOML, or server.properties if the first byte is even."""
    path = _directory() / ("server.properties" if data[:1] < b"a" else "node.toml")
    path.write_bytes(data[1:])
    config.load(str(path), {})


def read_addresses(data: bytes) -> None:
    text = data.decode("utf-8", "replace")
    for reader in (listeners.parse_address, listeners.parse_uri, storage.parse_controllers):
        with contextlib.suppress(ValueError, TidelogError):
            reader(text)


TARGETS: dict[str, Target] = {
    "batch": Target(read_batch, seeds.batches),
    "segment": Target(read_segment, seeds.segments),
    "index": Target(read_index, seeds.indexes),
    "stored-state": Target(read_stored_state, seeds.stored_state_values),
    "raft": Target(read_raft, seeds.raft),
    "replication": Target(read_replication, seeds.replication_frames),
    "metadata-records": Target(read_metadata_records, seeds.metadata_records),
    "metadata-requests": Target(read_metadata_request, seeds.metadata_requests),
    "metadata-snapshot": Target(read_metadata_snapshot, seeds.metadata_snapshots),
    "group-records": Target(read_group_records, seeds.group_entries),
    "transaction-records": Target(read_transaction_records, seeds.transaction_records),
    "consumer-protocol": Target(read_consumer_protocol, seeds.consumer_protocols),
    "kafka": Target(read_kafka_request, seeds.kafka_requests, (TidelogError, MalformedError)),
    "grpc": Target(call_grpc, seeds.grpc_requests),
    "logins": Target(log_in, seeds.logins),
    "certificates": Target(read_certificate, seeds.certificates, (MappingRulesError, NoPrincipalError)),
    "configuration": Target(read_configuration, seeds.configurations, (config.ConfigError, SourceError)),
    "addresses": Target(read_addresses, seeds.addresses),
}
