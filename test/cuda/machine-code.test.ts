import assert from 'node:assert/strict';

// @ts-expect-error a script without types
import { faults, parseLog, warpsPerSm } from '../../scripts/cuda/kernels.mjs';
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
      stack: 0,
      spills: 0,
      registers: 168,
      shared: 2048,
    });
  });

  it('counts the warps that registers leave room for', () => {
    const expected = [
      [16, 64],
      [32, 64],
      [33, 48],
      [40, 48],
      [64, 32],
      [128, 16],
      [168, 12],
      [255, 8],
    ];
    for (const [registers, warps] of expected) assert.equal(warpsPerSm(registers), warps, `${registers}`);
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
