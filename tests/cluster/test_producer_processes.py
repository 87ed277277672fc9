"""`tidelog.Producer` against real processes: threads, forks, Ctrl-C, notebooks, the interpreter's end, failover."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import subprocess
import sys
import textwrap
import threading
import time
from typing import Any

import pytest
from exercises import make, records_of
from support.clusters.waiting import until

import tidelog
from tidelog.client.errors import NoClusterError, ProducerClosedError, SerializationError
from tidelog.testing import LocalCluster

pytestmark = pytest.mark.cluster


def create(cluster: LocalCluster, name: str, *, partitions: int = 1) -> str:
    with tidelog.Admin(cluster.bootstrap) as admin:
        return make(admin, f"produced-{name}", partitions)


def read_all(cluster: LocalCluster, name: str) -> list[list[tidelog.ConsumerRecord]]:
    """Records of each partition, up to the last one that has any."""
    found = records_of(cluster, name)
    last = max(record.partition for record in found)
    return [[record for record in found if record.partition == number] for number in range(last + 1)]


def values_of(cluster: LocalCluster, name: str) -> list[bytes | None]:
    return [record.value for records in read_all(cluster, name) for record in records]


def run_script(cluster: LocalCluster, code: str, *, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    """A program of its own; `BOOTSTRAP` is defined in it."""
    text = f"BOOTSTRAP = {cluster.bootstrap!r}\n{textwrap.dedent(code)}"
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", text],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@pytest.mark.requirement("a:D-04", "a:D-06", "b:F-07", "b:F-11", "a:A-17")
def test_many_threads_share_a_producer_and_each_keeps_its_order(cluster: LocalCluster) -> None:
    topic = create(cluster, "threads", partitions=3)
    reported: dict[int, list[int]] = {}

    def on_delivery(error: Exception | None, metadata: tidelog.RecordMetadata) -> None:
        assert error is None
        reported.setdefault(metadata.partition, []).append(metadata.offset)

    with tidelog.Producer(cluster.bootstrap) as producer:

        def work(number: int) -> None:
            for row in range(2_000):
                producer.send(topic, b"%d-%d" % (number, row), partition=number % 3, on_delivery=on_delivery)
            assert producer.send(topic, "last", key="k").result(30).topic == topic

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        producer.flush(30)
        metrics = producer.metrics()
    assert producer.metrics() == metrics, "also when it is closed"
    assert metrics["records_stored"] == 8_004
    assert metrics["records_failed"] == metrics["records_buffered"] == metrics["buffer_bytes"] == 0
    stored = read_all(cluster, topic)
    for number in range(4):
        mine = [one.value for one in stored[number % 3] if (one.value or b"").startswith(b"%d-" % number)]
        assert mine == [b"%d-%d" % (number, row) for row in range(2_000)]
    for part, offsets in reported.items():
        assert offsets == sorted(offsets), f"callbacks of partition {part}"
    assert sum(map(len, reported.values())) == 8_000


@pytest.mark.requirement("a:D-21", "a:D-55", "a:D-81", "a:D-82", "a:D-40", "b:F-05", "b:F-50", "b:F-51", "b:F-24")
def test_interceptors_serializers_and_a_partitioner_of_ones_own(
    cluster: LocalCluster, caplog: pytest.LogCaptureFixture
) -> None:
    topic = create(cluster, "own", partitions=3)
    seen: list[tuple[str, int]] = []

    class Stamp:
        def on_send(self, record: tidelog.ProducerRecord) -> tidelog.ProducerRecord:
            record.headers = {"by": "stamp"}
            return record

        def on_acknowledgement(self, error: Exception | None, metadata: tidelog.RecordMetadata) -> None:
            seen.append((metadata.topic, metadata.offset))

        def close(self) -> None:
            seen.append(("closed", -1))

    class Broken:
        def on_send(self, record: tidelog.ProducerRecord) -> None:
            raise RuntimeError("on_send of a broken one")

        def on_acknowledgement(self, error: Exception | None, metadata: tidelog.RecordMetadata) -> None:
            raise RuntimeError("on_acknowledgement of a broken one")

    class Customer:
        """Kafka's way: an object with `serialize`."""

        def serialize(self, topic: str, data: tuple[int, str]) -> bytes:
            name = data[1].encode()
            return data[0].to_bytes(4, "big") + len(name).to_bytes(4, "big") + name

    with tidelog.Producer(
        {"bootstrap.servers": cluster.bootstrap, "interceptor.classes": [Stamp, Broken()]},
        key_serializer=Customer(),
        value_serializer=tidelog.serializers.json,
        partitioner=lambda topic, key, value, count: count - 1 if b"banana" in key else 0,
    ) as producer:
        first = producer.send(topic, {"a": 1}, (7, "banana")).result(30)
        second = producer.send(topic, [1, 2], (8, "ü")).result(30)
        bulk = producer.send_many(topic, values=[{"n": 1}, None], keys=[(1, "x"), (2, "banana")]).result(30)
        with pytest.raises(SerializationError, match="cannot serialize the value, of type set"):
            producer.send(topic, {1, 2}, (1, "x"))
        producer.flush()
    assert (first.partition, second.partition) == (2, 0)
    assert {one.partition for one in bulk.ranges} == {0, 2}
    assert sorted(seen[:4]) == [(topic, 0), (topic, 0), (topic, 1), (topic, 1)]
    assert seen[4:] == [("closed", -1)]
    assert "an interceptor failed" in caplog.text
    stored = read_all(cluster, topic)
    assert stored[2][0].value == b'{"a":1}'
    assert stored[2][0].key == b"\x00\x00\x00\x07\x00\x00\x00\x06banana"
    assert stored[2][0].headers == (("by", b"stamp"),)
    assert stored[2][1].value is None
    with tidelog.Producer(cluster.bootstrap) as plain:
        with pytest.raises(TypeError, match=r"value_serializer=tidelog\.serializers\.json"):
            plain.send(topic, {"a": 1})
        with pytest.raises(TypeError, match=r"key_serializer=tidelog\.serializers\.long"):
            plain.send(topic, b"v", 5)


