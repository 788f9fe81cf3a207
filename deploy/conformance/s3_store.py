"""Tables and logs in a bucket: a store that speaks S3 and is not ours, in front of it one that slows down, fails, and loses
answers to what it has done. Each record is in the table once, whatever the store does and whoever is killed.

Usage: s3_store.py SLUICE_BINARY [--short] [TEST…]
"""

import http.client
import http.server
import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.request

from deltalake import DeltaTable
from moto.server import ThreadedMotoServer

import harness
from foreign_writers import RECORDS, Producers
from harness import TABLE, WAIT_SECONDS, Case, Sluice, only_in_full

BUCKET, PLACE = "lake", "s3://lake/raw"
KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}
logging.getLogger("werkzeug").setLevel(logging.ERROR)  # each request, else
FAULTS = ["slow down", "internal error", "cut", "lost answer"]
SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"


class Proxy(http.server.ThreadingHTTPServer):
    """Passes requests on, one write at a time: the store behind it lets two writers win the same conditional put."""

    daemon_threads = True

    def __init__(self, behind):
        self.behind, self.writing = behind, threading.Lock()
        self.random, self.failing, self.counts = random.Random(7), 0.0, {}
        super().__init__(("127.0.0.1", 0), Request)
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, request, client_address):
        """Whoever asked was killed meanwhile, or has given up."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    def fault(self, is_write):
        """What goes wrong with a request, if anything does."""
        if self.random.random() >= self.failing:
            return None
        fault = self.random.choice(FAULTS + ["lost answer"] if is_write else FAULTS[:3])
        self.counts[fault] = self.counts.get(fault, 0) + 1
        return fault


class Request(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def pass_on(self):
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        is_write = self.command in ("PUT", "POST", "DELETE")
        fault = self.server.fault(is_write)
        if fault == "cut":
            return self.cut()
        if fault in ("slow down", "internal error"):
            return self.answer(503 if fault == "slow down" else 500, [("content-type", "application/xml")], SLOW_DOWN)
        with self.server.writing:
            behind = http.client.HTTPConnection(*self.server.behind, timeout=WAIT_SECONDS)
            behind.request(self.command, self.path, body, dict(self.headers))
            answer = behind.getresponse()
            status, headers, content = answer.status, answer.getheaders(), answer.read()
            behind.close()
        if fault == "lost answer":
            return self.cut()
        self.answer(status, headers, content)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = pass_on

    def cut(self):
        self.close_connection = True

    def answer(self, status, headers, content):
        self.send_response_only(status)
        length = dict((name.lower(), value) for name, value in headers).get("content-length", "0")
        for name, value in headers:
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                self.send_header(name, value)
        self.send_header("content-length", length if self.command == "HEAD" else str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


class InBucket(Sluice):
    """A gateway and a pod whose tables are in a bucket."""

    def __init__(self, directory, endpoint, log="disk"):
        self.endpoint, self.log = endpoint, log
        super().__init__(directory)

    def start_pod(self, listen):
        os.environ.update(KEYS, AWS_ENDPOINT=self.endpoint, SLUICE_POD__FLUSH_INTERVAL_MS="300")
        flags = ["--auto-create", "--tables", PLACE, "--log", self.log]
        return self._start("pod", "pod", "--listen", listen, "--data", self.directory, *flags)


def ids(posted):
    return sorted(record for ids in posted.values() for record in ids)


class S3Store(Case):
    def setUp(self):
        super().setUp()
        store = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        store.start()
        self.addCleanup(store.stop)
        self.proxy = Proxy(store.get_host_and_port())
        self.addCleanup(self.proxy.shutdown)
        made = urllib.request.Request(f"{self.proxy.url}/moto-api/reset", method="POST")
        urllib.request.urlopen(made, timeout=WAIT_SECONDS).close()
        made = urllib.request.Request(f"{self.proxy.url}/{BUCKET}", method="PUT")
        urllib.request.urlopen(made, timeout=WAIT_SECONDS).close()

    def start(self, log="disk"):
        sluice = InBucket(self.directory, self.proxy.url, log)
        self.addCleanup(sluice.kill)
        return sluice

    def assert_each_once(self, wanted):
        """By another reader, straight from the bucket; then by `sluice verify`, in every version."""
        options = {**KEYS, "AWS_ENDPOINT_URL": self.proxy.url, "AWS_ALLOW_HTTP": "true"}
        table = DeltaTable(f"{PLACE}/{TABLE.replace('.', '/')}", storage_options=options)
        rows = table.to_pyarrow_table(columns=["id", "_stream", "_offset"]).to_pylist()
        self.assertEqual(sorted(row["id"] for row in rows), wanted)
        command = [harness.sluice_binary, "verify", TABLE, "--tables", PLACE, "--every-version"]
        verified = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_SECONDS)
        self.assertEqual(verified.returncode, 0, verified.stdout + verified.stderr)

    def test_rows_are_in_the_bucket_and_nothing_of_the_tables_on_the_disk(self):
        sluice = self.start()
        producers = Producers(sluice, threads=3)
        time.sleep(2)
        wanted = ids(producers.end())
        described = json.loads(sluice.request("GET", f"/v1/tables/{TABLE}"))
        self.assertEqual(described["location"], f"{PLACE}/{TABLE.replace('.', '/')}")
        sluice.end()
        self.assertGreater(len(wanted), 3 * RECORDS)
        self.assert_each_once(wanted)
        self.assertFalse(os.path.exists(os.path.join(self.directory, "tables")))

    def test_a_store_that_fails_loses_and_doubles_nothing(self):
        sluice = self.start()
        producers = Producers(sluice, threads=3)
        time.sleep(1)
        self.proxy.failing = 0.2
        deadline = time.monotonic() + WAIT_SECONDS
        while any(self.proxy.counts.get(fault, 0) < 5 for fault in FAULTS):
            self.assertLess(time.monotonic(), deadline, self.proxy.counts)
            time.sleep(0.1)
        self.proxy.failing = 0.0
        wanted = ids(producers.end())
        sluice.end()
        self.assert_each_once(wanted)

    def test_a_pod_whose_log_is_in_the_bucket_is_killed(self):
        sluice = self.start(log="object")
        producers = Producers(sluice, threads=3)
        for _ in range(3):
            time.sleep(2)
            sluice.restart_pod(signal.SIGKILL)
        wanted = ids(producers.end())
        sluice.end()
        self.assert_each_once(wanted)
        self.assertFalse(os.path.exists(os.path.join(self.directory, "pods")), "no log on the disk")

    @only_in_full
    def test_a_store_that_fails_while_pods_are_killed(self):
        sluice = self.start(log="object")
        producers = Producers(sluice, threads=3)
        self.proxy.failing = 0.1
        for _ in range(4):
            time.sleep(3)
            sluice.restart_pod(signal.SIGKILL)
        self.proxy.failing = 0.0
        wanted = ids(producers.end())
        sluice.end()
        self.assert_each_once(wanted)

    def test_a_bucket_that_is_not_there_is_named(self):
        os.environ.update(KEYS, AWS_ENDPOINT=self.proxy.url)
        command = [harness.sluice_binary, "pod", "--listen", "127.0.0.1:0", "--data", self.directory]
        ended = subprocess.run(
            [*command, "--tables", "s3://nowhere/x"], capture_output=True, text=True, timeout=WAIT_SECONDS
        )
        self.assertNotEqual(ended.returncode, 0)
        self.assertIn("nowhere", ended.stdout + ended.stderr)


if __name__ == "__main__":
    harness.main(__doc__)
