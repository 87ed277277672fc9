"""One seed, one log: what the controller decides depends on nothing but the image, the request and the context."""

from simulation.replays import output_in_every_process

PROGRAM = """
import hashlib, random
from property.test_metadata_model import OPERATIONS, lived
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
    assert len(output_in_every_process(PROGRAM)) == 64
