# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One process a core: small models gain nothing from threads inside an operation.
PROCESSES ?= 2
export OMP_NUM_THREADS ?= 1
# Modules of a checkout would be compiled anew in each process, and assertions of all tests rewritten.
unexport PYTHONDONTWRITEBYTECODE
TORCHRUN := $(BIN)/torchrun --standalone --nproc-per-node $(PROCESSES)
DEMO := data/demo
# One more than two cores, as some tests wait; a process that has nothing left takes tests from another.
SHARED := -n 3 --dist worksteal
INTERPRETED := -k "contract and not transducer"
# Inputs of each reader of foreign files in `make fuzz`.
INPUTS ?= 1000

# How often in a row `make test-processes` runs the tests that start processes.
RUNS ?= 20
PROCESS_TESTS = tests/distributed tests/faults tests/data/test_loader.py \
  tests/data/test_corpus_cache_processes.py tests/training/test_checkpointing.py \
  $(shell grep -rlE 'tests\.support\.run_ranks|"torch\.distributed\.run"' tests --include='test_*.py')

.PHONY: demo demo-transducer test test-all test-processes faults fuzz audit lint bench gpu wheels clean help

help:
	@echo "make demo              synthesise speech, train, resume, evaluate, transcribe (5 minutes)"
	@echo "make demo-transducer   the same with a transducer in place of the attention decoder"
	@echo "make test              run the tests of each push, without a GPU (8 minutes)"
	@echo "make test-all          run every case, the fuzz tests and faults at full size, and make audit"
	@echo "make test-processes    run the tests that start processes RUNS=20 times in a row"
	@echo "make faults            fail or kill at every call of the file system"
	@echo "make fuzz              read mutated models, manifests and audio; INPUTS=1000 for each reader"
	@echo "make audit             run bandit, and pip-audit where it can reach its data"
	@echo "make lint              run ruff, pyright and import-linter"
	@echo "make bench             time the operations on this machine"
	@echo "make wheels            build dist/*.whl with the CPU kernels, for each compiler that is found"
	@echo "make gpu               run tests and benchmarks on an NVIDIA GPU with the packages of PYTHON,"
	@echo "                       for 9 minutes; again, it goes on with what is left"
	@echo "All but gpu set up .venv first. Documentation: README.md and docs/."

$(VENV)/bin/pip:
	$(PYTHON) -m venv $(VENV)

# Large parts of packages of which nothing or little is imported, as a pattern.
UNUSED := /(tests|pip|setuptools|pygments/lexers|sympy/physics|torch/testing|transformers/models|onnxruntime/transformers)/

# $(1) is the extras. Modules are compiled afterwards, on all cores and without UNUSED; pip would take
# half a minute for them on one core. That a package has a file for another version of Python is no
# failure.
define install
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable ".[$(1)]"
	@$(BIN)/python -W ignore -m compileall -qq -j 0 -x '$(UNUSED)' $(VENV)/lib || true
endef
TESTED := demo,huggingface,onnx,test

$(VENV)/.demo: pyproject.toml constraints.txt | $(VENV)/bin/pip
	$(call install,demo)
	@touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(VENV)/bin/pip
	$(call install,$(TESTED))
	@touch $@ $(VENV)/.demo

$(VENV)/.audit: pyproject.toml constraints.txt | $(VENV)/.test
	$(call install,audit)
	@touch $@

$(VENV)/.wheels: pyproject.toml | $(VENV)/bin/pip
	$(BIN)/pip install --quiet "setuptools>=77"
	@touch $@

# From nothing to transcripts; $(1) is the recipe.
define demonstrate
	$(BIN)/effasr demo-data $(DEMO)
	$(BIN)/effasr tokenizer $(DEMO)/train.jsonl $(DEMO)/tokenizer --vocab-size 160
	$(TORCHRUN) effasr/train.py $(1) training.stop_at=400 training.restart=true
	@echo; echo "Stopped on purpose. The same command goes on exactly where it was:"; echo
	$(TORCHRUN) effasr/train.py $(1)
	@echo; echo "Held-out voices saying held-out sentences:"; echo
	$(BIN)/effasr evaluate runs/$(1) $(DEMO)/test.jsonl
	@echo; echo "Three recordings of the test set, transcribed:"; echo
	$(BIN)/effasr transcribe runs/$(1) $(DEMO)/test/audio/en-0420[0-2].wav
	@echo; echo "Where the time of a training step went:"; echo
	$(BIN)/python profiling/report.py runs/$(1) --output runs/$(1)/report
	@echo; echo "What comes next: README.md, \"Train on your own recordings\"."
