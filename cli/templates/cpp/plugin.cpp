// {{name}}: NVFP4 weights, inputs as they are (W4A16), on the CPU. This file is the interface, kernel.cpp the arithmetic.
// q4_plugin.h has the rules; what is refused here is refused in check(), each with a reason.
#include "kernel.hpp"
#include "q4_plugin.h"
#include <cmath>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <string>

#define NAME    "{{name}}"
#define VERSION "0.1.0"
#define VENDOR  "{{vendor}}"

Q4_PLUGIN_DESCRIPTOR(NAME, VERSION, VENDOR);

// ---- errors: inside they are thrown, at the border they become a status and a text; nothing unwinds into the program ----

struct Failure {
    q4_status   status;
    const char *text;
};

static q4_status say(q4_error *err, q4_status status, const char *text) noexcept
{
    const std::size_t len = std::strlen(text);
    if (err && err->struct_size >= sizeof *err) {
        if (err->ptr)
            std::memcpy(err->ptr, text, len < err->cap ? len : err->cap);
        err->len = len;
        err->native_code = 0;
    }
    return status;
}

template <typename Body> static q4_status guarded(q4_error *err, Body body) noexcept
{
    try {
        body();
        return say(err, Q4_OK, "");
    } catch (const Failure &f) {
        return say(err, f.status, f.text);
    } catch (const std::bad_alloc &) {
        return say(err, Q4_E_NOMEM, "memory");
    } catch (const std::exception &e) {
        return say(err, Q4_E_PANICKED, e.what());
    } catch (...) {
        return say(err, Q4_E_PANICKED, "an exception");
    }
}

static void require(bool holds, q4_status status, const char *text)
{
    if (!holds)
        throw Failure{status, text};
}

// ---- which products: every reason, and the same ones whoever asks ----

static bool is_float(std::uint32_t dtype)
{
    return dtype == Q4_F32 || dtype == Q4_F16 || dtype == Q4_BF16;
}

// Calls refuse(code, need, have) for every reason against a product.
template <typename Refuse> static void check(const q4_linear_spec &s, Refuse refuse)
{
    const auto number = [](const char *what, std::uint64_t n) { return what + (" " + std::to_string(n)); };
    if (s.schema != Q4_SCHEMA_NVFP4 || s.schema_revision != 1)
        refuse("schema-unsupported", "nvfp4@1", number("schema", s.schema));
    if (s.path != Q4_PATH_FUSED_DEQUANT)
        refuse("path-unsupported", "fused-dequant", number("path", s.path));
    if (s.activations != Q4_ACT_NATIVE)
        refuse("activations-unsupported", "native activations", number("activations", s.activations));
    if (s.ops & ~static_cast<std::uint32_t>(Q4_OP_FORWARD | Q4_OP_DEQUANTIZE))
        refuse("op-unsupported", "forward and dequantize", number("ops", s.ops));
    if (!is_float(s.x_dtype) || !is_float(s.y_dtype))
        refuse("dtype-unsupported", "float32, float16 or bfloat16", number("x of type", s.x_dtype));
    if (s.scale_layout != Q4_SCALE_ROW_MAJOR && s.scale_layout != Q4_SCALE_128X4)
        refuse("layout-unsupported", "row-major scales or tiles of 128 x 4", number("layout", s.scale_layout));
    if (s.device_type != Q4_DEVICE_CPU)
        refuse("device-absent", "the CPU", number("device type", s.device_type));
    if (s.k == 0 || s.k % GROUP != 0)
        refuse("shape-unsupported", "k % 16 == 0, k > 0", number("k =", s.k));
    if (s.n_segments == 0 || s.max_m == 0)
        refuse("shape-unsupported", "a segment, and a row in a call", number("segments:", s.n_segments));
    for (std::uint64_t i = 0; i < s.n_segments; i++)
        if (s.segment_rows[i] == 0)
            refuse("shape-unsupported", "a row in every segment", number("no row in segment", i));
    // An instruction set: ask env->cpu_features in can_prepare(), a list of words (q4_plugin.h has all there are), and
    // the CPU itself in prepare(), which has no env. The code of such a reason is "device-arch".
}

