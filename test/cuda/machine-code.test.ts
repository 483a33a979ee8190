import assert from 'node:assert/strict';

// @ts-expect-error a script without types
import { blocksPerSm, faults, parseLaunches, parseLog } from '../../scripts/cuda/kernels.mjs';
// @ts-expect-error a script without types
import { faultsOf, kernelsOf } from '../../scripts/cuda/sass.mjs';

const log = (stack: number, spills: number) => `
ptxas info    : Compiling entry function 'attention_mma_kernel' for 'sm_80'
ptxas info    : Function properties for attention_mma_kernel
    ${stack} bytes stack frame, ${spills} bytes spill stores, ${spills} bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 2048 bytes smem, 576 bytes cmem[0]`;

const listing = (...lines: string[]) => `
arch = sm_90a
		Function : _ZN20attention_mma_kernelINS1_12Bf16ProductsILi128ELb1EEE
${lines.map((line, i) => `        /*${i}0*/                   ${line} ;`).join('\n')}
		Function : _ZN12other_kernel
        /*0000*/                   STL [R1], R2 ;`;
const product = 'HMMA.16816.F32.BF16 R4, R8, R10, R4';
const load = 'LDGSTS.E.BYPASS.128 [R9], desc[UR6][R2.64]';

describe('the checks of what nvcc made of the kernels', () => {
  it('reads what ptxas printed', () => {
    const [kernel, ...others] = parseLog(log(0, 0));
    assert.deepEqual(others, []);
    assert.deepEqual(kernel, {
      symbol: 'attention_mma_kernel',
      architecture: 'sm_80',
      local: 0,
      spills: 0,
      registers: 168,
      shared: 2048,
    });
  });

  it('reads the largest launch of each kernel', () => {
    const launches = parseLaunches('_Za 128 1024\n_Za 256 512\n_Za 64 1024\n_Zb 32 0\n_Zb 256 0\n');
    assert.deepEqual(Object.fromEntries(launches), {
      _Za: { threads: 128, dynamic: 1024 },
      _Zb: { threads: 256, dynamic: 0 },
    });
  });

  it('counts the blocks that an SM holds', () => {
    const blocks = (registers: number, threads: number, shared = 0, dynamic = 0, architecture = 'sm_80') =>
      blocksPerSm({ architecture, registers, threads, shared, dynamic });
    // By warps, and by blocks.
    assert.equal(blocks(16, 256), 8);
    assert.equal(blocks(16, 32), 32);
    assert.equal(blocks(16, 48), 32);
    // By registers, of which a warp takes multiples of 256 and a partition has 16,384.
    const byRegisters = [
      [32, 16],
      [33, 12],
      [64, 8],
      [128, 4],
      [168, 3],
      [169, 2],
      [255, 2],
    ];
    for (const [registers, expected] of byRegisters) assert.equal(blocks(registers, 128), expected);
    assert.equal(blocks(255, 288), 0);
    // By shared memory, 1 KiB of a block's being the system's.
    assert.equal(blocks(32, 128, 0, 81 * 1024), 2);
    assert.equal(blocks(32, 128, 1, 81 * 1024), 1);
    assert.equal(blocks(32, 128, 1, 81 * 1024, 'sm_90a'), 2);
    assert.equal(blocks(32, 128, 0, 163 * 1024), 1);
    assert.equal(blocks(32, 128, 0, 164 * 1024), 0);
  });

  it('finds spills and arrays in local memory of hot kernels only', () => {
    const wrong = (name: string, stack: number, spills: number) =>
      faults(parseLog(log(stack, spills)).map((kernel: object) => ({ ...kernel, name }))).length;
    assert.equal(wrong('attention_mma_kernel<Bf16, 64>', 0, 0), 0);
    assert.equal(wrong('attention_mma_kernel<Bf16, 64>', 16, 0), 1);
    assert.equal(wrong('attention_mma_kernel<Bf16, 64>', 0, 8), 1);
    assert.equal(wrong('rotary_kernel', 16, 8), 0);
  });

  it('accepts a listing with tensor-core products and 16-byte loads', () => {
    const kernels = kernelsOf(listing(product, load));
    assert.equal(kernels.length, 1);
    assert.equal(kernels[0].architecture, 'sm_90a');
    assert.deepEqual(faultsOf(kernels[0]), []);
    assert.deepEqual(faultsOf(kernelsOf(listing(product, 'LDG.E.128.CONSTANT R4, desc[UR6][R2.64]'))[0]), []);
  });

  it('refuses a listing without them, or with local memory', () => {
    const why = (...lines: string[]) => faultsOf(kernelsOf(listing(...lines))[0]).join();
    assert.match(why(load), /no tensor-core instruction/);
    assert.match(why(product, 'LDG.E R4, desc[UR6][R2.64]'), /no 16-byte load/);
    assert.match(why(product, load, 'STL [R1], R2', 'LDL R2, [R1]'), /2 accesses of local memory/);
  });
});
