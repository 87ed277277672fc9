"""Placement is even to within one replica and one leader per broker, and spread over racks."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tidelog.metadata.placement import UsableBroker, place_replicas


@given(st.integers(1, 12), st.data())
def test_without_racks_replicas_and_leaders_differ_by_at_most_one(brokers: int, data: st.DataObject) -> None:
    factor = data.draw(st.integers(1, brokers))
    partitions = data.draw(st.integers(1, 50))
    held = data.draw(st.lists(st.integers(0, 9), min_size=brokers, max_size=brokers))
    first = data.draw(st.integers(0, 20))
    sites = [UsableBroker(broker * 3, None, held[broker]) for broker in range(brokers)]
    assignment = place_replicas(sites, partitions=partitions, replication_factor=factor, first=first)
    assert len(assignment) == partitions
    assert all(len(set(replicas)) == factor for replicas in assignment)
    replicas = Counter({site.broker: 0 for site in sites})
    replicas.update(broker for entry in assignment for broker in entry)
    leaders = Counter({site.broker: 0 for site in sites})
    leaders.update(entry[0] for entry in assignment)
    assert max(replicas.values()) - min(replicas.values()) <= 1
    assert max(leaders.values()) - min(leaders.values()) <= 1


@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_equal_racks_get_equal_shares_and_every_partition_as_many_racks_as_it_can(
    racks: int, per_rack: int, data: st.DataObject
) -> None:
    brokers = racks * per_rack
    factor = data.draw(st.integers(1, brokers))
    partitions = data.draw(st.integers(1, 40))
    rack_of = {broker: f"rack-{broker % racks}" for broker in range(brokers)}
    sites = [UsableBroker(broker, rack) for broker, rack in rack_of.items()]
    assignment = place_replicas(sites, partitions=partitions, replication_factor=factor)
    for entry in assignment:
        counts = Counter(rack_of[broker] for broker in entry)
        assert len(counts) == min(factor, racks)
        assert max(counts.values()) - min(counts.get(rack, 0) for rack in rack_of.values()) <= 1
    replicas = Counter(dict.fromkeys(rack_of, 0))
    replicas.update(broker for entry in assignment for broker in entry)
    assert max(replicas.values()) - min(replicas.values()) <= 1
    leaders = Counter(dict.fromkeys(rack_of, 0))
    leaders.update(entry[0] for entry in assignment)
    assert max(leaders.values()) - min(leaders.values()) <= 1
