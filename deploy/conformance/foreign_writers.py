"""Other writers on the same table at the same time: delta-rs appends, compacts, deletes rows, changes columns, vacuums, writes
checkpoints and cleans the log up, while producers post and homes move. Each record is there once, whatever they do; and what
is there is known, so that a post that comes again is not written again.

Usage: foreign_writers.py SLUICE_BINARY [--short] [TEST…]
"""

import json
import os
import shutil
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request

import pyarrow
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError

import harness
from harness import TABLE, WAIT_SECONDS, Case, only_in_full

RECORDS = 20


class Producers:
    """Threads that post, each with keys of its own, until they are told to end. A post that fails is sent again."""

    def __init__(self, sluice, threads=4, table=TABLE):
        self.sluice, self.table, self.ending = sluice, table, threading.Event()
        self.posted, self.failures = {}, []
        self.threads = [threading.Thread(target=self._run, args=(name,)) for name in range(threads)]
        for thread in self.threads:
            thread.start()

    def _run(self, name):
        try:
            post = 0
            while not self.ending.is_set():
                key = f"{name}-{post}"
                ids = [name * 1_000_000 + post * RECORDS + record for record in range(RECORDS)]
                answer = post_again(self.sluice, key, ids, self.table)
                assert answer["committed"] == RECORDS - 1, answer
                self.posted[key] = ids
                post += 1
                time.sleep(0.02)
        except Exception as error:
            self.failures.append(error)

    def end(self):
        self.ending.set()
        for thread in self.threads:
            thread.join()
        if self.failures:
            raise self.failures[0]
        return self.posted


def post(sluice, key, ids, table=TABLE, **columns):
    body = "".join(json.dumps({"id": record, **columns}) + "\n" for record in ids).encode()
    headers = {"content-type": "application/x-ndjson", "idempotency-key": key}
    url = f"http://{sluice.gateway.address}/v1/tables/{table}/records?wait=committed"
    asked = urllib.request.Request(url, method="POST", data=body, headers=headers)
    with urllib.request.urlopen(asked, timeout=WAIT_SECONDS) as answer:
        return json.load(answer)


def post_again(sluice, key, ids, table=TABLE):
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            return post(sluice, key, ids, table)
        except urllib.error.HTTPError as error:
            said = error.read().decode()
            assert error.code in (429, 503) and time.monotonic() < deadline, f"{error.code}: {said}"
            time.sleep(0.1)


class Foreign:
    """delta-rs on a table."""

    def __init__(self, sluice, table=TABLE):
        self.path = os.path.join(sluice.directory, "tables", *table.split("."))
        self.appended = 0

    def table(self):
        return DeltaTable(self.path)

    def do(self, what):
        """Until it succeeds: that it meets a conflict is its own business."""
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            try:
                return what(self.table())
            except (CommitFailedError, DeltaError) as error:
                assert time.monotonic() < deadline, error

    def append(self):
        self.appended += 1
        rows = pyarrow.table({"id": pyarrow.array([-self.appended], pyarrow.int64())})
        self.do(lambda _: write_deltalake(self.path, rows, mode="append", schema_mode="merge"))

    def compact(self):
        return self.do(lambda table: table.optimize.compact())

    def tidy(self):
        """All that makes older versions unreadable."""
        self.do(lambda table: table.create_checkpoint())
        self.do(lambda table: table.vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False))
        self.do(lambda table: table.cleanup_metadata())

    def add_column(self, name):
        rows = pyarrow.table({"id": pyarrow.array([], pyarrow.int64()), name: pyarrow.array([], pyarrow.string())})
        self.do(lambda _: write_deltalake(self.path, rows, mode="append", schema_mode="merge"))

    def ids(self):
        """Ours, and theirs."""
        rows = self.table().to_pyarrow_table(columns=["id", "_stream"]).to_pylist()
        ours = [row["id"] for row in rows if row["_stream"] is not None]
        return sorted(ours), sorted(row["id"] for row in rows if row["_stream"] is None)


