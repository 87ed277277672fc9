"""An edit of a syntax tree, and what is never edited: messages, assertions, checks, names for people."""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass

Function = ast.FunctionDef | ast.AsyncFunctionDef
Suite = list[ast.stmt]

FOR_PEOPLE = frozenset({"__repr__", "__str__", "validate", "describe", "_describe"})
"""Functions that decide nothing: they name something, or check it."""
LOGGERS = frozenset({"LOGGER", "logging", "logger", "log_rate_limited"})
SOURCE_MAX = 160


@dataclass(frozen=True, slots=True)
class Position:
    """A statement of a function: `suite[index]`."""

    function: str
    suite: Suite
    index: int

    @property
    def statement(self) -> ast.stmt:
        return self.suite[self.index]


@dataclass(frozen=True, slots=True)
class Edit:
    operator: str
    position: Position
    source: str
    becomes: str
    apply: Callable[[], None]
    """Changes the tree in place. Only one edit of a tree may be applied."""


def text(node: ast.AST) -> str:
    """The source of a node on one line, without the body of a compound statement."""
    match node:
        case ast.If() | ast.While():
            line = f"{'if' if isinstance(node, ast.If) else 'while'} {ast.unparse(node.test)}:"
            leaves = text(node.body[-1])
            line = f"{line} {leaves}" if isinstance(node, ast.If) else line
        case ast.ExceptHandler():
            line = f"except {ast.unparse(node.type) if node.type else ''}:"
        case _:
            line = ast.unparse(node)
    line = " ".join(line.split())
    return line if len(line) <= SOURCE_MAX else line[: SOURCE_MAX - 3] + "..."


def functions(tree: ast.Module) -> Iterator[tuple[str, Function]]:
    """Functions with their qualified names, but those for people."""
    owners: list[tuple[str, ast.AST]] = [("", tree)]
    while owners:
        prefix, owner = owners.pop(0)
        for node in ast.iter_child_nodes(owner):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if node.name in FOR_PEOPLE:
                    continue
                yield f"{prefix}{node.name}", node
                owners.append((f"{prefix}{node.name}.", node))
            elif isinstance(node, ast.ClassDef):
                owners.append((f"{prefix}{node.name}.", node))
            elif isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case) and not is_type_checking(node):
                owners.append((prefix, node))


def inner_suites(statement: ast.stmt) -> Iterator[Suite]:
    """The bodies of a compound statement, but of a function or class."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return
    for part in (statement, *getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
        for name in ("body", "orelse", "finalbody"):
            if suite := getattr(part, name, None):
                yield suite


def positions(name: str, suite: Suite) -> Iterator[Position]:
    """Every statement, in the order of the text."""
    for index, statement in enumerate(suite):
        yield Position(name, suite, index)
        for inner in inner_suites(statement):
            yield from positions(name, inner)


def expressions(statement: ast.stmt) -> Iterator[tuple[ast.expr, ast.AST, str, int | None]]:
    """(expression, parent, field, index in it) of a statement, without annotations, strings and inner statements."""
    pending: list[ast.AST] = [statement]
    while pending:
        parent = pending.pop(0)
        for name, value in ast.iter_fields(parent):
            if name in ("annotation", "returns", "decorator_list", "type_params"):
                continue
            children = list(enumerate(value)) if isinstance(value, list) else [(None, value)]
            for index, child in children:
                if isinstance(child, ast.JoinedStr) or (isinstance(child, ast.Call) and is_logging(child)):
                    continue
                if isinstance(child, ast.expr):
                    yield child, parent, name, index
                    pending.append(child)
                elif isinstance(child, ast.comprehension | ast.keyword | ast.arguments | ast.withitem):
                    pending.append(child)


def replace(parent: ast.AST, name: str, index: int | None, node: ast.expr) -> None:
    """Put `node` where `expressions` has found another."""
    if index is None:
        setattr(parent, name, ast.copy_location(node, getattr(parent, name)))
    else:
        items = getattr(parent, name)
        items[index] = ast.copy_location(node, items[index])


def effect(statement: ast.stmt) -> ast.Call | ast.Await | None:
    """The call of a statement that only calls, or awaits."""
    if not isinstance(statement, ast.Expr) or is_trivial(statement):
        return None
    return statement.value if isinstance(statement.value, ast.Call | ast.Await) else None


def is_logging(call: ast.Call) -> bool:
    function = call.func
    while isinstance(function, ast.Attribute):
        function = function.value
    return isinstance(function, ast.Name) and function.id in LOGGERS


def is_trivial(statement: ast.stmt) -> bool:
    """A docstring, a log line, an assertion, `pass`, a call of the base class's constructor, a future's exception that
    is read so that the loop does not log it."""
    match statement:
        case ast.Expr(value=ast.Constant()) | ast.Assert() | ast.Pass() | ast.Import() | ast.ImportFrom():
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Call(func=ast.Name(id="super"))))):
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr="exception"), args=[])):
            return True
        case ast.Expr(value=ast.Call() as call):
            return is_logging(call)
        case _:
            return False


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def leaves(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Return | ast.Raise | ast.Continue | ast.Break)
