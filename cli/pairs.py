"""KEY=VALUE arguments of a command line."""

from tidelog.cli.main import UsageError


def pairs_of(items: list[str], option: str) -> list[tuple[str, str]]:
    """KEY=VALUE, as given on a command line."""
    found = []
    for item in items:
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise UsageError(f"{option} {item!r}: KEY=VALUE")
        found.append((key, value))
    return found
