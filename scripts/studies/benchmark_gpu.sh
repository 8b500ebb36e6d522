#!/usr/bin/env bash
# What one GPU of 140 GB (an H200) tells in a quarter of an hour, the most telling parts first: 800 s, and 100 s for its
# machine to start. A part has stated seconds, writes $OUT/<name>.json at once, and is skipped where that exists.
#   bash scripts/studies/benchmark_gpu.sh                    all parts
#   bash scripts/studies/benchmark_gpu.sh check s2           those whose names begin so
#   REHEARSAL=1 bash scripts/studies/benchmark_gpu.sh        every part on a CPU, with tiny networks
# For a machine without network that has Python 3.12, torch, accelerate, timm and scipy, first make .carry and copy it:
#   bash scripts/studies/benchmark_gpu.sh prepare 3.12 <a clone of CompVis/tread>
# OFFICIAL is a checkout of CompVis/tread at fccf77c; parts that lack it are left out.
set -uo pipefail
cd "$(dirname "$0")/../.."
out=${OUT:-bench} python=${PYTHON:-python} chosen=$* failed=() tiny=() official=${OFFICIAL:-.carry/official}
[ -z "${REHEARSAL:-}" ] || tiny=(
    cpu=true precision=fp32 compile=false hidden_size=32 depth=4 num_heads=2 tokens=16 batch_size=4 rounds=1 steps=1
    warmup=0 num_steps=1 'routes=[{selection_ratio: 0.5, start_layer_idx: 1, end_layer_idx: 2}]')

# Seconds at most, name, settings; those of a rehearsal replace others. A name in _ddp is that of a group of one rank.
parts() {
    # 1. Is it right? Rule: where a check fails, compile=reduce-overhead is not used on such a run.
    part 70 check only='CUDA graphs'
    part 70 check_ddp only='CUDA graphs'
    # 2. Do CUDA graphs help? Rule: where they fail, or are at 32 images less than 1.3 times as fast, the pages no longer
    #    name compile=reduce-overhead for few images.
    local s2="backbone_type=DiT-S/2 rounds=3 steps=10 warmup=4" xl2="backbone_type=DiT-XL/2 rounds=3 steps=3" name
    for name in s2_32 s2_32_ddp s2_256 s2_256_ddp; do
        part 30 $name $s2 batch_size="$(cut -d_ -f2 <<< $name)"
        part 30 graphs_$name $s2 batch_size="$(cut -d_ -f2 <<< $name)" compile=reduce-overhead
    done
    # 3. What is fastest for XL/2? Rules: an attention that is faster by 3 % than torch's choice becomes dit.py's on such
    #    a GPU; fp8 below 1.1 of bf16 goes; Muon below 0.9 of AdamW is said on docs/recipes.md.
    part 45 xl2 $xl2 batch_size=256
    part 40 xl2_flash $xl2 batch_size=256 attention=flash
    [ -n "${REHEARSAL:-}" ] || part 40 xl2_cudnn $xl2 batch_size=256 attention=cudnn     # a CPU has none
    ! has flash_attn_interface || part 40 xl2_flash3 $xl2 batch_size=256 attention=flash3
    part 40 xl2_fp8 $xl2 batch_size=256 precision=fp8 'variants=[dit]'
    part 45 xl2_muon $xl2 batch_size=256 optimizer=muon
    # 4. The official step beside ours, in turns. XL/2 of 128 images, as both networks' activations must fit; dense and
    #    routed apart, as the official code is slower where one process compiles both. Rule: README states the ratios.
    if [ -e "$official/utils/train_helper.py" ]; then
        for name in dit tread; do
            part 55 official_xl2_$name official="$official" $xl2 batch_size=128 variants=[$name]
        done
        part 30 official_s2_tread official="$official" $s2 batch_size=256 'variants=[tread]'
    fi
    # 5. Sampling, compiled or not. Rule: compile_to_sample's number of images is the "first s" of the compiled one
    #    divided by what an image of the other takes longer.
    for name in true false; do
        part 25 sample_xl2_$name mode=sample backbone_type=DiT-XL/2 batch_size=64 num_steps=8 scale=1.5 rounds=2 \
            steps=1 warmup=0 compile=$name
    done
}

part() {
    local limit=$1 name=$2 start=("$python") setting prefix wanted=; shift 2
    local -A settings=()
    for prefix in ${chosen:-$name}; do [[ $name != "$prefix"* ]] || wanted=yes; done
    [ -n "$wanted" ] || return
    [ ! -e "$out/$name.json" ] || { echo "== $name: done before"; return; }
    echo; echo "== $name (at most $limit s)"
    [[ $name != *_ddp ]] || start+=(-m torch.distributed.run --standalone --nproc_per_node 1)
    if [[ $name == check* ]]; then
        start+=(scripts/check_gpu.py out="$out/$name.json" "$@" ${REHEARSAL:+rehearsal=true})
    else
        for setting in precision=bf16 compile=true "$@" ${tiny[@]+"${tiny[@]}"}; do
            settings[${setting%%=*}]=$setting       # the last of a key counts
        done
        start+=(scripts/benchmark.py out="$out/$name" "${settings[@]}")
    fi      # at its limit it gets SIGINT
    timeout --foreground -s INT -k 10 "${REHEARSAL:+60}$limit" "${start[@]}" 2>&1 | tee -i "$out/$name.txt"
    case ${PIPESTATUS[0]} in
        0) return ;;
        124 | 137) echo "$name: its time was up" ;;
    esac
    failed+=("$name")
}

prepare() {
    local get=("$python" -m pip download -q --no-deps --only-binary=:all: --implementation cp --python-version "$1"
               --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64
               -d .carry/wheels)
    rm -rf .carry && mkdir -p .carry/wheels && git describe --always --dirty --abbrev=12 > .carry/commit || return
    git clone -q "$2" .carry/official && git -C .carry/official checkout -q fccf77c || return
    rm -rf .carry/official/.git .carry/official/docs    # a nested repository is often left behind
    "${get[@]}" typing-inspection typing-extensions torchao==0.18.0 $(sed -nE \
        's/^((hydra-core|omegaconf|pydantic|annotated-types)==[^ ]+).*/\1/p' requirements-train.txt) &&
        "${get[@]}" "$(unzip -p .carry/wheels/pydantic-[0-9]*.whl '*/METADATA' |
            sed -nE 's/^Requires-Dist: (pydantic-core==[0-9.]+).*/\1/p')" &&
        "$python" -m pip wheel -q --no-deps -w .carry/wheels antlr4-python3-runtime==4.9.3 && du -sh .carry
}
has() { "$python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$1') is None)"; }

if [ "${1:-}" = prepare ]; then
    prepare "${@:2}"; exit
fi
mkdir -p "$out" && out=$(realpath "$out")
trap 'echo; echo "Stopped by Ctrl-C. Parts that were done are in $out."; exit 130' INT
export PYTHONUNBUFFERED=1 TORCHINDUCTOR_CACHE_DIR=$out/cache/inductor TRITON_CACHE_DIR=$out/cache/triton
[ ! -e .carry/commit ] || export TREAD_COMMIT=${TREAD_COMMIT:-$(cat .carry/commit)}    # where git is absent
if [ -d .carry/wheels ] && ! has hydra; then
    "$python" -m pip install -q --no-index --no-deps --target "$out/site" .carry/wheels/*.whl || exit
    export PYTHONPATH=$out/site
fi
parts
echo
[ ${#failed[@]} -eq 0 ] || { echo "Failed or out of time: ${failed[*]}. Their output is in $out/<name>.txt."; exit 1; }
echo "All parts are in $out, after $SECONDS s."
