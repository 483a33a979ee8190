import fc from 'fast-check';

// Properties are tried on the same cases every time, so that a run says something about the code and not about luck;
// DUOKV_SEED gives others.
const { DUOKV_SEED = '1' } = process.env;
if (!/^\d{1,9}$/.test(DUOKV_SEED))
  throw new Error(`DUOKV_SEED is "${DUOKV_SEED}"; it must be an integer below 10^9`);
fc.configureGlobal({ seed: Number(DUOKV_SEED) });
