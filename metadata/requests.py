"""Encodes requests and replies of the controller. Pure.

    [message type: int, {field id: value}]      msgpack; a nested value is {field id: value} too

Field ids are the order of the fields of a class, for ever: fields are only added at the end, with a default. A field
with its default is not sent. An unknown field would change the meaning of a request, so it is rejected
(UNSUPPORTED_VERSION), as is an unknown message type. Decoding checks everything against the field's type and bounds,
before anything is decided: an invalid value is INVALID_REQUEST and names the field.

An error is a message of type 0: the catalogue's error name and the message.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints
from uuid import UUID

import msgpack

from tidelog.metadata import (
    acls,
    brokers,
    config_changes,
    decision,
    features,
    lost_replicas,
    partitions,
    producer_ids,
    queries,
    quotas,
    reassignments,
    recovering_replicas,
    topics,
    users,
)
from tidelog.model.errors import ErrorCode, InvalidRequestError, RemoteError, TidelogError, UnsupportedVersionError

REQUEST_BYTES_MAX = 8 << 20
REPLY_BYTES_MAX = 48 << 20
ITEMS_MAX = 200_000
TEXT_LENGTH_MAX = 65_536
BYTES_MAX = 65_536
INT_MIN, INT_MAX = -(1 << 63), (1 << 63) - 1

M = TypeVar("M")
_ERROR = 0
REQUESTS: dict[int, type[Any]] = {
    1: brokers.Register,
    2: brokers.Heartbeat,
    3: brokers.Fence,
    4: brokers.Unregister,
    5: brokers.Drain,
    6: topics.CreateTopics,
    7: topics.DeleteTopics,
    8: topics.AddPartitions,
    9: topics.AdvanceLogStart,
    10: partitions.AlterPartition,
    11: partitions.ElectLeaders,
    12: partitions.BalanceLeaders,
    13: partitions.AssignDirectories,
    14: reassignments.AlterReassignments,
    15: reassignments.GrowInternalTopics,
    16: config_changes.AlterConfigs,
    17: quotas.AlterQuotas,
    18: producer_ids.AllocateProducerIdBlock,
    19: features.UpdateFeatures,
    20: users.AlterUsers,
    21: acls.CreateAcls,
    22: acls.DeleteAcls,
    23: lost_replicas.ReplicasLost,
    24: partitions.ElectMissingLeaders,
    25: recovering_replicas.ReplicasRecovered,
    26: partitions.ReportLogEnds,
    40: queries.DescribeTopics,
    41: queries.DescribeBrokers,
    42: queries.DescribeConfigs,
    43: queries.ListReassignments,
    44: queries.DescribeAcls,
    45: queries.DescribeQuotas,
    46: queries.DescribeUsers,
    47: queries.DescribeFeatures,
    48: queries.FindTopics,
}
REPLIES: dict[int, type[Any]] = {
    1: brokers.Registered,
    2: brokers.HeartbeatReply,
    3: decision.Done,
    4: brokers.Drained,
    5: topics.CreatedTopics,
    6: decision.Outcomes,
    7: partitions.AlteredPartitions,
    8: partitions.LeadersMoved,
    9: producer_ids.ProducerIdBlock,
    10: acls.DeletedAcls,
    11: lost_replicas.ReportedLost,
    40: queries.DescribedTopics,
    41: queries.DescribedBrokers,
    42: queries.DescribedConfigs,
    43: queries.ListedReassignments,
    44: queries.DescribedAcls,
    45: queries.DescribedQuotas,
    46: queries.DescribedUsers,
    47: queries.DescribedFeatures,
    48: queries.FoundTopics,
}
_UUID_EXT = 1


class _MisfitError(Exception):
    """A value that is not of its field's type; becomes INVALID_REQUEST with the whole path."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path.lstrip('.')}: {problem}" if path else problem)


# Values to msgpack.


_AS_IT_IS = frozenset({int, str, bytes, bool, float, type(None)})
_FIELDS: dict[type, tuple[tuple[int, str, Any], ...]] = {}
"""(number, name, default) of the fields of each dataclass seen so far."""


