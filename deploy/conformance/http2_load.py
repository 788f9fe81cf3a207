"""`h2load`, nghttp2's own load generator, posting NDJSON over HTTP/2: many connections, many streams on each.

    http2_load.py SLUICE_BINARY [--short] [TEST…]
"""

import json
import os
import re
import subprocess

from harness import TABLE, Case, main
from zerobus_secure import Authority

RUN_SECONDS = 300


class Load(Case):
    def post(self, url, body, requests, connections, streams):
        """Posts the same body again and again; answers what h2load says of it."""
        file = os.path.join(self.directory, "body.ndjson")
        with open(file, "w") as written:
            written.write(body)
        command = ["h2load", f"--requests={requests}", f"--clients={connections}", f"--max-concurrent-streams={streams}"]
        command += ["--threads=2", f"--data={file}", "--header=content-type: application/x-ndjson"]
        ran = subprocess.run([*command, url], capture_output=True, text=True, timeout=RUN_SECONDS)
        self.assertEqual(ran.returncode, 0, ran.stdout + ran.stderr)
        return ran.stdout

    def assert_all_answered(self, said, requests):
        """Each with 2xx, none cut off or left over."""
        counted = dict((what, int(count)) for count, what in re.findall(r"(\d+) (\w+)", self.line(said, "requests")))
        self.assertEqual(counted, {**dict.fromkeys(["total", "started", "done", "succeeded"], requests),
                                   **dict.fromkeys(["failed", "errored", "timeout"], 0)}, said)
        self.assertTrue(self.line(said, "status codes").startswith(f"{requests} 2xx"), said)

    def line(self, said, begins):
        found = re.search(rf"^{begins}: (.*)$", said, re.MULTILINE)
        self.assertIsNotNone(found, said)
        return found[1]

    def assert_posted(self, sluice, records, requests):
        """Each post is a stream of its own, and has all of its records in their order."""
        posts = {}
        for row in sluice.rows():
            posts.setdefault(row["_stream"], []).append((row["_offset"], row["id"]))
        self.assertEqual(len(posts), requests)
        expected = [(number, number) for number in range(records)]
        for rows in posts.values():
            self.assertEqual(rows, expected)

    def check(self, sluice, url, records, requests, connections, streams, text=""):
        sluice.create_table(("id", "int64"), ("text", "string"))
        body = "".join(json.dumps({"id": number, "text": text}) + "\n" for number in range(records))
        said = self.post(f"{url}/v1/tables/{TABLE}/records", body, requests, connections, streams)
        self.assert_all_answered(said, requests)
        sluice.end()
        self.assert_posted(sluice, records, requests)
        return said

    def test_many_streams_on_many_connections(self):
        sluice = self.start()
        self.check(sluice, f"http://{sluice.gateway.address}", records=5, requests=4000, connections=50, streams=20)

    def test_as_many_streams_as_a_connection_may_have(self):
        sluice = self.start()
        self.check(sluice, f"http://{sluice.gateway.address}", records=2, requests=3000, connections=2, streams=1000)

    def test_bodies_larger_than_the_windows(self):
        sluice = self.start()
        url = f"http://{sluice.gateway.address}"
        # 5 MB each, 20 at a time.
        self.check(sluice, url, records=50, requests=100, connections=5, streams=4, text="x" * 100_000)

    def test_over_tls(self):
        authority = Authority(self.directory)
        settings = {"tls_cert": authority.certificate, "tls_key": authority.key, "tls_listen": "127.0.0.1:0"}
        sluice = self.start(settings=settings)
        address = re.search(r"listens on wss://([\d.:]+)", sluice.gateway.said())[1]
        said = self.check(sluice, f"https://{address}", records=5, requests=2000, connections=20, streams=20)
        self.assertEqual(self.line(said, "Application protocol"), "h2")


if __name__ == "__main__":
    main(__doc__)