class ForeignWriters(Case):
    def assert_each_once(self, sluice, posted, foreign, without=()):
        wanted = sorted(record for ids in posted.values() for record in ids if record not in set(without))
        ours, theirs = foreign.ids()
        self.assertEqual(ours, wanted)
        self.assertEqual(theirs, sorted(-number for number in range(1, foreign.appended + 1)))

    def assert_known(self, sluice, posted, foreign):
        """What is posted again is answered as before, and not written again."""
        before = foreign.ids()
        for key, ids in list(posted.items())[:: max(1, len(posted) // 20)]:
            self.assertEqual(post_again(sluice, key, ids)["committed"], RECORDS - 1, key)
        self.assertEqual(foreign.ids(), before)

    def verify(self, *flags):
        command = [harness.sluice_binary, "verify", TABLE, "--data", self.directory, *flags]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_SECONDS)
        self.assertEqual(ran.returncode, 0, ran.stdout[-2000:] + ran.stderr)
        return ran.stdout

    def test_appends_and_compaction_while_homes_move(self):
        pool = self.start_pool()
        pool.create_table(("id", "int64"))
        foreign, producers = Foreign(pool), Producers(pool)
        compacted = 0
        for turn in range(6):
            foreign.append()
            compacted += foreign.compact()["numFilesRemoved"]
            if turn == 2:
                pool.kill_pod("pod-2")
                pool.restart_pod("pod-2")
            if turn == 4:
                self.assertEqual(pool.drain("pod-1"), 0)
        posted = producers.end()
        self.assertGreater(compacted, 0)
        self.assert_each_once(pool, posted, foreign)
        self.assertIn("no fault", self.verify("--every-version"))
        pool.restart_pod("pod-1")
        self.assert_known(pool, posted, foreign)
        pool.end()

    @only_in_full
    def test_vacuum_checkpoints_and_clean_up_of_the_log(self):
        sluice = self.start()
        sluice.create_table(("id", "int64"), properties={"delta.logRetentionDuration": "interval 0 days"})
        foreign, producers = Foreign(sluice), Producers(sluice)
        for _ in range(4):
            foreign.compact()
            foreign.tidy()
            time.sleep(0.3)
        posted = producers.end()
        foreign.tidy()
        self.assert_each_once(sluice, posted, foreign)
        self.assertEqual(sluice.restart_pod(signal.SIGKILL), -signal.SIGKILL)
        self.assert_known(sluice, posted, foreign)
        self.assertIn("no fault", self.verify())
        sluice.end()

    def test_rows_that_another_writer_deletes_stay_deleted(self):
        sluice = self.start()
        sluice.create_table(("id", "int64"))
        foreign, producers = Foreign(sluice), Producers(sluice)
        deadline = time.monotonic() + WAIT_SECONDS
        while not any(record % 2 == 0 and record < 1000 for record in foreign.ids()[0]):
            self.assertLess(time.monotonic(), deadline)
        foreign.do(lambda table: table.delete("id % 2 = 0 AND id < 1000"))
        at_most = self.deleted_before(foreign)
        posted = producers.end()
        ours, _ = foreign.ids()
        wanted = {record for ids in posted.values() for record in ids}
        self.assertEqual(len(ours), len(set(ours)), "twice")
        self.assertLessEqual(wanted - set(ours), {record for record in wanted if record % 2 == 0 and record < 1000})
        self.assertFalse(at_most & set(ours), "what was deleted is back")
        self.assertEqual(sluice.restart_pod(signal.SIGKILL), -signal.SIGKILL)
        self.assert_known(sluice, posted, foreign)
        sluice.end()

    def deleted_before(self, foreign):
        """The records that the version before the deletion had, and that it took out."""
        log = os.path.join(foreign.path, "_delta_log")
        for name in sorted(os.listdir(log)):
            with open(os.path.join(log, name), "rb") as commit:
                if not name.endswith(".json") or b'"operation":"DELETE"' not in commit.read():
                    continue
            ids = [
                set(DeltaTable(foreign.path, version=version).to_pyarrow_table(columns=["id"])["id"].to_pylist())
                for version in (int(name[:20]) - 1, int(name[:20]))
            ]
            self.assertTrue(ids[0] - ids[1], "it deleted nothing")
            return ids[0] - ids[1]
        self.fail("no version deletes")

    def test_a_column_that_another_writer_adds(self):
        sluice = self.start()
        sluice.create_table(("id", "int64"))
        foreign, producers = Foreign(sluice), Producers(sluice)
        for number in range(3):
            time.sleep(0.3)
            foreign.add_column(f"more_{number}")
            foreign.append()
        posted = producers.end()
        self.assert_each_once(sluice, posted, foreign)
        self.assertEqual(post(sluice, "seen", [-77], more_2="seen")["committed"], 0)
        rows = foreign.table().to_pyarrow_table(columns=["id", "more_2"]).to_pylist()
        self.assertIn({"id": -77, "more_2": "seen"}, rows)
        sluice.end()

    def test_a_table_that_is_deleted_under_us_and_made_anew(self):
        sluice = self.start()
        sluice.create_table(("id", "int64"))
        first = {f"old-{number}": [number * RECORDS + record for record in range(RECORDS)] for number in range(5)}
        for key, ids in first.items():
            post(sluice, key, ids)
        foreign = Foreign(sluice)
        shutil.rmtree(foreign.path)
        with self.assertRaises(urllib.error.HTTPError) as refused:
            post(sluice, "gone", [1])
        said = json.loads(refused.exception.read())["error"]
        self.assertEqual((refused.exception.code, said["code"]), (404, "table_not_found"), said)
        with self.assertRaises(TableNotFoundError):
            foreign.table()
        sluice.create_table(("id", "int64"))
        # Keys belong to a table, not to a name.
        second = {key: [10_000 + record for record in ids] for key, ids in first.items()}
        for key, ids in second.items():
            self.assertEqual(post_again(sluice, key, ids)["committed"], RECORDS - 1)
        self.assert_each_once(sluice, second, foreign)
        self.assertEqual(sluice.restart_pod(signal.SIGKILL), -signal.SIGKILL)
        self.assert_known(sluice, second, foreign)
        self.assert_each_once(sluice, second, foreign)


if __name__ == "__main__":
    harness.main(__doc__)
