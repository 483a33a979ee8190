#!/usr/bin/env bash
# Builds what scripts/gpu/run.sh needs on a GPU machine into build/gpu: the CUDA backend, the tests of its kernels and
# the programs gpu_bench and golden, stripped; and into build/gpu.tar.xz, the one file to take to that machine beside
# the repository. It then needs a driver, cuBLASLt and Python, no toolkit.
#
#   scripts/gpu/prepare.sh [--with-node] [folder of more golden cases]
#
# --with-node also makes build/gpu-node.tar.xz, which is all that scripts/gpu/with-node.sh needs: Node, the addon, the
# backend, the tests and their packages.
# DUOKV_CUDA_ARCH is the card's architecture, 90a by default. Objects are kept in build/gpu-objects and build/gpu-tools,
# so that a second run compiles what changed.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=build/gpu
with_node=
if [ "${1:-}" = --with-node ]; then
  with_node=1
  shift
fi
cases=${1:-}
if [ -n "$cases" ] && [ ! -d "$cases" ]; then
  echo "there is no folder $cases" >&2
  exit 2
fi

# The machine that measures may have no git history.
commit=$(git rev-parse HEAD)
git diff --quiet HEAD -- native || commit+=-modified

export DUOKV_CUDA_ARCH=${DUOKV_CUDA_ARCH:-90a}
DUOKV_REQUIRE_NVCC=1 scripts/cuda/build.sh build/gpu-objects
cmake -S . -B build/gpu-tools -G Ninja -DCMAKE_BUILD_TYPE=Release -DDUOKV_ADDON=OFF -DDUOKV_CPU=OFF \
  -DDUOKV_TOOLS=ON >/dev/null
cmake --build build/gpu-tools --target gpu_bench golden

rm -rf "$out/bin" "$out/cases" "$out/commit"
mkdir -p "$out/bin"
for program in build/gpu-objects/libduokv_cuda.so build/gpu-objects/*_test build/gpu-tools/native/tools/{gpu_bench,golden}
do
  strip --strip-unneeded -o "$out/bin/$(basename "$program")" "$program"
done
[ -z "$cases" ] || cp -r --no-preserve=mode "$cases" "$out/cases"
echo "$commit" >"$out/commit"
contents=(bin commit)
[ -z "$cases" ] || contents+=(cases)
tar -cJf "$out.tar.xz" -C "$out" "${contents[@]}"
if [ -n "$with_node" ]; then
  node scripts/setup.mjs
  node scripts/prebuilds.mjs
  node scripts/gpu/node-tree.mjs "$out/node"
  tar -cJf "$out-node.tar.xz" -C "$out" node
fi
# What run.sh and with-node.sh compare the archives with.
touch "$out/commit" ${with_node:+"$out/node/package.json"}
du -h "$out"*.tar.xz
