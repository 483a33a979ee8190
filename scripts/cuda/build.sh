#!/usr/bin/env bash
# Builds the CUDA backend, libduokv_cuda.so, with nvcc for sm_80 (and as PTX for later cards) and sm_90a, warnings and
# register spills as errors, and links the test programs that scripts/gpu/run.sh runs on a GPU. How launchers launch the
# kernels goes to launches.txt, for scripts/cuda/kernels.mjs.
#
#   scripts/cuda/build.sh [output folder]          default: build/cuda
#
# The library also goes to build/Release, beside the addon, where `openDevice` looks for it.
#
# nvcc is $NVCC, else the one on the path, in $CUDA_HOME or in /usr/local/cuda, else that of pip's nvidia-cuda-nvcc in
# the active Python environment. Headers and libraries come from the same toolkit, else from pip's nvidia-cuda-runtime,
# nvidia-cuda-cccl and nvidia-cublas (whose calls are compiled against its header, and opened at run time).
# Without nvcc the script says so and succeeds: there is nothing to compile with. DUOKV_REQUIRE_NVCC=1 makes that an
# error. DUOKV_CUDA_ARCH=90a (or 80, or "80 90a") restricts the architectures, for a quick build; DUOKV_JOBS sets how
# many files are compiled at once, by default as many as there are cores.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-build/cuda}

# Folders of pip's nvidia-* wheels in site-packages: nvidia/cu13 (CUDA 13), or nvidia/cuda_nvcc and so on (CUDA 12).
wheel_folders() {
  command -v python3 >/dev/null || return 0
  python3 - <<'PYTHON'
import glob, site, sys
for folder in dict.fromkeys(site.getsitepackages() + sys.path):
    for pattern in '/nvidia/cu[0-9]*', '/nvidia/cuda_*', '/nvidia/cublas', '/nvidia/nccl':
        for path in sorted(glob.glob(folder + pattern)):
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
# GCC 12 sees overlapping copies in std::string's operator+ where there are none (GCC bug 105651).
flags=(-std=c++20 -O3 -lineinfo -Inative -Werror all-warnings
  -Xcompiler -Wall,-Wextra,-Wno-restrict,-fPIC,-fvisibility=hidden)
for arch in ${DUOKV_CUDA_ARCH:-80 90a}; do
  codes=sm_$arch
  [ "$arch" != 80 ] || codes=[sm_80,compute_80]
  flags+=(-gencode "arch=compute_$arch,code=$codes")
done
link_flags=()
# Wheels have lib where nvcc expects lib64.
toolkit=$(dirname "$(dirname "$nvcc")")
[ -d "$toolkit/lib64" ] || [ ! -d "$toolkit/lib" ] || link_flags+=(-L "$toolkit/lib")
# nvcc knows its own toolkit's folders; a toolkit put together from wheels may keep headers elsewhere.
finds() {
  echo "#include <$1>" >"$out/probe.cu"
  "$nvcc" "${flags[@]}" -E "$out/probe.cu" -o /dev/null >/dev/null 2>&1
}
if ! finds cuda_runtime.h || ! finds cublasLt.h; then
  for folder in "${wheels[@]}"; do
    [ -d "$folder/include" ] && flags+=(-isystem "$folder/include")
    [ -d "$folder/include/cccl" ] && flags+=(-isystem "$folder/include/cccl")
    [ -d "$folder/lib" ] && link_flags+=(-L "$folder/lib")
  done
  for header in cuda_runtime.h cublasLt.h; do
    if ! finds $header; then
      echo "cuda build failed: $nvcc finds no $header (pip install nvidia-cuda-runtime nvidia-cuda-cccl nvidia-cublas)" >&2
      exit 1
    fi
  done
fi

# Without NCCL's header (pip install nvidia-nccl-cu13) the library trains on one GPU only.
if ! finds nccl.h; then
  for folder in "${wheels[@]}"; do
    [ -f "$folder/include/nccl.h" ] && flags+=(-isystem "$folder/include")
  done
fi
nccl=()
if finds nccl.h; then nccl=(native/dist/nccl/nccl.cu); else echo "no nccl.h: built without NCCL"; fi

"$nvcc" --version | sed -n 's/^Cuda compilation tools, /nvcc /p'
# The largest files first, so that none of them is left for the end.
launches=(native/tools/cuda_launches.cu native/tools/cuda_launches_runtime.cpp)
mapfile -t sources < <(ls -S native/cuda/*.cu native/cuda/test/*.cu "${nccl[@]}" "${launches[@]}")
if [ "$(cat "$out/flags" 2>/dev/null)" != "$nvcc ${flags[*]}" ]; then
  rm -f "$out"/*.o
  echo "$nvcc ${flags[*]}" >"$out/flags"
fi
ships() { [[ $1 != */test/* && $1 != */tools/* ]]; }
object_of() { echo "$out/$(basename "${1%.*}").o"; }
compile() {
  local source=$1 object limits=()
  object=$(object_of "$source")
  # A header that changed may concern every file.
  if [ -e "$object" ] && [ -z "$(find native/cuda native/ops native/dist '(' -name '*.h' -o -name '*.cuh' -o -path "$source" ')' \
    -newer "$object" -print -quit)" ]; then
    return
  fi
  # Tests are compiled too, to run on a GPU; only kernels that ship are held to the limits on spills.
  ships "$source" && limits=(-Xptxas -v,--warn-on-spills,-Werror)
  local start=$SECONDS
  if ! "$nvcc" "${flags[@]}" "${limits[@]}" -c "$source" -o "$object" >"$object.log" 2>&1; then
    cat "$object.log" >&2
    rm -f "$object"
    echo "$source: failed" >&2
    return 1
  fi
  echo "$source ($((SECONDS - start)) s)"
}
running=0
for source in "${sources[@]}"; do
  if [ $running -ge "${DUOKV_JOBS:-$(nproc)}" ]; then
    wait -n
    running=$((running - 1))
  fi
  compile "$source" &
  running=$((running + 1))
done
while [ $running -gt 0 ]; do
  wait -n
  running=$((running - 1))
done

objects=()
for source in "${sources[@]}"; do
  ! ships "$source" || objects+=("$(object_of "$source")")
done
"$nvcc" -shared -cudart static "${link_flags[@]}" -Xlinker -z,defs,--exclude-libs,ALL "${objects[@]}" \
  -o "$out/libduokv_cuda.so"
# From an archive a test program takes only the kernels that it tests.
rm -f "$out/libkernels.a"
ar rcs "$out/libkernels.a" "${objects[@]}"
for test in "${sources[@]}"; do
  [[ $test == */test/*_test.cu ]] || continue
  name=$(basename "$test" .cu)
  "$nvcc" -cudart static "${link_flags[@]}" "$out/$name.o" "$out/libkernels.a" -o "$out/$name"
done
"$nvcc" -cudart none "$out"/cuda_launches{,_runtime}.o "$out/libkernels.a" -o "$out/cuda_launches"
"$out/cuda_launches" | sort -u >"$out/launches.txt"
mkdir -p build/Release
cp "$out/libduokv_cuda.so" build/Release/
echo "linked $out/libduokv_cuda.so from ${#objects[@]} files, and the test programs"
