"""The clients of programs that run on an event loop: `tidelog.aio.Producer`, and its kin.

The same clients as those of the package itself, awaited instead of waited for.
"""

from tidelog.client.aio_admin import Admin
from tidelog.client.aio_consumer import Consumer
from tidelog.client.aio_producer import Producer

__all__ = ["Admin", "Consumer", "Producer"]
