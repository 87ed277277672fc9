"""Metrics in the text format of Prometheus. Names begin with `tidelog_`; counters end in `_total`.

A `Gatherer` is called at each scrape; between scrapes metrics cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Kind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"


@dataclass(frozen=True, slots=True)
class Sample:
    """One number; samples of one name have the same kind and help."""

    name: str
    value: float
    help: str
    kind: Kind = Kind.GAUGE
    labels: Mapping[str, str] = field(default_factory=dict)


Gatherer = Callable[[], Iterable[Sample]]


def counter(name: str, value: float, help_: str, **labels: str) -> Sample:
    assert name.endswith("_total"), "the name of a counter ends in _total"
    return Sample(name, value, help_, Kind.COUNTER, labels)


def gauge(name: str, value: float, help_: str, **labels: str) -> Sample:
    return Sample(name, value, help_, Kind.GAUGE, labels)


def page(gatherers: Iterable[Gatherer]) -> str:
    """Returns the text of /metrics: samples grouped by name, in the order of first appearance."""
    groups: dict[str, list[Sample]] = {}
    for gatherer in gatherers:
        for sample in gatherer():
            groups.setdefault(sample.name, []).append(sample)
    lines: list[str] = []
    for name, samples in groups.items():
        lines += [f"# HELP tidelog_{name} {samples[0].help}", f"# TYPE tidelog_{name} {samples[0].kind.value}"]
        lines += [f"tidelog_{name}{_labels(sample.labels)} {_number(sample.value)}" for sample in samples]
    return "\n".join(lines) + "\n"


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in sorted(labels.items())) + "}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() and abs(value) < 1 << 53 else repr(float(value))
