/* A plugin that does everything right except that it computes nothing. Tests replace the lines they are about. */
#include "q4_plugin.h"
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define NAME "stub"
/*EARLY*/
Q4_PLUGIN_DESCRIPTOR(NAME, "1.0", "nobody");

struct q4_backend { int unused; };
struct q4_prepared { uint64_t n, k; uint32_t path, activations, ops; };
static struct q4_backend BACKEND;

static q4_status say(q4_error *err, q4_status status, const char *text)
{
    size_t len = strlen(text);
    if (err->ptr) memcpy(err->ptr, text, len < err->cap ? len : err->cap);
    err->len = len;
    return status;
}
static q4_status create(q4_backend **out, q4_error *err) { *out = &BACKEND; return say(err, Q4_OK, ""); }
static void destroy(q4_backend *b) {}
static q4_status can_prepare(const q4_backend *b, const q4_linear_spec *s, const q4_env *e, q4_reject_fn sink, void *user, q4_error *err)
{
    return say(err, Q4_OK, "");
}
static q4_status prepare(const q4_backend *b, const q4_linear_spec *s, const q4_weight *w, const q4_exec *x, q4_prepared **out, q4_error *err)
{
    q4_prepared *p = malloc(sizeof *p);
    p->n = s->n, p->k = s->k, p->path = s->path, p->activations = s->activations, p->ops = s->ops;
    *out = p;
    return say(err, Q4_OK, "");
}
static void release(q4_prepared *p) { free(p); }
static q4_status info(const q4_prepared *p, q4_prepared_info *o, q4_error *err)
{
    o->n = p->n, o->k = p->k, o->path = p->path, o->activations = p->activations, o->ops = p->ops;
    o->resident_bytes = sizeof *p;
    return say(err, Q4_OK, "");
}
static uint64_t workspace(const q4_prepared *p, uint64_t m) { return 0; }
static q4_status forward(const q4_prepared *p, const q4_matrix *x, const q4_matrix *y, const q4_exec *e, q4_error *err)
{
    return say(err, Q4_OK, "");
}
static q4_status dequantize(const q4_prepared *p, const q4_matrix *o, const q4_exec *e, q4_error *err)
{
    return say(err, Q4_OK, "");
}
static const q4_offer OFFERS[] = {{Q4_SCHEMA_NVFP4, 1, Q4_PATH_FUSED_DEQUANT, 0}};
static q4_backend_v1 TABLE = {
    .struct_size = sizeof(q4_backend_v1), .abi_major = Q4_ABI_MAJOR, .abi_minor = Q4_ABI_MINOR,
    .name = Q4_STR(NAME), .version = Q4_STR("1.0"), .vendor = Q4_STR("nobody"),
    .n_offers = 1, .offers = OFFERS,
    .create = create, .destroy = destroy, .can_prepare = can_prepare, .prepare = prepare, .release = release,
    .info = info, .workspace = workspace, .forward = forward, .dequantize = dequantize,
    /*LATE*/
};
q4_status q4_plugin_query(uint32_t major, uint32_t id, q4_interface *out)
{
    if (major != Q4_ABI_MAJOR || id != Q4_INTERFACE_BACKEND) return Q4_E_ABI;
    out->abi_minor = Q4_ABI_MINOR;
    out->table = &TABLE;
    return Q4_OK;
}
