#!/usr/bin/env bash
# Runs the TypeScript tests of the CUDA backend and `duokv bench latency` on this machine's GPU, with what
# scripts/gpu/prepare.sh --with-node packed, Node included: nothing of the machine's but a driver and cuBLASLt.
#
#   scripts/gpu/with-node.sh [--dry-run] [stage ...]     all stages, in this order, where none is named
#
#   doctor     what is there
#   golden     the golden cases through the public interface
#   graphs     recorded graphs give the bits of what they replay
#   lifecycle  disposal, queues, workers and processes
#   latency    requests of the 126M presets, timed
#
# A stage ends within DUOKV_STAGE_SECONDS (540) and leaves its output in $OUT/node-<stage>.txt (OUT is build/gpu/out by
# default), latency also node-latency.json. The exit code is 1 where a stage failed. --dry-run runs everything on a machine
# without a GPU, on the emulator (build/Release/libduokv_cuda_emulator.so), which leaves out the golden case of the full
# window and takes a tiny preset's latency.
set -uo pipefail
trap 'exit 130' INT
trap 'exit 143' TERM
cd "$(dirname "$0")/../.."
gpu=build/gpu
mkdir -p "${OUT:-$gpu/out}"
out=$(cd "${OUT:-$gpu/out}" && pwd)
python=${PYTHON:-python3}
requests=(--precisions fp32,bf16 --minutes 8)
too_slow=()
if [ "${1:-}" = --dry-run ]; then
  shift
  export DUOKV_CUDA=emulator
  export DUOKV_CUDA_LIBRARY=${DUOKV_CUDA_LIBRARY:-$PWD/build/Release/libduokv_cuda_emulator.so}
  too_slow=(--fgrep full-window --invert)
  requests=(--designs gqa2-tiny --routes full --cells 1x4x1 --blocks 1)
fi
if [ $gpu-node.tar.xz -nt $gpu/node/package.json ]; then
  "$python" -m tarfile -e $gpu-node.tar.xz $gpu && touch $gpu/node/package.json
fi
if [ ! -x $gpu/node/bin/node ]; then
  echo "there is no $gpu/node/bin/node: $gpu-node.tar.xz is made by scripts/gpu/prepare.sh --with-node" >&2
  exit 2
fi
cd $gpu/node
# Tests and the command start `node` too.
PATH=$PWD/bin:$PATH
export DUOKV_FIXTURES=$PWD/test/fixtures

limited() { timeout --foreground --kill-after=10 "${DUOKV_STAGE_SECONDS:-540}" "$@"; }
duokv() { limited node dist/cli/main.js "$@"; }
tests() {
  DUOKV_TEST_BACKEND=cuda limited node node_modules/mocha/bin/mocha.js --no-config --no-package --node-option import=tsx \
    --timeout 500000 "$@"
}
stage_doctor() { node --version && duokv doctor --backend cuda; }
stage_golden() { tests "${too_slow[@]}" test/golden.test.ts; }
stage_graphs() { tests test/cuda/graphs.test.ts; }
stage_lifecycle() { tests test/api/lifecycle.test.ts; }
stage_latency() { duokv bench latency --backend cuda "${requests[@]}" --out "$out/node-latency.json"; }

status=0
stages=("$@")
[ $# -gt 0 ] || stages=(doctor golden graphs lifecycle latency)
for stage in "${stages[@]}"; do
  if ! declare -F "stage_$stage" >/dev/null; then
    echo "there is no stage $stage" >&2
    exit 2
  fi
done
for stage in "${stages[@]}"; do
  echo "== $stage"
  start=$SECONDS
  if "stage_$stage" 2>&1 | tee "$out/node-$stage.txt"; then result=ok; else result=FAILED status=1; fi
  echo "== $stage $result after $((SECONDS - start)) s"
done
exit $status
