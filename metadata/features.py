"""Feature levels: which ones this version supports, the bootstrap records of a new cluster, and updates. Pure.

`metadata.version` gates the types and fields of records: a level may be written only when every broker and controller
can read it. An upgrade is checked against what every registered broker supports and what every controller of the quorum
reports (`metadata.controller_node`); a downgrade is safe if nothing that is stored needs the higher level.
"""

from dataclasses import dataclass

from tidelog.metadata.decision import Context, Decision, Outcomes, each
from tidelog.metadata.image import ClusterImage
from tidelog.metadata.records import FeatureLevel, Record
from tidelog.model.admin_errors import FeatureUpdateError
from tidelog.model.errors import InvalidRequestError

METADATA_VERSION = "metadata.version"
KNOWN_FEATURES: dict[str, tuple[int, int]] = {METADATA_VERSION: (1, 1)}
"""name -> (lowest, highest) level of this version."""


def supported() -> tuple[tuple[str, int, int], ...]:
    """Returns the levels that a node of this version registers with."""
    return tuple((name, low, high) for name, (low, high) in sorted(KNOWN_FEATURES.items()))


def bootstrap_records() -> tuple[Record, ...]:
    """Returns the first decision of a new cluster."""
    return tuple(FeatureLevel(name=name, level=high) for name, (_, high) in sorted(KNOWN_FEATURES.items()))


def level_needed(image: ClusterImage) -> int:
    """Returns the lowest `metadata.version` that can hold this image.

    Unknown records and fields of a newer version need a higher level than this version has.
    """
    lowest, highest = KNOWN_FEATURES[METADATA_VERSION]
    return highest + 1 if image.unknown or image.unknown_fields else lowest


UPGRADE, SAFE_DOWNGRADE, UNSAFE_DOWNGRADE = "upgrade", "safe-downgrade", "unsafe-downgrade"


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureChange:
    name: str
    level: int
    kind: str = UPGRADE
    """`upgrade`; `safe-downgrade`, rejected if it would lose metadata; or `unsafe-downgrade`, which may lose some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateFeatures:
    changes: tuple[FeatureChange, ...]
    validate_only: bool = False


def update_features(
    image: ClusterImage,
    request: UpdateFeatures,
    context: Context,
    *,
    known: dict[str, tuple[int, int]] | None = None,
) -> Decision[Outcomes]:
    """`known`: the levels (lowest, highest) that this controller supports."""
    records: list[Record] = []

    def update(change: FeatureChange) -> None:
        _check_feature(image, change, context, KNOWN_FEATURES if known is None else known)
        if change.level != image.features.get(change.name, 0):
            records.append(FeatureLevel(name=change.name, level=change.level))

    outcomes = each(request.changes, lambda change: change.name, update)
    return Decision(tuple(records), outcomes)


def _check_feature(
    image: ClusterImage, change: FeatureChange, context: Context, known: dict[str, tuple[int, int]]
) -> None:
    present = image.features.get(change.name, 0)
    if change.name not in known:
        raise FeatureUpdateError(f"there is no feature {change.name[:60]!r}; there are: {', '.join(sorted(known))}")
    if change.kind not in (UPGRADE, SAFE_DOWNGRADE, UNSAFE_DOWNGRADE):
        raise InvalidRequestError(f"{change.kind[:40]!r}: {UPGRADE}, {SAFE_DOWNGRADE} or {UNSAFE_DOWNGRADE}")
    low, high = known[change.name]
    if not low <= change.level <= high:
        raise FeatureUpdateError(f"{change.name} {change.level}: this controller supports {low} to {high}")
    if change.level < present and change.kind == UPGRADE:
        raise InvalidRequestError(
            f"{change.name} is at {present}, {change.level} is lower: that is a downgrade, which may lose something"
        )
    if change.level > present and change.kind != UPGRADE:
        raise InvalidRequestError(f"{change.name} is at {present}, {change.level} is not lower")
    nodes = [(f"broker {number}", broker.features) for number, broker in sorted(image.brokers.items())]
    nodes += [(f"controller {number}", features) for number, features in context.controller_features]
    for node, features in nodes:
        lowest, highest = next(((a, b) for name, a, b in features if name == change.name), (0, 0))
        if not lowest <= change.level <= highest:
            raise FeatureUpdateError(
                f"{change.name} {change.level}: {node} supports {lowest} to {highest}; upgrade or unregister it first"
            )
    if change.kind == SAFE_DOWNGRADE and change.name == METADATA_VERSION and level_needed(image) > change.level:
        raise FeatureUpdateError(
            f"{change.name} {change.level} cannot keep what the cluster has stored; {UNSAFE_DOWNGRADE} would lose it"
        )
