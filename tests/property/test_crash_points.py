"""A crash, or an error number, at any call of every operation that changes several files or stores.

`make crashes` runs all of it; here is a sample, another one for each version of the sources.
"""

from random import Random

import pytest
from support.crashes.table import (
    NOT_REACHED,
    WHEN_STRUCK,
    Mode,
    all_operations,
    draw_trial,
    missed_places,
    places,
    report_of,
)
from support.crashes.trials import run_trial, sources_seed

SAMPLE = {Mode.CRASH: 25, Mode.ERROR: 25, Mode.DOUBLE: 10}


@pytest.mark.sim
@pytest.mark.timeout(120)
def test_every_place_that_changes_a_disk_is_in_an_operation_of_the_table() -> None:
    lines = set().union(*(report_of(operation).lines for operation in all_operations()))
    missed = missed_places(lines)
    assert missed - WHEN_STRUCK - set(NOT_REACHED) == set(), "no operation of tests/support/crashes comes by"
    assert {*WHEN_STRUCK, *NOT_REACHED} <= missed, "an operation comes by without being struck"
    assert len(places()) > 100


@pytest.mark.sim
@pytest.mark.timeout(120)
@pytest.mark.parametrize("mode", list(Mode))
def test_an_operation_that_is_struck_leaves_the_old_state_or_the_new_one(mode: Mode) -> None:
    draw = Random(sources_seed(mode.value))
    for _ in range(SAMPLE[mode]):
        trial = draw_trial(draw, mode)
        try:
            run_trial(trial)
        except Exception as error:
            pytest.fail(f"{trial}: {type(error).__name__}: {error}")
