#!/bin/bash
# Download the wheels that a CUDA machine without network access lacks: scripts/gpu_wheels.sh [FOLDER]
#
# FOLDER is .gpu_wheels by default; the wheels in it are replaced. The machine has Python 3.12 on
# x86-64 Linux, torch, transformers, accelerate, jaxtyping, peft, pytest, hypothesis, matplotlib,
# pandas, pyarrow and rich. There:
#
#   python3 -m pip install --no-index --no-deps --no-compile --target /tmp/site .gpu_wheels/*.whl
#   export PYTHONPATH=/tmp/site
#
# wandb, tensorboard and trackio are left out: a run uses them only when its settings name them.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
folder=${1:-$root/.gpu_wheels}
pip=("${PYTHON:-python3}" -m pip --disable-pip-version-check)

# hydra-core, datasets, gguf and httpx2 with what they need, pydantic, and what the tests import.
# typing_extensions and idna may be there in versions that are too old for pydantic and httpx2.
names="hydra-core|omegaconf|datasets|multiprocess|dill|gguf|httpx2|httpcore2|truststore|idna"
names+="|pydantic|pydantic_core|annotated-types|typing-inspection|typing_extensions|beartype"
mapfile -t pinned < <(grep -Ei "^($names)==" "$root/constraints.txt")
mapfile -t source_only < <(grep -E "^antlr4-python3-runtime==" "$root/constraints.txt")
platforms=(--platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64)
platforms+=(--platform manylinux2014_x86_64)

mkdir -p "$folder"
rm -f "$folder"/*.whl
"${pip[@]}" download --quiet --no-deps --only-binary=:all: --python-version 3.12 \
    --implementation cp --abi cp312 --abi abi3 --abi none "${platforms[@]}" \
    --dest "$folder" "${pinned[@]}"
# it has no wheel of its own; the one made here holds Python files only
"${pip[@]}" wheel --quiet --no-deps --wheel-dir "$folder" "${source_only[@]}"
du -ch "$folder"/*.whl | tail -n 1
