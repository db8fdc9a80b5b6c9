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
python=${PYTHON:-python3}
limit=15000000

# hydra-core, datasets, gguf and httpx2 with what they need, pydantic, and what the tests import.
# typing_extensions and idna may be there in versions that are too old for pydantic and httpx2.
names=(
    hydra-core omegaconf
    datasets multiprocess dill
    gguf
    httpx2 httpcore2 truststore idna
    pydantic pydantic_core annotated-types typing-inspection typing_extensions
    beartype
)
source_only=antlr4-python3-runtime

pinned() {
    grep -Ei "^$1==" "$root/constraints.txt" || {
        echo "gpu_wheels.sh: constraints.txt must pin $1; add it there" >&2
        exit 2
    }
}

pip=("$python" -m pip --disable-pip-version-check)
platforms=()
for tag in manylinux_2_28 manylinux_2_17 manylinux2014; do
    platforms+=(--platform "${tag}_x86_64")
done
requirements=()
for name in "${names[@]}"; do
    requirement=$(pinned "$name")
    requirements+=("$requirement")
done
built=$(pinned "$source_only")

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"${pip[@]}" download --quiet --no-deps --only-binary=:all: --python-version 3.12 \
    --implementation cp --abi cp312 --abi abi3 --abi none "${platforms[@]}" \
    --dest "$scratch" "${requirements[@]}"
# it has no wheel of its own; the one made here holds Python files only
"${pip[@]}" wheel --quiet --no-deps --wheel-dir "$scratch" "$built"

mkdir -p "$folder"
rm -f "$folder"/*.whl
mv "$scratch"/*.whl "$folder"
count=$(find "$folder" -name '*.whl' | wc -l)
bytes=$(cat "$folder"/*.whl | wc -c)
awk -v count="$count" -v bytes="$bytes" -v folder="$folder" \
    'BEGIN { printf "%d wheels, %.1f MB, in %s\n", count, bytes / 1e6, folder }'
if [ "$bytes" -ge "$limit" ]; then
    echo "gpu_wheels.sh: the wheels must stay under 15 MB, and take $bytes bytes; leave one out" >&2
    exit 1
fi
