//! The C project of `q4 plugin new`, with int4 in groups instead of NVFP4, as its author would change it.
#![allow(clippy::unwrap_used)]
use super::{compile, plugins};
use std::path::{Path, PathBuf};

pub fn acme_int4(dir: &Path) -> PathBuf {
    let folder = plugins().join("../cli/templates/c");
    let source =
        ["kernel.h", "kernel.c", "plugin.c"].map(|f| std::fs::read_to_string(folder.join(f)).unwrap());
    let mut source = source.concat();
    let mut edit = |from: &str, to: &str| {
        assert!(source.contains(from), "`{from}` is not in the project any more");
        source = source.replace(from, to);
    };
    edit("#include \"kernel.h\"\n", "");
    edit("{{name}}", "acme-int4");
    edit("{{vendor}}", "ACME");
    edit("    float   *scales;", "    uint8_t *zeros;\n    float   *scales;");
    edit("[i] & 15] * scale", "[i] & 15) - zero) * scale");
    edit("[i] >> 4] * scale", "[i] >> 4) - zero) * scale");
    edit("E2M1[codes", "(float)((codes");
    edit(
        "    unsigned       i;\n",
        "    int      zero = w->zeros[row * (w->k / GROUP) + group];\n    unsigned i;\n",
    );
    edit(
        "if (s->schema != Q4_SCHEMA_NVFP4 || s->schema_revision != 1)",
        "if ((s->schema != Q4_SCHEMA_INT4 && s->schema != Q4_SCHEMA_INT4_ASYM) || s->schema_revision != 1)",
    );
    edit(
        "s->scale_layout != Q4_SCALE_ROW_MAJOR && s->scale_layout != Q4_SCALE_128X4",
        "!is_float(s->scale_dtype)",
    );
    edit(
        "s->k == 0 || s->k % GROUP != 0",
        "s->k == 0 || s->block == 0 || s->block % GROUP || s->k % s->block",
    );
    edit("{{Q4_SCHEMA_NVFP4, 1,", "{{Q4_SCHEMA_INT4_ASYM, 1, Q4_PATH_FUSED_DEQUANT, 0}, {Q4_SCHEMA_INT4, 1,");
    edit("        free(p->w.codes);\n", "        free(p->w.codes);\n        free(p->w.zeros);\n");
    edit(
        "    if (!p->w.codes ||",
        "    p->w.zeros = malloc((size_t)(p->w.n * (p->w.k / GROUP)));\n    if (!p->w.zeros || !p->w.codes ||",
    );
    edit("p->w.k / GROUP * sizeof *p->w.scales)", "p->w.k / GROUP * (1 + sizeof *p->w.scales))");
    let start = source.find("static q4_status take_segment(").unwrap();
    let end = start + source[start..].find("\n}\n").unwrap() + 3;
    source.replace_range(start..end, TAKE_SEGMENT);
    compile(dir, "acme_int4", &["-ffp-contract=off", "-fvisibility=hidden", "-O2"], &source)
}

/// Scales and zero points of a group, for each 16 elements of it.
const TAKE_SEGMENT: &str = "
static float load(const void *row, uint32_t dtype, uint64_t i);
static size_t size_of(uint32_t dtype);

static q4_status take_segment(struct weight *w, const q4_linear_spec *spec, const q4_segment *s, uint64_t first,
                              q4_error *err)
{
    uint64_t groups = w->k / spec->block, at;
    int      has_zeros = spec->schema == Q4_SCHEMA_INT4_ASYM;
    if (s->codes_bytes != s->rows * (w->k / 2) || s->scales_bytes != s->rows * groups * size_of(spec->scale_dtype) ||
        s->zeros_bytes != (has_zeros ? s->rows * groups : 0))
        return fail(err, Q4_E_INVALID, \"other bytes than rows and k say\");
    memcpy(w->codes + first * (w->k / 2), s->codes, (size_t)s->codes_bytes);
    for (at = 0; at < s->rows * (w->k / GROUP); at++) {
        uint64_t group = at / (w->k / GROUP) * groups + at % (w->k / GROUP) / (spec->block / GROUP);
        float    scale = load(s->scales, spec->scale_dtype, group);
        uint8_t  zero = has_zeros ? ((const uint8_t *)s->zeros)[group] : 8;
        if (!(scale >= -3.4028235e38f && scale <= 3.4028235e38f) || zero > 15)
            return fail(err, Q4_E_SCALE_INVALID, \"a scale that is not finite, or a zero point above 15\");
        w->scales[first * (w->k / GROUP) + at] = scale;
        w->zeros[first * (w->k / GROUP) + at] = zero;
    }
    return Q4_OK;
}
";
