# The commands a newcomer and CI run. Each makes what it needs in .venv; a second call finds it made.
PYTHON ?= python3
VENV   ?= .venv
TORCH  ?= 2.13.0
OLDEST ?= 5.5.0
ARGS   ?=

BIN := $(VENV)/bin
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install -qq

# grafana-client's HTTP library would take the place of urllib3, and with it of what OTLP is sent by; built here, it does not.
export URLLIB3_NO_OVERRIDE := 1
export PIP_NO_BINARY := urllib3-future

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-all test-pythons test-oldest test-vllm test-servers test-engines test-stack battery fuzz browser tools bench bench-peers bench-vllm bench-whole bench-whole-vllm bench-whole-servers bench-whole-engines bench-servers bench-engines lint format wheel clean

help:  ## this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo '  ARGS="…" is passed on: make demo ARGS="--requests 40", make test ARGS="-k ring"'

demo: $(VENV)/.demo  ## make a tiny model, serve it instrumented, load it, print where the time went
	@$(BIN)/otel-infer demo $(ARGS)

test-oldest: $(VENV)-oldest/.dev  ## the transformers tests against the oldest release claimed
	$(VENV)-oldest/bin/python -m pytest tests/unit/instrumentation/transformers \
	  tests/instrumentation/transformers tests/e2e/test_transformers_serve.py $(ARGS)

# What is not timed goes two files at a time, in the order named: long ones first. Skips of both runs are named at the end.
TWO      := -n 2 --dist loadfile --no-loadscope-reorder
TIMED    := tests/vllm/test_failing.py tests/vllm/test_numbers.py
SKIPPED  := .skipped-tests

test-vllm: $(VENV)-vllm/.dev  ## the tests on a real vLLM, on the CPU, in an environment of its own
ifeq ($(strip $(ARGS)),)
	$(VENV)-vllm/bin/python -m pytest $(TWO) --skips-to $(SKIPPED) $(TIMED:%=--ignore=%) tests/vllm; first=$$?; \
	$(VENV)-vllm/bin/python -m pytest --skips-from $(SKIPPED) $(TIMED) && exit $$first
else
	$(VENV)-vllm/bin/python -m pytest tests/vllm $(ARGS)
endif

