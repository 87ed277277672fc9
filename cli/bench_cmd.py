"""`tidelog bench produce|consume|latency`: what a program gets of a cluster, by `tidelog.Producer` and `Consumer`.

    produce          records one by one, `send` of a producer; `--bulk`: many at once, `send_many`
    consume          `poll` of a consumer; `--arrow`: `poll_arrow`, columns instead of records
    latency          records at a light rate, each timed from `send` to its acknowledgement
    any, `--raw`     the same without a client: `bench_raw`

Keys of the JSON documents are listed in docs/cli.md.
"""

import argparse
import contextlib
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

from tidelog.cli import bench_raw
from tidelog.cli.bench_figures import DELIVERY_MS, show, times_document
from tidelog.cli.clients import bootstrap_of, client_errors, timeout_option
from tidelog.cli.main import CommandError, UsageError
from tidelog.cli.messages import report
from tidelog.cli.progress import Progress
from tidelog.client.admin.threaded import Admin
from tidelog.client.consumer.threaded import Consumer
from tidelog.client.errors import UnknownTopicError
from tidelog.client.producer.bulk import BulkDelivery
from tidelog.client.producer.threaded import Producer
from tidelog.model.errors import ErrorCode, TidelogError

CLIENT_ID = "tidelog-bench"
CHUNK_RECORDS = 1_000
"""Records sent between two readings of the clock; one of them is timed."""
POLL_RECORDS = 10_000
POLL_MS = 200
READ_TIMEOUT_S = 15.0


def _check(options: argparse.Namespace) -> None:
    if options.record_bytes < 1 or options.seconds <= 0 or options.partitions < 1:
        raise UsageError("--record-bytes, --seconds and --partitions are above 0")
    if getattr(options, "rate", 1) <= 0:
        raise UsageError(f"--rate {options.rate}: above 0")
    for flag in ("bulk", "arrow"):
        if options.raw and getattr(options, flag, False):
            raise UsageError(f"--{flag} is a way to use a client, and with --raw there is none")


@contextlib.contextmanager
def own_topic(options: argparse.Namespace, bootstrap: list[str]) -> Iterator[tuple[str, int]]:
    """(the topic of the options, or one that is made for this and deleted after it; how many partitions it has)."""
    with Admin(bootstrap, client_id=CLIENT_ID) as admin:
        if options.topic is not None:
            yield options.topic, _partitions(admin, options.topic)
            return
        name = f"bench-{random.getrandbits(48):012x}"
        made = admin.create_topic(name, partitions=options.partitions, replication_factor=options.replication_factor)
        try:
            admin.list_offsets(name)  # every leader answers: what comes before belongs to no figure
            yield name, made.partitions
        finally:
            admin.delete_topic(name)


def _partitions(admin: Admin, topic: str) -> int:
    try:
        return len(admin.describe_topic(topic).partitions)
    except TidelogError as error:
        if error.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
            raise UnknownTopicError(topic) from error
        raise


