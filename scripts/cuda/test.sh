#!/usr/bin/env bash
# Builds the kernels and runs their tests on the machine's GPU, under compute-sanitizer's memcheck and racecheck where it
# is installed. Where there is no GPU the script says so and succeeds.
#
#   scripts/cuda/test.sh [output folder]           default: build/cuda
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-build/cuda}
if ! command -v nvidia-smi >/dev/null || ! nvidia-smi -L; then
  echo "cuda tests on a GPU skipped: no GPU"
  exit
fi
DUOKV_REQUIRE_NVCC=1 scripts/cuda/build.sh "$out"
for test in native/cuda/test/*_test.cu; do
  program=$out/$(basename "$test" .cu)
  echo "$program"
  "$program"
  command -v compute-sanitizer >/dev/null || continue
  compute-sanitizer --tool memcheck --error-exitcode 1 "$program"
  compute-sanitizer --tool racecheck --error-exitcode 1 "$program"
done
