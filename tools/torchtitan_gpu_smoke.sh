#!/usr/bin/env bash
# TorchTitan with Zephon on GPUs: three steps, a save, then on from there on another number of GPUs, and the proof that
# every step has the records of one uninterrupted run.
#
#   tools/torchtitan_gpu_smoke.sh [FIRST_GPUS [SECOND_GPUS]]     (default 1 and 1; 2 and 1 shows the change)
#
# Needs the environment of scripts/setup, CUDA, and the data of `make demo` (built if missing).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

first=${1:-1} second=${2:-1}
out=${OUT:-.zephon/torchtitan-gpu-smoke}
python=.venv/bin/python
command -v nvidia-smi >/dev/null || { echo "torchtitan_gpu_smoke: no GPU (no nvidia-smi) on this machine." >&2; exit 1; }

[[ -f .zephon/demo/tokenizer/tokenizer.json ]] || "$python" -m examples.demo --folder .zephon/demo
rm -rf "$out"
export ZEPHON_RECIPE=recipes/torchtitan_debug.toml

train() { # GPUS FOLDER ARGUMENTS...
    local gpus=$1 folder=$2
    shift 2
    "$python" -m torch.distributed.run --standalone --nproc_per_node="$gpus" -m torchtitan.train \
        --module torchtitan_zephon --config llama3_debugmodel_zephon --dump_folder "$folder" \
        --checkpoint.enable --checkpoint.interval 3 --dataloader.ledger "$folder/ledger" "$@"
}

train "$first" "$out/one" --training.steps 6
mkdir -p "$out/two/checkpoint"
cp -r "$out/one/checkpoint/step-3" "$out/two/checkpoint/"
train "$second" "$out/two" --training.steps 6
.venv/bin/zephon verify "$out/one/ledger" "$out/two/ledger"
echo "torchtitan_gpu_smoke: $first GPU(s), then $second: the same global batches"
