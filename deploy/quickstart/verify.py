"""Compares a Delta table that Sluice wrote with its source, through readers that are not Sluice's.

The rows of each value of COLUMN were sent as a stream of their own, in the source's order. So, for each value, the
table sorted by `_offset` must be the source filtered by that value: every column, every row, each once, offsets
0, 1, 2, … without a gap.

    verify.py TABLE_DIR SOURCE.parquet --stream-by origin

Prints the table's version and how to read it; the last line is the row count. Ends with status 1 and the first
differences where there are any.
"""

import argparse
import sys

import polars as pl
from deltalake import DeltaTable

STREAM, OFFSET, INGESTED = "_stream", "_offset", "_ingested_at"
SYSTEM = [STREAM, OFFSET, INGESTED]


class Difference(Exception):
    """The table is not its source."""


def check_columns(table: pl.DataFrame, source: pl.DataFrame) -> None:
    missing = [name for name in [*source.columns, STREAM, OFFSET] if name not in table.columns]
    if missing:
        raise Difference(f"columns missing in the table: {', '.join(missing)}")
    extra = [name for name in table.columns if name not in source.columns and name not in SYSTEM]
    if extra:
        raise Difference(f"columns in the table that the source does not have: {', '.join(extra)}")


def check_offsets(name: str, rows: pl.DataFrame) -> None:
    """Each offset from 0 on once; `rows` are sorted by offset."""
    doubled = rows.filter(pl.col(OFFSET).is_duplicated())
    if doubled.height:
        raise Difference(f"stream {name}: offset {doubled[OFFSET][0]} is there more than once")
    expected = pl.int_range(0, rows.height, dtype=pl.Int64, eager=True)
    gaps = rows.with_columns(expected.alias("expected")).filter(pl.col(OFFSET) != pl.col("expected"))
    if gaps.height:
        raise Difference(f"stream {name}: offset {gaps['expected'][0]} is missing")


def check_values(name: str, rows: pl.DataFrame, source: pl.DataFrame) -> None:
    """Every column, row by row, missing values included."""
    for column in source.columns:
        got, expected = rows[column], source[column]
        if got.dtype != expected.dtype:
            try:
                got = got.cast(expected.dtype, strict=True)
            except pl.exceptions.PolarsError as error:
                raise Difference(f"column {column}: {got.dtype} in the table, {expected.dtype} in the source") from error
        wrong = got.ne_missing(expected).arg_true()
        if len(wrong):
            row = wrong[0]
            raise Difference(
                f"stream {name}, offset {row}, column {column}: {got[row]!r} in the table, "
                f"{expected[row]!r} in the source ({len(wrong)} such rows)"
            )


def check_stream(name: str, rows: pl.DataFrame, source: pl.DataFrame) -> None:
    streams = rows[STREAM].unique().to_list()
    if len(streams) > 1:
        raise Difference(f"rows of {name} came by several streams: {', '.join(sorted(streams))}")
    rows = rows.sort(OFFSET)
    check_offsets(name, rows)
    if rows.height != source.height:
        raise Difference(f"stream {name}: {rows.height} rows in the table, {source.height} in the source")
    check_values(name, rows, source)


def verify(table_dir: str, source_file: str, stream_by: str) -> tuple[int, int, int]:
    """Version, rows and streams of a table that is its source; raises `Difference` otherwise."""
    delta = DeltaTable(table_dir)
    table = pl.from_arrow(delta.to_pyarrow_table())
    source = pl.read_parquet(source_file)
    check_columns(table, source)
    parts = source.partition_by(stream_by, as_dict=True, maintain_order=True)
    tables = table.partition_by(stream_by, as_dict=True, maintain_order=True)
    strangers = [key[0] for key in tables if key not in parts]
    if strangers:
        raise Difference(f"{stream_by} {strangers[0]!r} is in the table, not in the source")
    for key, part in parts.items():
        if key not in tables:
            raise Difference(f"{stream_by} {key[0]!r}: {part.height} rows in the source, none in the table")
        check_stream(f"of {stream_by} {key[0]!r}", tables[key], part)
    if table.height != source.height:
        raise Difference(f"{table.height} rows in the table, {source.height} in the source")
    return delta.version(), table.height, len(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table_dir")
    parser.add_argument("source")
    parser.add_argument("--stream-by", required=True, metavar="COLUMN")
    args = parser.parse_args()
    try:
        version, rows, streams = verify(args.table_dir, args.source, args.stream_by)
    except Difference as difference:
        print(f"{args.table_dir} differs from {args.source}: {difference}", file=sys.stderr)
        return 1
    print(f"version {version}: {rows} rows of {streams} streams, each in order, each once, equal to {args.source}")
    print(f"Polars:  pl.read_delta({args.table_dir!r})")
    print(f"DuckDB:  select * from delta_scan({args.table_dir!r})")
    print(f"{rows} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
