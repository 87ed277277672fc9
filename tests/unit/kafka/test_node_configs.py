"""DescribeConfigs of a broker shows what its node runs with, by its file; over the sockets of a whole node."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.async_tests import uvloop_test
from support.kafka.group_api import name_of
from support.kafka.node import KafkaNode, prepare, running

from tidelog.rpc.kafka import messages as apis
from tidelog.rpc.kafka.config_rows import BOOLEAN, CLUSTER_CONFIG, DEFAULT_CONFIG, INT, LIST, STATIC_CONFIG
from tidelog.rpc.kafka.messages.configs import DescribeConfigsRequest, DescribeConfigsResource
from tidelog.rpc.kafka.messages.security import SaslAuthenticateRequest, SaslHandshakeRequest
from tidelog.server.config import NodeConfig, load
from tidelog.server.kafka_settings import node_settings

BROKER = 4


@pytest.fixture
def config(tmp_path: Path) -> NodeConfig:
    return prepare(tmp_path, {"num.partitions": 3})


async def ask(node: KafkaNode, api: Any, request: object) -> Any:
    client = await node.client()
    client.send(api, api.high, 1, request)
    return (await client.response(api, api.high))[1]


async def described(node: KafkaNode, name: str) -> dict[str, Any]:
    resource = DescribeConfigsResource(resource_type=BROKER, resource_name=name)
    request = DescribeConfigsRequest(resources=[resource], include_synonyms=True, include_documentation=True)
    (result,) = (await ask(node, apis.DESCRIBE_CONFIGS, request)).results
    assert result.error_code == 0, result.error_message
    return {row.name: row for row in result.configs}


@uvloop_test
async def test_static_settings_of_a_node_are_described_with_their_sources(config: NodeConfig) -> None:
    async with running(config) as node:
        rows = await described(node, "1")
        assert (rows["log.dirs"].value, rows["log.dirs"].config_source) == (config.log_dirs[0], STATIC_CONFIG)
        assert (rows["log.dirs"].config_type, rows["log.dirs"].read_only) == (LIST, True)
        assert (rows["node.id"].value, rows["node.id"].config_type) == ("1", INT)
        idle = rows["connections.max.idle.ms"]
        assert (idle.value, idle.config_source) == ("600000", DEFAULT_CONFIG)
        assert [(one.value, one.source) for one in idle.synonyms] == [("600000", DEFAULT_CONFIG)]
        assert (rows["kafka.enable"].value, rows["kafka.enable"].config_type) == ("true", BOOLEAN)
        for listener in config.listeners:
            assert f"{listener.name}://{listener.advertised}" in rows["advertised.listeners"].value
        # What is set for the whole cluster stands beside it, once the node has heard of it.
        async with asyncio.timeout(30):
            while rows["num.partitions"].config_source != CLUSTER_CONFIG:
                await asyncio.sleep(0.05)
                rows = await described(node, "1")
        assert (rows["num.partitions"].value, rows["num.partitions"].config_source) == ("3", CLUSTER_CONFIG)
        everybody = await described(node, "")
        assert "log.dirs" not in everybody, "it is a node's own"


def test_secret_of_a_node_is_not_shown(tmp_path: Path) -> None:
    config = prepare(tmp_path)
    path = Path(config.path)
    path.write_text(path.read_text(encoding="utf-8") + '\n"broker.rack" = "${env:RACK}"\n', encoding="utf-8")
    (row,) = [one for one in node_settings(load(str(path), {"RACK": "hidden-rack"})) if one.name == "broker.rack"]
    assert (row.value, row.is_set, row.is_sensitive) == (None, True, True)


@uvloop_test
async def test_client_with_sasl_gets_an_answer_and_keeps_its_connection(config: NodeConfig) -> None:
    async with running(config) as node:
        client = await node.client()
        for api, request in (
            (apis.SASL_HANDSHAKE, SaslHandshakeRequest(mechanism="PLAIN")),
            (apis.SASL_AUTHENTICATE, SaslAuthenticateRequest(auth_bytes=b"\0user\0word")),
            (apis.SASL_HANDSHAKE, SaslHandshakeRequest(mechanism="SCRAM-SHA-512")),
        ):
            client.send(api, api.high, 5, request)
            number, response = await client.response(api, api.high)
            assert (number, name_of(response.error_code)) == (5, "ILLEGAL_SASL_STATE")
