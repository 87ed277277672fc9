"""Commands that take root: `ip`, `mount`, `losetup`."""

import os
import shutil
import subprocess

COMMAND_S = 60


class MissingError(Exception):
    """This machine, or this user, cannot do it; the message says what is missing."""


def run(*command: str) -> str:
    """Return what the command prints."""
    if os.geteuid() != 0:
        raise MissingError(f"{command[0]} takes root")
    if shutil.which(command[0]) is None:
        raise MissingError(f"there is no {command[0]}")
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=COMMAND_S)
    if done.returncode != 0:
        raise MissingError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout.strip()
