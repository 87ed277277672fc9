"""The worker and the judge of transactional pipelines, fed with a fake client and with histories that are broken."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tidelog.testing.chaos import pipeline_worker
from tidelog.testing.chaos.history import (
    Read,
    TopicPartition,
    TransactionLog,
    output_of,
    parse_output,
)
from tidelog.testing.chaos.judge import Judgement, read_events
from tidelog.testing.chaos.pipeline_judge import (
    Outcome,
    PipelineFigures,
    judge_pipeline,
    longest_without_commit_s,
)
from tidelog.testing.chaos.pipeline_worker import AbortableError, FencedError, run_pipeline
from tidelog.testing.chaos.worker_spec import EXIT_FENCED, WorkerSpec

INPUT: TopicPartition = ("in", 0)
OUTPUT: TopicPartition = ("out", 0)
GROUP = "pipeline"


# Values.


def test_value_of_an_output_names_its_transaction_and_its_number() -> None:
    assert parse_output(output_of("worker-1.3.17", 4)) == ("worker-1.3.17", 4)
    assert parse_output(b"of somebody else")[0].startswith("unreadable"), "no transaction has such a name"
    assert parse_output(None)[0].startswith("unreadable")
    assert parse_output("ä 1".encode())[0].startswith("unreadable")


# The worker.


@dataclass(eq=False)
class FakeClient:
    """Gives `inputs` in the order of their offsets, and keeps what was sent. `errors`: call -> errors, used up."""

    inputs: int
    is_over: threading.Event
    errors: dict[str, list[Exception]] = field(default_factory=dict)
    position: int = 0
    calls: list[str] = field(default_factory=list)
    open: list[bytes] = field(default_factory=list)
    committed: list[bytes] = field(default_factory=list)
    offset: int = 0
    pending: int = 0

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if self.errors.get(name):
            raise self.errors[name].pop(0)

    def poll(self) -> list[Read]:
        if self.position >= self.inputs:
            self.is_over.set()
            return []
        self.position += 2
        return [(*INPUT, offset, b"") for offset in range(self.position - 2, self.position)]

    def begin(self) -> None:
        self.open.clear()
        self._called("begin")

    def send(self, topic: str, partition: int, value: bytes) -> None:
        assert (topic, partition) == OUTPUT
        self._called("send")
        self.open.append(value)

    def send_offsets(self, offsets: Mapping[TopicPartition, int]) -> None:
        self._called("send_offsets")
        self.pending = offsets[INPUT]

    def commit(self) -> None:
        self._called("commit")
        self.committed += self.open
        self.offset = self.pending

    def abort(self) -> None:
        self._called("abort")

    def rewind(self, offsets: Mapping[TopicPartition, int]) -> None:
        self.calls.append("rewind")
        self.position = offsets[INPUT]

    def close(self) -> None:
        self.calls.append("close")

    def outcome(self) -> Outcome:
        rows = [(offset, *parse_output(value)) for offset, value in enumerate(self.committed)]
        return Outcome({OUTPUT: rows}, {INPUT: self.offset})


@dataclass(eq=False)
class Run:
    client: FakeClient
    history: Path
    code: int

    def judge(self, outcome: Outcome | None = None) -> tuple[Judgement, PipelineFigures]:
        judgement = Judgement()
        inputs = {INPUT: self.client.inputs}
        found = judge_pipeline(judgement, "p", [self.history], [], inputs, outcome or self.client.outcome(), GROUP)
        return judgement, found


Process = Callable[..., Run]


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Process:
    def run(inputs: int, errors: dict[str, list[Exception]] | None = None, *, aborts: float = 0.0) -> Run:
        is_over = threading.Event()
        client = FakeClient(inputs, is_over, errors or {})
        monkeypatch.setattr(pipeline_worker, "open_pipeline", lambda _spec, _log: client)
        monkeypatch.setattr(pipeline_worker, "ABORTS", aborts)
        history = tmp_path / "worker.1.jsonl"
        spec = WorkerSpec(
            "pipeline",
            "fake",
            "worker.1",
            "",
            {"in": 1},
            history=str(history),
            group=GROUP,
            transactional_id="worker",
            outputs={"out": 1},
        )
        return Run(client, history, run_pipeline(spec, is_over))

    return run


def counts(judgement: Judgement) -> dict[str, int]:
    return {kind: count for kind, count in judgement.counts.items() if count}


def test_worker_commits_outputs_and_offsets_of_all_inputs_together(process: Process) -> None:
    run = process(6)
    judgement, figures = run.judge()
    assert (run.code, run.client.offset, len(run.client.committed)) == (0, 6, 6)
    assert judgement.is_good, judgement.words
    assert (figures.committed, figures.aborted, figures.unknown, figures.records) == (3, 0, 0, 6)
    assert run.client.calls[-1] == "close"


@pytest.mark.parametrize("call", ["send", "send_offsets", "commit"])
def test_worker_aborts_a_transaction_that_cannot_commit_and_reads_its_inputs_again(call: str, process: Process) -> None:
    run = process(4, {call: [AbortableError("no")]})
    judgement, figures = run.judge()
    assert run.client.calls.count("abort") == run.client.calls.count("rewind") == 1
    assert judgement.is_good, judgement.words
    assert (figures.committed, figures.aborted) == (2, 1)


def test_worker_gives_up_some_transactions_that_could_commit(process: Process) -> None:
    run = process(200, aborts=0.3)
    judgement, figures = run.judge()
    assert figures.aborted > 0
    assert figures.records == 200
    assert judgement.is_good, judgement.words


def test_fenced_worker_ends_and_leaves_an_outcome_that_is_not_known(process: Process) -> None:
    run = process(4, {"commit": [FencedError("newer")]})
    assert (run.code, run.client.calls[-1]) == (EXIT_FENCED, "close")
    assert [event["event"] for event in read_events(run.history)][-2:] == ["fenced", "end"]
    _, figures = run.judge()
    assert (figures.committed, figures.unknown) == (0, 1)


# The judge.


def test_output_of_an_aborted_transaction_that_is_read_is_found(process: Process) -> None:
    run = process(4, {"commit": [AbortableError("no")]})
    run.client.committed.insert(0, output_of("worker.1.1", 0))
    assert "aborted-read" in counts(run.judge()[0])


def test_lost_output_is_found(process: Process) -> None:
    run = process(4)
    del run.client.committed[1]
    found = counts(run.judge()[0])
    assert {"lost", "not-once"} <= set(found)


def test_output_that_is_there_twice_is_found(process: Process) -> None:
    run = process(4)
    run.client.committed.append(run.client.committed[0])
    assert "duplicated" in counts(run.judge()[0])


def test_input_that_two_transactions_have_processed_is_found(process: Process) -> None:
    run = process(4)
    log = TransactionLog(run.history, "worker.1")
    log.begin("worker.1.9", "worker")
    log.sending("worker.1.9", 0, "out-0", ("in-0", 1))
    log.ended("worker.1.9", "committed")
    log.close()
    run.client.committed.append(output_of("worker.1.9", 0))
    assert "not-once" in counts(run.judge()[0])


@pytest.mark.parametrize("offset", [2, 5])
def test_group_offset_that_does_not_fit_the_outputs_is_found(offset: int, process: Process) -> None:
    run = process(4)
    run.client.offset = offset
    assert counts(run.judge()[0]) == {"torn-offset": 1}


def test_outputs_that_nobody_has_sent_are_found(process: Process) -> None:
    run = process(4)
    run.client.committed.append(b"foreign")
    assert "unexpected" in counts(run.judge()[0])


def test_reader_of_committed_data_that_misses_a_record_is_found(process: Process, tmp_path: Path) -> None:
    run = process(4)
    outcome = run.client.outcome()
    history = tmp_path / "reader.jsonl"
    log = TransactionLog(history, "reader")
    log.saw([(*OUTPUT, offset, output_of(txn, number)) for offset, txn, number in outcome.outputs[OUTPUT][:3]])
    log.close()
    judgement = Judgement()
    figures = judge_pipeline(judgement, "p", [run.history], [history], {INPUT: 4}, outcome, GROUP)
    assert figures.reads == 3
    assert counts(judgement) == {"unseen": 1}
    assert "reader got 3 records of out-0; it has 4" in judgement.words[0]


def test_transaction_of_a_killed_worker_may_have_any_outcome_but_not_two(process: Process) -> None:
    run = process(4)
    whole = run.history.read_text(encoding="utf-8").splitlines()
    events: list[dict[str, Any]] = list(read_events(run.history))
    last = max(at for at, event in enumerate(events) if event["event"] == "txn-end")
    run.history.write_text("\n".join(whole[:last]) + '\n{"event":"txn-e', encoding="utf-8")
    judgement, figures = run.judge()
    assert judgement.is_good, judgement.words
    assert figures.unknown == 1
    run.client.committed.pop()
    assert "torn" in counts(run.judge()[0])


def test_longest_time_without_a_commit_is_that_of_the_whole_pipeline(tmp_path: Path) -> None:
    def history(name: str, *ends_ms: int) -> Path:
        path = tmp_path / f"{name}.jsonl"
        rows = [f'{{"event":"txn-end","txn":"t","outcome":"committed","at_ns":{at * 1_000_000}}}\n' for at in ends_ms]
        path.write_text("".join(rows), encoding="utf-8")
        return path

    paths = [history("a", 1_000, 4_000), history("b", 2_500, 50_000), tmp_path / "killed-before-it-wrote.jsonl"]
    assert longest_without_commit_s(paths, (0, 5_000), []) == 1.5
    assert longest_without_commit_s(paths, (0, 8_000), []) == 4.0, "the last one is 4 s before the end"
    assert longest_without_commit_s(paths, (0, 8_000), [(4_000, 7_500)]) == 1.5, "no majority ran meanwhile"
