#!/usr/bin/env bash
# From install to images in minutes, on a CPU and without data: installs, writes the built-in shapes as latents, trains
# a routed DiT on them, scores it, samples a grid with one row per class, and draws the losses. Rerun it to resume.
#   bash scripts/quickstart.sh [model=dit]
set -euo pipefail
cd "$(dirname "$0")/.."
model=${1:-model=tread}
[[ $model = model=@(tread|dit) ]] ||
    { echo "quickstart.sh takes model=dit or model=tread; more: python train.py experiment=quickstart" >&2; exit 2; }
. scripts/environment.sh requirements-train.txt
data=data/shapes16 reference=data/shapes16-pixels.npz run=runs/quickstart-${model#model=}

has_gpu=$(python -c 'import torch; print(torch.cuda.is_available())')
export CUDA_VISIBLE_DEVICES=    # the CPU, also beside a GPU whose driver is too old for torch
export TQDM_DELAY=8             # seconds: work that is shorter shows no bar, so training's is the only one
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}   # threads that spin while they wait are slow beside busy processes
if [ ! -f $data/metadata.json ]; then
    printf '1/3  Draws 6,000 shapes to train on: seconds.\n'
    python scripts/prepare_latents.py source=shapes resolution=16 autoencoder=identity out=$data | sed '/^next:/d'
fi
if [ ! $reference -nt $data/metadata.json ]; then
    printf '\n2/3  Measures the shapes, to which scores compare: seconds.\n'
    python fid.py reference_from=$data features=pixels out=$reference
fi
printf '\n3/3  Trains, and scores the untrained and the trained network: 2 to 4 minutes on two cores.\n'
python train.py experiment=quickstart "$model" evaluate.every=1000000 evaluate.reference=$reference
printf '\nFréchet distance to the training set, of images averaged to 8x8 pixels (no FID; not comparable between data sets):\n'
python scripts/compare.py "$run" out="$run/curves" | grep '^|'

own="autoencoder=identity resolution=32" launch=python size=small_cpu
if [ "$has_gpu" = True ]; then
    own="autoencoder=sd_vae_ema resolution=256" launch="accelerate launch" size=small
fi
cat <<END

The pictures:       $(ls "$run"/samples/step-*.png | tail -n 1) (one row a class; those of earlier steps lie in its folder)
The curves:         $run/curves.png (loss and score; tensorboard --logdir runs shows them of all runs)
The numbers:        $run/metrics.jsonl and results.jsonl
Next:
  source .venv/bin/activate
  bash scripts/quickstart.sh model=dit                                    the same without routing
  python sample.py checkpoint=$run classes=ring guidance=cfg scale=2
  $launch scripts/prepare_latents.py source=<folder or zip of class folders> out=data/mine $own
  $launch train.py experiment=$size data.path=data/mine name=mine
END
