"""A program of several nodes that uses most of what the simulator has; prints the digest of its run.

Run by `test_sim_loop.py` in fresh processes with other hash seeds and other heaps: `determinism_program.py SEED JUNK`.
"""

import asyncio
import sys

from tidelog.log.group_commit import GroupCommit, SyncTicket
from tidelog.model.errors import StorageError
from tidelog.world.simulated import Latency, Loss, SimNode, SimWorld

NODES = ("alpha", "beta", "gamma")


class Journal:
    """A file that group commit syncs."""

    def __init__(self, node: SimNode, commit: GroupCommit) -> None:
        node.disk().make_directory("journal")
        self.file = node.disk().open("journal/log", create=True)
        self.node = node
        self.commit = commit

    def begin_sync(self) -> SyncTicket:
        return SyncTicket([self.file], ["journal", ""], end=self.file.size)

    def end_sync(self, ticket: SyncTicket) -> None:
        self.node.trace(f"durable {ticket.end}")

    def fail_sync(self, error: StorageError) -> None:
        self.node.trace(f"failed {error}")


async def consume(node: SimNode, queue: "asyncio.Queue[bytes]", journal: Journal) -> None:
    while True:
        try:
            async with asyncio.timeout(node.random.random() * 0.02):
                item = await queue.get()
        except TimeoutError:
            node.trace("nothing came")
            continue
        try:
            journal.file.append(item)
            journal.commit.request(journal)
        except StorageError as error:
            node.trace(f"{error}")
        await node.store().commit({b"size": b"%d" % journal.file.size})


async def produce(node: SimNode, queue: "asyncio.Queue[bytes]", number: int) -> None:
    for _ in range(40):
        await asyncio.sleep(node.random.expovariate(100))
        await queue.put(bytes([number]) * node.random.randrange(1, 6000))
    if number == 3:
        raise LookupError("a task group ends by this")


async def serve(node: SimNode) -> None:
    """One life: a task group that ends by an error, with its many tasks cancelled in the order of a set."""
    node.trace(f"size in store {node.store().get(b'size')!r}")
    commit = GroupCommit(node.disk(), on_failure=lambda error: node.trace(f"on failure {error}"))
    journal = Journal(node, commit)
    node.trace(f"size in file {journal.file.size}")
    queue: asyncio.Queue[bytes] = asyncio.Queue(4)
    while True:
        try:
            async with asyncio.TaskGroup() as tasks:
                for number in range(8):
                    tasks.create_task(produce(node, queue, number))
                    tasks.create_task(consume(node, queue, journal))
        except* LookupError:
            node.trace("task group ended")
        done, pending = await asyncio.wait(
            {asyncio.ensure_future(asyncio.sleep(node.random.random() * 0.01, number)) for number in range(10)},
            return_when=asyncio.FIRST_COMPLETED,
        )
        node.trace(f"{[task.result() for task in done]} of {len(done) + len(pending)}")
        for task in pending:
            task.cancel()


def fault(world: SimWorld, name: str) -> None:
    draw = world.random("faults")
    machine = world.machine(name)
    kind = draw.randrange(8)
    if kind == 0:
        machine.lose_power(draw.choice(list(Loss)))
        machine.boot()
        assert machine.node is not None
        machine.node.spawn(serve(machine.node))
    elif kind == 1:
        machine.kill()
        machine.boot()
        assert machine.node is not None
        machine.node.spawn(serve(machine.node))
    elif kind == 2:
        machine.pause()
    elif kind == 3:
        machine.disk().fail("append", times=draw.randrange(1, 5))
    elif kind == 4:
        machine.disk().begin_stall(everything=draw.random() < 0.5)
    elif kind == 5:
        machine.disk().fail("sync")
    elif kind == 6:
        machine.set_clock_rate(draw.uniform(0.5, 2.0))
    else:
        machine.heal()


def run(seed: int) -> str:
    with SimWorld(seed) as world:
        for name in NODES:
            machine = world.machine(name)
            machine.disk().sync_latency = Latency(0.0005, 0.003, spike_probability=0.1, spike_s=0.02)
            node = machine.boot()
            node.spawn(serve(node))
        for _ in range(60):
            world.run_for(world.random("faults").expovariate(20))
            fault(world, world.random("faults").choice(NODES))
        world.run_for(1)
        return f"{world.digest} {world.scheduler.events_run} {len(world.scheduler.trace_lines)}"


if __name__ == "__main__":
    # Other addresses for everything that follows.
    junk = [object() for _ in range(int(sys.argv[2]))]
    del junk[::3]
    print(run(int(sys.argv[1])))
