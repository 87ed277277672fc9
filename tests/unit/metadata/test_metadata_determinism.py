"""One seed, one log: what the controller decides depends on nothing but the image, the request and the context."""

import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]
PROGRAM = """
import hashlib, random, sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/property"]
from test_metadata_model import OPERATIONS, lived
from tidelog.metadata.snapshot import snapshot_bytes
digest = hashlib.sha256()
for seed in range(3):
    numbers = random.Random(seed)
    steps = [(numbers.randrange(len(OPERATIONS)), *(numbers.randrange(n) for n in (12, 12, 64))) for _ in range(120)]
    cluster = lived(steps).cluster
    digest.update(b"".join(cluster.log))
    digest.update(snapshot_bytes(cluster.image))
sys.stdout.write(digest.hexdigest())
"""


def test_log_and_snapshot_do_not_depend_on_the_hashes_of_strings() -> None:
    digests = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM, str(TESTS)],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1
    assert len(digests.pop()) == 64
