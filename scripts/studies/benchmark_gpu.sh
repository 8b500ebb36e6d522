#!/usr/bin/env bash
# What one GPU of 140 GB (an H200) tells in a quarter of an hour, the most telling groups first: 800 s, and 100 s for
# its machine to start. A part has stated seconds, writes $OUT/<name>.json at once, and is skipped where that exists.
#   bash scripts/studies/benchmark_gpu.sh                    all groups
#   bash scripts/studies/benchmark_gpu.sh check graphs       some of: check graphs xl2 official sampling
#   REHEARSAL=1 bash scripts/studies/benchmark_gpu.sh        every part on a CPU, with tiny networks
# For a machine without network that has Python 3.12, torch, accelerate and timm, first make .carry, and copy it along:
#   bash scripts/studies/benchmark_gpu.sh prepare 3.12 <a clone of CompVis/tread>
# OFFICIAL is a checkout of CompVis/tread at fccf77c, INCEPTION torch-fidelity's weights; parts that lack them are
# left out.
set -uo pipefail
cd "$(dirname "$0")/../.."
out=${OUT:-bench} python=${PYTHON:-python} failed=()
official=${OFFICIAL:-.carry/official} inception=${INCEPTION:-.carry/inception.pth}

prepare() {
    local get=("$python" -m pip download -q --no-deps --only-binary=:all: --implementation cp --python-version "$1"
               --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64
               -d .carry/wheels)
    rm -rf .carry && mkdir -p .carry/wheels && git describe --always --dirty --abbrev=12 > .carry/commit || return
    git clone -q "$2" .carry/official && git -C .carry/official checkout -q fccf77c || return
    rm -rf .carry/official/.git .carry/official/docs    # a nested repository is often left behind
    "${get[@]}" typing-inspection typing-extensions torchao==0.18.0 $(sed -nE \
        's/^((hydra-core|omegaconf|pydantic|annotated-types|torch-fidelity)==[^ ]+).*/\1/p' requirements-train.txt) &&
        "${get[@]}" "$(unzip -p .carry/wheels/pydantic-[0-9]*.whl '*/METADATA' |
            sed -nE 's/^Requires-Dist: (pydantic-core==[0-9.]+).*/\1/p')" &&
        "$python" -m pip wheel -q --no-deps -w .carry/wheels antlr4-python3-runtime==4.9.3 && du -sh .carry
}

# ---- how a part runs ------------------------------------------------------------------------------------------------

rehearsal=false tiny=()
if [ -n "${REHEARSAL:-}" ]; then
    rehearsal=true      # in which a part may take ten minutes
    tiny=(device=cpu precision=fp32 compile=false hidden_size=32 depth=4 num_heads=2 tokens=16 num_latents=64
          batch_size=4 rounds=1 steps=1 warmup=0 num_steps=1 features=pixels features_weights=null image_size=8
          'routes=[{selection_ratio: 0.5, start_layer_idx: 1, end_layer_idx: 2}]')
fi

# Seconds at most, name, script, settings. A name in _ddp is that of a group of one rank. At its limit it gets SIGINT.
part() {
    local limit=$1 name=$2 script=$3 start=("$python"); shift 3
    [ ! -e "$out/$name.json" ] || { echo "== $name: done before"; return; }
    [[ $name != *_ddp ]] || start+=(-m torch.distributed.run --standalone --nproc_per_node 1)
    echo; echo "== $name (at most $limit s)"
    [ $rehearsal = false ] || limit=600
    timeout --foreground -s INT -k 10 "$limit" "${start[@]}" "$script" "$@" 2>&1 | tee -i "$out/$name.txt"
    local status=${PIPESTATUS[0]}
    case $status in
        0) return ;;
        124 | 137) echo "$name: its time was up" ;;
    esac
    failed+=("$name"); return 1
}

# Seconds at most, name, settings of the benchmark; those of a rehearsal replace others.
measure() {
    local limit=$1 name=$2 script=benchmark setting settings=(); shift 2
    [[ $name != official_* ]] || script=studies/benchmark_official
    for setting in precision=bf16 compile=true device=cuda "$@"; do
        [[ " ${tiny[*]-} " == *" ${setting%%=*}="* ]] || settings+=("$setting")
    done
    part "$limit" "$name" "scripts/$script.py" out="$out/$name" compile_cache="$out/cache" "${settings[@]}" \
        ${tiny[@]+"${tiny[@]}"}
}

# ---- the groups -----------------------------------------------------------------------------------------------------

