# `make run` and `make test` are all that is needed on a fresh machine with cargo, nextest, gcc, Python 3.11 and make.

VENV    := target/venv
PYTHON  := $(VENV)/bin/python
READY   := $(VENV)/.ready
CONFORMANCE := target/conformance
FLIGHTS := target/flights/flights.parquet
NEXTEST := cargo nextest run --workspace --no-fail-fast

.PHONY: run test lint bench quickstart-test conformance clean

# Builds, starts Sluice, streams the flights of 2013 into it, and compares the table with the source.
run: $(FLIGHTS)
	cargo build --release --workspace --bins
	@deploy/quickstart/run.sh target/release/sluice data

# Everything that must pass.
test: lint $(FLIGHTS)
	cargo build --workspace --bins
	$(NEXTEST)
	cargo test --workspace --doc --quiet
	$(MAKE) quickstart-test conformance

# The flights end to end through the binary that was just built, judged by a reader that is not ours.
quickstart-test: $(FLIGHTS)
	$(PYTHON) deploy/quickstart/test_verify.py
	rm -rf target/quickstart-data
	deploy/quickstart/run.sh target/debug/sluice target/quickstart-data

# Clients that are not ours, unchanged, against the binary that was just built.
conformance: $(CONFORMANCE)/.ready
	$(CONFORMANCE)/bin/python deploy/conformance/zerobus_clients.py target/debug/sluice

lint:
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps --quiet

# Figures beside the machine's limits, and each edge beside a bare receiver; takes a quarter of an hour.
bench:
	cargo build --release --workspace --bins
	target/release/loadtest bench

$(READY): deploy/quickstart/requirements.txt
	python3 -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -r $<
	touch $@

$(CONFORMANCE)/.ready: deploy/conformance/requirements.txt
	python3 -m venv $(CONFORMANCE)
	$(CONFORMANCE)/bin/pip install --quiet --disable-pip-version-check -r $<
	touch $@

$(FLIGHTS): deploy/quickstart/flights.py $(READY)
	$(PYTHON) deploy/quickstart/flights.py $@

clean:
	rm -rf target data
