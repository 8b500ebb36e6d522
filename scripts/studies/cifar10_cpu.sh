#!/usr/bin/env bash
# Dense against TREAD on CIFAR-10 in pixels, small enough for a CPU: width 128, depth 12, patch 4 (64 tokens), 8,000
# steps of 64. All runs take about 10 hours of one core, not counting scores [derived]. Results: docs/results.md.
. "$(dirname "$0")/common.sh"
seeds=${SEEDS:-0 1 2} experiment=cifar10_cpu
base() {
    train_and_score "$1" 2000 model.hidden_size=128 model.num_heads=2 compile=true checkpoint.every=250 \
        samples.every=2000 evaluate.num_samples=1000 evaluate.num_steps=18 evaluate.batch_size=100 "${@:2}"
}
point() { num_steps=18 score "$@"; }
for seed in $seeds; do for model in dit tread; do
    base edm-$model-seed$seed model=$model seed=$seed steps=8000; point edm-$model-seed$seed 8000 5000
done; done
for model in dit tread; do
    name=edm-$model-finetuned-seed0
    base $name model=dit init_from=$runs/edm-$model-seed0 steps=1000
    point $name 1000 5000
    for scale in 1.25 1.5 2; do
        point $name 1000 1000 cfg-$scale guidance=cfg scale=$scale
        point $name 1000 1000 sg-$scale guidance=tread scale=$scale gamma1=0.3 gamma2=0.7 "$route"
        point $name 1000 1000 both-$scale guidance=cfg_tread scale=$scale gamma1=0.2 gamma2=0.7 "$route"
    done
done
compare pairs=edm-dit:edm-tread seconds=edm-dit:0.861,edm-tread:0.611