def test_serializers_there_and_back() -> None:
    made = tidelog.serializers
    cases: tuple[tuple[made.Serializer[Any], Any, bytes], ...] = (
        (made.integer, -2, b"\xff\xff\xff\xfe"),
        (made.long, 1, bytes(7) + b"\x01"),
        (made.double, 0.5, b"\x3f\xe0" + bytes(6)),
        (made.string, "ü", "ü".encode()),
        (made.plain, b"x", b"x"),
        (made.json, {"a": [1, None]}, b'{"a":[1,null]}'),
    )
    for serializer, data, wanted in cases:
        assert serializer.dump(data) == wanted
        assert serializer.load(wanted) == data
        assert serializer.dump(None) is serializer.load(None) is None


def test_a_table_goes_in_as_it_is(cluster: LocalCluster) -> None:
    pa = pytest.importorskip("pyarrow")
    topic = create(cluster, "table", partitions=2)
    table = pa.table({"key": [f"k{row}" for row in range(1_000)], "value": [f"v{row}" for row in range(1_000)]})
    with tidelog.Producer(cluster.bootstrap, compression="lz4") as producer:
        done: list[object] = []
        delivery = producer.send_many(topic, table)
        delivery.add_done_callback(done.append)
        reported = delivery.result(30)
        assert reported.count == 1_000
        producer.flush()
        assert done == [delivery]
    assert sorted(value or b"" for value in values_of(cluster, topic)) == sorted(b"v%d" % row for row in range(1_000))


def test_a_callback_may_send_but_not_wait_for_the_io_thread(cluster: LocalCluster) -> None:
    topic = create(cluster, "callbacks")
    outcomes: list[object] = []

    with tidelog.Producer(cluster.bootstrap) as producer:

        def on_delivery(error: Exception | None, metadata: tidelog.RecordMetadata) -> None:
            outcomes.append(producer.send(topic, b"from a callback").result(10).offset)

        producer.send(topic, b"first", on_delivery=on_delivery)
        producer.flush(30)
        until(lambda: outcomes == [1], "a record sent and awaited on the thread of the callbacks")


def test_it_works_inside_of_a_running_loop_as_in_a_notebook(cluster: LocalCluster) -> None:
    topic = create(cluster, "notebook")

    async def cell() -> None:
        with tidelog.Producer(cluster.bootstrap) as producer:
            assert producer.send(topic, b"blocking").result(30).offset == 0
            assert (await producer.send(topic, b"awaited")).offset == 1
        reported: list[int] = []
        async with tidelog.aio.Producer(cluster.bootstrap) as producer:
            sent = [
                await producer.send(
                    topic, b"%d" % row, on_delivery=lambda _, __: reported.append(threading.get_ident())
                )
                for row in range(500)
            ]
            assert [(await one).offset for one in sent] == list(range(2, 502))
            await producer.flush(10)
            assert set(reported) == {threading.get_ident()}, "callbacks are on the loop"
            assert (await (await producer.send_many(topic, values=[b"x"] * 1_000))).count == 1_000

    asyncio.run(cell())


