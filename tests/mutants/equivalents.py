"""Reads equivalent.toml: mutants that nobody could notice, each with the reason.

An entry that matches no mutant any more is an error (`test_equivalents.py`): its function has changed, and the reason
has to be checked again.
"""

import tomllib
from pathlib import Path

from mutants.finder import Mutant, find_mutants
from mutants.hook import source_path

EQUIVALENT = Path(__file__).with_name("equivalent.toml")
FIELDS = ("module", "function", "operator", "source", "becomes", "occurrence")


def read_equivalents(path: Path = EQUIVALENT) -> dict[Mutant, str]:
    """Mutants with the reason why each is equivalent. `ValueError` for an entry that is incomplete or named twice."""
    reasons: dict[Mutant, str] = {}
    for item in tomllib.loads(path.read_text(encoding="utf-8")).get("equivalent", []):
        item = {"becomes": "pass", "occurrence": 0} | item
        missing = {*FIELDS, "reason"} ^ item.keys()
        if missing or not item["reason"].strip():
            raise ValueError(f"an entry of {path.name} lacks or has too many of: {sorted(missing)}: {item}")
        mutant = Mutant(*(item[name] for name in FIELDS))
        if mutant in reasons:
            raise ValueError(f"{path.name} names a mutant twice: {mutant.key}")
        reasons[mutant] = item["reason"]
    return reasons


def stale(equivalents: dict[Mutant, str]) -> list[str]:
    """Keys of entries that match no mutant of their module."""
    keys = []
    for module in sorted({mutant.module for mutant in equivalents}):
        path = source_path(module)
        mutants = set(find_mutants(module, path.read_text(encoding="utf-8"))) if path.exists() else set()
        keys += [mutant.key for mutant in equivalents if mutant.module == module and mutant not in mutants]
    return keys