def _plain(value: Any) -> Any:
    kind = type(value)
    if kind in _AS_IT_IS:
        return value
    if kind is tuple:
        return [_plain(item) for item in value]
    if kind is UUID:
        return msgpack.ExtType(_UUID_EXT, value.bytes)
    if kind is ErrorCode:
        return value.name
    rows = _FIELDS.get(kind)
    if rows is None:
        rows = _FIELDS[kind] = tuple((at, f.name, f.default) for at, f in enumerate(dataclasses.fields(value)))
    plain: dict[int, Any] = {}
    for number, name, default in rows:
        held = getattr(value, name)
        if default is dataclasses.MISSING or held != default:
            plain[number] = _plain(held)
    return plain


# msgpack to values, by the types of the fields.

Reader = Callable[[Any, str], Any]
_READERS: dict[Any, Reader] = {}


def _reader(hint: Any) -> Reader:
    """Returns the function that checks and converts a value of this type; created once for each type."""
    found = _READERS.get(hint)
    if found is None:
        found = _READERS[hint] = _made_reader(hint)
    return found


def _made_reader(hint: Any) -> Reader:
    origin = get_origin(hint)
    if hint in _PRIMITIVES:
        return _PRIMITIVES[hint]
    if origin is tuple:
        items = get_args(hint)
        if len(items) == 2 and items[1] is Ellipsis:
            return _list_reader(_reader(items[0]))
        return _row_reader([_reader(item) for item in items])
    if origin in (Union, types.UnionType):
        choices = [choice for choice in get_args(hint) if choice is not type(None)]
        assert len(choices) == 1, f"{hint} is not one type or None"
        inner = _reader(choices[0])
        return lambda value, path: None if value is None else inner(value, path)
    assert isinstance(hint, type) and dataclasses.is_dataclass(hint), f"{hint} has no wire form"  # noqa: PT018
    return _class_reader(hint)


def _integer(value: Any, path: str) -> int:
    if type(value) is not int or not INT_MIN <= value <= INT_MAX:
        raise _MisfitError(path, "an integer of 64 bits is needed")
    return value


def _number(value: Any, path: str) -> float:
    if type(value) not in (int, float):
        raise _MisfitError(path, "a number is needed")
    return float(value)


def _flag(value: Any, path: str) -> bool:
    if type(value) is not bool:
        raise _MisfitError(path, "true or false is needed")
    return value


def _text(value: Any, path: str) -> str:
    if type(value) is not str or len(value) > TEXT_LENGTH_MAX:
        raise _MisfitError(path, f"text of at most {TEXT_LENGTH_MAX} characters is needed")
    return value


def _bytes(value: Any, path: str) -> bytes:
    if type(value) is not bytes or len(value) > BYTES_MAX:
        raise _MisfitError(path, f"at most {BYTES_MAX} bytes are needed")
    return value


def _uuid(value: Any, path: str) -> UUID:
    if not isinstance(value, UUID):
        raise _MisfitError(path, "a UUID is needed")
    return value


def _error_code(value: Any, path: str) -> ErrorCode:
    if type(value) is not str:
        raise _MisfitError(path, "the name of an error is needed")
    # A newer peer may know errors that this version does not.
    return ErrorCode.__members__.get(value, ErrorCode.UNKNOWN_SERVER_ERROR)


_PRIMITIVES: dict[Any, Reader] = {
    int: _integer,
    float: _number,
    bool: _flag,
    str: _text,
    bytes: _bytes,
    UUID: _uuid,
    ErrorCode: _error_code,
}


def _list_reader(item: Reader) -> Reader:
    def read(value: Any, path: str) -> tuple[Any, ...]:
        if type(value) is not list or len(value) > ITEMS_MAX:
            raise _MisfitError(path, f"a list of at most {ITEMS_MAX} is needed")
        return tuple(item(entry, f"{path}[{number}]") for number, entry in enumerate(value))

    return read


