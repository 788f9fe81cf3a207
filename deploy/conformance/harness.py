"""What the conformance cases have in common: a gateway and a pod of their own, and their table read back.

The table is read with `deltalake`, which is not ours either.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.request

from deltalake import DeltaTable

TABLE = "main.default.readings"
START_SECONDS = 60
# How long a case may wait for what has to come.
WAIT_SECONDS = 60
# Of each program's log, where a case failed.
LOG_LINES = 30

sluice_binary = "target/debug/sluice"


def binary(name):
    """Another program that was built beside `sluice`."""
    return os.path.join(os.path.dirname(sluice_binary), name)


def only_in_full(case):
    """Left out by `--short`: takes some seconds."""
    case.only_in_full = True
    return case


class Process:
    """A child, its output in a file, and the address that it printed."""

    def __init__(self, name, directory, *args, environment=()):
        self.log = os.path.join(directory, f"{name}.log")
        self.file = open(self.log, "a")
        at = self.file.tell()
        # An end of input is the end of some of them.
        environment = {**os.environ, **dict(environment)}
        self.child = subprocess.Popen(
            args, stdin=subprocess.PIPE, stdout=self.file, stderr=subprocess.STDOUT, env=environment
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
        self.child.stdin.close()
        self.file.close()
        return status

    def said(self):
        with open(self.log) as log:
            return log.read()


class Sluice:
    """A gateway and a pod. `settings` are keys of `[gateway]`, for each gateway that is started; `listen` is where the first
    one does."""

    def __init__(self, directory, auto_create=True, settings=(), listen="127.0.0.1:0"):
        self.directory, self.auto_create, self.settings = directory, auto_create, dict(settings)
        self.ever = []
        self.pod = self.start_pod("127.0.0.1:0")
        self.gateway = self.start_gateway(listen)

    def _start(self, name, *args):
        settings = {f"SLUICE_GATEWAY__{key.upper()}": str(value) for key, value in self.settings.items()}
        process = Process(name, self.directory, sluice_binary, *args, environment=settings if name == "gateway" else {})
        self.ever.append(process)
        return process

    def start_pod(self, listen):
        flags = ["--auto-create"] if self.auto_create else []
        return self._start("pod", "pod", "--listen", listen, "--data", self.directory, *flags)

    def start_gateway(self, listen):
        pod = f"pod-1={self.pod.address}"
        return self._start("gateway", "gateway", "--listen", listen, "--pod", pod)

    def restart_pod(self, how):
        status = self.pod.end(how)
        self.pod = self.start_pod(self.pod.address)
        return status

    def restart_gateway(self, how):
        status = self.gateway.end(how)
        self.gateway = self.start_gateway(self.gateway.address)
        return status

    def end(self):
        statuses = [self.gateway.end(), self.pod.end()]
        assert statuses == [0, 0], f"drained with {statuses}"

    def kill(self):
        for process in self.ever:
            process.end(signal.SIGKILL)

    def request(self, method, path, body=None):
        url = f"http://{self.gateway.address}{path}"
        asked = urllib.request.Request(url, method=method, data=body)
        with urllib.request.urlopen(asked, timeout=WAIT_SECONDS) as answer:
            return answer.read().decode()

    def create_table(self, *fields, table=TABLE, properties=()):
        """Each field: name, type and, where it may not be null, `False`."""
        fields = [
            {"name": name, "type": kind, "nullable": nullable}
            for name, kind, nullable in [(*field, True)[:3] for field in fields]
        ]
        spec = json.dumps({"schema": {"fields": fields}, "properties": dict(properties)}).encode()
        self.request("PUT", f"/v1/tables/{table}", spec)

    def metric(self, name):
        found = re.search(rf"^{name} (\S+)$", self.request("GET", "/metrics"), re.MULTILINE)
        assert found, f"no metric {name}"
        return float(found[1])

    def rows(self, table=TABLE, without=("_ingested_at",)):
        """Of each stream in turn, in order: offset and columns."""
        path = os.path.join(self.directory, "tables", *table.split("."))
        # Timestamps take the reader most of its time, and no case asks for this one.
        rows = DeltaTable(path).to_pyarrow_table().drop_columns(list(without))
        return rows.sort_by([("_stream", "ascending"), ("_offset", "ascending")]).to_pylist()

    def has_table(self, table=TABLE):
        return os.path.isdir(os.path.join(self.directory, "tables", *table.split(".")))


class Pool(Sluice):
    """A gateway and two pods, which find each other by gossip. The admin API says which pod has a stream."""

    PODS = ("pod-1", "pod-2")

    def __init__(self, directory, settings=()):
        self.directory, self.settings, self.ever = directory, dict(settings), []
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as free:
            free.bind(("127.0.0.1", 0))
            self.seed = "%s:%d" % free.getsockname()
        self.pods = {pod: self.start_pod(pod) for pod in self.PODS}
        self.gateway = self.start_gateway("127.0.0.1:0")
        self.admin = self.wait("the admin API", lambda: re.search(r"admin API +http://(\S+)/v1/pods", self.gateway.said()))[1]
        self.wait_for_phases("active", "active")

    def start_pod(self, pod):
        gossip = ["--gossip-listen", self.seed]
        if pod != self.PODS[0]:
            gossip = ["--gossip-listen", "127.0.0.1:0", "--seed", self.seed]
        listen = ["--listen", "127.0.0.1:0", "--data", self.directory, "--auto-create"]
        return self._start(pod, "pod", "--id", pod, *listen, *gossip)

    def start_gateway(self, listen):
        gossip = ["--gossip-listen", "127.0.0.1:0", "--seed", self.seed]
        return self._start("gateway", "gateway", "--listen", listen, *gossip)

    def ask(self, method, path):
        asked = urllib.request.Request(f"http://{self.admin}{path}", method=method)
        with urllib.request.urlopen(asked, timeout=WAIT_SECONDS) as answer:
            return json.load(answer)

    def wait(self, what, look):
        deadline = time.monotonic() + WAIT_SECONDS
        while not (seen := look()):
            assert time.monotonic() < deadline, f"waited in vain for {what}"
            time.sleep(0.02)
        return seen

    def phases(self):
        return [pod["phase"] for pod in self.ask("GET", "/v1/pods")["pods"]]

    def wait_for_phases(self, *phases):
        self.wait(f"{phases}", lambda: self.phases() == list(phases))

    def stream(self):
        """The only one."""
        (stream,) = self.ask("GET", "/v1/streams")["streams"]
        return stream

    def drain(self, pod):
        """Returns once its process has ended; how, is its status."""
        self.ask("POST", f"/v1/pods/{pod}/drain")
        return self.pods[pod].child.wait(timeout=WAIT_SECONDS)

    def kill_pod(self, pod):
        """Returns once the others take it for lost."""
        self.pods[pod].end(signal.SIGKILL)
        self.wait_for_phases(*("lost" if other == pod else "active" for other in self.PODS))

    def restart_pod(self, pod):
        """What its log holds is committed then."""
        self.pods[pod] = self.start_pod(pod)
        self.wait_for_phases("active", "active")

    def end(self):
        statuses = [process.end() for process in (self.gateway, *self.pods.values())]
        assert statuses == [0, 0, 0], f"drained with {statuses}"


class Case(unittest.TestCase):
    """A directory of its own for each case."""

    maxDiff = 2000

    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.directory = scratch.name

    def start(self, **options):
        sluice = Sluice(self.directory, **options)
        self.addCleanup(sluice.kill)
        return sluice

    def start_pool(self, **options):
        pool = Pool(self.directory, **options)
        self.addCleanup(pool.kill)
        return pool

    def assert_rows(self, sluice, values, column="id", streams=1, table=TABLE):
        """All of `values`, in order, of so many streams, whose offsets have no gaps."""
        rows = sluice.rows(table)
        self.assertEqual([row[column] for row in rows], list(values))
        self.assert_offsets(rows, streams)

    def assert_offsets(self, rows, streams):
        by_stream = {}
        for row in rows:
            by_stream.setdefault(row["_stream"], []).append(row["_offset"])
        for offsets in by_stream.values():
            self.assertEqual(offsets, list(range(len(offsets))))
        self.assertEqual(len(by_stream), streams, "streams")

    def assert_sent_again(self, sluice, values, acked):
        """At least once: `values` of one producer in streams one after another, each beginning where the producer had
        no ack of the one before, none with a gap, and none beginning before `acked`, how many it had acks of."""
        runs = {}
        for row in sluice.rows():
            runs.setdefault(row["_stream"], []).append(row["id"])
        runs = sorted(runs.values())
        for run in runs:
            self.assertEqual(run, list(range(run[0], run[0] + len(run))), "order")
        self.assertEqual(sorted({value for run in runs for value in run}), list(values))
        for before, after in zip(runs, runs[1:]):
            self.assertLessEqual(after[0], before[-1] + 1, "gap")
            self.assertGreaterEqual(after[0], acked, "sent again although it was acked")


class Result(unittest.TextTestResult):
    """Says how long each case took, and what the programs said where it failed."""

    def startTest(self, test):
        super().startTest(test)
        self.began = time.monotonic()

    def addSuccess(self, test):
        self.stream.write(f"{time.monotonic() - self.began:.1f} s ")
        super().addSuccess(test)

    def _show(self, test):
        directory = getattr(test, "directory", "")
        for name in sorted(os.listdir(directory) if directory else []):
            if name.endswith(".log"):
                with open(os.path.join(directory, name)) as log:
                    last = "".join(log.readlines()[-LOG_LINES:])
                self.stream.writeln(f"\n--- the last of {name}\n{last}---")

    def addFailure(self, test, err):
        self._show(test)
        super().addFailure(test, err)

    def addError(self, test, err):
        self._show(test)
        super().addError(test, err)

    def addSubTest(self, test, subtest, err):
        if err is not None:
            self._show(test)
        super().addSubTest(test, subtest, err)


def selected(suite, keep):
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from selected(test, keep)
        elif keep(test):
            yield test


def main(usage):
    """SLUICE_BINARY [--short] [TEST…]: runs the cases of the calling script."""
    global sluice_binary
    arguments = sys.argv[1:]
    if not arguments or arguments[0].startswith("-"):
        sys.exit(usage)
    sluice_binary = arguments.pop(0)
    short = "--short" in arguments
    names = [argument for argument in arguments if argument != "--short"]
    loader = unittest.TestLoader()
    module = sys.modules["__main__"]
    loaded = loader.loadTestsFromNames(names, module) if names else loader.loadTestsFromModule(module)

    def keep(test):
        return not (short and hasattr(getattr(test, test._testMethodName), "only_in_full"))

    cases = unittest.TestSuite(selected(loaded, keep))
    left_out = loaded.countTestCases() - cases.countTestCases()
    if left_out:
        print(f"{os.path.basename(sys.argv[0])}: --short leaves {left_out} cases out", flush=True)
    assert cases.countTestCases(), "no cases"
    result = unittest.TextTestRunner(verbosity=2, resultclass=Result).run(cases)
    sys.exit(not result.wasSuccessful())
