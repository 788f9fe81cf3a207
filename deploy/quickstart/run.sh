#!/usr/bin/env bash
# Starts Sluice, streams the flights of 2013 into the table `flights`, one stream for each airport of departure, and
# compares the table with the source through readers that are not Sluice's.
#
#     run.sh SLUICE_BINARY DATA_DIR
#
# On a terminal Sluice goes on running until Ctrl-C. Elsewhere it takes any free port, drains, and the script ends; its
# last line is then the row count of the table.
set -euo pipefail
sluice=$1 data=$2
source=target/flights/flights.parquet
python=target/venv/bin/python
listen=127.0.0.1:0
[ -t 1 ] && listen=127.0.0.1:7070

mkdir -p "$data"
out=$data/sluice.out
# Emptied here and not by the background shell: below it is read at once, and an older run's address must not stand in it.
: >"$out"
"$sluice" up --pods 2 --data "$data" --listen "$listen" >>"$out" 2>"$data/sluice.log" &
pid=$!
stop() {
    kill -TERM "$pid" 2>/dev/null || true
    wait "$pid" 2>/dev/null || true
}
trap stop EXIT

url=
while [ -z "$url" ]; do
    kill -0 "$pid" 2>/dev/null || { cat "$data/sluice.log" "$out" >&2; exit 1; }
    url=$(sed -n 's|.*\(ws://[^/]*\)/v1/.*|\1|p' "$out")
    [ -n "$url" ] || sleep 0.05
done
cat "$out"

"$sluice" send flights "$source" --url "$url" --stream-by origin
verify() { "$python" deploy/quickstart/verify.py "$data/tables/main/default/flights" "$source" --stream-by origin; }

if [ -t 1 ]; then
    verify
    echo "Sluice goes on running at $url. Another terminal: $sluice tables flights. Ctrl-C drains and ends it."
    trap 'stop; trap - EXIT' INT TERM
    wait "$pid" || true
else
    trap - EXIT
    kill -TERM "$pid"
    wait "$pid" || { cat "$data/sluice.log" >&2; exit 1; }
    verify
fi
