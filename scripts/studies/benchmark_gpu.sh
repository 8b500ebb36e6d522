#!/usr/bin/env bash
# Eight minutes of benchmarks on one GPU, the most important first: training at XL/2 and B/2 dense and routed, sampling,
# and, if time is left, float8, tokens and CUDA graphs. Prints tables; JSON goes into $OUT. A part whose JSON exists is
# not run again, and compiled code is kept until its part succeeds. Needs no data and no download.
# LIMIT: seconds at most, of all parts.
#   OUT=bench LIMIT=465 bash scripts/studies/benchmark_gpu.sh
set -uo pipefail
cd "$(dirname "$0")/../.."
out=${OUT:-bench} python=${PYTHON:-python} failed=()
mkdir -p "$out"
end=$((SECONDS + ${LIMIT:-465}))
trap 'echo; echo "Stopped by Ctrl-C. Parts that were done are in $out."; exit 130' INT

# name, seconds at most, settings: the others run whether a part fails or not. At its limit a part gets SIGINT.
part() {
    local name=$1 limit=$2 left=$((end - SECONDS)); shift 2
    [[ " $*" == *" precision="* ]] || set -- "$@" precision=bf16
    [ ! -e "$out/$name.json" ] || { echo "== $name: done before"; return; }
    echo; echo "== $name (at most $limit s)"
    if [ "$left" -lt 20 ]; then
        echo "no time is left for it"; failed+=("$name"); return
    fi
    timeout --foreground -s INT -k 10 "$((limit < left ? limit : left))" \
        "$python" scripts/benchmark.py out="$out/$name" compile_cache="$out/cache/$name" device=cuda "$@" \
        2>&1 | tee -i "$out/$name.txt"
    case ${PIPESTATUS[0]} in
        0) rm -rf "$out/cache/$name" ;;
        124 | 137) echo "$name: its time was up"; failed+=("$name") ;;
        *) failed+=("$name") ;;
    esac
}

has() {
    "$python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$1') is None)" ||
        { echo; echo "== a part that needs $1 is left out"; return 1; }
}

# Compiling takes most of the time of the first two. XL/2 in four parts, since the activations of 256 images at once do
# not fit beside both variants' optimizers. CUDA graphs are recorded in the second step, so rounds wait for a few.
part train_xl2 230 mode=train backbone_type=DiT-XL/2 batch_size=256 grad_accum_steps=4 compile=true rounds=3 steps=2
part train_b2  110 mode=train backbone_type=DiT-B/2 batch_size=256 compile=true rounds=3 steps=4
part sample_xl2 45 mode=sample backbone_type=DiT-XL/2 batch_size=8 num_steps=40 scale=1.5 rounds=1
has torchao && part fp8_b2 60 mode=train backbone_type=DiT-B/2 batch_size=256 compile=true 'variants=[dit]' \
    precision=fp8 rounds=2 steps=4
for tokens in 64 1024 4096; do      # eager, at equal tokens a step
    part "tokens_$tokens" 20 mode=train backbone_type=DiT-B/2 tokens=$tokens batch_size=$((16384 / tokens)) rounds=2
done
for batch in 32 256; do             # images a step
    part "graphs_s2_$batch" 60 mode=train backbone_type=DiT-S/2 batch_size=$batch compile=reduce-overhead warmup=3 \
        rounds=3 steps=10
done

echo
if [ ${#failed[@]} -gt 0 ]; then
    echo "Failed or out of time: ${failed[*]}. Their output is in $out/<name>.txt."; exit 1
fi
echo "All parts are in $out, after $SECONDS s."
