"""Tidelog: a streaming log cluster.

What a program uses stands here, and is imported when it is first asked for: `import tidelog` costs next to nothing.

    Producer, Consumer, Admin     clients of a cluster; `aio` has them for event loops
    serializers                   objects to bytes and back
    read_arrow                    records of a topic as a table
    errors                        what may go wrong
    verify                        checkers of recorded histories
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidelog import aio as aio
    from tidelog import errors as errors
    from tidelog import serializers as serializers
    from tidelog import verify as verify
    from tidelog.client.admin_facade import Admin as Admin
    from tidelog.client.admin_values import ConfigResource as ConfigResource
    from tidelog.client.admin_values import NewTopic as NewTopic
    from tidelog.client.bulk import BulkDelivery as BulkDelivery
    from tidelog.client.consumer import Consumer as Consumer
    from tidelog.client.hot import Delivery as Delivery
    from tidelog.client.hot import RecordMetadata as RecordMetadata
    from tidelog.client.producer import Producer as Producer
    from tidelog.client.read_arrow import read_arrow as read_arrow
    from tidelog.client.record import ConsumerRecord as ConsumerRecord
    from tidelog.client.record import OffsetAndMetadata as OffsetAndMetadata
    from tidelog.client.record import TopicPartition as TopicPartition
    from tidelog.client.records import ProducerRecord as ProducerRecord
    from tidelog.model.errors import TidelogError as TidelogError

__version__ = "0.1.0"

_HOMES = {
    "Admin": "tidelog.client.admin_facade",
    "BulkDelivery": "tidelog.client.bulk",
    "ConfigResource": "tidelog.client.admin_values",
    "Consumer": "tidelog.client.consumer",
    "ConsumerRecord": "tidelog.client.record",
    "Delivery": "tidelog.client.hot",
    "NewTopic": "tidelog.client.admin_values",
    "OffsetAndMetadata": "tidelog.client.record",
    "Producer": "tidelog.client.producer",
    "ProducerRecord": "tidelog.client.records",
    "RecordMetadata": "tidelog.client.hot",
    "TidelogError": "tidelog.model.errors",
    "TopicPartition": "tidelog.client.record",
    "aio": "tidelog.aio",
    "errors": "tidelog.errors",
    "read_arrow": "tidelog.client.read_arrow",
    "serializers": "tidelog.serializers",
    "verify": "tidelog.verify",
}
"""Where each public name lives. A name that is its module's is the module itself."""
_MODULES = frozenset({"aio", "errors", "serializers", "verify"})


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'tidelog' has no attribute '{name}'")
    module = import_module(home)
    found = module if name in _MODULES else getattr(module, name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
