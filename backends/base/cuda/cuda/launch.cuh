// Programmatic dependent launch: how kernels of a stream overlap.
#include "types.cuh"

// The next kernel of the stream may start; it still waits for this one's end before it reads.
DEVICE void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Everything the kernels before this one wrote is visible behind this.
DEVICE void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
