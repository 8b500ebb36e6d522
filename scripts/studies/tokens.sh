#!/usr/bin/env bash
# Does the cost of a route fall with the number of tokens? The same images, CIFAR-10 at 32 px with mirrored copies, cut
# into 64 and 256 tokens by patch 4 and 2. Dense against TREAD (2→8, ratio 0.5), width 64, depth 12. The networks differ
# in the patch embedding and the last layer alone: 48 and 12 numbers a token, below the width.
# Written before the first result:
# * Length: 3,124 steps of 32 images (2 epochs of 50,000), three seeds. Scored after each epoch with 1,000 images, and
#   at the end with 2,500. Precision and recall stand beside each distance.
# * Learning rate: for 64 tokens length.sh has chosen 4e-3 for both, with the same networks, data and length. For 256
#   tokens AdamW at 4e-3 and 2e-3, seed 0, and so on by halves for as long as one of the two networks scores better than
#   at the rate above. For each network the rate with the lowest distance of 1,000 images at the end is used.
# * Verdict for each number of tokens: at the end, of 2,500 images, by the 95 % t-interval of the paired difference
#   TREAD - dense. The route pays if the interval is below 0, costs if it is above 0, and is undecided otherwise. At
#   equal FLOPs the same, of 1,000 images, dense interpolated between its scores.
# * Verdict for the question: the cost falls with the number of tokens if the interval of (TREAD - dense at 256 tokens)
#   minus (TREAD - dense at 64), paired by seed, is below 0; it rises if above 0; else there is no verdict.
# * The smallest gain that three seeds can show is 2.48 standard deviations of the paired differences. In length.sh that
#   is 0.67 after 4 epochs, so a gain of 1.7 or more.
# * 1,024 tokens (patch 1): three seeds on a GPU; on a CPU one pair, as long as there is time, which allows no verdict.
# Found since: for 256 tokens 2e-3 for dense and 4e-3 for TREAD. 1,024 were not trained, as a step takes 7.9 s.
. "$(dirname "$0")/common.sh"
pair() {    # tokens, patch, seed, rates of dense and of TREAD
    for model in dit:"$4" tread:"$5"; do
        name=${model%:*}-$1-${model#*:} name=${name%-4e-3}-seed$3
        train_and_score "$name" 1562 $cifar model=${model%:*} seed="$3" steps=3124 \
            optimizer.lr=${model#*:} model.patch_size="$2"
        score "$name" 3124 2500
    done
}
for lr in 4e-3 2e-3 1e-3; do pair 256 2 0 $lr $lr; done
for seed in $seeds; do pair 64 null "$seed" 4e-3 4e-3; pair 256 2 "$seed" 2e-3 4e-3; done     # 1024 1 on a GPU
compare pairs=dit-64:tread-64,dit-256-2e-3:tread-256 changes=true
