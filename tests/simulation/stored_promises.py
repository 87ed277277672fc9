"""What a Raft node promises with a message is in its state store when the message leaves, on the device.

    a vote, its own or for another    the epoch and the vote
    an append or a heartbeat acked    the epoch; what is acknowledged as matching is synced, or in a snapshot

A loss of power right after the message would show the same, but only if the same epoch had another candidate, or the
entries another majority. Here one message is enough.
"""

from __future__ import annotations

from tidelog.raft.messages import AppendResponse, Message, VoteRequest, VoteResponse
from tidelog.raft.persistent_state import PersistentState, unpack_catalogue, unpack_state
from tidelog.raft.storage import CATALOGUE_KEY, STATE_KEY, RaftStorage
from tidelog.world.sealing import unseal
from tidelog.world.simulated.store import SimStore, SimStoreDevice

REMEMBERED_MAX = 64
_unpacked: dict[bytes, PersistentState] = {}
_newest: dict[bytes, int] = {}
"""Of the catalogues that were read last."""


def _device(storage: RaftStorage) -> SimStoreDevice:
    store = storage.store
    assert isinstance(store, SimStore), "a member on a simulated store"
    return store._device


def stored_state(storage: RaftStorage) -> PersistentState:
    """As the next life of the node would find it."""
    sealed = _device(storage).stored[STATE_KEY]
    state = _unpacked.get(sealed)
    if state is None:
        if len(_unpacked) >= REMEMBERED_MAX:
            _unpacked.clear()
        state = _unpacked[sealed] = unpack_state(unseal(STATE_KEY, sealed, path="the state store"))
    return state


def newest_snapshot(storage: RaftStorage) -> int:
    """The newest snapshot that is stored: one that was received is acknowledged before the log begins after it."""
    sealed = _device(storage).stored.get(CATALOGUE_KEY)
    if sealed is None:
        return 0
    newest = _newest.get(sealed)
    if newest is None:
        if len(_newest) >= REMEMBERED_MAX:
            _newest.clear()
        catalogue = unpack_catalogue(unseal(CATALOGUE_KEY, sealed, path="the state store"))
        newest = _newest[sealed] = max((int(snapshot.offset) for snapshot in catalogue), default=0)
    return newest


def unstored_promise(storage: RaftStorage, message: Message) -> str | None:
    """What the message promises and the store lacks; None if it has everything."""
    if isinstance(message, VoteResponse) and message.granted:
        stored = stored_state(storage).hard_state
        if stored.epoch < message.epoch or (stored.epoch == message.epoch and stored.voted_for is None):
            return f"grants its vote in epoch {message.epoch}, and has stored {stored}"
    elif isinstance(message, VoteRequest):
        stored = stored_state(storage).hard_state
        if stored.epoch < message.epoch:
            return f"asks for votes in epoch {message.epoch}, and has stored {stored}"
    elif isinstance(message, AppendResponse) and not message.rejected:
        state = stored_state(storage)
        if state.hard_state.epoch < message.epoch:
            return f"acknowledges in epoch {message.epoch}, and has stored {state.hard_state}"
        if message.counts and message.match > max(state.synced_end, newest_snapshot(storage)):
            return f"acknowledges entries up to {message.match}, and has stored that {state.synced_end} are synced"
    return None
