"""Fields of newer versions, kept beside the image so that a snapshot contains them. Pure.

A record may have unknown fields (`Record.extra`). They belong to the object of the record and live as long as it does:
`ClusterImage.unknown_fields` maps (record type, object) to them. A record that creates or sets an object replaces its
unknown fields; a record that changes one is merged, field by field. A snapshot writes them on a record of their type.
"""

from typing import Any, Protocol
from uuid import UUID

from tidelog.metadata import records as r
from tidelog.metadata.records import Record, UnknownFields
from tidelog.model.maps import Map, updated

FieldOwner = tuple[Any, ...]


class Image(Protocol):
    """The part of `metadata.image.ClusterImage` that unknown fields depend on."""

    @property
    def topics(self) -> Map[UUID, Any]: ...

    @property
    def unknown_fields(self) -> Map[FieldOwner, UnknownFields]: ...


def field_owner(record: Record) -> FieldOwner | None:
    """Returns the owner of this record's unknown fields; None if there is no lasting one."""
    match record:
        case r.FeatureLevel():
            return (record.TYPE, record.name)
        case r.RegisterBroker() | r.ChangeBroker():
            return (record.TYPE, record.broker)
        case r.CreateTopic():
            return (record.TYPE, record.topic_id)
        case r.CreatePartition() | r.ChangePartition():
            return (record.TYPE, record.topic_id, record.partition)
        case r.SetConfig():
            return (record.TYPE, record.resource_type, record.resource, record.key)
        case r.SetQuota():
            return (record.TYPE, record.entity, record.key)
        case r.SetUser():
            return (record.TYPE, record.user, record.mechanism)
        case r.AllocateProducerIds():
            return (record.TYPE,)
    return None


def _is_removal(record: Record) -> bool:
    match record:
        case r.FeatureLevel():
            return record.level == 0
        case r.SetConfig() | r.SetQuota():
            return record.value is None
        case r.SetUser():
            return not record.salt
    return False


def _merged(kept: UnknownFields, new: UnknownFields) -> UnknownFields:
    return tuple(sorted({**dict(kept), **dict(new)}.items(), key=lambda pair: str(pair[0])))


def _dropped(before: Image, record: Record) -> list[FieldOwner]:
    """Returns the owners that this record removes or creates again."""
    match record:
        case r.RegisterBroker():
            return [(r.ChangeBroker.TYPE, record.broker)]
        case r.UnregisterBroker():
            return [(r.RegisterBroker.TYPE, record.broker), (r.ChangeBroker.TYPE, record.broker)]
        case r.RemoveTopic():
            topic = before.topics[record.topic_id]
            named = [
                key
                for key in before.unknown_fields
                if len(key) > 1 and (key[1] == record.topic_id or key[:3] == (r.SetConfig.TYPE, "topic", topic.name))
            ]
            return sorted(named, key=str)
    return []


def with_unknown_fields(before: Image, unknown_fields: Any, record: Record) -> Any:
    """Returns the unknown fields after a record that was applied to `before`."""
    gone = [(key, None) for key in _dropped(before, record)]
    if gone:
        unknown_fields = updated(unknown_fields, gone)
    key = field_owner(record)
    if key is None:
        return unknown_fields
    if isinstance(record, r.ChangeBroker | r.ChangePartition):
        if not record.extra:
            return unknown_fields
        return unknown_fields.set(key, _merged(unknown_fields.get(key, ()), record.extra))
    keep = record.extra if record.extra and not _is_removal(record) else None
    return updated(unknown_fields, [(key, keep)])
