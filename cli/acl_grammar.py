"""The grammar of `tidelog acls`; nothing is imported until one of them runs."""

import argparse
from collections.abc import Callable
from typing import Any

Add = Callable[..., argparse.ArgumentParser]
OPERATIONS = (
    "all",
    "read",
    "write",
    "create",
    "delete",
    "alter",
    "describe",
    "cluster-action",
    "describe-configs",
    "alter-configs",
    "idempotent-write",
    "create-tokens",
    "describe-tokens",
    "two-phase-commit",
)


def add(acls: Any, command: Add, yes: Callable[[argparse.ArgumentParser], None]) -> None:
    listed = command(acls, "list", "acls:run_list", "access control lists, all or those of some resources")
    listed.add_argument("--principal", action="append", default=[], metavar="P", help="only of User:name")
    create = command(
        acls,
        "create",
        "acls:run_create",
        "allow or deny principals operations on resources",
        more="An ACL that exists is no error.",
    )
    delete = command(
        acls,
        "delete",
        "acls:run_delete",
        "delete the access control lists that match",
        more="Without a principal or an operation: all of the resources.",
    )
    for made in (listed, create, delete):
        _add_resources(made, has_filter=made is not create)
    for made in (create, delete):
        made.add_argument("--allow-principal", action="append", default=[], metavar="P", help="User:name, or User:*")
        made.add_argument("--deny-principal", action="append", default=[], metavar="P", help="likewise; it wins")
        made.add_argument("--allow-host", action="append", default=[], metavar="H", help="an address (default: any)")
        made.add_argument("--deny-host", action="append", default=[], metavar="H", help="an address (default: any)")
        made.add_argument(
            "--operation",
            action="append",
            default=[],
            choices=OPERATIONS,
            metavar="OP",
            help=f"{', '.join(OPERATIONS)} (default: all)",
        )
        made.add_argument("--producer", action="store_true", help="what a producer needs on the topics")
        made.add_argument("--consumer", action="store_true", help="what a consumer needs on the topics and groups")
        made.add_argument("--validate-only", "--dry-run", action="store_true", help="change nothing")
    yes(delete)


def _add_resources(made: argparse.ArgumentParser, *, has_filter: bool) -> None:
    made.add_argument("--topic", action="append", default=[], metavar="T", help="a topic; * is each")
    made.add_argument("--group", action="append", default=[], metavar="G", help="a consumer group")
    made.add_argument("--transactional-id", action="append", default=[], metavar="ID", help="of a producer")
    made.add_argument("--cluster", action="store_true", help="the cluster")
    types = ("any", "match", "literal", "prefixed") if has_filter else ("literal", "prefixed")
    says = "match: every ACL that applies to the name" if has_filter else "prefixed: names that begin so"
    made.add_argument("--resource-pattern-type", choices=types, default=types[0], help=f"{says} (default {types[0]})")
