"""Seeds that every run of the suite tries first, and what is remembered of the deliberate defects."""

import hashlib
import os
import random
import tomllib
from collections.abc import Iterator
from pathlib import Path

FIXED_SEEDS = tuple(range(1, 13))
"""The same every time: a change that breaks the simulator shows at once, and a failure here is everybody's."""

ROOT = Path(__file__).resolve().parents[2]
SIMULATED = (
    "client", "coordinator", "log", "metadata", "model", "raft", "replication", "rpc", "world", "tests/simulation",
)  # fmt: skip
"""What runs in the simulator, and the simulator."""

CATCHING_SEEDS = Path(__file__).with_name("catching_seeds.toml")
HEADER = """\
# Which seed last caught each deliberate defect (tests/simulation/defects.py); it is tried first.
# Written by `make sim DEFECTS=1`. A change of core, driver or nemesis moves them: that is no failure, only slower.

"""


def read_catching_seeds() -> dict[str, int]:
    if not CATCHING_SEEDS.exists():
        return {}
    return {name: int(seed) for name, seed in tomllib.loads(CATCHING_SEEDS.read_text()).items()}


def write_catching_seeds(seeds: dict[str, int]) -> None:
    lines = [f"{name} = {seed}\n" for name, seed in sorted(seeds.items())]
    CATCHING_SEEDS.write_text(HEADER + "".join(lines))


def fresh_seeds(stack: str) -> Iterator[int]:
    """Seeds drawn from the sources: every change of what is simulated tries new ones, and the same sources try the same
    ones, here and in CI, so that a test which passes once passes again. `SIM_FRESH=1` draws them at random."""
    if os.environ.get("SIM_FRESH"):
        draw = random.Random()
    else:
        digest = hashlib.blake2b(stack.encode(), digest_size=8)
        for room in SIMULATED:
            for path in sorted((ROOT / room).rglob("*.py")):
                digest.update(path.read_bytes())
        draw = random.Random(int.from_bytes(digest.digest(), "big"))
    while True:
        yield draw.randrange(1 << 31)
