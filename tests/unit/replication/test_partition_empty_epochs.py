"""A replica that led an epoch without writing in it goes on under a leader whose records are of an older epoch.

    A   epoch 1: 0..9, epoch 2: 10..14, leads 4     B   epoch 1: 0..9, led 3 in vain

B ends at 10 in epoch 1, so it continues (`divergence`), and what comes is of epoch 2: its own epoch 3 never was.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.async_tests import inside
from support.logs.single_log import Lab, batch, open_log, stamped

from tidelog.log.epochs import EpochHistory
from tidelog.log.log import Log
from tidelog.log.recovery_files import merge_epochs
from tidelog.model.errors import InvalidRecordError
from tidelog.model.ids import Offset
from tidelog.replication.divergence import Continue, divergence, epoch_query
from tidelog.world.simulated import Loss, SimNode, SimWorld


@pytest.fixture
def lab() -> Iterator[Lab]:
    with SimWorld(seed=1) as world:
        yield Lab(world)


async def led_in_vain(node: SimNode) -> Log:
    log = await open_log(node)
    log.append_replicated(stamped(batch(10), base_offset=0, leader_epoch=1))
    log.assign_epoch(3)
    await log.flush()
    await log.checkpoint()
    assert list(log.epochs) == [(1, 0), (3, 10)]
    return log


@pytest.mark.case("T3")
@pytest.mark.case("T6")
@inside(Lab.run, "lab")
async def test_records_of_an_older_epoch_follow_where_an_epoch_was_led_in_vain(node: SimNode) -> None:
    log = await led_in_vain(node)
    leader = EpochHistory([(1, 0), (2, 10), (4, 15)])
    last_epoch, next_offset = epoch_query(log.epochs, log_start=log.start_offset, log_end=log.end_offset)
    answer = divergence(leader, Offset(0), Offset(15), last_epoch=last_epoch, next_offset=next_offset)
    assert answer == Continue()
    log.append_replicated(
        stamped(batch(5), base_offset=10, leader_epoch=2) + stamped(batch(1), base_offset=15, leader_epoch=4)
    )
    assert list(log.epochs) == [(1, 0), (2, 10), (4, 15)]
    log.validate()


def test_after_a_crash_the_records_count_and_not_the_epoch_led_in_vain(lab: Lab) -> None:
    async def main(node: SimNode) -> None:
        log = await led_in_vain(node)
        log.append_replicated(stamped(batch(5), base_offset=10, leader_epoch=2))
        # The records are on the device; the history in the state store is still the old one.
        await log.flush()

    async def after(node: SimNode) -> None:
        log = await open_log(node)
        assert log.end_offset == 15
        assert list(log.epochs) == [(1, 0), (2, 10)]

    lab.run(main)
    lab.crash(Loss.ALL)
    lab.run(after)


@inside(Lab.run, "lab")
async def test_records_of_an_epoch_before_the_last_record_are_still_refused(node: SimNode) -> None:
    log = await led_in_vain(node)
    with pytest.raises(InvalidRecordError, match="epoch 0 after epoch 1"):
        log.append_replicated(stamped(batch(5), base_offset=10, leader_epoch=0))
    assert list(log.epochs) == [(1, 0), (3, 10)], "nothing happened"


def test_a_known_epoch_where_a_record_of_an_older_one_stands_does_not_fit() -> None:
    known = EpochHistory([(1, 0), (3, 10)])
    assert list(merge_epochs(known, [(1, 0), (2, 10)], log_end=15)) == [(1, 0), (2, 10)]
    assert list(merge_epochs(known, [(1, 0), (2, 10), (4, 12)], log_end=15)) == [(1, 0), (2, 10), (4, 12)]
    assert list(merge_epochs(known, [(1, 0)], log_end=10)) == [(1, 0), (3, 10)]
