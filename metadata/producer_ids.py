"""Producer ids: the controller allocates them to brokers in blocks, so that each id is used once in the cluster.
Pure."""

from dataclasses import dataclass

from tidelog.metadata.brokers import known_broker
from tidelog.metadata.decision import Context, Decision
from tidelog.metadata.image import ClusterImage
from tidelog.metadata.records import AllocateProducerIds
from tidelog.model.errors import InvalidRequestError

PRODUCER_ID_BLOCK = 1000
PRODUCER_ID_MAX = (1 << 63) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocateProducerIdBlock:
    broker: int
    broker_epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerIdBlock:
    first: int
    count: int


def allocate_producer_ids(
    image: ClusterImage, request: AllocateProducerIdBlock, _context: Context
) -> Decision[ProducerIdBlock]:
    known_broker(image, request.broker, request.broker_epoch)
    first = image.next_producer_id
    if first > PRODUCER_ID_MAX - PRODUCER_ID_BLOCK:
        raise InvalidRequestError("all producer ids are used up")
    record = AllocateProducerIds(
        broker=request.broker, broker_epoch=request.broker_epoch, next_producer_id=first + PRODUCER_ID_BLOCK
    )
    return Decision((record,), ProducerIdBlock(first=first, count=PRODUCER_ID_BLOCK))
