"""A broker's copy of the metadata: what it keeps, what it fetches, what it hands on, and how stale it is."""

from typing import Any

import pytest
from support.metadata.quorum import CONTROLLERS, Quorum, RunningBroker

from tidelog.metadata.config_changes import AlterConfigs, ConfigChange, ResourceChange
from tidelog.metadata.delta import ImageDelta, apply_delta
from tidelog.metadata.image import ClusterImage
from tidelog.metadata.tail import decode_entries, encode_entry
from tidelog.model.ids import Epoch, NodeId, Offset
from tidelog.raft.messages import Entry, EntryKind
from tidelog.world.simulated import Loss

pytestmark = pytest.mark.sim
B = NodeId(11)


def caught_up(quorum: Quorum, broker: NodeId = B) -> None:
    controller = quorum.controller(quorum.active())
    quorum.world.run_until(lambda: quorum.brokers[broker].tail.image == controller.image, timeout=20)


def stale_ms(broker: RunningBroker, quorum: Quorum) -> int | None:
    async def job(_: Any) -> int | None:
        return broker.tail.stale_ms()

    return quorum.world.run(broker.node, job)


@pytest.mark.requirement("a:B-64")
def test_deltas_come_in_order_and_make_the_image() -> None:
    with Quorum(1) as quorum:
        quorum.start()
        quorum.start_brokers(11, 12, 13)
        quorum.create("before")
        caught_up(quorum)
        images: list[ClusterImage] = [ClusterImage()]

        def handed(delta: ImageDelta, older: ClusterImage, newer: ClusterImage) -> None:
            assert older == images[-1], "each begins where the last one ended"
            assert apply_delta(older, delta) == newer
            images.append(newer)

        quorum.brokers[B].tail.subscribe(handed)
        assert len(images) == 2, "what is there already comes first"
        for number in range(5):
            quorum.create(f"t{number}", partitions=3)
        quorum.kill(NodeId(13))
        quorum.world.run_for(1.0)
        caught_up(quorum)
        assert len(images) >= 7
        assert images[-1] == quorum.controller(quorum.active()).image


def test_a_restart_fetches_only_what_is_new() -> None:
    with Quorum(2) as quorum:
        quorum.start()
        quorum.start_brokers(11, 12, 13)
        for number in range(10):
            quorum.create(f"t{number}")
        caught_up(quorum)
        known = quorum.brokers[B].tail.offset
        quorum.kill(B)
        quorum.start_brokers(11, wait=False)
        tail = quorum.brokers[B].tail
        assert tail.offset >= known
        assert len(tail.image.topics) == 10
        assert tail.fetched == 0
        quorum.until_live(11)
        quorum.create("new")
        caught_up(quorum)
        assert tail.loaded == 0
        assert tail.fetched <= tail.offset - known


@pytest.mark.parametrize("loss", list(Loss))
@pytest.mark.case("R13")
def test_a_loss_of_power_costs_only_what_was_not_synced(loss: Loss) -> None:
    with Quorum(3, tail_bytes=2_000) as quorum:
        quorum.start()
        quorum.start_brokers(11, 12, 13)
        for number in range(20):
            quorum.create(f"t{number}", partitions=4)
        caught_up(quorum)
        quorum.world.run_for(1.0)
        quorum.brokers.pop(B)
        quorum.world.machine("b11").lose_power(loss)
        quorum.start_brokers(11, wait=False)
        assert quorum.brokers[B].tail.offset > 0, "the snapshot is synced"
        caught_up(quorum)
        assert quorum.brokers[B].tail.loaded == 0


