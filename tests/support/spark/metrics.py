"""What the brokers of a cluster tell of themselves at /metrics."""

from __future__ import annotations

import re
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator

from tidelog.testing import LocalCluster

_REQUESTS = re.compile(r'^tidelog_grpc_requests_total\{method="(\w+)",service="\w+"\} (\d+)$', re.MULTILINE)


def _pages(cluster: LocalCluster, nodes: Iterable[int]) -> Iterator[str]:
    for node in nodes:
        with urllib.request.urlopen(f"http://localhost:{cluster.ports(node).http}/metrics", timeout=10) as answer:
            yield answer.read().decode()


def requests(cluster: LocalCluster, nodes: Iterable[int] = (1, 2, 3)) -> Counter[str]:
    """By method, of these nodes together."""
    found: Counter[str] = Counter()
    for page in _pages(cluster, nodes):
        for method, count in _REQUESTS.findall(page):
            found[method] += int(count)
    return found


def lag(cluster: LocalCluster, group: str, topic: str) -> int:
    """As docs/operations.md says that it is to be had."""
    ends = re.compile(rf'^tidelog_topic_end_offset\{{topic="{topic}"\}} (\d+)$', re.MULTILINE)
    known = re.compile(rf'^tidelog_group_committed_offset\{{group="{group}",topic="{topic}"\}} (\d+)$', re.MULTILINE)
    pages = list(_pages(cluster, (1, 2, 3)))
    end, committed = (sum(int(one) for page in pages for one in line.findall(page)) for line in (ends, known))
    return end - committed