# Libraries whose pins conflict with the other servers': each has an environment on top of theirs, and a file of tests.
OVER_SERVERS := mlserver kserve
# Triton's Python stub loads the system's libpython3.11, and needs the standard library of the same build.
TRITON_PYTHON := /usr/bin/python3.11
HAS_TRITON_PYTHON := $(and $(wildcard $(TRITON_PYTHON)),$(wildcard /usr/lib/*/libpython3.11.so.1.0))
BESIDE_SERVERS := $(OVER_SERVERS) $(if $(HAS_TRITON_PYTHON),pytriton)

test-servers: $(VENV)-servers/.dev $(BESIDE_SERVERS:%=$(VENV)-servers-%/.dev)  ## Flask, Django, aiohttp, Tornado, Sanic, gRPC, Celery …, each on its real server, in environments of their own
ifeq ($(HAS_TRITON_PYTHON),)
	@echo "skipped: tests/servers/test_pytriton.py, because $(TRITON_PYTHON) with its libpython3.11.so is not here"
endif
ifeq ($(strip $(ARGS)),)
	$(VENV)-servers/bin/python -m pytest $(TWO) tests/servers; failed=$$?; \
	for name in $(BESIDE_SERVERS); do \
	  $(VENV)-servers-$$name/bin/python -m pytest tests/servers/test_$$name.py || failed=1; \
	done; exit $$failed
else
	$(VENV)-servers$(strip $(foreach name,$(BESIDE_SERVERS),$(if $(findstring test_$(name),$(ARGS)),-$(name))))/bin/python -m pytest \
	  $(if $(findstring tests/servers/,$(ARGS)),,tests/servers) $(ARGS)
endif

SGLANG   := tests/engines/test_sglang.py
OPTIMUM  := tests/engines/test_optimum.py
test-engines: $(VENV)-engines/.llama $(VENV)-sglang/.dev $(VENV)-optimum/.dev  ## SGLang, llama.cpp, ONNX Runtime, OpenVINO, diffusers …, each on a tiny model, in three environments
	$(VENV)-engines/bin/python -m pytest $(TWO) tests/engines --ignore=$(SGLANG) --ignore=$(OPTIMUM) $(ARGS); failed=$$?; \
	$(VENV)-optimum/bin/python -m pytest $(OPTIMUM) $(ARGS) || failed=1; \
	$(VENV)-sglang/bin/python -m pytest $(SGLANG) $(ARGS) && exit $$failed

test-stack: $(VENV)/.dev $(VENV)-vllm/.dev tools  ## real servers, scraped by a real Prometheus: every panel, every alert
	$(BIN)/python -m pytest tests/stack $(ARGS)

battery: $(VENV)/.dev  ## faults on real servers, and the verdict on each: ARGS="--sample 6" for six cells, hours for all
	$(BIN)/python -m benchmarks.battery $(ARGS)

fuzz: $(VENV)/.dev  ## what comes from outside, damaged at random: ten minutes, ARGS="--seconds 60" for one
	$(BIN)/python -m tests.fuzz $(or $(strip $(ARGS)),--seconds 600)

tools:  ## Debian's Prometheus and Alertmanager, unpacked into .tools; without them some tests are skipped by name
	@scripts/prometheus_tools.sh

# The only target that installs anything outside of .venv, so nothing asks for it but who wants it, and CI.
browser:  ## a Chromium for the tests of pages, by apt-get as root; without one they are skipped by name
	@for name in chromium chromium-headless-shell chromium-browser google-chrome chrome; do \
	  command -v $$name >/dev/null && exit 0; \
	done; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && { timeout 90 apt-get -qq update; \
	  DEBIAN_FRONTEND=noninteractive timeout 240 apt-get -qq -y install --no-install-recommends chromium-headless-shell || \
	  DEBIAN_FRONTEND=noninteractive timeout 240 apt-get -qq -y install --no-install-recommends chromium; \
	} </dev/null >/dev/null 2>&1; then echo "installed Chromium"; \
	else echo "no Chromium to be had here: the tests of pages in a browser will be skipped"; fi

# What guards the main job, in minutes; `make test-all` adds the rest.
MAIN := tests/unit tests/contract $(patsubst %,tests/e2e/test_%.py,transformers_serve stages_are_real early_ends gpu_throttling)
# Of the rest, what is not timed runs two files at a time.
PARALLEL := \
  $(patsubst %,tests/e2e/test_%.py,breach_to_page doctor flight_recorder explain_live examples report_in_a_browser request_log \
  sampling server_start) \
  $(addprefix tests/instrumentation/,torch transformers vllm) tests/benchmarks tests/scripts
SERIAL_IGNORES := $(MAIN:%=--ignore=%) $(PARALLEL:%=--ignore=%) --ignore=tests/stack --ignore=tests/servers --ignore=tests/engines

test: lint tools  ## format, lint, types, import contracts, unit and contract tests, the main job end to end
	$(BIN)/python -m pytest $(TWO) $(if $(strip $(ARGS)),--ignore=tests/stack $(ARGS),$(MAIN))

test-all: $(VENV)/.dev tools  ## every test that `make test` leaves out, but for vLLM's and the stack's
	$(BIN)/python -m pytest $(TWO) --skips-to $(SKIPPED) $(PARALLEL); first=$$?; \
	$(BIN)/python -m pytest --skips-from $(SKIPPED) $(SERIAL_IGNORES) tests && exit $$first

test-pythons:  ## the unit and contract tests on each Python from 3.11 to 3.14 that is found, without torch
	@scripts/test_pythons.sh $(ARGS)

# Benchmarks and GPU tests run by hand: a name that no longer exists must show without running them.
NAMES := --config-file= --cache-dir .mypy_cache/names --ignore-missing-imports --check-untyped-defs \
  $(addprefix --disable-error-code ,arg-type assignment list-item method-assign misc name-defined no-redef union-attr)

lint: $(VENV)/.dev  ## everything of `make test` but the tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict otel_infer
	$(BIN)/mypy $(NAMES) -p benchmarks -p tests.gpu
	$(BIN)/lint-imports --no-logo

format: $(VENV)/.dev  ## rewrite the files the way `make test` wants them
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.dev  ## what it costs, measured here, with controls
	$(BIN)/python -m benchmarks $(ARGS)

bench-peers: $(VENV)/.dev $(VENV)-peers/.peers  ## the section peers of `make bench`, beside OpenLIT and OpenLLMetry
	$(BIN)/python -m benchmarks --only peers --peers-python $(VENV)-peers/bin/python $(ARGS)

bench-vllm: $(VENV)-vllm/.bench  ## what it costs a real vLLM on the CPU, beside vLLM's own tracing and ddtrace
	$(VENV)-vllm/bin/python -m benchmarks --only vllm_scheduler vllm $(ARGS)

bench-whole: $(VENV)/.bench  ## what a whole server loses, hooks switched while it runs: up to 30 minutes for each of eight servers
	$(BIN)/python -m benchmarks --only whole $(ARGS)

bench-whole-vllm: $(VENV)-vllm/.bench  ## the same for vLLM on the CPU, two loads
	$(VENV)-vllm/bin/python -m benchmarks --only whole $(ARGS)

bench-whole-servers: $(VENV)-servers/.bench  ## the same for Flask under gunicorn, grpc.aio and LitServe
	$(VENV)-servers/bin/python -m benchmarks --only whole $(ARGS)

bench-whole-engines: $(VENV)-engines/.bench $(VENV)-sglang/.dev  ## the same for SGLang, llama-cpp-python's server and ONNX Runtime
	$(VENV)-engines/bin/python -m benchmarks --only whole $(ARGS)
	$(VENV)-sglang/bin/python -m benchmarks --only whole $(ARGS)

bench-servers: $(VENV)-servers/.dev  ## client against trace on servers of all kinds, and a Flask and a gRPC request beside OpenTelemetry's instrumentations
	$(VENV)-servers/bin/python -m benchmarks --only entrances server_truth $(ARGS)

bench-engines: $(VENV)-engines/.llama $(VENV)-sglang/.dev  ## a delay in each stage of each engine, what the hooks add to a call, and SGLang's own tracer
	$(VENV)-engines/bin/python -m benchmarks --only engine_truth engine_hooks $(ARGS)
	$(VENV)-sglang/bin/python -m benchmarks --only server_truth sglang_tracers $(ARGS)

wheel: $(VENV)/.dev  ## dist/otel_infer-*.whl
	$(BIN)/python -m pip wheel -qq --no-deps --wheel-dir dist .

clean:  ## remove the environment and everything built
	rm -rf $(VENV) $(VENV)-peers $(VENV)-servers $(OVER_SERVERS:%=$(VENV)-servers-%) $(VENV)-servers-pytriton $(VENV)-engines $(VENV)-optimum $(VENV)-sglang $(VENV)-vllm $(VENV)-oldest .venv-3.* $(SKIPPED) build dist .tools .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# pip is renewed: the one that Debian brings cannot resolve our extras when two OpenTelemetry releases mix.
$(BIN)/python:
	@echo "making $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "python's venv module is missing; on Debian: apt-get install python3-venv" >&2; exit 1; }
	@$(PIP) --upgrade pip

# torch comes first and alone: asked for as somebody's dependency it is the CUDA build, gigabytes that nothing here runs.
$(VENV)/.torch: | $(BIN)/python
	@if nvidia-smi -L >/dev/null 2>&1; then \
	  echo "installing torch for the GPU that is here"; $(PIP) torch; \
	else \
	  echo "installing torch $(TORCH) for the CPU"; \
	  $(PIP) "torch==$(TORCH)+cpu" 2>/dev/null || \
	  $(PIP) --retries 1 --index-url https://download.pytorch.org/whl/cpu "torch==$(TORCH)" 2>/dev/null || \
	  $(PIP) "torch==$(TORCH)"; \
	fi
	@touch $@

$(VENV)/.demo: pyproject.toml $(VENV)/.torch
	@echo "installing otel-infer and what the demo serves with"
	@$(PIP) -e ".[demo,igzip]"
	@touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.demo
	@echo "installing what the tests need"
	@$(PIP) -e ".[demo,igzip,dev]"
	@touch $@

# In an environment of their own, since what they pin would change what the tests run with.
$(VENV)-peers/.peers: pyproject.toml
	@$(MAKE) --no-print-directory VENV=$(VENV)-peers $(VENV)-peers/.demo
	@echo "installing OpenLIT and OpenLLMetry's instrumentation of transformers"
	@$(VENV)-peers/bin/python -m pip install -qq openlit opentelemetry-instrumentation-transformers
	@touch $@

# vLLM's build for the CPU asks for a torchvision that its torch cannot load, so its needs are listed and not resolved.
$(VENV)-vllm/.dev: pyproject.toml tests/vllm/requirements.txt
	@$(MAKE) --no-print-directory VENV=$(VENV)-vllm $(VENV)-vllm/.torch
	@echo "installing vLLM and what the tests need"
	@$(VENV)-vllm/bin/python -m pip install -qq --no-deps -r tests/vllm/requirements.txt
	@$(VENV)-vllm/bin/python -m pip install -qq -e ".[dev]"
	@touch $@

# In an environment of their own, because one of them would change what the other tests run with.
$(VENV)-servers/.dev: pyproject.toml tests/servers/requirements.txt tests/servers/requirements-no-deps.txt
	@$(MAKE) --no-print-directory VENV=$(VENV)-servers $(VENV)-servers/.torch
	@echo "installing the servers and what the tests need"
	@$(VENV)-servers/bin/python -m pip install -qq -r tests/servers/requirements.txt -e ".[dev]" transformers
	@$(VENV)-servers/bin/python -m pip install -qq --no-deps -r tests/servers/requirements-no-deps.txt
	@touch $@

$(VENV)-engines/.dev: pyproject.toml tests/engines/requirements.txt
	@$(MAKE) --no-print-directory VENV=$(VENV)-engines $(VENV)-engines/.torch
	@echo "installing the engines and what the tests need"
	@$(VENV)-engines/bin/python -m pip install -qq -r tests/engines/requirements.txt -e ".[dev]" transformers
	@touch $@

$(VENV)-engines/.llama: $(VENV)-engines/.dev tests/engines/requirements-llama.txt
	@echo "installing llama-cpp-python, which is compiled the first time, in about ten minutes"
	@$(VENV)-engines/bin/python -m pip install -qq -r tests/engines/requirements-llama.txt
	@touch $@

$(VENV)-optimum/.dev: pyproject.toml tests/engines/requirements-optimum.txt
	@$(MAKE) --no-print-directory VENV=$(VENV)-optimum $(VENV)-optimum/.torch
	@echo "installing optimum-onnx and what the tests need"
	@$(VENV)-optimum/bin/python -m pip install -qq -r tests/engines/requirements-optimum.txt -e ".[dev]"
	@touch $@

$(VENV)-sglang/.dev: pyproject.toml tests/engines/requirements-sglang.txt
	@$(MAKE) --no-print-directory VENV=$(VENV)-sglang $(VENV)-sglang/.torch
	@echo "installing SGLang and what the tests need"
	@$(VENV)-sglang/bin/python -m pip install -qq --no-deps -r tests/engines/requirements-sglang.txt
	@$(VENV)-sglang/bin/python -m pip install -qq -e ".[dev]"
	@touch $@

# A path file lends it what the servers' environment has, which pip then leaves alone: what is older is installed beside it.
$(OVER_SERVERS:%=$(VENV)-servers-%/.dev): $(VENV)-servers-%/.dev: $(VENV)-servers/.dev tests/servers/requirements-%.txt
	@echo "installing $* over the servers"
	@$(VENV)-servers/bin/python -m venv $(@D)
	@packages='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	$(VENV)-servers/bin/python -c "$$packages" > "$$($(@D)/bin/python -c "$$packages")/servers.pth"
	@$(@D)/bin/python -m pip install -qq --no-warn-conflicts -r tests/servers/requirements-$*.txt
	@touch $@

# The system's Python may have no pip, so the pip of the servers' environment installs one.
$(VENV)-servers-pytriton/.dev: pyproject.toml tests/servers/requirements-pytriton.txt | $(VENV)-servers/.dev
	@test -x $(@D)/bin/pip || { $(TRITON_PYTHON) -m venv --without-pip $(@D) && \
	  $(VENV)-servers/bin/python -m pip --python $(@D)/bin/python install -qq pip; }
	@$(MAKE) --no-print-directory VENV=$(@D) $(@D)/.torch
	@echo "installing PyTriton and what the tests need"
	@$(@D)/bin/python -m pip install -qq -r tests/servers/requirements-pytriton.txt -e ".[dev]"
	@touch $@

$(VENV)/.bench: pyproject.toml $(VENV)/.dev
	@echo "installing what the benchmarks need"
	@$(PIP) -e ".[demo,igzip,dev,bench]"
	@touch $@

$(VENV)-servers/.bench: $(VENV)-servers/.dev
	@echo "installing py-spy"
	@$(VENV)-servers/bin/python -m pip install -qq -e ".[bench]"
	@touch $@

$(VENV)-engines/.bench: $(VENV)-engines/.llama
	@echo "installing py-spy"
	@$(VENV)-engines/bin/python -m pip install -qq "py-spy>=0.4"
	@touch $@

# ddtrace changes what is installed, so it lies apart and is found by nobody but who is started with it.
$(VENV)-vllm/.bench: $(VENV)-vllm/.dev
	@echo "installing ddtrace and py-spy"
	@$(VENV)-vllm/bin/python -m pip install -qq -e ".[bench]"
	@$(VENV)-vllm/bin/python -m pip install -qq --target $(VENV)-vllm/bin/ddtrace ddtrace
	@touch $@

$(VENV)-oldest/.dev: pyproject.toml
	@$(MAKE) --no-print-directory VENV=$(VENV)-oldest $(VENV)-oldest/.torch
	@echo "installing transformers $(OLDEST) and what the tests need"
	@$(VENV)-oldest/bin/python -m pip install -qq -e ".[dev]" "transformers[serving]==$(OLDEST)" psutil
	@touch $@
