"""Configs of a broker and of a controller.

`broker_config` and `controller_config` derive both from values of the settings table (`server.settings_table`): the
node process passes those of its file, tests pass none and take the defaults. `dataclasses.replace` changes single
values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tidelog.log.logs import LogsConfig
from tidelog.metadata.controller_client import ControllerClientConfig
from tidelog.metadata.controller_node import ControllerConfig
from tidelog.metadata.features import supported
from tidelog.metadata.tail import SNAPSHOT_BYTES
from tidelog.raft.config import RaftConfig
from tidelog.raft.driver import DriverConfig
from tidelog.replication.replica import ReplicaConfig
from tidelog.replication.startup_report import GRACE_MS
from tidelog.server.settings_table import DEFAULTS, Value
from tidelog.services.acl_authorizer import AclAuthorizerConfig, parse_super_users
from tidelog.services.guard import Guard
from tidelog.services.limits import RequestLimits
from tidelog.services.node_settings import NodeSetting

Endpoint = tuple[str, str, str, int]
"""Listener name, security protocol, host, port."""

RESIGN_TIMEOUT_MS = 3_000
ACL = "acl"
"""The value of `authorizer` that enforces ACLs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceOptions:
    """Configures the services of a node."""

    limits: RequestLimits
    fetch_sessions_max: int
    node_settings: tuple[NodeSetting, ...] = ()
    """The settings of this node, as DescribeConfigs returns them."""
    guard: Guard = field(default_factory=Guard)
    """Authorizes and charges the requests of all APIs, and audits them."""
    acl: AclAuthorizerConfig | None = None
    """The ACLs of the cluster authorize instead of `guard`; None: they are not enforced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerRoleConfig:
    endpoints: tuple[Endpoint, ...]
    """To register. The first is the one between brokers: nodes that know no listener name use it."""
    rack: str | None = None
    features: tuple[tuple[str, int, int], ...] = field(default_factory=supported)
    controller_listeners: tuple[str, ...] = ()
    inter_broker_listener: str = ""
    lifecycle: ControllerClientConfig
    logs: LogsConfig
    replicas: ReplicaConfig
    services: ServiceOptions
    metadata_snapshot_bytes: int = SNAPSHOT_BYTES
    registration_delay_ms: int = GRACE_MS
    """Longest wait for logs to open before the broker registers. The rest is reported later, log by log."""
    controlled_shutdown_ms: int
    """Longest wait for the leaderships to move at a stop; 0: no controlled shutdown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerRoleConfig:
    controller: ControllerConfig
    services: ServiceOptions
    segment_bytes: int | None = None
    """Of the Raft log; None: its default."""
    initial_configs: Mapping[str, str] = field(default_factory=dict)
    """Cluster configs that the active controller sets if nobody has set them."""
    initial_configs_source: str = ""
    """Names the file of `initial_configs` in the log."""
    resign_timeout_ms: int = RESIGN_TIMEOUT_MS
    """Longest wait for another voter to take over the leadership at a stop."""
    is_combined: bool = False
    """True: this node is a broker too, and the broker's services are those of the node."""


def broker_config(
    values: Mapping[str, Value] = DEFAULTS, *, endpoints: tuple[Endpoint, ...], rack: str | None = None
) -> BrokerRoleConfig:
    return BrokerRoleConfig(
        endpoints=endpoints,
        rack=rack,
        lifecycle=ControllerClientConfig(heartbeat_ms=_integer(values, "broker.heartbeat.interval.ms")),
        logs=LogsConfig(open_files_max=_integer(values, "log.open.files.max")),
        replicas=ReplicaConfig(cleaner_backoff_ms=_integer(values, "log.cleaner.backoff.ms")),
        services=service_options(values),
        controlled_shutdown_ms=_integer(values, "controlled.shutdown.timeout.ms"),
    )


def controller_config(
    values: Mapping[str, Value] = DEFAULTS,
    *,
    address: str = "",
    listener: str = "CONTROLLER",
    initial_configs: Mapping[str, str] | None = None,
) -> ControllerRoleConfig:
    """`address` and `listener`: where other controllers reach this one."""
    initial_configs = initial_configs or {}
    election_ms = _integer(values, "controller.quorum.election.timeout.ms")
    raft = RaftConfig(
        election_timeout_min_ms=election_ms,
        election_timeout_max_ms=2 * election_ms,
        heartbeat_interval_ms=max(10, election_ms // 5),
    )
    if "disk.stall.timeout.ms" in initial_configs:
        # It holds until the controller has read the cluster's own value from the metadata.
        raft = replace(raft, disk_stall_timeout_ms=int(initial_configs["disk.stall.timeout.ms"]))
    driver = DriverConfig(
        raft=raft,
        address=address,
        listener=listener,
        snapshot_bytes=_integer(values, "metadata.log.max.record.bytes.between.snapshots"),
        snapshot_age_ms=_integer(values, "metadata.log.max.snapshot.interval.ms"),
    )
    controller = ControllerConfig(
        driver=driver, idle_ms=_integer(values, "metadata.max.idle.interval.ms"), broker_listener=listener
    )
    return ControllerRoleConfig(
        controller=controller, services=service_options(values), initial_configs=initial_configs
    )


def service_options(values: Mapping[str, Value] = DEFAULTS) -> ServiceOptions:
    queued_bytes, fetch_bytes = _integer(values, "queued.max.request.bytes"), _integer(values, "fetch.max.bytes")
    return ServiceOptions(
        limits=RequestLimits(
            message_bytes_max=_integer(values, "socket.request.max.bytes"),
            request_bytes_max=queued_bytes,
            fetch_bytes_max=fetch_bytes,
        ),
        fetch_sessions_max=_integer(values, "max.incremental.fetch.session.cache.slots"),
        acl=_acl_config(values) if values["authorizer"] == ACL else None,
    )


def _acl_config(values: Mapping[str, Value]) -> AclAuthorizerConfig:
    return AclAuthorizerConfig(
        super_users=parse_super_users(str(values.get("super.users", ""))),
        allow_everyone_if_no_acl=values["allow.everyone.if.no.acl.found"] is True,
    )


def _integer(values: Mapping[str, Value], key: str) -> int:
    value = values[key]
    assert type(value) is int, f"{key} is an integer"
    return value
