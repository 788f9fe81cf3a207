"""Databricks's Zerobus client, unchanged, against Sluice: only the endpoint is ours.

    zerobus_clients.py SLUICE_BINARY [TEST…]

Each case starts a gateway and a pod of its own on free ports, and reads the Delta table back with `deltalake`.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import unittest
import urllib.request

# The client logs what the cases make go wrong on purpose.
os.environ.setdefault("RUST_LOG", "off")

import pyarrow as pa
import trustme
from deltalake import DeltaTable
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from zerobus.sdk.shared import (
    HeadersProvider,
    NonRetriableException,
    RecordType,
    StreamConfigurationOptions,
    TableProperties,
)
from zerobus.sdk.sync import ZerobusSdk

SLUICE = "target/debug/sluice"
TABLE = "main.default.readings"
START_SECONDS = 60


class Headers(HeadersProvider):
    def get_headers(self):
        return [("authorization", "Bearer any"), ("x-databricks-zerobus-table-name", TABLE)]


class Process:
    """A child, its output in a file, and the address that it printed."""

    def __init__(self, name, directory, *args, environment=None):
        self.log = os.path.join(directory, f"{name}.log")
        self.file = open(self.log, "a")
        at = self.file.tell()
        environment = {**os.environ, **(environment or {})}
        self.child = subprocess.Popen(
            [SLUICE, *args], stdout=self.file, stderr=subprocess.STDOUT, env=environment
        )
        deadline = time.monotonic() + START_SECONDS
        while True:
            with open(self.log) as log:
                log.seek(at)
                said = log.read()
            found = re.search(r"listens on (?:wss?://)?(127\.0\.0\.1:\d+)", said)
            if found:
                self.address = found[1]
                return
            if self.child.poll() is not None or time.monotonic() > deadline:
                self.end(signal.SIGKILL)
                raise AssertionError(f"{name} did not start:\n{said}")
            time.sleep(0.02)

    def end(self, how=signal.SIGTERM):
        if self.child.poll() is None:
            self.child.send_signal(how)
        status = self.child.wait(timeout=START_SECONDS)
        self.file.close()
        return status


class Sluice:
    def __init__(self, directory, auto_create=True, config=None, tls=None):
        self.directory, self.auto_create, self.config, self.tls = directory, auto_create, config, tls
        self.pod = self.start_pod("127.0.0.1:0")
        self.gateway = self.start_gateway("127.0.0.1:0")

    def start_pod(self, listen):
        flags = ["--auto-create"] if self.auto_create else []
        return Process("pod", self.directory, "pod", "--listen", listen, "--data", self.directory, *flags)

    def start_gateway(self, listen):
        pod = f"pod-1={self.pod.address}"
        config = ["--config", self.config] if self.config else []
        if self.tls is None:
            return Process("gateway", self.directory, *config, "gateway", "--listen", listen, "--pod", pod)
        environment = {
            "SLUICE_GATEWAY__TLS_CERT": self.tls.certificate,
            "SLUICE_GATEWAY__TLS_KEY": self.tls.key,
            "SLUICE_GATEWAY__QUIC_LISTEN": "off",
        }
        flags = ["--listen", "off", "--tls-listen", listen, "--pod", pod]
        return Process("gateway", self.directory, *config, "gateway", *flags, environment=environment)

    def end(self):
        statuses = [self.gateway.end(), self.pod.end()]
        assert statuses == [0, 0], f"drained with {statuses}"

    def rows(self):
        """Of each stream in turn, in order: offset and columns."""
        table = DeltaTable(os.path.join(self.directory, "tables", *TABLE.split(".")))
        rows = table.to_pyarrow_table().to_pylist()
        return sorted(rows, key=lambda row: (row["_stream"], row["_offset"]))


class Authority:
    """An authority that nobody but the producers of a case knows, and a certificate of it for this machine."""

    def __init__(self, directory):
        self.file, self.certificate, self.key = (
            os.path.join(directory, name) for name in ("authority.crt", "gateway.crt", "gateway.key")
        )
        authority = trustme.CA()
        issued = authority.issue_cert("localhost", "127.0.0.1")
        authority.cert_pem.write_to_path(self.file)
        issued.private_key_pem.write_to_path(self.key)
        for blob in issued.cert_chain_pems:
            blob.write_to_path(self.certificate, append=True)


def open_stream(address, **options):
    sdk = ZerobusSdk(f"http://{address}", f"http://{address}")
    options = StreamConfigurationOptions(record_type=RecordType.JSON, **options)
    return sdk.create_stream(
        table_properties=TableProperties(TABLE), options=options, headers_provider=Headers()
    )


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


# A producer in a process of its own, so that what its client logs can be read.
PRODUCER = """
import json, time
import importlib.util
spec = importlib.util.spec_from_file_location("conformance", {script!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
stream = module.open_stream({address!r})
print("open", flush=True)
for number in range({records}):
    offset = stream.ingest_record_offset(json.dumps({{"id": number}}))
    if number % 100 == 0:
        print("sent", number, flush=True)
        time.sleep(0.02)
stream.wait_for_offset(offset)
stream.flush()
stream.close()
print("closed", flush=True)
"""


# Producers over TLS: whom a client trusts is read from the environment of its process.
TLS_PRODUCERS = {
    "grpc": """
        import json, sys
        from zerobus.sdk.shared import RecordType, StreamConfigurationOptions, TableProperties
        options = StreamConfigurationOptions(
            record_type=RecordType.JSON, recovery_retries=1, recovery_backoff_ms=200, recovery_timeout_ms=3000
        )
        stream = sdk.create_stream(
            table_properties=TableProperties(module.TABLE), options=options, headers_provider=module.Headers()
        )
        for number in range(1000):
            offset = stream.ingest_record_offset(json.dumps({"id": number}))
        stream.wait_for_offset(offset)
        stream.close()
    """,
    "arrow": """
        import pyarrow as pa
        schema = pa.schema([("id", pa.int64())])
        stream = sdk.create_arrow_stream_with_headers_provider(module.TABLE, schema, module.Headers())
        for first in range(0, 1000, 100):
            ids = pa.array(range(first, first + 100), pa.int64())
            offset = stream.ingest_batch(pa.RecordBatch.from_arrays([ids], schema=schema))
        stream.wait_for_offset(offset)
        stream.close()
    """,
}
TLS_SDK = """
import importlib.util
spec = importlib.util.spec_from_file_location("conformance", {script!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
sdk = module.ZerobusSdk({url!r}, {url!r})
"""


class Case(unittest.TestCase):
    """Starts what a case needs, and ends it."""

    def setUp(self):
        self.scratch = tempfile.TemporaryDirectory()
        self.addCleanup(self.scratch.cleanup)

    def start(self, **options):
        sluice = Sluice(self.scratch.name, **options)
        self.addCleanup(sluice.pod.end, signal.SIGKILL)
        self.addCleanup(sluice.gateway.end, signal.SIGKILL)
        return sluice


class Conformance(Case):
    def test_records_batches_flush_and_close(self):
        sluice = self.start()
        stream = open_stream(sluice.gateway.address)
        offset = [stream.ingest_record_offset(json.dumps({"id": n, "name": f"n{n}"})) for n in range(500)][-1]
        stream.wait_for_offset(offset)
        batch = [json.dumps({"id": 500 + n, "name": "batch"}, indent=1) for n in range(100)]
        stream.wait_for_offset(stream.ingest_records_offset(batch))
        stream.ingest_record_offset({"id": 600, "name": "a dictionary"})
        stream.flush()
        stream.close()
        sluice.end()
        rows = sluice.rows()
        self.assertEqual([row["id"] for row in rows], list(range(601)))
        self.assertEqual([row["_offset"] for row in rows], list(range(601)))
        self.assertEqual(len({row["_stream"] for row in rows}), 1)

    def test_protobuf_records_and_batches(self):
        sluice = self.start()
        sdk = ZerobusSdk(f"http://{sluice.gateway.address}", f"http://{sluice.gateway.address}")
        message = reading_message()
        options = StreamConfigurationOptions(record_type=RecordType.PROTO)
        stream = sdk.create_stream(
            table_properties=TableProperties(TABLE, message.DESCRIPTOR), options=options, headers_provider=Headers()
        )
        for number in range(300):
            offset = stream.ingest_record_offset(message(id=number, name=f"n{number}", celsius=number / 2))
        stream.wait_for_offset(offset)
        batch = [message(id=300 + number).SerializeToString() for number in range(100)]
        stream.wait_for_offset(stream.ingest_records_offset(batch))
        stream.close()
        sluice.end()
        rows = sluice.rows()
        self.assertEqual([row["id"] for row in rows], list(range(400)))
        self.assertEqual((rows[7]["name"], rows[7]["celsius"], rows[300]["name"]), ("n7", 3.5, None))

    def test_arrow_batches(self):
        sluice = self.start()
        sdk = ZerobusSdk(f"http://{sluice.gateway.address}", f"http://{sluice.gateway.address}")
        schema = pa.schema([("id", pa.int64()), ("name", pa.large_utf8())])
        stream = sdk.create_arrow_stream_with_headers_provider(TABLE, schema, Headers())
        for first, rows in [(0, 10), (10, 1), (11, 150_000)]:
            ids = pa.array(range(first, first + rows), pa.int64())
            names = pa.array([f"n{n}" for n in range(rows)], pa.large_utf8())
            offset = stream.ingest_batch(pa.RecordBatch.from_arrays([ids, names], schema=schema))
        stream.wait_for_offset(offset)
        stream.flush()
        stream.close()
        sluice.end()
        self.assertEqual([row["id"] for row in sluice.rows()], list(range(150_011)))

    def produce_over_tls(self, kind, url, trusted):
        code = TLS_SDK.format(script=os.path.abspath(__file__), url=url) + textwrap.dedent(TLS_PRODUCERS[kind])
        environment = {**os.environ, "SSL_CERT_FILE": trusted, "no_proxy": "127.0.0.1,localhost"}
        return subprocess.run(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            text=True,
            timeout=2 * START_SECONDS,
        )

    def check_tls(self, kind, host):
        authority = Authority(self.scratch.name)
        sluice = self.start(tls=authority)
        url = f"https://{host}:{sluice.gateway.address.rsplit(':', 1)[1]}"
        produced = self.produce_over_tls(kind, url, authority.file)
        self.assertEqual(produced.returncode, 0, produced.stdout)
        sluice.end()
        self.assertEqual([row["id"] for row in sluice.rows()], list(range(1000)))

    def test_records_over_tls_with_a_private_authority(self):
        self.check_tls("grpc", "localhost")

    def test_arrow_batches_over_tls_with_a_private_authority(self):
        self.check_tls("arrow", "127.0.0.1")

    def test_a_bad_record_ends_the_stream_and_is_named(self):
        sluice = self.start()
        stream = open_stream(sluice.gateway.address)
        stream.wait_for_offset(stream.ingest_record_offset(json.dumps({"id": 1})))
        offset = stream.ingest_record_offset(json.dumps({"id": "one"}))
        with self.assertRaises(NonRetriableException) as raised:
            stream.wait_for_offset(offset)
        self.assertIn("request 1, record 0, column id", str(raised.exception))
        self.assertEqual(len(list(stream.get_unacked_records())), 1)
        sluice.end()
        self.assertEqual([row["id"] for row in sluice.rows()], [1])

    def test_a_table_that_is_not_there_is_refused_at_once(self):
        sluice = self.start(auto_create=False)
        began = time.monotonic()
        with self.assertRaises(NonRetriableException) as raised:
            open_stream(sluice.gateway.address)
        self.assertIn("there is no table main.default.readings", str(raised.exception))
        self.assertLess(time.monotonic() - began, 2, "the client tried again")
        sluice.end()

    def test_a_pod_that_is_killed_goes_unseen(self):
        sluice = self.start()
        records = 3000
        code = PRODUCER.format(script=os.path.abspath(__file__), address=sluice.gateway.address, records=records)
        environment = {**os.environ, "RUST_LOG": "databricks_zerobus_ingest_sdk=info"}
        producer = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            text=True,
        )
        self.addCleanup(producer.kill)
        log = []
        for line in producer.stdout:
            log.append(line)
            if line.startswith("sent 1000"):
                sluice.pod.end(signal.SIGKILL)
                sluice.pod = sluice.start_pod(sluice.pod.address)
                self.addCleanup(sluice.pod.end, signal.SIGKILL)
        self.assertEqual(producer.wait(timeout=START_SECONDS), 0, "".join(log))
        producer.stdout.close()
        opened = [line for line in log if "Successfully opened stream" in line]
        self.assertEqual(len(opened), 1, "".join(log))
        sluice.end()
        self.assertEqual([row["id"] for row in sluice.rows()], list(range(records)))

    def test_a_gateway_that_goes_away_loses_nothing(self):
        sluice = self.start()
        stream = open_stream(sluice.gateway.address, recovery_backoff_ms=200)
        for number in range(200):
            offset = stream.ingest_record_offset(json.dumps({"id": number}))
        address = sluice.gateway.address
        self.assertEqual(sluice.gateway.end(), 0)
        sluice.gateway = sluice.start_gateway(address)
        self.addCleanup(sluice.gateway.end, signal.SIGKILL)
        for number in range(200, 400):
            offset = stream.ingest_record_offset(json.dumps({"id": number}))
        stream.wait_for_offset(offset)
        stream.close()
        sluice.end()
        # A new stream for the rest: at least once is what these clients ask for. Nothing had to come twice here.
        self.assertEqual(sorted(row["id"] for row in sluice.rows()), list(range(400)))


class Tokens(unittest.TestCase):
    """A gateway that asks for tokens, and the client's own way to get them."""

    def setUp(self):
        self.scratch = tempfile.TemporaryDirectory()
        self.addCleanup(self.scratch.cleanup)
        made = subprocess.run([SLUICE, "secret"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
        self.secret, hashed = (line.split()[1] for line in made.stdout.splitlines())
        key = os.path.join(self.scratch.name, "token.key")
        with open(os.open(key, os.O_CREAT | os.O_WRONLY, 0o600), "w") as file:
            file.write(os.urandom(32).hex())
        config = os.path.join(self.scratch.name, "sluice.toml")
        grants = [f'{{ tables = "{TABLE}", privileges = ["write", "create", "describe"] }}']
        with open(config, "w") as file:
            file.write(f"""[gateway]
token_key = "{key}"
[[gateway.clients]]
id = "plant"
secret_sha256 = "{hashed}"
grants = [{", ".join(grants)}]
""")
        self.sluice = Sluice(self.scratch.name, config=config)
        self.addCleanup(self.sluice.pod.end, signal.SIGKILL)
        self.addCleanup(self.sluice.gateway.end, signal.SIGKILL)
        self.url = f"http://{self.sluice.gateway.address}"
        self.sdk = ZerobusSdk(self.url, self.url)

    def errors(self):
        """How often the gateway refused, by code."""
        with urllib.request.urlopen(f"{self.url}/metrics") as answer:
            text = answer.read().decode()
        return dict(re.findall(r'sluice_gateway_errors_total\{code="(\w+)"\} (\d+)', text))

    def put(self, spec):
        token = self.token()
        request = urllib.request.Request(f"{self.url}/v1/tables/{TABLE}", json.dumps(spec).encode(), method="PUT")
        request.add_header("Authorization", f"Bearer {token}")
        with urllib.request.urlopen(request) as answer:
            self.assertEqual(answer.status, 201)

    def token(self):
        form = f"grant_type=client_credentials&client_id=plant&client_secret={self.secret}"
        with urllib.request.urlopen(f"{self.url}/oidc/v1/token", form.encode()) as answer:
            return json.load(answer)["access_token"]

    def test_json_records_with_a_client_id_and_secret(self):
        options = StreamConfigurationOptions(record_type=RecordType.JSON)
        stream = self.sdk.create_stream("plant", self.secret, TableProperties(TABLE), options)
        offset = [stream.ingest_record_offset(json.dumps({"id": n})) for n in range(100)][-1]
        stream.wait_for_offset(offset)
        stream.close()
        self.sluice.end()
        self.assertEqual([row["id"] for row in self.sluice.rows()], list(range(100)))

    def test_arrow_batches_with_a_client_id_and_secret(self):
        schema = pa.schema([("id", pa.int64())])
        stream = self.sdk.create_arrow_stream(TABLE, schema, "plant", self.secret)
        batch = pa.RecordBatch.from_arrays([pa.array(range(1000), pa.int64())], schema=schema)
        stream.wait_for_offset(stream.ingest_batch(batch))
        stream.close()
        self.sluice.end()
        self.assertEqual([row["id"] for row in self.sluice.rows()], list(range(1000)))

    def test_a_wrong_secret_is_refused_for_good(self):
        options = StreamConfigurationOptions(record_type=RecordType.JSON)
        began = time.monotonic()
        with self.assertRaises(NonRetriableException) as raised:
            self.sdk.create_stream("plant", "sluice_secret_wrong", TableProperties(TABLE), options)
        self.assertNotIn("sluice_secret_wrong", str(raised.exception))
        self.assertLess(time.monotonic() - began, 5, "the client tried again")
        self.assertIn("invalid_client", self.errors())
        self.sluice.end()

    def test_a_bad_token_is_asked_for_once_more_and_then_refused_for_good(self):
        with self.assertRaises(NonRetriableException):
            open_stream(self.sluice.gateway.address)
        self.assertEqual(self.errors(), {"token_invalid": "2"})
        self.sluice.end()

    def test_a_table_without_a_grant_is_refused_by_the_name_of_the_privilege(self):
        options = StreamConfigurationOptions(record_type=RecordType.JSON)
        with self.assertRaises(NonRetriableException) as raised:
            self.sdk.create_stream("plant", self.secret, TableProperties("main.default.others"), options)
        self.assertIn("lacks the privilege", str(raised.exception))
        self.assertIn("main.default.others", str(raised.exception))
        self.sluice.end()

    def test_a_schema_that_does_not_fit_is_refused_by_name(self):
        self.put({"schema": {"fields": [{"name": "id", "type": "int64"}]}})
        schema = pa.schema([("id", pa.large_utf8())])
        with self.assertRaises(NonRetriableException) as raised:
            self.sdk.create_arrow_stream(TABLE, schema, "plant", self.secret)
        # The client's own words for an error whose details name the causes.
        self.assertIn("schema does not match the target table", str(raised.exception))
        self.assertIn("schema_mismatch", str(raised.exception))
        self.sluice.end()

    def test_a_proto_file_is_generated_from_the_table(self):
        fields = [
            {"name": "id", "type": "int64", "nullable": False},
            {"name": "name", "type": "string"},
            {"name": "tags", "type": "list<string>"},
            {"name": "counts", "type": "map<string,int64>"},
            {"name": "place", "type": "struct<lat: float64, lon: float64>"},
            {"name": "at", "type": "timestamp"},
        ]
        self.put({"schema": {"fields": fields}})
        output = os.path.join(self.scratch.name, "reading.proto")
        tool = [sys.executable, "-m", "zerobus.tools.generate_proto", "--uc-endpoint", self.url, "--client-id", "plant"]
        tool += ["--client-secret", self.secret, "--table", TABLE, "--output", output, "--proto-msg", "Reading"]
        ran = subprocess.run(tool, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.assertEqual(ran.returncode, 0, ran.stdout)
        with open(output) as file:
            lines = [line.strip() for line in file]
        for line in [
            "message Reading {",
            "required int64 id = 1;",
            "optional string name = 2;",
            "repeated string tags = 3;",
            "map<string, int64> counts = 4;",
            "message Place {",
            "optional double lat = 1;",
            "optional Place place = 5;",
            "optional int64 at = 6;",
        ]:
            self.assertIn(line, lines)
        tool[tool.index(TABLE)] = "main.default.others"
        ran = subprocess.run(tool, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.assertEqual(ran.returncode, 1, ran.stdout)
        self.assertIn("403", ran.stdout)
        self.sluice.end()


if __name__ == "__main__":
    SLUICE = sys.argv.pop(1)
    unittest.main(verbosity=2)
