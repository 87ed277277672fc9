"""The native parts of a run, compiled by gcc into build/chaos-tools when their source is newer."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from support.root_commands import MissingError

SOURCES = Path(__file__).parent / "native"
BUILD = Path(__file__).resolve().parents[2] / "build" / "chaos-tools"
FLAGS = ("-O2", "-Wall", "-Wextra", "-std=gnu11")


def network() -> Path:
    return _compiled("network.c", "network")


def lossyfs() -> Path:
    return _compiled("lossyfs.c", "lossyfs", *_output("pkg-config", "--cflags", "--libs", "fuse3").split())


def preload() -> Path:
    return _compiled("preload.c", "preload.so", "-shared", "-fPIC", "-ldl")


def _compiled(source: str, name: str, *flags: str) -> Path:
    path, target = SOURCES / source, BUILD / name
    if not target.exists() or target.stat().st_mtime < path.stat().st_mtime:
        BUILD.mkdir(parents=True, exist_ok=True)
        _output("gcc", *FLAGS, str(path), "-o", str(target), *flags)
    return target


def _output(*command: str) -> str:
    if shutil.which(command[0]) is None:
        raise MissingError(f"there is no {command[0]}")
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode != 0:
        raise MissingError(f"{' '.join(command)}: {done.stderr.strip()[-300:]}")
    return done.stdout
