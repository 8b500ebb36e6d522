#!/usr/bin/env bash
# From nothing to pictures in minutes, on a CPU and without data: installs, writes the built-in shapes as latents, trains a
# TREAD-routed DiT on them, and samples a grid with one row a class. Run again, it resumes, or finishes at once.
#   bash scripts/quickstart.sh [model=dit]
set -euo pipefail
cd "$(dirname "$0")/.."
case ${1:-model=tread} in
    model=tread | model=dit) model=${1:-model=tread} model=${model#model=} ;;
    *) echo "quickstart.sh takes model=dit or model=tread; for other settings call train.py experiment=quickstart." >&2; exit 2 ;;
esac
. scripts/environment.sh requirements.txt

python scripts/prepare_latents.py source=shapes resolution=16 autoencoder=identity out=data/shapes16
reference=data/shapes16-pixels.npz
[ -f $reference ] || python fid.py reference_from=data/shapes16 features=pixels out=$reference
# Scores the untrained network and, at the end, the trained one. Without being told, accelerate gives a process on a CPU a single thread.
accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
    --num_cpu_threads_per_process "$(python -c 'import os; print(len(os.sched_getaffinity(0)))')" \
    train.py experiment=quickstart model="$model" evaluate.every=1000000 evaluate.reference=$reference
run=runs/quickstart-$model
grid=$run/samples/grid.png
[ "$grid" -nt "$run/checkpoints" ] || python sample.py checkpoint="$run" seeds=0-59 num_steps=18 batch_size=60 out="$grid"

python - "$run" <<'PYTHON'
import json, sys
rows = [json.loads(line) for line in open(f"{sys.argv[1]}/results.jsonl")]
scores = {row["source"]["step"]: next(iter(row["metrics"].items())) for row in rows if row["source"].get("in_training")}
name, untrained = scores[0]
_, trained = scores[max(scores)]
print(f"\nFréchet distance to the training set, of images averaged to 8x8 pixels ({name}, {rows[0]['images']} images; "
      f"no FID, and no measure across data sets):\n  untrained {untrained:10.2f}\n  trained   {trained:10.2f}")
PYTHON
cat <<TEXT

The pictures:       $grid (one row a class; the last training grids lie beside it)
The numbers:        $run/metrics.jsonl
Next:
  source .venv/bin/activate
  bash scripts/quickstart.sh model=dit                                    the same without routing
  python sample.py checkpoint=$run classes=ring guidance=cfg scale=2
  python scripts/prepare_latents.py source=<folder or zip of class folders> out=data/mine resolution=256 autoencoder=sd_vae_ema
  accelerate launch train.py model=tread data=folder data.path=data/mine name=mine
TEXT
