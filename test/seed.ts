import fc from 'fast-check';

// Properties are tried on the same cases every time, so that a run says something about the code and not about luck;
// DUOKV_SEED gives others.
fc.configureGlobal({ seed: Number(process.env.DUOKV_SEED ?? 1) });
