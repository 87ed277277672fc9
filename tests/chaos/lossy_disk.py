"""A node's disk: a FUSE file system that forgets what was not synced, stalls, fails, is full (`native/lossyfs.c`)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from support.root_commands import MissingError, run

from chaos.helper_process import HelperProcess
from chaos.native_tools import lossyfs

FILE_SYSTEM = "tidelog-lossyfs"


class LossyDisk:
    """Mounted at `path`. `backing` is a directory of this machine's file system."""

    def __init__(self, path: Path, backing: Path) -> None:
        self.path = path
        self._backing = backing
        self._process: HelperProcess | None = None

    @classmethod
    @contextmanager
    def made(cls, path: Path, backing: Path) -> Iterator[LossyDisk]:
        """Raises `MissingError` where it cannot be mounted."""
        if os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
            raise MissingError("lossyfs takes root and /dev/fuse")
        disk = cls(path, backing)
        path.mkdir(parents=True)
        backing.mkdir(parents=True)
        with ExitStack() as stack:
            try:
                disk._mount()
            except OSError as error:
                raise MissingError(str(error)) from error
            stack.callback(disk._unmount)
            yield disk

    @property
    def sync_file(self) -> Path:
        """Opening it syncs the whole disk."""
        return self.path / ".sync"

    def command(self, text: str) -> None:
        assert self._process is not None, "it is mounted"
        self._process.call(text)

    def lose_power(self, seed: int | None) -> dict[str, int]:
        """No process may use it. Drops what was not synced (with a seed: some of it), and returns how much that was."""
        self.command("go")
        self.command("lose all" if seed is None else f"lose {max(1, seed)}")
        lost = self._unmount()
        self._mount()
        return lost

    def _mount(self) -> None:
        self._process = HelperProcess([str(lossyfs()), str(self._backing), str(self.path)])

    def _unmount(self) -> dict[str, int]:
        """What was undone."""
        assert self._process is not None, "it is mounted"
        self._process.call("go")
        run("umount", str(self.path))
        line = self._process.last_line()
        self._process = None
        lost: dict[str, int] = json.loads(line)
        return lost


def remove_leftovers(under: Path) -> None:
    """Unmount disks of an earlier run in this directory that was killed."""
    for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines():
        source, path, *_ = line.split()
        if source == FILE_SYSTEM and under.resolve() in Path(path).parents:
            run("umount", "--lazy", path)
