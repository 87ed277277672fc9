"""The pipelines of a run, from their topics to their verdict; a run without pipelines has an empty one."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from tidelog.testing.chaos.figures import Window
from tidelog.testing.chaos.history import Tail
from tidelog.testing.chaos.judge import Judgement, read_events
from tidelog.testing.chaos.pipeline_judge import (
    Ends,
    Outcome,
    PipelineFigures,
    judge_pipeline,
    longest_without_commit_s,
    read_outcome,
    wait_for_inputs,
)
from tidelog.testing.chaos.pipelines import Note, Pipelines, pipeline_specs
from tidelog.testing.chaos.target import ClusterView, Target
from tidelog.testing.chaos.worker_spec import WorkerSpec
from tidelog.testing.chaos.workers import Workers

CATCH_UP_S = 240.0
READERS_S = 60.0
LOOK_S = 0.2


@dataclass(slots=True)
class PipelineRun:
    target: Target
    path: Path
    clients: Sequence[str]
    prefix: str = ""
    rows: list[WorkerSpec] = field(init=False)
    readers: list[WorkerSpec] = field(init=False)
    figures: dict[str, PipelineFigures] = field(default_factory=dict)
    """By client, after `judge`."""
    _processes: Pipelines | None = None
    _outcomes: dict[str, Outcome] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rows = pipeline_specs(self.target, self.path, self.clients, self.prefix)
        self.rows = [spec for spec in rows if spec.role == "pipeline"]
        self.readers = [spec for spec in rows if spec.role != "pipeline"]

    @property
    def groups(self) -> dict[str, str]:
        """By client."""
        return {spec.client: spec.group for spec in self.rows}

    @property
    def processes(self) -> Pipelines:
        assert self._processes is not None, "they are started"
        return self._processes

    def _outputs(self, client: str) -> dict[str, int]:
        return {topic: count for spec in self.rows if spec.client == client for topic, count in spec.outputs.items()}

    # In the order of the run.

    def create_topics(self, view: ClusterView) -> None:
        """Outputs have the replication of the inputs, and count as topics of the run."""
        if not self.clients:
            return
        first = view.admin.describe_topic(next(iter(self.target.topics)))
        replicas = len(first.partitions[0].replicas)
        outputs = {topic: count for client in self.clients for topic, count in self._outputs(client).items()}
        for topic, count in outputs.items():
            configs = {"min.insync.replicas": max(1, replicas - 1)}
            view.admin.create_topic(topic, partitions=count, replication_factor=replicas, configs=configs)
        view.topics = {**view.topics, **outputs}

    @contextmanager
    def started(self, note: Note) -> Iterator[None]:
        with Pipelines.started(self.rows, self.path, self.target.wrapper, note=note) as processes:
            self._processes = processes
            yield

    def silent(self) -> list[str]:
        """Pipelines that have committed nothing yet."""
        return [
            f"{client}-pipeline"
            for client in self.clients
            if not any(
                event["event"] == "txn-end" and event["outcome"] == "committed"
                for path in self.processes.histories[client]
                if path.exists()
                for event in read_events(path)
            )
        ]

    def begin_faults(self, random: Random) -> None:
        self.processes.begin_faults(random)

    def end_faults(self) -> None:
        self.processes.end_faults()

    def finish(self, view: ClusterView, workers: Workers, inputs: Ends) -> list[str]:
        """Every input is processed, all workers end, and the outputs are read once more. Return the failures."""
        if not self.clients:
            return []
        end_s = time.monotonic() + CATCH_UP_S
        failures = wait_for_inputs(view.admin, self.groups.values(), inputs, end_s)
        self.processes.stop()
        for client in self.clients:
            outcome = read_outcome(
                self.target.operator_bootstrap, view.admin, self.groups[client], self._outputs(client)
            )
            self._outcomes[client] = outcome
            failures += outcome.failures
        self._wait_for_readers()
        workers.stop("committed-reader")
        return failures + self.processes.failures

    def _wait_for_readers(self) -> None:
        """Until they have got everything; whether they have, the judge says."""
        total = sum(len(rows) for outcome in self._outcomes.values() for rows in outcome.outputs.values())
        tails = {spec.name: Tail(Path(spec.history)) for spec in self.readers}
        left = dict.fromkeys(tails, total)
        end_s = time.monotonic() + READERS_S
        while any(count > 0 for count in left.values()) and time.monotonic() < end_s:
            for name, tail in tails.items():
                left[name] -= sum(len(event["records"]) for event in tail.events() if event["event"] == "saw")
            time.sleep(LOOK_S)

    def judge(self, judgement: Judgement, inputs: Ends, faults: Window, majority_lost: Sequence[Window]) -> None:
        readers = [Path(spec.history) for spec in self.readers]
        for client, outcome in self._outcomes.items():
            histories, group = self.processes.histories[client], self.groups[client]
            found = judge_pipeline(judgement, f"{client}-pipeline", histories, readers, inputs, outcome, group)
            found.longest_without_commit_s = longest_without_commit_s(histories, faults, majority_lost)
            self.figures[client] = found
