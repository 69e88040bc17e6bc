#!/usr/bin/env bash
# Megatron with Zephon on GPUs: four steps, a save at the second, then on from there on another number of GPUs, and the
# proof that every step has the records of one uninterrupted run.
#
#   tools/megatron_gpu_smoke.sh [FIRST_GPUS [SECOND_GPUS]]     (default 1 and 1; 2 and 1 shows the change)
#
# Needs the environment of scripts/setup, CUDA, and the data of `make demo` (built if missing). With Transformer
# Engine installed (pip install --no-build-isolation "transformer-engine[pytorch]"), PACKED=1 runs it with packed
# sequences as well: --dataloader-inter-document-masking.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

first=${1:-1} second=${2:-1}
out=${OUT:-.zephon/megatron-gpu-smoke}
python=.venv/bin/python
command -v nvidia-smi >/dev/null || { echo "megatron_gpu_smoke: no GPU (no nvidia-smi) on this machine." >&2; exit 1; }

[[ -f .zephon/demo/tokenizer/tokenizer.json ]] || "$python" -m examples.demo --folder .zephon/demo
# Megatron wants this for tensor parallelism on older GPUs.
export CUDA_DEVICE_MAX_CONNECTIONS=1

train() { # GPUS FOLDER ARGUMENTS...
    local gpus=$1 folder=$2
    shift 2
    "$python" -m torch.distributed.run --standalone --nproc_per_node="$gpus" -m megatron_zephon.pretrain_gpt_zephon \
        --zephon-data-config recipes/pretrain.toml --zephon-ledger "$folder/ledger" \
        --tokenizer-model .zephon/demo/tokenizer \
        --num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 512 --max-position-embeddings 512 \
        --micro-batch-size 2 --global-batch-size 16 --train-iters 4 --lr 1e-3 --lr-decay-iters 100 --log-interval 1 \
        --bf16 --no-gradient-accumulation-fusion --no-persist-layer-norm \
        --save "$folder/model" --load "$folder/model" --save-interval 2 "$@"
}

smoke() { # NAME ARGUMENTS...
    local name=$1
    shift
    rm -rf "${out:?}/$name"
    train "$first" "$out/$name/one" "$@"
    mkdir -p "$out/$name/two/model/dataloader"
    cp -r "$out/$name/one/model/iter_0000002" "$out/$name/two/model/"
    cp -r "$out/$name/one/model/dataloader/iter_0000002" "$out/$name/two/model/dataloader/"
    echo 2 >"$out/$name/two/model/latest_checkpointed_iteration.txt"
    train "$second" "$out/$name/two" "$@"
    .venv/bin/zephon verify "$out/$name/one/ledger" "$out/$name/two/ledger"
    echo "megatron_gpu_smoke ($name): $first GPU(s), then $second: the same global batches"
}

if "$python" -c 'import transformer_engine' 2>/dev/null; then
    smoke plain
    [[ -z ${PACKED:-} ]] || smoke packed --dataloader-inter-document-masking --attention-backend flash
else
    smoke plain --transformer-impl local
fi
