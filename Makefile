# make demo · make check · make test · make kernels · make kernels-sample · make kernels-hopper · make kernels-hopper-sample · make lint · make docs · make pages · make gpu-test · make bench · make bench-cpu · make wheel · make release · make hub
# make TORCH=installed …   uses the torch (and triton) that the machine's python3 already has; without a network, all that it has.
# make TORCH=newest test   runs with what pip brings today (constraints-newest.txt, several GB), in an environment of its own.
# Packages are installed uncompiled: where nothing compiled is written, every process would compile PyTorch anew, for seconds.
unexport PYTHONDONTWRITEBYTECODE
SHELL  := /bin/bash
PYTHON ?= python3
TORCH  ?= pinned
VENV   := $(if $(filter newest,$(TORCH)),.venv-newest,.venv)
BIN    := $(VENV)/bin
PINS   := $(if $(filter newest,$(TORCH)),constraints-newest.txt,constraints.txt)

ifeq ($(TORCH),installed)
  VENV_FLAGS  := --system-site-packages
  CONSTRAINTS := --constraint build/installed-constraints.txt
  OFFLINE     = 2> build/install.log || { echo "setup: no network: with what the machine has"; \
	  $(INSTALL) --no-index --no-deps --no-build-isolation --editable .; }
else
  CONSTRAINTS := --constraint $(PINS)
endif
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --config-settings=wheel.cmake=false
CMAKE   = PATH="$(BIN):$$PATH" cmake

LIBRARY := src/tilewise/backends/cpu/libtilewise_cpu.so
EMULATED := build/native/libtilewise_cpu_emulated.so

.PHONY: demo check test kernels kernels-sample kernels-hopper kernels-hopper-sample lint format docs pages gpu-test bench bench-cpu asan tsan valgrind wheel release hub clean setup
setup: $(VENV)/ready-$(TORCH) $(LIBRARY)

$(VENV)/ready-$(TORCH): pyproject.toml $(PINS)
	@mkdir -p build
	@$(PYTHON) -m venv $(VENV_FLAGS) $(VENV) 2>/dev/null || { \
	  rm -rf $(VENV); $(PYTHON) -m pip install --quiet --user virtualenv && $(PYTHON) -m virtualenv $(VENV_FLAGS) $(VENV); }
ifeq ($(TORCH),installed)
	@$(PYTHON) -m pip freeze 2>/dev/null | grep -Ei '^(torch|triton|numpy)==' > build/installed-constraints.txt || true
	@grep -E '^(nvidia|cuda|apache)-' constraints.txt >> build/installed-constraints.txt
	@: # python3 may itself be of a virtual environment, whose packages --system-site-packages passes over
	@$(PYTHON) -c "import site; print(*site.getsitepackages(), sep='\n')" > \
	  "$$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])')/installed.pth"
endif
	@echo "setup: installing into $(VENV) (a minute or two the first time)"
	@$(INSTALL) $(CONSTRAINTS) --editable '.[test]' $(OFFLINE)
	@rm -f $(VENV)/ready-*; touch $@

