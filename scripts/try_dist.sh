#!/usr/bin/env bash
# Tries what `make dist` has built, as a user would who has nothing else:
#
#     scripts/try_dist.sh [FOLDER WITH ONE WHEEL AND ONE SOURCE PACKAGE]
#
# An empty environment gets the wheel with the extra `tune` and its dependencies; then, in its place, the source package.
# After each the package is imported and the command is called. PYTHON chooses the interpreter.
set -euo pipefail
folder=$(cd "${1:-dist}" && pwd)
constraints=$(cd "$(dirname "$0")/.." && pwd)/constraints.txt
python=$(realpath -s "$(command -v "${PYTHON:-python3}")")

shopt -s nullglob
wheels=("$folder"/*.whl) sources=("$folder"/*.tar.gz)
[ "${#wheels[@]}" = 1 ] && [ "${#sources[@]}" = 1 ] || {
    echo "try_dist: $folder must have one wheel and one source package, got ${#wheels[@]} and ${#sources[@]} (make dist)" >&2
    exit 1
}
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cd "$place"  # from where the package's source cannot be imported
"$python" -m venv venv
unset PYTHONPATH

try() {
    venv/bin/python - "$place" <<'END'
import sys
import dgc
from dgc.version import __version__
assert dgc.__file__.startswith(sys.argv[1]), dgc.__file__
print("dgc", __version__, "in an empty environment")
END
    venv/bin/dgc --help > help
    grep -q plan help
    venv/bin/dgc plan resnet50 --nodes 8 --worker gpu --network 1gbit --compute 0.2 > plan
    head -n 1 plan
}

venv/bin/python -m pip install --quiet -c "$constraints" "deep-gradient-compression[tune] @ file://${wheels[0]}"
try
venv/bin/python -m pip install --quiet --no-deps --force-reinstall "${sources[0]}"
try