def _row_reader(items: list[Reader]) -> Reader:
    def read(value: Any, path: str) -> tuple[Any, ...]:
        if type(value) is not list or len(value) != len(items):
            raise _MisfitError(path, f"a list of {len(items)} is needed")
        return tuple(item(entry, f"{path}[{at}]") for at, (item, entry) in enumerate(zip(items, value, strict=True)))

    return read


def _class_reader(cls: type[Any]) -> Reader:
    hints = get_type_hints(cls)
    fields = dataclasses.fields(cls)
    readers = [(field.name, _reader(hints[field.name])) for field in fields]
    needed = frozenset(field.name for field in fields if field.default is dataclasses.MISSING)

    def read(value: Any, path: str) -> Any:
        if type(value) is not dict:
            raise _MisfitError(path, f"the fields of {cls.__name__} are needed")
        known: dict[str, Any] = {}
        for number, held in value.items():
            if type(number) is not int or number < 0:
                raise _MisfitError(path, "fields are numbered from 0")
            if number >= len(readers):
                raise UnsupportedVersionError(f"{cls.__name__} has no field {number} in this version")
            name, reader = readers[number]
            known[name] = reader(held, f"{path}.{name}")
        missing = needed - known.keys()
        if missing:
            raise _MisfitError(path, f"{cls.__name__} lacks {', '.join(sorted(missing))}")
        return cls(**known)

    return read


for _cls in (*REQUESTS.values(), *REPLIES.values()):
    _reader(_cls)

_REQUEST_NUMBERS = {cls: number for number, cls in REQUESTS.items()}
_REPLY_NUMBERS = {cls: number for number, cls in REPLIES.items()}


def _unpack_ext(code: int, data: bytes) -> UUID:
    if code != _UUID_EXT or len(data) != 16:
        raise ValueError(f"unknown extension {code}")
    return UUID(bytes=data)


def _unpack(data: bytes, bytes_max: int) -> tuple[int, Any]:
    if len(data) > bytes_max:
        raise InvalidRequestError(f"a message of {len(data)} bytes: at most {bytes_max}")
    try:
        raw = msgpack.unpackb(data, strict_map_key=False, ext_hook=_unpack_ext)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise InvalidRequestError(f"not a message: {error or type(error).__name__}") from error
    if type(raw) is not list or len(raw) != 2 or type(raw[0]) is not int:
        raise InvalidRequestError("a message is a type and its fields")
    return raw[0], raw[1]


def encode_request(request: object) -> bytes:
    return bytes(msgpack.packb([_REQUEST_NUMBERS[type(request)], _plain(request)]))


def decode_request(data: bytes) -> Any:
    """Decodes a request or query; raises `InvalidRequestError` or `UnsupportedVersionError`."""
    number, fields = _unpack(data, REQUEST_BYTES_MAX)
    cls = REQUESTS.get(number)
    if cls is None:
        raise UnsupportedVersionError(f"this version has no request of type {number}")
    try:
        return _reader(cls)(fields, "")
    except _MisfitError as error:
        raise InvalidRequestError(f"{cls.__name__}: {error}") from None


def encode_reply(reply: object) -> bytes:
    """Encodes a reply, or the error that was raised instead of one."""
    if isinstance(reply, TidelogError):
        return bytes(msgpack.packb([_ERROR, [reply.code.name, str(reply)]]))
    return bytes(msgpack.packb([_REPLY_NUMBERS[type(reply)], _plain(reply)]))


def decode_reply(data: bytes) -> Any:
    """Decodes a reply; raises `RemoteError` if the request was rejected."""
    number, fields = _unpack(data, REPLY_BYTES_MAX)
    try:
        if number == _ERROR:
            name, message = _row_reader([_text, _text])(fields, "")
            raise RemoteError(message, code=_error_code(name, ""))
        cls = REPLIES.get(number)
        if cls is None:
            raise UnsupportedVersionError(f"this version has no reply of type {number}")
        return _reader(cls)(fields, "")
    except _MisfitError as error:
        raise InvalidRequestError(f"reply {number}: {error}") from None


