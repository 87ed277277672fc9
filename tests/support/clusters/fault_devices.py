"""What a test does that needs root, loop devices, a tun device or a file system of its own, where it cannot have them:
it is skipped, and pytest says why; with REQUIRE_FAULT_DEVICES=1 it fails."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def are_required() -> bool:
    """Any value, unless it is empty."""
    return bool(os.environ.get("REQUIRE_FAULT_DEVICES"))


def cannot(why: str) -> NoReturn:
    if are_required():
        pytest.fail(f"REQUIRE_FAULT_DEVICES is set. {why}", pytrace=False)
    pytest.skip(why)
