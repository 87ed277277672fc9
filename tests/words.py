"""Fails on retired words (`tests/words.toml`) in names, comments, docstrings, messages and documents.

    tests/words.py [PATH...]

Without paths it checks every tracked source, document, configuration and build file. Decisions and the changelog are
history and are not checked; generated protobuf modules are not ours. A line that has to name a
retired word ends with `words: allow`.
"""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
HISTORY = ("docs/decisions/", "CHANGELOG.md", "tests/words.toml")
ALLOWED = "words: allow"
_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
"""A word of prose, or one part of an identifier in snake case or camel case."""


def read_retired() -> dict[str, str]:
    """Return each retired word with what to write instead."""
    words: dict[str, str] = tomllib.loads((TESTS / "words.toml").read_text(encoding="utf-8"))["retired"]
    return words


def retired_in(text: str, retired: dict[str, str]) -> Iterator[tuple[int, str]]:
    """Yield (line number, word) for each retired word."""
    for number, line in enumerate(text.splitlines(), 1):
        if ALLOWED not in line:
            yield from ((number, part.lower()) for part in _PART.findall(line) if part.lower() in retired)


def tracked_files(*patterns: str) -> list[Path]:
    """Files of these patterns that are ours: not generated, and not deleted in the working tree."""
    names = subprocess.run(
        ["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return [ROOT / name for name in names if "_pb2" not in name and (ROOT / name).is_file()]


def checked_files() -> list[Path]:
    files = tracked_files("*.py", "*.md", "*.proto", "*.toml", "*.service", "*.conf", "*.yaml", "Makefile", ".ci/*")
    return [path for path in files if not str(path.relative_to(ROOT)).startswith(HISTORY)]


def check(paths: Iterable[Path]) -> list[str]:
    retired = read_retired()
    return [
        f"{path.relative_to(ROOT)}:{number}: '{word}' is retired, write: {retired[word]}"
        for path in paths
        for number, word in retired_in(path.read_text(encoding="utf-8"), retired)
    ]


def main(arguments: list[str]) -> int:
    problems = check([Path(name).resolve() for name in arguments] or checked_files())
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
