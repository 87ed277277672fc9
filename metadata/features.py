"""Feature levels: what this version supports, what a new cluster begins with, what its state needs.

`metadata.version` gates the types and fields of records: a level may be written only when every node, brokers and
controllers, can read it. Raising is checked against what every registered broker has told, and what every controller of
the quorum tells when it is asked for that purpose (`metadata.shell`); lowering is safe if nothing that is stored
needs the higher level.
"""

from __future__ import annotations

from tidelog.metadata.image import ClusterImage
from tidelog.metadata.records import FeatureLevel, Record

METADATA_VERSION = "metadata.version"
KNOWN_FEATURES: dict[str, tuple[int, int]] = {METADATA_VERSION: (1, 1)}
"""name -> (lowest, highest) level of this version."""


def supported() -> tuple[tuple[str, int, int], ...]:
    """What a node of this version tells when it registers."""
    return tuple((name, low, high) for name, (low, high) in sorted(KNOWN_FEATURES.items()))


def bootstrap_records() -> tuple[Record, ...]:
    """The first decision of a new cluster."""
    return tuple(FeatureLevel(name=name, level=high) for name, (_, high) in sorted(KNOWN_FEATURES.items()))


def level_needed(image: ClusterImage) -> int:
    """The lowest `metadata.version` that can hold this image.

    What came from a newer version (unknown records and fields) needs more than this one knows.
    """
    lowest, highest = KNOWN_FEATURES[METADATA_VERSION]
    return highest + 1 if image.unknown or image.extras else lowest
