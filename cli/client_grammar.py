"""The grammar of the commands that talk to a cluster; nothing is imported until one of them runs."""

import argparse
from collections.abc import Callable
from typing import Any

from tidelog.cli import acl_grammar, group_grammar, node_grammar, transaction_grammar

BOOTSTRAP_HELP = "a node of the cluster, or several (default: TIDELOG_BOOTSTRAP, the profile, or localhost:9292)"


def add(commands: Any, kind: type[argparse.ArgumentParser]) -> None:
    """Add the commands to the grammar of `tidelog`."""

    def group(name: str, says: str) -> Any:
        made = commands.add_parser(name, help=says, description=says[0].upper() + says[1:] + ".")
        return made.add_subparsers(dest=f"{name} command", metavar="command", parser_class=kind, required=True)

    _add_topics(group("topics", "topics: create, describe, change, delete"))
    _add_configs(group("configs", "settings of topics, brokers and the cluster"))
    _add_produce(commands)
    _add_consume(commands)
    _add_query(commands)
    group_grammar.add(group("groups", "consumer groups: describe, reset, delete"), _command, _yes)
    transaction_grammar.add(
        group("transactions", "transactional ids: describe, abort, find what hangs"), _command, _yes
    )
    acl_grammar.add(group("acls", "access control lists: who may do what"), _command, _yes)
    _add_brokers(group("brokers", "the brokers of a cluster"))
    _add_reassign(group("reassign", "move replicas between brokers"))
    _add_elections(commands)
    _add_records(commands)
    _add_verify(group("verify", "check a cluster with numbered records: lost, duplicated, reordered"))
    _add_bench(group("bench", "measure a cluster"))


def _command(
    commands: Any, name: str, runs: str, says: str, *, more: str = "", has_output: bool = True
) -> argparse.ArgumentParser:
    description = says[0].upper() + says[1:] + "." + (f" {more}" if more else "")
    made: argparse.ArgumentParser = commands.add_parser(name, help=says, description=description)
    made.add_argument("--bootstrap", "--bootstrap-server", metavar="HOST:PORT,...", help=BOOTSTRAP_HELP)
    node_grammar.add_timeout(made)
    if has_output:
        made.add_argument("--output", choices=("table", "json"), default="table", help="output format")
    made.set_defaults(run=f"tidelog.cli.{runs}")
    return made


def _whole_from(least: int) -> Callable[[str], int]:
    """The type of an option that is an integer, at least `least`."""

    def whole(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"'{text}' is not an integer") from None
        if number < least:
            raise argparse.ArgumentTypeError(f"{number}: must be at least {least}")
        return number

    return whole


_from_0 = _whole_from(0)
_from_1 = _whole_from(1)


def _bytes(text: str) -> int:
    """The type of an option that is a size from 1 byte on, which may have a unit."""
    from tidelog.server.config import with_unit

    return _from_1(with_unit(text, "bytes"))


def _dry_run(made: argparse.ArgumentParser) -> None:
    made.add_argument("--validate-only", action="store_true", help="check everything, change nothing")


def _yes(made: argparse.ArgumentParser) -> None:
    made.add_argument("--yes", action="store_true", help="do not ask; without a terminal nothing is asked either")


