// The version of the structures of attention.h, decoder_step.h and lattice.h.
//
// Python describes the same structures to ctypes (effasr_kernels/runtime/native.py has the number
// too). Whoever changes one of them counts it up, so that a library of an older build is refused.

#pragma once

#define EFFASR_INTERFACE 2

#ifdef __cplusplus
extern "C" {
#endif

int effasr_interface(void);

#ifdef __cplusplus
}
#endif
