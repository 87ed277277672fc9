"""The cluster's state as a tree of plain values, and parts of it as tables. Ids are in Kafka's form.

/features /brokers /topics /configs /quotas /users /acls /producer_ids /voters
/topics/orders/partitions/0
"""

import base64
import dataclasses
import difflib
from collections.abc import Mapping
from typing import IO, Any
from uuid import UUID

from tidelog.cli import table
from tidelog.cli.metadata_reading import Line, MetadataState
from tidelog.metadata.image import Broker, ClusterImage, Partition, Topic
from tidelog.metadata.records import SetUser, UnknownRecord
from tidelog.model.admin_errors import ResourceNotFoundError
from tidelog.model.maps import sorted_items
from tidelog.model.uuids import to_text
from tidelog.raft.membership import Member, Membership

Tree = dict[str, Any]
HIDDEN = "(hidden)"


def tree(state: MetadataState) -> Tree:
    image = state.image
    return {
        "offset": state.offset,
        "epoch": state.epoch,
        "voters": [_member(member) for member in state.membership.voters],
        "learners": [_member(member) for member in state.membership.learners],
        "features": dict(sorted_items(image.features)),
        "brokers": {str(number): _broker(broker) for number, broker in sorted_items(image.brokers)},
        "topics": {name: _topic(image, image.topics[image.topic_ids[name]]) for name in sorted(image.topic_ids)},
        "configs": _configs(image),
        "quotas": [
            {"entity": dict(entity), "values": dict(sorted_items(values))}
            for entity, values in sorted(image.quotas.items(), key=lambda item: str(item[0]))
        ],
        "users": [
            {"user": user, "mechanism": mechanism, "iterations": known.iterations}
            for (user, mechanism), known in sorted_items(image.users)
        ],
        "acls": [plain(acl) for _, acl in sorted_items(image.acls)],
        "next_producer_id": image.next_producer_id,
        "unknown_records": len(image.unknown),
    }


def _member(member: Member) -> Tree:
    return {
        "node": member.node,
        "directory_id": to_text(UUID(bytes=member.directory)),
        "endpoints": dict(member.endpoints),
    }


def _broker(broker: Broker) -> Tree:
    return {
        "broker": broker.broker,
        "epoch": broker.broker_epoch,
        "incarnation": to_text(broker.incarnation),
        "endpoints": {name: f"{host}:{port}" for name, _, host, port in broker.endpoints},
        "rack": broker.rack,
        "fenced": broker.fenced,
        "stopping": broker.in_controlled_shutdown,
        "draining": broker.draining,
        "directories": [to_text(directory) for directory in broker.directories],
        "offline_directories": [to_text(directory) for directory in broker.offline],
    }


def _topic(image: ClusterImage, topic: Topic) -> Tree:
    return {
        "name": topic.name,
        "topic_id": to_text(topic.topic_id),
        "configs": dict(sorted_items(image.config("topic", topic.name))),
        "partitions": {str(number): _partition(number, one) for number, one in sorted_items(topic.partitions)},
    }


def _partition(number: int, partition: Partition) -> Tree:
    return {
        "partition": number,
        "leader": partition.leader,
        "leader_epoch": partition.leader_epoch,
        "partition_epoch": partition.partition_epoch,
        "replicas": list(partition.replicas),
        "isr": list(partition.isr),
        "eligible": list(partition.eligible),
        "recovering": list(partition.recovering),
        "unclean_epoch": partition.unclean_epoch,
        "adding": list(partition.adding),
        "removing": list(partition.removing),
        "start_offset": partition.start_offset,
        "directories": [to_text(directory) for directory in partition.directories],
    }


def _configs(image: ClusterImage) -> Tree:
    found: Tree = {"cluster": {}, "broker": {}, "topic": {}}
    for (kind, resource), values in sorted_items(image.configs):
        rows = dict(sorted_items(values))
        if kind == "cluster":
            found["cluster"] = rows
        else:
            found.setdefault(kind, {})[resource] = rows
    return found


def at_path(whole: Tree, path: str) -> Any:
    """The part of the tree at a path; `ResourceNotFoundError` says what there is instead."""
    found: Any = whole
    walked = ""
    for step in (step for step in path.split("/") if step):
        if isinstance(found, list) and step.isdecimal() and int(step) < len(found):
            found = found[int(step)]
        elif isinstance(found, dict) and step in found:
            found = found[step]
        elif isinstance(found, dict) and step in found.get("partitions", {}):
            found = found["partitions"][step]
        else:
            names = [str(name) for name in found] if isinstance(found, dict) else []
            near = difflib.get_close_matches(step, names, n=1, cutoff=0.5)
            there = f"did you mean {near[0]!r}?" if near else f"there is: {', '.join(names[:20]) or 'nothing'}"
            raise ResourceNotFoundError(f"{walked or '/'} has no {step!r}; {there}")
        walked += f"/{step}"
    return found


