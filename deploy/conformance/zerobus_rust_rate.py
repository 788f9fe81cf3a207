"""How fast Databricks's Rust client is with Sluice, beside how fast it is with a server that acks everything and keeps nothing.

    zerobus_rust_rate.py SLUICE_BINARY [RUNS [RECORDS]]

One stream, JSON records of 1 KB one by one, as its users send them; both servers in turns, on the same machine as the client.
Aims: Sluice, from the client to the disk, takes what Zerobus's own quota lets a stream send, 100 MB and 100,000 records a second;
and 0.9 of what the client reaches with the other, which is missed for a reason (WHY). Needs release builds of `sluice`, `loadtest` beside it, and
the client below target/conformance-rust.
"""

import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

CLIENT = "target/conformance-rust/release/conformance-rust-sdk"
QUOTA_RECORDS, QUOTA_MB = 100_000, 100
AIM = 0.9
WHY = ("client, gateway and pod share the machine's cores, which they use up: what the gateway and the pod compute, "
       "decoding, the log and Parquet, the client goes without")
RUNS, RECORDS, RECORD_BYTES = 7, 400_000, 1000
START_SECONDS = 60


class Server:
    """A child that has printed where it listens."""

    def __init__(self, name, directory, *command):
        self.log = os.path.join(directory, f"{name}.log")
        with open(self.log, "w") as log:
            self.child = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + START_SECONDS
        while not (found := re.search(r"(?:ws://|listens on )(127\.0\.0\.1:\d+)", self.said())):
            if self.child.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{name} did not start:\n{self.said()}")
            time.sleep(0.05)
        self.url = f"http://{found[1]}"

    def said(self):
        with open(self.log) as log:
            return log.read()

    def cpu(self):
        """Seconds that it has computed for."""
        with open(f"/proc/{self.child.pid}/stat") as stat:
            user, system = stat.read().rsplit(") ", 1)[1].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def end(self):
        self.child.terminate()
        self.child.wait()


def run_once(server, table, records):
    """Records a second, and seconds of CPU that client and server took."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    before = used.ru_utime + used.ru_stime, server.cpu()
    ran = subprocess.run(
        [CLIENT, server.url, table], input=f"rate {records} {RECORD_BYTES}\n", capture_output=True, text=True
    )
    if not ran.stdout.startswith("ok "):
        raise SystemExit(f"the client failed: {ran.stdout}{ran.stderr}\n{server.said()}")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    after = used.ru_utime + used.ru_stime, server.cpu()
    return records / float(ran.stdout.split()[1]), after[0] - before[0], after[1] - before[1]


def main():
    if not 2 <= len(sys.argv) <= 4:
        sys.exit(__doc__)
    sluice = sys.argv[1]
    runs, records = [int(given) if given else default for given, default in
                     zip((sys.argv[2:] + [None] * 2)[:2], (RUNS, RECORDS))]
    # Where the disk is, rather than in memory.
    directory = tempfile.mkdtemp(dir="target", prefix="rust-rate-")
    servers = {}
    try:
        loadtest = os.path.join(os.path.dirname(sluice), "loadtest")
        servers["null server"] = Server("null", directory, loadtest, "null-zerobus")
        data = ("--data", os.path.join(directory, "data"))
        servers["sluice"] = Server("sluice", directory, sluice, "up", "--listen", "127.0.0.1:0", *data)
        rates = {name: [] for name in servers}
        cpu = {name: [] for name in servers}
        for run in range(runs):
            for name, server in servers.items():
                reached, *took = run_once(server, f"main.default.run_{run}", records)
                rates[name].append(reached)
                cpu[name].append([seconds / (records * RECORD_BYTES / 1e9) for seconds in took])
                print(f"run {run + 1}: {name}: {reached:,.0f} records/s", flush=True)
    finally:
        for server in servers.values():
            server.end()
        shutil.rmtree(directory)
    medians = {name: statistics.median(of) for name, of in rates.items()}
    for name, median in medians.items():
        spread = f"{min(rates[name]):,.0f} to {max(rates[name]):,.0f}"
        client, server = (statistics.median(of) for of in zip(*cpu[name]))
        print(f"{name}: median {median:,.0f} records/s, {median * RECORD_BYTES / 1e6:.0f} MB/s ({spread}); "
              f"CPU s/GB: client {client:.1f}, server {server:.1f}")
    ratio = medians["sluice"] / medians["null server"]
    rate, mb = medians["sluice"], medians["sluice"] * RECORD_BYTES / 1e6
    in_quota = rate >= QUOTA_RECORDS and mb >= QUOTA_MB
    print(f"Databricks's Rust client, one stream, 1 KB: {rate:,.0f} records/s, {mb:.0f} MB/s; aim, Zerobus's quota of "
          f"{QUOTA_RECORDS:,} records/s and {QUOTA_MB} MB/s: {'met' if in_quota else 'MISSED'}")
    print(f"{ratio:.2f} of what it reaches with a null server; aim {AIM}: {'met' if ratio >= AIM else 'missed: ' + WHY}")
    sys.exit(not in_quota)


if __name__ == "__main__":
    main()