def _add_topics(topics: Any) -> None:
    create = _command(topics, "create", "topics:run_create", "create topics")
    create.add_argument("topic", metavar="NAME", nargs="+", help="1 to 249 letters, digits, '.', '_', '-'")
    create.add_argument("--partitions", type=_from_1, metavar="N", help="default: the cluster's num.partitions")
    create.add_argument("--replication-factor", type=_from_1, metavar="N", help="default: default.replication.factor")
    create.add_argument(
        "--replica-assignment", metavar="LIST", help="instead of both: brokers of each partition, like 1:2:3,2:3:1"
    )
    create.add_argument("--config", action="append", default=[], metavar="KEY=VALUE", help="a setting of the topic")
    create.add_argument("--if-not-exists", action="store_true", help="do not fail if the topic exists")
    _dry_run(create)
    listed = _command(topics, "list", "topics:run_list", "names of topics")
    listed.add_argument("--exclude-internal", action="store_true", help="without those of the cluster itself")
    describe = _command(topics, "describe", "topics:run_describe", "partitions, leaders, replicas, settings")
    describe.add_argument("topic", metavar="NAME", nargs="*", help="default: all")
    for option, says in (
        ("--under-replicated", "only partitions with fewer replicas in sync than they have"),
        ("--unavailable", "only partitions without a leader"),
        ("--under-min-isr", "only partitions with fewer in sync than min.insync.replicas"),
        ("--at-min-isr", "only partitions with just min.insync.replicas in sync"),
        ("--with-overrides", "only topics with settings of their own"),
    ):
        describe.add_argument(option, action="store_true", help=says)
    alter = _command(topics, "alter", "topics:run_alter", "add partitions to a topic")
    alter.add_argument("topic", metavar="NAME", nargs="+")
    alter.add_argument("--partitions", type=_from_1, required=True, metavar="N", help="new total number of partitions")
    _dry_run(alter)
    delete = _command(topics, "delete", "topics:run_delete", "delete topics and their records")
    delete.add_argument("topic", metavar="NAME", nargs="+")
    delete.add_argument("--if-exists", action="store_true", help="do not fail if the topic does not exist")
    _yes(delete)
    _dry_run(delete)


def _add_configs(configs: Any) -> None:
    describe = _command(configs, "describe", "configs_cmd:run_describe", "value, source and default of each key")
    alter = _command(configs, "alter", "configs_cmd:run_alter", "change settings; they take effect at once")
    for made in (describe, alter):
        which = made.add_mutually_exclusive_group(required=True)
        which.add_argument("--topic", metavar="NAME")
        which.add_argument("--broker", metavar="ID")
        which.add_argument("--cluster", action="store_true", help="the default of all brokers")
    describe.add_argument("--all", action="store_true", help="also keys that have their default")
    describe.add_argument("--key", action="append", default=[], metavar="KEY", help="only this one")
    alter.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    alter.add_argument("--delete", action="append", default=[], metavar="KEY", help="back to the default")
    alter.add_argument("--append", action="append", default=[], metavar="KEY=VALUE", help="add to a list")
    alter.add_argument("--subtract", action="append", default=[], metavar="KEY=VALUE", help="take from a list")
    _dry_run(alter)


def _add_produce(commands: Any) -> None:
    made = _command(
        commands,
        "produce",
        "produce:run",
        "write lines of stdin as records",
        more="Each line is a value; with --key-separator KEY:VALUE. With --input json each line is an object with "
        "value, key, headers, partition, timestamp.",
    )
    made.add_argument("topic", metavar="TOPIC")
    made.add_argument("--key-separator", metavar="TEXT", help="separator between key and value")
    made.add_argument("--key", metavar="TEXT", help="the key of every record")
    made.add_argument(
        "--file", action="append", default=[], metavar="PATH", help="send this file as one record ('-': all of stdin)"
    )
    made.add_argument("--headers", action="append", default=[], metavar="NAME=VALUE", help="a header for every record")
    made.add_argument("--partition", type=int, metavar="P", help="default: by the key, else in turn")
    made.add_argument("--acks", choices=("all", "-1", "1", "0"), default="all")
    made.add_argument("--input", choices=("lines", "json"), default="lines", help="what a line of stdin is")
    made.add_argument("--null-marker", metavar="TEXT", help="a key or value that is this text is null")
    made.add_argument("--compression", choices=("none", "gzip", "snappy", "lz4", "zstd"), default="none")
    made.add_argument("--timeout-ms", type=int, default=30_000, metavar="MS", help="how long to try to store a record")


