//! Libraries that compute less than everything, through the whole of `q4 conformance`: what they do compute
//! is certified, and the certificate says how little that is.
use crate::plugin::{User, built};
use crate::{document, err, out};
use serde_json::{Value, json};
use std::fs;

const BF16: &str = "s->x_dtype == Q4_BF16 && s->y_dtype == Q4_BF16";
/// One encoding, to bound the time.
const PLAIN: &str = "s->schema == Q4_SCHEMA_NVFP4 && s->scale_layout == Q4_SCALE_ROW_MAJOR && \
    s->global_convention == Q4_CONVENTION_NONE";

/// The limits of the one claim in the certificate of a library that accepts this much.
fn limits(accepts: &str, edits: &[(&str, &str)]) -> Value {
    let user = User::new();
    let plugin = built::narrow(user.folder(), "narrow", accepts, edits);
    let judged = user.q4(&plugin).args(["--json", "conformance"]).output().unwrap();
    assert_eq!(judged.status.code(), Some(0), "{accepts}: {}{}", out(&judged), err(&judged));
    let report = document("conformance", &judged);
    assert_eq!((&report["conformant"], &report["complete"]), (&true.into(), &true.into()), "{accepts}");
    let files = user.certificates();
    assert_eq!(files.len(), 1, "{accepts}: {files:?}");
    let certificate: Value = serde_json::from_slice(&fs::read(&files[0]).unwrap()).unwrap();
    let claims = certificate["claims"].as_array().unwrap();
    assert_eq!(claims.len(), 1, "{certificate}");
    assert_eq!(claims[0]["claim"], "nvfp4@1/native/cpu/fused-dequant");
    claims[0]["limits"].clone()
}

#[test]
fn a_library_of_one_type_is_certified_for_it() {
    let limits = limits(&format!("{PLAIN} && {BF16}"), &[]);
    assert_eq!(limits["types"], json!([{"dtype": "bfloat16", "backward": true, "dequantize": true}]));
    assert_eq!(
        (&limits["segments"], &limits["n_multiple"], &limits["max_m"]),
        (&3.into(), &1.into(), &Value::Null)
    );
}

#[test]
fn a_library_of_whole_tiles_is_certified_for_them() {
    let limits = limits(&format!("{PLAIN} && each(s, 128)"), &[]);
    assert_eq!((&limits["n_multiple"], &limits["k_multiple"]), (&128.into(), &16.into()));
    assert_eq!(limits["types"].as_array().unwrap().len(), 3);
}

#[test]
fn a_library_that_decodes_one_row_is_certified_for_it() {
    let accepts = "s->scale_layout == Q4_SCALE_128X4 && s->global_convention == Q4_CONVENTION_MULTIPLY && \
        s->n_segments == 1 && s->max_m == 1 && s->k % 256 == 0 && s->ops == Q4_OP_FORWARD";
    let ops = "p->ops = Q4_OP_FORWARD | Q4_OP_BACKWARD_INPUT | Q4_OP_DEQUANTIZE;";
    let limits = limits(accepts, &[(ops, "p->ops = Q4_OP_FORWARD;")]);
    assert_eq!(limits["encodings"], json!(["nvfp4.swizzled.multiply"]));
    assert_eq!(
        (&limits["segments"], &limits["max_m"], &limits["k_multiple"]),
        (&1.into(), &1.into(), &256.into())
    );
    let forward = |t: &Value| t["backward"] == false && t["dequantize"] == false;
    assert!(limits["types"].as_array().unwrap().iter().all(forward), "{limits}");
}

/// Narrow is no excuse: the checks of its table pass, its last column is wrong for more rows than those have.
#[test]
fn a_narrow_library_that_is_wrong_is_refused() {
    let stores = "store(row, j->out_dtype, col, value[r]);";
    let wrong = stores.replace("value[r]", "value[r] * (j->rows > 4 && col + 1 == all ? 1.5f : 1.f)");
    let user = User::new();
    let accepts = format!("{PLAIN} && {BF16}");
    let plugin = built::narrow(user.folder(), "narrow", &accepts, &[(stores, &wrong)]);
    let judged = user.q4(&plugin).args(["--json", "conformance"]).output().unwrap();
    assert_eq!(judged.status.code(), Some(5), "{}{}", out(&judged), err(&judged));
    let report = document("conformance", &judged);
    let failed = |level: &str| -> u64 {
        let of = |claim: &Value| claim["levels"][level]["failed"].as_u64().unwrap_or(0);
        report["claims"].as_array().unwrap().iter().map(of).sum()
    };
    assert_eq!(failed("L0"), 0, "{report}");
    assert!(failed("L2") > 0, "{report}");
    assert!(user.certificates().is_empty());
}

#[test]
fn a_library_that_accepts_nothing_is_told_so() {
    let user = User::new();
    let plugin = built::narrow(user.folder(), "narrow", "0", &[]);
    let judged = user.q4(&plugin).arg("conformance").output().unwrap();
    assert_eq!(judged.status.code(), Some(5), "{}{}", out(&judged), err(&judged));
    assert!(out(&judged).contains("`can_prepare` to accept a product on the CPU"), "{}", out(&judged));
    assert!(user.certificates().is_empty());
}
