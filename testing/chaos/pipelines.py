"""The workers of transactional pipelines as processes, and the faults that strike them beside those of the cluster.

A pipeline reads all topics of the target as one group of `WORKERS` and writes a topic of its own. Every few seconds a
worker is struck:

    kill-client       kill -9, and a new one with its transactional id
    freeze-client     SIGSTOP for a while, perhaps longer than its session and its transaction last
    replace-client    SIGSTOP, a new one with its transactional id, SIGCONT: the former one has to end as fenced

A worker that ends by itself otherwise, or is fenced although nobody replaced it, is a failure. But a life that was
killed or replaced before it was ready may have sent a request to initialize that arrives late, and rightly fences the
next life: within `LATE_S` that is none. Each life has a history of its own, so that the half line of a killed one stays
apart.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

from tidelog.testing.chaos.judge import read_events
from tidelog.testing.chaos.target import Target
from tidelog.testing.chaos.worker_spec import CLOSE_S, CONFLUENT, EXIT_FENCED, TIDELOG, WorkerSpec

PIPELINES = (TIDELOG, CONFLUENT)
OUTPUT_PARTITIONS = 4
WORKERS = 2
"""Of a pipeline."""
KILL, FREEZE, REPLACE = "kill-client", "freeze-client", "replace-client"
WEIGHTS = {KILL: 4, FREEZE: 1, REPLACE: 2}
EVERY_S = (1.0, 5.0)
"""Between two faults of clients."""
DOWN_S = (0.0, 2.0)
FROZEN_S = (1.0, 15.0)
"""Of `FREEZE`: up to longer than a transaction and a session may last."""
REPLACED_S = (0.5, 5.0)
LATE_S = 60.0
STDERR_CHARS = 300

Note = Callable[[str], None]


def output_topic(prefix: str, client: str) -> str:
    return f"{prefix}processed-by-{client}"


def pipeline_specs(target: Target, path: Path, clients: Sequence[str], prefix: str = "") -> list[WorkerSpec]:
    """The workers of each pipeline, and a reader of each client for all their outputs."""
    outputs = {output_topic(prefix, client): OUTPUT_PARTITIONS for client in clients}
    rows: list[WorkerSpec] = []
    for client in clients:
        at = target.bootstrap if client == TIDELOG else target.kafka_bootstrap
        for number in range(1, WORKERS + 1):
            name = f"{client}-pipeline-{number}"
            rows.append(
                WorkerSpec(
                    "pipeline",
                    client,
                    name,
                    at,
                    dict(target.topics),
                    group=f"{prefix}{client}-pipeline",
                    transactional_id=f"{prefix}{name}",
                    outputs={output_topic(prefix, client): OUTPUT_PARTITIONS},
                )
            )
        name = f"{client}-committed-reader"
        rows.append(
            WorkerSpec(
                "committed-reader",
                client,
                name,
                at,
                outputs,
                history=str(path / f"{name}.jsonl"),
                client_log=str(path / f"{name}.log"),
            )
        )
    return rows


@dataclass(slots=True, eq=False)
class _Life:
    spec: WorkerSpec
    process: subprocess.Popen[bytes]
    stderr: Path

    def is_ready(self) -> bool:
        history = Path(self.spec.history)
        return history.exists() and any(event["event"] == "ready" for event in read_events(history))

    def failure(self, code: int) -> str:
        said = self.stderr.read_text(encoding="utf-8", errors="replace").strip()[-STDERR_CHARS:]
        return f"client-ended: {self.spec.name} ended with code {code}: {said}"


@dataclass(slots=True)
class _Worker:
    spec: WorkerSpec
    lives: int = 0
    life: _Life | None = None
    may_be_fenced_until_s: float = 0.0

    def give_up(self) -> _Life:
        """Its life is about to be killed or replaced."""
        assert self.life is not None, "it was started"
        if not self.life.is_ready():
            self.may_be_fenced_until_s = time.monotonic() + LATE_S
        return self.life


@dataclass(slots=True)
class Pipelines:
    """All methods are called by one thread, but for the faults, which have one of their own."""

    path: Path
    wrapper: Sequence[str]
    note: Note
    counts: Counter[str] = field(default_factory=Counter)
    """Faults by kind; `fenced` counts workers that have noticed that they were replaced."""
    failures: list[str] = field(default_factory=list)
    histories: dict[str, list[Path]] = field(default_factory=dict)
    """By client, of all lives."""
    _workers: list[_Worker] = field(default_factory=list)
    _replaced: list[_Life] = field(default_factory=list)
    _is_over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    @classmethod
    @contextmanager
    def started(
        cls, rows: Sequence[WorkerSpec], path: Path, wrapper: Sequence[str] = (), *, note: Note
    ) -> Iterator[Pipelines]:
        """All processes are ended with the block, however it ends."""
        pipelines = cls(path, wrapper, note)
        try:
            for spec in rows:
                worker = _Worker(spec)
                pipelines._workers.append(worker)
                pipelines._start(worker)
            yield pipelines
        finally:
            pipelines.end_faults()
            for life in pipelines._lives():
                life.process.kill()
                life.process.wait()

    def _lives(self) -> list[_Life]:
        return [worker.life for worker in self._workers if worker.life] + self._replaced

    def _start(self, worker: _Worker) -> None:
        worker.lives += 1
        name = f"{worker.spec.name}.{worker.lives}"
        history = self.path / f"{name}.jsonl"
        spec = replace(worker.spec, name=name, history=str(history), client_log=str(self.path / f"{name}.log"))
        self.histories.setdefault(spec.client, []).append(history)
        stderr = self.path / f"{name}.stderr"
        with stderr.open("wb") as file:
            # A session of its own: Ctrl-C is for the run, which ends its workers.
            process = subprocess.Popen(
                [*self.wrapper, sys.executable, "-m", "tidelog.testing.chaos.worker", spec.text()],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        worker.life = _Life(spec, process, stderr)

    # Faults.

    def begin_faults(self, random: Random) -> None:
        if self._workers:
            self._thread = threading.Thread(target=self._strike_all, args=(random,), name="client-faults", daemon=True)
            self._thread.start()

    def end_faults(self) -> None:
        """All workers run, none is frozen."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        for life in self._lives():
            life.process.send_signal(signal.SIGCONT)

    def _strike_all(self, random: Random) -> None:
        while not self._is_over.wait(random.uniform(*EVERY_S)):
            self.check()
            kind = random.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
            self._strike(kind, random.choice(self._workers), random)

    def _strike(self, kind: str, worker: _Worker, random: Random) -> None:
        life = worker.life if kind == FREEZE else worker.give_up()
        assert life is not None, "it runs"
        self.counts[kind] += 1
        self.note(f"  {kind} {life.spec.name}")
        if kind == KILL:
            life.process.kill()
            life.process.wait()
            self._is_over.wait(random.uniform(*DOWN_S))
            self._start(worker)
            return
        life.process.send_signal(signal.SIGSTOP)
        if kind == REPLACE:
            self._replaced.append(life)
            self._start(worker)
        self._is_over.wait(random.uniform(*(REPLACED_S if kind == REPLACE else FROZEN_S)))
        life.process.send_signal(signal.SIGCONT)

    def check(self) -> None:
        """Note workers that have ended by themselves, and start them again."""
        for worker in self._workers:
            assert worker.life is not None, "it was started"
            code = worker.life.process.poll()
            if code is None:
                continue
            if code == EXIT_FENCED and time.monotonic() < worker.may_be_fenced_until_s:
                self._fenced(worker.life)
            else:
                self._fail(worker.life.failure(code))
            self._start(worker)
        for life in list(self._replaced):
            code = life.process.poll()
            if code is None:
                continue
            self._replaced.remove(life)
            if code == EXIT_FENCED:
                self._fenced(life)
            else:
                self._fail(life.failure(code))

    def _fenced(self, life: _Life) -> None:
        self.counts["fenced"] += 1
        self.note(f"  {life.spec.name} is fenced")

    def _fail(self, failure: str) -> None:
        self.failures.append(failure)
        self.note(failure)

    # The end.

    def stop(self) -> None:
        """After `end_faults`: they close their clients and end; one that does not is a failure."""
        self.check()
        lives = self._lives()
        for life in lives:
            assert life.process.stdin is not None, "a pipe was asked for"
            life.process.stdin.close()
        for life in lives:
            try:
                code = life.process.wait(2 * CLOSE_S)
            except subprocess.TimeoutExpired:
                life.process.kill()
                life.process.wait()
                self._fail(f"client-not-closed: {life.spec.name} did not close in {CLOSE_S:.0f} s")
                continue
            if code != 0 and not (life in self._replaced and code == EXIT_FENCED):
                self._fail(life.failure(code))
        self._workers.clear()
        self._replaced.clear()