def _add_consume(commands: Any) -> None:
    made = _command(
        commands,
        "consume",
        "consume:run",
        "print records as they come, until Ctrl-C",
        more="Starts at the end by default. With --group as a member of a group: several share the "
        "partitions, what was printed is committed, and the next one goes on there.",
        has_output=False,
    )
    made.add_argument("topic", metavar="TOPIC", nargs="*")
    made.add_argument("--pattern", metavar="REGEX", help="instead of names: all topics whose whole name matches")
    where = made.add_mutually_exclusive_group()
    where.add_argument("--from-beginning", action="store_true", help="from the first record on")
    where.add_argument("--offset", metavar="O", help="from here on: a number, earliest or latest")
    where.add_argument("--timestamp", metavar="T", help="from this time on: ms since 1970, or 2026-01-31T12:00[:00][Z]")
    where.add_argument("--last", type=_from_0, metavar="N", help="from N offsets before the end of each partition on")
    made.add_argument("--partition", type=int, action="append", metavar="P", help="only this one (default: all)")
    made.add_argument("--group", metavar="G", help="as a member of this group, from what it has committed on")
    _add_isolation(made)
    made.add_argument("--max-messages", type=_from_0, metavar="N", help="stop after N records")
    made.add_argument("--timeout-ms", type=_from_0, metavar="MS", help="stop after MS milliseconds without a record")
    made.add_argument("--exit-at-end", action="store_true", help="stop at the current end of each partition")
    made.add_argument("--keys", action="store_true", help="print keys before values")
    made.add_argument("--key-separator", default="\t", metavar="TEXT", help="separator of printed fields (default tab)")
    made.add_argument("--headers", action="store_true", help="print headers")
    made.add_argument("--offsets", action="store_true", help="print partition, offset and time")
    made.add_argument(
        "--format",
        metavar="TEXT",
        help="print each record so: %%t topic, %%p partition, %%o offset, %%T timestamp, %%k key, %%v value, "
        "%%h headers, %%K and %%S bytes of key and value, \\n, \\t",
    )
    made.add_argument(
        "--output",
        choices=("lines", "json", "jsonl"),
        default="lines",
        help="values; one JSON document; or one JSON object a line",
    )


def _add_isolation(made: argparse.ArgumentParser) -> None:
    made.add_argument(
        "--isolation",
        choices=("read_uncommitted", "read_committed"),
        default="read_uncommitted",
        help="read_committed: no records of transactions that are open or were aborted (default read_uncommitted)",
    )


def _add_query(commands: Any) -> None:
    made = _command(
        commands,
        "query",
        "query:run",
        "SQL over topics, with DuckDB",
        more="One SELECT; its tables are topics, with names that have dots or dashes in double quotes. They have the "
        'columns topic, partition, "offset", timestamp, key, value, headers; decode(value) is text. Needs the extra '
        "`query`.",
        has_output=False,
    )
    made.add_argument("query", metavar="SQL", help="like: select key, count(*) from orders group by key")
    made.add_argument(
        "--since", metavar="T", help="only records from then on: 90s, 1h30m ago; 2026-01-31T12:00; ms since 1970"
    )
    _add_isolation(made)
    made.add_argument("--limit", type=int, default=1_000, metavar="N", help="rows to show at most (default 1000)")
    made.add_argument(
        "--records-max",
        type=int,
        default=10_000_000,
        metavar="N",
        help="refuse to read a topic with more records (default 10 million)",
    )
    made.add_argument("--output", choices=("table", "json", "csv"), default="table", help="output format")


def _add_brokers(brokers: Any) -> None:
    _command(brokers, "list", "brokers:run_list", "brokers with address and state")
    describe = _command(brokers, "describe", "brokers:run_describe", "one broker, with its log directories")
    describe.add_argument("broker", type=int, metavar="ID", nargs="*", help="default: all")
    drain = _command(
        brokers,
        "drain",
        "brokers:run_drain",
        "move leadership away from a broker and place no new replicas on it",
        more="Its replicas stay; `tidelog reassign plan` moves them.",
    )
    drain.add_argument("broker", type=int, metavar="ID")
    drain.add_argument("--undo", action="store_true", help="end the drain")
    _dry_run(drain)
    unregister = _command(
        brokers,
        "unregister",
        "brokers:run_unregister",
        "remove a stopped broker that will not return",
        more="Rejected while the broker runs or has replicas: `tidelog reassign plan` moves them.",
    )
    unregister.add_argument("broker", type=int, metavar="ID")
    _yes(unregister)
    _dry_run(unregister)
    move = _command(
        brokers,
        "move-replicas",
        "brokers:run_move_replicas",
        "move replicas of a topic to another log directory of their broker",
        more="They are used meanwhile. Waits until they are there; what has begun goes on without it.",
    )
    move.add_argument("broker", type=int, metavar="ID")
    move.add_argument("--topic", required=True, metavar="NAME")
    move.add_argument("--partition", type=int, action="append", metavar="P", help="only this one (default: all)")
    move.add_argument("--directory", required=True, metavar="PATH", help="where to, by path or id (`brokers describe`)")
    verify = _command(
        brokers,
        "verify-replicas",
        "verify_replicas:run",
        "prove that the replicas of partitions agree, without stopping anything",
        more="Exit code 0 only if all replicas that were named agree.",
    )
    verify.add_argument("partitions", nargs="*", metavar="TOPIC[:PARTITION]", help="default: all of the cluster")


