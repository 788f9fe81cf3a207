"""Reads the last version of a Delta table with delta-rs, and tells of each stream how many rows it has, how many offsets,
the first and the last: as JSON, for `loadtest chaos`.

    python read_table.py DIRECTORY
"""

import json
import os
import sys

from deltalake import DeltaTable


def main() -> None:
    table = DeltaTable(sys.argv[1])
    rows = table.to_pyarrow_table(columns=["_stream", "_offset"])
    offsets: dict[str, list[int]] = {}
    for stream, offset in zip(rows["_stream"].to_pylist(), rows["_offset"].to_pylist()):
        offsets.setdefault(stream, []).append(offset)
    streams = {
        stream: {"rows": len(of), "distinct": len(set(of)), "first": min(of), "last": max(of)}
        for stream, of in offsets.items()
    }
    json.dump({"version": table.version(), "streams": streams}, sys.stdout)


if __name__ == "__main__":
    main()
    # The reader's threads are of no use any more, and some of its releases do not end them well.
    sys.stdout.flush()
    os._exit(0)
