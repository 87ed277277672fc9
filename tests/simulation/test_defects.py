"""Every deliberate defect is noticed: a checker that cannot fail is worthless."""

import pytest

from simulation.campaign import catch
from simulation.defects import DEFECTS, Defect
from simulation.seeds import read_catching_seeds

REMEMBERED = read_catching_seeds()


@pytest.mark.sim
@pytest.mark.timeout(600)
@pytest.mark.parametrize("defect", DEFECTS, ids=[defect.name for defect in DEFECTS])
def test_the_simulator_notices(defect: Defect) -> None:
    caught = catch(defect, remembered=REMEMBERED.get(defect.name))
    assert caught is not None, f"not noticed in 500 seeds: {defect.what}"


def test_there_are_enough_defects_and_each_has_its_own_name() -> None:
    assert len({defect.name for defect in DEFECTS}) == len(DEFECTS) >= 14
    assert {defect.stack for defect in DEFECTS} == {"core", "driver"}


def test_a_defect_is_switched_off_again() -> None:
    for defect in DEFECTS:
        before = [owner.__dict__[name] for owner, name, _ in defect.patches]
        with defect.switched_on():
            assert all(owner.__dict__[name] is patch for owner, name, patch in defect.patches)
        assert [owner.__dict__[name] for owner, name, _ in defect.patches] == before
