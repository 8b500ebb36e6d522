#!/usr/bin/env bash
# All measurements on one GPU, in calls of at most nine minutes, each of which resumes where the last one stopped:
#   benchmark  scripts/studies/benchmark_gpu.sh; without diffusers or torchao one part each is skipped
#   data       the images in pixels, the features, the reference
#   official   the official training step and ours, where OFFICIAL is a checkout of CompVis/tread at fccf77c
#   timing     seconds of a step of dense and routed in turns, for the axis of the study's figures
#   study      configs/study/cifar10.yaml, its runs, most useful first; last, as it takes the longest
# STUDY=emoji64 studies emoji at 64 px, with the two files of its head as TRAIN_ZIP and TEST_ZIP.
#
#   LIMIT=540 OUT=out TRAIN_ZIP=cifar10-train.zip WEIGHTS=resnet56.th \
#       bash scripts/studies/gpu_study.sh [settings of study.py]
#   STUDY=rehearsal PARTS="data study" LIMIT=180 bash scripts/studies/gpu_study.sh          a rehearsal on a CPU
#
# Finished work is kept in STATE (runs/gpu_<study>, some GB); after each part small files go into $OUT/gpu_study.tar.gz.
# A new machine takes that file as PREVIOUS and repeats no finished part. A stopped run starts over there, because its
# weights are not in the file: choose runs that fit into a call, as "also=['steps=8000']" should.
# TEST_ZIP=cifar10-test.zip also scores the floor. TREAD_COMMIT names the commit if the machine has no repository.
# scripts/check_gpu.py first says whether the machine is good for it. For a machine without network build wheels, by the
# same version of Python; antlr4 is published as source alone, so `pip download` is not enough:
#   pip wheel -w wheels -r requirements-train.txt                                      # elsewhere
#   pip install --no-index --find-links wheels -r requirements-train.txt               # there
# Where torch and the others are there already, both with: hydra-core==1.3.8 omegaconf==2.3.1 pydantic==2.14.3
set -uo pipefail
began=$SECONDS
for name in TRAIN_ZIP TEST_ZIP WEIGHTS OFFICIAL PREVIOUS OUT STATE; do      # before the folder changes
    [ -z "${!name:-}" ] || printf -v "$name" '%s' "$(realpath -m "${!name}")"
done
case ${PYTHON:-} in /*) ;; */*) PYTHON=$PWD/$PYTHON ;; esac      # a link into its environment stays one
cd "$(dirname "$0")/../.."
study=${STUDY:-cifar10} python=${PYTHON:-$(command -v python || command -v python3)} failed=()
state=${STATE:-runs/gpu_$study}
results=$state/results
out=${OUT:-$state/out}
timed=dit,tread images=data/cifar10 preparation="resolution=32 mirror=true"
case $study in
    cifar10_cpu) timed=edm-dit,edm-tread ;;
    emoji64) images=data/emoji64 preparation=resolution=64 ;;
esac
reference=$images-resnet56.npz
limit_of_call=$((began + ${LIMIT:-540}))
end=$((limit_of_call - ${RESERVE:-45}))      # so much for the last save, the report and the packing
export TQDM_DELAY=30
mkdir -p "$results/done" "$out"
if [ -n "${PREVIOUS:-}" ] && [ ! -e "$results/unpacked" ]; then
    tar -xzf "$PREVIOUS" -C "$results" && touch "$results/unpacked" || exit 1
fi

left() { echo $((end - SECONDS)); }

pack() {
    tar -czf "$out/.packing" -C "$results" --exclude=./study/runs --exclude=./study/timing --exclude=./unpacked .
    if [ $? -le 1 ]; then      # 1: a file grew meanwhile
        mv "$out/.packing" "$out/gpu_study.tar.gz"
    else
        echo "gpu_study.sh: $out/gpu_study.tar.gz could not be written; the results are in $results." >&2
    fi
    cp "$results"/study/study.md "$out"/ 2>/dev/null
    return 0
}

# name, seconds at most, command: runs it unless it is done; the others run whether it fails or not. At its limit
# it gets SIGTERM, and saves.
part() {
    local name=$1 limit=$2; shift 2
    [ ! -e "$results/done/$name" ] || { echo "== $name: done before"; return; }
    if [ "$(left)" -lt "${LEAST:-20}" ]; then
        echo "== $name: no time is left for it in this call"; failed+=("$name"); return
    fi
    [ "$limit" -lt "$(left)" ] || limit=$(left)
    echo "== $name (at most $limit s)"
    timeout -s "${SIGNAL:-TERM}" -k 30 "$limit" "$@" 2>&1 | tee -ai "$results/$name.txt"
    case ${PIPESTATUS[0]} in
        0) touch "$results/done/$name" ;;
        124 | 137 | 143) echo "$name: its time was up; rerun the same command to resume"; failed+=("$name") ;;
        *) failed+=("$name") ;;
    esac
    pack
}

