"""Clients without a cluster, with the signatures of the real ones: they record what they are asked, and do as a test
says. Where behaviour matters more than calls, `MemoryCluster` is the whole thing."""

from tidelog.testing.mock_admin import MockAdmin
from tidelog.testing.mock_consumer import MockConsumer
from tidelog.testing.mock_producer import MockProducer, SentRecord

__all__ = ["MockAdmin", "MockConsumer", "MockProducer", "SentRecord"]
