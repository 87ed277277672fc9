"""`tidelog.serializers`, under the name that programs import."""

from tidelog.client.serializers import *  # noqa: F403
from tidelog.client.serializers import __all__ as __all__
