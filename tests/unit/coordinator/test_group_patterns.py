"""Topic patterns: RE2 agrees with `re` where both have the syntax, and no pattern takes long."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.coordinator.patterns import compile_pattern
from tidelog.model.group_errors import InvalidPatternError

NAMES = [
    "",
    "a",
    "b",
    "ab",
    "aab",
    "abab",
    "orders",
    "orders-1",
    "orders.eu",
    "Orders",
    "x_1",
    "a-b",
    "]",
    "a{2",
    "^",
    "$",
]


@pytest.mark.requirement("a:F-03")
@pytest.mark.parametrize(
    "pattern",
    [
        "a", "a*", "a+b?", "(ab)*", "(?:ab){2}", "a{1,2}b", "a{2,}b", "orders.*", r"orders\..*", "[a-c]+",
        "[^a]", r"\w+", r"\w+-\d", r"[\w.]+", "(?i)ORDERS", "^orders$", "orders|a", "|a", "()", "(?P<n>a)b", r"\D+",
        "[]]", "[a-]*", "a*?b", "a{2", "(a|b)*", "(a*)*b", "x{0}a", r"[^\d]+", r"\$", r"[\--b]+", "a$|b",
        ".", "a^b", "$a",
    ],
)  # fmt: skip
def test_a_pattern_matches_what_re_matches(pattern: str) -> None:
    matches = compile_pattern(pattern)
    for name in NAMES:
        assert matches(name) is (re.fullmatch(pattern, name, re.ASCII) is not None), (pattern, name)


PIECES = st.recursive(
    st.sampled_from(["a", "b", "-", ".", "[ab]", "[^a]", r"\w", r"\d", "", "^", "$"]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"({pair[0]}|{pair[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{0,2}", "{1,}"])).map(lambda p: f"(?:{p[0]}){p[1]}"),
    ),
    max_leaves=8,
)


@given(PIECES, st.text("ab-1", max_size=8))
def test_any_generated_pattern_matches_what_re_matches(pattern: str, name: str) -> None:
    assert compile_pattern(pattern)(name) is (re.fullmatch(pattern, name, re.ASCII) is not None)


@pytest.mark.parametrize(
    "pattern", ["(a+)+b", "(a|a)*b", "(.*)*x", "(a*)*(a*)*b", "(a?){200}a{200}x", "(a|b)*a(a|b){100}c"]
)
def test_a_pattern_that_backtracks_elsewhere_is_matched_at_once(pattern: str) -> None:
    began = time.perf_counter()
    assert compile_pattern(pattern)("a" * 249) is False
    assert compile_pattern(pattern)("ab" * 124) is False or pattern.endswith("b")
    assert time.perf_counter() - began < 3


@pytest.mark.parametrize(
    "pattern",
    [
        "(", ")", "a)", "[a", "a**", "+a", "?", "[b-a]", r"(a)\1", "(?=a)", "(?!a)", "(?<=a)", "\\", "(?P<n",
        "(?P<n->a)", "a{3,2}", "a{99999}", "(a{1000}){50}", "(.{500}|a){2}" * 200,
    ],
)  # fmt: skip
def test_an_invalid_pattern_is_rejected_with_the_reason(pattern: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InvalidPatternError, match=r"is no RE2 regular expression: .+"):
        compile_pattern(pattern)
    assert capfd.readouterr().err == "", "RE2 logs nothing by itself"


def test_matching_many_names_is_fast() -> None:
    matches = compile_pattern("(orders|payments)-.*-v[0-9]+")
    names = [f"orders-{number}-v{number % 10}" for number in range(10_000)]
    began = time.perf_counter()
    assert all(matches(name) for name in names)
    assert time.perf_counter() - began < 1
