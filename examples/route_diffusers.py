"""Trains a LoRA with diffusers' own training script, after changing two lines to route its transformer.

    python examples/route_diffusers.py <train_dreambooth_lora_sd3.py> --output_dir=lora --max_train_steps=1000

The script is an unmodified one from diffusers/examples of the installed version, followed by its own arguments. Before
it, you can set --route=2,-4,0.5, the route, and --dense_after=0.85, the fraction of steps after which training is
dense. The changed lines are printed, so that you can edit the script instead.
"""

import argparse
import ast
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

STEP = re.compile(r"^( +)with accelerator\.accumulate\((\w+)\):$", flags=re.M)


def network_of(script: str, trained: str) -> str:
    """Returns the transformer that the step calls. Raises SystemExit if the script trains something else."""
    tree = ast.parse(script)
    [step] = [part for part in ast.walk(tree) if isinstance(part, ast.With) and
              ast.unparse(part.items[0].context_expr) == f"accelerator.accumulate({trained})"]
    called = {part.func.id for part in ast.walk(step) if isinstance(part, ast.Call) and isinstance(part.func, ast.Name)}
    networks = sorted(name for name in called if name.endswith("transformer") or name == "dit")
    if len(networks) != 1 or trained not in (*networks, "models_to_accumulate"):
        raise SystemExit(f"The script trains {trained}, and its step calls the transformers {networks}: the step must "
                         f"call exactly one, and train it.")
    defined = {part.id for part in ast.walk(tree) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
    missing = [name for name in (networks[0], "global_step", "args") if name not in defined]
    if "args.max_train_steps" not in script:
        missing.append("args.max_train_steps")
    if missing:
        raise SystemExit(f"The script does not define {', '.join(missing)}, which the changed line needs.")
    return networks[0]


def patched(script: str, route: str, dense_after: float) -> str:
    """Returns a training script with routed steps. Raises SystemExit if no step is written as in diffusers."""
    [*steps] = STEP.finditer(script)
    if len(steps) != 1:
        raise SystemExit(f"{len(steps)} lines of the script are `with accelerator.accumulate(…):`, but exactly one is "
                         f"needed, around the training step of a transformer.")
    name, network = steps[0][2], network_of(script, steps[0][2])
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
    settings, script_args = parser.parse_known_args(words)
    code = patched(settings.script.read_text(encoding="utf-8"), settings.route, settings.dense_after)
    sys.argv = [str(settings.script), *script_args]
    exec(compile(code, settings.script, "exec"), {"__name__": "__main__", "__file__": str(settings.script)})


if __name__ == "__main__":
    main()
