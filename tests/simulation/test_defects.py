"""How deliberate defects are switched on, and what counts as caught. `test_seeds.py` has all of them noticed."""

from collections import Counter
from typing import Any

import pytest

from simulation.campaign import all_defects
from simulation.defects import Defect, StaleDefectError
from simulation.run_result import Result, Symptom, draw_shape


def test_a_defect_is_switched_off_again() -> None:
    for defect in all_defects():
        before = [owner.__dict__[name] for owner, name, _ in defect.patches]
        with defect.switched_on():
            now = [owner.__dict__[name] for owner, name, _ in defect.patches]
            assert all(one is not other for one, other in zip(now, before, strict=True))
        assert [owner.__dict__[name] for owner, name, _ in defect.patches] == before


def test_every_defect_fits_the_code_that_it_patches() -> None:
    assert {defect.name: defect.misfits() for defect in all_defects() if defect.misfits()} == {}


class _Patched:
    def append(self, batches: bytes, *, is_coordinator: bool = False) -> int:
        return len(batches) if is_coordinator else 0

    async def flush(self) -> None: ...

    @property
    def end(self) -> int:
        return 1


def _defect(name: str, patch: Any, *, late: str = "") -> Defect:
    return Defect("made-up", "core", "a defect of this test", ((_Patched, name, patch),), late)


def _result(symptom: Symptom | None, *, acknowledged: int = 1, error: BaseException | None = None) -> Result:
    return Result(
        seed=1,
        failure=None if symptom is None else "nobody leads",
        virtual_s=0.0,
        events=0,
        digest="",
        plan=[],
        shape=draw_shape(1, "core"),
        acknowledged=acknowledged,
        symptom=symptom,
        error=error,
    )


@pytest.mark.parametrize(
    ("name", "patch", "misfit"),
    [
        ("append", lambda self, batches, **more: 0, None),
        ("append", lambda self, batches: 0, "unexpected keyword argument 'is_coordinator'"),
        ("append", lambda self: 0, "too many positional arguments"),
        ("appended", lambda self: 0, "_Patched has none"),
        ("flush", lambda self: None, "one is a coroutine function"),
        ("end", lambda self: 2, "one is a property"),
        ("end", property(lambda self: 2), None),
    ],
)
def test_a_patch_that_does_not_fit_its_target_is_named(name: str, patch: Any, misfit: str | None) -> None:
    found = _defect(name, patch).misfits()
    assert found == ([] if misfit is None else [f"{name}: {found[0].partition(': ')[2]}"])
    assert misfit is None or misfit in found[0]


def test_calls_of_a_patched_function_and_property_are_counted() -> None:
    with _defect("append", lambda self, batches, **more: -1).switched_on() as calls:
        assert (_Patched().append(b"1"), calls["append"]) == (-1, 1)
    with _defect("end", property(lambda self: 2)).switched_on() as calls:
        assert (_Patched().end, calls["end"]) == (2, 1)
    assert (_Patched().append(b"1"), _Patched().end) == (0, 1)


def test_only_a_checker_catches_a_defect_and_only_where_records_were_acknowledged() -> None:
    defect, called = _defect("append", lambda self, batches, **more: 0), Counter({"append": 1})
    assert defect.is_caught(_result(Symptom.CHECKER), called)
    assert not defect.is_caught(_result(Symptom.CHECKER, acknowledged=0), called)
    assert not defect.is_caught(_result(Symptom.CHECKER), Counter()), "the patched function was not called"
    assert not defect.is_caught(_result(Symptom.PROGRESS), called)
    assert not defect.is_caught(_result(Symptom.CRASH, error=AssertionError("ours")), called)
    assert not defect.is_caught(_result(None), called)


def test_a_defect_of_progress_is_caught_by_what_it_delays() -> None:
    called = Counter({"append": 1})
    late = _defect("append", lambda self, batches, **more: 0, late="nobody leads")
    assert late.is_caught(_result(Symptom.PROGRESS), called)
    assert not late.is_caught(_result(Symptom.CHECKER), called)
    other = _defect("append", lambda self, batches, **more: 0, late="groups are not stable")
    assert not other.is_caught(_result(Symptom.PROGRESS), called)


@pytest.mark.parametrize("error", [TypeError("argument"), AttributeError("gathering"), NameError("gone")])
def test_a_defect_that_breaks_by_itself_is_stale_and_not_caught(error: Exception) -> None:
    defect = _defect("append", lambda self, batches, **more: 0)
    with pytest.raises(StaleDefectError, match="made-up does not fit the code"):
        defect.is_caught(_result(Symptom.CRASH, error=error), Counter({"append": 1}))
