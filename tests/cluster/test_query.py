"""`tidelog query` against a real cluster: topics as tables, bounds, and the three outputs."""

from __future__ import annotations

import json

import pytest
from support.clusters import commands

import tidelog
from tidelog.testing import LocalCluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def bootstrap(cluster: LocalCluster) -> str:
    with tidelog.Admin(cluster.bootstrap) as admin:
        admin.create_topic("sold", partitions=3, configs={"retention.ms": -1})
        admin.create_topic("customers.eu-1", partitions=1)
        admin.create_topic("Sales", partitions=1)
    with tidelog.Producer(cluster.bootstrap) as producer:
        keys = [f"k{number % 3}" for number in range(30)]
        values = [f'{{"amount": {number}}}' for number in range(30)]
        old_ms = 1_700_000_000_000
        producer.send_many("sold", keys=keys, values=values, timestamps_ms=[old_ms] * 30).result(30)
        producer.send("sold", '{"amount": 100}', key="k1").result(30)
        producer.send("customers.eu-1", b"\xff", key="k1", headers={"trace": b"1"}).result(30)
    return cluster.bootstrap


def run(bootstrap: str, *arguments: str, code: int = 0) -> tuple[str, str]:
    done = commands.run("query", *arguments, "--bootstrap", bootstrap, code=code)
    return done.out, done.err


def test_a_topic_is_a_table(bootstrap: str) -> None:
    sql = (
        "select key, count(*) n, sum((decode(value)->>'amount')::int) total from sold "
        "where timestamp < '2024-01-01' group by key order by key"
    )
    out, _ = run(bootstrap, sql)
    assert out.splitlines() == ["key   n  total", "k0   10    135", "k1   10    145", "k2   10    155"]


def test_topics_join_and_what_a_query_defines_is_none(bootstrap: str) -> None:
    sql = 'with mine as (select key from "customers.eu-1") select count(*) n from sold join mine using (key)'
    assert run(bootstrap, sql, "--output", "csv") == ("n\n11\n", "")


def test_since_bounds_what_is_read(bootstrap: str) -> None:
    out, _ = run(bootstrap, "select count(*) n, min(decode(value)) v from sold", "--since", "1d", "--output", "csv")
    assert out == 'n,v\n1,"{""amount"": 100}"\n'


def test_json_has_the_documented_keys(bootstrap: str) -> None:
    out, _ = run(bootstrap, 'select "offset", key, value, headers from "customers.eu-1"', "--output", "json")
    document = json.loads(out)
    found = {*document, *(f"columns[].{key}" for column in document["columns"] for key in column)}
    assert found == commands.KEYS["query"]
    assert document["rows"] == [
        {"offset": 0, "key": "k1", "value": {"base64": "/w=="}, "headers": [{"name": "trace", "value": "1"}]}
    ]
    assert (document["count"], document["is_cut"]) == (1, False)
    cut = json.loads(run(bootstrap, "select key from sold", "--limit", "4", "--output", "json")[0])
    assert (len(cut["rows"]), cut["count"], cut["is_cut"]) == (4, 4, True)


def test_missing_or_too_large_topics_are_reported_in_one_line(bootstrap: str) -> None:
    assert run(bootstrap, "select * from nope", code=1)[1] == "tidelog: there is no topic 'nope'\n"
    assert run(bootstrap, "select * from sales", code=1)[1] == "tidelog: there is no topic 'sales', but 'Sales'\n"
    _, err = run(bootstrap, "select * from sold", "--records-max", "30", code=1)
    assert err.startswith("tidelog: 'sold' has 31 records, and all of them would be held in memory")
    assert run(bootstrap, "select count(*) n from sold", "--records-max", "1", "--since", "1d")[0] == "n\n1\n"
