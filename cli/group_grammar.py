"""The grammar of `tidelog groups`; nothing is imported until one of them runs."""

import argparse
from collections.abc import Callable
from typing import Any

Add = Callable[..., argparse.ArgumentParser]


def add(groups: Any, command: Add, yes: Callable[[argparse.ArgumentParser], None]) -> None:
    listed = command(groups, "list", "groups:run_list", "groups with state and members, of all brokers")
    listed.add_argument("--state", action="append", default=[], metavar="STATE", help="only those in it, like stable")
    kinds = ("consumer", "classic", "simple")
    listed.add_argument("--type", action="append", default=[], choices=kinds, help="only groups of this type")
    describe = command(
        groups,
        "describe",
        "groups:run_describe",
        "state, members, and how far behind each partition is",
        more="Exits with 1 if a group is not there.",
    )
    describe.add_argument("group", metavar="GROUP", nargs="*", help="default: all")
    _add_reset(groups, command)
    delete = command(groups, "delete", "groups:run_delete", "delete groups without members, with their offsets")
    delete.add_argument("group", metavar="GROUP", nargs="+")
    yes(delete)
    forget = command(
        groups,
        "delete-offsets",
        "groups:run_delete_offsets",
        "delete committed offsets of a group",
        more="Refused for topics that its members read.",
    )
    forget.add_argument("group", metavar="GROUP")
    _topics(forget)
    yes(forget)
    remove = command(
        groups,
        "remove-members",
        "groups:run_remove_members",
        "take members out of a group, as if they had left",
        more="A running member rejoins.",
    )
    remove.add_argument("group", metavar="GROUP")
    remove.add_argument("--member", action="append", default=[], metavar="ID", help="by member id")
    remove.add_argument("--instance", action="append", default=[], metavar="ID", help="static members, by instance id")
    remove.add_argument("--all", action="store_true", help="all members")
    yes(remove)


def _topics(made: argparse.ArgumentParser) -> None:
    made.add_argument(
        "--topic", action="append", default=[], metavar="T[:P,P]", help="of this topic, or of these partitions of it"
    )
    made.add_argument("--all-topics", action="store_true", help="of all that the group has committed")


def _add_reset(groups: Any, command: Add) -> None:
    reset = command(
        groups,
        "reset-offsets",
        "groups:run_reset",
        "reset the committed offsets of a group",
        more="Shows what it would do; --execute does it. Refused while the group has members.",
    )
    reset.add_argument("group", metavar="GROUP")
    _topics(reset)
    where = reset.add_mutually_exclusive_group()
    where.add_argument("--to-earliest", action="store_true", help="to the start of the log")
    where.add_argument("--to-latest", action="store_true", help="to its end")
    where.add_argument("--to-offset", type=int, metavar="O", help="to this offset")
    where.add_argument(
        "--to-datetime", metavar="T", help="to the first record at or after: 2026-01-31T12:00[:00][Z], or ms since 1970"
    )
    where.add_argument(
        "--by-duration", metavar="D", help="to the first record at or after this long ago: 90s, 1h30m, PT1H"
    )
    where.add_argument("--shift-by", type=int, metavar="N", help="shift by N offsets; negative: back (--shift-by=-10)")
    where.add_argument("--from-file", metavar="FILE", help="lines of topic,partition,offset, as --export prints them")
    where.add_argument(
        "--to-current", action="store_true", help="the committed offsets as they are; with --export to save them"
    )
    reset.add_argument("--execute", action="store_true", help="do it")
    reset.add_argument("--export", action="store_true", help="print topic,partition,offset instead of a table")
