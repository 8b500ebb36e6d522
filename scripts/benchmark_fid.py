"""Times the two heavy ends of an evaluation on random features of Inception's size, and tells the memory they take.

    OMP_NUM_THREADS=2 python scripts/benchmark_fid.py [--images 50000] [--reference 10000] [--device cuda]
"""

import argparse
import resource
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import fid  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--reference", type=int, default=10_000)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.manual_seed(0)

    # Variances over six orders, as of Inception's features.
    scale = torch.logspace(0, -3, 2048, dtype=torch.float64)
    statistics = []
    for shift in (0, 0.01):
        moments = fid.Moments(2048)
        moments.add(torch.randn(10_000, 2048) * scale + shift)
        statistics.extend(moments.mean_and_covariance())
    start = time.perf_counter()
    distance = fid.frechet_distance(*statistics)
    print(f"Frechet distance at 2048 dimensions: {time.perf_counter() - start:.2f} s ({distance:.6f}), "
          f"{torch.get_num_threads()} threads")
    del statistics, moments

    reference = torch.rand(args.reference, 2048, device=args.device)
    images = torch.rand(args.images, 2048, device=args.device)
    start = time.perf_counter()
    precision, recall = fid.precision_recall(reference, images)
    seconds = time.perf_counter() - start
    if args.device.startswith("cuda"):
        memory = f"{torch.cuda.max_memory_allocated() / 2**30:.2f} GiB of GPU memory at most"
    else:
        memory = f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB of the whole process at most"
    print(f"Precision {precision:.4f} and recall {recall:.4f}, {args.reference} x {args.images}: {seconds:.1f} s, "
          f"{memory}, of which the features are {(reference.nbytes + images.nbytes) / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
