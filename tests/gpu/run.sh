#!/bin/sh
# The first ten minutes on a GPU, in one call and without network; two files come back in OUT.
#
#   tests/gpu/run.sh [OUT] [--device fake] [--budget SECONDS] [--only NAMES]
#
# Packages are those of PYTHON (python3), and before them those in WHEELS (default: wheels/), which are unpacked
# into a temporary folder: docs/benchmarks/gpu.md says how it is filled. OUT is $OUT, or out/, unless given.
set -eu
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
PATH="$PATH:/usr/local/cuda/bin" # compute-sanitizer
export PATH
SITE=$(mktemp -d)
trap 'rm -rf "$SITE"' EXIT
for wheel in "${WHEELS:-wheels}"/*.whl; do
    if [ -f "$wheel" ]; then "$PYTHON" -m zipfile -e "$wheel" "$SITE"; fi
done
PYTHONPATH="$SITE${PYTHONPATH:+:$PYTHONPATH}" "$PYTHON" -m tests.gpu.first_contact "$@"
