"""`tidelog acls list|create|delete`. docs/cli.md lists the keys of the JSON documents."""

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from tidelog.cli import table
from tidelog.cli.clients import open_admin
from tidelog.cli.exit_codes import EXIT_FAILURE, EXIT_OK
from tidelog.cli.main import UsageError
from tidelog.cli.messages import confirm, error_document, print_json, report, report_errors
from tidelog.client.admin.acl_values import AclBinding, AclFilter
from tidelog.model.errors import TidelogError

CLUSTER = "kafka-cluster"
HEADINGS = ("type", "resource", "pattern", "principal", "host", "operation", "permission")
_PRODUCER = {"topic": ("write", "describe", "create"), "transactional-id": ("write", "describe")}
_CONSUMER = {"topic": ("read", "describe"), "group": ("read",)}


def run_list(options: argparse.Namespace) -> int:
    pattern = _pattern(options)
    resources: Sequence[tuple[str | None, str | None]] = _resources(options) or [(None, None)]
    found: dict[AclBinding, None] = {}
    with open_admin(options) as admin:
        for kind, name in resources:
            for principal in options.principal or [None]:
                matching = AclFilter(resource_type=kind, resource=name, pattern_type=pattern, principal=principal)
                found |= dict.fromkeys(admin.describe_acls(matching))
    if options.output == "json":
        print_json({"acls": [asdict(binding) for binding in found]})
    elif found:
        _print_table(found)
    else:
        report("no ACL matches" if options.principal or _resources(options) else "there are no ACLs")
    return EXIT_OK


def run_create(options: argparse.Namespace) -> int:
    bindings = [
        AclBinding(
            resource_type=kind,
            resource=name,
            pattern_type=_pattern_of(kind, options.resource_pattern_type),
            principal=principal,
            host=host,
            operation=operation,
            permission=permission,
        )
        for principal, host, permission in _principals(options)
        for kind, name, operation in _operations(options)
    ]
    if not bindings:
        raise UsageError("nobody is named: use --allow-principal User:NAME or --deny-principal User:NAME")
    with open_admin(options) as admin:
        outcomes = admin.create_acls(bindings, validate_only=options.validate_only, partial=True)
    if options.output == "json":
        _print_rows(options, {binding: outcomes.errors.get(binding) for binding in bindings})
    elif outcomes.succeeded:
        print("these would be created:" if options.validate_only else "created:")
        _print_table(outcomes.succeeded)
    return report_errors(outcomes.errors)


def run_delete(options: argparse.Namespace) -> int:
    filters = list(_deletions(options))
    with open_admin(options) as admin:
        if not options.validate_only and not _confirm(options, admin, filters):
            return EXIT_FAILURE
        outcomes = admin.delete_acls(filters, validate_only=options.validate_only, partial=True)
    deleted = [binding for bindings in outcomes.succeeded.values() for binding in bindings]
    if options.output == "json":
        _print_rows(options, dict.fromkeys(deleted))
    elif deleted:
        print("these would be deleted:" if options.validate_only else "deleted:")
        _print_table(deleted)
    elif not outcomes.errors:
        report("no ACL matches")
    return report_errors(outcomes.errors)


def _confirm(options: argparse.Namespace, admin: Any, filters: list[AclFilter]) -> bool:
    """Asks with the number of ACLs; on a terminal only."""
    if options.yes or not sys.stdin.isatty():
        return True
    matching = admin.delete_acls(filters, validate_only=True).all().values()
    return confirm(options, f"delete {table.count(sum(map(len, matching)), 'ACL')}?")


# Arguments.


def _resources(options: argparse.Namespace) -> list[tuple[str, str]]:
    resources = [("topic", name) for name in options.topic]
    resources += [("group", name) for name in options.group]
    resources += [("transactional-id", name) for name in options.transactional_id]
    return [*resources, *([("cluster", CLUSTER)] if options.cluster else [])]


def _pattern(options: argparse.Namespace) -> str | None:
    return None if options.resource_pattern_type == "any" else options.resource_pattern_type


def _pattern_of(kind: str, pattern: str) -> str:
    """The cluster has one name."""
    return "literal" if kind == "cluster" else pattern


def _principals(options: argparse.Namespace) -> Iterator[tuple[str, str, str]]:
    """(principal, host, permission)"""
    for principals, hosts, permission in (
        (options.allow_principal, options.allow_host, "allow"),
        (options.deny_principal, options.deny_host, "deny"),
    ):
        if hosts and not principals:
            raise UsageError(f"--{permission}-host without --{permission}-principal: name a principal")
        yield from ((principal, host, permission) for principal in principals for host in hosts or ["*"])


def _operations(options: argparse.Namespace) -> list[tuple[str, str, str]]:
    """(resource type, resource, operation)"""
    resources = _resources(options)
    if not resources:
        raise UsageError("no resource is named: use --topic, --group, --transactional-id or --cluster")
    if not options.producer and not options.consumer:
        return [(kind, name, operation) for kind, name in resources for operation in options.operation or ["all"]]
    if options.operation:
        raise UsageError("--producer and --consumer name the operations: use no --operation with them")
    if not options.topic:
        raise UsageError("--producer and --consumer need --topic")
    if options.consumer and not options.group:
        raise UsageError("--consumer needs --group")
    roles = [_PRODUCER] * options.producer + [_CONSUMER] * options.consumer
    rows = [(kind, name, operation) for role in roles for kind, name in resources for operation in role.get(kind, ())]
    unused = sorted({kind for kind, _ in resources} - {kind for kind, _, _ in rows})
    if unused:
        raise UsageError(f"--producer and --consumer need no right to a {unused[0]}")
    return list(dict.fromkeys(rows))


def _deletions(options: argparse.Namespace) -> Iterator[AclFilter]:
    pattern, principals = _pattern(options), list(_principals(options))
    has_operations = options.operation or options.producer or options.consumer
    rows: Iterable[tuple[str, str, str | None]] = _operations(options)
    if not has_operations:
        rows = [(kind, name, None) for kind, name in _resources(options)]
    for kind, name, operation in rows:
        resource = {"resource_type": kind, "resource": name, "pattern_type": pattern, "operation": operation}
        if not principals:
            yield AclFilter(**resource)
        for principal, host, permission in principals:
            is_any_host = host == "*" and not getattr(options, f"{permission}_host")
            yield AclFilter(**resource, principal=principal, host=None if is_any_host else host, permission=permission)


# Output.


def _print_table(bindings: Iterable[AclBinding]) -> None:
    rows = [
        [
            binding.resource_type,
            binding.resource,
            binding.pattern_type,
            binding.principal,
            binding.host,
            binding.operation,
            binding.permission,
        ]
        for binding in bindings
    ]
    table.write(sys.stdout, HEADINGS, rows)


def _print_rows(options: argparse.Namespace, rows: dict[AclBinding, TidelogError | None]) -> None:
    print_json(
        {
            "acls": [{**asdict(binding), "error": error_document(error)} for binding, error in rows.items()],
            "validate_only": options.validate_only,
        }
    )