class _Acks:
    """Acknowledgement times of timed records, and the first error. Delivery callbacks fill it."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.error: Exception | None = None

    def timed(self) -> Callable[[Exception | None, object], None]:
        start_s = time.monotonic()

        def on_delivery(error: Exception | None, _metadata: object) -> None:
            if error is not None:
                self.error = self.error or error
            else:
                self.seconds.append(time.monotonic() - start_s)

        return on_delivery


def _producer(options: argparse.Namespace, bootstrap: list[str], batch_bytes: int | None = None) -> Producer:
    more: dict[str, object] = {"bootstrap": bootstrap, **timeout_option(options, "request_timeout_ms")}
    if batch_bytes is not None:
        more["batch_size"] = batch_bytes
    return Producer(more, client_id=CLIENT_ID, acks=options.acks, delivery_timeout_ms=DELIVERY_MS)


def _warm(producer: Producer, topic: str, partitions: int, value: bytes) -> dict[str, Any]:
    """Ids, streams, files: not what is measured. The figures of before."""
    for number in range(partitions):
        producer.send(topic, value, partition=number).result(DELIVERY_MS / 1000)
    return producer.metrics()


def _since(producer: Producer, before: dict[str, Any], acks: _Acks) -> dict[str, Any]:
    """The figures from then on; raises if something was not stored."""
    after = producer.metrics()
    found = {name: after[name] - before[name] for name in ("records_stored", "batches", "batch_bytes", "retries")}
    if acks.error is not None:
        raise acks.error
    if failed := after["records_failed"] - before["records_failed"]:
        raise CommandError(f"{failed} records were not stored")
    return found


def _add_callback(delivery: BulkDelivery, on_delivery: Callable[[Exception | None, object], None]) -> None:
    delivery.add_done_callback(lambda done: on_delivery(done.exception(), None))


def _send_all(
    options: argparse.Namespace, producer: Producer, topic: str, acks: _Acks, values: list[bytes], *, is_bulk: bool
) -> float:
    """For as long as is asked; the seconds until all of it was acknowledged."""
    start_s = time.monotonic()
    rest = values[1:]
    with Progress("writing", unit="s") as progress:
        while (passed_s := time.monotonic() - start_s) < options.seconds and acks.error is None:
            progress.show(passed_s, options.seconds)
            on_delivery = acks.timed()
            if is_bulk:
                _add_callback(producer.send_many(topic, values=values), on_delivery)
                continue
            producer.send(topic, values[0], on_delivery=on_delivery)
            for value in rest:
                producer.send(topic, value)
    producer.flush(DELIVERY_MS / 1000)
    return time.monotonic() - start_s


def _fill(
    options: argparse.Namespace, bootstrap: list[str], topic: str, partitions: int, *, is_bulk: bool
) -> dict[str, Any]:
    values = [random.randbytes(options.record_bytes) for _ in range(CHUNK_RECORDS)]
    acks = _Acks()
    with _producer(options, bootstrap, options.batch_bytes) as producer:
        before = _warm(producer, topic, partitions, values[0])
        seconds = _send_all(options, producer, topic, acks, values, is_bulk=is_bulk)
        found = _since(producer, before, acks)
    return {
        "seconds": round(seconds, 3),
        "batches": found["batches"],
        "records": found["records_stored"],
        "bytes": found["batch_bytes"],
        "mb_per_s": round(found["batch_bytes"] / seconds / 1e6, 2),
        "records_per_s": round(found["records_stored"] / seconds),
        "retries": found["retries"],
        "ack": times_document(acks.seconds),
    }


def run_produce(options: argparse.Namespace) -> int:
    _check(options)
    if options.raw:
        return bench_raw.run_produce(options)
    bootstrap = bootstrap_of(options)
    with client_errors(), own_topic(options, bootstrap) as (topic, partitions):
        figures = _fill(options, bootstrap, topic, partitions, is_bulk=options.bulk)
    return show(options, "produce", "bulk" if options.bulk else "client", partitions, figures)


def run_consume(options: argparse.Namespace) -> int:
    _check(options)
    if options.raw:
        return bench_raw.run_consume(options)
    bootstrap = bootstrap_of(options)
    with client_errors(), own_topic(options, bootstrap) as (topic, partitions):
        if options.topic is None:
            report(f"writing for {options.seconds:.0f} s what is read then")
            _fill(options, bootstrap, topic, partitions, is_bulk=True)
        figures = _read(options, bootstrap, topic)
    return show(options, "consume", "arrow" if options.arrow else "client", partitions, figures)


def _read(options: argparse.Namespace, bootstrap: list[str], topic: str) -> dict[str, Any]:
    """All that is there, from start to end."""
    limits = {"max_poll_records": POLL_RECORDS, **timeout_option(options, "default_api_timeout_ms")}
    with Consumer(bootstrap, client_id=CLIENT_ID, auto_offset_reset="none", **limits) as consumer:
        places = consumer.partitions_for(topic)
        starts, ends = consumer.beginning_offsets(*places), consumer.end_offsets(*places)
        wanted = sum(ends[place] - starts[place] for place in places)
        take = consumer.poll_arrow if options.arrow else consumer.poll
        start_s = heard_s = time.monotonic()
        consumer.assign(places)
        for place in places:
            consumer.seek(place, starts[place])
        records = 0
        with Progress("reading", unit="records") as progress:
            while records < wanted:
                progress.show(records, wanted)
                count = len(take(POLL_MS))
                records += count
                if count:
                    heard_s = time.monotonic()
                elif all(consumer.position(place) >= ends[place] for place in places):
                    break  # a log has offsets without a record, where it was compacted
                elif time.monotonic() - heard_s > READ_TIMEOUT_S:
                    raise CommandError(f"nothing more of {topic} could be read in {READ_TIMEOUT_S:.0f} s")
        seconds = max(heard_s - start_s, 1e-9)
        size = int(consumer.metrics()["bytes_consumed"])
    return {
        "seconds": round(seconds, 3),
        "records": records,
        "bytes": size,
        "mb_per_s": round(size / seconds / 1e6, 2),
        "records_per_s": round(records / seconds),
        "is_decoded": True,
    }


def run_latency(options: argparse.Namespace) -> int:
    _check(options)
    if options.raw:
        return bench_raw.run_latency(options)
    bootstrap = bootstrap_of(options)
    with client_errors(), own_topic(options, bootstrap) as (topic, partitions):
        figures = _pace(options, bootstrap, topic, partitions)
    return show(options, "latency", "client", partitions, figures)


def _pace(options: argparse.Namespace, bootstrap: list[str], topic: str, partitions: int) -> dict[str, Any]:
    value, acks = random.randbytes(options.record_bytes), _Acks()
    with _producer(options, bootstrap) as producer:
        before = _warm(producer, topic, partitions, value)
        start_s = time.monotonic()
        sent = 0
        with Progress("writing", unit="s") as progress:
            while (passed_s := time.monotonic() - start_s) < options.seconds and acks.error is None:
                # Timed one by one, and never waited for: a slow one does not hide those behind it.
                producer.send(topic, value, partition=sent % partitions, on_delivery=acks.timed())
                sent += 1
                progress.show(passed_s, options.seconds)
                time.sleep(max(0.0, start_s + sent / options.rate - time.monotonic()))
        producer.flush(DELIVERY_MS / 1000)
        found = _since(producer, before, acks)
    return {"batches": found["batches"], "rate": options.rate, "ack": times_document(acks.seconds)}
