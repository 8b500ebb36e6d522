"""Trains a LoRA with diffusers' own training script and two changed lines: a route around its transformer.

    python examples/route_diffusers.py <train_dreambooth_lora_sd3.py> --output_dir=lora --max_train_steps=1000

The script is an unmodified one of diffusers/examples, of the installed version; what follows it are its arguments.
--route=2,-4,0.5 (before the script) is the route, --dense_after=0.85 the fraction of steps after which training is
dense. The changed lines are printed, so that you can make them in the script instead.
"""

import argparse
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

STEP = re.compile(r"^( +)with accelerator\.accumulate\((\w+)\):$", flags=re.M)


def patched(script: str, route: str, dense_after: float) -> str:
    """Returns a training script whose steps are routed; raises SystemExit where no step is written as in diffusers."""
    [*steps] = STEP.finditer(script)
    if len(steps) != 1 or "transformer" not in script:
        raise SystemExit(f"{len(steps)} lines of the script are `with accelerator.accumulate(…):`, and one is needed, "
                         f"around the step of a transformer.")
    network = name if (name := steps[0][2]).endswith("transformer") else "transformer"
    step = (f"{steps[0][1]}with accelerator.accumulate({name}), routed(\n{steps[0][1]}    {network}, [Route({route})] "
            f"if global_step < {dense_after} * args.max_train_steps else []):")
    lines = "from routed import Route, routed", step
    print(*lines, sep="\n")
    start = re.search(r"^import ", script, flags=re.M).start()
    script = STEP.sub(lambda _: lines[1], script)
    return f"{script[:start]}{lines[0]}\n{script[start:]}"


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--route", default="2,-4,0.5")
    parser.add_argument("--dense_after", type=float, default=0.85)
    parser.add_argument("script", type=Path)
    settings, own = parser.parse_known_args(words)
    code = patched(settings.script.read_text(encoding="utf-8"), settings.route, settings.dense_after)
    sys.argv = [str(settings.script), *own]
    exec(compile(code, settings.script, "exec"), {"__name__": "__main__", "__file__": str(settings.script)})


if __name__ == "__main__":
    main()
