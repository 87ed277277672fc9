"""`python -m chaos.next_version server ...`: the command of a version that supports one more `metadata.version`.

There is one level so far. This one has the same records at the next level, so that an upgrade under fire does what a
real one will do: nodes of both versions run together, then the level rises, and no node of the older version may
register any more.
"""

from __future__ import annotations

import sys

from tidelog.cli.main import main
from tidelog.metadata.features import KNOWN_FEATURES, METADATA_VERSION

NEXT_LEVEL = KNOWN_FEATURES[METADATA_VERSION][1] + 1


if __name__ == "__main__":
    KNOWN_FEATURES[METADATA_VERSION] = (KNOWN_FEATURES[METADATA_VERSION][0], NEXT_LEVEL)
    sys.exit(main())
