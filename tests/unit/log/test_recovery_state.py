"""Opening a log whose stored state is partly lost, or whose last sync failed."""

import pytest
from support.logs.single_log import PREFIX, Lab, batch, fill, open_log, read_all, segment, synced

from tidelog.log import stored_state as stored
from tidelog.model.errors import StorageError
from tidelog.world.simulated import SimNode


class TestLostState:
    """Values of the state store that fail their CRC never block the start."""

    @pytest.mark.case("T7")
    @pytest.mark.parametrize("is_clean", [True, False])
    def test_a_corrupt_epoch_history_is_rebuilt_from_the_batches(self, lab: Lab, is_clean: bool) -> None:
        async def write(node: SimNode) -> None:
            log = await open_log(node)
            for epoch in (2, 3, 7):
                fill(log, 12, epoch=epoch)
            await (log.close() if is_clean else log.checkpoint())

        lab.run(write)
        lab.kill()
        lab.machine.store().flip_bit(PREFIX + stored.EPOCHS, 12)

        async def look(node: SimNode) -> None:
            log = await open_log(node)
            assert log.damaged is None
            assert list(log.epochs) == [(2, 0), (3, 12), (7, 24)]
            assert log.end_offset_for_epoch(3) == (3, 24)
            assert "epochs" in log.report.rebuilt
            assert log.report.lost == ("epochs",)

        lab.run(look)
        lab.kill()

        async def again(node: SimNode) -> None:
            log = await open_log(node)
            assert log.report.lost == ()
            assert list(log.epochs) == [(2, 0), (3, 12), (7, 24)]

        lab.run(again)

    def test_a_corrupt_segment_record_is_found_again_by_reading_the_segment(self, lab: Lab) -> None:
        expected = lab.run(lambda node: synced(node, 40))

        async def bases(node: SimNode) -> list[int]:
            return [int.from_bytes(key[-8:], "big") for key, _ in node.store().scan(PREFIX + stored.SEGMENT)]

        base = lab.again(bases)[1]
        lab.kill()
        lab.machine.store().flip_bit(stored.segment_key(PREFIX, base), 20)

        async def look(node: SimNode) -> None:
            log = await open_log(node)
            assert log.damaged is None
            assert f"segment {base}" in log.report.rebuilt
            assert await read_all(log) == expected

        lab.run(look)

    @pytest.mark.requirement("a:D-73")
    def test_a_corrupt_producer_snapshot_is_replayed_from_an_older_one(self, lab: Lab) -> None:
        async def write(node: SimNode) -> list[object]:
            log = await open_log(node)
            for sequence in range(40):
                data = batch(1, value=b"x" * 90, producer_id=5, producer_epoch=0, base_sequence=sequence)
                log.append(data, leader_epoch=1)
                log.producers.validate()
            await log.close()
            return [row._replace(seen_ms=0) for row in log.producers.rows()]

        expected = lab.run(write)
        lab.kill()
        lab.machine.store().flip_bit(stored.producers_key(PREFIX, 40), 9)

        async def look(node: SimNode) -> None:
            log = await open_log(node)
            assert [row._replace(seen_ms=0) for row in log.producers.rows()] == expected
            assert "producers" in log.report.rebuilt
            repeated = batch(1, value=b"x" * 90, producer_id=5, producer_epoch=0, base_sequence=39)
            assert log.append(repeated, leader_epoch=1).duplicate

        lab.run(look)


class TestFailedSync:
    """After a failed sync the page cache may show bytes that never reach the device."""

    def test_records_past_the_durable_end_are_truncated_after_a_restart(self, lab: Lab) -> None:
        device = lab.machine.disk()

        async def write(node: SimNode) -> list[bytes]:
            log = await open_log(node)
            expected = fill(log, 4)
            await log.flush()
            device.fail("sync")
            fill(log, 3)
            waiter = log.wait_durable(6)
            with pytest.raises(StorageError):
                await log.flush()
            assert isinstance(waiter.exception(), StorageError)
            assert log.durable_end == 4
            with pytest.raises(StorageError):
                log.append(batch(1), leader_epoch=1)
            await log.close()
            return expected

        expected = lab.run(write)
        lab.kill()
        assert len(device.raw(segment(0))) > sum(map(len, expected))  # the cache still shows the rest

        async def look(node: SimNode) -> None:
            log = await open_log(node)
            assert log.damaged is None
            assert await read_all(log) == expected
            assert "sync had failed" in (log.report.fault or "")
            fill(log, 2)
            await log.flush()

        lab.run(look)
        lab.kill()

        async def later(node: SimNode) -> None:
            log = await open_log(node)
            assert log.end_offset == 6
            assert log.report.fault is None

        lab.run(later)

    def test_a_suspect_mark_that_cannot_be_read_makes_the_log_damaged(self, lab: Lab) -> None:
        device = lab.machine.disk()

        async def write(node: SimNode) -> None:
            log = await open_log(node)
            fill(log, 4)
            await log.checkpoint()
            fill(log, 2)
            await log.flush()
            device.fail("sync")
            fill(log, 3)
            with pytest.raises(StorageError):
                await log.flush()
            await log.close()

        lab.run(write)
        lab.kill()
        lab.machine.store().flip_bit(PREFIX + stored.SUSPECT, 8)

        async def look(node: SimNode) -> None:
            log = await open_log(node)
            assert log.damaged is not None
            assert log.damaged.good_end == 4

        lab.run(look)
