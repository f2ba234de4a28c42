//! Libraries that accept little: the checks of a table are made with a product of theirs, and are no weaker
//! for it.
#![allow(clippy::unwrap_used)]
mod built;

use q4_core::{Code, Error};
use q4_plugin_host::TableCases;
use std::collections::BTreeMap;

const BF16: &str = "s->x_dtype == Q4_BF16 && s->y_dtype == Q4_BF16";

fn table(accepts: &str, edits: &[(&str, &str)]) -> TableCases {
    let dir = tempfile::tempdir().unwrap();
    let path = built::narrow(dir.path(), "narrow", accepts, edits);
    q4_plugin_host::load(&path).unwrap().table
}

fn failures(table: &TableCases) -> BTreeMap<String, Error> {
    table.cases().into_iter().filter_map(|case| Some((case.clone(), table.run(&case).err()?))).collect()
}

#[test]
fn every_narrow_library_passes() {
    let all = [
        BF16,
        "s->x_dtype == Q4_F16 && s->y_dtype == Q4_F16",
        "each(s, 128)",
        "each(s, 1024)",
        "s->k % 256 == 0",
        "s->k % 1024 == 0",
        "s->global_convention == Q4_CONVENTION_MULTIPLY",
        "s->global_convention == Q4_CONVENTION_DIVIDE",
        "s->scale_layout == Q4_SCALE_128X4",
        "s->schema == Q4_SCHEMA_NF4 && s->nibble_order == Q4_NIBBLE_LOW_FIRST && s->block == 128",
        "s->schema == Q4_SCHEMA_NF4 && s->block == 4096",
        "s->schema == Q4_SCHEMA_NF4_DQ",
        "s->n_segments == 1",
        "s->max_m <= 16",
        "s->max_m == 16",
        "s->max_m == 1",
        "s->n_segments == 1 && s->max_m == 1 && s->x_dtype == Q4_F16 && s->y_dtype == Q4_F16 && \
         each(s, 4096) && s->k % 4096 == 0 && s->global_convention == Q4_CONVENTION_DIVIDE && \
         s->scale_layout == Q4_SCALE_128X4",
    ];
    let failed = all.map(|accepts| (accepts, failures(&table(accepts, &[]))));
    let failed: Vec<_> = failed.into_iter().filter(|(_, failed)| !failed.is_empty()).collect();
    assert!(failed.is_empty(), "{failed:#?}");
}

#[test]
fn a_library_without_a_backward_product_passes() {
    let ops = "p->ops = Q4_OP_FORWARD | Q4_OP_BACKWARD_INPUT | Q4_OP_DEQUANTIZE;";
    let failed = failures(&table("s->ops == Q4_OP_FORWARD", &[(ops, "p->ops = Q4_OP_FORWARD;")]));
    assert!(failed.is_empty(), "{failed:?}");
}

#[test]
fn outputs_of_16_bits_are_compared_to_the_last_bit_and_must_all_be_written() {
    let stores = "store(row, j->out_dtype, col, value[r]);";
    let pieces = "j->pieces = (items + j->piece - 1) / j->piece;";
    let unwritten = [(stores, &*format!("if (col + 1 < all) {stores}"))];
    let rounded = [
        ("static void store(", "static int alone;\nstatic void store("),
        (pieces, &*format!("{pieces} alone = !(exec && exec->parallel);")),
        ("to_f16(v) : to_bf16(v)", "to_f16(v) ^ alone : to_bf16(v) ^ alone"),
    ];
    for accepts in [BF16, "s->x_dtype == Q4_F16 && s->y_dtype == Q4_F16"] {
        let failed = failures(&table(accepts, &unwritten));
        let said = failed.get("two-backends").map(Error::to_string).unwrap_or_default();
        assert!(said.contains("outputs that were not written"), "{accepts}: {failed:?}");
        let failed = failures(&table(accepts, &rounded));
        assert_eq!(failed.keys().collect::<Vec<_>>(), ["no-threads"], "{accepts}: {failed:?}");
    }
}

#[test]
fn a_library_that_accepts_nothing_is_told_what_was_asked() {
    let failed = failures(&table("0", &[]));
    let asks_nothing = ["query-of-an-unknown-interface", "query-of-an-unknown-major", "query-repeats"];
    assert_eq!(failed.len() + asks_nothing.len(), TableCases::names(false).len(), "{failed:?}");
    for (case, e) in failed {
        let text = e.to_string();
        assert_eq!(e.code(), Code::ConformanceFailed, "{case}: {text}");
        let offered = "nvfp4 via fused-dequant or nf4 via fused-dequant or nf4-dq via fused-dequant";
        for words in ["`can_prepare` to accept", offered, "products that it refuses"] {
            assert!(text.contains(words), "{case}: no `{words}` in {text}");
        }
    }
}
