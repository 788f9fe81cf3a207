"""Zerobus's gRPC by hand, over `grpcio`: what Databricks's own clients would not send, and what they do not show.

    zerobus_wire.py SLUICE_BINARY [--short] [TEST…]
"""

import queue
import signal
import threading
import time

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from harness import TABLE, WAIT_SECONDS, Case, main, only_in_full

EPHEMERAL = "/databricks.zerobus.Zerobus/EphemeralStream"
TABLE_HEADER = ("x-databricks-zerobus-table-name", TABLE)
UNSPECIFIED, PROTO, JSON, AVRO = 0, 1, 2, 4


def messages():
    """The messages of the protocol that are used here, made so that no compiler is needed."""
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="zerobus.proto", package="wire", syntax="proto2")

    def message(name, *fields, oneof=None):
        made = file.message_type.add(name=name)
        if oneof:
            made.oneof_decl.add(name=oneof)
        for number, field_name, kind in fields:
            one = made.field.add(name=field_name, number=number, label=field.LABEL_OPTIONAL)
            if isinstance(kind, str):
                one.type, one.type_name = field.TYPE_MESSAGE, f".wire.{kind}"
            else:
                one.type = kind
            if kind == field.TYPE_STRING and field_name == "records":
                one.label = field.LABEL_REPEATED
            elif oneof:
                one.oneof_index = 0
        return name

    text, data, whole = field.TYPE_STRING, field.TYPE_BYTES, field.TYPE_INT64
    message("Create", (1, "table_name", text), (3, "descriptor_proto", data), (4, "record_type", field.TYPE_INT32))
    message("Record", (1, "offset_id", whole), (2, "proto_encoded_record", data), (3, "json_record", text))
    message("JsonBatch", (1, "records", text))
    message("Batch", (1, "offset_id", whole), (3, "json_batch", "JsonBatch"))
    message("Request", (1, "create_stream", "Create"), (2, "ingest_record", "Record"), (3, "ingest_record_batch", "Batch"))
    message("Created", (1, "stream_id", text))
    message("Acked", (1, "up_to", whole))
    message("Duration", (1, "seconds", whole), (2, "nanos", field.TYPE_INT32))
    message("Close", (1, "duration", "Duration"))
    message("Response", (1, "created", "Created"), (2, "acked", "Acked"), (3, "close", "Close"), oneof="payload")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"wire.{name}"))
        for name in (made.name for made in file.message_type)
    }


M = messages()
Request, Response = M["Request"], M["Response"]


def create(record_type=JSON, table=TABLE, **more):
    return Request(create_stream=M["Create"](table_name=table, record_type=record_type, **more))


def record(offset, text):
    return Request(ingest_record=M["Record"](offset_id=offset, json_record=text))


def batch(offset, *texts):
    return Request(ingest_record_batch=M["Batch"](offset_id=offset, json_batch=M["JsonBatch"](records=texts)))


class Call:
    """One call: requests go when they are sent, answers are waited for."""

    END = object()

    def __init__(self, address, headers=(TABLE_HEADER,)):
        options = [("grpc.max_send_message_length", -1)]
        self.channel = grpc.insecure_channel(address, options)
        self.requests = queue.Queue()
        open_call = self.channel.stream_stream(
            EPHEMERAL, request_serializer=lambda request: request.SerializeToString(), response_deserializer=self.read
        )
        self.call = open_call(iter(self.requests.get, self.END), metadata=headers, timeout=WAIT_SECONDS)

    @staticmethod
    def read(data):
        return Response.FromString(data)

    def send(self, *requests):
        for request in requests:
            self.requests.put(request)

    def finish(self):
        self.requests.put(self.END)

    def next(self):
        return next(self.call)

    def open(self, **terms):
        self.send(create(**terms))
        return self.next().created.stream_id

    def acks(self):
        """All that come until the call ends well."""
        return [answer.acked.up_to for answer in self.call]

    def failure(self):
        """Code and message of a call that ends badly, after whatever else it answers."""
        try:
            for _ in self.call:
                pass
        except grpc.RpcError as error:
            return error.code(), error.details()
        raise AssertionError("the call ended well")

    def close(self):
        self.finish()
        self.call.cancel()
        self.channel.close()


