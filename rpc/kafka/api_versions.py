"""ApiVersions: what this broker serves, by which a client chooses what it sends.

It is the first request of a connection, so it may come in a version that this broker does not know. Then the answer is
UNSUPPORTED_VERSION in version 0, with the table: the client asks again in a version that both know. The header of its
answer is of version 0 always, whatever the version of the body.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from tidelog.metadata.features import KNOWN_FEATURES
from tidelog.model.errors import ErrorCode
from tidelog.rpc.kafka.entries import Served
from tidelog.rpc.kafka.errors import NONE, code
from tidelog.rpc.kafka.messages import APIS
from tidelog.rpc.kafka.messages.versions import (
    ApiVersion,
    ApiVersionsRequest,
    ApiVersionsResponse,
    FinalizedFeatureKey,
    SupportedFeatureKey,
)
from tidelog.rpc.kafka.services import Context

KEY = 18
_SOFTWARE_SINCE = 3
_FROM_ZERO_SINCE = 4
"""From here on a feature may begin at level 0; older clients fail on such a row."""
FIXED_FEATURES = {"eligible.leader.replicas.version": 1, "group.version": 1, "kraft.version": 1}
"""Features of Kafka that this version always has, at one level, and that no feature level of the cluster stands for:
eligible leaders, the consumer protocol of groups, voters that come and go."""
_SOFTWARE = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9\-.]*[a-zA-Z0-9])?")


def add_to(table: dict[int, Served]) -> None:
    """ApiVersions itself, which tells what is in the table then."""
    api = APIS[KEY]

    async def handle(request: ApiVersionsRequest, context: Context) -> ApiVersionsResponse:
        if context.version >= _SOFTWARE_SINCE and not _is_named(request):
            return ApiVersionsResponse(error_code=code(ErrorCode.INVALID_REQUEST))
        response = ApiVersionsResponse(error_code=NONE, api_keys=rows)
        if context.version >= _SOFTWARE_SINCE:
            _tell_features(response, context)
        return response

    table[KEY] = Served(api, handle, api.low, api.high, api.low)
    rows = _rows(table)


def unsupported(table: Mapping[int, Served]) -> ApiVersionsResponse:
    """The answer, in version 0, to a version that is not served."""
    return ApiVersionsResponse(error_code=code(ErrorCode.UNSUPPORTED_VERSION), api_keys=_rows(table))


def _rows(table: Mapping[int, Served]) -> list[ApiVersion]:
    return [
        ApiVersion(api_key=key, min_version=served.told_low, max_version=served.high)
        for key, served in sorted(table.items())
    ]


def _is_named(request: ApiVersionsRequest) -> bool:
    names = (request.client_software_name, request.client_software_version)
    return all(_SOFTWARE.fullmatch(name) is not None for name in names)


def _tell_features(response: ApiVersionsResponse, context: Context) -> None:
    link = context.services.link
    response.supported_features = [
        SupportedFeatureKey(name=name, min_version=low, max_version=high)
        for name, (low, high) in sorted({**KNOWN_FEATURES, **_fixed_ranges()}.items())
        if low > 0 or context.version >= _FROM_ZERO_SINCE
    ]
    response.finalized_features_epoch = link.metadata_offset
    response.finalized_features = [
        FinalizedFeatureKey(name=name, max_version_level=level, min_version_level=level)
        for name, level in sorted({**dict(link.image.features.items()), **FIXED_FEATURES}.items())
    ]


def _fixed_ranges() -> dict[str, tuple[int, int]]:
    return {name: (level, level) for name, level in FIXED_FEATURES.items()}
