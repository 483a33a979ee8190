#!/usr/bin/env bash
# Compiles every kernel with nvcc for sm_80 and sm_90a, warnings and register spills as errors, links them, and links the
# test programs that scripts/cuda/test.sh runs on a GPU.
#
#   scripts/cuda/build.sh [output folder]          default: build/cuda
#
# nvcc is $NVCC, else the one on the path, in $CUDA_HOME or in /usr/local/cuda, else that of pip's nvidia-cuda-nvcc in
# the active Python environment. Headers and libraries come from the same toolkit, else from pip's nvidia-cuda-runtime
# and nvidia-cuda-cccl. Without nvcc the script says so and succeeds: there is nothing to compile with.
# DUOKV_REQUIRE_NVCC=1 makes that an error.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-build/cuda}

# Folders of pip's nvidia-* wheels in site-packages: nvidia/cu13 (CUDA 13), or nvidia/cuda_nvcc and so on (CUDA 12).
wheel_folders() {
  command -v python3 >/dev/null || return 0
  python3 - <<'PYTHON'
import glob, site, sys
for folder in dict.fromkeys(site.getsitepackages() + sys.path):
    for path in glob.glob(folder + '/nvidia/cu[0-9]*') + sorted(glob.glob(folder + '/nvidia/cuda_*')):
        print(path)
PYTHON
}
mapfile -t wheels < <(wheel_folders)

nvcc=${NVCC:-}
for candidate in "$(command -v nvcc || true)" "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" "${wheels[@]/%//bin/nvcc}"
do
  [ -n "$nvcc" ] || { [ -x "$candidate" ] && nvcc=$candidate; }
done
if [ -z "$nvcc" ]; then
  echo "cuda build skipped: no nvcc (set NVCC or CUDA_HOME, or pip install nvidia-cuda-nvcc nvidia-cuda-runtime" \
    "nvidia-cuda-cccl)"
  [ -z "${DUOKV_REQUIRE_NVCC:-}" ]
  exit
fi

mkdir -p "$out"
flags=(-std=c++20 -O3 -lineinfo -Inative -Werror all-warnings -Xcompiler -Wall,-Wextra,-fPIC
  -gencode arch=compute_80,code=sm_80 -gencode arch=compute_90a,code=sm_90a -t 2)
link_flags=()
# Wheels have lib where nvcc expects lib64.
toolkit=$(dirname "$(dirname "$nvcc")")
[ -d "$toolkit/lib64" ] || [ ! -d "$toolkit/lib" ] || link_flags+=(-L "$toolkit/lib")
# nvcc knows its own toolkit's folders; a toolkit put together from wheels may keep headers elsewhere.
echo '#include <cuda_runtime.h>' >"$out/probe.cu"
if ! "$nvcc" -E "$out/probe.cu" -o /dev/null >/dev/null 2>&1; then
  for folder in "${wheels[@]}"; do
    [ -d "$folder/include" ] && flags+=(-isystem "$folder/include")
    [ -d "$folder/include/cccl" ] && flags+=(-isystem "$folder/include/cccl")
    [ -d "$folder/lib" ] && link_flags+=(-L "$folder/lib")
  done
  if ! "$nvcc" "${flags[@]}" -E "$out/probe.cu" -o /dev/null >/dev/null 2>&1; then
    echo "cuda build failed: $nvcc finds no cuda_runtime.h (pip install nvidia-cuda-runtime nvidia-cuda-cccl)" >&2
    exit 1
  fi
fi

"$nvcc" --version | sed -n 's/^Cuda compilation tools, /nvcc /p'
objects=()
for source in native/cuda/*.cu native/cuda/test/*.cu; do
  object=$out/$(basename "$source" .cu).o
  # Tests are compiled too, to run on a GPU; only kernels that ship are held to the limits on spills.
  limits=()
  case $source in */test/*) ;; *) objects+=("$object") limits=(-Xptxas -v,--warn-on-spills,-Werror) ;; esac
  echo "$source"
  "$nvcc" "${flags[@]}" "${limits[@]}" -c "$source" -o "$object" >"$object.log" 2>&1 || {
    cat "$object.log" >&2
    exit 1
  }
done
"$nvcc" -shared -cudart static "${link_flags[@]}" "${objects[@]}" -o "$out/libduokv_kernels.so"
for test in native/cuda/test/*_test.cu; do
  name=$(basename "$test" .cu)
  "$nvcc" -cudart static "${link_flags[@]}" "$out/$name.o" "${objects[@]}" -o "$out/$name"
done
echo "linked $out/libduokv_kernels.so from ${#objects[@]} kernel files, and the test programs"