// ---- weights: repacked once, nothing of the caller's is kept ----

// Values of the E4M3 bytes 0x00 to 0x7e.
static float e4m3(std::uint8_t byte)
{
    const int exponent = byte >> 3, mantissa = byte & 7;
    return exponent ? std::ldexp(static_cast<float>(8 + mantissa), exponent - 10)
                    : std::ldexp(static_cast<float>(mantissa), -9);
}

// Byte of a block scale in tiles of 128 rows by 4 scales.
static std::size_t tiled(std::size_t row, std::size_t group, std::size_t groups)
{
    const std::size_t tile = row / 128 * ((groups + 3) / 4) + group / 4;
    return tile * 512 + row % 32 * 16 + row % 128 / 32 * 4 + group % 4;
}

struct q4_backend {
    // Handles of your driver, if there are any.
};

struct q4_prepared {
    Packed        w;
    std::uint64_t max_m;
    std::uint32_t x_dtype, y_dtype;

    q4_prepared(const q4_linear_spec &spec, const q4_weight &weight)
        : max_m(spec.max_m), x_dtype(spec.x_dtype), y_dtype(spec.y_dtype)
    {
        require(spec.n > 0 && spec.n <= SIZE_MAX / 8 / spec.k && weight.n_segments == spec.n_segments, Q4_E_INVALID,
                "a shape that contradicts itself");
        w.n = spec.n, w.k = spec.k;
        w.codes.resize(w.n * (w.k / 2));
        w.scales.resize(w.n * (w.k / GROUP));
        std::size_t first = 0;
        for (std::uint64_t i = 0; i < weight.n_segments; i++) {
            // Elements are as far apart as the first one says: the program may know more fields.
            const auto *at = reinterpret_cast<const char *>(weight.segments) + i * weight.segments[0].struct_size;
            const auto &s = *reinterpret_cast<const q4_segment *>(at);
            require(s.struct_size >= sizeof s && s.rows <= w.n - first, Q4_E_INVALID,
                    "segments that are not those of the spec");
            take(spec, s, first);
            first += s.rows;
        }
        require(first == w.n, Q4_E_INVALID, "fewer rows than n");
    }

    void take(const q4_linear_spec &spec, const q4_segment &s, std::size_t first)
    {
        const std::size_t groups = w.k / GROUP;
        const bool        is_tiled = spec.scale_layout == Q4_SCALE_128X4;
        const std::size_t stored =
            is_tiled ? (s.rows + 127) / 128 * 128 * ((groups + 3) / 4 * 4) : s.rows * groups;
        require(s.codes_bytes == s.rows * (w.k / 2) && s.scales_bytes == stored, Q4_E_INVALID,
                "other bytes than rows and k say");
        require(s.global_convention == spec.global_convention && s.global_convention <= Q4_CONVENTION_DIVIDE,
                Q4_E_INVALID, "another convention than the spec says");
        require(s.global_convention == Q4_CONVENTION_NONE || (std::isfinite(s.global_scale) && s.global_scale > 0.f),
                Q4_E_SCALE_INVALID, "a per-tensor scale that is not finite and above 0");
        std::memcpy(&w.codes[first * (w.k / 2)], s.codes, s.codes_bytes);
        const auto *bytes = static_cast<const std::uint8_t *>(s.scales);
        for (std::size_t row = 0; row < s.rows; row++)
            for (std::size_t group = 0; group < groups; group++) {
                const auto byte = bytes[is_tiled ? tiled(row, group, groups) : row * groups + group];
                // A set sign bit, -0 included, or NaN.
                require(byte < 0x7f, Q4_E_SCALE_INVALID, "a block scale is NaN or negative");
                float scale = e4m3(byte);
                if (s.global_convention == Q4_CONVENTION_MULTIPLY)
                    scale *= s.global_scale;
                else if (s.global_convention == Q4_CONVENTION_DIVIDE)
                    scale /= s.global_scale;
                w.scales[(first + row) * groups + group] = scale;
            }
    }
};

