# Each target sets up what it needs: a virtual environment with the package and its tools.
#
#   make demo    run attention here: on the GPU, or on the emulator where there is none
#   make test    the tests
#   make lint    style and types
#   make bench   speed beside cuDNN, FA2, FA3 and FA4 (needs a Hopper GPU)
#   make mutation  break kernels in every synchronising instruction: does the checker notice?
#
# TORCH may name another build, PYTHON another interpreter (3.10 or later), and JOBS how many tests
# run at once.

PYTHON ?= python3
TORCH ?= torch==2.13.0
JOBS ?= auto

venv := .venv
bin := $(venv)/bin
installed := $(venv)/.installed

.PHONY: demo test lint bench mutation clean
.DELETE_ON_ERROR:

demo bench: $(installed)
	$(bin)/python -m hopwell $@

test: $(installed)
	$(bin)/python -m pytest -n $(JOBS) --dist worksteal

mutation: $(installed)
	$(bin)/python -m tests.emulator.mutation forward-64 forward-128 backward-64 fa4-forward fa4-backward \
		forward-sm100-64 forward-sm100-128 forward-sm100-pair forward-sm100-queue \
		backward-sm100-64 backward-sm100-128 backward-sm100-192 \
		fa4-forward-sm100 fa4-forward-pair fa4-backward-sm100 fa4-backward-pair

lint: $(installed)
	$(bin)/ruff check
	$(bin)/ruff format --check
	$(bin)/basedpyright

clean:
	rm -rf $(venv)

$(installed): pyproject.toml
	$(PYTHON) -m venv $(venv)
	$(bin)/python -m pip install --quiet --upgrade pip
	$(bin)/python -m pip install --quiet '$(TORCH)' --editable '.[test,lint,peers,plot,transformers]'
	touch $@
