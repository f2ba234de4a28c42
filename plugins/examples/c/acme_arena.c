/* acme-arena: the products of acme_c.c on a device whose memory no program can touch (Linux).
 *
 * An address of the device lies in pages without any permission: who follows one faults.  The device finds the byte in
 * memory of its own, which it tells nobody about, and its kernels are those of acme_c.c.  A card's driver does as much: an
 * address is a number, and bytes come and go through copies. */
#define _DEFAULT_SOURCE
#define NAME "acme-arena"
#include "q4_plugin.h"
#define q4_plugin_query acme_c_query
#include "acme_c.c"
#undef q4_plugin_query
#include <stdatomic.h>
#include <sys/mman.h>

#define MEMORY (UINT64_C(4) << 30)
#define PAGE   UINT64_C(65536) /* allocations begin at a multiple */
#define BLOCKS 8192

static struct {
    atomic_flag lock;
    char       *addresses; /* what programs are told */
    char       *bytes;     /* what is there */
    uint64_t    used;
    size_t      count;
    struct {
        uint64_t at, size, taken;
    } blocks[BLOCKS]; /* in use, ascending */
} DEVICE = {.lock = ATOMIC_FLAG_INIT};

/* ---- memory ------------------------------------------------------------------------------------------------------- */

static void lock(void)
{
    while (atomic_flag_test_and_set_explicit(&DEVICE.lock, memory_order_acquire)) {
    }
}

static void unlock(void)
{
    atomic_flag_clear_explicit(&DEVICE.lock, memory_order_release);
}

