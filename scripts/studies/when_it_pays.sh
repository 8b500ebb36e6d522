#!/usr/bin/env bash
# When does a route pay? Seven questions, each dense against TREAD (2→8, 0.5, unless stated) with one factor changed.
# Small enough for a CPU: width 64, depth 12, 0.9M parameters, 1,400 to 7,000 steps of 32 images. Runs of a seed share
# the order of data, noise and labels. Results, and what trained alignment (Q5): docs/results.md.
. "$(dirname "$0")/common.sh"
declare -A data=([emoji]=data.path=data/emoji32 [emoji64]="data.path=data/emoji64 data.input_size=64" [cifar]=$cifar
                 [cifar5k]="data=cifar10 data.path=data/cifar10-5000")
run() {     # a variant, its data, steps, steps from a score to the next, settings
    case $2 in emoji) of=emoji32 ;; emoji64) of=emoji64 ;; *) of=cifar10 ;; esac
    reference=data/$of-resnet56.npz
    train_and_score "$1-seed$seed" "$4" ${data[$2]} seed="$seed" steps="$3" checkpoint.keep_every="$4" "${@:5}"
    [ "$3" -lt 7000 ] || score "$1-seed$seed" 7000 5000
}
both() { run "$1-dit" "${@:2}" model=dit; run "$1-tread" "${@:2}" model=tread; }
on() { run "$1" emoji 1400 700 "model.routes=[{selection_ratio: $2, start_layer_idx: $3, end_layer_idx: $4}]"; }
for seed in $seeds; do
    both emoji emoji 2800 700; both long emoji 7000 1400; both cifar5k cifar5k 7000 1400    # Q1: repeated data
    both cifar5k-xavier cifar5k 2800 700 model.init=xavier      # Q2: the official initialisation; also on all CIFAR-10
    both cifar cifar 1400 700; both cifar-xavier cifar 1400 700 model.init=xavier
    both emoji-muon emoji 1400 700 optimizer=muon; both cifar-muon cifar 1400 700 optimizer=muon    # Q7: the optimizer
    for end in 85 7; do run emoji-off-$((end == 7 ? 30 : 15)) emoji 1400 1400 route_schedule.dense_after=0.$end; done
    run emoji-random emoji 1400 1400 route_schedule.selection_ratios=[0.3,0.5,0.7]     # Q8: a ratio for each step
    both coarse emoji64 1400 700 model.patch_size=8
    [ "$seed" -lt 2 ] || continue
    both xavier emoji 1400 700 model.init=xavier; both fine emoji64 1400 700    # Q3: 64 px as 256 tokens, and above as 64
    on return-0 0.5 2 "8, return_from: 0"; on return-1 0.5 2 "8, return_from: 1"    # Q4: the value they return with
    [ "$seed" -gt 0 ] || { on ratio-25 0.25 2 8; on ratio-75 0.75 2 8; on place-0-4 0.5 0 4; on place-6-8 0.5 6 8; }   # Q6
done
pairs=cifar-dit:cifar-muon-dit,emoji-dit:emoji-muon-dit,emoji-tread:emoji-random
for name in emoji long cifar5k cifar5k-xavier cifar cifar-xavier xavier coarse fine emoji-muon cifar-muon; do
    pairs+=,$name-dit:$name-tread
done
for name in return-0 return-1 emoji-off-15 emoji-off-30; do pairs+=,emoji-tread:$name; done
for name in ratio-25 ratio-75 place-0-4 place-6-8 emoji-off-15 emoji-off-30; do pairs+=,emoji-dit:$name; done
compare pairs=$pairs seconds=emoji-dit:0.206,emoji-tread:0.142
losses() { python scripts/studies/held_out.py --out $runs/losses.jsonl "$@"; }
losses $runs/{emoji,long}-*-seed* --data data/emoji32 data/emoji-held-out32
losses $runs/cifar5k-{dit,tread}-seed* --data data/cifar10-5000 data/cifar10-test
