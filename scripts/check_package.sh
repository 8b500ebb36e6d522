#!/usr/bin/env bash
# Builds the wheel, installs it and torch into a new environment, and runs the example of routed/README.md from there.
#   PYTHON=python3.10 bash scripts/check_package.sh
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
mkdir "$folder/source"      # as building writes beside the sources
cp -r pyproject.toml LICENSE.txt routing_module.py routed "$folder/source"
"$folder/venv/bin/pip" wheel --quiet --no-deps -w "$folder" "$folder/source"
"$folder/venv/bin/pip" install --quiet numpy "$folder"/routed-*.whl
{ sed -n '/^```python$/,/^```$/p' routed/README.md | sed '/^```/d'; echo 'print(*routing.ids_keep[0].shape)'; } > "$folder/example.py"
cd "$folder"
[ "$(venv/bin/python example.py)" = "8 32" ]
venv/bin/python -c 'import routed; print(f"routed {routed.__version__} works on", __import__("sys").version.split()[0])'
