"""A broker and a controller are built in one place: no other module constructs their parts."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("server", "testing", "cli", "spark", "services", "rpc", "replication", "coordinator", "metadata")
PARTS = {
    "AdminHandlers",
    "BrokerLifecycle",
    "BrokerServices",
    "ClusterHandlers",
    "ControllerNode",
    "GroupCoordinator",
    "GroupService",
    "GroupsHandlers",
    "LogHandlers",
    "MetadataTail",
    "DataServices",
    "MetadataCache",
    "Replicas",
    "TransactionCoordinator",
    "TransactionService",
    "TransactionsHandlers",
}
PROTOBUF = {"pb", "admin_pb2", "admin_pb"}
ASSEMBLY = {
    "server/broker.py": {"GroupCoordinator", "Replicas", "TransactionCoordinator"},
    "server/controller.py": {"ControllerNode"},
    "server/membership.py": {"BrokerLifecycle", "MetadataTail"},
    "server/services.py": {
        "AdminHandlers",
        "BrokerServices",
        "ClusterHandlers",
        "DataServices",
        "GroupService",
        "GroupsHandlers",
        "LogHandlers",
        "MetadataCache",
        "TransactionService",
        "TransactionsHandlers",
    },
}
UNIT_TESTS = {
    "tests/unit/metadata/test_metadata_cases.py": {"BrokerLifecycle", "MetadataTail"},
    "tests/support/crashes/raft_stories.py": {"MetadataTail"},
    "tests/support/kafka/data_api.py": {"DataServices"},
    "tests/unit/kafka/test_soon.py": {"DataServices"},
    "tests/unit/replication/test_client_requests.py": {"DataServices"},
    "tests/unit/rpc/test_grpc_log.py": {"LogHandlers"},
    "tests/unit/rpc/test_grpc_transactions.py": {"TransactionsHandlers"},
    "tests/unit/rpc/test_request_sizes.py": {"GroupsHandlers", "LogHandlers"},
    "tests/unit/services/test_group_topics.py": {"GroupService"},
    "tests/unit/services/test_large_descriptions.py": {"AdminHandlers", "ClusterHandlers", "GroupsHandlers"},
    "tests/unit/services/test_service_hooks.py": {"DataServices", "GroupService", "TransactionService"},
}
"""Tests of a class itself, which need it under conditions that the assembly does not create."""
MOCKS = {
    "testing/mock_cluster.py": {
        "AdminHandlers",
        "ClusterHandlers",
        "GroupsHandlers",
        "LogHandlers",
        "TransactionsHandlers",
    }
}
"""`MockAdmin` calls the real handlers; there is no broker behind them."""


def constructed(tree: ast.Module) -> Iterator[str]:
    """The parts that this module constructs, by their own name, an alias of an import, or an attribute of a module."""
    aliases = {
        name.asname or name.name: name.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for name in node.names
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name):
            name = aliases.get(node.func.id, node.func.id)
        elif isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", "") not in PROTOBUF:
            name = node.func.attr
        else:
            continue
        if name in PARTS:
            yield name


def test_the_search_sees_names_aliases_and_attributes_but_no_protobuf() -> None:
    text = """
from tidelog.replication.replicas import Replicas as R
from tidelog.metadata import tail
R(me=1)
tail.MetadataTail()
ControllerNode()
pb.Replicas(brokers=[1])
"""
    assert sorted(constructed(ast.parse(text))) == ["ControllerNode", "MetadataTail", "Replicas"]


def test_only_the_assembly_constructs_the_parts_of_a_broker_and_a_controller() -> None:
    wired: dict[str, set[str]] = {}
    for package in (*PACKAGES, "bench", "examples", "tests"):
        for path in sorted((ROOT / package).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            if any(part in text for part in PARTS) and (names := set(constructed(ast.parse(text)))):
                wired[str(path.relative_to(ROOT))] = names
    assert wired == {**ASSEMBLY, **UNIT_TESTS, **MOCKS}
