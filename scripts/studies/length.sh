#!/usr/bin/env bash
# Does a route pay after longer training? Dense against TREAD (2→8, ratio 0.5) on CIFAR-10 with mirrored copies, for 20
# epochs of the 50,000 images and, one pair, for 80. Width 64, depth 12, 64 tokens, as in when_it_pays.sh.
# Written before the first result:
# * Learning rate: AdamW at 5e-4, 1e-3, 2e-3 and 4e-3, seed 0, 3,124 steps (2 epochs), for each of the two networks; the
#   rate with the lowest distance of 1,000 images is that network's in all that follows. Found since: 4e-3 for both.
# * Question 1, length: three seeds of 31,240 steps (20 epochs), scored after each epoch. The verdict is at 20 epochs, of
#   5,000 images, by the 95 % t-interval of the paired difference TREAD - dense. The route pays at equal images if the
#   interval is below 0, costs if it is above 0, and is undecided otherwise; its lower end says how large a gain is
#   excluded. At equal FLOPs the same, of 1,000 images, dense interpolated between its epochs. Length favours the route
#   if the difference at 20 epochs minus that at 2 (1,000 images) has an interval below 0.
# * A dense last part: TREAD, dense for the last 15 % of the 20 epochs, against the same dense runs.
# * Question 2, the report in CompVis/tread issue 11: flow matching, one seed of 20 epochs, with and without a route;
#   each sampled dense and by sample_tread, at scales 1 and 1.5. The report is seen here if, of 5,000 images, routed and
#   sampled dense < never routed, and both < sample_tread. Found since: 8.2, 6.5, and 8.5 and 8.4.
# * One pair to 80 epochs, scored after every tenth. Found since: in fp32 it was stopped after 30, so bf16 (c967f56).
. "$(dirname "$0")/common.sh"
run() { train_and_score "$1" 1562 $cifar model="$2" seed="$3" optimizer.lr="$4" steps="$5" "${@:6}"; }
for lr in 5e-4 1e-3 2e-3 4e-3; do for model in dit tread; do run lr-$lr-$model-seed0 $model 0 $lr 3124; done; done
for seed in $seeds; do
    for model in dit tread; do run $model-seed$seed $model "$seed" 4e-3 31240; done
    run tread-off-15-seed$seed tread "$seed" 4e-3 31240 route_schedule.dense_after=0.85
    for name in dit tread tread-off-15; do score $name-seed$seed 31240 5000; done
done
for model in dit tread; do      # 80 epochs and flow matching; bf16 is sampled in fp32, as all is
    train $model-80-seed0 $cifar model=$model optimizer.lr=4e-3 steps=124960 precision=bf16 checkpoint.keep_every=7810
    for step in 7810 $(seq 15620 15620 124960); do score $model-80-seed0 $step 1000; done
    score $model-80-seed0 124960 5000
    train rf-$model-seed0 $cifar model=$model optimizer.lr=4e-3 steps=31240 diffusion=rf
    rf() { num_steps=40 score rf-$model-seed0 31240 5000 "$@"; }
    rf; rf cfg guidance=cfg scale=1.5; for s in 1 1.5; do rf tread-$s guidance=tread scale=$s "$route"; done
done
compare pairs=dit:tread,dit:tread-off-15,dit-80:tread-80,rf-dit:rf-tread
