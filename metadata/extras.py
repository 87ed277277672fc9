"""Fields of newer versions, kept beside the image so that a snapshot gives them back (R14).

A record may carry fields that this version does not know (`Record.extra`). They belong to the thing that the record is
about, and live as long as it does: `ClusterImage.extras` maps (record type, what it is about) to them. A record that
makes or sets a thing replaces what was kept for it; a record that changes one is merged, field by field, as its other
fields are. In a snapshot they stand on a record of the type that they came with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tidelog.metadata import records as r
from tidelog.metadata.records import Extra, Record
from tidelog.model.maps import updated

if TYPE_CHECKING:
    from tidelog.metadata.image import ClusterImage

ExtraKey = tuple[Any, ...]


def extra_key(record: Record) -> ExtraKey | None:
    """What the unknown fields of this record belong to; None if to nothing that lasts (or to the record itself)."""
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


def _merged(kept: Extra, new: Extra) -> Extra:
    return tuple(sorted({**dict(kept), **dict(new)}.items(), key=lambda pair: str(pair[0])))


def _dropped(before: ClusterImage, record: Record) -> list[ExtraKey]:
    """What goes with the thing that this record removes or makes anew."""
    match record:
        case r.RegisterBroker():
            return [(r.ChangeBroker.TYPE, record.broker)]
        case r.UnregisterBroker():
            return [(r.RegisterBroker.TYPE, record.broker), (r.ChangeBroker.TYPE, record.broker)]
        case r.RemoveTopic():
            topic = before.topics[record.topic_id]
            named = [
                key
                for key in before.extras
                if len(key) > 1 and (key[1] == record.topic_id or key[:3] == (r.SetConfig.TYPE, "topic", topic.name))
            ]
            return sorted(named, key=str)
    return []


def with_extras(before: ClusterImage, extras: Any, record: Record) -> Any:
    """The extras after a record that was applied to `before`."""
    gone = [(key, None) for key in _dropped(before, record)]
    if gone:
        extras = updated(extras, gone)
    key = extra_key(record)
    if key is None:
        return extras
    if isinstance(record, r.ChangeBroker | r.ChangePartition):
        if not record.extra:
            return extras
        return extras.set(key, _merged(extras.get(key, ()), record.extra))
    keep = record.extra if record.extra and not _is_removal(record) else None
    return updated(extras, [(key, keep)])
