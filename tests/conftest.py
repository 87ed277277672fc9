"""What all tests share: how much hypothesis tries, that processes start quickly, that garbage is collected quickly, and
that Ctrl-C works.

`HYPOTHESIS_PROFILE` picks a profile: `ci` (the default of `make test`, small enough for the whole suite's ten
minutes), `default` (a developer's run of one file) or `long` (a campaign).
"""

import gc
import os
import signal

from hypothesis import HealthCheck, settings

# No deadline: a shared machine stalls now and then, and pytest-timeout watches over each test anyway. Slow generation
# is no error of ours either: the models of a log draw long lists on purpose.
_QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]

settings.register_profile("default", deadline=None, suppress_health_check=_QUIET, print_blob=True)
settings.register_profile("ci", settings.get_profile("default"), max_examples=30, stateful_step_count=30)
settings.register_profile("long", settings.get_profile("default"), max_examples=2000, stateful_step_count=100)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# Each process that a test starts would compile the whole package: half a second of a core.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# pytest-xdist sets it for its workers, and every table of a command would be cut to that width.
os.environ.pop("COLUMNS", None)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that starts the suite in its background has it ignored, and so would every program that a test interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Thousands of collected tests live to the end. No collection of garbage looks at them again."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Or libraries report what was frozen as leaked."""
    gc.unfreeze()
