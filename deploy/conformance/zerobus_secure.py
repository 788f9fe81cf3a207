"""Databricks's Zerobus client, unchanged, over TLS and with tokens: an authority of our own, client ids and secrets.

    zerobus_secure.py SLUICE_BINARY [--short] [TEST…]
"""

import json
import os
import re
import subprocess
import sys
import textwrap
import time
import urllib.request

# The client logs what the cases make go wrong on purpose.
os.environ.setdefault("RUST_LOG", "off")

import harness
import pyarrow as pa
import trustme
from harness import START_SECONDS, TABLE, Case, main
from zerobus.sdk.shared import (
    HeadersProvider,
    NonRetriableException,
    RecordType,
    StreamConfigurationOptions,
    TableProperties,
)
from zerobus.sdk.sync import ZerobusSdk


class Headers(HeadersProvider):
    def get_headers(self):
        return [("authorization", "Bearer any"), ("x-databricks-zerobus-table-name", TABLE)]


class Authority:
    """An authority that nobody but the producers of a case knows, and a certificate of it for this machine."""

    def __init__(self, directory):
        self.file, self.certificate, self.key = (
            os.path.join(directory, name) for name in ("authority.crt", "gateway.crt", "gateway.key")
        )
        authority = trustme.CA()
        issued = authority.issue_cert("localhost", "127.0.0.1")
        authority.cert_pem.write_to_path(self.file)
        # A key that others can read is refused.
        with open(os.open(self.key, os.O_CREAT | os.O_WRONLY, 0o600), "wb") as file:
            file.write(issued.private_key_pem.bytes())
        for blob in issued.cert_chain_pems:
            blob.write_to_path(self.certificate, append=True)


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


class Tls(Case):
    """A gateway that is reached over TLS alone."""

    def produce_over_tls(self, kind, url, trusted):
        code = TLS_SDK.format(script=os.path.abspath(__file__), url=url) + textwrap.dedent(TLS_PRODUCERS[kind])
        here = os.path.dirname(os.path.abspath(__file__))
        environment = {**os.environ, "SSL_CERT_FILE": trusted, "no_proxy": "127.0.0.1,localhost", "PYTHONPATH": here}
        return subprocess.run(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            text=True,
            timeout=2 * START_SECONDS,
        )

    def check_tls(self, kind, host):
        authority = Authority(self.directory)
        settings = {"tls_cert": authority.certificate, "tls_key": authority.key, "quic_listen": "off"}
        sluice = self.start(settings={**settings, "tls_listen": "127.0.0.1:0"}, listen="off")
        url = f"https://{host}:{sluice.gateway.address.rsplit(':', 1)[1]}"
        produced = self.produce_over_tls(kind, url, authority.file)
        self.assertEqual(produced.returncode, 0, produced.stdout)
        sluice.end()
        self.assertEqual([row["id"] for row in sluice.rows()], list(range(1000)))

    def test_records_over_tls_with_a_private_authority(self):
        self.check_tls("grpc", "localhost")

    def test_arrow_batches_over_tls_with_a_private_authority(self):
        self.check_tls("arrow", "127.0.0.1")


class Tokens(Case):
    """A gateway that asks for tokens, and the client's own way to get them."""

    def setUp(self):
        super().setUp()
        made = subprocess.run(
            [harness.sluice_binary, "secret"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True
        )
        self.secret, hashed = (line.split()[1] for line in made.stdout.splitlines())
        key = os.path.join(self.directory, "token.key")
        with open(os.open(key, os.O_CREAT | os.O_WRONLY, 0o600), "w") as file:
            file.write(os.urandom(32).hex())
        grant = f'{{ tables = "{TABLE}", privileges = ["write", "create", "describe"] }}'
        clients = f'[{{ id = "plant", secret_sha256 = "{hashed}", grants = [{grant}] }}]'
        self.sluice = self.start(settings={"token_key": key, "clients": clients})
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
            self.sdk.create_stream(
                table_properties=TableProperties(TABLE),
                options=StreamConfigurationOptions(record_type=RecordType.JSON),
                headers_provider=Headers(),
            )
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
        output = os.path.join(self.directory, "reading.proto")
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
    main(__doc__)
