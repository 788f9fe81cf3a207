"""Databricks's Zerobus clients, unchanged, against Sluice: only the endpoint is ours.

    zerobus_clients.py SLUICE_BINARY [--short] [TEST…]

Runs with any version of the SDK from 1.0.0 on: classes of cases that it has no API for are left out, and named.
"""

import asyncio
import contextlib
import importlib.metadata
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

# The client logs what the cases make go wrong on purpose.
os.environ.setdefault("RUST_LOG", "off")

import pyarrow as pa
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from harness import START_SECONDS, TABLE, WAIT_SECONDS, Case, main, only_in_full
from zerobus.sdk import aio
from zerobus.sdk.shared import (
    AckCallback,
    HeadersProvider,
    NonRetriableException,
    RecordType,
    StreamConfigurationOptions,
    TableProperties,
    ZerobusException,
)
from zerobus.sdk.sync import ZerobusSdk

VERSION = importlib.metadata.version("databricks-zerobus-ingest-sdk")
HAS_ARROW = hasattr(ZerobusSdk, "create_arrow_stream")
HAS_AVRO = hasattr(RecordType, "AVRO")
HAS_SHARED_CONNECTIONS = "connection_per_stream" in inspect.signature(ZerobusSdk).parameters
# What is raised where there is no use in trying again; the oldest one does not say so.
REFUSED = ZerobusException if VERSION == "1.0.0" else NonRetriableException
# To its callbacks the oldest one tells no failures: it prints them.
TELLS_FAILURES = VERSION != "1.0.0"

MIB = 1 << 20
# What `client_id` and `client_secret` are to a stream with headers of its own.
NO_OAUTH = {"client_id": "", "client_secret": ""}
# A gateway that is down is looked for again until it is there.
PATIENT = {"recovery_backoff_ms": 50, "recovery_retries": 1000}


class Headers(HeadersProvider):
    def get_headers(self):
        return [("authorization", "Bearer any"), ("x-databricks-zerobus-table-name", TABLE)]


class ArrowHeaders(HeadersProvider):
    """Of Arrow streams: the client names the table itself."""

    def get_headers(self):
        return [("authorization", "Bearer any")]


class Acks(AckCallback):
    def __init__(self):
        super().__init__()
        self.acked, self.failed = [], []
        self.told = threading.Condition()

    def on_ack(self, offset):
        with self.told:
            self.acked.append(offset)
            self.told.notify()

    def on_error(self, offset, error_message):
        with self.told:
            self.failed.append(offset)
            self.told.notify()

    def wait_for(self, count):
        """They are told by a thread of the client, some time after the failure is raised."""
        with self.told:
            self.told.wait_for(lambda: len(self.acked) + len(self.failed) >= count, WAIT_SECONDS)


def connect(address, module=None, **options):
    module = module or sys.modules[ZerobusSdk.__module__]
    return module.ZerobusSdk(f"http://{address}", f"http://{address}", **options)


def json_options(**options):
    return {
        "table_properties": TableProperties(TABLE),
        "options": StreamConfigurationOptions(record_type=RecordType.JSON, **options),
        "headers_provider": Headers(),
        **NO_OAUTH,
    }


def open_stream(address, **options):
    return connect(address).create_stream(**json_options(**options))


def record(number):
    return json.dumps({"id": number})


def reading_message():
    """A message class, made here so that no compiler is needed."""
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="reading.proto", package="conformance", syntax="proto2")
    reading = file.message_type.add(name="Reading")
    for number, (name, kind) in enumerate(
        [("id", field.TYPE_INT64), ("name", field.TYPE_STRING), ("celsius", field.TYPE_DOUBLE)], start=1
    ):
        reading.field.add(name=name, number=number, type=kind, label=field.LABEL_OPTIONAL)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("conformance.Reading"))


def protobuf_options(message, **options):
    return {
        "table_properties": TableProperties(TABLE, message.DESCRIPTOR),
        "options": StreamConfigurationOptions(record_type=RecordType.PROTO, **options),
        "headers_provider": Headers(),
        **NO_OAUTH,
    }


ARROW_SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.large_utf8())])


