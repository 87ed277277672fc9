"""`tidelog query` against a real cluster: topics as tables, bounds, and the three outputs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tidelog
from tidelog.testing import LocalCluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]
PAGE = Path(__file__).resolve().parents[2] / "docs" / "cli.md"


@pytest.fixture(scope="module")
def bootstrap() -> Iterator[str]:
    with LocalCluster(nodes=1) as cluster:
        with tidelog.Admin(cluster.bootstrap) as admin:
            admin.create_topic("orders", partitions=3)
            admin.create_topic("customers.eu-1", partitions=1)
            admin.create_topic("Sales", partitions=1)
        with tidelog.Producer(cluster.bootstrap) as producer:
            keys = [f"k{number % 3}" for number in range(30)]
            values = [f'{{"amount": {number}}}' for number in range(30)]
            old_ms = 1_700_000_000_000
            producer.send_many("orders", keys=keys, values=values, timestamps_ms=[old_ms] * 30).result(30)
            producer.send("orders", '{"amount": 100}', key="k1").result(30)
            producer.send("customers.eu-1", b"\xff", key="k1", headers={"trace": b"1"}).result(30)
        yield cluster.bootstrap


def run(bootstrap: str, *arguments: str, code: int = 0) -> tuple[str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "tidelog", "query", *arguments, "--bootstrap", bootstrap],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout, done.stderr


def test_a_topic_is_a_table(bootstrap: str) -> None:
    sql = (
        "select key, count(*) n, sum((decode(value)->>'amount')::int) total from orders "
        "where timestamp < '2024-01-01' group by key order by key"
    )
    out, _ = run(bootstrap, sql)
    assert out.splitlines() == ["key   n  total", "k0   10    135", "k1   10    145", "k2   10    155"]


def test_topics_join_and_what_a_query_defines_is_none(bootstrap: str) -> None:
    sql = 'with mine as (select key from "customers.eu-1") select count(*) n from orders join mine using (key)'
    assert run(bootstrap, sql, "--output", "csv") == ("n\n11\n", "")


def test_since_bounds_what_is_read(bootstrap: str) -> None:
    out, _ = run(bootstrap, "select count(*) n, min(decode(value)) v from orders", "--since", "1d", "--output", "csv")
    assert out == 'n,v\n1,"{""amount"": 100}"\n'


def test_json_has_the_documented_keys(bootstrap: str) -> None:
    out, _ = run(bootstrap, 'select "offset", key, value, headers from "customers.eu-1"', "--output", "json")
    document = json.loads(out)
    rows = re.search(r"^Keys of `query`:\n\n((?:- .*\n)+)", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows is not None
    documented = set(re.findall(r"^- `([^`]+)`: ", rows[1], re.MULTILINE))
    found = {*document, *(f"columns[].{key}" for column in document["columns"] for key in column)}
    assert found == documented
    assert document["rows"] == [
        {"offset": 0, "key": "k1", "value": {"base64": "/w=="}, "headers": [{"name": "trace", "value": "1"}]}
    ]
    assert (document["count"], document["is_cut"]) == (1, False)
    cut = json.loads(run(bootstrap, "select key from orders", "--limit", "4", "--output", "json")[0])
    assert (len(cut["rows"]), cut["count"], cut["is_cut"]) == (4, 4, True)


def test_what_is_not_there_or_too_large_is_told_in_one_line(bootstrap: str) -> None:
    assert run(bootstrap, "select * from nope", code=1)[1] == "tidelog: there is no topic 'nope'\n"
    assert run(bootstrap, "select * from sales", code=1)[1] == "tidelog: there is no topic 'sales', but 'Sales'\n"
    _, err = run(bootstrap, "select * from orders", "--records-max", "30", code=1)
    assert err.startswith("tidelog: 'orders' has 31 records, and all of them would be held in memory")
    assert run(bootstrap, "select count(*) n from orders", "--records-max", "1", "--since", "1d")[0] == "n\n1\n"
