"""The transaction coordinator's machine under every interleaving: `tidelog.coordinator.transactions.machine`.

One transactional id: an owner, a second instance, members, two partitions (`transaction_partition`), a coordinator.
A message arrives whenever it likes, also after everything else; budgets bound how often one arrives twice, how often a
reply is lost, and how often something begins. A decision and its commit are one step, and so are a reply and its
arrival: nobody sees a decision that is not committed, and a client may be slow.

Checked at every state: `check_step` of the machine; a transaction never gets the batch of another one, nor a partition
two outcomes of one; only what an End has committed is committed; what is reported as committed or aborted is; nothing
is fatal for a client but a newer instance. `check_progress`: everything ends, and a new instance works.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from exploration.explorer import Action
from exploration.transaction_partition import ACK, ASK, LATE, Batch, MarkerMessage, PartitionLeader
from exploration.transaction_state import (
    HEALER,
    ID,
    NEW,
    OVER,
    OWNER,
    READY,
    SECOND,
    WAITING,
    Budgets,
    Client,
    Exploration,
    MemberProcess,
    Message,
    replayed,
)
from tidelog.coordinator.transactions.invariants import validate
from tidelog.coordinator.transactions.machine import TransactionMachine
from tidelog.coordinator.transactions.queries import markers_to_write
from tidelog.coordinator.transactions.records import Status, Transaction, TransactionRecord
from tidelog.coordinator.transactions.requests import (
    Abort,
    AddPartitions,
    Complete,
    End,
    EndReply,
    InitProducer,
    Join,
    Prepare,
    ProducerIdNeeded,
    TimeOut,
)
from tidelog.coordinator.transactions.state import EMPTY, apply
from tidelog.model.errors import ErrorCode, TidelogError
from tidelog.model.ids import Offset, PartitionId, TopicId

TOPIC = TopicId(UUID(int=1))
PARTITIONS = (0, 1)
TIMEOUT_MS = 1
FATAL = (ErrorCode.PRODUCER_FENCED, ErrorCode.INVALID_PRODUCER_ID_MAPPING, ErrorCode.INVALID_TXN_STATE)
HEALING_STEPS = 300
REPEATED = ("init", "end", "batch", "client add", "add", "marker", "complete", "timeout")
"""Messages that may arrive twice, except for two that look like new ones: the first request of an instance, and the End
of version 1."""
ANSWERED = ("init", "end", "prepare", "join", "batch", "added")
"""Messages with whose arrival a client gets a reply, which may be lost."""


@dataclass(frozen=True)
class TransactionModel:
    budgets: Budgets = field(default_factory=Budgets)
    version: int = 2
    first_epoch: int = 0
    keeps_prepared: bool = False
    partitions: int = 2
    checks_answers: bool = True

    def initial(self) -> Exploration:
        found = Exploration(dataclasses.replace(self.budgets), {name: Client(name) for name in (OWNER, SECOND, HEALER)})
        found.partitions = [PartitionLeader(self.checks_answers) for _ in PARTITIONS]
        found.members = [MemberProcess(f"m{number}") for number in range(self.budgets.members)]
        known = Transaction(producer_id=1, epoch=self.first_epoch, timeout_ms=TIMEOUT_MS)
        found.state = apply(EMPTY, [TransactionRecord(ID, known)])
        return found

    # Actions.

    def actions(self, state: Exploration) -> list[Action]:
        found: list[Action] = []
        for number, message in enumerate(state.network):
            found.append(("deliver", number))
            is_as_new = message[:3:2] == ("init", -1) or (message[0] == "end" and self.version < 2)
            if state.left.repeats and message[0] in REPEATED and not is_as_new:
                found.append(("repeat", number))
            if state.left.losses and message[0] in ANSWERED:
                found.append(("lose_reply", number))
        for client in state.clients.values():
            if client.name != HEALER:
                found += self._client_actions(state, client)
        found += [("join", n) for n, member in enumerate(state.members) if member.phase == NEW]
        found += [("write", n) for n, member in enumerate(state.members) if member.phase == READY]
        left, transaction = state.left, state.state.ids[ID]
        if left.crashes:
            found.append(("crash",))
        if left.elections:
            found += [("election", number) for number in PARTITIONS]
        if left.timeouts and transaction.is_open:
            found.append(("timeout", transaction.number))
        if left.operators and transaction.is_open:
            found.append(("operator",))
        return found

    def _client_actions(self, state: Exploration, client: Client) -> list[Action]:
        name, left = client.name, state.left
        if client.phase == NEW:
            return [("start", name)] if name == OWNER or left.instances else []
        if client.phase == WAITING and client.waits_for not in state.network:
            return [("retry", name)]
        if client.phase != READY:
            return []
        found: list[Action] = []
        may_begin = client.tag or client.started < self.budgets.transactions
        if may_begin and not client.is_broken and not client.is_prepared:
            found += [("send", name, each) for each in PARTITIONS[: self.partitions] if each not in client.sent]
        if client.tag and not client.is_broken and self._unsent(state, client):
            found.append(("resend", name))
        if set(client.sent) - set(client.added) and self.version < 2:
            return found  # Kafka's clients wait until the partitions are added
        can_commit = all(client.sent.values()) and not client.is_broken
        if can_commit and (client.tag or (may_begin and self._members_done(state))):
            found.append(("commit", name))
        if can_commit and client.tag and left.prepares and not client.is_prepared:
            found.append(("prepare", name))
        if client.tag and (left.aborts or client.is_broken):
            found.append(("abort", name))
        return found

    def _unsent(self, state: Exploration, client: Client) -> list[Message]:
        """Batches that are not acknowledged, and on their way no more."""
        batches = [self._batch(client, number) for number, is_acked in client.sent.items() if not is_acked]
        return [
            message
            for message in batches
            if message not in state.network
            and client.producer_id not in state.partitions[message[1]].questions
            and ("client add", client.name, client.producer_id, client.epoch, message[1]) not in state.network
        ]

    def _members_done(self, state: Exploration) -> tuple[int, ...]:
        return tuple(each.producer_id for each in state.members if each.is_acked and each.phase != OVER)

    def apply(self, state: Exploration, action: Action) -> None:
        kind, *rest = action
        budget = {
            "repeat": "repeats",
            "lose_reply": "losses",
            "crash": "crashes",
            "election": "elections",
            "timeout": "timeouts",
            "operator": "operators",
            "prepare": "prepares",
        }.get(kind)
        if budget is not None:
            setattr(state.left, budget, getattr(state.left, budget) - 1)
        if kind in ("deliver", "repeat", "lose_reply"):
            self._deliver(state, state.network[rest[0]], is_kept=kind == "repeat", is_lost=kind == "lose_reply")
        elif kind in ("join", "write"):
            self._member_acts(state, state.members[rest[0]])
        elif kind == "crash":
            self._crash(state)
        elif kind == "election":
            state.partitions[rest[0]].restart()
            self._send_markers(state)
        elif kind == "timeout":
            state.put(("timeout", rest[0]))
        elif kind == "operator":
            state.put(("operator",))
        else:
            self._client_acts(state, state.clients[rest[0]], kind, rest[1:])

    def _client_acts(self, state: Exploration, client: Client, kind: str, rest: list[Any]) -> None:
        if kind == "start":
            state.left.instances -= client.name == SECOND
            self._ask(state, client, ("init", client.name, -1, -1, self.keeps_prepared and client.name != OWNER))
        elif kind == "retry":
            state.put(client.waits_for)
        elif kind == "resend":
            for message in self._unsent(state, client):
                self._send(state, client, message)
        elif kind == "send":
            self._begin(client)
            client.sent[rest[0]] = False
            self._send(state, client, self._batch(client, rest[0]))
        elif kind == "prepare":
            self._ask(state, client, ("prepare", client.name, client.tag, client.producer_id, client.epoch))
        else:
            assert kind in ("commit", "abort"), kind
            state.left.aborts -= kind == "abort" and not client.is_broken
            self._begin(client)
            named = self._members_done(state) if kind == "commit" else ()
            end = ("end", client.name, client.tag, client.producer_id, client.epoch, kind == "commit", named)
            self._ask(state, client, end)

    @staticmethod
    def _begin(client: Client) -> None:
        if not client.tag:
            client.started += 1
            client.tag = f"{client.name}{client.started}"

    @staticmethod
    def _ask(state: Exploration, client: Client, message: Message) -> None:
        client.phase, client.waits_for = WAITING, message
        state.put(message)

    @staticmethod
    def _batch(client: Client, partition: int) -> Message:
        sequence = client.sequences.get(partition, 0)
        return "batch", partition, client.name, client.tag, client.producer_id, client.epoch, sequence

    def _send(self, state: Exploration, client: Client, message: Message) -> None:
        partition = message[1]
        if self.version < 2 and partition not in client.added:
            state.put(("client add", client.name, client.producer_id, client.epoch, partition))
        else:
            state.put(message)

    def _member_acts(self, state: Exploration, member: MemberProcess) -> None:
        number = state.members.index(member)
        if member.phase == NEW:
            state.put(("join", number))
        else:
            state.put(("batch", 1, f"member {number}", member.tag, member.producer_id, 0, 0))
        member.phase = WAITING

    def _crash(self, state: Exploration) -> None:
        """The coordinator is another broker now, and knows what is in the log."""
        before = state.state
        state.state = replayed(before)
        assert state.state == before, "the replay of the records is another state"
        state.coordinator_epoch += 1
        state.written.clear()
        self._send_markers(state)

    # Messages.

    def _deliver(self, state: Exploration, message: Message, *, is_kept: bool, is_lost: bool) -> None:
        handler = getattr(self, "_on_" + message[0].replace(" ", "_"))
        if not is_kept:
            state.network.remove(message)
        reply: Callable[[], None] | None = handler(state, message)
        if reply is not None and not is_lost:
            reply()
        validate(state.state)

    def _decide(self, state: Exploration, request: Any) -> Any:
        """Decide and commit; raises the rejection."""
        machine = TransactionMachine()
        try:
            decisions, reply = machine.decide(state.state, request, offset=Offset(0))
        except ProducerIdNeeded:
            state.next_producer_id += 1
            request = dataclasses.replace(request, new_producer_id=state.next_producer_id)
            decisions, reply = machine.decide(state.state, request, offset=Offset(0))
        before = state.state.ids[ID]
        state.state = machine.apply(state.state, decisions)
        after = state.state.ids[ID]
        if after.status == Status.PREPARE_COMMIT and before.status != after.status:
            assert isinstance(request, End), f"a {type(request).__name__} commits"
        if before.is_ending and after.is_ending:
            assert before.status == after.status, "an outcome changes"
        if after.is_ending and not before.is_ending:
            state.written.clear()
            self._send_markers(state)
        return reply

    def _send_markers(self, state: Exploration) -> None:
        transaction = state.state.ids[ID]
        missing = False
        for marker in markers_to_write(ID, transaction, coordinator_epoch=state.coordinator_epoch):
            for each in marker.partitions:
                if (marker.producer_id, each.partition) in state.written:
                    continue
                missing = True
                sent = MarkerMessage(
                    marker.producer_id,
                    marker.epoch,
                    marker.coordinator_epoch,
                    marker.is_commit,
                    marker.is_strict,
                    marker.number,
                    state.partitions[each.partition].leader_epoch,
                )
                state.put(("marker", each.partition, *sent))
        if transaction.is_ending and not missing:
            state.put(("complete", transaction.number))

    def _ask_coordinator(
        self, state: Exploration, message: Message, request: Any, arrive: Callable[[Any], None]
    ) -> tuple[Any, Callable[[], None]]:
        """Return the reply (None: it is a rejection), and what happens when the client gets it."""
        client = state.clients[message[1]]
        try:
            reply = self._decide(state, request)
        except TidelogError as error:
            rejection = error
            return (
                None,
                lambda: self._rejected(state, client, message, rejection) if client.waits_for == message else None,
            )
        return reply, lambda: arrive(reply) if client.waits_for == message else None

    def _rejected(self, state: Exploration, client: Client, message: Message, error: TidelogError) -> None:
        """The reply of a client is this error."""
        if error.code is ErrorCode.CONCURRENT_TRANSACTIONS:
            state.put(message)
        elif error.code is ErrorCode.TRANSACTION_ABORTABLE:
            client.phase, client.is_broken, client.waits_for = READY, True, ()
        else:
            assert error.code in FATAL, repr(error)
            assert state.newest != client.name, f"{error} is fatal for {client.name}, and there is no newer instance"
            client.phase, client.waits_for = OVER, ()

    def _on_init(self, state: Exploration, message: Message) -> Callable[[], None] | None:
        _, name, producer_id, epoch, keep = message
        client = state.clients[name]
        request = InitProducer(
            transactional_id=ID,
            timeout_ms=TIMEOUT_MS,
            now_ms=0,
            producer_id=producer_id,
            epoch=epoch,
            keep_prepared=keep,
        )

        def arrive(reply: Any) -> None:
            client.phase, client.waits_for = READY, ()
            client.producer_id, client.epoch = reply.producer_id, reply.epoch
            client.sequences, client.is_broken, client.is_prepared = {}, False, False
            client.tag, client.sent, client.added = "", {}, ()
            if reply.has_open:
                client.tag, client.is_prepared = state.clients[OWNER].tag, True

        reply, arrival = self._ask_coordinator(state, message, request, arrive)
        if reply is not None and producer_id < 0:
            state.newest = name
        if reply is not None and reply.is_ending:
            state.put(message)
            return None
        return arrival

    def _on_prepare(self, state: Exploration, message: Message) -> Callable[[], None]:
        _, name, _, producer_id, epoch = message
        client = state.clients[name]
        request = Prepare(transactional_id=ID, producer_id=producer_id, epoch=epoch, now_ms=0)

        def arrive(_: Any) -> None:
            client.phase, client.waits_for, client.is_prepared = READY, (), True

        return self._ask_coordinator(state, message, request, arrive)[1]

    def _on_end(self, state: Exploration, message: Message) -> Callable[[], None]:
        _, name, tag, producer_id, epoch, is_commit, named = message
        request = End(
            transactional_id=ID,
            producer_id=producer_id,
            epoch=epoch,
            is_commit=is_commit,
            now_ms=0,
            version=self.version,
            members=named,
            token=tag.encode() if is_commit and self.version >= 2 else b"",
        )
        before = state.state.ids[ID]
        _, arrival = self._ask_coordinator(
            state, message, request, lambda reply: self._end_arrives(state, state.clients[name], message, reply)
        )
        after = state.state.ids[ID]
        if after.status == Status.PREPARE_COMMIT and before.status != after.status:
            tags = {tag, *(each.tag for each in state.members if each.producer_id in named)}
            for each in tags:
                assert state.reported.get(each, True), f"{each} commits, and was reported as aborted"
                assert all(leader.results.get(each, True) for leader in state.partitions), f"{each} commits, torn"
            state.committed |= tags
        return arrival

    def _end_arrives(self, state: Exploration, client: Client, message: Message, reply: EndReply) -> None:
        _, _, tag, _, _, is_commit, named = message
        assert (tag in state.committed) == is_commit, f"{tag} was reported as {'committed' if is_commit else 'aborted'}"
        state.reported[tag] = is_commit
        for member in state.members:
            if member.producer_id in named:
                assert member.tag in state.committed, f"{member.tag} was reported as committed"
                state.reported[member.tag] = True
                member.phase = OVER
            elif member.is_acked:
                member.phase = OVER
        has_unknown = not all(client.sent.values())
        if self.version < 2:
            for partition in client.sent:
                client.sequences[partition] = client.sequences.get(partition, 0) + 1
        else:
            client.sequences = {}
        client.phase, client.waits_for = READY, ()
        client.tag, client.sent, client.added, client.is_broken, client.is_prepared = "", {}, (), False, False
        if self.version >= 2:
            client.producer_id, client.epoch = reply.producer_id, reply.epoch
        elif has_unknown:
            # Kafka's clients raise their epoch, since they do not know the sequence numbers of the partition.
            self._ask(state, client, ("init", client.name, client.producer_id, client.epoch, False))

    def _add(self, state: Exploration, producer_id: int, epoch: int, partition: int, *, is_leader: bool) -> int:
        request = AddPartitions(
            transactional_id=ID,
            producer_id=producer_id,
            epoch=epoch,
            partitions=frozenset({PartitionId(TOPIC, partition)}),
            now_ms=0,
            version=self.version,
            verify_only=is_leader and self.version < 2,
        )
        return int(self._decide(state, request).number)

    def _on_client_add(self, state: Exploration, message: Message) -> Callable[[], None]:
        _, name, producer_id, epoch, partition = message
        client = state.clients[name]
        is_awaited = (client.producer_id, client.epoch) == (producer_id, epoch) and partition in client.sent
        try:
            self._add(state, producer_id, epoch, partition, is_leader=False)
        except TidelogError as error:
            rejection = error
            if not is_awaited or client.phase != READY:
                return lambda: None
            return lambda: self._rejected(state, client, message, rejection)

        def arrive() -> None:
            if is_awaited and client.phase == READY:
                client.added = tuple(sorted({*client.added, partition}))
                state.put(self._batch(client, partition))

        return arrive

    def _on_batch(self, state: Exploration, message: Message) -> Callable[[], None] | None:
        _, partition, *values = message
        batch = Batch(*values)
        leader = state.partitions[partition]
        if batch.producer_id in leader.questions:
            if leader.questions[batch.producer_id].batch != batch:
                state.put(message)  # waits for its turn
            return None
        return self._answer_batch(state, partition, batch, leader.receive(batch))

    def _answer_batch(self, state: Exploration, partition: int, batch: Batch, answer: str) -> Callable[[], None] | None:
        if answer == ASK:
            leader = state.partitions[partition]
            number = leader.questions[batch.producer_id].number
            state.put(("add", partition, batch.producer_id, batch.epoch, leader.leader_epoch, number))
            return None
        return lambda: self._batch_arrives(state, partition, batch, is_acked=answer == ACK)

    def _batch_arrives(self, state: Exploration, partition: int, batch: Batch, *, is_acked: bool) -> None:
        if batch.sender in state.clients:
            client = state.clients[batch.sender]
            if client.phase == READY and (client.tag, client.epoch) == (batch.tag, batch.epoch):
                client.is_broken |= not is_acked
                if is_acked:
                    client.sent[partition] = True
            return
        member = state.members[int(batch.sender.split()[1])]
        if member.phase == WAITING:
            member.is_acked = is_acked
            member.phase = "done" if is_acked else OVER

    def _on_add(self, state: Exploration, message: Message) -> None:
        _, partition, producer_id, epoch, leader_epoch, question = message
        try:
            answer: Any = self._add(state, producer_id, epoch, partition, is_leader=True)
        except TidelogError as error:
            if error.code is ErrorCode.CONCURRENT_TRANSACTIONS:
                state.put(message)
                return
            answer = error.code.name
        state.put(("added", partition, producer_id, leader_epoch, question, answer))

    def _on_added(self, state: Exploration, message: Message) -> Callable[[], None] | None:
        _, partition, producer_id, leader_epoch, number, answer = message
        leader = state.partitions[partition]
        question = leader.questions.get(producer_id)
        if leader_epoch != leader.leader_epoch or question is None or question.number != number:
            return None
        if isinstance(answer, str):
            del leader.questions[producer_id]
            return lambda: self._batch_arrives(state, partition, question.batch, is_acked=False)
        return self._answer_batch(state, partition, question.batch, leader.answered(producer_id, answer))

    def _on_join(self, state: Exploration, message: Message) -> Callable[[], None]:
        member = state.members[message[1]]
        try:
            reply = self._decide(state, Join(transactional_id=ID, now_ms=0, label=member.tag))
        except TidelogError as error:
            if error.code is ErrorCode.CONCURRENT_TRANSACTIONS:
                state.put(message)
                return lambda: None
            member.phase = OVER if member.phase == WAITING else member.phase
            return lambda: None

        def arrive() -> None:
            if member.phase == WAITING and member.producer_id < 0:
                member.producer_id, member.phase = reply.producer_id, READY

        return arrive

    def _on_marker(self, state: Exploration, message: Message) -> None:
        _, partition, *values = message
        marker = MarkerMessage(*values)
        leader = state.partitions[partition]
        open_tag = leader.producers[marker.producer_id].open_tag if marker.producer_id in leader.producers else ""
        answer = leader.write(marker)
        if answer == ACK and open_tag:
            expected = open_tag in state.committed
            assert marker.is_commit == expected, f"{open_tag} in partition {partition} gets the other marker"
        transaction = state.state.ids[ID]
        is_mine = marker.coordinator_epoch == state.coordinator_epoch and marker.number == transaction.number
        if answer in (ACK, LATE) and is_mine and transaction.is_ending:
            state.written.add((marker.producer_id, partition))
            if not self._unwritten(state):
                state.put(("complete", transaction.number))

    def _unwritten(self, state: Exploration) -> bool:
        return any(
            (marker.producer_id, each.partition) not in state.written
            for marker in markers_to_write(ID, state.state.ids[ID], coordinator_epoch=0)
            for each in marker.partitions
        )

    def _on_complete(self, state: Exploration, message: Message) -> None:
        before = state.state.ids[ID]
        if self._decide(state, Complete(transactional_id=ID, number=message[1], now_ms=0)):
            for leader in state.partitions:
                for producer_id in (before.producer_id, *(each.producer_id for each in before.members)):
                    producer = leader.producers.get(producer_id)
                    assert producer is None or not producer.open_tag, f"{producer.open_tag} hangs, and is complete"

    def _on_timeout(self, state: Exploration, message: Message) -> None:
        self._decide(state, TimeOut(transactional_id=ID, number=message[1], now_ms=10**9))

    def _on_operator(self, state: Exploration, message: Message) -> None:
        self._decide(state, Abort(transactional_id=ID, now_ms=0))

    # Progress.

    def check_progress(self, state: Exploration) -> None:
        """Everything arrives; clients end what they have open; then a new instance writes and commits."""
        state.left = Budgets(**dict.fromkeys(vars(state.left), 0))
        self._run_until_quiet(state)
        transaction = state.state.ids[ID]
        if transaction.is_open:
            self._on_timeout(state, ("timeout", transaction.number))
            self._run_until_quiet(state)
        state.check_healed()
        healer = state.clients[HEALER]
        self._client_acts(state, healer, "start", [])
        self._run_until_quiet(state)
        assert healer.phase == READY, f"a new instance is {healer.phase}"
        if healer.tag:
            self._client_acts(state, healer, "commit", [])
            self._run_until_quiet(state)
        for _ in range(2):  # the first one aborts if it names members of a transaction that timed out
            self._client_acts(state, healer, "send", [0])
            tag = healer.tag
            self._run_until_quiet(state)
            if state.reported[tag]:
                break
        assert state.reported[tag], "a new instance cannot commit"
        state.check_healed()

    def _run_until_quiet(self, state: Exploration) -> None:
        for _ in range(HEALING_STEPS):
            if state.network:
                for message in list(state.network):  # some of them wait for others
                    self._deliver(state, message, is_kept=False, is_lost=False)
                continue
            ready = [c for c in state.clients.values() if c.phase == WAITING]
            opened = [c for c in state.clients.values() if c.phase == READY and c.tag]
            members = [member for member in state.members if member.phase == READY]
            if ready:
                self._client_acts(state, ready[0], "retry", [])
            elif members:
                self._member_acts(state, members[0])
            elif opened and self._unsent(state, opened[0]) and not opened[0].is_broken:
                self._client_acts(state, opened[0], "resend", [])
            elif opened:
                self._client_acts(state, opened[0], "abort" if opened[0].is_broken else "commit", [])
            else:
                return
        raise AssertionError(f"nothing ends: {state.network}, {state.state.ids[ID]}")

    def key(self, state: Exploration) -> Any:
        return state.as_key()
