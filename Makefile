# make demo   a radix-server and two engines that share its cache, with a table of what it saved
# make test   every test that needs no accelerator
# The others are listed by `make help`.

PYTHON ?= python3
# The test suite moves real tensors.  Any torch of the range in pyproject.toml will do.
TORCH ?= torch==2.13.0
SECONDS ?= 60
SEED ?= 1
TRACE ?=

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check
BUILD_INPUTS := pyproject.toml setup.py MANIFEST.in $(wildcard csrc/*.[ch] radixshmem/_build.py flexkv_radix/_build_copy.py)

.PHONY: help demo test check format asan ubsan tsan crash fuzz torture pressure bench docs gpu-test test-engines clean

help:
	@sed -n 's/^## //p' $(MAKEFILE_LIST)

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=/path/to/python3")'
	$(PYTHON) -m venv $(VENV)

# What an operator installs: package, C core, commands.
$(VENV)/.installed: $(BUILD_INPUTS) | $(PY)
	$(PIP) --editable .
	@touch $@

$(VENV)/.test: $(VENV)/.installed
	$(PIP) $(TORCH)
	$(PIP) --editable '.[flexkv,test]'
	@touch $@

$(VENV)/.dev: $(VENV)/.test
	$(PIP) --editable '.[flexkv,test,dev]'
	@touch $@

## demo          run the demo (needs Python >= 3.10 and a C compiler; sets up .venv)
demo: $(VENV)/.installed
	$(PY) -m examples.demo

## test          run the C and Python tests that need no accelerator and no engine
test: $(VENV)/.test
	$(MAKE) -C csrc test
	$(PY) -m pytest -m 'not gpu and not engines' -n auto --maxprocesses 4 --dist loadfile

## check         lint, types, warnings as errors, generated files up to date
check: $(VENV)/.dev
	$(MAKE) -C csrc lint
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(PY) -m radixshmem.cli.settings | diff docs/settings.md -

format: $(VENV)/.dev
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

## asan ubsan tsan   C tests under a sanitizer
asan ubsan tsan:
	$(MAKE) -C csrc $@

## crash         the enumerated crash proofs alone (also part of test)
crash:
	$(MAKE) -C csrc crash

## fuzz          libFuzzer on mutated regions for SECONDS (needs clang)
fuzz:
	$(MAKE) -C csrc fuzz SECONDS=$(SECONDS)

## torture       random verbs, kills and stops for SECONDS, from SEED
torture: $(VENV)/.test
	$(PY) -m tests.torture --seconds $(SECONDS) --seed $(SEED)

## pressure      engines on a cache much too small for them, for SECONDS
pressure: $(VENV)/.test
	RADIX_PRESSURE_S=$(SECONDS) $(PY) -m pytest -s tests/e2e/flexkv/test_kv_pressure.py

## bench         all CPU benchmarks; TRACE=path replays a Mooncake request trace
bench: $(VENV)/.test
	RADIX_TRACE='$(TRACE)' $(PY) -m benchmarks.run

## gpu-test      build, test and measure on an NVIDIA GPU
gpu-test:
	bash tests/gpu/run.sh

## test-engines  end-to-end tests with real inference engines (sets up their environments)
test-engines:
	bash tests/engines/run.sh

## docs          regenerate docs/settings.md
docs: $(VENV)/.installed
	$(PY) -m radixshmem.cli.settings > docs/settings.md

clean:
	rm -rf $(VENV) build *.egg-info bench-results radixshmem/*.so flexkv_radix/*.so
	$(MAKE) -C csrc clean
