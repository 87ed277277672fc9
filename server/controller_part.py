"""A node as a controller: its Raft storage, the controller itself, and what it says of the other controllers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from random import Random
from uuid import UUID

from tidelog.metadata.controller import Controller
from tidelog.metadata.shell import ControllerConfig, ControllerNode
from tidelog.model.ids import NodeId
from tidelog.raft.config import RaftConfig
from tidelog.raft.driver import DriverConfig, RaftDriver
from tidelog.raft.effects import Role
from tidelog.raft.membership import Membership
from tidelog.raft.storage import RaftStorage
from tidelog.rpc.transport import GrpcTransport
from tidelog.server.config import NodeConfig
from tidelog.server.controllers import METHOD, encode_rows
from tidelog.server.directories import NodeDirectories
from tidelog.server.initial_configs import InitialConfigs
from tidelog.server.metrics import Sample, counter, gauge
from tidelog.server.quorum_check import ask_controllers, check_answers
from tidelog.server.storage import Voters
from tidelog.world.clock import Clock
from tidelog.world.work import Work

HAND_OVER_MS = 3_000


class ControllerPart:
    """Made by `open`; `close` ends it."""

    def __init__(
        self, node: ControllerNode, storage: RaftStorage, initial: InitialConfigs, membership: Membership
    ) -> None:
        self.node = node
        self._boot_membership = membership
        self.initial = initial
        self._storage = storage
        self._is_started = False

    @classmethod
    async def open(
        cls,
        config: NodeConfig,
        directories: NodeDirectories,
        transport: GrpcTransport,
        *,
        work: Work,
        clock: Clock,
        random: Random,
        on_failure: Callable[[BaseException], None],
    ) -> ControllerPart:
        place = directories.metadata
        storage = RaftStorage(
            disk=place.disk,
            store=place.store,
            work=work,
            clock=clock,
            cluster_id=directories.cluster_id,
            node=config.node,
            on_failure=on_failure,
        )
        boot = await storage.open()
        node = ControllerNode(
            storage,
            boot,
            transport,
            Controller(directories.cluster_id),
            controller_config(config),
            random,
            clock=clock,
            work=work,
            on_failure=on_failure,
        )
        part = cls(node, storage, InitialConfigs(node, config.cluster, config.path), boot.membership)
        transport.serve(METHOD, part._controllers)
        return part

    async def _controllers(self, _caller: NodeId, _request: bytes) -> bytes:
        return encode_rows(self.membership.voters)

    @property
    def membership(self) -> Membership:
        return self.node.driver.core.log.membership

    async def check_first_start(self, config: NodeConfig, cluster_id: str) -> None:
        """A directory that was never started: raises `KnownVoterError` if the quorum has heard from this voter."""
        heard = self.node.driver.heard
        if heard.nodes == ():
            members = self._boot_membership.voters
            own = next((UUID(bytes=member.directory) for member in members if member.node == config.node), None)
            rows = tuple((one.node, one.endpoints[0][1], None) for one in members if one.endpoints)
            answers = await ask_controllers(config, cluster_id, Voters(rows))
            if own is not None:
                check_answers(config, cluster_id, own, answers, needs_all=False)
            await heard.add(config.node)

    async def start(self) -> None:
        self._is_started = True
        await self.node.start()

    async def close(self, *, is_orderly: bool) -> None:
        can_hand_over = is_orderly and self._is_started and len(self.membership.voters) > 1
        await self.node.close(hand_over_ms=HAND_OVER_MS if can_hand_over else 0)
        await self._storage.close()

    def waits_for(self) -> str | None:
        """Why there is no leader; None if there is one."""
        return None if self.node.driver.core.leader is not None else self.node.driver.waits_for()

    def trouble(self, grace_ms: int) -> str | None:
        """Why this controller does not do its work: no leader is known or heard for longer than this."""
        driver = self.node.driver
        return driver.waits_for() if driver.describe().without_leader_ms > grace_ms else None

    def samples(self) -> Iterable[Sample]:
        yield gauge("controller_active", float(self.node.is_active), "1 while this controller is the active one.")
        yield from raft_samples(self.node.driver)
        image = self.node.image
        yield gauge("cluster_brokers", len(image.brokers), "Brokers that are registered.")
        fenced = sum(1 for broker in image.brokers.values() if broker.fenced)
        yield gauge("cluster_brokers_fenced", fenced, "Of these, those that are fenced.")
        yield gauge("cluster_topics", len(image.topics), "Topics.")


def raft_samples(driver: RaftDriver) -> Iterable[Sample]:
    """What this member knows of the quorum; how far the others are is known to the leader only."""
    report, metrics = driver.describe(), driver.metrics
    yield gauge("raft_epoch", report.epoch, "Epoch of the metadata quorum.")
    yield gauge("raft_leader", -1 if report.leader is None else report.leader, "Who leads it; -1: nobody is known.")
    for role in Role:
        yield gauge("raft_role", float(report.role is role), "1 for what this member is.", role=role.value)
    yield gauge("raft_commit_offset", report.commit, "Everything below is committed.")
    yield gauge("raft_log_end_offset", report.log_end, "End of this member's log.")
    yield gauge("raft_durable_end_offset", report.durable_end, "Everything below is on this member's disk.")
    yield gauge("raft_without_leader_seconds", report.without_leader_ms / 1000, "How long no leader is known.")
    total_s = driver.without_leader_total_ms() / 1000
    yield counter("raft_without_leader_seconds_total", total_s, "All time that no leader was known here.")
    for member in report.members:
        if member.lag is not None:
            yield gauge(
                "raft_member_lag",
                member.lag,
                "Entries that a member has not synced, as the leader knows it.",
                node=str(member.node),
            )
    yield counter("raft_elections_total", metrics.elections, "How often this member asked for votes.")
    yield counter("raft_leader_changes_total", metrics.leader_changes, "Leaders that this member has seen.")
    yield counter("raft_proposals_committed_total", metrics.proposals_committed, "Decisions of this leader.")
    yield counter("raft_entries_applied_total", metrics.entries_applied, "Entries that were applied here.")
    yield counter("raft_snapshots_taken_total", metrics.snapshots_taken, "Snapshots of the metadata.")
    yield counter("raft_snapshots_failed_total", metrics.snapshots_failed, "Helper processes that died over one.")


def controller_config(config: NodeConfig) -> ControllerConfig:
    least_ms = config.number("controller.quorum.election.timeout.ms")
    raft = RaftConfig(
        election_timeout_min_ms=least_ms,
        election_timeout_max_ms=2 * least_ms,
        heartbeat_interval_ms=max(10, least_ms // 5),
    )
    if "disk.stall.timeout.ms" in config.cluster:  # what holds is in the cluster's state, which is yet to be read
        raft = replace(raft, disk_stall_timeout_ms=int(config.cluster["disk.stall.timeout.ms"]))
    driver = DriverConfig(
        raft=raft,
        address=str(config.own.advertised),
        listener=config.own.name,
        snapshot_bytes=config.number("metadata.log.max.record.bytes.between.snapshots"),
        snapshot_age_ms=config.number("metadata.log.max.snapshot.interval.ms"),
    )
    return ControllerConfig(
        driver=driver,
        idle_ms=config.number("metadata.max.idle.interval.ms"),
        broker_listener=config.own.name,
    )
