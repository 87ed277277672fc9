"""What happened when in a run: lines for a person, and spans for the report."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path

from tidelog.testing.chaos.history import now_ms
from tidelog.testing.chaos.spans import Span


class Timeline:
    """Notes go to `path` at once; spans to `spans` in its directory when it is closed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.began_ms = now_ms()
        self._file = path.open("w", encoding="utf-8", buffering=1)
        self.spans: list[Span] = []
        self.marks: list[tuple[float, str]] = []
        """Things that should not have happened: when, and what."""

    @property
    def at_s(self) -> float:
        return (now_ms() - self.began_ms) / 1000

    def note(self, text: str) -> None:
        self._file.write(f"{self.at_s:8.1f} s  {time.strftime('%H:%M:%S')}  {text}\n")

    def mark(self, text: str) -> None:
        """Note a failure."""
        self.marks.append((self.at_s, text))
        self.note(text)

    def detail(self, text: str) -> None:
        """Note what the present fault does."""
        self.note(f"  {text}")
        if self.spans:
            self.spans[-1].notes.append(text)

    def close(self) -> None:
        self._file.close()
        rows = [asdict(span) for span in self.spans]
        (self._path.parent / "faults.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