def arrow_batch(first, rows):
    ids = pa.array(range(first, first + rows), pa.int64())
    names = pa.array([f"n{number}" for number in range(first, first + rows)], pa.large_utf8())
    return pa.RecordBatch.from_arrays([ids, names], schema=ARROW_SCHEMA)


def open_arrow_stream(address, schema=ARROW_SCHEMA, **options):
    from zerobus.sdk.shared.arrow import ArrowStreamConfigurationOptions

    options = ArrowStreamConfigurationOptions(**options)
    return connect(address).create_arrow_stream_with_headers_provider(TABLE, schema, ArrowHeaders(), options)


# What sends the record (for Arrow: the batch of one row) of a number, by kind of stream, and the stream.
def opened(kind, address, **options):
    if kind == "arrow":
        stream = open_arrow_stream(address, **options)
        return stream, lambda number: stream.ingest_batch(arrow_batch(number, 1))
    if kind == "protobuf":
        message = reading_message()
        stream = connect(address).create_stream(**protobuf_options(message, **options))
        return stream, lambda number: stream.ingest_record_offset(message(id=number))
    stream = open_stream(address, **options)
    return stream, lambda number: stream.ingest_record_offset(record(number))


def produce(kind, address, records):
    """The producer in a process of its own, so that what its client logs can be read: waits for a line half-way."""
    stream, send = opened(kind, address)
    for number in range(records):
        if number == records // 2:
            print("half-way", flush=True)
            sys.stdin.readline()
        offset = send(number)
    stream.wait_for_offset(offset)
    stream.flush()
    stream.close()
    print("closed", flush=True)


def produce_until_told(kind, address):
    """The same, sending until there is a line, some numbers at a time; says then how many those were."""
    sender = Sender(*opened(kind, address))
    sender.start()
    sender.wait_for(100)
    print("running", flush=True)
    sys.stdin.readline()
    print("sent", sender.stop(), flush=True)


class Sender(threading.Thread):
    """Sends numbers, some at a time, each time until they are acked, until it is told to stop."""

    AT_ONCE = 20

    def __init__(self, stream, send):
        super().__init__(daemon=True)
        self.stream, self.send = stream, send
        self.sent = 0
        self.failure = None
        self.moved = threading.Condition()
        self.stopping = threading.Event()

    def run(self):
        try:
            while not self.stopping.is_set():
                for number in range(self.sent, self.sent + self.AT_ONCE):
                    offset = self.send(number)
                self.stream.wait_for_offset(offset)
                with self.moved:
                    self.sent += self.AT_ONCE
                    self.moved.notify()
            self.stream.flush()
            self.stream.close()
        except ZerobusException as error:
            self.failure = error
            with self.moved:
                self.moved.notify()

    def wait_for(self, more):
        """Until `more` numbers have been acked from now on."""
        with self.moved:
            wanted = self.sent + more
            there = self.moved.wait_for(lambda: self.sent >= wanted or self.failure, WAIT_SECONDS)
        assert there and not self.failure, f"{self.sent} of {wanted} acked: {self.failure}"

    def stop(self):
        self.stopping.set()
        self.join(WAIT_SECONDS)
        assert not self.is_alive() and not self.failure, f"after {self.sent}: {self.failure}"
        return self.sent


