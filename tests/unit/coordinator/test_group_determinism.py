"""One history, one log: what the coordinator decides depends on nothing but the state and the request."""

from simulation.replays import output_in_every_process

PROGRAM = """
import hashlib, random
from support.groups.model import Model
digest = hashlib.sha256()
for seed in range(8):
    numbers = random.Random(seed)
    model = Model()
    model.run([numbers.randrange(1 << 20) for _ in range(150)])
    digest.update(b"".join(model.groups.batches))
sys.stdout.write(digest.hexdigest())
"""


def test_the_log_does_not_depend_on_the_hashes_of_strings() -> None:
    assert len(output_in_every_process(PROGRAM)) == 64