def test_no_cluster_is_an_error_at_once_without_bootstrap_wait_and_the_thread_ends_with_its_last_user(
    cluster: LocalCluster,
) -> None:
    with tidelog.Producer("127.0.0.1:9", bootstrap_wait_ms=0) as producer:
        started_s = time.monotonic()
        with pytest.raises(NoClusterError, match=r"no cluster at 127\.0\.0\.1:9"):
            producer.send("t", b"x")
        assert time.monotonic() - started_s < 10
        assert producer.metrics()["records_stored"] == 0
        assert "open" in repr(producer)
    assert "closed" in repr(producer)
    with pytest.raises(ProducerClosedError):
        producer.send("t", b"x")
    until(lambda: not [one for one in threading.enumerate() if one.name == "tidelog-io"], "no thread without users")


FORK = """
import multiprocessing, os, signal, sys, time
import tidelog

signal.alarm(50)
producer = tidelog.Producer(BOOTSTRAP)
unused = tidelog.Producer(BOOTSTRAP)
first = producer.send("TOPIC", b"parent 1").result(20)
waiting = [producer.send("TOPIC", b"parent burst %d" % n) for n in range(3_000)]   # in flight during the fork

def child(number):
    signal.alarm(40)
    pending = [one for one in waiting if one.done() and isinstance(one.exception(), Exception)]
    for one in pending[:1]:
        assert "forked" in str(one.exception()), one.exception()
    producer.send("TOPIC", b"child %d" % number).result(20)
    unused.send("TOPIC", b"child unused %d" % number).result(20)
    with tidelog.Producer(BOOTSTRAP) as fresh:
        fresh.send("TOPIC", b"child fresh %d" % number).result(20)
    producer.close(10)

children = []
for number in range(3):
    pid = os.fork()
    if pid == 0:
        try:
            child(number)
        except BaseException as error:
            print("child failed:", repr(error), flush=True)
            os._exit(1)
        os._exit(0)
    children.append(pid)
context = multiprocessing.get_context("fork")
process = context.Process(target=child, args=(3,))
process.start()
assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0, 0]
process.join(40)
assert process.exitcode == 0, process.exitcode
assert len({one.result(30).offset for one in waiting}) == 3_000
producer.send("TOPIC", b"parent 2").result(20)
unused.send("TOPIC", b"parent unused").result(20)
producer.close(20)
unused.close(20)
print("all well")
"""


def test_a_fork_leaves_both_sides_with_a_producer_that_works(cluster: LocalCluster) -> None:
    topic = create(cluster, "forked")
    done = run_script(cluster, FORK.replace("TOPIC", topic))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all well" in done.stdout
    found = values_of(cluster, topic)
    wanted = [b"parent 1", b"parent 2", b"parent unused", *(b"parent burst %d" % row for row in range(3_000))]
    wanted += [b"child %s%d" % (kind, row) for kind in (b"", b"unused ", b"fresh ") for row in range(4)]
    assert sorted(value or b"" for value in found) == sorted(wanted), "each once: nothing lost, nothing twice"


ADMIN_FORKS = """
import glob, os, signal, sys

def core_ended():
    for path in glob.glob("/proc/self/task/*/comm"):
        try:
            name = open(path).read().strip()
        except OSError:
            continue
        if name in ("event_engine", "grpc_global_tim", "lifeguard"):
            print("forked while gRPC had the thread", name, file=sys.stderr)
            os._exit(3)

os.register_at_fork(before=core_ended)   # runs after the one that tidelog registers
import tidelog

def is_there(admin):
    return "TOPIC" in [one.name for one in admin.list_topics()]

with tidelog.Admin(BOOTSTRAP) as admin:
    for _ in range(10):
        assert is_there(admin)
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)   # a child that was forked before gRPC had ended hangs
            code = 1
            try:
                code = 0 if is_there(admin) else 2
            finally:
                os._exit(code)
        assert os.waitpid(pid, 0)[1] == 0
    assert is_there(admin)
for _ in range(10):
    with tidelog.Admin(BOOTSTRAP) as admin:
        assert is_there(admin)
    pid = os.fork()   # gRPC of the closed client may be ending
    if pid == 0:
        signal.alarm(20)
        code = 1
        try:
            with tidelog.Admin(BOOTSTRAP) as own:
                code = 0 if is_there(own) else 2
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
"""


def test_an_admin_works_after_every_one_of_many_forks(cluster: LocalCluster) -> None:
    topic = create(cluster, "forks")
    done = run_script(cluster, ADMIN_FORKS.replace("TOPIC", topic), timeout_s=200)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_worker_that_exits_in_order_after_a_fork_is_quiet(cluster: LocalCluster) -> None:
    topic = create(cluster, "preload")
    code = f"""
    import os, sys
    import tidelog
    producer = tidelog.Producer(BOOTSTRAP)
    producer.send("{topic}", b"parent").result(20)
    pid = os.fork()
    if pid == 0:
        producer.send("{topic}", b"worker, not closed")     # flushed when the worker exits
        sys.exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    producer.close()
    """
    done = run_script(cluster, code)
    assert done.returncode == 0, done.stderr
    assert sorted(value or b"" for value in values_of(cluster, topic)) == [b"parent", b"worker, not closed"]
    assert "Traceback" not in done.stderr
    assert "was never awaited" not in done.stderr