class Zerobus(Case):
    def assert_gone_unseen(self, kind, how):
        """A pod goes and comes back half-way, and the client's log knows nothing of it."""
        sluice = self.start()
        records = 2000
        producer = self.producer("--produce", kind, sluice.gateway.address, str(records))
        log = []
        for line in producer.stdout:
            log.append(line)
            if line.startswith("half-way"):
                sluice.pod.end(how)
                # It goes on sending while there is no pod.
                producer.stdin.write("\n")
                producer.stdin.flush()
                sluice.pod = sluice.start_pod(sluice.pod.address)
        self.assert_saw_nothing(kind, producer, "".join(log))
        sluice.end()
        self.assert_rows(sluice, range(records))

    def producer(self, *arguments, stdout=subprocess.PIPE):
        """This script as a producer, whose client logs all that it has to say."""
        producer = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), *arguments],
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=subprocess.STDOUT,
            env={**os.environ, "RUST_LOG": "databricks_zerobus_ingest_sdk=info"},
            text=True,
        )
        for end in (producer.wait, producer.kill, producer.stdin.close, (producer.stdout or stdout).close):
            self.addCleanup(end)
        return producer

    def assert_saw_nothing(self, kind, producer, log):
        self.assertEqual(producer.wait(timeout=START_SECONDS), 0, log)
        if kind == "arrow":
            self.assertEqual(log.count("Arrow Flight stream created"), 1, log)
        else:
            self.assertEqual(len(set(re.findall(r"~[0-9a-f]{32}", log))), 1, log)
        self.assertNotIn("WARN", log)

    def assert_goes_on_elsewhere(self, kind, how):
        """The pod that has the stream goes, for good or for a while, in the middle of it; the client's log knows nothing
        of it, and all is in the table once."""
        pool = self.start_pool()
        # A pipe that nobody reads meanwhile would hold up a client that says much.
        said = open(os.path.join(self.directory, "producer.log"), "w+")
        producer = self.producer("--produce-until-told", kind, pool.gateway.address, stdout=said)

        def log_now():
            with open(said.name) as log:
                return log.read()

        pool.wait("a running producer", lambda: "running\n" in log_now())
        holder = pool.stream()["pod"]
        if how == "drain":
            self.assertEqual(pool.drain(holder), 0, "a drained pod's status")
        else:
            pool.kill_pod(holder)
        moved = pool.wait("the stream elsewhere", lambda: (at := pool.stream())["pod"] != holder and at)
        self.assertEqual(moved["moves"], 1)
        # Not only until then.
        reached = moved["durable_next"] + 10
        pool.wait("acks", lambda: pool.stream()["durable_next"] >= reached)
        producer.stdin.write("\n")
        producer.stdin.flush()
        producer.wait(timeout=WAIT_SECONDS)
        log = log_now()
        self.assert_saw_nothing(kind, producer, log)
        sent = int(re.search(r"^sent (\d+)$", log, re.MULTILINE)[1])
        if how == "drain":
            self.assertEqual(pool.metric("sluice_gateway_replayed_frames_total"), 0, "a drain needs no replay")
        else:
            pool.restart_pod(holder)
            # Later records of the stream wait in the other pod's log for those that the killed one's has.
            pool.wait("all records", lambda: json.loads(pool.request("GET", f"/v1/tables/{TABLE}"))["rows"] == sent)
        pool.end()
        self.assert_rows(pool, range(sent))

    def assert_drained_gateway_doubles_nothing(self, kind):
        sluice = self.start()
        stream, send = opened(kind, sluice.gateway.address, **PATIENT)
        stream.wait_for_offset(send(0))
        # On their way when the gateway is told to go.
        for number in range(1, 200):
            send(number)
        self.assertEqual(sluice.restart_gateway(signal.SIGTERM), 0)
        for number in range(200, 400):
            offset = send(number)
        stream.wait_for_offset(offset)
        stream.close()
        sluice.end()
        # The client goes on in a second stream, and has nothing to send again.
        rows = sluice.rows()
        self.assertEqual(sorted(row["id"] for row in rows), list(range(400)))
        self.assert_offsets(rows, streams=2)

    def assert_drained_gateway_loses_nothing(self, kind):
        sluice = self.start()
        sender = Sender(*opened(kind, sluice.gateway.address, **PATIENT))
        sender.start()
        sender.wait_for(100)
        self.assertEqual(sluice.restart_gateway(signal.SIGTERM), 0)
        sender.wait_for(100)
        sent = sender.stop()
        sluice.end()
        # The client turns from stream to stream as soon as it has all acks. What is given to it just then can still go
        # out over the old one, and is sent again over the new one: no more than was sent at once.
        self.assert_sent_again(sluice, range(sent), acked=100)
        doubled = len(sluice.rows()) - sent
        self.assertLessEqual(doubled, Sender.AT_ONCE)

    def assert_killed_gateway_loses_nothing(self, kind):
        sluice = self.start()
        stream, send = opened(kind, sluice.gateway.address, recovery_backoff_ms=1000)
        for number in range(300):
            offset = send(number)
        stream.wait_for_offset(offset)
        for number in range(300, 320):
            send(number)
        sluice.gateway.end(signal.SIGKILL)
        for number in range(320, 400):
            offset = send(number)
        # Its time is the scenario: the first attempts of the client find nobody.
        time.sleep(1.2)
        sluice.gateway = sluice.start_gateway(sluice.gateway.address)
        stream.wait_for_offset(offset)
        stream.close()
        sluice.end()
        self.assert_sent_again(sluice, range(400), acked=300)


