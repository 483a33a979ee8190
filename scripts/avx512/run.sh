#!/usr/bin/env bash
# Runs the native tests on a processor with AVX-512 that Bochs emulates, for machines that have none: Linux boots there
# from an image of the test programs, the libraries they need and BusyBox.
#
#   scripts/avx512/run.sh [--masked] [--build FOLDER] ['TEST [CASE ...]' ...]
#
#   --masked  has Linux leave the AVX-512 registers off: the same processor must then take the AVX2 code
#   --build   takes the test programs of that build; without it they are built in build/avx512
#
# Without tests it runs those that reach vector code, less the cases whose FP64 references take longest. It takes about
# half an hour of one core. A word of CASE selects the cases whose name contains it. $KERNEL is the bzImage to boot;
# without it Debian's kernel for virtual machines is downloaded into build/avx512, and not installed. The output is also
# in build/avx512/{avx512,masked}.txt. The exit code is 1 where a test failed or took another instruction set.
set -euo pipefail
cd "$(dirname "$0")/../.."

packages=(bochs bochsbios busybox-static isolinux syslinux-common xorriso cpio)
missing=()
for package in "${packages[@]}"; do
  dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q ' installed' || missing+=("$package")
done
if [ ${#missing[@]} -gt 0 ]; then
  echo "missing: apt-get install --no-install-recommends ${missing[*]}" >&2
  exit 1
fi

work=$PWD/build/avx512
name=avx512 expected=AVX3 # Highway's name of the first AVX-512 processors
# Bochs 2.7 reports sizes of the XSAVE area that Linux does not believe, unless it leaves out the compacted format and
# the protection keys: XSAVEC, XSAVES, PKU.
clear=321,323,515
build=
while [[ ${1:-} == --* ]]; do
  case $1 in
    --masked) name=masked expected=AVX2 clear+=,304 ;; # AVX512F
    --build)
      build=${2:?--build needs a folder}
      shift
      ;;
    *)
      echo "unknown option $1" >&2
      exit 2
      ;;
  esac
  shift
done
tests=("$@")
if [ ${#tests[@]} -eq 0 ]; then
  attention='attention_test every_instruction_set bf16 derivative accumulate exp change_no_bits bias lone nothing'
  tests=(
    add_test bf16_test cache_test embedding_test fuse_test rms_norm_test rotary_test suffix_rows_test sum_squares_test
    sample_test feed_forward_test linear_cross_entropy_test linear_test adamw_test swiglu_test
    "$attention own_scale nonfinite arguments" session_test trainer_test
  )
fi
tests=(device_test "${tests[@]}") # which says the instruction set

mkdir -p "$work"
if [ -z "$build" ]; then
  build=$work
  cmake -S . -B "$build" -G Ninja -DDUOKV_ADDON=OFF -DDUOKV_TESTS=ON
  cmake --build "$build"
fi
if [ -z "${KERNEL:-}" ]; then
  KERNEL=$(echo "$work"/kernel/boot/vmlinuz-*)
  if [ ! -f "$KERNEL" ]; then
    package=$(apt-cache depends linux-image-cloud-amd64 | sed -n 's/.*Depends: \(linux-image-\)/\1/p' | head -1)
    (cd "$work" && apt-get download "$package" && dpkg-deb -x "$package"_*.deb kernel && rm "$package"_*.deb)
    KERNEL=$(echo "$work"/kernel/boot/vmlinuz-*)
  fi
fi

# The image: an initial file system, whose /init runs the tests and resets, and a boot loader.
root=$work/root image=$work/image
rm -rf "$root" "$image"
mkdir -p "$root"/{bin,dev,proc,tests,tmp} "$image"
cp /bin/busybox "$root/bin"
printf '%s\n' "${tests[@]}" >"$root/tests/selection"
for test in "${tests[@]%% *}"; do
  cp "$build/$test" "$root/tests"
  ldd "$build/$test" | grep -o '/[^ ]*' | xargs -I{} cp -L --parents {} "$root"
done
cat >"$root/init" <<'INIT'
#!/bin/busybox sh
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t devtmpfs dev /dev
exec >/dev/ttyS0 2>&1
cd /tests
while read -r test cases; do
  echo "== $test $cases"
  ./$test $cases </dev/null
  echo "== $test: exit code $?"
done <selection
/bin/busybox sleep 1
/bin/busybox reboot -f
INIT
chmod +x "$root/init"
(cd "$root" && find . | cpio --quiet -o -H newc) >"$image/initrd"
cp "$KERNEL" "$image/vmlinuz"
cp /usr/lib/ISOLINUX/isolinux.bin /usr/lib/syslinux/modules/bios/ldlinux.c32 "$image"
cat >"$image/isolinux.cfg" <<CONFIG
default linux
label linux
  kernel /vmlinuz
  initrd /initrd
  append console=ttyS0 quiet panic=-1 nokaslr mitigations=off acpi=off reboot=t clearcpuid=$clear
CONFIG
xorriso -as mkisofs -quiet -o "$work/$name.iso" -b isolinux.bin -c boot.cat -no-emul-boot -boot-load-size 4 \
  -boot-info-table "$image" 2>/dev/null

# Debian's Bochs stops in its debugger first: `c` lets it go.
cat >"$work/$name.bochsrc" <<CONFIG
config_interface: textconfig
display_library: rfb, options="timeout=0"
cpu: model=corei7_skylake_x, ips=10000000, reset_on_triple_fault=0
memory: guest=2048, host=2048
romimage: file=/usr/share/bochs/BIOS-bochs-latest
vgaromimage: file=/usr/share/bochs/VGABIOS-lgpl-latest
ata0-master: type=cdrom, path="$work/$name.iso", status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev="$work/$name.txt"
clock: sync=none
speaker: enabled=0
sound: driver=dummy
log: "$work/$name.log"
panic: action=fatal
CONFIG
printf 'c\nq\n' >"$work/commands"
: >"$work/$name.txt"
bochs -q -f "$work/$name.bochsrc" -rc "$work/commands" </dev/null >"$work/$name.bochs" 2>&1 &
bochs=$!
trap 'kill $bochs' INT TERM
tail -n +1 -f --pid=$bochs "$work/$name.txt"

passed=$(grep -c '^== .*: exit code 0' "$work/$name.txt" || true)
target=$(sed -n 's/^    [^;]*; \([A-Z0-9_]*\);.*/\1/p' "$work/$name.txt" | head -1)
echo "$passed of ${#tests[@]} test programs passed on ${target:-no instruction set}, expected $expected"
if [ "$passed" -ne ${#tests[@]} ] || [ "$target" != $expected ]; then
  echo "what Bochs said: $work/$name.log, $work/$name.bochs" >&2
  exit 1
fi
