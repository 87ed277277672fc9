"""`tidelog.errors`, under the name that programs import."""

from tidelog.client.public_errors import *  # noqa: F403
from tidelog.client.public_errors import __all__ as __all__
