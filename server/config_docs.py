"""Generates docs/node-configuration.md from the table of settings: `python -m tidelog.server.config_docs`.

A test compares the committed page with the generated one.
"""

from __future__ import annotations

import sys

from tidelog.server.config import allowed, as_text
from tidelog.server.settings_table import SETTINGS, Setting

_INTRODUCTION = """# Configuration of a node

<!-- Made by `python -m tidelog.server.config_docs > docs/node-configuration.md`; edit server/settings_table.py. -->

`tidelog server --config FILE` reads one TOML file. Keys may be quoted (`"log.dirs" = ...`), dotted (`log.dirs = ...`)
or in tables (`[log]`, then `dirs = ...`): they mean the same. Kafka's `server.properties` is read as it is; what means
nothing here is listed. Everything is checked before the node starts: an unknown key or a bad value is named with what
is allowed and the nearest known key, and the exit code is 2. `tidelog config check` does only that, `tidelog config
show` prints value, source and default.

- `TIDELOG_<KEY>` overrides a key: `TIDELOG_LOG_DIRS` is `log.dirs`. A variable that is no setting is a
  warning; an unknown key of the file is an error.
- `${env:NAME}`, `${file:PATH}` and `${credential:NAME}` (systemd's credentials) inside of a value are filled in; such
  values are not shown again.
- Times and sizes may carry a unit: `30s`, `7d`, `512MiB`.
- Relative paths count from where the file is.

[Settings of the cluster](configuration.md) may stand in the file of a controller. They are where the cluster *begins*:
the active controller writes those into the cluster's state that are not set there. What is set there counts, and a file
with another value is reported in the log.

Ports: 9092 for Kafka's protocol (brokers only), 9192 between nodes, 9292 for gRPC, 9392 for HTTP. A listener that is
not listed stands at this distance from one that is.
"""


def _default(row: Setting) -> str:
    if row.default_text:
        return row.default_text
    return f"`{as_text(row.default)}`" if as_text(row.default) else "none"


def page() -> str:
    lines = [_INTRODUCTION, "| key | allowed | default | meaning |", "| --- | --- | --- | --- |"]
    for row in SETTINGS:
        names = f"`{row.name}`" + "".join(f" (also `{alias}`)" for alias in row.aliases)
        lines.append(f"| {names} | {allowed(row)} | {_default(row)} | {row.doc} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
