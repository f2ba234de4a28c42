// Packed weights as kernels of few rows and of many read them.

constexpr int UNIT = 1152; // bytes of 16 rows by 128 k: codes, then scales
