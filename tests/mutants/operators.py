"""Mutation operators: each imitates a mistake that breaks systems of this kind.

    drop-call     a call for its effect is missing, awaited or not: a sync, a persist, a truncation, a notification
    swap          two neighbours change places, of which one waits or is seen by others: send before persist
    drop-guard    `if ...: raise/return/continue/break` is missing: a skipped fence
    negate        a condition is inverted
    early-return  a guard always returns; `return True` is `return False`; `break` is `continue`
    drop-assign   an attribute or an item keeps its old value: a forgotten reset
    stale-local   a local variable keeps an older value
    swallow       an exception is caught, and nothing is done about it
    compare       `<` is `<=`, `==` is `!=`, `in` is `not in`, `min` is `max`
    bool          `and` is `or`
    off-by-one    `+ 1` or `- 1` is missing, 0 is 1, 1 is 2

`stale-local` and `drop-assign` do not touch the first assignment: a missing name is no subtle defect.
"""

import ast
from collections.abc import Callable, Iterator

from mutants.edits import (
    Edit,
    Function,
    Position,
    effect,
    expressions,
    is_trivial,
    leaves,
    positions,
    replace,
    text,
)

CONSTRUCTORS = ("__init__", "__post_init__", "__new__")
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
INVERSIONS = (ast.Eq, ast.NotEq, ast.In, ast.NotIn)
"""As the whole condition of an `if` they are what `negate` does."""
VISIBLE = (
    *(
        "append",
        "commit",
        "fail",
        "fence",
        "finish",
        "flush",
        "notify",
        "persist",
        "propose",
        "put",
        "remove",
        "rename",
    ),
    *(
        "report",
        "reset",
        "resolve",
        "schedule",
        "send",
        "set_exception",
        "set_result",
        "stop",
        "store",
        "submit",
        "sync",
    ),
    *("truncate", "wake", "write"),
)
"""What the names of calls begin with whose order others can see."""
OPPOSITE = {"min": "max", "max": "min"}


def edits(name: str, function: Function) -> Iterator[Edit]:
    """All edits of one function, in a fixed order."""
    bound = {argument.arg for argument in _arguments(function)}
    for position in positions(name, function.body):
        statement = position.statement
        if is_trivial(statement):
            continue
        yield from _calls(position)
        yield from _swaps(position)
        yield from _guards(position)
        yield from _jumps(position, function)
        if function.name not in CONSTRUCTORS:
            yield from _assignments(position)
        yield from _locals(position, bound)
        yield from _handlers(position)
        if not isinstance(statement, ast.Raise | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _expressions(position)


def _arguments(function: Function) -> list[ast.arg]:
    arguments = function.args
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]


def _drop(operator: str, position: Position) -> Edit:
    statement = position.statement

    def apply() -> None:
        position.suite[position.index] = ast.copy_location(ast.Pass(), statement)

    return Edit(operator, position, text(statement), "pass", apply)


def _calls(position: Position) -> Iterator[Edit]:
    if effect(position.statement) is not None:
        yield _drop("drop-call", position)


def _swaps(position: Position) -> Iterator[Edit]:
    suite, index = position.suite, position.index
    if index + 1 == len(suite):
        return
    first, second = suite[index], suite[index + 1]
    if not (_acts(first) and _acts(second)) or not (_is_visible(first) or _is_visible(second)):
        return
    if _bound_by(first) & _names(second) or _bound_by(second) & _names(first) or ast.dump(first) == ast.dump(second):
        return

    def apply() -> None:
        suite[index], suite[index + 1] = second, first

    yield Edit("swap", position, f"{text(first)}; {text(second)}", f"{text(second)}; {text(first)}", apply)


def _is_visible(statement: ast.stmt) -> bool:
    """Waits, or calls what others may see or what may fail: the order of two changes in memory hardly matters."""
    call = effect(statement)
    if not isinstance(call, ast.Call):
        return call is not None
    name = call.func.attr if isinstance(call.func, ast.Attribute) else text(call.func)
    return name.strip("_").startswith(VISIBLE)