// ---- operands: rows of one of three types ----

static std::uint32_t bits_of(float v)
{
    std::uint32_t u;
    std::memcpy(&u, &v, sizeof u);
    return u;
}

static float float_of(std::uint32_t u)
{
    float v;
    std::memcpy(&v, &u, sizeof v);
    return v;
}

static float from_f16(std::uint16_t h)
{
    const std::uint32_t sign = (h & 0x8000u) << 16, exponent = h >> 10 & 31u, mantissa = h & 1023u;
    if (exponent == 31)
        return float_of(sign | 0x7f800000u | mantissa << 13);
    if (exponent == 0)
        return std::copysign(std::ldexp(static_cast<float>(mantissa), -24), sign ? -1.f : 1.f);
    return float_of(sign | (exponent + 112) << 23 | mantissa << 13);
}

// To nearest, ties to even; NaN stays a quiet NaN.
static std::uint16_t to_f16(float v)
{
    const std::uint32_t u = bits_of(v), sign = u >> 16 & 0x8000u;
    std::uint32_t       a = u & 0x7fffffffu;
    if (a > 0x7f800000u)
        return static_cast<std::uint16_t>(sign | 0x7e00u);
    if (a >= 0x477ff000u) // 65520 and above
        return static_cast<std::uint16_t>(sign | 0x7c00u);
    if (a < 0x38800000u) // multiples of 2^-24: an addition rounds
        return static_cast<std::uint16_t>(sign | (bits_of(float_of(a) + .5f) - bits_of(.5f)));
    a += 0xfffu + (a >> 13 & 1u);
    return static_cast<std::uint16_t>(sign | ((a >> 13) - (112u << 10)));
}

