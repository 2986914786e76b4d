#!/usr/bin/env bash
# Memory predicted and measured on H200s: E4B and 31B, cache bfloat16 and int8, one and two GPUs, chunks of 2,048 and 8,192.
# With two GPUs visible the TP 2 rows run as well. Each row is one fresh process with an empty calibration.
set -uo pipefail
cd "$(dirname "$0")/../.."
for tp in ${TP_SIZES:-1 2}; do
  for variant in E4B 31B; do
    for dtype in bfloat16 int8; do
      for chunk in 2048 8192; do
        timeout 90 python3 tests/gpu/engine_on_gpu.py --variant "$variant" --tensor-parallel-size "$tp" \
          --kv-cache-dtype "$dtype" --max-num-batched-tokens "$chunk" --max-model-len 16384 --memory-only 2>&1 |
          grep -E "memory|Error|error" | sed "s/^/chunk $chunk /"
      done
    done
  done
done
