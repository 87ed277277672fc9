"""Generates Python source for `exec`. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from struct import Struct
from typing import Any


class Source:
    """The lines of a function, the objects that they use, and unique names."""

    def __init__(self, objects: dict[str, object]) -> None:
        self._lines: list[str] = []
        self._indent = 0
        self._objects = objects
        self._structs: dict[tuple[str, str], str] = {}
        self._classes: dict[type, str] = {}
        self._names = 0

    def line(self, text: str) -> None:
        self._lines.append("    " * self._indent + text)

    @contextmanager
    def block(self, opening: str) -> Iterator[None]:
        self.line(opening)
        self._indent += 1
        opened = len(self._lines)
        yield
        if len(self._lines) == opened:
            self.line("pass")
        self._indent -= 1

    def name(self, stem: str) -> str:
        self._names += 1
        return f"{stem}{self._names}"

    def struct(self, letters: str, method: str) -> tuple[str, int]:
        """Returns the name of `method` of a big-endian `Struct`, and its size."""
        made = Struct(">" + letters)
        key = letters, method
        if key not in self._structs:
            self._structs[key] = self.hold(method, getattr(made, method))
        return self._structs[key], made.size

    def class_name(self, cls: type) -> str:
        if cls not in self._classes:
            self._classes[cls] = self.hold(cls.__name__, cls)
        return self._classes[cls]

    def hold(self, stem: str, value: object) -> str:
        name = self.name(stem + "_")
        self._objects[name] = value
        return name

    def text(self) -> str:
        return "\n".join(self._lines) + "\n"

    def function(self, name: str, title: str) -> Callable[..., Any]:
        namespace: dict[str, Any] = dict(self._objects)
        exec(compile(self.text(), f"<{title}>", "exec"), namespace)
        made: Callable[..., Any] = namespace[name]
        return made