def test_a_child_of_multiprocessing_flushes_at_its_end(cluster: LocalCluster) -> None:
    topic = create(cluster, "children")
    code = f"""
    import multiprocessing, tidelog

    def work(number):
        tidelog.Producer(BOOTSTRAP, linger_ms=60_000).send("{topic}", b"%d" % number)

    if __name__ == "__main__":
        context = multiprocessing.get_context("fork")
        children = [context.Process(target=work, args=(number,)) for number in range(2)]
        for child in children:
            child.start()
        for child in children:
            child.join()
            assert child.exitcode == 0
    """
    done = run_script(cluster, code)
    assert done.returncode == 0, done.stderr
    assert sorted(value or b"" for value in values_of(cluster, topic)) == [b"0", b"1"]


def test_a_child_whose_grpc_cannot_work_says_so_at_once(cluster: LocalCluster) -> None:
    topic = create(cluster, "spoilt")
    code = f"""
    import asyncio, os, threading, time
    import grpc.aio
    import tidelog
    from tidelog.client.errors import ForkedError

    producer = tidelog.Producer(BOOTSTRAP)
    producer.send("{topic}", b"parent 1").result(20)
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()

    async def connect():
        channel = grpc.aio.insecure_channel(BOOTSTRAP.partition(",")[0])   # not ours: nobody closes it for a fork
        await channel.channel_ready()
        return channel

    channel = asyncio.run_coroutine_threadsafe(connect(), loop).result(20)
    pid = os.fork()
    if pid == 0:
        began = time.monotonic()
        try:
            producer.send("{topic}", b"child")
        except ForkedError as error:
            assert "only after the fork" in str(error), error
            os._exit(0 if time.monotonic() - began < 10 else 3)
        os._exit(4)
    assert os.waitpid(pid, 0)[1] == 0
    producer.send("{topic}", b"parent 2").result(20)
    producer.close()
    os._exit(0)
    """
    done = run_script(cluster, code)
    assert done.returncode == 0, done.stdout + done.stderr
    assert values_of(cluster, topic) == [b"parent 1", b"parent 2"]


def test_the_end_of_the_program_flushes_for_a_while_and_says_what_is_lost(cluster: LocalCluster) -> None:
    topic = create(cluster, "exit")
    done = run_script(
        cluster,
        f"""
        import logging, tidelog
        logging.basicConfig()
        producer = tidelog.Producer(BOOTSTRAP, linger_ms=60_000)
        for row in range(10):
            producer.send("{topic}", b"%d" % row)
        """,
    )
    assert done.returncode == 0, done.stderr
    assert "was not closed; 10 records are flushed now" in done.stderr
    assert values_of(cluster, topic) == [b"%d" % row for row in range(10)]


def test_ctrl_c_gets_through_every_wait(cluster: LocalCluster) -> None:
    topic = create(cluster, "interrupted")
    code = f"""
    import signal, sys, tidelog
    producer = tidelog.Producer(BOOTSTRAP, linger_ms=60_000, delivery_timeout_ms=200_000)
    sent = producer.send("{topic}", b"x")
    for wait in (sent.result, lambda: (producer.send("{topic}", b"y"), sent.result())):
        print("waiting", flush=True)
        try:
            wait()
        except KeyboardInterrupt:
            print("interrupted", flush=True)
    producer.close()
    print("offset", sent.result().offset, flush=True)
    """
    text = f"BOOTSTRAP = {cluster.bootstrap!r}\n{textwrap.dedent(code)}"
    with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            for _ in range(2):
                assert process.stdout.readline() == "waiting\n"
                time.sleep(0.2)  # it is at its wait by then; a signal before it would do as well
                process.send_signal(signal.SIGINT)
                assert process.stdout.readline() == "interrupted\n"
            assert process.stdout.readline() == "offset 0\n"
            assert process.wait(30) == 0
        finally:
            process.kill()


def test_importing_starts_nothing_and_costs_little() -> None:
    code = (
        "import sys, tidelog, threading; "
        "assert not [one for one in sys.modules if one.startswith(('grpc', 'tidelog.client', 'uvloop'))]; "
        "tidelog.Producer; assert threading.active_count() == 1; tidelog.Producer('x'); "
        "assert threading.active_count() == 1; assert 'Consumer' in dir(tidelog)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    with pytest.raises(AttributeError, match="has no attribute 'Produzent'"):
        tidelog.Produzent  # type: ignore[attr-defined]  # noqa: B018


assert multiprocessing.get_all_start_methods()[0] == "fork", "as on Linux"
