"""Whether verify.py finds what it must: a table that is its source passes, one that is nearly so does not."""

import pathlib
import tempfile
from datetime import datetime, timezone

import polars as pl
from deltalake import write_deltalake

from verify import Difference, verify


def source() -> pl.DataFrame:
    rows = 60
    return pl.DataFrame(
        {
            "origin": [["JFK", "EWR", "LGA"][n % 3] for n in range(rows)],
            "delay": [None if n % 7 == 0 else n for n in range(rows)],
            "time": [datetime(2013, 1, 1, n % 24, tzinfo=timezone.utc) for n in range(rows)],
        },
        schema_overrides={"delay": pl.Int32, "time": pl.Datetime("us", "UTC")},
    )


def as_table(frame: pl.DataFrame) -> pl.DataFrame:
    """What Sluice makes of it."""
    return frame.with_columns(
        pl.format("flights-{}#1", "origin").alias("_stream"),
        pl.int_range(0, pl.len(), dtype=pl.Int64).over("origin").alias("_offset"),
    )


def replaced(frame: pl.DataFrame, row: int, column: str, value: object) -> pl.DataFrame:
    at_row = pl.int_range(0, pl.len()) == row
    return frame.with_columns(pl.when(at_row).then(pl.lit(value)).otherwise(pl.col(column)).alias(column))


def swapped(frame: pl.DataFrame) -> pl.DataFrame:
    """The delays of two rows of one stream change places."""
    first, second = frame["delay"][3], frame["delay"][6]
    return replaced(replaced(frame, 3, "delay", second), 6, "delay", first)


CASES = {
    "the same": (lambda t: t, None),
    "the same in another order": (lambda t: t.reverse(), None),
    "a missing row": (lambda t: t.filter(pl.int_range(0, pl.len()) != 30), "offset 10 is missing"),
    "the last row missing": (lambda t: t.head(59), "19 rows in the table, 20 in the source"),
    "a doubled row": (lambda t: pl.concat([t, t.slice(30, 1)]), "offset 10 is there more than once"),
    "a swapped value": (swapped, "column delay"),
    "a value instead of none": (lambda t: replaced(t, 0, "delay", 1), "offset 0, column delay"),
    "none instead of a value": (lambda t: replaced(t, 1, "delay", None), "offset 0, column delay"),
    "a stream missing": (lambda t: t.filter(pl.col("origin") != "LGA"), "'LGA'"),
    "a stranger": (lambda t: replaced(t, 5, "origin", "XXX"), "'XXX'"),
    "two streams of one value": (lambda t: replaced(t, 3, "_stream", "other#1"), "several streams"),
    "a missing column": (lambda t: t.drop("time"), "columns missing in the table: time"),
}


def check(name: str) -> None:
    change, expected = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        file, table = pathlib.Path(folder) / "source.parquet", str(pathlib.Path(folder) / "table")
        source().write_parquet(file)
        write_deltalake(table, change(as_table(source())).to_arrow())
        try:
            found = None
            verify(table, str(file), "origin")
        except Difference as difference:
            found = str(difference)
    as_expected = found is None if expected is None else found is not None and expected in found
    assert as_expected, f"{name}: expected {expected!r}, found {found!r}"


if __name__ == "__main__":
    for case in CASES:
        check(case)
    print(f"{len(CASES)} passed, 0 failed")
