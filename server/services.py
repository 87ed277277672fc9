"""Builds the services of a node and the API handlers over them, from its roles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tidelog import __version__
from tidelog.coordinator.coordinator import GroupCoordinator
from tidelog.coordinator.transactions.coordinator import TransactionCoordinator
from tidelog.coordinator.transactions.peers import CoordinatorPeers
from tidelog.metadata.controller_client import ControllerClient, ControllerClientConfig
from tidelog.metadata.controller_node import ControllerNode
from tidelog.metadata.image import ClusterImage
from tidelog.metadata.tail import MetadataTail
from tidelog.replication.log_directories import LogDirectories
from tidelog.replication.replica_digests import ReplicaDigests
from tidelog.replication.replicas import Replicas
from tidelog.rpc.grpc.admin import AdminHandlers
from tidelog.rpc.grpc.cluster import ClusterHandlers
from tidelog.rpc.grpc.dispatch import Handlers
from tidelog.rpc.grpc.groups import GroupsHandlers
from tidelog.rpc.grpc.log import LogHandlers
from tidelog.rpc.grpc.transactions import TransactionsHandlers
from tidelog.rpc.kafka.fetch_sessions import FetchSessions
from tidelog.server.membership import BrokerMembership
from tidelog.server.role_config import ServiceOptions
from tidelog.server.world import NodeWorld
from tidelog.services.acl_authorizer import AclAuthorizer
from tidelog.services.acls import AclService
from tidelog.services.cluster import ClusterService
from tidelog.services.configs import ConfigService
from tidelog.services.data import DataServices
from tidelog.services.forwarding import Forwarder
from tidelog.services.groups import GroupService
from tidelog.services.hanging_transactions import HangingTransactions
from tidelog.services.limits import RequestLimits, ResponseMemory
from tidelog.services.log_dirs import LogDirService
from tidelog.services.metadata_cache import MetadataCache
from tidelog.services.metadata_records import MetadataRecordService
from tidelog.services.node import NodeAccess
from tidelog.services.quorum import QuorumService
from tidelog.services.replica_digests import ReplicaDigestService
from tidelog.services.replicas import ReplicaService
from tidelog.services.services import BrokerServices, Services
from tidelog.services.topics import TopicService
from tidelog.services.transactions import TransactionService


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeServices:
    services: Services
    handlers: Handlers
    """Of the gRPC API."""
    responses: ResponseMemory
    fetch_sessions: FetchSessions | None = None
    """Of a broker's Kafka API."""

    @property
    def limits(self) -> RequestLimits:
        return self.services.limits

    async def close(self) -> None:
        await self.services.close()


def controller_services(world: NodeWorld, options: ServiceOptions, controller: ControllerNode) -> NodeServices:
    """Builds the services of a node that is only a controller, and serves requests that other nodes forward."""
    client = ControllerClient(world.to_controllers, world.controllers, ControllerClientConfig(), world.random)
    options = _enforce_acls(options, lambda: controller.image)
    services = Services(**_services(world, options, client, controller=controller))
    handlers = Handlers(cluster=ClusterHandlers(services), admin=AdminHandlers(services))
    return NodeServices(services=services, handlers=handlers, responses=ResponseMemory(options.limits))


def broker_services(
    world: NodeWorld,
    options: ServiceOptions,
    *,
    membership: BrokerMembership,
    replicas: Replicas,
    coordinator: GroupCoordinator,
    transactions: TransactionCoordinator,
    controller: ControllerNode | None,
) -> NodeServices:
    """Builds the services of a broker, which may be a controller too, and serves requests that other nodes forward."""
    limits, client, tail = options.limits, membership.agent.client, membership.tail
    options = _enforce_acls(options, lambda: tail.image)
    peers = CoordinatorPeers(transactions, tail, world.to_brokers)
    data = DataServices(replicas, limits, options.guard, peers)
    groups = GroupService(coordinator, tail, client, guard=options.guard)
    hanging = HangingTransactions(replicas, transactions.search, options.guard)
    transaction_service = TransactionService(
        transactions, tail, client, groups, peers, guard=options.guard, hanging=hanging
    )
    common = _services(
        *(world, options, client),
        controller=controller,
        tail=tail,
        directories=data.log_directories,
        digests=replicas.digests,
    )
    services = BrokerServices(**common, data=data, groups=groups, transactions=transaction_service)
    responses = ResponseMemory(limits)
    handlers = Handlers(
        cluster=ClusterHandlers(services),
        admin=AdminHandlers(services),
        log=LogHandlers(data, limits, responses),
        groups=GroupsHandlers(groups, lambda: services.cache.image),
        transactions=TransactionsHandlers(transaction_service, lambda: services.cache.image),
    )
    sessions = FetchSessions(world.random, slots_max=options.fetch_sessions_max)
    return NodeServices(services=services, handlers=handlers, responses=responses, fetch_sessions=sessions)


def _enforce_acls(options: ServiceOptions, image: Callable[[], ClusterImage]) -> ServiceOptions:
    if options.acl is None:
        return options
    authorizer = AclAuthorizer(lambda: image().acls, options.acl)
    return replace(options, guard=options.guard.with_authorizer(authorizer))


def _services(
    world: NodeWorld,
    options: ServiceOptions,
    client: ControllerClient,
    *,
    controller: ControllerNode | None = None,
    tail: MetadataTail | None = None,
    directories: LogDirectories | None = None,
    digests: ReplicaDigests | None = None,
) -> dict[str, Any]:
    """The fields of `Services`. A broker has a `tail`, `directories` and `digests`; a controller a `controller`."""
    cache = MetadataCache(cluster_id=world.cluster_id, node=world.node, client=client, controller=controller, tail=tail)
    brokers = None if tail is None else world.to_brokers
    forwarder = Forwarder(cache, client, world.to_controllers, options.guard, brokers=brokers)
    node = NodeAccess(cache=cache, forwarder=forwarder, limits=options.limits, guard=options.guard)
    topics = TopicService(node)
    return {
        "cache": cache,
        "guard": options.guard,
        "limits": options.limits,
        "topics": topics,
        "configs": ConfigService(node, options.node_settings),
        "cluster": ClusterService(node, topics, version=__version__),
        "quorum": QuorumService(node),
        "replicas": ReplicaService(node),
        "log_dirs": LogDirService(node, directories),
        "replica_digests": ReplicaDigestService(node, digests),
        "metadata_records": MetadataRecordService(node, world.metadata_work),
        "acls": AclService(node),
    }
