#!/usr/bin/env bash
# Builds what scripts/gpu/run.sh needs on a GPU machine into build/gpu: the CUDA backend, the tests of its kernels and
# the programs gpu_bench and golden, stripped. The GPU machine then needs a driver and cuBLASLt, no toolkit.
#
#   scripts/gpu/prepare.sh [folder of more golden cases]
#
# DUOKV_CUDA_ARCH is the card's architecture, 90a by default. Objects are kept in build/gpu-objects and build/gpu-tools,
# so that a second run compiles what changed.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=build/gpu
cases=${1:-}

# The machine that measures may have no git history.
commit=$(git rev-parse HEAD)
git diff --quiet HEAD -- native || commit+=-modified

export DUOKV_CUDA_ARCH=${DUOKV_CUDA_ARCH:-90a}
DUOKV_REQUIRE_NVCC=1 scripts/cuda/build.sh build/gpu-objects
cmake -S . -B build/gpu-tools -G Ninja -DCMAKE_BUILD_TYPE=Release -DDUOKV_ADDON=OFF -DDUOKV_CPU=OFF \
  -DDUOKV_TOOLS=ON >/dev/null
cmake --build build/gpu-tools --target gpu_bench golden

rm -rf "$out/bin" "$out/cases"
mkdir -p "$out/bin"
for program in build/gpu-objects/libduokv_cuda.so build/gpu-objects/*_test build/gpu-tools/native/tools/{gpu_bench,golden}
do
  strip --strip-unneeded -o "$out/bin/$(basename "$program")" "$program"
done
[ -z "$cases" ] || cp -r "$cases" "$out/cases"
echo "$commit" >"$out/commit"
du -sh "$out/bin" "$out"