static std::uint16_t to_bf16(float v)
{
    const std::uint32_t u = bits_of(v);
    if ((u & 0x7fffffffu) > 0x7f800000u)
        return static_cast<std::uint16_t>(u >> 16 | 0x40u);
    return static_cast<std::uint16_t>((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}

class Matrix {
  public:
    explicit Matrix(const q4_matrix &m) : m_(m) {}

    // Whether it is what a product needs and has the bytes for it.
    bool fits(std::uint64_t rows, std::uint64_t cols) const
    {
        return m_.struct_size >= sizeof m_ && rows > 0 && m_.rows == rows && m_.cols == cols && m_.ld >= cols &&
               is_float(m_.dtype) && m_.device_type == Q4_DEVICE_CPU &&
               (rows - 1) * m_.ld + cols <= m_.bytes / size();
    }
    bool overlaps(const void *other, std::uint64_t bytes) const
    {
        const auto a = reinterpret_cast<std::uintptr_t>(m_.data), b = reinterpret_cast<std::uintptr_t>(other);
        return other && a < b + bytes && b < a + reach();
    }
    bool overlaps(const Matrix &other) const { return overlaps(other.m_.data, other.reach()); }
    bool overlaps(const q4_exec *exec) const { return exec && overlaps(exec->workspace, exec->workspace_bytes); }
    std::uint64_t reach() const { return ((m_.rows - 1) * m_.ld + m_.cols) * size(); }

    const float *f32_row(std::uint64_t row) const { return reinterpret_cast<const float *>(at(row)); }
    float        load(std::uint64_t row, std::uint64_t i) const
    {
        if (m_.dtype == Q4_F32)
            return f32_row(row)[i];
        const auto half = reinterpret_cast<const std::uint16_t *>(at(row))[i];
        return m_.dtype == Q4_F16 ? from_f16(half) : float_of(static_cast<std::uint32_t>(half) << 16);
    }
    void store(std::uint64_t row, std::uint64_t i, float v) const
    {
        if (m_.dtype == Q4_F32)
            reinterpret_cast<float *>(at(row))[i] = v;
        else
            reinterpret_cast<std::uint16_t *>(at(row))[i] = m_.dtype == Q4_F16 ? to_f16(v) : to_bf16(v);
    }

  private:
    std::size_t size() const { return m_.dtype == Q4_F32 ? 4 : 2; }
    char       *at(std::uint64_t row) const { return static_cast<char *>(m_.data) + row * m_.ld * size(); }
    const q4_matrix &m_;
};

// ---- calls: no allocation, the caller's threads, the same bits for any number of them ----

// Runs body(first, end) over parts of 0..items on the caller's threads. The split may depend on their number, results may
// not. `body` must not throw: it may run on a thread of the program.
template <typename Body> static void parallel(const q4_exec *exec, std::size_t items, Body body)
{
    struct Job {
        Body       *body;
        std::size_t items, piece;
    };
    std::size_t pieces = exec && exec->parallel && exec->threads ? std::size_t{4} * exec->threads : 1;
    pieces = pieces < items ? pieces : items;
    Job job = {&body, items, (items + pieces - 1) / pieces};
    pieces = (items + job.piece - 1) / job.piece;
    const auto task = [](void *arg, std::size_t i) {
        const Job        &j = *static_cast<Job *>(arg);
        const std::size_t first = i * j.piece, end = first + j.piece;
        (*j.body)(first, end < j.items ? end : j.items);
    };
    if (pieces > 1)
        exec->parallel(exec->parallel_user, pieces, task, &job);
    else
        task(&job, 0);
}

extern "C" {

static q4_status create(q4_backend **out, q4_error *err)
{
    return guarded(err, [&] { *out = new q4_backend; });
}

static void destroy(q4_backend *b)
{
    delete b;
}

static q4_status can_prepare(const q4_backend *, const q4_linear_spec *spec, const q4_env *, q4_reject_fn sink,
                             void *user, q4_error *err)
{
    return guarded(err, [&] {
        require(spec->struct_size >= sizeof *spec, Q4_E_ABI, "a spec of an unknown version");
        bool is_refused = false;
        check(*spec, [&](const char *code, const char *need, const std::string &have) {
            sink(user, {code, std::strlen(code)}, {need, std::strlen(need)}, {have.data(), have.size()});
            is_refused = true;
        });
        require(!is_refused, Q4_E_UNSUPPORTED, "see the reasons");
    });
}

static q4_status prepare(const q4_backend *, const q4_linear_spec *spec, const q4_weight *weight, const q4_exec *,
                         q4_prepared **out, q4_error *err)
{
    return guarded(err, [&] {
        require(spec->struct_size >= sizeof *spec && weight->struct_size >= sizeof *weight, Q4_E_ABI,
                "a spec or a weight of an unknown version");
        check(*spec, [](const char *, const char *, const std::string &) {
            throw Failure{Q4_E_UNSUPPORTED, "can_prepare refuses this product"};
        });
        *out = new q4_prepared(*spec, *weight);
    });
}

static void release(q4_prepared *p)
{
    delete p;
}

static q4_status info(const q4_prepared *p, q4_prepared_info *out, q4_error *err)
{
    return guarded(err, [&] {
        require(out->struct_size >= sizeof *out, Q4_E_ABI, "info of an unknown version");
        out->n = p->w.n, out->k = p->w.k;
        out->resident_bytes = sizeof *p + p->w.codes.size() + p->w.scales.size() * sizeof(float);
        out->path = Q4_PATH_FUSED_DEQUANT;
        out->activations = Q4_ACT_NATIVE;
        out->ops = Q4_OP_FORWARD | Q4_OP_DEQUANTIZE;
        out->reserved = 0;
    });
}

static std::uint64_t workspace(const q4_prepared *p, std::uint64_t m)
{
    // Inputs of 16 bits are widened a tile at a time.
    return p->x_dtype == Q4_F32 ? 0 : (m < TILE ? m : TILE) * p->w.k * sizeof(float);
}

static q4_status forward(const q4_prepared *p, const q4_matrix *in, const q4_matrix *out, const q4_exec *exec,
                         q4_error *err)
{
    return guarded(err, [&] {
        const Matrix        x(*in), y(*out);
        const std::uint64_t m = in->rows;
        require(x.fits(m, p->w.k) && y.fits(m, p->w.n) && m <= p->max_m && in->dtype == p->x_dtype &&
                    out->dtype == p->y_dtype,
                Q4_E_INVALID, "operands that do not fit the weight");
        require(!x.overlaps(y) && !x.overlaps(exec) && !y.overlaps(exec), Q4_E_INVALID, "operands that overlap");
        const auto need = workspace(p, m);
        require(need == 0 || (exec && exec->workspace && exec->workspace_bytes >= need), Q4_E_INVALID,
                "a workspace that is too small");
        for (std::uint64_t first = 0; first < m; first += TILE) {
            const std::size_t rows = m - first < TILE ? m - first : TILE;
            const float      *tile = x.f32_row(first);
            std::size_t       ld = in->ld;
            if (in->dtype != Q4_F32) {
                auto *wide = static_cast<float *>(exec->workspace);
                for (std::size_t r = 0; r < rows; r++)
                    for (std::size_t i = 0; i < p->w.k; i++)
                        wide[r * p->w.k + i] = x.load(first + r, i);
                tile = wide, ld = p->w.k;
            }
            parallel(exec, p->w.n, [&](std::size_t row, std::size_t end) {
                float sums[TILE];
                for (; row < end; row++) {
                    kernel_row(p->w, row, tile, ld, rows, sums);
                    for (std::size_t r = 0; r < rows; r++)
                        y.store(first + r, row, sums[r]);
                }
            });
        }
    });
}

static q4_status dequantize(const q4_prepared *p, const q4_matrix *out, const q4_exec *exec, q4_error *err)
{
    return guarded(err, [&] {
        const Matrix y(*out);
        require(y.fits(p->w.n, p->w.k) && !y.overlaps(exec), Q4_E_INVALID, "an output that does not fit the weight");
        parallel(exec, p->w.n, [&](std::size_t row, std::size_t end) {
            for (; row < end; row++)
                for (std::size_t group = 0; group < p->w.k / GROUP; group++) {
                    const auto values = kernel_decode(p->w, row, group);
                    for (std::size_t i = 0; i < GROUP; i++)
                        y.store(row, group * GROUP + i, values[i]);
                }
        });
    });
}

} // extern "C"

// ---- the table ----

// (schema, revision, path) that can_prepare() may ever accept.
static const q4_offer OFFERS[] = {{Q4_SCHEMA_NVFP4, 1, Q4_PATH_FUSED_DEQUANT, 0}};

// In the order of q4_plugin.h; C++17 has no names for fields.
static const q4_backend_v1 TABLE = {
    sizeof(q4_backend_v1), Q4_ABI_MAJOR, Q4_ABI_MINOR, Q4_STR(NAME), Q4_STR(VERSION), Q4_STR(VENDOR),
    -20, // priority: below the kernels q4 comes with, which have 0
    0, sizeof OFFERS / sizeof *OFFERS, OFFERS, create, destroy, can_prepare, prepare, release, info, workspace, forward,
    dequantize,
    nullptr, // backward_input: inference only
    nullptr, // probe
    nullptr, // create_with: no options
    nullptr, // footprint: the program estimates
    nullptr, // fuses
    nullptr, // forward_fused
    nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, // device to synchronize: no device of its own
    nullptr, nullptr, nullptr, nullptr, // group to forward_grouped: nor weights of experts in one call
};

q4_status q4_plugin_query(std::uint32_t abi_major, std::uint32_t id, q4_interface *out)
{
    if (abi_major != Q4_ABI_MAJOR || id != Q4_INTERFACE_BACKEND || out->struct_size < sizeof *out)
        return Q4_E_ABI;
    out->abi_minor = Q4_ABI_MINOR;
    out->table = &TABLE;
    return Q4_OK;
}
