/* Numbers of acme-c: the codes of E2M1, NF4 and E4M3, and rows of f32, f16 and bf16. */
#ifndef ACME_NUMBERS_H
#define ACME_NUMBERS_H
#include <math.h>
#include <string.h>

static const float E2M1[16] = {0.f,  .5f,  1.f,  1.5f,  2.f,  3.f,  4.f,  6.f,
                               -0.f, -.5f, -1.f, -1.5f, -2.f, -3.f, -4.f, -6.f};
static const float NF4[16] = {-1.0f,       -0.6961928f, -0.52507305f, -0.3949175f, -0.28444138f, -0.18477343f,
                              -0.091050036f, 0.0f,        0.0795803f,   0.1609302f,  0.2461123f,   0.33791524f,
                              0.44070983f, 0.562617f,   0.72295684f,  1.0f};

/* E4M3 without sign; 0x7f and everything above is refused before. */
static float e4m3(uint8_t b)
{
    int exponent = b >> 3, mantissa = b & 7;
    return exponent ? ldexpf((float)(8 + mantissa), exponent - 10) : ldexpf((float)mantissa, -9);
}

static uint32_t bits(float v)
{
    uint32_t u;
    memcpy(&u, &v, 4);
    return u;
}

static float from_bits(uint32_t u)
{
    float v;
    memcpy(&v, &u, 4);
    return v;
}

static float from_f16(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, e = h >> 10 & 31, m = h & 1023;
    if (e == 31)
        return from_bits(sign | 0x7f800000u | m << 13);
    if (e == 0) {
        float v = (float)m * 0x1p-24f;
        return sign ? -v : v;
    }
    return from_bits(sign | (e + 112) << 23 | m << 13);
}

/* Ties to even. */
static uint16_t to_f16(float v)
{
    uint32_t u = bits(v), sign = u >> 16 & 0x8000, a = u & 0x7fffffff;
    if (a > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00);
    if (a >= 0x477ff000u) /* 65520 and above round to infinity */
        return (uint16_t)(sign | 0x7c00);
    if (a < 0x38800000u) { /* below 2^-14: multiples of 2^-24, rounded by an addition */
        float sum = from_bits(a) + 0.5f;
        return (uint16_t)(sign | (bits(sum) - bits(0.5f)));
    }
    a += 0xfff + (a >> 13 & 1);
    return (uint16_t)(sign | ((a >> 13) - (112u << 10)));
}

static uint16_t to_bf16(float v)
{
    uint32_t u = bits(v);
    if ((u & 0x7fffffff) > 0x7f800000u)
        return (uint16_t)(u >> 16 | 0x40);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

static size_t size_of(uint32_t dtype)
{
    return dtype == Q4_F32 ? 4 : 2;
}

static void load_row(float *out, const void *row, uint32_t dtype, uint64_t count)
{
    uint64_t i;
    if (dtype == Q4_F32) {
        memcpy(out, row, count * 4);
    } else if (dtype == Q4_F16) {
        for (i = 0; i < count; i++)
            out[i] = from_f16(((const uint16_t *)row)[i]);
    } else {
        for (i = 0; i < count; i++)
            out[i] = from_bits((uint32_t)((const uint16_t *)row)[i] << 16);
    }
}

static void store(void *row, uint32_t dtype, uint64_t i, float v)
{
    if (dtype == Q4_F32)
        ((float *)row)[i] = v;
    else
        ((uint16_t *)row)[i] = dtype == Q4_F16 ? to_f16(v) : to_bf16(v);
}

#endif
