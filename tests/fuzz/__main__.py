"""`make fuzz [MINUTES=n] [TARGET=name]`: atheris on every target, one process for each; ends with one JSON line.

A target's corpus is kept in `build/fuzz/NAME/corpus` and grows from run to run. An input that breaks a target is
written beside it as `crash-*` and ends that target: copy it to `tests/fuzz/regressions/NAME/` and mend the reader.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CORPORA = ROOT / "build" / "fuzz"
INPUT_BYTES_MAX = 4_096
ONE_INPUT_SECONDS_MAX = 20
MEMORY_MB_MAX = 2_048
_ARTIFACTS = ("crash-", "timeout-", "oom-")
_RUNS = re.compile(r"(?:stat::number_of_executed_units:|^#)\s*(\d+)", re.MULTILINE)
_COVERAGE = re.compile(r"cov: (\d+)")


def main() -> int:
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="of each target (1)")
    parser.add_argument("--target", help="only targets whose names contain this")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options, rest = parser.parse_known_args()
    if options.child:
        _fuzz(options.child, rest)
        return 0
    names = _target_names()
    chosen = [name for name in names if options.target is None or options.target in name]
    if not chosen:
        parser.error(f"no target contains {options.target!r}: {', '.join(names)}")
    results = {name: _run(name, options.minutes) for name in chosen}
    failures = [name for name, result in results.items() if not result["clean"]]
    print(json.dumps({"failures": failures, "targets": results}))
    return 1 if failures else 0


def _target_names() -> list[str]:
    from fuzz.targets import TARGETS

    return list(TARGETS)


def _run(name: str, minutes: float) -> dict[str, Any]:
    corpus = CORPORA / name / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    arguments = [
        f"-max_total_time={int(minutes * 60)}",
        f"-max_len={INPUT_BYTES_MAX}",
        f"-timeout={ONE_INPUT_SECONDS_MAX}",
        f"-rss_limit_mb={MEMORY_MB_MAX}",
        f"-artifact_prefix={corpus.parent}/",
        "-print_final_stats=1",
        str(corpus),
    ]
    command = [sys.executable, "-m", "fuzz", "--child", name, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace", check=False)
    output = done.stdout + done.stderr
    (corpus.parent / "output").write_text(output)
    executed = [int(found) for found in _RUNS.findall(output)]
    coverage = [int(found) for found in _COVERAGE.findall(output)]
    result = {
        "clean": done.returncode == 0,
        "inputs": max(executed, default=0),
        "coverage": max(coverage, default=0),
        "crashes": sorted(
            path.name for pattern in ("crash-*", "timeout-*", "oom-*") for path in corpus.parent.glob(pattern)
        ),
    }
    words = "clean" if result["clean"] else f"FAILED, see {corpus.parent.relative_to(ROOT)}/output"
    print(f"{name}: {result['inputs']} inputs, coverage {result['coverage']}, {words}", flush=True)
    return result


def _fuzz(name: str, arguments: list[str]) -> None:
    _import_sources_only()
    import atheris

    with atheris.instrument_imports(include=["tidelog"]):
        from fuzz.targets import TARGETS

    target = TARGETS[name]
    corpus = Path(arguments[-1])
    for number, seed in enumerate(target.seeds()):
        (corpus / f"seed-{number}").write_bytes(seed)
    atheris.Setup([name, *arguments], target.check)
    atheris.Fuzz()


def _import_sources_only() -> None:
    """Modules of ours that are compiled are interpreted here: a compiled one reports no coverage."""
    finder = importlib.machinery.FileFinder
    sources = (importlib.machinery.SourceFileLoader, importlib.machinery.SOURCE_SUFFIXES)

    def hook(path: str) -> importlib.machinery.FileFinder:
        place = os.path.realpath(path)
        if not place.startswith(f"{ROOT}{os.sep}") or f"{os.sep}.venv{os.sep}" in f"{place}{os.sep}":
            raise ImportError(path)
        return finder(path, sources)

    sys.path_hooks.insert(0, hook)
    sys.path_importer_cache.clear()


if __name__ == "__main__":
    raise SystemExit(main())
