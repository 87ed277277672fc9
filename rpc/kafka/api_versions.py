"""ApiVersions: the APIs and versions of this broker, from which a client chooses.

It is the first request of a connection, so this broker may not know its version. Then the response is
UNSUPPORTED_VERSION in version 0, with the table: the client asks again in a version that both know. The response
always has header version 0, whatever the version of its body.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from tidelog.metadata.features import KNOWN_FEATURES
from tidelog.model.errors import ErrorCode
from tidelog.rpc.kafka.entries import Served
from tidelog.rpc.kafka.errors import NONE, code
from tidelog.rpc.kafka.messages import APIS
from tidelog.rpc.kafka.messages import versions as messages
from tidelog.rpc.kafka.services import Context

KEY = 18
_SOFTWARE_SINCE = 3
_FROM_ZERO_SINCE = 4
"""From this version on a feature may begin at level 0; older clients fail on such a row."""
FIXED_FEATURES = {
    "eligible.leader.replicas.version": 1,
    "group.version": 1,
    "kraft.version": 1,
    "transaction.version": 2,
}
"""Features of Kafka that this version always has, at one level, and that are no feature levels of the cluster: eligible
leader replicas, the consumer group protocol, dynamic voters, transactions whose epoch rises with each end."""
_LOWEST = {"transaction.version": 0}
"""Lowest level whose clients are served, where it is not the one level: older producers need no newer one."""
_SOFTWARE = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9\-.]*[a-zA-Z0-9])?")


def add_to(table: dict[int, Served]) -> None:
    """Adds ApiVersions itself, whose response has all rows of the table."""
    api = APIS[KEY]

    async def handle(request: messages.ApiVersionsRequest, context: Context) -> messages.ApiVersionsResponse:
        if context.version >= _SOFTWARE_SINCE and not _is_named(request):
            return messages.ApiVersionsResponse(error_code=code(ErrorCode.INVALID_REQUEST))
        response = messages.ApiVersionsResponse(error_code=NONE, api_keys=rows)
        if context.version >= _SOFTWARE_SINCE:
            _add_features(response, context)
        return response

    table[KEY] = Served(api, handle, api.low, api.high, api.low)
    rows = _rows(table)


def unsupported(table: Mapping[int, Served]) -> messages.ApiVersionsResponse:
    """Returns the response, in version 0, to a version that is not served."""
    return messages.ApiVersionsResponse(error_code=code(ErrorCode.UNSUPPORTED_VERSION), api_keys=_rows(table))


def _rows(table: Mapping[int, Served]) -> list[messages.ApiVersion]:
    return [
        messages.ApiVersion(api_key=key, min_version=served.advertised_low, max_version=served.high)
        for key, served in sorted(table.items())
    ]


def _is_named(request: messages.ApiVersionsRequest) -> bool:
    names = (request.client_software_name, request.client_software_version)
    return all(_SOFTWARE.fullmatch(name) is not None for name in names)


def _add_features(response: messages.ApiVersionsResponse, context: Context) -> None:
    cache = context.services.cache
    response.supported_features = [
        messages.SupportedFeatureKey(name=name, min_version=low, max_version=high)
        for name, (low, high) in sorted({**KNOWN_FEATURES, **_fixed_ranges()}.items())
        if low > 0 or context.version >= _FROM_ZERO_SINCE
    ]
    response.finalized_features_epoch = cache.metadata_offset
    response.finalized_features = [
        messages.FinalizedFeatureKey(name=name, max_version_level=level, min_version_level=level)
        for name, level in sorted({**dict(cache.image.features.items()), **FIXED_FEATURES}.items())
    ]


def _fixed_ranges() -> dict[str, tuple[int, int]]:
    return {name: (_LOWEST.get(name, level), level) for name, level in FIXED_FEATURES.items()}
