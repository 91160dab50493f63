// The version of the structures of attention.h, decoder_step.h and lattice.h, and their constants.
//
// Python declares the same structures with ctypes, and the same number in
// effasr_kernels/runtime/native.py. Increment both with every change of a structure, so that Python
// does not load a library of an older build.

#pragma once

#define EFFASR_INTERFACE 3

// Values of `instructions` in the structures; the first selects the widest that the CPU supports.
enum { kBestInstructions = 0, kBaseInstructions = 1, kAvx2 = 2, kAvx512 = 3 };

#ifdef __cplusplus
extern "C" {
#endif

int effasr_interface(void);

#ifdef __cplusplus
}
#endif
