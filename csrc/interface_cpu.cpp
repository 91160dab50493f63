#include "interface.h"

extern "C" int effasr_interface(void) { return EFFASR_INTERFACE; }