# Messages between services of two nodes: the name of the call selects the class.


def encode_message(message: object) -> bytes:
    """Encode any dataclass whose fields have types that requests may have."""
    return bytes(msgpack.packb(_plain(message)))


def decode_message(cls: type[M], data: bytes, *, bytes_max: int = REPLY_BYTES_MAX) -> M:
    """Return the dataclass; raises `InvalidRequestError` or `UnsupportedVersionError` as `decode_request` does."""
    if len(data) > bytes_max:
        raise InvalidRequestError(f"{cls.__name__}: {len(data)} bytes; at most {bytes_max} are allowed")
    try:
        raw = msgpack.unpackb(data, strict_map_key=False, ext_hook=_unpack_ext)
        message: M = _reader(cls)(raw, "")
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise InvalidRequestError(f"{cls.__name__} cannot be decoded: {error or type(error).__name__}") from error
    except _MisfitError as error:
        raise InvalidRequestError(f"{cls.__name__}: {error}") from None
    return message


# The checks of the wire for a request that is not encoded.

Check = Callable[[Any, str], int]
"""Raises `_MisfitError`; returns about how many bytes the value takes when it is encoded."""
_CHECKS: dict[Any, Check] = {}


def check_request(request: object) -> None:
    """Raise the `InvalidRequestError` that `decode_request` would raise for this request."""
    name = type(request).__name__
    try:
        size = _check(type(request))(request, "")
    except _MisfitError as error:
        raise InvalidRequestError(f"{name}: {error}") from None
    if size > REQUEST_BYTES_MAX:
        raise InvalidRequestError(f"a message of {size} bytes: at most {REQUEST_BYTES_MAX}")


def _check(hint: Any) -> Check:
    """The function that checks a value of this type; made once for each type."""
    check = _CHECKS.get(hint)
    if check is None:
        check = _CHECKS[hint] = _made_check(hint)
    return check


def _made_check(hint: Any) -> Check:
    if hint in _PRIMITIVES:
        return _primitive_check(_PRIMITIVES[hint])
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is tuple:
        is_list = len(arguments) == 2 and arguments[1] is Ellipsis
        return _list_check(_check(arguments[0])) if is_list else _row_check([_check(item) for item in arguments])
    if origin in (Union, types.UnionType):
        inner = _check(next(choice for choice in arguments if choice is not type(None)))
        return lambda value, path: 1 if value is None else inner(value, path)
    hints = get_type_hints(hint)
    return _fields_check(hint, [(field.name, _check(hints[field.name])) for field in dataclasses.fields(hint)])


def _primitive_check(read: Reader) -> Check:
    def check(value: Any, path: str) -> int:
        read(value.name if isinstance(value, ErrorCode) else value, path)
        return 1 + (len(value) if isinstance(value, str | bytes) else 0)

    return check


def _list_check(item: Check) -> Check:
    def check(value: Any, path: str) -> int:
        if type(value) is not tuple or len(value) > ITEMS_MAX:
            raise _MisfitError(path, f"a list of at most {ITEMS_MAX} is needed")
        return 1 + sum(item(entry, f"{path}[{number}]") for number, entry in enumerate(value))

    return check


def _row_check(items: list[Check]) -> Check:
    def check(value: Any, path: str) -> int:
        if type(value) is not tuple or len(value) != len(items):
            raise _MisfitError(path, f"a list of {len(items)} is needed")
        return 1 + sum(item(entry, f"{path}[{at}]") for at, (item, entry) in enumerate(zip(items, value, strict=True)))

    return check


def _fields_check(cls: type[Any], fields: list[tuple[str, Check]]) -> Check:
    def check(value: Any, path: str) -> int:
        if type(value) is not cls:
            raise _MisfitError(path, f"the fields of {cls.__name__} are needed")
        return 1 + sum(item(getattr(value, name), f"{path}.{name}") for name, item in fields)

    return check