def _add_reassign(reassign: Any) -> None:
    plan = _command(
        reassign,
        "plan",
        "reassign:run_plan",
        "say what to move so that replicas are spread evenly",
        more="Changes nothing; --save writes the plan for `execute`.",
    )
    plan.add_argument("--topic", action="append", metavar="NAME", help="only this one (default: all)")
    plan.add_argument("--brokers", metavar="IDS", help="where they may be, like 1,2,3 (default: all that take part)")
    plan.add_argument("--save", metavar="FILE", help="write the plan here")
    execute = _command(reassign, "execute", "reassign:run_execute", "begin the moves of a plan")
    execute.add_argument("--plan", required=True, metavar="FILE")
    execute.add_argument(
        "--throttle", type=_bytes, metavar="BYTES", help="bytes a second that each broker may use for it, like 50MB"
    )
    execute.add_argument("--wait", action="store_true", help="until all moves are done")
    _dry_run(execute)
    status = _command(
        reassign,
        "status",
        "reassign:run_status",
        "reassignments in progress; removes throttles when there are none",
    )
    status.add_argument("--plan", metavar="FILE", help="only what this plan names")
    cancel = _command(reassign, "cancel", "reassign:run_cancel", "cancel reassignments and restore the former replicas")
    cancel.add_argument("--plan", metavar="FILE", help="only what this plan names (default: all)")
    _yes(cancel)


def _add_elections(commands: Any) -> None:
    made = _command(
        commands,
        "elect-leaders",
        "elections:run",
        "elect preferred replicas as leaders; with --unclean any live replica",
        more="--unclean elects for partitions without a leader; acknowledged records may be lost.",
    )
    made.add_argument("--topic", metavar="NAME", help="only this one (default: all that need it)")
    made.add_argument("--partition", type=int, action="append", metavar="P", help="only this one, with --topic")
    made.add_argument("--all", action="store_true", help="all partitions of the cluster")
    made.add_argument("--unclean", action="store_true", help="any live replica, for partitions without a leader")
    _yes(made)
    _dry_run(made)


def _add_records(commands: Any) -> None:
    made = _command(commands, "delete-records", "records:run_delete", "delete records before an offset")
    made.add_argument("topic", metavar="TOPIC")
    made.add_argument("--before", required=True, metavar="OFFSET", help="the new start; 'end': all that can be read")
    made.add_argument("--partition", type=int, action="append", metavar="P", help="default with 'end': all")
    _yes(made)


def _add_verify(verify: Any) -> None:
    produce = _command(
        verify, "produce", "verify:run_produce", "write numbered records, and note every acknowledgement"
    )
    produce.add_argument("topic", metavar="TOPIC")
    produce.add_argument("--records", type=_from_0, metavar="N", help="how many (default: until Ctrl-C)")
    produce.add_argument("--rate", type=float, default=1000.0, metavar="R", help="records a second (default 1000)")
    produce.add_argument("--batch", type=int, default=10, metavar="N", help="records of a batch (default 10)")
    produce.add_argument("--acks", choices=("all", "-1", "1", "0"), default="all")
    produce.add_argument("--timeout-ms", type=int, default=120_000, metavar="MS", help="to store a batch")
    consume = _command(verify, "consume", "verify_read:run", "read everything, and note every record")
    consume.add_argument("topic", metavar="TOPIC")
    consume.add_argument("--records", type=_from_0, metavar="N", help="stop after N records")
    consume.add_argument("--follow", action="store_true", help="go on at the end, until Ctrl-C")
    consume.add_argument("--group", metavar="G", help="as a member of this group; several may run at once")
    check = verify.add_parser(
        "check",
        help="compare what was acknowledged with what was read",
        description="Exits with 1 if a record was lost, stored twice, out of order or out of place.",
    )
    check.add_argument("history", nargs="+", metavar="FILE", help="of `verify produce` and `verify consume`")
    check.add_argument("--allow", action="append", default=[], choices=("lost",), help="as with acks=1")
    check.add_argument("--output", choices=("table", "json"), default="table", help="output format")
    check.set_defaults(run="tidelog.cli.verify:run_check")
    _add_chaos(verify)
    for made in (produce, consume):
        made.add_argument("--history", required=True, metavar="FILE", help="lines of JSON are added to it")