class Wire(Case):
    def call(self, sluice, **options):
        call = Call(sluice.gateway.address, **options)
        self.addCleanup(call.close)
        self.last = call
        return call

    def end(self, sluice):
        # An idle channel looks at its socket every five seconds only, and has to answer when the gateway drains.
        self.last.close()
        sluice.end()

    def test_headers_are_answered_before_the_first_message(self):
        sluice = self.start()
        call = self.call(sluice)
        # Nothing has been sent. Clients wait for this before they send anything.
        self.assertIsNotNone(call.call.initial_metadata())
        self.assertRegex(call.open(), r"^~[0-9a-f]{32}$")

    def test_acks_count_requests_and_never_go_back(self):
        sluice = self.start()
        call = self.call(sluice)
        call.open()
        sent = 0
        for offset in range(0, 400, 2):
            call.send(record(offset, f'{{"id":{sent}}}'))
            call.send(batch(offset + 1, f'{{"id":{sent + 1}}}', f'{{"id":{sent + 2}}}'))
            sent += 3
        call.finish()
        acks = call.acks()
        self.assertEqual(acks, sorted(acks))
        self.assertTrue(all(0 <= ack < 400 for ack in acks), acks)
        self.assertEqual(acks[-1], 399)
        self.assertEqual(call.call.code(), grpc.StatusCode.OK)
        self.end(sluice)
        self.assert_rows(sluice, range(sent))

    def test_an_empty_batch_is_acked_in_its_turn(self):
        sluice = self.start()
        call = self.call(sluice)
        call.open()
        call.send(batch(0), record(1, '{"id":0}'), batch(2), batch(3))
        call.finish()
        self.assertEqual(call.acks()[-1], 3)
        self.end(sluice)
        self.assert_rows(sluice, [0])

    def test_what_is_out_of_order_is_refused(self):
        for offsets, words in [
            ([0, 2], "Non-incremental offset: expected 1, actual 2"),
            ([1], "Non-incremental offset: expected 0, actual 1"),
            ([0, 0], "Non-incremental offset: expected 1, actual 0"),
            ([None], "without `offset_id`"),
        ]:
            with self.subTest(offsets=offsets):
                self.setUp()
                sluice = self.start()
                call = self.call(sluice)
                call.open()
                call.send(*(record(offset, '{"id":0}') for offset in offsets))
                code, message = call.failure()
                self.assertEqual(code, grpc.StatusCode.INVALID_ARGUMENT)
                self.assertIn(words, message)

    def test_wrong_record_types_are_refused(self):
        binary = Request(ingest_record=M["Record"](offset_id=0, proto_encoded_record=b"\x08\x01"))
        nothing = Request(ingest_record=M["Record"](offset_id=0))
        for first, then, words in [
            (create(UNSPECIFIED), None, "record_type"),
            (create(3), None, "record_type"),
            (create(PROTO), None, "descriptor_proto"),
            (create(PROTO, descriptor_proto=b"\xff"), None, "descriptor"),
            (create(AVRO), None, "avro_schema_json"),
            (create(), binary, "record_type"),
            (create(), nothing, "record_type"),
            (create(), create(), "a call carries one stream"),
            (create(), Request(), "not known"),
            (record(0, "{}"), None, "create_stream"),
            (create(table="main.default.other"), None, "they must agree"),
            (create(table="a b"), None, "table"),
        ]:
            with self.subTest(words=words, first=first):
                self.setUp()
                sluice = self.start()
                call = self.call(sluice)
                call.send(first)
                if then is not None:
                    self.assertTrue(call.next().created.stream_id)
                    call.send(then)
                code, message = call.failure()
                self.assertEqual(code, grpc.StatusCode.INVALID_ARGUMENT, message)
                self.assertIn(words, message)
                self.assertFalse(sluice.has_table("main.default.other"))
                self.end(sluice)

    def test_a_message_over_the_limit_is_refused_for_good(self):
        sluice = self.start()
        call = self.call(sluice)
        call.open()
        call.send(record(0, '{"id":0}'))
        self.assertEqual(call.next().acked.up_to, 0)
        call.send(record(1, f'{{"id":"{"x" * (12 << 20)}"}}'))
        code, message = call.failure()
        # Clients take both for permanent.
        self.assertIn(code, (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE), message)
        self.end(sluice)
        self.assert_rows(sluice, [0])

    def test_methods_that_are_not_there_say_so(self):
        sluice = self.start()
        channel = grpc.insecure_channel(sluice.gateway.address)
        self.addCleanup(channel.close)
        for path in ("/databricks.zerobus.Zerobus/NoSuchCall", "/no.such.Service/Call"):
            with self.assertRaises(grpc.RpcError) as raised:
                channel.unary_unary(path)(b"", timeout=WAIT_SECONDS)
            self.assertEqual(raised.exception.code(), grpc.StatusCode.UNIMPLEMENTED, path)

    def test_a_gateway_that_drains_signals_acks_all_and_ends_well(self):
        sluice = self.start()
        call = self.call(sluice)
        call.open()
        call.send(*(record(offset, f'{{"id":{offset}}}') for offset in range(100)))
        while call.next().acked.up_to < 99:
            pass
        draining = threading.Thread(target=sluice.gateway.end)
        draining.start()
        answer = call.next()
        self.assertEqual(answer.WhichOneof("payload"), "close")
        self.assertGreater(answer.close.duration.seconds * 1000 + answer.close.duration.nanos, 0)
        # After the signal some more can come, and are taken.
        call.send(*(record(offset, f'{{"id":{offset}}}') for offset in range(100, 110)))
        while call.next().acked.up_to < 109:
            pass
        call.finish()
        self.assertEqual(call.acks(), [])
        self.assertEqual(call.call.code(), grpc.StatusCode.OK)
        draining.join(WAIT_SECONDS)
        self.assertEqual(sluice.gateway.child.returncode, 0)
        sluice.pod.end()
        self.assert_rows(sluice, range(110))

    def test_a_call_that_is_cancelled_keeps_what_was_acked(self):
        sluice = self.start()
        call = self.call(sluice)
        call.open()
        call.send(*(record(offset, f'{{"id":{offset}}}') for offset in range(100)))
        while call.next().acked.up_to < 99:
            pass
        call.call.cancel()
        self.end(sluice)
        self.assert_rows(sluice, range(100))

    @only_in_full
    def test_a_failure_that_may_pass_is_told_late(self):
        # Clients reconnect at once: some hundreds of times a second, were they told at once.
        sluice = self.start(settings={"unavailable_timeout_ms": 500})
        call = self.call(sluice)
        call.open()
        sluice.pod.end(signal.SIGKILL)
        began = time.monotonic()
        call.send(record(0, "{}"))
        code, _ = call.failure()
        self.assertEqual(code, grpc.StatusCode.UNAVAILABLE)
        self.assertGreater(time.monotonic() - began, 1)


if __name__ == "__main__":
    main(__doc__)
