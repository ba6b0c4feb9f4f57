#!/bin/sh
# Everything that needs a GPU, in one call and without network; results under out/ (or the folder given).
#
#   tests/gpu/run.sh [OUT]            installed packages, or wheels in WHEELS (default: wheels/)
#   DRY_RUN=1 tests/gpu/run.sh [OUT]  the same steps on the fake device
#
# To fill WHEELS where there is a network:
#   pip download -d wheels -r requirements.txt cupy-cuda12x nvidia-cuda-nvrtc-cu12 nvidia-cuda-runtime-cu12
set -eu
cd "$(dirname "$0")/../.."
OUT=${1:-out}
PYTHON=${PYTHON:-python3}
WHEELS=${WHEELS:-wheels}
if [ -d "$WHEELS" ]; then
    "$PYTHON" -m venv "$OUT/.venv"
    PYTHON="$OUT/.venv/bin/python"
    "$PYTHON" -m pip install --quiet --no-index --find-links "$WHEELS" -r requirements.txt
    [ -n "${DRY_RUN:-}" ] || "$PYTHON" -m pip install --quiet --no-index --find-links "$WHEELS" \
        cupy-cuda12x nvidia-cuda-nvrtc-cu12 nvidia-cuda-runtime-cu12
fi
exec "$PYTHON" -m bench.gpu --out "$OUT" ${DRY_RUN:+--dry-run}