/* There is one device, and it stays open. */
static int is_open(void)
{
    lock();
    if (!DEVICE.bytes) {
        void *addresses = mmap(NULL, MEMORY, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        void *bytes = mmap(NULL, MEMORY, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (addresses != MAP_FAILED && bytes != MAP_FAILED)
            DEVICE.addresses = addresses, DEVICE.bytes = bytes;
    }
    unlock();
    return DEVICE.bytes != NULL;
}

/* First fit; UINT64_MAX when there is no such hole. */
static uint64_t take(uint64_t size)
{
    uint64_t at = 0, taken = (size + PAGE - 1) / PAGE * PAGE;
    size_t   i = 0;
    if (size == 0 || size > MEMORY)
        return UINT64_MAX;
    lock();
    while (i < DEVICE.count && DEVICE.blocks[i].at - at < taken) {
        at = DEVICE.blocks[i].at + DEVICE.blocks[i].taken;
        i++;
    }
    if (DEVICE.count == BLOCKS || taken > MEMORY - at) {
        at = UINT64_MAX;
    } else {
        memmove(DEVICE.blocks + i + 1, DEVICE.blocks + i, (DEVICE.count - i) * sizeof *DEVICE.blocks);
        DEVICE.blocks[i].at = at, DEVICE.blocks[i].size = size, DEVICE.blocks[i].taken = taken;
        DEVICE.count++;
        DEVICE.used += taken;
    }
    unlock();
    return at;
}

static int give_back(uint64_t at)
{
    size_t i = 0;
    int    found;
    lock();
    while (i < DEVICE.count && DEVICE.blocks[i].at != at)
        i++;
    found = i < DEVICE.count;
    if (found) {
        madvise(DEVICE.bytes + at, DEVICE.blocks[i].taken, MADV_DONTNEED);
        DEVICE.used -= DEVICE.blocks[i].taken;
        DEVICE.count--;
        memmove(DEVICE.blocks + i, DEVICE.blocks + i + 1, (DEVICE.count - i) * sizeof *DEVICE.blocks);
    }
    unlock();
    return found;
}

/* The memory behind an address, if `size` bytes from there on are of one allocation. */
static char *behind(const void *address, uint64_t size)
{
    uint64_t at = (uint64_t)((uintptr_t)address - (uintptr_t)DEVICE.addresses);
    size_t   first = 0, last;
    char    *found = NULL;
    lock();
    last = DEVICE.count;
    while (last - first > 1) {
        size_t middle = first + (last - first) / 2;
        if (DEVICE.blocks[middle].at <= at)
            first = middle;
        else
            last = middle;
    }
    if (last > first && at >= DEVICE.blocks[first].at && at - DEVICE.blocks[first].at <= DEVICE.blocks[first].size &&
        size <= DEVICE.blocks[first].size - (at - DEVICE.blocks[first].at))
        found = DEVICE.bytes + at;
    unlock();
    return found;
}

static q4_status no_device(uint32_t id, q4_error *err)
{
    return id == 0 ? Q4_OK : fail(err, Q4_E_UNSUPPORTED, "there is one device");
}

static q4_status device(const q4_backend *b, uint32_t id, q4_device *out, q4_error *err)
{
    static const q4_str name = Q4_STR("ACME arena"), fingerprint = Q4_STR("acme-arena 1, 4 GiB");
    (void)b;
    if (no_device(id, err))
        return Q4_E_UNSUPPORTED;
    if (out->struct_size < sizeof *out)
        return fail(err, Q4_E_ABI, "device of an unknown version");
    out->name = name, out->fingerprint = fingerprint;
    out->memory_bytes = MEMORY;
    lock();
    out->free_bytes = MEMORY - DEVICE.used;
    unlock();
    return done(err);
}

static q4_status device_alloc(const q4_backend *b, uint32_t id, uint64_t bytes, void **out, q4_error *err)
{
    uint64_t at;
    (void)b;
    if (no_device(id, err))
        return Q4_E_UNSUPPORTED;
    at = take(bytes);
    if (at == UINT64_MAX)
        return fail(err, Q4_E_NOMEM, "memory of the device");
    *out = DEVICE.addresses + at;
    return done(err);
}

static q4_status device_free(const q4_backend *b, uint32_t id, void *at, q4_error *err)
{
    (void)b;
    if (no_device(id, err))
        return Q4_E_UNSUPPORTED;
    return give_back((uint64_t)((uintptr_t)at - (uintptr_t)DEVICE.addresses))
               ? done(err)
               : fail(err, Q4_E_INVALID, "nothing is allocated there");
}

static q4_status copy_in(const q4_backend *b, uint32_t id, void *to, const void *from, uint64_t bytes, q4_error *err)
{
    char *there = behind(to, bytes);
    (void)b;
    if (no_device(id, err))
        return Q4_E_UNSUPPORTED;
    if (!there)
        return fail(err, Q4_E_INVALID, "bytes that are not allocated");
    memcpy(there, from, bytes);
    return done(err);
}

static q4_status copy_out(const q4_backend *b, uint32_t id, void *to, const void *from, uint64_t bytes, q4_error *err)
{
    const char *there = behind(from, bytes);
    (void)b;
    if (no_device(id, err))
        return Q4_E_UNSUPPORTED;
    if (!there)
        return fail(err, Q4_E_INVALID, "bytes that are not allocated");
    memcpy(to, there, bytes);
    return done(err);
}

/* Kernels have run when a call of them returns. */
static q4_status synchronize(const q4_backend *b, uint32_t id, q4_error *err)
{
    (void)b;
    return no_device(id, err) ? Q4_E_UNSUPPORTED : done(err);
}

/* ---- weights ------------------------------------------------------------------------------------------------------ */

static q4_status arena_create(q4_backend **out, q4_error *err)
{
    return is_open() ? create(out, err) : fail(err, Q4_E_DEVICE, "no address space for the device");
}

/* The product as the kernels see it. */
static q4_linear_spec on_the_inside(const q4_linear_spec *spec)
{
    q4_linear_spec inner = *spec;
    inner.struct_size = sizeof inner;
    inner.device_type = Q4_DEVICE_CPU, inner.device_id = 0;
    return inner;
}

static int is_here(uint32_t type, uint32_t id)
{
    return type == Q4_DEVICE_VENDOR && id == 0;
}

static q4_status arena_can_prepare(const q4_backend *b, const q4_linear_spec *spec, const q4_env *env, q4_reject_fn sink,
                                   void *user, q4_error *err)
{
    struct verdict v = {sink, user, 0};
    q4_linear_spec inner;
    q4_status      status;
    if (spec->struct_size < sizeof *spec)
        return fail(err, Q4_E_ABI, "spec of an unknown version");
    inner = on_the_inside(spec);
    status = can_prepare(b, &inner, env, sink, user, err);
    if (!is_here(spec->device_type, spec->device_id))
        refuse(&v, "device-absent", NAME ":0", "another device");
    return v.refused ? fail(err, Q4_E_UNSUPPORTED, "see the reasons") : status;
}

static void arena_release(q4_prepared *p)
{
    if (p) {
        give_back((uint64_t)((char *)p->codes - DEVICE.bytes));
        give_back((uint64_t)((char *)p->scales - DEVICE.bytes));
        p->codes = NULL, p->scales = NULL;
        release(p);
    }
}

/* Moves `size` bytes to the device; NULL when they do not fit. */
static void *moved(void *from, uint64_t size)
{
    uint64_t at = take(size);
    if (at == UINT64_MAX)
        return NULL;
    memcpy(DEVICE.bytes + at, from, size);
    free(from);
    return DEVICE.bytes + at;
}

static q4_status arena_prepare(const q4_backend *b, const q4_linear_spec *spec, const q4_weight *w, const q4_exec *exec,
                               q4_prepared **out, q4_error *err)
{
    q4_linear_spec inner;
    q4_prepared   *p;
    q4_status      status;
    void          *codes, *scales;
    if (spec->struct_size < sizeof *spec)
        return fail(err, Q4_E_ABI, "spec of an unknown version");
    if (!is_here(spec->device_type, spec->device_id))
        return fail(err, Q4_E_UNSUPPORTED, "another device");
    inner = on_the_inside(spec);
    status = prepare(b, &inner, w, exec, &p, err);
    if (status != Q4_OK)
        return status;
    codes = moved(p->codes, p->n * (p->k / 2));
    p->codes = codes ? NULL : p->codes;
    scales = codes ? moved(p->scales, p->n * (p->k / GROUP) * 4) : NULL;
    if (!scales) {
        if (codes)
            give_back((uint64_t)((char *)codes - DEVICE.bytes));
        release(p);
        return fail(err, Q4_E_NOMEM, "memory of the device");
    }
    p->codes = codes, p->scales = scales;
    *out = p;
    return done(err);
}

/* ---- products ----------------------------------------------------------------------------------------------------- */

static int operand(const q4_matrix *m, q4_matrix *inner)
{
    if (m->struct_size < sizeof *m || !is_here(m->device_type, m->device_id))
        return 0;
    *inner = *m;
    inner->struct_size = sizeof *inner;
    inner->device_type = Q4_DEVICE_CPU;
    inner->data = behind(m->data, m->bytes);
    return inner->data != NULL;
}

static int context(const q4_exec *exec, q4_exec *inner)
{
    if (exec->struct_size < sizeof *exec || !is_here(exec->device_type, exec->device_id))
        return 0;
    *inner = *exec;
    inner->struct_size = sizeof *inner;
    inner->device_type = Q4_DEVICE_CPU;
    if (exec->workspace)
        inner->workspace = behind(exec->workspace, exec->workspace_bytes);
    return !exec->workspace == !inner->workspace;
}

static q4_status arena_forward(const q4_prepared *p, const q4_matrix *x, const q4_matrix *y, const q4_exec *exec,
                               q4_error *err)
{
    q4_matrix in, out;
    q4_exec   inner;
    if (!operand(x, &in) || !operand(y, &out) || !context(exec, &inner))
        return fail(err, Q4_E_INVALID, "operands that are not on the device");
    return forward(p, &in, &out, &inner, err);
}

static q4_status arena_forward_fused(const q4_prepared *p, const q4_matrix *x, const q4_fusion *f, const q4_matrix *y,
                                     const q4_exec *exec, q4_error *err)
{
    q4_matrix in, out;
    q4_exec   inner;
    if (!operand(x, &in) || !operand(y, &out) || !context(exec, &inner))
        return fail(err, Q4_E_INVALID, "operands that are not on the device");
    return forward_fused(p, &in, f, &out, &inner, err);
}

static q4_status arena_backward_input(const q4_prepared *p, const q4_matrix *dy, const q4_matrix *dx, const q4_exec *exec,
                                      q4_error *err)
{
    q4_matrix in, out;
    q4_exec   inner;
    if (!operand(dy, &in) || !operand(dx, &out) || !context(exec, &inner))
        return fail(err, Q4_E_INVALID, "operands that are not on the device");
    return backward_input(p, &in, &out, &inner, err);
}

static q4_status arena_dequantize(const q4_prepared *p, const q4_matrix *out, const q4_exec *exec, q4_error *err)
{
    q4_matrix to;
    q4_exec   inner;
    if (!operand(out, &to) || !context(exec, &inner))
        return fail(err, Q4_E_INVALID, "operands that are not on the device");
    return dequantize(p, &to, &inner, err);
}

static const q4_backend_v1 ARENA = {
    .struct_size = sizeof(q4_backend_v1),
    .abi_major = Q4_ABI_MAJOR,
    .abi_minor = Q4_ABI_MINOR,
    .name = Q4_STR(NAME),
    .version = Q4_STR(VERSION),
    .vendor = Q4_STR(VENDOR),
    .priority = -30,
    .n_offers = sizeof OFFERS / sizeof *OFFERS,
    .offers = OFFERS,
    .create = arena_create,
    .destroy = destroy,
    .can_prepare = arena_can_prepare,
    .prepare = arena_prepare,
    .release = arena_release,
    .info = info,
    .workspace = workspace,
    .forward = arena_forward,
    .dequantize = arena_dequantize,
    .backward_input = arena_backward_input,
    .probe = probe,
    .fuses = fuses,
    .forward_fused = arena_forward_fused,
    .device = device,
    .device_alloc = device_alloc,
    .device_free = device_free,
    .copy_in = copy_in,
    .copy_out = copy_out,
    .synchronize = synchronize,
};

q4_status q4_plugin_query(uint32_t abi_major, uint32_t id, q4_interface *out)
{
    q4_status status = acme_c_query(abi_major, id, out);
    if (status == Q4_OK)
        out->table = &ARENA;
    return status;
}
