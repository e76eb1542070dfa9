#!/bin/sh
# Everything about the copy kernels that needs a GPU, in one run of under five minutes. From the repository's root:
#
#     scripts/gpu_check.sh [OUTPUT.json]              default: gpu_check.json
#     scripts/gpu_check.sh --emulated [OUTPUT.json]   the same script on the host: shows that it runs, measures nothing
#
# Needs: nvcc, a CUDA build of torch and numpy in $PYTHON (default: python3). Installs nothing outside build/gpu-check.
# 1. builds the kernels   2. the checks under compute-sanitizer, where it is   3. checks and timings, results as JSON
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
BUILD=build/gpu-check

if [ "${1:-}" = --emulated ]; then
    exec "$PYTHON" scripts/gpu_check.py --emulated --output "${2:-gpu_check.json}"
fi
OUTPUT=${1:-gpu_check.json}
command -v nvcc >/dev/null || { echo "gpu_check: no nvcc on the PATH; install the CUDA toolkit" >&2; exit 2; }
"$PYTHON" -c 'import torch; assert torch.cuda.is_available()' || {
    echo "gpu_check: $PYTHON has no torch that sees a GPU; set PYTHON" >&2; exit 2; }

echo "== setup"
[ -x "$BUILD/venv/bin/python" ] || "$PYTHON" -m venv --system-site-packages "$BUILD/venv"
"$BUILD/venv/bin/python" -m pip install --quiet '.[dev]' || {
    echo "gpu_check: the build failed, see above" >&2; exit 1; }
RUN="timeout 240 $BUILD/venv/bin/python scripts/gpu_check.py"

if command -v compute-sanitizer >/dev/null; then
    for tool in memcheck racecheck; do
        echo "== compute-sanitizer $tool"
        compute-sanitizer --tool "$tool" --error-exitcode 9 $RUN --quick --output "$BUILD/$tool.json"
    done
else
    echo "== compute-sanitizer is not here: SKIPPED"
fi
echo "== checks and timings"
$RUN --output "$OUTPUT"
