"""`tidelog.aio`, under the name that programs import."""

from tidelog.client.aio import *  # noqa: F403
from tidelog.client.aio import __all__ as __all__
