#!/bin/sh
# Everything that needs a GPU, in one call and without network; results under out/ (or the folder given).
#
#   tests/gpu/run.sh [OUT]            the packages of python3, and those in WHEELS (default: wheels/) before them
#   DRY_RUN=1 tests/gpu/run.sh [OUT]  the same steps on the fake device
#   BUDGET=540                        seconds that all steps together may take
#
# What a machine needs is in docs/benchmarks/gpu.md, and how WHEELS is filled where there is a network.
set -eu
cd "$(dirname "$0")/../.."
OUT=${1:-out}
PYTHON=${PYTHON:-python3}
WHEELS=${WHEELS:-wheels}
mkdir -p "$OUT"
if [ -d "$WHEELS" ]; then
    SITE="$OUT/site"
    "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --upgrade \
        --target "$SITE" "$WHEELS"/*.whl
    PYTHONPATH="$(cd "$SITE" && pwd)${PYTHONPATH:+:$PYTHONPATH}"
    export PYTHONPATH
fi
exec "$PYTHON" -m bench.gpu --out "$OUT" --budget "${BUDGET:-540}" ${DRY_RUN:+--dry-run}
