"""`tidelog.verify`, under the name that programs import."""

from tidelog.client.verify import *  # noqa: F403
from tidelog.client.verify import __all__ as __all__
