// Whether this machine has AMX's tile registers for bf16, and whether the system lets this process use them.
#pragma once

namespace tw {

// The processor has them, and the system saves them when threads switch.
bool has_tile_registers();

// Asks the system, once a process: Linux gives their 8 KiB a thread only to who asked (arch_prctl, ARCH_REQ_XCOMP_PERM).
bool may_use_tile_registers();

}  // namespace tw