# For a person.


def write(stream: IO[str], value: Any, path: str) -> None:
    steps = [step for step in path.split("/") if step]
    if not steps:
        _write_summary(stream, value)
    elif steps == ["topics"]:
        rows = [
            [name, one["topic_id"], len(one["partitions"]), len(_first(one["partitions"])["replicas"])]
            for name, one in value.items()
        ]
        table.write(stream, ["topic", "id", "partitions", "replicas"], rows, right=["partitions", "replicas"])
    elif steps[0] == "topics" and len(steps) == 2:
        print(f"{value['name']}, id {value['topic_id']}", file=stream)
        _write_pairs(stream, value["configs"])
        _write_rows(stream, list(value["partitions"].values()), without=("directories",))
    elif isinstance(value, dict) and value and all(isinstance(one, dict) and one for one in value.values()):
        parts: list[Tree] = list(value.values())
        alike = all(one.keys() == parts[0].keys() for one in parts)
        if alike and steps[0] in ("brokers", "topics"):
            _write_rows(stream, parts, without=("directories", "incarnation"))
        else:
            for name, one in value.items():
                print(name, file=stream)
                _write_pairs(stream, one)
    elif isinstance(value, dict):
        _write_pairs(stream, value, indent="")
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        _write_rows(stream, value)
    else:
        print(_cell(value), file=stream)


def _write_summary(stream: IO[str], whole: Tree) -> None:
    partitions = sum(len(topic["partitions"]) for topic in whole["topics"].values())
    fenced = sum(1 for broker in whole["brokers"].values() if broker["fenced"])
    rows = [
        ["offset", whole["offset"]],
        ["epoch", whole["epoch"]],
        ["voters", ", ".join(f"{m['node']}@{_first(m['endpoints'] or {'': '?'})}" for m in whole["voters"])],
        ["brokers", f"{len(whole['brokers'])}, {fenced} of them fenced"],
        ["topics", len(whole["topics"])],
        ["partitions", partitions],
        ["features", ", ".join(f"{name}={level}" for name, level in whole["features"].items())],
    ]
    table.write(stream, ["what", "value"], rows)


def _write_rows(stream: IO[str], rows: list[Tree], *, without: tuple[str, ...] = ()) -> None:
    headings = [key for key in rows[0] if key not in without]
    table.write(stream, headings, [[_cell(row[key]) for key in headings] for row in rows])


def _write_pairs(stream: IO[str], pairs: Mapping[str, Any], indent: str = "  ") -> None:
    for key, value in pairs.items():
        print(f"{indent}{key}: {_cell(value)}", file=stream)


def _cell(value: Any) -> Any:
    if isinstance(value, dict):
        return ", ".join(f"{key}={_cell(one)}" for key, one in value.items()) or "-"
    if isinstance(value, list):
        return ",".join(str(_cell(one)) for one in value) or "-"
    return value


def _first(values: Mapping[str, Any]) -> Any:
    return next(iter(values.values()))


# Records.


def plain(value: Any) -> Any:
    """A record, or a value of one, in JSON's types."""
    if isinstance(value, UUID):
        return to_text(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, tuple | list):
        return [plain(one) for one in value]
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        pairs = [(one.name, getattr(value, one.name)) for one in dataclasses.fields(value)]
        return {name: plain(one) for name, one in pairs if name != "extra" or one}
    return value


def line_document(line: Line) -> Tree:
    """A line of `metadata dump`; keys are listed in docs/cli.md."""
    record = line.record
    if record is None:
        kind, fields = "BeginEpoch", {}
    elif isinstance(record, Membership):
        kind, fields = (
            "Membership",
            {
                "voters": [_member(member) for member in record.voters],
                "learners": [_member(member) for member in record.learners],
            },
        )
    else:
        kind, fields = type(record).__name__, plain(record)
        if isinstance(record, UnknownRecord):
            kind = f"Unknown{record.type}"
        if isinstance(record, SetUser):
            fields |= {"salt": HIDDEN, "stored_key": HIDDEN, "server_key": HIDDEN}
    return {"offset": line.offset, "epoch": line.epoch, "type": kind, "fields": fields, "source": line.source}
