"""Coverage-guided fuzzing of everything that reads bytes from a network, a disk or a user.

`targets` names the readers with what they may raise, `seeds` has valid inputs for each, and `python -m fuzz` (`make
fuzz`) runs atheris on them, one process for each target. What it finds becomes a file below `regressions/`, which
`test_fuzz_targets.py` runs for ever.
"""
