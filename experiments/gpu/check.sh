#!/usr/bin/env bash
# For a machine with a Hopper GPU, at most eight minutes: values and gradients of every GPU kernel against the reference,
# then token-conditional and sliding-window attention against cuDNN's flash attention at 8k to 64k positions. Tables go
# to experiments/results/kernels/gpu.check.json and gpu.json; exit code 1 where a kernel is wrong.
set -euo pipefail
cd "$(dirname "$0")/../.."
exec timeout 470 "${PYTHON:-python3}" -m kernels_pallas bench --check \
  --op token_conditional_attention sliding_window_attention gathered_attention \
  --sizes 8k..64k --impl pallas_gpu --seconds 360 --json experiments/results/kernels/gpu.json "$@"