# 1. Is it right? Nothing is timed, so both share the GPU.
#    Rule: where a check fails, compile=reduce-overhead is not used on such a run, and the check's issue comes first.
check() {
    part 150 check scripts/check_gpu.py out="$out/check.json" only='CUDA graphs' rehearsal=$rehearsal &
    local one=$!
    part 150 check_ddp scripts/check_gpu.py out="$out/check_ddp.json" only='CUDA graphs' rehearsal=$rehearsal &
    local other=$!
    wait $one || failed+=(check)
    wait $other || failed+=(check_ddp)
}

# 2. Which CUDA graphs? Rule: where -passes fails, or at 32 images has an "over first" below 1.3, which is over torch's
#    graphs of each block, training/cuda_graphs.py and its tests go, and compile=reduce-overhead is torch's mode.
graphs() {
    local batch kind
    for batch in 32 256; do
        for kind in "" _ddp; do
            measure 55 "s2_$batch$kind" backbone_type=DiT-S/2 batch_size=$batch rounds=3 steps=10 warmup=4 \
                'variants=[dit-blocks,tread-blocks,dit,tread,dit-passes,tread-passes]'
        done
    done
}

# 3. What is fastest for XL/2? Rules: an attention that is faster by 3 % than torch's choice becomes dit.py's on such a
#    GPU; -fp8 below 1.1 of dit goes; -muon below 0.9 of dit is said on docs/recipes.md.
xl2() {
    local kind
    for kind in null flash cudnn flash3; do
        [ $kind != flash3 ] || has flash_attn_interface || continue
        [ $rehearsal = false ] || [ $kind != cudnn ] || continue        # a CPU has none
        measure 45 "xl2_attention_$kind" backbone_type=DiT-XL/2 batch_size=256 attention=$kind rounds=3 steps=3
    done
    measure 75 xl2_options backbone_type=DiT-XL/2 batch_size=256 rounds=3 steps=3 \
        'variants=[dit,dit-fp8,dit-muon,tread,tread-muon]'
}

# 4. The official step beside ours, in turns. XL/2 of 128 images, as both networks' activations must fit; dense and
#    routed apart, as the official code is slower where one process compiles both. Rule: README states the ratios.
official() {
    [ -e "$official/utils/train_helper.py" ] || { echo "== without OFFICIAL that group is left out"; return; }
    local kind
    for kind in dit tread; do
        measure 60 "official_xl2_$kind" path="$official" backbone_type=DiT-XL/2 batch_size=128 rounds=3 steps=4 \
            "variants=[$kind]"
    done
    measure 35 official_s2_tread path="$official" backbone_type=DiT-S/2 batch_size=256 rounds=3 steps=10 \
        'variants=[tread]'
}

# 5. Sampling, compiled or not, and Inception's images a second. Rule: speed.compile_to_sample's number of images is the
#    "first batch s" of dit divided by what an image of dit-eager takes longer.
sampling() {
    measure 45 sample_xl2 mode=sample backbone_type=DiT-XL/2 batch_size=64 num_steps=8 scale=1.5 rounds=2 \
        'variants=[dit,dit-eager]'
    [ -e "$inception" ] || [ $rehearsal = true ] || { echo "== without INCEPTION its part is left out"; return; }
    measure 20 inception mode=score features_weights="$inception" batch_size=256 rounds=2
}

has() { "$python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$1') is None)"; }

if [ "${1:-}" = prepare ]; then
    prepare "${@:2}"; exit
fi
mkdir -p "$out"
trap 'echo; echo "Stopped by Ctrl-C. Parts that were done are in $out."; exit 130' INT
export PYTHONUNBUFFERED=1
[ ! -e .carry/commit ] || export TREAD_COMMIT=${TREAD_COMMIT:-$(cat .carry/commit)}    # where git is absent
if [ -d .carry/wheels ] && ! has hydra; then
    "$python" -m pip install -q --no-index --no-deps --target "$out/site" .carry/wheels/*.whl || exit
    export PYTHONPATH=$out/site
fi
[ $# -gt 0 ] || set -- check graphs xl2 official sampling
for group in "$@"; do
    case $group in
        check | graphs | xl2 | official | sampling) "$group" ;;
        *) echo "$group is no group: they are check graphs xl2 official sampling"; exit 2 ;;
    esac
done
echo
if [ ${#failed[@]} -gt 0 ]; then
    echo "Failed or out of time: ${failed[*]}. Their output is in $out/<name>.txt."; exit 1
fi
echo "All parts are in $out, after $SECONDS s."
