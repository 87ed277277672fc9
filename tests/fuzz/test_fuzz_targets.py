"""The targets of the fuzzer read what production writes, reject what it found, and hold against a few mutations."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from fuzz.targets import API_CALLS, TARGETS

REGRESSIONS = Path(__file__).parent / "regressions"
MUTATIONS = 60


@pytest.fixture(scope="module", autouse=True)
def _close_cluster() -> Iterator[None]:
    yield
    API_CALLS.close()


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_reads_what_production_writes(name: str) -> None:
    target = TARGETS[name]
    seeds = target.seeds()
    assert seeds
    read = [target.check(seed) for seed in seeds]
    assert sum(read) >= len(read) // 4, f"{read.count(False)} of {len(read)} seeds are rejected"


@pytest.mark.parametrize("name", TARGETS)
def test_mutated_seeds_are_read_or_rejected(name: str) -> None:
    target, draw = TARGETS[name], random.Random(name)
    seeds = target.seeds()
    for number in range(MUTATIONS):
        data = bytearray(draw.choice(seeds))
        for _ in range(draw.choice([1, 1, 2, 5])):
            match draw.randrange(3):
                case 0 if data:
                    data[draw.randrange(len(data))] = draw.choice([0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)])
                case 1 if data:
                    del data[draw.randrange(len(data)) :]
                case _:
                    data[draw.randrange(len(data) + 1) :][:0] = draw.randbytes(3)
        try:
            target.check(bytes(data))
        except Exception as error:
            raise AssertionError(f"mutation {number} of {name}: {bytes(data)!r}") from error


@pytest.mark.parametrize("path", sorted(REGRESSIONS.glob("*/*")), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_input_that_once_broke_a_reader_is_rejected(path: Path) -> None:
    TARGETS[path.parent.name].check(path.read_bytes())
