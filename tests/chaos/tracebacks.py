"""Tracebacks in the log of a node. Pure."""

from __future__ import annotations

DEVICE_ERROR = "Input/output error"


def unexpected_tracebacks(log: str, *, disk_has_failed: bool) -> list[str]:
    """The last line of each traceback. A node whose disk has failed may show the error of that disk."""
    found = []
    is_inside = False
    for line in log.splitlines():
        if line.startswith("Traceback (most recent call last)"):
            is_inside = True
        elif is_inside and line and not line.startswith((" ", "\t")):
            is_inside = False
            if not (disk_has_failed and DEVICE_ERROR in line):
                found.append(line)
    return found + (["a traceback without an end"] if is_inside else [])
