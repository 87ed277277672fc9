"""What a client process is given: which client it runs, against what, and where it notes what happens. Pure."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

CLOSE_S = 60.0
EXIT_NOT_CLOSED = 3
EXIT_FENCED = 4
"""Of a pipeline's worker that was replaced."""
TIDELOG, CLASSIC, CONSUMER, AIOKAFKA = "tidelog", "classic", "consumer", "aiokafka"
"""Clients: ours; librdkafka under each of its group protocols; aiokafka, which has the classic one only."""
CONFLUENT = "confluent"
"""librdkafka as the client of a pipeline."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    role: str
    """"producer", "reader", "pipeline" or "committed-reader"."""
    client: str
    name: str
    bootstrap: str
    topics: dict[str, int] = field(default_factory=dict)
    """Partitions by topic."""
    history: str = ""
    client_log: str = ""
    """Where the client's own debug output goes."""
    group: str = ""
    commits_itself: bool = False
    """The client commits in the background, as most programs let it; otherwise the reader commits and waits."""
    rate: int = 0
    """Records a second of a producer."""
    transactional_id: str = ""
    """Of a pipeline's worker."""
    outputs: dict[str, int] = field(default_factory=dict)
    """Partitions of the topics that a pipeline writes."""

    def text(self) -> str:
        return json.dumps(asdict(self))
