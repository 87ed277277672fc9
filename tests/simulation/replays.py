"""That a run is the same in every process, whatever strings hash to and wherever objects lie."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent
_PRELUDE = """
import sys
junk = [bytearray(size) for size in range(int(sys.argv[1]))]  # another heap: other addresses
"""


def output_in_every_process(program: str) -> str:
    """What the program prints; asserts that two processes with other hash seeds and other heaps print the same."""
    outputs = []
    for hash_seed, junk in (("1", "10"), ("4242", "3000")):
        done = subprocess.run(
            [sys.executable, "-c", _PRELUDE + program, junk],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(TESTS)},
            capture_output=True,
            text=True,
            check=True,
        )
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1]
    return outputs[0]