class Records(Zerobus):
    def test_records_batches_flush_and_close(self):
        sluice = self.start()
        stream = open_stream(sluice.gateway.address)
        offset = [stream.ingest_record_offset(json.dumps({"id": n, "name": f"n{n}"})) for n in range(500)][-1]
        stream.wait_for_offset(offset)
        batch = [json.dumps({"id": 500 + n, "name": "batch"}, indent=1) for n in range(100)]
        stream.wait_for_offset(stream.ingest_records_offset(batch))
        stream.ingest_record_offset({"id": 600, "name": "a dictionary"})
        stream.ingest_records_offset([{"id": 601}, {"id": 602, "name": "dictionaries, ü"}])
        stream.flush()
        stream.close()
        sluice.end()
        self.assert_rows(sluice, range(603))
        self.assertEqual(sluice.rows()[602]["name"], "dictionaries, ü")

    def test_protobuf_records_and_batches(self):
        sluice = self.start()
        message = reading_message()
        stream = connect(sluice.gateway.address).create_stream(**protobuf_options(message))
        for number in range(300):
            offset = stream.ingest_record_offset(message(id=number, name=f"n{number}", celsius=number / 2))
        stream.wait_for_offset(offset)
        batch = [message(id=300 + number).SerializeToString() for number in range(100)]
        stream.wait_for_offset(stream.ingest_records_offset(batch))
        stream.close()
        sluice.end()
        self.assert_rows(sluice, range(400))
        rows = sluice.rows()
        self.assertEqual((rows[7]["name"], rows[7]["celsius"], rows[300]["name"]), ("n7", 3.5, None))

    def test_each_request_is_acked_once_and_in_order(self):
        sluice = self.start()
        acks = Acks()
        stream = open_stream(sluice.gateway.address, ack_callback=acks)
        for number in range(0, 300, 3):
            stream.ingest_record_offset(record(number))
            stream.ingest_records_offset([record(number + 1), record(number + 2)])
        stream.flush()
        # Waits for the callbacks.
        stream.close()
        self.assertEqual((acks.acked, acks.failed), (list(range(200)), []))
        sluice.end()
        self.assert_rows(sluice, range(300))

    def test_an_idle_stream_closes(self):
        sluice = self.start()
        stream = open_stream(sluice.gateway.address)
        stream.flush()
        stream.close()
        sluice.end()

    def test_large_records(self):
        sluice = self.start()
        stream = open_stream(sluice.gateway.address)
        sizes = [int(size * MIB) for size in (1, 5, 9.5, 9.93)]
        for number, size in enumerate(sizes):
            empty = len(json.dumps({"id": number, "text": ""}))
            offset = stream.ingest_record_offset(json.dumps({"id": number, "text": "x" * (size - empty)}))
        stream.wait_for_offset(offset)
        # Many in one call, as large as the client sends any.
        batch = [json.dumps({"id": number, "text": "y" * (MIB // 2)}) for number in range(4, 20)]
        stream.wait_for_offset(stream.ingest_records_offset(batch))
        stream.close()
        sluice.end()
        self.assert_rows(sluice, range(20))
        lengths = [len(json.dumps({"id": row["id"], "text": row["text"]})) for row in sluice.rows()[:4]]
        self.assertEqual(lengths, sizes)

    def test_bad_records_are_kept_where_their_table_keeps_them_and_the_stream_goes_on(self):
        sluice = self.start()
        sluice.create_table(("id", "int64"), properties={"sluice.on_invalid": "quarantine"})
        stream = open_stream(sluice.gateway.address)
        for number in range(600):
            bad = number % 100 == 50
            offset = stream.ingest_record_offset(json.dumps({"id": f"no {number}"}) if bad else record(number))
            if number == 300:
                stream.wait_for_offset(offset)
                sluice.restart_pod(signal.SIGKILL)
        stream.wait_for_offset(offset)
        stream.close()
        sluice.end()
        rows = sluice.rows()
        self.assertEqual([row["id"] for row in rows], [number for number in range(600) if number % 100 != 50])
        kept = sluice.rows(f"{TABLE}__rejected", without=())
        self.assertEqual([row["_offset"] for row in kept], list(range(50, 600, 100)))
        self.assertEqual(kept[2]["raw"], b'{"id": "no 250"}')
        self.assertEqual((kept[2]["reason"], kept[2]["field"]), ("wrong_type", "id"))

    def test_a_bad_record_ends_the_stream_and_is_named(self):
        for bad, words in [
            ({"id": "one"}, "request 1, record 0, column id"),
            ({"id": 1, "colour": "red"}, "request 1, record 0, column colour"),
        ]:
            with self.subTest(bad=bad):
                self.setUp()
                sluice = self.start()
                acks = Acks()
                stream = open_stream(sluice.gateway.address, ack_callback=acks)
                stream.wait_for_offset(stream.ingest_record_offset(record(1)))
                offset = stream.ingest_record_offset(json.dumps(bad))
                with self.assertRaises(REFUSED) as raised:
                    stream.wait_for_offset(offset)
                self.assertIn(words, str(raised.exception))
                self.assertEqual(len(list(stream.get_unacked_records())), 1)
                failed = [1] if TELLS_FAILURES else []
                acks.wait_for(1 + len(failed))
                self.assertEqual((acks.acked, acks.failed), ([0], failed))
                sluice.end()
                self.assert_rows(sluice, [1])

    def test_what_is_no_json_ends_the_stream_and_is_named(self):
        sluice = self.start()
        stream = open_stream(sluice.gateway.address)
        stream.wait_for_offset(stream.ingest_record_offset(record(1)))
        offset = stream.ingest_records_offset([record(2), "not json at all", record(3)])
        with self.assertRaises(REFUSED) as raised:
            stream.wait_for_offset(offset)
        self.assertIn("request 1, record 1", str(raised.exception))
        self.assertEqual(len(list(stream.get_unacked_records())), 3)
        sluice.end()
        # A request is taken whole or not at all: what the client has left is what is missing.
        self.assert_rows(sluice, [1])

    def test_a_table_that_is_not_there_is_refused_at_once(self):
        sluice = self.start(auto_create=False)
        began = time.monotonic()
        with self.assertRaises(REFUSED) as raised:
            open_stream(sluice.gateway.address)
        self.assertIn("there is no table main.default.readings", str(raised.exception))
        self.assertLess(time.monotonic() - began, 2, "the client tried again")
        sluice.end()

    def test_a_pod_that_is_killed_goes_unseen(self):
        self.assert_gone_unseen("json", signal.SIGKILL)

    @only_in_full
    def test_a_pod_that_is_killed_goes_unseen_to_protobuf(self):
        self.assert_gone_unseen("protobuf", signal.SIGKILL)

    @only_in_full
    def test_a_pod_that_is_drained_goes_unseen(self):
        self.assert_gone_unseen("json", signal.SIGTERM)

    def test_of_two_pods_the_one_with_the_stream_is_drained(self):
        self.assert_goes_on_elsewhere("json", "drain")

    def test_of_two_pods_the_one_with_the_stream_is_killed(self):
        self.assert_goes_on_elsewhere("json", "kill")

    def test_a_gateway_that_is_drained_doubles_nothing(self):
        self.assert_drained_gateway_doubles_nothing("json")

    @only_in_full
    def test_a_gateway_that_is_drained_loses_nothing(self):
        self.assert_drained_gateway_loses_nothing("json")

    @only_in_full
    def test_a_gateway_that_is_drained_loses_no_protobuf(self):
        self.assert_drained_gateway_loses_nothing("protobuf")

    @only_in_full
    def test_a_gateway_that_is_killed_loses_nothing(self):
        self.assert_killed_gateway_loses_nothing("json")

    @only_in_full
    def test_without_recovery_a_lost_gateway_is_told_and_the_rest_can_be_sent_again(self):
        sluice = self.start()
        sdk = connect(sluice.gateway.address)
        stream = sdk.create_stream(**json_options(recovery=False))
        for number in range(50):
            offset = stream.ingest_record_offset(record(number))
        stream.wait_for_offset(offset)
        # Nobody is there to take them.
        sluice.pod.end(signal.SIGKILL)
        for number in range(50, 60):
            offset = stream.ingest_record_offset(record(number))
        sluice.gateway.end(signal.SIGKILL)
        with self.assertRaises(ZerobusException):
            stream.wait_for_offset(offset)
        left = [json.loads(left)["id"] for left in stream.get_unacked_records()]
        self.assertEqual(left, list(range(50, 60)))
        sluice.pod = sluice.start_pod(sluice.pod.address)
        sluice.gateway = sluice.start_gateway(sluice.gateway.address)
        again = sdk.recreate_stream(stream)
        again.flush()
        again.close()
        sluice.end()
        rows = sluice.rows()
        self.assertEqual(sorted(row["id"] for row in rows), list(range(60)))
        self.assert_offsets(rows, streams=2)

    @only_in_full
    def test_without_recovery_a_drained_gateway_keeps_what_it_acked(self):
        sluice = self.start()
        sender = Sender(*opened("json", sluice.gateway.address, recovery=False))
        sender.start()
        sender.wait_for(100)
        self.assertEqual(sluice.gateway.end(), 0)
        sender.join(WAIT_SECONDS)
        self.assertIsInstance(sender.failure, ZerobusException)
        sluice.gateway = sluice.start_gateway("127.0.0.1:0")
        sluice.end()
        ids = [row["id"] for row in sluice.rows()]
        self.assertEqual(ids, list(range(len(ids))))
        self.assertGreaterEqual(len(ids), sender.sent)


class OneConnection(Zerobus):
    def test_streams_share_a_connection_where_they_are_told_to(self):
        for shared, connections in [(True, 1), (False, 3)]:
            with self.subTest(shared=shared):
                self.setUp()
                sluice = self.start()
                sdk = connect(sluice.gateway.address, connection_per_stream=not shared)
                streams = [sdk.create_stream(**json_options()) for _ in range(3)]
                for number in range(300):
                    streams[number % 3].ingest_record_offset(record(number))
                for stream in streams:
                    stream.flush()
                # One more asks.
                self.assertEqual(sluice.metric("sluice_gateway_connections"), connections + 1)
                for stream in streams:
                    stream.close()
                sluice.end()
                rows = sluice.rows()
                self.assertEqual(sorted(row["id"] for row in rows), list(range(300)))
                for at in range(0, 300, 100):
                    ids = [row["id"] for row in rows[at : at + 100]]
                    self.assertEqual(ids, list(range(ids[0], 300, 3)))
                self.assert_offsets(rows, streams=3)


class Avro(Zerobus):
    SCHEMA = json.dumps(
        {
            "type": "record",
            "name": "Reading",
            "fields": [
                {"name": "id", "type": "long"},
                {"name": "name", "type": ["null", "string"]},
                {"name": "at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
            ],
        }
    )

    def test_avro_records_and_batches(self):
        sluice = self.start()
        options = {
            "table_properties": TableProperties(TABLE, avro_schema=self.SCHEMA),
            "options": StreamConfigurationOptions(record_type=RecordType.AVRO),
            "headers_provider": Headers(),
        }
        stream = connect(sluice.gateway.address).create_stream(**options)
        for number in range(200):
            offset = stream.ingest_record_offset({"id": number, "name": f"n{number}", "at": number})
        stream.wait_for_offset(offset)
        batch = [{"id": number, "name": None, "at": 0} for number in range(200, 299)]
        stream.wait_for_offset(stream.ingest_records_offset(batch))
        # Encoded by the producer itself: zigzag longs, the union's first branch.
        stream.ingest_record_offset(b"\xd6\x04\x00\x00")
        stream.flush()
        stream.close()
        sluice.end()
        self.assert_rows(sluice, range(300))
        rows = sluice.rows()
        self.assertEqual((rows[7]["name"], rows[200]["name"]), ("n7", None))
        self.assertEqual(rows[7]["at"].microsecond, 7)


class Async(Zerobus):
    def test_async_records_and_batches(self):
        sluice = self.start()

        async def run():
            sdk = connect(sluice.gateway.address, aio)
            streams = [await sdk.create_stream(**json_options()) for _ in range(3)]

            async def feed(stream, first):
                for number in range(first, first + 90):
                    await stream.ingest_record_offset(record(number))
                batch = [record(number) for number in range(first + 90, first + 100)]
                await stream.wait_for_offset(await stream.ingest_records_offset(batch))
                await stream.flush()
                await stream.close()

            await asyncio.gather(*(feed(stream, 100 * at) for at, stream in enumerate(streams)))

        asyncio.run(run())
        sluice.end()
        rows = sluice.rows()
        self.assertEqual(sorted(row["id"] for row in rows), list(range(300)))
        for at in range(0, 300, 100):
            ids = [row["id"] for row in rows[at : at + 100]]
            self.assertEqual(ids, list(range(ids[0], ids[0] + 100)))
        self.assert_offsets(rows, streams=3)

    def test_async_protobuf(self):
        sluice = self.start()
        message = reading_message()

        async def run():
            stream = await connect(sluice.gateway.address, aio).create_stream(**protobuf_options(message))
            for number in range(200):
                offset = await stream.ingest_record_offset(message(id=number))
            await stream.wait_for_offset(offset)
            await stream.close()

        asyncio.run(run())
        sluice.end()
        self.assert_rows(sluice, range(200))

    def test_async_failures_are_raised_where_they_are_waited_for(self):
        sluice = self.start()

        async def run():
            stream = await connect(sluice.gateway.address, aio).create_stream(**json_options())
            await stream.wait_for_offset(await stream.ingest_record_offset(record(0)))
            offset = await stream.ingest_record_offset(json.dumps({"id": "x"}))
            with self.assertRaises(REFUSED) as raised:
                await stream.wait_for_offset(offset)
            self.assertIn("request 1, record 0, column id", str(raised.exception))

        asyncio.run(run())
        sluice.end()
        self.assert_rows(sluice, [0])


class AsyncArrow(Zerobus):
    def test_async_arrow_batches(self):
        sluice = self.start()

        async def run():
            sdk = connect(sluice.gateway.address, aio)
            stream = await sdk.create_arrow_stream_with_headers_provider(TABLE, ARROW_SCHEMA, ArrowHeaders())
            for first in range(0, 1000, 100):
                offset = await stream.ingest_batch(arrow_batch(first, 100))
            await stream.wait_for_offset(offset)
            await stream.flush()
            await stream.close()

        asyncio.run(run())
        sluice.end()
        self.assert_rows(sluice, range(1000))


class Arrow(Zerobus):
    def send_batches(self, sluice, batches, **options):
        stream = open_arrow_stream(sluice.gateway.address, **options)
        first = 0
        for rows in batches:
            offset = stream.ingest_batch(arrow_batch(first, rows))
            first += rows
        stream.wait_for_offset(offset)
        stream.flush()
        stream.close()
        sluice.end()
        self.assert_rows(sluice, range(first))
        rows = sluice.rows()
        self.assertEqual([rows[at]["name"] for at in (0, first - 1)], ["n0", f"n{first - 1}"])

    def test_small_batches(self):
        self.send_batches(self.start(), [10, 1, 10])

    @only_in_full
    def test_a_batch_of_400_000_rows(self):
        # The client cuts it into some messages of 2 MiB, and tells of one.
        self.send_batches(self.start(), [10, 400_000])

    def test_compressed_batches(self):
        from zerobus.sdk.shared.arrow import IPCCompression

        for compression in ("ZSTD", "LZ4_FRAME"):
            with self.subTest(compression=compression):
                self.setUp()
                compression = getattr(IPCCompression, compression)
                self.send_batches(self.start(), [10, 1, 20_000], ipc_compression=compression)

    def test_a_bad_row_ends_the_stream_and_is_named(self):
        sluice = self.start()
        sluice.create_table(("id", "int64"), ("name", "string", False))
        stream = open_arrow_stream(sluice.gateway.address)
        stream.wait_for_offset(stream.ingest_batch(arrow_batch(0, 10)))
        names = pa.array([f"n{number}" if number != 15 else None for number in range(10, 20)], pa.large_utf8())
        ids = pa.array(range(10, 20), pa.int64())
        offset = stream.ingest_batch(pa.RecordBatch.from_arrays([ids, names], schema=ARROW_SCHEMA))
        with self.assertRaises(REFUSED) as raised:
            stream.wait_for_offset(offset)
        self.assertIn("request 1, record 5, column name", str(raised.exception))
        left = [row["id"] for batch in stream.get_unacked_batches() for row in batch.to_pylist()]
        self.assertEqual(left, list(range(10, 20)))
        sluice.end()
        # A request is taken whole or not at all: what the client has left is what is missing.
        self.assert_rows(sluice, range(10))

    def test_a_schema_that_does_not_fit_is_refused_at_once(self):
        for schema, words in [
            (ARROW_SCHEMA.append(pa.field("colour", pa.large_utf8())), "colour"),
            (pa.schema([("id", pa.large_utf8()), ("name", pa.large_utf8())]), "id"),
            (pa.schema([("id", pa.int64())]), "name"),
        ]:
            with self.subTest(schema=schema):
                self.setUp()
                sluice = self.start()
                sluice.create_table(("id", "int64"), ("name", "string", False))
                began = time.monotonic()
                with self.assertRaises(REFUSED) as raised:
                    open_arrow_stream(sluice.gateway.address, schema)
                self.assertIn(words, str(raised.exception))
                self.assertLess(time.monotonic() - began, 2, "the client tried again")
                sluice.end()

    def test_a_table_that_is_not_there_is_made_of_the_schema(self):
        self.send_batches(self.start(auto_create=False), [10])

    @only_in_full
    def test_a_pod_that_is_killed_goes_unseen(self):
        self.assert_gone_unseen("arrow", signal.SIGKILL)

    @only_in_full
    def test_a_pod_that_is_drained_goes_unseen(self):
        self.assert_gone_unseen("arrow", signal.SIGTERM)

    @only_in_full
    def test_of_two_pods_the_one_with_the_stream_is_drained(self):
        self.assert_goes_on_elsewhere("arrow", "drain")

    @only_in_full
    def test_of_two_pods_the_one_with_the_stream_is_killed(self):
        self.assert_goes_on_elsewhere("arrow", "kill")

    @only_in_full
    def test_a_gateway_that_is_drained_doubles_nothing(self):
        self.assert_drained_gateway_doubles_nothing("arrow")

    @only_in_full
    def test_a_gateway_that_is_drained_loses_nothing(self):
        self.assert_drained_gateway_loses_nothing("arrow")

    @only_in_full
    def test_a_gateway_that_is_killed_loses_nothing(self):
        self.assert_killed_gateway_loses_nothing("arrow")


if sys.argv[1:2] == ["--produce"]:
    produce(sys.argv[2], sys.argv[3], int(sys.argv[4]))
elif sys.argv[1:2] == ["--produce-until-told"]:
    produce_until_told(sys.argv[2], sys.argv[3])
elif __name__ == "__main__":
    without = []
    if not HAS_ARROW:
        without += ["Arrow", "AsyncArrow"]
    if not HAS_AVRO:
        without += ["Avro"]
    if not HAS_SHARED_CONNECTIONS:
        without += ["OneConnection"]
    for name in without:
        del globals()[name]
    print(f"Zerobus SDK {VERSION}" + (f", which has no {', '.join(without)}" if without else ""), flush=True)
    main(__doc__)
