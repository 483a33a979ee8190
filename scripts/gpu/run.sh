#!/usr/bin/env bash
# Checks and measures the CUDA backend on this machine's GPU, with what scripts/gpu/prepare.sh built.
#
#   scripts/gpu/run.sh [--dry-run] [stage ...]     all stages, in this order, where none is named
#
#   build     what is there: card, driver, versions, and that the programs start
#   ops       every kernel against FP64, by the tests that the emulator runs as well
#   golden    the golden cases: fp32 and fp32-tf32x3, without graphs and replayed
#   sanitize  the kernels' tests under compute-sanitizer's memcheck and racecheck
#   kernels   every operation by itself, and the card's ceilings
#   bench     prefill, decoding, requests and training
#   peer      the same model in PyTorch
#   record    the results in $OUT to bench/records/gpu, to be committed; docs/performance.md is made from them
#
# A stage ends within DUOKV_STAGE_SECONDS (540), replaces what it wrote before, and leaves $OUT/<stage>.json (OUT is
# build/gpu/out by default), also when something in it fails; the log is $OUT/log.txt. The exit code is 1 where a stage
# failed. --dry-run takes tiny shapes, the emulator's library (build/Release/libduokv_cuda_emulator.so, or
# $DUOKV_CUDA_LIBRARY) and two tests of `npm run test:emulator` on a machine without a GPU.
set -uo pipefail
cd "$(dirname "$0")/../.."
gpu=build/gpu
bin=$gpu/bin
out=${OUT:-$gpu/out}
library=${DUOKV_CUDA_LIBRARY:-$bin/libduokv_cuda.so}
python=${PYTHON:-python3}
dry=
if [ "${1:-}" = --dry-run ]; then
  dry=1
  shift
  library=${DUOKV_CUDA_LIBRARY:-build/Release/libduokv_cuda_emulator.so}
fi
mkdir -p "$out" $gpu
if [ $gpu.tar.xz -nt $gpu/commit ]; then
  "$python" -m tarfile -e $gpu.tar.xz $gpu && touch $gpu/commit