def _acts(statement: ast.stmt) -> bool:
    """Calls for an effect, or assigns to what outlives the function."""
    return effect(statement) is not None or bool(_lasting(statement))


def _targets(statement: ast.stmt) -> list[ast.expr]:
    match statement:
        case ast.Assign(targets=targets):
            return [item for target in targets for item in (target.elts if isinstance(target, ast.Tuple) else [target])]
        case ast.AugAssign(target=target) | ast.AnnAssign(target=target, value=ast.expr()):
            return [target]
        case _:
            return []


def _lasting(statement: ast.stmt) -> list[ast.expr]:
    return [target for target in _targets(statement) if isinstance(target, ast.Attribute | ast.Subscript)]


def _bound_by(statement: ast.stmt) -> set[str]:
    stored = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return stored | {node.target.id for node in ast.walk(statement) if isinstance(node, ast.NamedExpr)}


def _names(statement: ast.stmt) -> set[str]:
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}


def _guards(position: Position) -> Iterator[Edit]:
    statement = position.statement
    if not isinstance(statement, ast.If) or all(map(is_trivial, statement.body)):
        return
    if not statement.orelse and leaves(statement.body[-1]):
        yield _drop("drop-guard", position)

    def negate() -> None:
        statement.test = _negated(statement.test)

    yield Edit("negate", position, text(statement), f"if {ast.unparse(_negated(statement.test))}", negate)


def _negated(test: ast.expr) -> ast.expr:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return test.operand
    return ast.copy_location(ast.UnaryOp(ast.Not(), test), test)


def _jumps(position: Position, function: Function) -> Iterator[Edit]:
    statement, suite, index = position.statement, position.suite, position.index

    def swap_for(node: ast.stmt) -> Callable[[], None]:
        def apply() -> None:
            suite[index] = ast.copy_location(node, statement)

        return apply

    match statement:
        case ast.If(body=[*_, ast.Return(value=None | ast.Constant())], orelse=[]):

            def always() -> None:
                statement.test = ast.copy_location(ast.Constant(True), statement.test)

            yield Edit("early-return", position, text(statement), "if True", always)
        case ast.Return(value=ast.Constant(value=bool() as value)):
            flipped = ast.Return(ast.copy_location(ast.Constant(not value), statement))
            yield Edit("early-return", position, text(statement), f"return {not value}", swap_for(flipped))
        case ast.Continue() | ast.Break() if _is_in_for(statement, function):
            other = ast.Break() if isinstance(statement, ast.Continue) else ast.Continue()
            yield Edit("early-return", position, text(statement), text(other), swap_for(other))


def _is_in_for(statement: ast.stmt, function: Function) -> bool:
    """A `while` would often not end."""
    loops = [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.For | ast.AsyncFor | ast.While) and any(inner is statement for inner in ast.walk(node))
    ]
    return bool(loops) and not isinstance(loops[-1], ast.While)


def _assignments(position: Position) -> Iterator[Edit]:
    statement = position.statement
    targets = _targets(statement)
    deletes = isinstance(statement, ast.Delete) and not isinstance(statement.targets[0], ast.Name)
    if deletes or (targets and len(_lasting(statement)) == len(targets)):
        yield _drop("drop-assign", position)


def _locals(position: Position, bound: set[str]) -> Iterator[Edit]:
    """Binds names in the order of the text, so that loops and branches count as run before what follows."""
    targets = _targets(position.statement)
    names = {target.id for target in targets if isinstance(target, ast.Name)}
    if targets and len(names) == len(targets) and names <= bound:
        yield _drop("stale-local", position)
    bound.update(names)


