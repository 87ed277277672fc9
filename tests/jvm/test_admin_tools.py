"""Kafka's tools of an administrator against a real cluster of three nodes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from kafka_tools import Tools, needs_tools
from support.clusters.waiting import until

from tidelog.rpc.kafka import dispatch
from tidelog.testing import LocalCluster

pytestmark = [pytest.mark.interop, pytest.mark.cluster, pytest.mark.timeout(300), needs_tools]


@pytest.fixture
def tools(tidelog_cluster: LocalCluster) -> Tools:
    return Tools(tidelog_cluster.kafka_bootstrap)


@pytest.mark.requirement("a:N-11")
def test_broker_api_versions_shows_every_broker_and_exactly_what_it_serves(
    tools: Tools, tidelog_cluster: LocalCluster
) -> None:
    out = tools.run("kafka-broker-api-versions").out
    brokers = re.findall(r"^localhost:(\d+) \(id: (\d) rack: \S+ isFenced: false\)", out, re.MULTILINE)
    assert {int(node): int(port) for port, node in brokers} == {
        number: tidelog_cluster.ports(number).kafka for number in (1, 2, 3)
    }
    wanted = {(key, row.advertised_low, row.high) for key, row in dispatch.build().items()}
    # A range of one version is shown without its end.
    found = re.findall(r"^\t\w+\((\d+)\): (\d+)(?: to (\d+))? \[usable", out, re.MULTILINE)
    assert len(found) == 3 * len(wanted)
    assert {(int(key), int(low), int(high or low)) for key, low, high in found} == wanted
    assert re.findall(r"EndTxn\(26\): (.*) \[", out) == ["0 to 5"] * 3


@pytest.mark.requirement("a:N-01", "a:N-02", "a:N-19", "a:N-20")
def test_topics_are_created_listed_described_changed_and_deleted(tools: Tools) -> None:
    tools.create("plain", partitions=2, retention_ms="3600000")
    tools.run("kafka-topics", "--create", "--topic", "placed", "--replica-assignment", "1:2,2:3")
    again = tools.run("kafka-topics", "--create", "--topic", "plain", exit_code=1)
    assert "TopicExistsException" in again.err
    assert tools.run("kafka-topics", "--create", "--topic", "plain", "--if-not-exists").out == ""
    too_many = tools.run("kafka-topics", "--create", "--topic", "wide", "--replication-factor", "9", exit_code=1)
    assert "InvalidReplicationFactorException" in too_many.err
    unknown = tools.run("kafka-topics", "--create", "--topic", "odd", "--config", "no.such.key=1", exit_code=1)
    assert "no.such.key" in unknown.out + unknown.err
    assert {"plain", "placed"} <= set(tools.run("kafka-topics", "--list", "--exclude-internal").lines)

    described = tools.run("kafka-topics", "--describe", "--topic", "plain")
    assert "PartitionCount: 2\tReplicationFactor: 3\tConfigs: retention.ms=3600000" in described.lines[0]
    assert [row["Replicas"] for row in tools.describe("placed")] == ["1,2", "2,3"]
    assert tools.run("kafka-topics", "--describe", "--under-replicated-partitions").out == ""
    assert tools.run("kafka-topics", "--describe", "--unavailable-partitions").out == ""
    overrides = tools.run("kafka-topics", "--describe", "--topics-with-overrides", "--exclude-internal").out
    assert "plain" in overrides

    tools.run("kafka-topics", "--alter", "--topic", "plain", "--partitions", "5")
    assert len(tools.describe("plain")) == 5
    fewer = tools.run("kafka-topics", "--alter", "--topic", "plain", "--partitions", "3", exit_code=1)
    assert "InvalidPartitionsException" in fewer.err
    tools.run("kafka-topics", "--delete", "--topic", "plain")
    tools.run("kafka-topics", "--delete", "--topic", "placed")
    assert not {"plain", "placed"} & set(tools.run("kafka-topics", "--list").lines)
    missing = tools.run("kafka-topics", "--delete", "--topic", "plain", exit_code=1)
    assert "does not exist" in missing.out


@pytest.mark.requirement("a:N-05")
def test_configs_of_topics_brokers_and_the_cluster_are_shown_and_changed(tools: Tools) -> None:
    tools.create("tuned")
    topic = ("--entity-type", "topics", "--entity-name", "tuned")
    tools.run(
        "kafka-configs", "--alter", *topic, "--add-config", "max.message.bytes=2000000,cleanup.policy=[compact,delete]"
    )
    shown = tools.run("kafka-configs", "--describe", *topic).out
    assert (
        "  max.message.bytes=2000000 sensitive=false synonyms={DYNAMIC_TOPIC_CONFIG:max.message.bytes=2000000," in shown
    )
    assert "  cleanup.policy=compact,delete " in shown
    tools.run("kafka-configs", "--alter", *topic, "--delete-config", "cleanup.policy")
    whole = tools.run("kafka-configs", "--describe", "--all", *topic).out
    assert "  cleanup.policy=delete sensitive=false synonyms={DEFAULT_CONFIG:log.cleanup.policy=delete}" in whole
    wrong = tools.run("kafka-configs", "--alter", *topic, "--add-config", "retention.ms=soon", exit_code=1)
    assert "InvalidConfigurationException" in wrong.out + wrong.err
    assert "retention.ms" in wrong.out + wrong.err

    one = ("--entity-type", "brokers", "--entity-name", "2")
    tools.run("kafka-configs", "--alter", *one, "--add-config", "leader.replication.throttled.rate=90000000")
    assert "DYNAMIC_BROKER_CONFIG:leader.replication.throttled.rate=90000000" in (
        tools.run("kafka-configs", "--describe", *one).out
    )
    tools.run("kafka-configs", "--alter", *one, "--delete-config", "leader.replication.throttled.rate")
    every = ("--entity-type", "brokers", "--entity-default")
    tools.run("kafka-configs", "--alter", *every, "--add-config", "log.retention.ms=86400000")
    assert "DYNAMIC_DEFAULT_BROKER_CONFIG:log.retention.ms=86400000" in (
        tools.run("kafka-configs", "--describe", *every).out
    )
    tools.run("kafka-configs", "--alter", *every, "--delete-config", "log.retention.ms")
    after = tools.run("kafka-configs", "--describe", "--entity-type", "brokers").out
    assert "log.retention.ms" not in after
    assert "throttled" not in after
    assert [f"Dynamic configs for broker {number} are:" in after for number in (1, 2, 3)] == [True] * 3
    group = tools.run("kafka-configs", "--describe", "--all", "--entity-type", "groups", "--entity-name", "any").out
    assert "consumer.session.timeout.ms=45000" in group


def test_offsets_and_deleted_records(tools: Tools, tmp_path: Path) -> None:
    tools.create("counted")
    tools.run("kafka-console-producer", "--topic", "counted", stdin="".join(f"{n}\n" for n in range(10)))
    assert tools.end_offsets("counted") == {0: 10}

    def at(time: str) -> str:
        (line,) = tools.run("kafka-get-offsets", "--topic", "counted", "--time", time).lines
        return line.removeprefix("counted:0:")

    plan = tmp_path / "delete.json"
    plan.write_text(json.dumps({"version": 1, "partitions": [{"topic": "counted", "partition": 0, "offset": 4}]}))
    deleted = tools.run("kafka-delete-records", "--offset-json-file", str(plan))
    assert "partition: counted-0\tlow_watermark: 4" in deleted.out
    assert (at("earliest"), at("1000")) == ("4", "4")
    assert 4 <= int(at("max-timestamp")) <= 9, "the first of those that were made last"
    whole = tools.run("kafka-console-consumer", "--topic", "counted", "--from-beginning", "--max-messages", "6")
    assert whole.lines == [str(number) for number in range(4, 10)]


@pytest.mark.requirement("a:N-08", "a:O-16")
def test_partitions_are_reassigned_and_get_their_preferred_leaders(tools: Tools, tmp_path: Path) -> None:
    tools.create("moved", replicas=2)
    tools.run("kafka-console-producer", "--topic", "moved", stdin="".join(f"{n}\n" for n in range(100)))
    (before,) = tools.describe("moved")
    first, second = before["Replicas"].split(",")
    third = ({"1", "2", "3"} - {first, second}).pop()

    topics = tmp_path / "topics.json"
    topics.write_text(json.dumps({"version": 1, "topics": [{"topic": "moved"}]}))
    proposed = tools.run(
        "kafka-reassign-partitions", "--generate", "--topics-to-move-json-file", str(topics), "--broker-list", "1,2,3"
    )
    assert "Proposed partition reassignment configuration" in proposed.out
    plan = tmp_path / "plan.json"
    replicas = [int(third), int(first), int(second)]
    plan.write_text(
        json.dumps({"version": 1, "partitions": [{"topic": "moved", "partition": 0, "replicas": replicas}]})
    )
    begun = tools.run(
        "kafka-reassign-partitions", "--execute", "--reassignment-json-file", str(plan), "--throttle", "50000000"
    )
    assert "Successfully started partition reassignment for moved-0" in begun.out
    verify = ("--verify", "--reassignment-json-file", str(plan))
    until(
        lambda: (
            "Reassignment of partition moved-0 is completed." in tools.run("kafka-reassign-partitions", *verify).out
        ),
        "moved-0 has all its replicas",
    )
    assert tools.run("kafka-reassign-partitions", "--list").lines == ["No partition reassignments found."]
    assert "throttled" not in tools.run("kafka-topics", "--describe", "--topic", "moved").out, "verify clears them"
    assert "throttled" not in tools.run("kafka-configs", "--describe", "--entity-type", "brokers").out
    cancelled = tools.run("kafka-reassign-partitions", "--cancel", "--reassignment-json-file", str(plan))
    assert "None of the specified partition reassignments are active." in cancelled.out

    (after,) = tools.describe("moved")
    assert (after["Leader"], after["Replicas"]) == (first, ",".join(map(str, replicas)))
    assert set(after["Isr"].split(",")) == {"1", "2", "3"}
    partition = ("--election-type", "preferred", "--topic", "moved", "--partition", "0")
    elected = tools.run("kafka-leader-election", *partition)
    assert "Successfully completed leader election (PREFERRED) for partitions moved-0" in elected.out
    assert "Valid replica already elected for partitions moved-0" in tools.run("kafka-leader-election", *partition).out
    assert tools.describe("moved")[0]["Leader"] == third
    (reported,) = [
        row
        for broker in _log_dirs(tools, "--topic-list", "moved", "--broker-list", third)
        for row in broker["logDirs"][0]["partitions"]
    ]
    assert reported["partition"] == "moved-0"
    assert reported["size"] > 0
    assert (reported["offsetLag"], reported["isFuture"]) == (0, False)


def _log_dirs(tools: Tools, *arguments: str) -> list[dict[str, Any]]:
    """A row for each broker."""
    found: dict[str, list[dict[str, Any]]] = json.loads(tools.run("kafka-log-dirs", "--describe", *arguments).lines[-1])
    return found["brokers"]


def test_admin_describes_the_cluster_its_quorum_its_features_and_its_directories(
    tools: Tools, tidelog_cluster: LocalCluster
) -> None:
    assert tools.run("kafka-cluster", "cluster-id").lines == [f"Cluster ID: {tidelog_cluster.cluster_id}"]
    endpoints = tools.run("kafka-cluster", "list-endpoints").table()
    assert {(row[0], row[2], row[4], row[5]) for row in endpoints} == {
        (str(number), str(tidelog_cluster.ports(number).kafka), "unfenced", "broker") for number in (1, 2, 3)
    }

    status = dict(re.findall(r"^(\w+): +(.*)$", tools.run("kafka-metadata-quorum", "describe", "--status").out, re.M))
    assert status["ClusterId"] == tidelog_cluster.cluster_id
    assert status["LeaderId"] in {"1", "2", "3"}
    assert [voter["id"] for voter in json.loads(status["CurrentVoters"])] == [1, 2, 3]
    assert status["CurrentObservers"] == "[]", "all three are voters"
    replicas = tools.run("kafka-metadata-quorum", "describe", "--replication").table()
    assert sorted((row[0], row[-1]) for row in replicas) == sorted(
        (str(number), "Leader" if status["LeaderId"] == str(number) else "Follower") for number in (1, 2, 3)
    )
    assert "Feature: metadata.version" in tools.run("kafka-features", "describe").out
    directories = [str(tidelog_cluster.path(number) / "data") for number in (1, 2, 3)]
    assert [one["logDir"] for broker in _log_dirs(tools) for one in broker["logDirs"]] == directories


LATER = [
    ("kafka-acls", ("--list",), 1, "no authorizer is configured"),
    ("kafka-configs", ("--describe", "--entity-type", "users"), 1, "DESCRIBE_USER_SCRAM_CREDENTIALS"),
    (
        "kafka-configs",
        ("--describe", "--entity-type", "broker-loggers", "--entity-name", "1"),
        1,
        "set log levels in the file of the node",
    ),
]


@pytest.mark.parametrize(("tool", "arguments", "exit_code", "words"), LATER)
def test_what_is_not_served_is_refused_at_once_and_in_words(
    tools: Tools, tool: str, arguments: tuple[str, ...], exit_code: int, words: str
) -> None:
    ran = tools.run(tool, *arguments, exit_code=exit_code, timeout_s=30)
    assert words in ran.out + ran.err


def test_lists_without_entries_and_what_brokers_run_with_are_shown(tools: Tools, tidelog_cluster: LocalCluster) -> None:
    assert tools.run("kafka-configs", "--describe", "--entity-type", "clients").out == ""
    assert tools.run("kafka-client-metrics", "--list").out.strip() == ""
    features = tools.run("kafka-features", "describe").out
    assert re.search(r"Feature: group.version\s+SupportedMinVersion: 1\s+SupportedMaxVersion: 1\s+Final", features)
    assert re.search(
        r"Feature: transaction.version\s+SupportedMinVersion: 0\s+SupportedMaxVersion: 2\s+Final", features
    )
    tools.run("kafka-features", "upgrade", "--feature", "group.version=1")
    refused = tools.run("kafka-features", "downgrade", "--feature", "group.version=0", exit_code=1)
    assert "group.version is 1 in this version" in refused.out + refused.err
    for number in (1, 2, 3):
        broker = ("--entity-type", "brokers", "--entity-name", str(number))
        shown = tools.run("kafka-configs", "--describe", "--all", *broker).out
        directory = tidelog_cluster.path(number) / "data"
        assert f"  log.dirs={directory} sensitive=false synonyms={{STATIC_BROKER_CONFIG:log.dirs={directory}" in shown
        assert f"  node.id={number} " in shown
    unregistered = tools.run("kafka-cluster", "unregister", "--id", "3", exit_code=1)
    assert "broker 3" in unregistered.out + unregistered.err
    authorized = tools.run("kafka-broker-api-versions").out
    assert "AlterReplicaLogDirs(34): 1 to 2" in authorized


def test_replicas_are_reassigned_with_log_directories_and_rolled_back(
    tools: Tools, tidelog_cluster: LocalCluster, tmp_path: Path
) -> None:
    tools.create("placed-in", replicas=2)
    (before,) = tools.describe("placed-in")
    replicas = [int(number) for number in before["Replicas"].split(",")]
    paths = [str(tidelog_cluster.path(number) / "data") for number in replicas]
    plan, rollback = tmp_path / "plan.json", tmp_path / "rollback.json"
    row = {"topic": "placed-in", "partition": 0, "replicas": replicas[::-1], "log_dirs": paths[::-1]}
    plan.write_text(json.dumps({"version": 1, "partitions": [row]}))
    begun = tools.run("kafka-reassign-partitions", "--execute", "--reassignment-json-file", str(plan))
    assert "Successfully started partition reassignment for placed-in-0" in begun.out
    printed = next(line for line in begun.lines if line.startswith('{"version"'))
    rollback.write_text(printed)
    assert json.loads(printed)["partitions"][0]["replicas"] == replicas

    def is_done(path: Path) -> bool:
        verified = tools.run("kafka-reassign-partitions", "--verify", "--reassignment-json-file", str(path)).out
        return "Reassignment of partition placed-in-0 is completed." in verified

    until(lambda: is_done(plan), "the replicas are as planned")
    back = tools.run("kafka-reassign-partitions", "--execute", "--reassignment-json-file", str(rollback))
    assert "Successfully started partition reassignment for placed-in-0" in back.out
    until(lambda: is_done(rollback), "the replicas are where they were")
    (after,) = tools.describe("placed-in")
    assert after["Replicas"] == before["Replicas"]
