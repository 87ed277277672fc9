"""Values of configs as a command takes them: `retention.ms=1h`, `segment.bytes=64MiB`.

The cluster stores plain numbers, which every client of Kafka understands: units are resolved here, by the unit of the
key. A key that this version does not know is sent as it is; the cluster decides.
"""

import re

from tidelog.cli.main import UsageError
from tidelog.cli.pairs import pairs_of

EXAMPLES = {"ms": "90s, 1h, 7d", "bytes": "64KiB, 512MiB, 1GiB"}


def config_pairs_of(items: list[str], option: str, scope: str) -> list[tuple[str, str]]:
    """Parse KEY=VALUE for a `topic`, a `broker` or the `cluster`, with values in each key's own unit."""
    if not items:
        return []
    from tidelog.metadata.config_table import TABLES, Scope  # only where it is needed: it takes as long as the command
    from tidelog.server.config import with_unit

    table = TABLES[Scope(scope)]
    pairs = []
    for key, text in pairs_of(items, option):
        row = table.get(key)
        value = text if row is None else with_unit(text.strip(), row.unit)
        if row is not None and row.unit in EXAMPLES and not re.fullmatch(r"[+-]?\d+", value):
            raise UsageError(
                f"{option} {key}={text}: an integer ({row.unit}), or one with a unit: {EXAMPLES[row.unit]}"
            )
        pairs.append((key, value))
    return pairs
