# Two commands do everything on a fresh machine with Python 3.11 or newer and a C++ compiler:
#   make demo    trains a small transformer through the relay
#   make test    lint, types and all tests that need no accelerator
# While you work, `make quick` takes 40 seconds.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO_OPTIONS ?=
# Modules are compiled when they are first imported, and then kept: most never are.
export PYTHONDONTWRITEBYTECODE :=

KERNEL := l2l/parameter_server/libhost_kernel.so

.PHONY: demo test quick lint types unit package kernel thorough accelerator clean

demo: $(VENV)/ready $(KERNEL)
	$(BIN)/python examples/demo.py $(DEMO_OPTIONS)

test: lint types unit package

$(VENV)/ready: requirements.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

# The native host optimizer; needs g++ and nothing else.
kernel: $(KERNEL)

$(KERNEL): l2l/parameter_server/host_kernel.cpp l2l/parameter_server/build_kernel.sh
	sh l2l/parameter_server/build_kernel.sh

lint: $(VENV)/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/ready
	$(BIN)/mypy

# Two workers, and processes that tests start: more threads than cores would wait for each other.
# Files begin in the order of conftest.py: the long ones first.
unit: $(VENV)/ready $(KERNEL)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# 40 seconds on two cores, with lint: the language, the rooms, the settings, and parity with plain PyTorch.
QUICK := schedule architecture public_surface layout precision tensor_file replacing metrics tiny worker settings \
	host_mirror parity corners

quick: lint $(KERNEL)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile $(QUICK:%=tests/test_%.py)

# The wheel must import with nothing but its own dependencies beside it.
package: $(VENV)/ready
	rm -rf build/wheel
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation -w build/wheel .
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target build/wheel/site build/wheel/*.whl
	cd build/wheel/site && ../../../$(BIN)/python -c "import l2l, os; \
		from l2l.parameter_server import load_kernel; \
		assert os.path.samefile(os.path.dirname(l2l.__file__), 'l2l'); \
		assert load_kernel() is not None, 'the wheel has no kernel'"

# What takes long and finds what the others seldom miss.
thorough: $(VENV)/ready $(KERNEL)
	$(BIN)/python -m pytest -n 2 -m thorough

# On a machine with a CUDA device; uses the python3 that has torch there.
accelerator: $(KERNEL)
	$(PYTHON) -m pytest tests/accelerator -m accelerator

clean:
	rm -rf $(VENV) $(KERNEL) build dist runs *.egg-info .mypy_cache .ruff_cache .pytest_cache