def _handlers(position: Position) -> Iterator[Edit]:
    statement = position.statement
    if not isinstance(statement, ast.Try):
        return
    for handler in statement.handlers:
        if all(map(is_trivial, handler.body)):
            continue
        first = next(index for index, inner in enumerate(handler.body) if not is_trivial(inner))

        def apply(handler: ast.ExceptHandler = handler, first: int = first) -> None:
            handler.body[first:] = [ast.copy_location(ast.Pass(), handler.body[first])]

        inside = Position(position.function, handler.body, first)
        yield Edit("swallow", inside, f"{text(handler)} {text(handler.body[-1])}", "pass", apply)


def _expressions(position: Position) -> Iterator[Edit]:
    statement = position.statement
    for node, parent, name, index in expressions(statement):
        is_whole_test = isinstance(parent, ast.If) and name == "test"
        match node:
            case ast.Compare(ops=ops):
                yield from _compare(position, node, range(len(ops)), is_whole_test=is_whole_test)
            case ast.Call(func=ast.Name(id="min" | "max") as function):
                yield _rename(position, node, function)
            case ast.BoolOp():
                yield _bool(position, node)
            case ast.BinOp(op=ast.Add() | ast.Sub(), right=ast.Constant(value=1), left=rest):
                yield _substitute("off-by-one", position, node, rest, (parent, name, index))
            case ast.BinOp(op=ast.Add(), left=ast.Constant(value=1), right=rest):
                yield _substitute("off-by-one", position, node, rest, (parent, name, index))
            case ast.Constant(value=int() as number) if number in (0, 1) and _counts(parent):
                if not isinstance(number, bool):
                    yield _substitute("off-by-one", position, node, ast.Constant(number + 1), (parent, name, index))
            case ast.UnaryOp(op=ast.Not(), operand=operand) if not is_whole_test:
                yield _substitute("negate", position, node, operand, (parent, name, index))
        if _is_inner_test(parent, name) and not (isinstance(node, ast.Compare) and isinstance(node.ops[0], INVERSIONS)):
            yield _substitute("negate", position, node, _negated(node), (parent, name, index))


def _is_inner_test(parent: ast.AST, name: str) -> bool:
    """Of a comprehension or of a conditional expression."""
    return (isinstance(parent, ast.comprehension) and name == "ifs") or (
        isinstance(parent, ast.IfExp) and name == "test"
    )


def _counts(parent: ast.AST) -> bool:
    """The constant is a result, an argument or a value. A counter that outlives the function may count by two."""
    if isinstance(parent, ast.AugAssign):
        return isinstance(parent.target, ast.Name)
    return isinstance(parent, ast.Return | ast.Assign | ast.keyword | ast.Call)


def _substitute(
    operator: str, position: Position, node: ast.expr, other: ast.expr, where: tuple[ast.AST, str, int | None]
) -> Edit:
    parent, name, index = where

    def apply() -> None:
        replace(parent, name, index, other)

    shown = text(parent) if isinstance(node, ast.Constant) else text(node)
    return Edit(operator, position, shown, f"{text(node)} -> {text(other)}", apply)


def _compare(position: Position, node: ast.Compare, numbers: range, *, is_whole_test: bool) -> Iterator[Edit]:
    for number in numbers:
        operation = node.ops[number]
        other = COMPARISONS.get(type(operation))
        if other is None or (is_whole_test and len(node.ops) == 1 and isinstance(operation, INVERSIONS)):
            continue

        def apply(number: int = number, other: type[ast.cmpop] = other) -> None:
            node.ops[number] = other()

        changed = ast.Compare(node.left, [*node.ops], node.comparators)
        changed.ops[number] = other()
        yield Edit("compare", position, text(node), text(changed), apply)


def _rename(position: Position, node: ast.Call, function: ast.Name) -> Edit:
    other = OPPOSITE[function.id]

    def apply() -> None:
        function.id = other

    return Edit("compare", position, text(node), f"{function.id} -> {other}", apply)


def _bool(position: Position, node: ast.BoolOp) -> Edit:
    other = ast.Or() if isinstance(node.op, ast.And) else ast.And()

    def apply() -> None:
        node.op = other

    return Edit("bool", position, text(node), text(ast.BoolOp(other, node.values)), apply)
