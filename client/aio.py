"""The clients for programs on an event loop: `tidelog.aio.Producer`, `Consumer` and `Admin`.

They have the methods of the threaded clients, as coroutines.
"""

from tidelog.client.admin.aio import Admin
from tidelog.client.consumer.aio import Consumer
from tidelog.client.producer.aio import Producer

__all__ = ["Admin", "Consumer", "Producer"]
