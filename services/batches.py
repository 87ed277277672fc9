"""Sends changes of many items to the controller, and returns a row for each.

The controller decides on a request in one turn of its event loop, so a large request is split. An item that the request
names more than once is not sent: each of its rows is INVALID_REQUEST, as in Kafka.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

from tidelog.metadata.decision import Outcome, Outcomes
from tidelog.model.errors import InvalidRequestError, TidelogError
from tidelog.services.context import RequestContext
from tidelog.services.deadline import Deadline
from tidelog.services.node import NodeAccess
from tidelog.services.quotas import Charge
from tidelog.world.slicing import sliced

ITEMS_PER_SLICE = 1_000
"""Items checked in one turn of this node's event loop."""
LABEL_LENGTH_MAX = 300

Item = TypeVar("Item")
Row = TypeVar("Row")


async def change_in_batches(
    node: NodeAccess,
    context: RequestContext,
    deadline: Deadline,
    items: Sequence[Item],
    *,
    name: Callable[[Item], Hashable],
    rejection: Callable[[Item], TidelogError | None],
    request: Callable[[tuple[Item, ...]], object],
    rows: Callable[[Any], Sequence[Row]],
    failed: Callable[[Item, TidelogError], Row],
    mutations: Callable[[Item], int] = lambda _: 1,
    size: int = 0,
) -> list[Row]:
    """Charge and send the items that are not rejected. Return one row for each item, in order.

    `request` makes the request for some items, `rows` reads its reply, `failed` makes the row of an item that was not
    sent or whose batch failed. If every batch fails, the first error is raised: it is that of the whole request.
    `size` 0: `admin_items_max`.
    """
    named: Counter[Hashable] = Counter()
    async for item in sliced(items, ITEMS_PER_SLICE):
        named[name(item)] += 1
    allowed: list[int] = []
    results: dict[int, Row] = {}
    async for position, item in sliced(enumerate(items), ITEMS_PER_SLICE):
        error = rejection(item) or _repetition(name(item), named)
        if error is None:
            allowed.append(position)
        else:
            results[position] = failed(item, error)
    node.guard.charge(context, Charge.MUTATIONS, sum(mutations(items[position]) for position in allowed))
    first_error: TidelogError | None = None
    has_reply = False
    size = size or node.limits.admin_items_max
    for start in range(0, len(allowed), size):
        positions = allowed[start : start + size]
        message = request(tuple(items[position] for position in positions))
        try:
            reply = await node.forwarder.ask(context, message, timeout_ms=deadline.left_ms())
        except TidelogError as error:
            first_error = first_error or error
            results |= {position: failed(items[position], error) for position in positions}
        else:
            has_reply = True
            results |= dict(zip(positions, rows(reply), strict=True))
    if first_error is not None and not has_reply:
        raise first_error
    return [results[position] for position in range(len(items))]


def _repetition(name: Hashable, named: Counter[Hashable]) -> TidelogError | None:
    if named[name] == 1:
        return None
    label = " ".join(map(str, name)) if isinstance(name, tuple) else str(name)
    return InvalidRequestError(
        f"{label[:LABEL_LENGTH_MAX]!r} is named {named[name]} times in one request: name it once"
    )


def outcomes_of(reply: object) -> tuple[Outcome, ...]:
    assert isinstance(reply, Outcomes), "one outcome for each item"
    return reply.items
