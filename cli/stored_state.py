"""What the state store of a log directory says of one log, read without touching it.

The store stands beside the logs, in a directory of its own inside the node's log directory. A log that was copied
elsewhere has none; then its files are all there is, and that is no error.
"""

import os
import re
from collections.abc import Iterator
from types import TracebackType
from uuid import UUID

from tidelog.log.producer_snapshot import ProducerRow, decode_snapshot
from tidelog.log.stored_state import StoredState, load_state
from tidelog.model.errors import TidelogError
from tidelog.model.ids import PartitionId, TopicId
from tidelog.world.real.store import LmdbStore

_DIRECTORY = re.compile(r".*\.(?P<topic>[0-9a-f]{32})-(?P<partition>\d+)")
_DATA_FILE = "data.mdb"


class StateReader:
    """Opens the state store of each log directory once, to read; closes them when it ends."""

    def __init__(self) -> None:
        self._stores: dict[str, LmdbStore | None] = {}

    def read(self, directory: str) -> StoredState | None:
        """The state of the log in `directory`; None without a store, or if its name does not say which log it is."""
        real = os.path.realpath(directory)
        match = _DIRECTORY.fullmatch(os.path.basename(real))
        if match is None:
            return None
        store = self._store(os.path.dirname(real))
        if store is None:
            return None
        log_id = PartitionId(TopicId(UUID(match["topic"])), int(match["partition"]))
        return load_state(store, log_id)

    def _store(self, parent: str) -> LmdbStore | None:
        if parent not in self._stores:
            with os.scandir(parent) as entries:
                found = sorted(entry.path for entry in entries if os.path.exists(os.path.join(entry.path, _DATA_FILE)))
            self._stores[parent] = LmdbStore(found[0], read_only=True) if found else None
        return self._stores[parent]

    def __enter__(self) -> "StateReader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for store in self._stores.values():
            if store is not None:
                store.close()


def newest_producers(state: StoredState) -> tuple[int, list[ProducerRow]] | None:
    """The newest producer snapshot that can be read, with the offset it was taken at."""
    for offset in sorted(state.producers, reverse=True):
        try:
            data = state.producers[offset]
            return offset, decode_snapshot(data).producers if data else []
        except TidelogError:
            continue  # `--verify` names it
    return None


def state_document(state: StoredState) -> dict[str, object]:
    """The state as JSON; keys are listed in docs/cli.md."""
    producers = newest_producers(state)
    return {
        "start_offset": state.start,
        "recovery_point": None if state.mark is None else state.mark.offset,
        "clean_stop": state.clean,
        "is_compacted": state.gaps,
        "damage": None if state.damage is None else {"good_end": state.damage[0], "reason": state.damage[1]},
        "suspect_from": state.suspect,
        "epochs": [{"epoch": epoch, "start_offset": start} for epoch, start in state.epochs or ()],
        "sealed": [
            {
                "base_offset": info.base_offset,
                "next_offset": info.next_offset,
                "size": info.size,
                "largest_timestamp": info.largest_timestamp,
                "crc": info.crc,
            }
            for _, info in sorted(state.segments.items())
        ],
        "producers_offset": None if producers is None else producers[0],
        "producers": [
            {
                "producer_id": row.producer_id,
                "producer_epoch": row.epoch,
                "last_sequence": row.last_sequence,
                "last_offset": row.offset,
                "open_transaction_offset": row.open_offset,
            }
            for row in ([] if producers is None else producers[1])
        ],
        "unreadable": state.lost,
    }


def state_lines(state: StoredState) -> Iterator[str]:
    """The state for a person, in a few lines."""
    points = {
        "start offset": state.start,
        "recovery point": None if state.mark is None else state.mark.offset,
        "clean stop at": state.clean,
        "suspect from": state.suspect,
    }
    said = [f"{what} {offset}" for what, offset in points.items() if offset is not None]
    yield "state: " + (", ".join(said) or "nothing stored")
    if state.damage is not None:
        yield f"damaged from {state.damage[0]} on: {state.damage[1]}"
    if state.epochs:
        yield "epochs: " + ", ".join(f"{epoch} from {start}" for epoch, start in state.epochs)
    if state.segments:
        yield f"sealed segments: {len(state.segments)}"
    producers = newest_producers(state)
    if producers is not None and producers[1]:
        yield f"producers at {producers[0]}: {len(producers[1])}"
        for row in producers[1]:
            opened = "" if row.open_offset is None else f", transaction open from {row.open_offset}"
            last = f"last sequence {row.last_sequence}, offset {row.offset}"
            yield f"  producer {row.producer_id}, epoch {row.epoch}: {last}{opened}"
