"""The client processes of a run: which there are, how they start and end, and what their histories say meanwhile."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tidelog.testing.chaos.checks import AckGaps, Progress, StuckReader
from tidelog.testing.chaos.history import Tail
from tidelog.testing.chaos.target import Target
from tidelog.testing.chaos.worker_spec import AIOKAFKA, CLASSIC, CLOSE_S, CONSUMER, EXIT_NOT_CLOSED, TIDELOG, WorkerSpec

READERS = (TIDELOG, CLASSIC, CONSUMER, AIOKAFKA)
LIBRARIES = {TIDELOG: "tidelog", CLASSIC: "confluent_kafka", CONSUMER: "confluent_kafka", AIOKAFKA: "aiokafka"}
PRODUCERS = (TIDELOG, CLASSIC, AIOKAFKA)
"""A producer has no group protocol, so librdkafka is there once."""
STDERR_CHARS = 2_000


def specs(
    target: Target, path: Path, *, rate: int, alone: int, clients: Sequence[str], prefix: str = ""
) -> list[WorkerSpec]:
    """A producer of each client; of each kind of reader one alone in its group (`alone` of the consumer protocol, each
    in its own group), and one group of two. Without `clients` a producer of ours only. `rate` is of all producers
    together; `prefix` is of the groups' names."""
    # librdkafka's producer has no group protocol: the reader of either one brings it.
    wanted = {CLASSIC if client == CONSUMER else client for client in clients} or {TIDELOG}
    producers = [client for client in PRODUCERS if client in wanted]
    rows: list[WorkerSpec] = []

    def add(role: str, client: str, name: str, group: str = "", *, commits_itself: bool = False) -> None:
        at = target.bootstrap if client == TIDELOG else target.kafka_bootstrap
        rows.append(
            WorkerSpec(
                role,
                client,
                name,
                at,
                dict(target.topics),
                history=str(path / f"{name}.jsonl"),
                client_log=str(path / f"{name}.log"),
                group=group,
                commits_itself=commits_itself,
                rate=max(1, rate // len(producers)),
            )
        )

    for client in producers:
        add("producer", client, f"{'confluent' if client == CLASSIC else client}-producer")
    for client in clients:
        for number in range(1, (alone if client == CONSUMER else 1) + 1):
            name = f"{client}-alone-{number}"
            add("reader", client, name, f"{prefix}{name}", commits_itself=number % 2 == 1)
        for number in (1, 2):
            add("reader", client, f"{client}-pair-{number}", f"{prefix}{client}-pair")
    return rows


@dataclass(slots=True)
class _Running:
    spec: WorkerSpec
    process: subprocess.Popen[bytes]
    stderr: Path
    tail: Tail


class Workers:
    def __init__(self, path: Path, progress: Progress, wrapper: Sequence[str] = ()) -> None:
        self.acknowledged: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.gaps = AckGaps()
        self.failures: list[str] = []
        self._path, self._progress, self._wrapper = path, progress, wrapper
        self._running: list[_Running] = []
        self._stopped: set[str] = set()
        """Roles whose workers may end."""
        self._looked_s = time.monotonic()

    @classmethod
    @contextmanager
    def started(
        cls, rows: Sequence[WorkerSpec], path: Path, progress: Progress, wrapper: Sequence[str] = ()
    ) -> Iterator[Workers]:
        """All of them are ended with the block, however it ends."""
        workers = cls(path, progress, wrapper)
        try:
            for spec in rows:
                workers._start(spec)
            yield workers
        finally:
            for one in workers._running:
                one.process.kill()
                one.process.wait()

    def _start(self, spec: WorkerSpec) -> None:
        stderr = self._path / f"{spec.name}.stderr"
        with stderr.open("wb") as file:
            # A session of its own: Ctrl-C is for the run, which ends its workers.
            process = subprocess.Popen(
                [*self._wrapper, sys.executable, "-m", "tidelog.testing.chaos.worker", spec.text()],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        self._running.append(_Running(spec, process, stderr, Tail(Path(spec.history))))

    def look(self, *, healthy_s: float, at_s: float) -> list[StuckReader]:
        """Takes in what the workers have noted since the last look. Returns readers that are stuck, found now."""
        for one in self._running:
            self._take(one)
            code = one.process.poll()
            if code is not None and one.spec.role not in self._stopped:
                said = one.stderr.read_text(encoding="utf-8", errors="replace")[-STDERR_CHARS:]
                failure = f"client-ended: {one.spec.name} ended with code {code}: {said.strip()[-300:]}"
                if failure not in self.failures:
                    self.failures.append(failure)
        now_s = time.monotonic()
        elapsed_s, self._looked_s = now_s - self._looked_s, now_s
        return self._progress.tick(elapsed_s, healthy_s=healthy_s, at_s=at_s)

    def _take(self, one: _Running) -> None:
        spec = one.spec
        for event in one.tail.events():
            kind = event["event"]
            if kind == "ack":
                self.acknowledged[spec.name] += event["count"]
                self.gaps.acked(spec.name, event["at_ms"])
                self._progress.acked(event["topic"], event["partition"], event["offset"])
            elif kind == "poll":
                place = event["topic"], event["partition"]
                self._progress.read(spec.group, spec.name, *place, event["records"][-1][0])
            elif kind == "fail":
                self.failed[spec.name] += 1
            elif kind == "error":
                self.errors[spec.name] += 1

    def stop(self, role: str) -> None:
        """They close their clients and end; one that does not is a failure."""
        self._stopped.add(role)
        chosen = [one for one in self._running if one.spec.role == role]
        for one in chosen:
            assert one.process.stdin is not None, "a pipe was asked for"
            one.process.stdin.close()
        for one in chosen:
            try:
                code = one.process.wait(2 * CLOSE_S)
            except subprocess.TimeoutExpired:
                code = EXIT_NOT_CLOSED
                one.process.kill()
                one.process.wait()
            if code == EXIT_NOT_CLOSED:
                self.failures.append(f"client-not-closed: {one.spec.name} did not close in {CLOSE_S:.0f} s")
            self._take(one)
