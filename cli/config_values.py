"""Values of configs as a command takes them: `retention.ms=1h`, `segment.bytes=64MiB`.

The cluster stores plain numbers, which every client of Kafka understands: units are resolved here, by the unit of the
key. A key that this version does not know is sent as it is; the cluster decides.
"""

from tidelog.cli.pairs import pairs_of


def config_pairs_of(items: list[str], option: str, scope: str) -> list[tuple[str, str]]:
    """KEY=VALUE as given for a `topic`, a `broker` or the `cluster`; the values are in each key's own unit."""
    if not items:
        return []
    from tidelog.metadata.config_table import TABLES, Scope  # only where it is needed: it takes as long as the command
    from tidelog.server.config import with_unit

    table = TABLES[Scope(scope)]
    return [
        (key, with_unit(value.strip(), table[key].unit) if key in table else value)
        for key, value in pairs_of(items, option)
    ]
