"""Databricks's Rust client against Sluice: `rust-sdk/` does what it is told, this gives the commands and reads the table.

    zerobus_rust_sdk.py SLUICE_BINARY [--short] [TEST…]

`CONFORMANCE_RUST_SDK` names its program.
"""

import os
import re
import signal
import subprocess
import time

from harness import TABLE, WAIT_SECONDS, Case, main, only_in_full

PROGRAM = os.environ.get("CONFORMANCE_RUST_SDK", "target/conformance-rust/debug/conformance-rust-sdk")
# Cases of what the server does not have yet, by class: left out, and named.
NOT_YET = []


class Producer:
    def __init__(self, address):
        self.child = subprocess.Popen(
            [PROGRAM, f"http://{address}", TABLE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            bufsize=1,
        )

    def ask(self, command):
        """Begins a command; `answer` waits for it."""
        self.child.stdin.write(f"{command}\n")

    def answer(self):
        return self.child.stdout.readline().strip()

    def tell(self, command):
        """What it answers to a command that has to succeed."""
        self.ask(command)
        answer = self.answer()
        assert answer.startswith("ok"), f"{command}: {answer or self.child.wait(timeout=WAIT_SECONDS)}"
        return answer.removeprefix("ok").strip()

    def refusal(self, command):
        self.ask(command)
        answer = self.answer()
        assert answer.startswith("error"), f"{command}: {answer}"
        return answer.removeprefix("error ")

    def end(self, how=signal.SIGTERM):
        """As a crash: without closing anything."""
        self.child.send_signal(how)
        self.child.wait(timeout=WAIT_SECONDS)
        self.child.stdin.close()
        self.child.stdout.close()


class RustSdk(Case):
    def producer(self, sluice):
        producer = Producer(sluice.gateway.address)
        self.addCleanup(producer.end)
        return producer


class Ephemeral(RustSdk):
    def test_singles_and_batches(self):
        for kind in ("json", "protobuf"):
            with self.subTest(kind=kind):
                self.setUp()
                sluice = self.start()
                producer = self.producer(sluice)
                producer.tell(f"open {kind}")
                self.assertEqual(producer.tell("send 0 200"), "199")
                producer.tell("wait")
                # One offset for all of it.
                self.assertEqual(producer.tell("batch 200 300"), "200")
                self.assertEqual(producer.tell("send 300 301"), "201")
                producer.tell("flush")
                producer.tell("close")
                sluice.end()
                self.assert_rows(sluice, range(301))

    def test_arrow_batches(self):
        sluice = self.start()
        producer = self.producer(sluice)
        producer.tell("open arrow")
        self.assertEqual(producer.tell("send 0 100"), "99")
        # The client compresses them with ZSTD unless told otherwise.
        self.assertEqual(producer.tell("batch 100 20000"), "100")
        producer.tell("wait")
        producer.tell("close")
        sluice.end()
        self.assert_rows(sluice, range(20_000))

    def assert_multiplexed(self, sluice, sent):
        rows = sluice.rows()
        self.assertEqual(sorted(row["id"] for row in rows), list(range(sent)))
        self.assert_offsets(rows, streams=4)
        by_stream = {}
        for row in rows:
            by_stream.setdefault(row["_stream"], []).append(row["id"])
        # Each in turn gets one, in the order of sending.
        for ids in by_stream.values():
            self.assertEqual(ids, sorted(ids))

    def test_a_multiplexed_producer_has_a_connection_for_each_stream(self):
        for kind in ("json", "protobuf", "arrow"):
            with self.subTest(kind=kind):
                self.setUp()
                sluice = self.start()
                producer = self.producer(sluice)
                producer.tell(f"multiplex {kind} 4")
                self.assertRegex(producer.tell("send 0 400"), r"^\d/99$")
                producer.tell("wait")
                producer.tell("flush")
                # One more asks.
                self.assertEqual(sluice.metric("sluice_gateway_connections"), 5)
                producer.tell("close")
                sluice.end()
                self.assert_multiplexed(sluice, 400)

    @only_in_full
    def test_a_multiplexed_producer_survives_a_drained_gateway(self):
        sluice = self.start()
        producer = self.producer(sluice)
        producer.tell("multiplex json 4")
        producer.tell("send 0 200")
        producer.tell("flush")
        self.assertEqual(sluice.restart_gateway(signal.SIGTERM), 0)
        producer.tell("send 200 400")
        producer.tell("flush")
        producer.tell("close")
        sluice.end()
        rows = sluice.rows()
        self.assertEqual(sorted(row["id"] for row in rows), list(range(400)))
        self.assert_offsets(rows, streams=8)

    def test_a_table_that_is_not_there_is_refused_at_once(self):
        sluice = self.start(auto_create=False)
        producer = self.producer(sluice)
        began = time.monotonic()
        refusal = producer.refusal("open json")
        self.assertIn("there is no table main.default.readings", refusal)
        self.assertLess(time.monotonic() - began, 2, "the client tried again")

    @only_in_full
    def test_a_schema_that_does_not_fit_is_refused_with_its_column(self):
        sluice = self.start()
        sluice.create_table(("id", "string"))
        refusal = self.producer(sluice).refusal("open arrow")
        self.assertIn("id", refusal)
        self.assertIn("schema_mismatch", refusal)

    def assert_pod_gone_unseen(self, kind, how):
        sluice = self.start()
        producer = self.producer(sluice)
        producer.tell(f"open {kind}")
        producer.tell("send 0 500")
        sluice.pod.end(how)
        producer.tell("send 500 1000")
        sluice.pod = sluice.start_pod(sluice.pod.address)
        producer.tell("flush")
        producer.tell("close")
        sluice.end()
        self.assert_rows(sluice, range(1000))

    def test_a_pod_that_is_killed_goes_unseen(self):
        self.assert_pod_gone_unseen("protobuf", signal.SIGKILL)

    @only_in_full
    def test_a_pod_that_is_killed_goes_unseen_to_arrow(self):
        self.assert_pod_gone_unseen("arrow", signal.SIGKILL)

    @only_in_full
    def test_a_pod_that_is_drained_goes_unseen(self):
        self.assert_pod_gone_unseen("json", signal.SIGTERM)

    @only_in_full
    def test_a_gateway_that_is_killed_loses_nothing(self):
        for kind in ("json", "arrow"):
            with self.subTest(kind=kind):
                self.setUp()
                sluice = self.start()
                producer = self.producer(sluice)
                producer.tell(f"open {kind}")
                producer.tell("send 0 300")
                producer.tell("wait")
                producer.tell("send 300 320")
                sluice.gateway.end(signal.SIGKILL)
                producer.tell("send 320 400")
                sluice.gateway = sluice.start_gateway(sluice.gateway.address)
                producer.tell("flush")
                producer.tell("close")
                sluice.end()
                self.assert_sent_again(sluice, range(400), acked=300)


class Persistent(RustSdk):
    """Exactly once: all of one stream, each record once, whatever is lost on the way."""

    def start(self):
        sluice = super().start()
        # It is made of no first record: what could be resumed before there is one?
        sluice.create_table(("id", "int64"))
        return sluice

    def created(self, producer, kind="json"):
        stream, watermark = producer.tell(f"create {kind}").split()
        self.assertEqual(watermark, "none")
        return stream

    def assert_once(self, sluice, values):
        sluice.end()
        self.assert_rows(sluice, values)

    def test_a_stream_is_created_and_resumed(self):
        for kind in ("json", "protobuf"):
            with self.subTest(kind=kind):
                self.setUp()
                sluice = self.start()
                producer = self.producer(sluice)
                stream = self.created(producer, kind)
                self.assertEqual(producer.tell("send 0 6"), "5")
                producer.tell("flush")
                producer.tell("close")
                again = self.producer(sluice)
                self.assertEqual(again.tell(f"resume {stream} {kind}"), f"{stream} 5")
                self.assertEqual(again.tell("send 6 10"), "9")
                again.tell("flush")
                again.tell("close")
                self.assert_once(sluice, range(10))

    def test_a_stream_without_records_is_resumed_at_its_start(self):
        sluice = self.start()
        producer = self.producer(sluice)
        stream = self.created(producer)
        producer.tell("close")
        again = self.producer(sluice)
        self.assertEqual(again.tell(f"resume {stream} json"), f"{stream} none")
        self.assertEqual(again.tell("send 0 3"), "2")
        again.tell("flush")
        again.tell("close")
        self.assert_once(sluice, range(3))

    def test_a_batch_is_one_offset(self):
        sluice = self.start()
        producer = self.producer(sluice)
        stream = self.created(producer)
        self.assertEqual(producer.tell("batch 0 10"), "0")
        self.assertEqual(producer.tell("send 10 11"), "1")
        self.assertEqual(producer.tell("batch 11 20"), "2")
        producer.tell("flush")
        producer.tell("close")
        again = self.producer(sluice)
        self.assertEqual(again.tell(f"resume {stream} json"), f"{stream} 2")
        self.assertEqual(again.tell("batch 20 30"), "3")
        again.tell("flush")
        again.tell("close")
        self.assert_once(sluice, range(30))

    def test_a_stream_that_is_not_known_is_not_found(self):
        sluice = self.start()
        for stream in ("~018f0000000070008000000000000001", "6f1c1b4e-0000-4000-8000-000000000000", "no-such-stream"):
            refusal = self.producer(sluice).refusal(f"resume {stream} json")
            self.assertRegex(refusal, r"NotFound|not found")

    def test_another_record_type_is_refused(self):
        sluice = self.start()
        producer = self.producer(sluice)
        stream = self.created(producer)
        producer.tell("send 0 3")
        producer.tell("flush")
        producer.tell("close")
        refusal = self.producer(sluice).refusal(f"resume {stream} protobuf")
        self.assertRegex(refusal, re.compile("record.type", re.IGNORECASE))
        again = self.producer(sluice)
        self.assertEqual(again.tell(f"resume {stream} json"), f"{stream} 2")
        again.tell("close")
        self.assert_once(sluice, range(3))

    def test_a_producer_that_crashed_sends_again_what_is_missing(self):
        sluice = self.start()
        producer = self.producer(sluice)
        stream = self.created(producer)
        producer.tell("send 0 100")
        producer.tell("wait")
        # These may be there or not when it ends.
        producer.tell("send 100 200")
        producer.end(signal.SIGKILL)
        again = self.producer(sluice)
        resumed, watermark = again.tell(f"resume {stream} json").split()
        self.assertEqual(resumed, stream)
        self.assertGreaterEqual(int(watermark), 99)
        self.assertEqual(again.tell(f"send {int(watermark) + 1} 300"), "299")
        again.tell("flush")
        again.tell("close")
        self.assert_once(sluice, range(300))

    def test_lost_acks_are_reconciled(self):
        # Of what was on its way when a gateway is killed some is in the log without an ack: it is not written again.
        sluice = self.start()
        producer = self.producer(sluice)
        self.created(producer)
        for first in range(0, 500, 100):
            producer.tell(f"send {first} {first + 100}")
            sluice.restart_gateway(signal.SIGKILL)
        producer.tell("flush")
        producer.tell("close")
        self.assert_once(sluice, range(500))

    @only_in_full
    def test_a_gateway_that_is_drained_doubles_nothing(self):
        sluice = self.start()
        producer = self.producer(sluice)
        self.created(producer)
        producer.tell("send 0 100")
        self.assertEqual(sluice.restart_gateway(signal.SIGTERM), 0)
        producer.tell("send 100 200")
        producer.tell("flush")
        producer.tell("close")
        self.assert_once(sluice, range(200))

    @only_in_full
    def test_a_pod_that_is_killed_doubles_nothing(self):
        sluice = self.start()
        producer = self.producer(sluice)
        stream = self.created(producer)
        for first in range(0, 300, 100):
            producer.tell(f"send {first} {first + 100}")
            sluice.restart_pod(signal.SIGKILL)
        producer.tell("flush")
        producer.tell("close")
        # The whole service at once.
        sluice.gateway.end(signal.SIGKILL)
        sluice.restart_pod(signal.SIGKILL)
        sluice.gateway = sluice.start_gateway("127.0.0.1:0")
        again = self.producer(sluice)
        self.assertEqual(again.tell(f"resume {stream} json"), f"{stream} 299")
        again.tell("send 300 310")
        again.tell("flush")
        again.tell("close")
        self.assert_once(sluice, range(310))

    def test_streams_are_apart(self):
        sluice = self.start()
        first, second = self.producer(sluice), self.producer(sluice)
        streams = [self.created(first), self.created(second)]
        self.assertNotEqual(*streams)
        first.tell("send 0 10")
        second.tell("send 10 30")
        for producer in (first, second):
            producer.tell("flush")
            producer.tell("close")
        again = self.producer(sluice)
        self.assertEqual(again.tell(f"resume {streams[0]} json"), f"{streams[0]} 9")
        again.tell("close")
        sluice.end()
        rows = sluice.rows()
        self.assertEqual(sorted(row["id"] for row in rows), list(range(30)))
        self.assert_offsets(rows, streams=2)


if __name__ == "__main__":
    for name in NOT_YET:
        cases = [case for case in vars(globals()[name]) if case.startswith("test_")]
        print(f"not yet: {name} ({len(cases)} cases)", flush=True)
        del globals()[name]
    main(__doc__)
