"""What each operator changes, and what no operator touches."""

import ast
from textwrap import dedent, indent

import pytest

from mutants.finder import find_mutants, mutate


def changes(body: str, *, name: str = "close") -> set[tuple[str, str]]:
    """(operator, body afterwards) of all mutants of a method with this body."""
    source = f"class Log:\n    async def {name}(self, end, log):\n{indent(dedent(body).strip(), ' ' * 8)}\n"
    return {(mutant.operator, _body(mutate(mutant, source))) for mutant in find_mutants("toy", source)}


def _body(tree: ast.Module) -> str:
    owner = tree.body[0]
    assert isinstance(owner, ast.ClassDef)
    method = owner.body[0]
    assert isinstance(method, ast.AsyncFunctionDef)
    lines = "\n".join(ast.unparse(statement) for statement in method.body).splitlines()
    return "\n".join(line for line in lines if "__mutant_reached__" not in line)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("await log.sync()", {("drop-call", "pass")}),
        ("self.send(end)", {("drop-call", "pass")}),
        (
            "await self.persist()\nself.send(end)",
            {
                ("drop-call", "pass\nself.send(end)"),
                ("drop-call", "await self.persist()\npass"),
                ("swap", "self.send(end)\nawait self.persist()"),
            },
        ),
        ("self.generation += 1", {("drop-assign", "pass")}),
        ("self.end = min(end, log.end)", {("drop-assign", "pass"), ("compare", "self.end = max(end, log.end)")}),
        ("del self.waiters[end]", {("drop-assign", "pass")}),
        ("end = log.end\nlog.cut(end)", {("stale-local", "pass\nlog.cut(end)"), ("drop-call", "end = log.end\npass")}),
        (
            "if end < log.end:\n    raise ValueError(end)",
            {
                ("drop-guard", "pass"),
                ("negate", "if not end < log.end:\n    raise ValueError(end)"),
                ("compare", "if end <= log.end:\n    raise ValueError(end)"),
            },
        ),
        (
            "if log.is_closed:\n    return",
            {
                ("drop-guard", "pass"),
                ("negate", "if not log.is_closed:\n    return"),
                ("early-return", "if True:\n    return"),
            },
        ),
        (
            "return end == log.end or log.is_empty",
            {
                ("compare", "return end != log.end or log.is_empty"),
                ("bool", "return end == log.end and log.is_empty"),
            },
        ),
        ("return True", {("early-return", "return False")}),
        ("return end + 1", {("off-by-one", "return end")}),
        ("return log.read(0)", {("off-by-one", "return log.read(1)")}),
        ("return [x for x in log if x.is_new]", {("negate", "return [x for x in log if not x.is_new]")}),
        (
            "try:\n    return log.end\nexcept OSError:\n    raise ValueError(end) from None",
            {("swallow", "try:\n    return log.end\nexcept OSError:\n    pass")},
        ),
        (
            "for x in log:\n    if x:\n        continue\n    return x",
            {
                ("drop-guard", "for x in log:\n    pass\n    return x"),
                ("negate", "for x in log:\n    if not x:\n        continue\n    return x"),
                ("early-return", "for x in log:\n    if x:\n        break\n    return x"),
            },
        ),
    ],
)
def test_an_operator_changes_a_line(body: str, expected: set[tuple[str, str]]) -> None:
    assert changes(body) == expected


@pytest.mark.parametrize(
    "body",
    [
        '"""A docstring, and more: 1 < 2."""',
        "LOGGER.warning('%d', end + 1)",
        "assert end < log.end, 'too far'",
        "raise ValueError(end + 1)",
        "return f'{end + 1}'",
        "future.exception()",
        "super().__init__()",
        "size: int = log.end",
        "if end:\n    LOGGER.info('end')",
    ],
)
def test_messages_assertions_and_names_are_left_alone(body: str) -> None:
    assert changes(body) == set()


@pytest.mark.parametrize("name", ["__repr__", "validate"])
def test_functions_for_people_are_left_alone(name: str) -> None:
    assert changes("self.sync()\nreturn self.end < 1", name=name) == set()


def test_a_constructor_keeps_its_attributes() -> None:
    assert changes("self.end = end", name="__init__") == set()


def test_changes_in_memory_are_not_swapped() -> None:
    assert "swap" not in {operator for operator, _ in changes("self.end = end\nself.begin(log)")}
    assert ("swap", "self._notify(log)\nself.end = end") in changes("self.end = end\nself._notify(log)")


def test_statements_that_need_each_other_are_not_swapped() -> None:
    assert "swap" not in {operator for operator, _ in changes("self.end = x = log.end\nlog.cut(x)")}


def test_the_first_binding_of_a_local_stays() -> None:
    """In the order of the text: a loop that binds it runs before what follows."""
    operators = changes("if end:\n    size = 2\nelse:\n    size = 3\nsize = 4\nreturn size")
    assert {body for operator, body in operators if operator == "stale-local"} == {
        "if end:\n    size = 2\nelse:\n    pass\nsize = 4\nreturn size",
        "if end:\n    size = 2\nelse:\n    size = 3\npass\nreturn size",
    }


def test_a_loop_that_might_not_end_keeps_its_jumps() -> None:
    assert "early-return" not in {operator for operator, _ in changes("while end:\n    if log:\n        break")}
