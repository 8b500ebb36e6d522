#!/usr/bin/env bash
# What does precision=bf16 cost on a CPU? TREAD on CIFAR-10 in fp32 and in bf16, 1,400 steps, three seeds, all
# sampled in fp32; the network and the data of length.sh. Results: docs/performance.md.
. "$(dirname "$0")/common.sh"
for seed in $seeds; do
    for precision in fp32 bf16; do
        train tread-$precision-seed$seed $cifar model=tread seed=$seed steps=1400 optimizer.lr=4e-3 precision=$precision
        score tread-$precision-seed$seed 1400 1000
    done
done
compare pairs=tread-fp32:tread-bf16