def test_snapshots_replace_the_entries_before_them_on_disk() -> None:
    with Quorum(4, tail_bytes=2_000) as quorum:
        quorum.start()
        quorum.start_brokers(11, 12, 13)
        for number in range(30):
            quorum.create(f"t{number}", partitions=4)
        caught_up(quorum)
        quorum.world.run_for(1.0)
        names = quorum.brokers[B].node.disk().list("metadata")
        assert len([name for name in names if name.endswith(".snapshot")]) == 1
        assert len([name for name in names if name.endswith(".tail")]) <= 2
        quorum.kill(B)
        quorum.start_brokers(11)
        assert len(quorum.brokers[B].tail.image.topics) == 30


@pytest.mark.case("R19")
def test_a_spoilt_snapshot_is_set_aside_and_everything_fetched_again() -> None:
    with Quorum(5, tail_bytes=2_000) as quorum:
        quorum.start()
        quorum.start_brokers(11, 12, 13)
        for number in range(20):
            quorum.create(f"t{number}", partitions=4)
        caught_up(quorum)
        quorum.world.run_for(1.0)
        quorum.kill(B)
        device = quorum.world.machine("b11").disk()
        (path,) = [path for path, _ in device.files() if path.endswith(".snapshot")]
        device.flip_bit(path, 40, 3)
        quorum.start_brokers(11)
        caught_up(quorum)
        assert any(path.endswith(".corrupt") for path, _ in device.files())


def test_it_knows_how_stale_it_is() -> None:
    with Quorum(6) as quorum:
        quorum.start()
        quorum.start_brokers(11)
        quorum.world.run_for(2.0)
        broker = quorum.brokers[B]
        fresh = stale_ms(broker, quorum)
        assert fresh is not None
        assert fresh < 1200
        for node in CONTROLLERS:
            quorum.network.block(node, B)
            quorum.network.block(B, node)
        quorum.world.run_for(8.0)
        stale = stale_ms(broker, quorum)
        assert stale is not None
        assert 7_000 < stale < 10_000
        quorum.network.heal()
        quorum.world.run_for(8.0)
        again = stale_ms(broker, quorum)
        assert again is not None
        assert again < 1200


def test_it_follows_any_controller_and_leaves_one_that_dies() -> None:
    with Quorum(7) as quorum:
        quorum.start()
        quorum.start_brokers(11, 12, 13)
        source = quorum.brokers[B].tail._observer.source
        assert source in CONTROLLERS
        quorum.kill(source)
        quorum.create("after")
        caught_up(quorum)
        assert quorum.brokers[B].tail._observer.source != source


def test_a_dynamic_config_reaches_subscribers_as_a_delta() -> None:
    with Quorum(8) as quorum:
        quorum.start()
        quorum.start_brokers(11, 12, 13)
        quorum.create("t")
        caught_up(quorum)
        values: list[str | None] = []

        def handed(delta: ImageDelta, _older: ClusterImage, newer: ClusterImage) -> None:
            if ("topic", "t") in delta.configs:
                values.append(newer.config("topic", "t").get("retention.ms"))

        quorum.brokers[B].tail.subscribe(handed)
        change = ConfigChange(key="retention.ms", operation="set", value="60000")
        resource = ResourceChange(resource_type="topic", resource="t", changes=(change,))
        (outcome,) = quorum.ask(AlterConfigs(resources=(resource,))).items
        assert outcome.error is None
        quorum.world.run_until(lambda: values == ["60000"], timeout=5)


def test_frames_end_at_the_first_that_is_not_sound() -> None:
    entries = [(Offset(number), Entry(Epoch(2), EntryKind.DATA, bytes([number]) * 9)) for number in range(4)]
    data = b"".join(encode_entry(*row) for row in entries)
    assert decode_entries(data) == (entries, len(data))
    for cut in range(len(data)):
        found, position = decode_entries(data[:cut])
        assert found == entries[: len(found)]
        assert position <= cut
    assert decode_entries(data + bytes(4096)) == (entries, len(data)), "zeros are no frame"
    spoilt = bytearray(data)
    spoilt[len(data) // 2 + 3] ^= 4
    assert len(decode_entries(bytes(spoilt))[0]) == 2
