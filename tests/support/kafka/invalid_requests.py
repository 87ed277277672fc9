"""Requests that no good client sends, drawn from a seed: well-formed ones with strange values, and mutated bytes.

`Strange` draws a request by its schema. Values go by the names of fields, so that many of them mean something: topics,
groups and members that are there and that are not, offsets, epochs and sessions that an answer has returned (`learn`),
batches that are right but for a byte, numbers from one end to the other. `mutated` breaks the bytes of a whole request.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, TypeVar

from crc32c import crc32c

from support.kafka.mutations import EXTREMES, change
from support.logs.single_log import batch, idempotent
from tidelog.log.batch import Codec
from tidelog.metadata.config_table import TABLES, Scope
from tidelog.model.errors import ErrorCode
from tidelog.rpc.kafka.headers import request_frame
from tidelog.rpc.kafka.messages import APIS
from tidelog.rpc.kafka.messages.data import ProduceRequest
from tidelog.rpc.kafka.messages.groups import (
    ConsumerGroupHeartbeatRequest,
    JoinGroupRequest,
    JoinGroupRequestProtocol,
)
from tidelog.rpc.kafka.messages.transactions import InitProducerIdRequest
from tidelog.rpc.kafka.schema import DEFAULTS, FIELDS, Field, Kind

T = TypeVar("T")

TOPICS = ("strange-0", "strange-1", "strange-2")
"""Made again when they are gone; requests may do with them what they like."""
NAMES = ("", ".", "..", "a b", "x" * 249, "x" * 250, "é" * 40, "line\nbreak", "nul\0", "__consumer_offsets",
         "__cluster_metadata", "not-there", "strange_0", "*")  # fmt: skip
CONSUMERS = ("group-0", "group-1", "group-2")
SHARED = "group-3"
GROUPS = (*CONSUMERS, SHARED, "", "g" * 1_024, "g" * 1_025, "gr\noup", "é")
PATTERNS = ("", ".*", "strange-.", "(", "(a*)*b", "[" * 500, "x" * 2_000)
KEYS = (*(name for table in TABLES.values() for name in table), "", "no.such.key")
TOPIC_KEYS = tuple(TABLES[Scope.TOPIC])
VALUES = ("", "0", "1", "-1", "100", "2147483648", "true", "delete", "compact,delete", "nan", "é", "x" * 9_000, "zstd")
_SMALL = (0, 0, 0, 1, 1, 2, 3, -1, -1, -2, 5, 100)
_BITS = {Kind.INT8: 8, Kind.INT16: 16, Kind.UINT16: 16, Kind.INT32: 32, Kind.INT64: 64}
_WAITS = (0, 0, 0, 1, 20, 50, -1, -(1 << 31), (1 << 31) - 1)
_COUNTS = (-1, 0, 1, 1, 2, 2, 3, 4, -2, 10_001, (1 << 31) - 1, -(1 << 31))
"""Of partitions to make."""
_CALM: dict[str, tuple[int, ...]] = {
    "max_wait_ms": (0, 0, 50, 5_000),
    "timeout_ms": (1_000, 5_000),
    "session_timeout_ms": (6_000, 10_000),
    "rebalance_timeout_ms": (6_000, 10_000),
    "partition_max_bytes": (1 << 20, 100),
    "max_bytes": (1 << 20,),
    "acks": (-1, 1, 0),
    "replica_id": (-1,),
    "isolation_level": (0, 1),
    "current_leader_epoch": (-1,),
    "num_partitions": (1, 2),
    "replication_factor": (1, -1),
    "count": (1, 2, 3),
    "key_type": (0,),
    "min_bytes": (0, 1, 1 << 20),
    "resource_type": (2, 2, 4, 32),
    "config_operation": (0, 1, 2, 3),
}
MEMBER_ID_REQUIRED = ErrorCode.MEMBER_ID_REQUIRED.value.code
LEARNED = ("member_id", "generation_id", "member_epoch", "session_id", "producer_id", "leader_epoch")


class Strange:
    """One stream of requests; `ids` are topic ids that are there. `own` is the name of classic groups that others do
    not name, so that they become stable now and then."""

    def __init__(self, draw: Random, ids: Callable[[], Sequence[bytes]], own: str) -> None:
        self.draw = draw
        self._ids = ids
        self._classic = (f"{own}-0", f"{own}-1", SHARED)
        self._is_calm = False
        """This request is to get far: most of its values are such that a good client could send them."""
        self._members: deque[tuple[str, str, int]] = deque(maxlen=6)
        """(group, member, generation) of classic groups that let us in."""
        self._consumers: deque[tuple[str, str, int]] = deque(maxlen=6)
        self._learned: dict[str, deque[Any]] = {name: deque(maxlen=20) for name in LEARNED}

    def request(self, key: int, version: int) -> Any:
        cls = APIS[key].request
        self._is_calm = self.draw.random() < 0.5
        if self.draw.random() < 0.03:
            return cls()
        made = self._struct(cls, version)
        if self._is_calm and isinstance(made, ProduceRequest | InitProducerIdRequest):
            made.transactional_id = None
        if self._is_calm and self.draw.random() < 0.8:
            self._as_member(made, version)
        return made

    def _as_member(self, made: Any, version: int) -> None:
        """A request of a group as one of its members would send it."""
        draw = self.draw
        if not hasattr(made, "group_id"):
            return
        if isinstance(made, ConsumerGroupHeartbeatRequest):
            group, member_id, epoch = draw.choice([*self._consumers, ("", "", 0), ("", "", 0)])
            made.group_id, made.member_epoch = group or draw.choice(CONSUMERS), epoch
            made.member_id = member_id or (str(draw.randrange(1_000)) if version else "")
            made.instance_id, made.rack_id, made.server_assignor = None, None, None
            if not epoch:
                made.rebalance_timeout_ms, made.topic_partitions = 6_000, []
                made.subscribed_topic_names = [draw.choice(TOPICS)]
                made.subscribed_topic_regex = None
            return
        if isinstance(made, JoinGroupRequest):
            made.protocol_type = "consumer"
            made.protocols = [JoinGroupRequestProtocol(name="range", metadata=self._bytes()[:1_000])]
        if not self._members:
            return
        made.group_id, member_id, generation = draw.choice(self._members)
        for name, value in (
            ("member_id", member_id),
            ("generation_id", generation),
            ("generation_id_or_member_epoch", generation),
            ("group_instance_id", None),
        ):
            if hasattr(made, name):
                setattr(made, name, value)

    def frame(self, key: int, version: int, number: int) -> bytes:
        client_id = self.draw.choice([None, "", "t", "t", "c" * 300, "é\n"])
        body = APIS[key].encode_request(version, self.request(key, version))
        return b"".join(request_frame(APIS[key], version, number, client_id, body))

    def learn_member(self, request: Any, answer: Any) -> None:
        if isinstance(request, JoinGroupRequest) and answer.error_code in (0, MEMBER_ID_REQUIRED):
            self._members.append((request.group_id, answer.member_id, answer.generation_id))
        elif isinstance(request, ConsumerGroupHeartbeatRequest) and answer.member_id:
            self._consumers.append((request.group_id, answer.member_id, answer.member_epoch))

    def learn(self, answer: Any) -> None:
        """Ids and epochs of an answer are what later requests say."""
        if isinstance(answer, list):
            for one in answer[:3]:
                self.learn(one)
        elif type(answer) in FIELDS:
            for one in FIELDS[type(answer)]:
                value = getattr(answer, one.name)
                if one.name in self._learned and value not in (None, "", -1, bytes(16)):
                    self._learned[one.name].append(value)
                elif one.struct is not None:
                    self.learn(value)

    # By kind.

    def _struct(self, cls: type, version: int) -> Any:
        if cls in DEFAULTS and self.draw.random() < 0.5:
            return DEFAULTS[cls]
        values = {one.name: self._value(cls, one, version) for one in FIELDS[cls] if one.within(version)}
        return cls(**values)

    def _value(self, cls: type, one: Field, version: int) -> Any:
        draw = self.draw
        if one.nullable(version) and draw.random() < (0.3 if "instance" in one.name else 0.15):
            return None
        if one.kind is Kind.ARRAY:
            return self._array(cls, one, version)
        if one.kind is Kind.STRUCT:
            assert one.struct is not None
            return self._struct(one.struct, version)
        if draw.random() < 0.1 and one.default is not None and one.kind is not Kind.RECORDS:
            return one.default
        return self._plain(one.kind, one.name, cls.__name__)

    def _array(self, cls: type, one: Field, version: int) -> list[Any]:
        draw = self.draw
        count = draw.choice([0, 1, 1, 1, 2, 3])
        if draw.random() < 0.004:
            count = draw.choice([50, 300])
        assert one.element is not None
        found = [
            self._struct(one.struct, version)
            if one.struct is not None
            else self._plain(one.element, one.name, cls.__name__)
            for _ in range(count)
        ]
        if found and draw.random() < 0.1:
            found.append(found[0])
        return found

    def _plain(self, kind: Kind, name: str, owner: str) -> Any:
        draw = self.draw
        match kind:
            case Kind.BOOL:
                return draw.random() < 0.5
            case Kind.STRING:
                return self._text(name, owner)
            case Kind.UUID:
                known = list(self._ids())
                return draw.choice(known if self._is_calm and known else [*known, bytes(16), draw.randbytes(16)])
            case Kind.RECORDS:
                return self.records()
            case Kind.FLOAT64:
                return draw.choice([0.0, -1.5, 1e300])
            case Kind.BYTES:
                return self._bytes()
            case _:
                return self._number(kind, name)

    def _number(self, kind: Kind, name: str) -> int:
        draw = self.draw
        if name in ("generation_id_or_member_epoch", "generation_id", "member_epoch"):
            reported = [*self._learned["generation_id"], *self._learned["member_epoch"]]
        else:
            reported = list(self._learned.get(name.removeprefix("current_"), ()))
        if self._is_calm and name in _CALM:
            found = draw.choice(_CALM[name])
        elif name in ("max_wait_ms", "timeout_ms"):
            found = draw.choice(_WAITS)
        elif name in ("num_partitions", "count"):
            found = draw.choice(_COUNTS)
        elif name in ("session_timeout_ms", "rebalance_timeout_ms"):
            found = draw.choice([6_000, 6_000, 6_000, 10_000, 0, -1, (1 << 31) - 1])
        elif name in ("partition_max_bytes", "max_bytes"):
            found = draw.choice([1 << 20, 1, 0, -1, (1 << 31) - 1])
        elif name == "acks":
            found = draw.choice([-1, -1, 1, 1, 0, 2, -2])
        elif name in ("replica_id", "isolation_level") and draw.random() < 0.7:
            found = -1 if name == "replica_id" else 0
        elif reported and draw.random() < (0.9 if self._is_calm else 0.6):
            found = int(reported[-1] if self._is_calm else draw.choice(reported))
        elif self._is_calm:
            found = draw.choice([0, 0, 0, 1, -1])
        elif draw.random() < 0.8:
            found = draw.choice(_SMALL)
        else:
            found = draw.choice(EXTREMES)
        bits = _BITS[kind]
        found %= 1 << bits
        return found if kind is Kind.UINT16 or found < 1 << (bits - 1) else found - (1 << bits)

    def _text(self, name: str, owner: str) -> str:
        draw = self.draw
        if draw.random() < (0.01 if self._is_calm else 0.05):
            return draw.choice(
                ["", "x" * 5_000, "x" * 32_767, "\udfff".encode("utf-8", "replace").decode(), "\U0001f600"]
            )
        if "member" in name:
            if self._is_calm:
                return str(draw.choice([*self._learned["member_id"], ""]))
            reported = self._learned["member_id"]
            return str(draw.choice([*reported, *reported, "", "nobody", "m" * 1_025]))
        if "instance" in name or "rack" in name:
            return draw.choice(["static-0", "static-1", "", "x" * 2_000])
        if "regex" in name:
            return draw.choice(PATTERNS)
        if "assignor" in name:
            return draw.choice(["uniform", "range", "", "best"])
        if self._is_calm and ("protocol" in name or "Protocol" in owner):
            return "consumer" if name == "protocol_type" else "range"
        if "protocol" in name or "Protocol" in owner:
            return draw.choice(["consumer", "consumer", "range", "range", "", "connect"])
        if "group" in name or name in ("key", "coordinator_keys", "groups"):
            return draw.choice(self._classic if self._is_calm or draw.random() < 0.7 else GROUPS)
        if "filter" in name:
            return draw.choice(["Stable", "empty", "consumer", "", "NoState"])
        if name == "resource_name":
            return draw.choice([*TOPICS, "1", "", "99", "-1", "x", "group-0"])
        if name in ("configuration_keys",) or ("Config" in owner and name == "name"):
            return draw.choice(TOPIC_KEYS if draw.random() < 0.5 else KEYS)
        if name == "value":
            return draw.choice(VALUES)
        if "client_software" in name:
            return draw.choice(["test", "1.0", "", "-", "x" * 300])
        if "topic" in name or name == "name":
            return draw.choice(TOPICS if self._is_calm or draw.random() < 0.7 else NAMES)
        return draw.choice(["", "x", *NAMES])

    def _bytes(self) -> bytes:
        draw = self.draw
        names = [draw.choice(TOPICS).encode() for _ in range(draw.randrange(3))]
        listed = b"".join(struct.pack(">h", len(one)) + one for one in names)
        good = struct.pack(">hi", draw.randrange(4), len(names)) + listed + struct.pack(">i", -1)
        broken = bytearray(good)
        change(draw, broken)
        return draw.choice([good, good, bytes(broken), b"", draw.randbytes(9), bytes(300_000)])

    def records(self) -> bytes | None:
        draw = self.draw
        size = draw.choice([0, 1, 10, 5_000])
        good = batch(draw.choice([1, 1, 2, 30]), value=b"v" * size, codec=draw.choice(list(Codec)))
        match draw.randrange(9):
            case 0 | 1 | 2:
                return good
            case 3:
                reported = list(self._learned["producer_id"]) or [7]
                return idempotent(draw.choice(_SMALL), producer=draw.choice(reported), epoch=draw.choice([0, 0, 1, -1]))
            case 4:
                return good + draw.choice([good, b"x", bytes(12)])
            case 5:
                return draw.choice([b"", draw.randbytes(draw.randrange(100)), bytes(61), bytes(16) + b"\1" + bytes(90)])
            case _:
                broken = bytearray(good)
                for _ in range(draw.choice([1, 1, 2])):
                    if draw.random() < 0.5 and len(broken) >= 61:
                        self._break_header(broken)
                    else:
                        change(draw, broken)
                if draw.random() < 0.6:
                    # Only a broken batch whose checksum is right is looked at any further.
                    broken[17:21] = crc32c(bytes(broken[21:])).to_bytes(4, "big")
                return bytes(broken)

    def _break_header(self, data: bytearray) -> None:
        """One field of the 61 bytes before the records."""
        at, size = self.draw.choice([(0, 8), (8, 4), (12, 4), (16, 1), (17, 4), (21, 2), (23, 4), (27, 8), (35, 8),
                                     (43, 8), (51, 2), (53, 4), (57, 4)])  # fmt: skip
        data[at : at + size] = (self.draw.choice(EXTREMES) % (1 << 8 * size)).to_bytes(size, "big")


def mutated(draw: Random, frame: bytes) -> bytes:
    """Its size is right, but for one in some: what is tested is the request."""
    body = bytearray(frame[4:])
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        match draw.randrange(8):
            case 0:
                body[0:2] = struct.pack(">h", draw.choice([*APIS, *range(80), -1, 32_767]))
            case 1:
                body[2:4] = struct.pack(">h", draw.choice([*range(20), -1, 32_767, -32_768]))
            case 2:
                body[8:10] = struct.pack(">h", draw.choice([-1, -2, 0, 3, 32_767, -32_768]))
            case 3:
                at = draw.randrange(len(body) + 1)
                body[at : at + 4] = struct.pack(">i", draw.choice([10_000, 99_000, 100_001, 1 << 20, (1 << 31) - 1]))
            case 4:
                at = draw.randrange(len(body) + 1)
                body[at:at] = body[draw.randrange(len(body) + 1) :][:200]
            case _:
                change(draw, body)
    size = len(body)
    if draw.random() < 0.02:
        size = draw.choice([0, 1, 7, -1, -(1 << 31), (1 << 31) - 1, 100 << 20, size + 1, size - 1, size * 2])
    return struct.pack(">i", size) + bytes(body)
