"""Figures of `tidelog bench`: how they are reckoned and shown. Keys are listed in docs/cli.md."""

import argparse
import json
from collections.abc import Sequence
from typing import Any

from tidelog.cli.exit_codes import EXIT_OK

DELIVERY_MS = 60_000


def percentile(sorted_values: Sequence[float], share: float) -> float:
    """Of sorted values; 0 if there are none."""
    if not sorted_values:
        return 0.0
    return sorted_values[min(len(sorted_values) - 1, int(share * len(sorted_values)))]


def times_document(seconds: Sequence[float]) -> dict[str, float]:
    """Median, 95th and 99th percentile and worst, in ms."""
    values = sorted(seconds)
    shares = {"p50_ms": 0.5, "p95_ms": 0.95, "p99_ms": 0.99}
    found = {name: round(percentile(values, share) * 1000, 2) for name, share in shares.items()}
    return {**found, "max_ms": round((values[-1] if values else 0.0) * 1000, 2)}


def show(options: argparse.Namespace, name: str, how: str, partitions: int, figures: dict[str, Any]) -> int:
    settings = {"record_bytes": options.record_bytes, "partitions": partitions, "acks": options.acks}
    document = {"name": name, "how": how, **settings, **figures}
    if options.output == "json":
        print(json.dumps(document, indent=2))
        return EXIT_OK
    for key, value in document.items():
        text = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
        print(f"{key.replace('_', ' '):<14} {text}")
    return EXIT_OK
