#!/usr/bin/env bash
# What does a route cost when a trained network is fine-tuned? A dense network trained on CIFAR-10, then all of its
# weights on emoji: dense, and with ratios 0.25 and 0.5, without and with an off-ramp (dense for the last 15 %). 0.9M
# parameters, 64 tokens, 1,400 and then 400 steps of 32 images (3.7 epochs), three seeds. Runs of a seed start from the
# same network and share the order of data, noise and labels. Results, and what trained LoRA: docs/results.md.
. "$(dirname "$0")/common.sh"
reference=data/emoji32-resnet56.npz
quarter="model.routes=[{selection_ratio: 0.25, start_layer_idx: 2, end_layer_idx: 8}]"
tune() {    # a variant, settings
    train full-$1-seed$seed data.path=data/emoji32 init_from=$runs/base-seed$seed seed=$seed steps=400 \
        optimizer.lr=3e-4 "${@:2}"
    score full-$1-seed$seed 400 1000
}
for seed in $seeds; do
    train base-seed$seed $cifar model=dit seed=$seed steps=1400
    tune dit model=dit
    tune 25 model=tread "$quarter"
    tune 50 model=tread
    tune 25-off model=tread "$quarter" route_schedule.dense_after=0.85
    tune 50-off model=tread route_schedule.dense_after=0.85
done
compare pairs=full-dit:full-25,full-dit:full-50,full-dit:full-25-off,full-dit:full-50-off
python scripts/studies/held_out.py $runs/full-*-seed* --data data/emoji32 data/emoji-held-out32 --out $runs/losses.jsonl