prepare() {
    if [ "$study" = rehearsal ]; then
        [ -f data/rehearsal/metadata.json ] || "$python" scripts/prepare_latents.py source=shapes shapes.count=60 \
            resolution=16 autoencoder=identity out=data/rehearsal || return
        [ -f data/rehearsal-pixels.npz ] || "$python" fid.py reference_from=data/rehearsal features=pixels \
            out=data/rehearsal-pixels.npz
        return
    fi
    if [ ! -f "$images/metadata.json" ]; then
        [ -f "$TRAIN_ZIP" ] || { echo "gpu_study.sh: TRAIN_ZIP=$TRAIN_ZIP does not exist: give its zip."; return 1; }
        "$python" scripts/prepare_latents.py source="$TRAIN_ZIP" out="$images" autoencoder=identity \
            $preparation || return
    fi
    if [ ! -f data/resnet56.pt ]; then
        [ -f "$WEIGHTS" ] || { echo "gpu_study.sh: WEIGHTS=$WEIGHTS does not exist: give its .th."; return 1; }
        "$python" scripts/studies/export_features.py resnet56 "$WEIGHTS" data/resnet56.pt || return
    fi
    [ -f "$reference" ] || "$python" fid.py reference_from="$images" features=torchscript \
        features_weights=data/resnet56.pt batch_size=500 out="$reference" || return
}

# A process for dense and one for routed: code that is compiled for one would slow the other.
official() {
    local name
    for name in dit tread; do
        [ ! -e "$results/official-$name.json" ] || continue
        "$python" scripts/studies/benchmark_official.py path="$OFFICIAL" out="$results/official-$name" \
            "variants=[$name,$name-eager]" backbone_type=DiT-S/2 batch_size=256 precision=bf16 compile=true rounds=3 \
            steps=10 || return
    done
}

# Functions run in the shell that timeout starts.
export -f prepare official
export study python results images preparation reference
export TRAIN_ZIP=${TRAIN_ZIP:-} WEIGHTS=${WEIGHTS:-} OFFICIAL=${OFFICIAL:-}

for name in ${PARTS:-benchmark data official timing study}; do
    case $name in
        benchmark) OUT=$results/benchmark LIMIT=255 PYTHON=$python SIGNAL=INT part benchmark 270 \
            bash scripts/studies/benchmark_gpu.sh ;;
        data) [ -f "$reference" ] || rm -f "$results/done/data"      # another machine's data are not here
            part data 240 bash -c prepare ;;
        official) [ -z "$OFFICIAL" ] || part official 240 bash -c official ;;
        timing)
            part timing 300 "$python" scripts/study.py study="$study" out="$results/study" 'tasks=[time]' \
                "only=[$timed]" rounds=3 "$@" ;;
        study)
            [ ! -f "${TEST_ZIP:-}" ] || cp "$TEST_ZIP" "$images-test.zip"
            floor=(); [ "$study" = rehearsal ] || [ -f "$images-test.zip" ] || floor=("study.floor=[]")
            rm -f "$results/done/study"      # study.py finds out what is done
            # What is killed before it has started saves nothing, and what is killed at all ends late.
            LEAST=${LEAST:-60} part study 99999 "$python" scripts/study.py study="$study" out="$results/study" \
                'tasks=[train,score]' "${floor[@]}" "$@"
            left_of_call=$((limit_of_call - SECONDS - 3))
            timeout $((left_of_call > 1 ? left_of_call : 1)) "$python" scripts/study.py study="$study" \
                out="$results/study" 'tasks=[report]' "${floor[@]}" "$@" > "$results/report.txt" 2>&1 ||
                { tail -n 3 "$results/report.txt"; failed+=(report); }
            pack ;;
        *) echo "gpu_study.sh: PARTS names $name; there are benchmark, data, official, timing and study." >&2; exit 2 ;;
    esac
done

echo "After $((SECONDS - began)) s: $out/gpu_study.tar.gz"
if [ ${#failed[@]} -gt 0 ]; then
    echo "Failed or not at their end: ${failed[*]}. Rerun the same command to resume."; exit 1
fi