def _add_chaos(verify: Any) -> None:
    chaos = _command(
        verify,
        "chaos",
        "verify_chaos:run",
        "write and read with real clients while faults strike, and check everything",
        more="It creates topics and groups of its own, and deletes them if all is good. Exits with 1 otherwise.",
    )
    chaos.add_argument("--minutes", type=float, default=5.0, metavar="N", help="how long (default 5)")
    chaos.add_argument(
        "--nodes", metavar="FILE", help="TOML with commands that kill, stop, ... nodes (default: no faults)"
    )
    chaos.add_argument(
        "--kafka-bootstrap", metavar="HOST:PORT,...", help="also confluent-kafka and aiokafka, if installed"
    )
    chaos.add_argument("--seed", type=_from_0, metavar="K", help="repeats a plan of faults (default: the time)")
    chaos.add_argument("--rate", type=_from_1, default=150, metavar="R", help="records a second (default 150)")
    chaos.add_argument("--path", metavar="DIR", help="for histories and report.html (default chaos-SEED)")


def _add_bench(bench: Any) -> None:
    produce = _command(bench, "produce", "bench_cmd:run_produce", "how much a producer can write, acknowledged")
    consume = _command(bench, "consume", "bench_cmd:run_consume", "how much a consumer can read")
    latency = _command(bench, "latency", "bench_cmd:run_latency", "how long one record takes at light load")
    failover = _command(
        bench,
        "failover",
        "bench_failover:run",
        "write unavailability after the leader is killed",
        more="Starts a cluster of three nodes of its own and kills its leaders with -9. With --watch it kills nobody: "
        "it writes to the given cluster and reports how long it stood still.",
    )
    for made in (produce, consume, latency):
        made.add_argument("--topic", metavar="NAME", help="write to this one (default: one of its own, deleted after)")
        made.add_argument("--partitions", type=_from_1, default=3, metavar="N", help="of its own topic (default 3)")
        made.add_argument("--replication-factor", type=_from_1, metavar="N", help="of its own topic")
        made.add_argument("--record-bytes", type=int, default=100, metavar="N", help="of a value (default 100)")
        made.add_argument("--seconds", type=float, default=10.0, metavar="S", help="how long (default 10)")
        made.add_argument("--acks", choices=("all", "-1", "1", "0"), default="all")
        made.add_argument("--raw", action="store_true", help="without the cost of a client: batches that are ready")
    for made in (produce, consume):
        made.add_argument(
            "--batch-bytes", type=int, metavar="N", help="of a batch (default: the producer's; with --raw 1 MiB)"
        )
    produce.add_argument("--bulk", action="store_true", help="many records at once (send_many), not one by one")
    consume.add_argument("--arrow", action="store_true", help="as columns (poll_arrow), not one by one")
    consume.add_argument("--decode", action="store_true", help="with --raw: decode every record")
    latency.add_argument("--rate", type=float, default=50.0, metavar="R", help="records a second (default 50)")
    failover.add_argument("--rounds", type=int, default=5, metavar="N", help="how often (default 5)")
    failover.add_argument("--frozen", action="store_true", help="stop the leader (SIGSTOP) instead of killing it")
    failover.add_argument("--nodes", type=int, default=3, metavar="N", help="of its own cluster (default 3)")
    failover.add_argument("--watch", action="store_true", help="measure on the cluster of --bootstrap, kill nobody")
    failover.add_argument("--seconds", type=float, default=60.0, metavar="S", help="of --watch (default 60)")