# The native CPU kernels, beside their sources. Without a compiler the rest works, and `tilewise explain` says what is missing.
$(LIBRARY): CMakeLists.txt $(wildcard src/tilewise/backends/*/native/*) | $(VENV)/ready-$(TORCH)
	@echo "setup: compiling the CPU kernels and the launcher of GPU kernels"
	@$(CMAKE) -S . -B build/native -DTILEWISE_INPLACE=ON > build/native.log 2>&1 && \
	  $(CMAKE) --build build/native --parallel >> build/native.log 2>&1 || \
	  { grep -m 1 -E "could be found|error:" build/native.log || grep -m 1 -i error build/native.log; \
	    echo "setup: no native CPU kernels (see build/native.log); the portable backend runs instead"; }

# The same with AMX in software beside the real instruction sets, and what judges that software: for tests alone.
$(EMULATED): $(LIBRARY) tests/native/tile_emulation.h
	@$(CMAKE) --build build/native --parallel --target tilewise_cpu_emulated tiles > build/emulated.log 2>&1 && touch $@ || \
	  echo "test: no emulated AMX (see build/emulated.log)"

# Beside other busy processes OpenMP's spinning threads hold each other up (docs/shared_machines.md).
# On a Hopper GPU it builds the kernels that it needs, for which their compiler is fetched where there is a network.
HOPPER = $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | grep -m 1 -x 9.0)

demo: setup
	@$(if $(HOPPER),$(BIN)/python -c "import cutlass" 2> /dev/null || { echo "setup: installing the compiler of Hopper's kernels (450 MB)"; \
	  $(MAKE) --no-print-directory $(VENV)/ready-kernels-$(TORCH) > build/kernels.log 2>&1; } || echo "setup: it is not to be had (see build/kernels.log)",true)
	@GOMP_SPINCOUNT=$${GOMP_SPINCOUNT-1000} $(BIN)/tilewise demo

test: lint $(EMULATED)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxfail 50

# Before a commit: style and types; what tests hold of sizes, imports and language; documents.
CHECKED := $(addprefix tests/test_,$(addsuffix .py,size_budget imports language docs decisions doors support words))

check: lint
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto $(CHECKED)

lint: setup
	@$(BIN)/ruff check --quiet . && $(BIN)/ruff format --check --quiet . && $(BIN)/mypy --no-error-summary

format: setup
	@$(BIN)/ruff check --quiet --fix . ; $(BIN)/ruff format --quiet .

# Triton's kernels for GPUs that need not be here: shared memory and spills against config's figures. All of them, for a release; and for CI
# a few that show every architecture with each of its features and dtypes, and every head dim.
COMPILE_TRITON = { $(BIN)/python -c "import triton" 2>/dev/null || $(BIN)/python -m pip install --quiet $(CONSTRAINTS) triton; } && \
  OMP_NUM_THREADS=1 $(BIN)/python -m tilewise.backends.triton.host.compile_all

kernels: setup
	@$(COMPILE_TRITON)

kernels-sample: setup
	@$(COMPILE_TRITON) --sample

# The compiler of Hopper's kernels, 450 MB, and what their tests call its launches with.
$(VENV)/ready-kernels-$(TORCH): $(VENV)/ready-$(TORCH)
	@echo "setup: installing the compiler of Hopper's kernels (450 MB the first time)"
	@$(INSTALL) $(CONSTRAINTS) --editable '.[test,kernels]' apache-tvm-ffi
	@touch $@

# Hopper's kernels, compiled for sm_90a on any Linux machine with x86-64 and g++, checked, and their figures written down: some 4 s of CPU for each, and half a second where the compiler would get the program that it
# got before. `python -m tests.backends.hopper.sweep` runs them all on an emulated machine: what to do before they meet a GPU.
COMPILE_HOPPER = $(BIN)/python -m tilewise.backends.hopper.kit.layout && \
  OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto tests/backends/hopper/test_hostcode.py && \
  OMP_NUM_THREADS=1 $(BIN)/python -m tilewise.backends.hopper.host.aot

kernels-hopper: setup $(VENV)/ready-kernels-$(TORCH)
	@$(COMPILE_HOPPER) --table src/tilewise/backends/hopper/kernels.txt $(if $(CANDIDATES),--candidates)

# For CI: whether all have the programs that kernels.txt lists. Where it names these sources, one kernel of each kind shows whether the compiler
# is still the same. Else a few are compiled that show every value of every field, and all others traced, some minutes more.
kernels-hopper-sample: setup $(VENV)/ready-kernels-$(TORCH)
	@$(COMPILE_HOPPER) --sample --programs

# A process for each 16 GB of the GPU, which the oracle may take, and eight at most. Hopper's tests skip what `make kernels-hopper` and,
# for what is not shipped, `python -m tests.judge build --backend hopper` have not left in src/tilewise/backends/hopper/kernels.
GPU_PROCESSES = $(shell nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2>/dev/null | \
  awk 'NR == 1 {n = int($$1 / 16000)} END {print (n > 8 ? 8 : n < 1 ? 1 : n)}')

gpu-test: setup
	@$(BIN)/python -m pytest -m gpu -n $(GPU_PROCESSES) --maxschedchunk 1 tests/gpu

# The site (mkdocs.yml), built without a network; a dead link or any other warning is an error.
$(VENV)/ready-docs-$(TORCH): $(VENV)/ready-$(TORCH)
	@$(INSTALL) $(CONSTRAINTS) --editable '.[test,docs]' && touch $@

docs: $(VENV)/ready-docs-$(TORCH)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build && \
	  echo "docs: build/site/index.html; its search needs a server: $(BIN)/python -m http.server --bind 127.0.0.1 --directory build/site"

# The pages that commands write: what runs where, what the algorithms move, how fast it is (docs/README.md).
pages: setup
	@$(BIN)/python -m tests.support --write && $(BIN)/python -m tilewise_papers.docs docs && \
	  $(BIN)/python -m bench.page --write && $(BIN)/python -m tilewise_papers.evidence --write

bench: setup
	@$(BIN)/tilewise bench

# The CPU's goals beside SDPA and eager attention, measured and judged; on a machine that does nothing else.
bench-cpu: setup
	@rm -f out/cpu-goals.jsonl
	@$(BIN)/tilewise bench --device cpu --budget 3 --out out/cpu-goals.jsonl

# The contract's calls, recorded once and replayed without Python (tests/native): under AddressSanitizer and UBSan, with
# every allocation failing in turn; under ThreadSanitizer, several callers at once too; and small ones under valgrind.
CASES := build/cases.bin
COMMA := ,
replay = $(CMAKE) -S . -B build/$(1) -DTILEWISE_SANITIZE=$(2) -DCMAKE_CXX_FLAGS=-g > build/$(1).log && \
         $(CMAKE) --build build/$(1) --parallel --target replay >> build/$(1).log

$(CASES): $(LIBRARY) $(EMULATED) tests/native/record.py tests/backends/contract.py tests/backends/test_cpu.py tests/backends/test_cpu_tangents.py tests/backends/tangents.py bench/cases.py bench/kinds.py bench/testing.py
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -p no:xdist -p tests.native.record --record $(CASES) \
	  tests/backends/test_cpu.py tests/backends/test_cpu_tangents.py -k "(not Avx and not Portable and not billion) or test_cpu_tangents"

asan: setup $(CASES)
	@$(call replay,asan,address$(COMMA)undefined)
	build/asan/replay $(CASES) --threads 1,3
	build/asan/replay $(CASES) --threads 1,2 --at-most 64 --starve

tsan: setup $(CASES)
	@$(call replay,tsan,thread)
	build/tsan/replay $(CASES) --threads 4 --together 3

valgrind: setup $(CASES)
	@$(call replay,plain,)
	valgrind --quiet --error-exitcode=1 --leak-check=full --show-leak-kinds=definite --errors-for-leak-kinds=definite \
	  build/plain/replay $(CASES) --threads 2 --at-most 64

# What a release uploads (shipping/wheel.py): a wheel with all Hopper kernels, one for every other machine, the sources; judged by auditwheel
# and built twice. KERNELS=here takes the kernels that are there. Then the folder of the Hugging Face kernels hub, of that wheel.
$(VENV)/ready-release-$(TORCH): $(VENV)/ready-$(TORCH)
	@$(INSTALL) $(CONSTRAINTS) --editable '.[test,release]' && touch $@

wheel: setup $(VENV)/ready-release-$(TORCH) $(if $(KERNELS),,kernels-hopper)
	@$(BIN)/python -m shipping.wheel --again

# A release, on a Hopper GPU, in some hours: the version is checked first; then all kernels are built, and all of them and both GPU backends judged
# (the contract, every kernel, random calls, tests/gpu, the sanitizers; tests/judge). The wheels take no kernel beside those that were right.
# The tag is set last, and nothing is pushed (shipping/release.py).
release: setup $(VENV)/ready-release-$(TORCH)
	@$(BIN)/python -m shipping.release
	@$(MAKE) --no-print-directory kernels
	@$(if $(KERNELS),,$(MAKE) --no-print-directory kernels-hopper)
	@$(BIN)/python -m tests.judge release --backend hopper --minutes 240 --out out/release-hopper.jsonl
	@$(BIN)/python -m tests.judge release --backend triton --minutes 60 --out out/release-triton.jsonl
	@$(BIN)/python -m shipping.wheel --again --judged
	@$(MAKE) --no-print-directory hub docs
	@$(BIN)/python -m shipping.release --tag

hub: $(if $(wildcard dist/*manylinux*x86_64.whl),setup,wheel)
	@$(BIN)/python -m shipping.hub dist/*manylinux*x86_64.whl

clean:
	rm -rf .venv .venv-newest build dist out $(LIBRARY)
