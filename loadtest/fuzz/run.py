"""Builds the fuzzer's programs and runs one, some or all of the targets: `run.py [--runs N] [--seed N] [TARGET...]`.

Inputs that reach new code gather below target/fuzz/corpus, from run to run; those in the repository (corpus/) and the
targets' own seeds are where they begin. What fails is kept below target/fuzz/found. Ends with one line of figures; with
status 1 where a target has failed, 2 where it could not be built.
"""

import argparse
import pathlib
import re
import shutil
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
WORK = HERE.parent.parent / "target" / "fuzz"
# Beside the bound of each execution, for what an allocator does not see.
MEMORY_MIB_MAX = 1024
# An input that takes longer is a fault of its own.
SECONDS_MAX = 10


def targets():
    return re.findall(r'^name = "(\w+)"$', (HERE / "Cargo.toml").read_text(), re.MULTILINE)


def build(names):
    if shutil.which("c++") is None and shutil.which("g++") is None:
        sys.exit("libFuzzer needs a C++ compiler: install g++ (Debian, Ubuntu: apt-get install g++)")
    rustc = subprocess.run(["rustc", "-vV"], check=True, capture_output=True, text=True, cwd=HERE).stdout
    host = re.search(r"^host: (.+)$", rustc, re.MULTILINE)[1]
    command = ["cargo", "build", "--release", "--locked", "--target", host, "--target-dir", str(WORK / "build")]
    for name in names:
        command += ["--bin", name]
    # Cargo reads this directory's configuration only from within it.
    if subprocess.run(command, cwd=HERE).returncode != 0:
        sys.exit(2)
    return WORK / "build" / host / "release"


def run(program, runs, seed):
    name = program.name
    seeds, corpus, found, logs = (WORK / part / name for part in ("seeds", "corpus", "found", "logs"))
    for directory in (seeds, corpus, found, logs.parent):
        directory.mkdir(parents=True, exist_ok=True)
    made = subprocess.run([program, f"--seeds={seeds}"], check=True, capture_output=True, text=True)
    options = {
        "runs": runs,
        "seed": seed,
        "max_len": made.stdout.strip(),
        "rss_limit_mb": MEMORY_MIB_MAX,
        "timeout": SECONDS_MAX,
        "print_final_stats": 1,
        "artifact_prefix": f"{found}/",
    }
    command = [str(program), *(f"-{key}={value}" for key, value in options.items())]
    command += [str(corpus), str(HERE / "corpus" / name), str(seeds)]
    with open(f"{logs}.log", "w+", errors="replace") as log:
        ended = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT)
        log.seek(0)
        said = log.read()
    stats = dict(re.findall(r"^stat::(\w+):\s+(\d+)$", said, re.MULTILINE))
    covered = re.findall(r"cov: (\d+)", said)
    executions = int(stats.get("number_of_executed_units", 0))
    figures = {
        "executions": executions,
        "rate": int(stats.get("average_exec_per_sec", 0)),
        "memory": int(stats.get("peak_rss_mb", 0)),
        "failed": ended.returncode != 0 or executions < runs,
    }
    print(
        f"{name}: {executions:,} executions, {figures['rate']:,} a second, {covered[-1] if covered else 0} places of the "
        f"code, {figures['memory']} MiB" + (f": FAILED, see {logs}.log and {found}" if figures["failed"] else ""),
        flush=True,
    )
    return figures


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=10_000_000)
    parser.add_argument("--seed", type=int, default=0, help="0: another one each time")
    parser.add_argument("targets", nargs="*")
    given = parser.parse_args()
    names = given.targets or targets()
    unknown = set(names) - set(targets())
    if unknown:
        sys.exit(f"no target {', '.join(sorted(unknown))}: there are {', '.join(targets())}")
    programs = build(names)
    ran = [run(programs / name, given.runs, given.seed) for name in names]
    failed = sum(figures["failed"] for figures in ran)
    print(
        f"fuzz: {len(ran)} targets, {sum(figures['executions'] for figures in ran):,} executions, at least "
        f"{min(figures['executions'] for figures in ran):,} each, {failed} failed, at most "
        f"{max(figures['memory'] for figures in ran)} MiB: {'FAILED' if failed else 'ok'}"
    )
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