endef

demo: $(VENV)/.demo
	$(call demonstrate,demo)

demo-transducer: $(VENV)/.demo
	$(call demonstrate,demo_transducer)

# A case or a few of each claim; kernels run as compiled for a GPU, instruction by instruction.
test: $(VENV)/.test
	EFFASR_EMULATE=90 $(BIN)/pytest $(SHARED) -m "not gpu and not extended"

# All cases: every architecture, dtype and shape.
test-all: $(VENV)/.test
	EFFASR_EMULATE=90 $(BIN)/pytest $(SHARED) -m "not gpu"
	@echo; echo "The kernels as compiled for an older GPU:"; echo
	EFFASR_EMULATE=80 $(BIN)/pytest $(SHARED) tests/gpu -m "not extended"
	@echo; echo "Some kernels in Triton's interpreter:"; echo
	TRITON_INTERPRET=1 $(BIN)/pytest $(SHARED) tests/gpu $(INTERPRETED)
	$(MAKE) faults fuzz audit

# Ends at the first failure.
test-processes: $(VENV)/.test
	for run in $$(seq $(RUNS)); do \
	  echo "run $$run of $(RUNS)"; \
	  $(BIN)/pytest -q -x $(SHARED) -m "not gpu" $(PROCESS_TESTS) || exit 1; \
	done

# Each kind of fault at every call that changes a file; `make test` tries some of them.
faults: $(VENV)/.test
	EFFASR_FAULTS=all $(BIN)/pytest $(SHARED) tests/faults

# Each reader of foreign files, with mutated inputs.
fuzz: $(VENV)/.test
	PYTHONPATH=.:kernels $(BIN)/python -m tests.security.fuzz $(INPUTS)

# Nothing is claimed about dependencies of which pip-audit has no data: without a network it ends
# with an error, and of a mirror without advisories it says that nothing is known.
audit: $(VENV)/.audit
	$(BIN)/bandit --quiet --severity-level medium --recursive effasr kernels/effasr_kernels
	@if ! $(BIN)/pip-audit --skip-editable > $(VENV)/audit.log 2>&1; then \
	  if grep -q "known vulnerabilit" $(VENV)/audit.log; then cat $(VENV)/audit.log; exit 1; fi; \
	  echo "audit: pip-audit cannot reach its data, so dependencies were NOT checked:"; \
	  tail -n 1 $(VENV)/audit.log; \
	elif grep -q "could not be audited" $(VENV)/audit.log; then \
	  echo "audit: pip-audit has no data, so these dependencies were NOT checked:"; \
	  sed -n 's/.*could not be audited: //p' $(VENV)/audit.log | paste -s -d, | fold -s -w 100; \
	fi

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

bench: $(VENV)/.test
	$(BIN)/python profiling/bench.py ops

# With what is installed, torch above all: PYTHON names it.
gpu:
	$(PYTHON) profiling/gpu.py

# The library of C++ is a part of these, so that they run where another one is installed, or none.
WHEEL := EFFASR_BUILD_CPP=1 LDFLAGS="-static-libstdc++ -static-libgcc" $(BIN)/python setup.py -q bdist_wheel
FOREIGN ?= aarch64-linux-gnu-g++

wheels: $(VENV)/.wheels
	rm -rf build
	CXX=g++ $(WHEEL) --plat-name linux_x86_64
	rm -rf build
	if command -v $(FOREIGN) > /dev/null; then \
	  EFFASR_BUILD_CUDA=0 CXX=$(FOREIGN) $(WHEEL) --plat-name linux_aarch64; \
	else \
	  echo "wheels: none for aarch64, as there is no $(FOREIGN)"; \
	fi
	rm -rf build
	@ls dist/*.whl

clean:
	rm -rf $(VENV) runs data build dist *.egg-info kernels/effasr_kernels/_cpu* kernels/effasr_kernels/_cuda[._]*
