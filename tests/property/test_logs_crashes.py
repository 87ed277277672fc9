"""The logs of a node under crashes at any operation of a random life.

What must hold afterwards is in `support.logs.node_logs.check_compacted`: what was acknowledged is there, the latest
record of each key is there, every record stands at its offset, and nothing at or past the bound was touched.
"""

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field, replace

from hypothesis import given
from hypothesis import strategies as st
from support.logs.node_logs import Host, SimSite, Written, check_compacted, log_id

from tidelog.log.batch import Record, encode
from tidelog.log.config import FlushMode, LogConfig
from tidelog.log.log import Log
from tidelog.log.logs import Logs, LogsConfig
from tidelog.model.ids import Offset
from tidelog.world.simulated import Loss, NodeDiedError, SimWorld

HOUR_MS = 3_600_000
COMPACT = LogConfig(
    segment_bytes=500,
    index_interval_bytes=100,
    cleanup_delete=False,
    cleanup_compact=True,
    min_cleanable_dirty_ratio=0.0,
    delete_retention_ms=HOUR_MS,
)


@dataclass
class Model:
    """One log: everything that was ever appended, where the acknowledged part ends, and the highest bound so far."""

    written: Written = field(default_factory=dict)
    acknowledged: int = 0
    bound: int = 0
    start: int = 0

    async def append(self, log: Log, count: int, keys: int, *, wait: bool) -> None:
        last = -1
        for _ in range(count):
            offset = int(log.end_offset)
            key, value = b"k%d" % (offset * 7 % keys), b"v%d" % offset if offset % 9 else None
            self.written[offset] = (key, value)
            data = encode([Record(0, log.clock.now_ms(), key, value, ())])
            last = log.append(data, leader_epoch=0).last_offset
        if wait and count:
            await log.wait_durable(last)
            self.acknowledged = max(self.acknowledged, last + 1)

    async def check(self, log: Log) -> None:
        assert log.end_offset >= self.acknowledged
        assert log.start_offset <= self.bound
        for offset in [offset for offset in self.written if offset >= log.end_offset]:
            del self.written[offset]
        await check_compacted(log, self.written, untouched_from=self.bound)


# A random life of several logs


@dataclass(frozen=True)
class Life:
    """One process: what it does to which log, how it ends, and where the power may go before that."""

    steps: list[tuple[str, int, int]]
    ending: str
    crash_disk: int | None
    crash_store: int | None
    loss: Loss


steps = st.tuples(
    st.sampled_from(
        ["append"] * 6 + ["wait"] * 4 + ["bound"] * 2 + ["clean"] * 3 + ["expire", "later", "checkpoint", "idle"]
    ),
    st.integers(1, 3),
    st.integers(1, 12),
)
lives = st.builds(
    Life,
    steps=st.lists(steps, max_size=15),
    ending=st.sampled_from(["close", "kill", "power"]),
    crash_disk=st.none() | st.integers(1, 150),
    crash_store=st.none() | st.integers(1, 30),
    loss=st.sampled_from(list(Loss)),
)
configs = st.sampled_from(
    [
        COMPACT,
        replace(COMPACT, flush_mode=FlushMode.PAGE_CACHE),
        replace(COMPACT, cleanup_delete=True, retention_bytes=800, segment_bytes=300),
        replace(COMPACT, cleanup_delete=True, retention_ms=HOUR_MS // 4),
    ]
)


async def live(host: Host, sim: SimSite, life: Life, config: LogConfig, models: dict[int, Model]) -> None:
    logs = await host.open(config, LogsConfig(open_files_max=3))
    assert logs.failures == {}
    for topic, model in models.items():
        log = await logs.create(log_id(topic), label="t", config=config)
        assert logs.high_watermark(log_id(topic)) <= model.bound
        await model.check(log)
    for name, topic, number in life.steps:
        found = logs.get(log_id(topic))
        assert found is not None
        await step(logs, found, sim, name, number, models[topic])
        found.validate()
    for topic, model in models.items():
        found = logs.get(log_id(topic))
        assert found is not None
        await model.check(found)
    if life.ending == "close":
        await logs.close()
        for model in models.values():
            model.acknowledged = max(model.written, default=-1) + 1


async def step(logs: Logs, log: Log, sim: SimSite, name: str, number: int, model: Model) -> None:
    is_safe = log.config.flush_mode is FlushMode.SYNC
    match name:
        case "append":
            await model.append(log, number, 5, wait=False)
        case "wait":
            await model.append(log, number, 5, wait=is_safe)
            if not is_safe:
                await log.flush()
                model.acknowledged = log.end_offset
        case "bound":
            # A high watermark is durable; the model remembers the highest, which every later bound is below.
            model.bound = max(model.bound, min(log.durable_end, model.acknowledged))
            logs.note_high_watermark(log.log_id, Offset(model.bound))
        case "clean":
            await logs.housekeeping.clean_one()
        case "expire":
            await logs.housekeeping.expire()
        case "later":
            sim.machine.clock.jump(number * 60_000)
        case "checkpoint":
            await logs.checkpoint()
        case _:
            await asyncio.sleep(number / 4)


@given(seed=st.integers(0, 1 << 20), config=configs, lives=st.lists(lives, min_size=1, max_size=4))
def test_the_logs_of_a_node_keep_their_promises_through_crashes_at_any_point(
    seed: int, config: LogConfig, lives: list[Life]
) -> None:
    models = {topic: Model() for topic in (1, 2, 3)}
    with SimWorld(seed) as world:
        sim = SimSite(world, directories=1)
        device, store = sim.machine.disk("disk-0"), sim.machine.store("disk-0")
        for life in [*lives, Life([], "close", None, None, Loss.ALL)]:
            sim.machine.crash_loss = life.loss
            device.crash_at_operation = life.crash_disk and device.operations + life.crash_disk
            store.crash_at_commit = life.crash_store

            async def main(host: Host, life: Life = life) -> None:
                await live(host, sim, life, config, models)

            with suppress(NodeDiedError):
                sim.run(main)
            device.crash_at_operation = store.crash_at_commit = None
            if life.ending == "power":
                sim.lose_power(life.loss)
