"""Seeds that every run of the suite tries first, and what is remembered of the deliberate defects."""

import tomllib
from pathlib import Path

FIXED_SEEDS = tuple(range(1, 13))
"""The same every time: a change that breaks the simulator shows at once, and a failure here is everybody's."""

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
