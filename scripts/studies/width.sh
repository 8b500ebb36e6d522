#!/usr/bin/env bash
# Does the cost of a route fall with the width of the network? CIFAR-10 at 32 px with mirrored copies, patch 4 (64
# tokens), depth 12, heads of 64 channels, dense against TREAD (2→8, ratio 0.5) at widths 64, 128 and 256. The paper's
# networks are 384 to 1,152 wide; our studies with three seeds were 64 wide.
#
# Written before the first result:
# * Length: 3,124 steps of 32 images (2 epochs of 50,000), three seeds. Scored after each epoch with 1,000 images, and
#   at the end with 2,500. Precision and recall stand beside each distance. All in fp32, AdamW, constant rate.
# * Learning rate: for width 64 length.sh has chosen 4e-3 for both networks, with the same data and length. For 128 and
#   256 AdamW at 4e-3 and 2e-3, seed 0, and so on by halves for as long as one of the two networks scores better than at
#   the rate above. For each width and network the rate with the lowest distance of 1,000 images at the end is used.
# * Width 64 has the settings of dit-64 and tread-64 of tokens.sh. It is trained anew, as those rows were scored by
#   another file of the same features.
# * Verdict for each width: at the end, of 2,500 images, by the 95 % t-interval of the paired difference TREAD - dense.
#   The route pays if the interval is below 0, costs if it is above 0, and is undecided otherwise. At equal FLOPs the
#   same, of 1,000 images, dense interpolated between its scores.
# * Verdict for the question, from 64 to 128 and from 64 to 256: the cost falls with the width if the interval of (TREAD
#   - dense at the larger width) minus (TREAD - dense at 64), paired by seed, is below 0; it rises if above 0; else
#   there is no verdict. At equal images and at equal FLOPs.
# * What three seeds can show: an interval's half width is 2.48 standard deviations of the paired differences. In
#   tokens.sh that standard deviation was 0.7 for a cost and 1.8 for a change of the cost. So costs or gains of 1.8 can
#   be shown, and changes of 4.4; the cost at width 64 is 3.8, so only its end or its reversal can.
. "$(dirname "$0")/common.sh"
runs=runs/width/runs      # with reference_images=10000
run() {     # width, learning rate, seed, networks
    for model in ${4:-dit tread}; do
        name=$model-$1-$2 name=${name%-4e-3}-seed$3
        train "$name" $cifar model=$model model.hidden_size="$1" model.num_heads=$(($1 / 64)) optimizer.lr="$2" \
            seed="$3" steps=3124 checkpoint.keep_every=1562
        score "$name" 1562 1000; score "$name" 3124 1000; score "$name" 3124 2500
    done
}
for lr in 4e-3 2e-3; do run 128 $lr 0; done
# With seed 0 both networks of width 256 diverged at 4e-3 (dense at step 500, TREAD at 2,350), dense at 2e-3 (1,050).
# These runs were stopped: 1,000 images of dense at 4e-3 had a distance of 55.9 at step 1,562, untrained ones 59.0.
for lr in 4e-3 2e-3 1e-3 5e-4; do run 256 $lr 0; done
# Each network at its best rate: at width 256 1e-3 (dense) and 2e-3 (TREAD, which diverged with seeds 1 and 2).
for seed in $seeds; do run 64 4e-3 "$seed"; run 128 4e-3 "$seed"; run 256 1e-3 "$seed" dit; run 256 2e-3 "$seed" tread
done
compare pairs=dit-64:tread-64,dit-128:tread-128,dit-256-1e-3:tread-256-2e-3 changes=true