fi
log=$out/log.txt
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# cuBLASLt of a Python environment that is not active.
if [ -z "${DUOKV_CUBLASLT:-}" ] && [ -z "$dry" ]; then
  found=$("$python" -c '
import glob, sys
paths = [f for p in sys.path for f in glob.glob(p + "/nvidia/*/lib/libcublasLt.so.1[23]")]
print(paths[0] if paths else "")' 2>/dev/null)
  [ -z "$found" ] || export DUOKV_CUBLASLT=$found
fi

# The tests of kernels; a dry run takes two small ones of the emulator's.
tests=("$bin"/*_test)
[ -z "$dry" ] || tests=(build/ctest-emulator/native/cuda/cuda_{add,swiglu}_checked)

# Ends the script where a file is missing that stages start.
needs() { # the command that makes them, files
  local command=$1 file
  shift
  for file in "$@"; do
    [ -e "$file" ] || { echo "there is no $file: made by $command" >&2 && exit 2; }
  done
}

gpu_query() { nvidia-smi --query-gpu="$1" --format=csv,noheader 2>/dev/null | head -1; }
facts=(
  --fact "commit=$(cat $gpu/commit 2>/dev/null || git rev-parse HEAD 2>/dev/null)"
  --fact "card=$(gpu_query name)"
  --fact "driver=$(gpu_query driver_version)"
  --fact "power=$(gpu_query power.limit)"
  --fact "cpu=$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -1) x $(nproc)"
)
[ -z "$dry" ] || facts+=(--fact "dryRun=yes")

remaining() { echo $((deadline - SECONDS > 5 ? deadline - SECONDS : 5)); }

# Runs a command with the stage's remaining time; its output goes to the log, its end to the terminal.
run() {
  echo "+ $*" >>"$log"
  local start=$SECONDS status
  timeout --foreground --kill-after=10 "$(remaining)" "$@" >"$work/output" 2>&1
  status=$?
  cat "$work/output" >>"$log"
  tail -n "${show:-3}" "$work/output"
  echo "  exit code $status after $((SECONDS - start)) s: $(basename "$1") ${*: -1}"
  return $status
}

# One JSON of the records that a stage's programs left, in the order of their names, beside the facts.
collect() {
  "$python" - "$out/$1.json" "$1" "$work" "${facts[@]}" <<'PYTHON'
import glob, json, os, sys
target, stage, folder, *facts = sys.argv[1:]
runs = {}
for path in sorted(glob.glob(folder + '/record-*.json')):
    name = path.rsplit('/record-', 1)[1][:-5]
    try:
        runs[name] = json.load(open(path))
    except ValueError as error:
        runs[name] = {'error': str(error)}
record = {'stage': stage, 'facts': dict(fact.split('=', 1) for fact in facts[1::2]), 'runs': runs}
with open(target + '.new', 'w') as file:
    json.dump(record, file, indent=1)
os.replace(target + '.new', target)
PYTHON
  local status=$?
  rm -f "$work"/record-*.json
  return $status
}

# A record of one program: what it was, how it ended, how long it took, and the end of its output.
note() { # name, exit code, seconds, file with the output
  "$python" - "$work/record-$1.json" "$@" <<'PYTHON'
import json, sys
path, name, status, seconds, output = sys.argv[1:]
lines = open(output, errors='replace').read().splitlines()
failures = [line.strip() for line in lines if 'FAILED' in line or '=========' in line and 'ERROR SUMMARY' not in line]
with open(path, 'w') as file:
    json.dump({'exitCode': int(status), 'seconds': float(seconds), 'end': lines[-1:], 'failures': failures[:40]}, file)
PYTHON
}

# Runs a program and notes how it ended: for use by xargs, several at a time.
noted() { # name, limit in seconds, command
  local name=$1 limit=$2 start end status
  shift 2
  start=$(date +%s.%N)
  timeout --foreground --kill-after=10 "$limit" "$@" >"$work/$name.log" 2>&1
  status=$?
  end=$(date +%s.%N)
  note "$name" $status "$(echo "$end $start" | awk '{ printf "%.2f", $1 - $2 }')" "$work/$name.log"
  if [ $status = 0 ]; then
    echo "  ok      $name"
  else
    echo "  FAILED  $name (exit code $status)"
    grep -h "FAILED\|ERROR\|error" "$work/$name.log" | head -5
  fi
  return $status
}

stage_build() {
  { nvidia-smi; "$python" --version; nvcc --version; compute-sanitizer --version; } >>"$log" 2>&1
  local status=0
  for program in gpu_bench golden; do
    noted "$program" 30 "$bin/$program" --help || status=1
  done
  noted device 60 "$bin/golden" --backend "$library" --out "$work/record-first-case.json" "${facts[@]}" \
    test/fixtures/golden/gqa2 || status=1
  ls -l "$bin" >>"$log"
  cat "$work/device.log"
  return $status
}

stage_ops() {
  local status=0 test
  for test in "${tests[@]}"; do
    noted "$(basename "$test")" "$(($(remaining) < 120 ? $(remaining) : 120))" "$test" || status=1
    cat "$work/$(basename "$test").log" >>"$log"
  done
  return $status
}

stage_golden() {
  local status=0 precision graphs folders=(test/fixtures/golden)
  [ ! -d $gpu/cases ] || folders=($gpu/cases)
  [ -z "$dry" ] || folders=(test/fixtures/golden/gqa2)
  for precision in fp32 fp32-tf32x3; do
    for graphs in "" --graphs; do
      show=12 run "$bin/golden" --backend "$library" --precision $precision $graphs "${facts[@]}" \
        --out "$work/record-$precision${graphs:+-graphs}.json" "${folders[@]}" || status=1
    done
  done
  return $status
}

stage_sanitize() {
  if ! command -v compute-sanitizer >/dev/null; then
    echo "  skipped: no compute-sanitizer"
    [ -n "$dry" ]
    return
  fi
  local test tool
  export -f noted note
  export work python
  for tool in memcheck racecheck; do
    for test in "${tests[@]}"; do echo "$tool $test"; done
  done | xargs -P "${DUOKV_JOBS:-6}" -L 1 bash -c '
    noted "$1-$(basename "$2")" '"$(($(remaining) / 2))"' compute-sanitizer --tool "$1" --error-exitcode 1 "$2"' noted
  local status=$?
  noted memcheck-golden "$(remaining)" compute-sanitizer --tool memcheck --error-exitcode 1 \
    "$bin/golden" --backend "$library" --graphs test/fixtures/golden/local-history-separate-sharedkv-cross || status=1
  for test in "$work"/*check-*.log; do
    echo "== $test" >>"$log"
    tail -n 40 "$test" >>"$log"
  done
  return $status
}

bench_options() {
  echo --backend "$library" ${dry:+--shape tiny --repeats 1 --precisions fp32}
}

stage_kernels() {
  # shellcheck disable=SC2046
  run "$bin/gpu_bench" $(bench_options) "${facts[@]}" --out "$work/record-kernels.json" ceilings linear attention rows
}

# The sections in separate programs: where one of them does not end, the others still count. Training first, which takes
# most of the time.
stage_bench() {
  local status=0 section
  for section in train decode request prefill; do
    # shellcheck disable=SC2046
    run "$bin/gpu_bench" $(bench_options) "${facts[@]}" --out "$work/record-$section.json" $section || status=1
  done
  return $status
}

stage_peer() {
  show=40 run "$python" scripts/gpu/torch_peer.py ${dry:+--tiny} --seconds "$(($(remaining) - 30))" \
    --out "$work/record-torch.json"
}

stage_record() {
  mkdir -p bench/records/gpu
  local stage
  for stage in build ops golden sanitize kernels bench peer; do
    [ ! -e "$out/$stage.json" ] || cp -v "$out/$stage.json" bench/records/gpu/
  done
}

status=0
stages=("$@")
[ $# -gt 0 ] || stages=(build ops golden sanitize kernels bench peer)
for stage in "${stages[@]}"; do
  if ! declare -F "stage_$stage" >/dev/null; then
    echo "there is no stage $stage" >&2
    exit 2
  fi
done
if [[ " ${stages[*]} " =~ \ (build|ops|golden|sanitize|kernels|bench)\  ]]; then
  needs 'scripts/gpu/prepare.sh' "$bin/gpu_bench" "$bin/golden"
  if [ -n "$dry" ]; then
    needs 'node scripts/setup.mjs --emulator' "$library"
    needs 'npm run test:emulator' "${tests[@]}"
  else
    needs 'scripts/gpu/prepare.sh' "$library" "${tests[@]}"
  fi
fi
for stage in "${stages[@]}"; do
  deadline=$((SECONDS + ${DUOKV_STAGE_SECONDS:-540}))
  start=$SECONDS
  echo "== $stage" | tee -a "$log"
  if "stage_$stage"; then result=ok; else result=FAILED status=1; fi
  [ "$stage" = record ] || collect "$stage" || result=FAILED status=1
  echo "== $stage $result after $((SECONDS - start)) s" | tee -a "$log"
done
exit $status
