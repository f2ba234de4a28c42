// Types that every kernel uses, and numbers of element types. Sources include these files and each other by
// name, and nothing else: neither NVRTC nor nvcc needs a header of CUDA's.
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char i8;

enum { F32 = 1, F16 = 2, BF16 = 3 };

#define DEVICE static __device__ __forceinline__
