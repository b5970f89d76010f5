# make demo · make test · make kernels · make lint · make gpu-test · make bench
# make TORCH=installed …   uses the torch (and triton) that the machine's python3 already has.
SHELL  := /bin/bash
PYTHON ?= python3
TORCH  ?= pinned
VENV   := .venv
BIN    := $(VENV)/bin

ifeq ($(TORCH),installed)
  VENV_FLAGS  := --system-site-packages
  CONSTRAINTS := --constraint build/installed-constraints.txt
else
  CONSTRAINTS := --constraint constraints.txt
endif

.PHONY: demo test kernels lint format gpu-test bench clean setup
setup: $(VENV)/ready-$(TORCH)

NATIVE := CMakeLists.txt $(wildcard src/tilewise/backends/cpu/native/*)

$(VENV)/ready-$(TORCH): pyproject.toml constraints.txt $(NATIVE)
	@mkdir -p build
	@$(PYTHON) -m venv $(VENV_FLAGS) $(VENV) 2>/dev/null || { \
	  rm -rf $(VENV); $(PYTHON) -m pip install --quiet --user virtualenv && $(PYTHON) -m virtualenv $(VENV_FLAGS) $(VENV); }
ifeq ($(TORCH),installed)
	@$(PYTHON) -m pip freeze 2>/dev/null | grep -Ei '^(torch|triton|numpy)==' > build/installed-constraints.txt || true
endif
	@echo "setup: installing into $(VENV) (a minute or two the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(CONSTRAINTS) --editable '.[test]'
	@rm -f $(VENV)/ready-*; touch $@

demo: setup
	@$(BIN)/tilewise demo

test: lint
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto

lint: setup
	@$(BIN)/ruff check --quiet . && $(BIN)/ruff format --check --quiet .

format: setup
	@$(BIN)/ruff check --quiet --fix . ; $(BIN)/ruff format --quiet .

kernels: setup
	@echo "kernels: no ahead-of-time kernel exists yet; nothing to compile"

gpu-test: setup
	@$(BIN)/python -m pytest -m gpu

bench: setup
	@$(BIN)/tilewise bench

clean:
	rm -rf $(VENV) build dist out .cmake CMakeFiles CMakeCache.txt CMakeInit.txt build.ninja cmake_install.cmake .ninja_* \
	  .skbuild-info.json src/tilewise/backends/cpu/libtilewise_cpu.so
