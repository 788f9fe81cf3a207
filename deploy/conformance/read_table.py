"""Reads every version of a Delta table with delta-rs, and the rows of each file with Arrow's C++ reader, for the auditor of
`loadtest`.

    python read_table.py DIRECTORY OUT

Prints which files make up each version, as JSON, and writes the rows of each of them to OUT/NUMBER.arrow, an Arrow stream.
"""

import json
import os
import sys
import urllib.parse

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
from deltalake import DeltaTable

PARTITION = "partition."


def files_of(table: DeltaTable) -> pyarrow.Table:
    return pyarrow.table(table.get_add_actions(flatten=True))


def rows_of(directory: str, file: dict) -> pyarrow.Table:
    """A file's rows, with the columns that are in its path alone."""
    path = os.path.join(directory, urllib.parse.unquote(file["path"].as_py()))
    rows = pyarrow.parquet.ParquetFile(path).read()
    expected = file["num_records"].as_py()
    if expected is not None and expected != rows.num_rows:
        sys.exit(f"{path}: {rows.num_rows} rows, the log says {expected}")
    for name, value in file.items():
        if name.startswith(PARTITION):
            column = pyarrow.repeat(value, rows.num_rows)
            rows = rows.append_column(name.removeprefix(PARTITION), column)
    return rows


def main() -> None:
    directory, out = sys.argv[1:]
    table = DeltaTable(directory)
    numbers: dict[str, int] = {}
    versions = []
    for version in range(table.version() + 1):
        table.load_as_version(version)
        files = files_of(table)
        numbered = []
        for at, path in enumerate(files["path"].to_pylist()):
            if path not in numbers:
                numbers[path] = len(numbers)
                rows = rows_of(directory, {name: files[name][at] for name in files.column_names})
                with pyarrow.ipc.new_stream(os.path.join(out, f"{numbers[path]}.arrow"), rows.schema) as writer:
                    writer.write_table(rows)
            numbered.append(numbers[path])
        versions.append(numbered)
    json.dump({"files": list(numbers), "versions": versions}, sys.stdout)


if __name__ == "__main__":
    main()
    # The reader's threads are of no use any more, and some of its releases do not end them well.
    sys.stdout.flush()
    os._exit(0)
