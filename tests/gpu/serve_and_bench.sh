#!/bin/sh
# Run serve_and_bench.py from this checkout, without an installed package: WHEELS is a folder of pure Python wheels that the
# machine lacks (starlette, uvicorn and what they need), used as they are.
set -eu
cd "$(dirname "$0")/../.."
path="$PWD/operator:$PWD/worker:$PWD/tests/gpu:$PWD/tests/models"
for wheel in "${WHEELS:-wheels}"/*.whl; do
  if [ -e "$wheel" ]; then path="$path:$(realpath "$wheel")"; fi
done
export PYTHONPATH="$path${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
exec python3 tests/gpu/serve_and_bench.py "$@"
