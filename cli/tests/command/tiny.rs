//! Every recorded tiny model and flavour: logits and greedy ids against those of the tools that wrote the
//! checkpoints.
use crate::{golden, golden_arg, json};
use safetensors::SafeTensors;
use std::path::Path;

/// Flavour, checkpoint, `--activations`.
const FLAVOURS: [(&str, &str, &str); 12] = [
    ("dense", "", "auto"),
    ("torchao_nogs_w4a16", "nvfp4_torchao_nogs", "native"),
    ("torchao_gs_w4a16", "nvfp4_torchao_gs", "native"),
    ("torchao_nogs_w4a4", "nvfp4_torchao_nogs", "nvfp4"),
    ("torchao_gs_w4a4_dyn", "nvfp4_torchao_gs", "nvfp4"),
    ("ct_w4a16", "nvfp4_ct_w4a16", "auto"),
    ("ct_w4a16", "nvfp4_ct", "native"),
    ("ct_w4a4", "nvfp4_ct", "auto"),
    ("modelopt_w4a16", "nvfp4_modelopt", "native"),
    ("modelopt_w4a4", "nvfp4_modelopt", "auto"),
    ("nf4", "nf4_bnb", "auto"),
    ("nf4_dq", "nf4_bnb_dq", "auto"),
];

#[test]
fn tiny_a() {
    check("qwen3_tiny_a");
}

#[test]
fn tiny_b() {
    check("qwen3_tiny_b");
}

fn check(name: &str) {
    let bytes = std::fs::read(golden(name).join("expected.safetensors")).unwrap();
    let expected = SafeTensors::deserialize(&bytes).unwrap();
    let mut wrong = Vec::new();
    for (flavour, checkpoint, activations) in FLAVOURS {
        let model = golden_arg(&format!("{name}/{checkpoint}"));
        for length in [1, 7, 33] {
            let greedy = if length == 7 { 32 } else { 0 };
            let case = Case { model: &model, activations, length, greedy };
            let (error, largest, ids) = case.against(&expected, flavour);
            let limit = if flavour == "dense" { 2e-4 } else { 1e-3 * largest };
            let case = format!("{name}/{checkpoint} as {flavour}, length {length}");
            println!("{case}: {error:.2e} of {largest:.2}");
            if error > limit {
                wrong.push(format!("{case}: {error:e}, limit {limit:e}"));
            }
            if greedy > 0 && ids != i64s(&expected, &format!("{flavour}.greedy_ids")) {
                wrong.push(format!("{case}: greedy {ids:?}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn yarn_stretches_the_context() {
    let bytes = std::fs::read(golden("qwen3_tiny_a/expected.safetensors")).unwrap();
    let expected = SafeTensors::deserialize(&bytes).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let text = std::fs::read_to_string(golden("qwen3_tiny_a/config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&text).unwrap();
    config["max_position_embeddings"] = 64.into();
    config["rope_scaling"] = serde_json::json!({
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1_000_000
    });
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    std::fs::copy(golden("qwen3_tiny_a/model.safetensors"), dir.path().join("model.safetensors")).unwrap();
    for length in [1, 7, 33] {
        let case = Case { model: dir.path().to_str().unwrap(), activations: "auto", length, greedy: 0 };
        let (error, _, _) = case.against(&expected, "dense_yarn");
        assert!(error <= 2e-4, "length {length}: {error:e}");
    }
    let plain = Case { model: &golden_arg("qwen3_tiny_a"), activations: "auto", length: 33, greedy: 0 };
    assert!(plain.against(&expected, "dense_yarn").0 > 1e-2, "without the scaling the numbers are others");
}

/// Cutting a prompt into steps changes no logit where no scale depends on the call.
#[test]
fn steps_do_not_change_the_numbers() {
    let dir = tempfile::tempdir().unwrap();
    let read = |file: &str, chunk: &str| {
        let path = dir.path().join(file);
        let model = golden_arg("qwen3_tiny_a/nvfp4_modelopt");
        let args = [&model, "--ids", "5,6,7,8,9", "--out", path.to_str().unwrap(), "--chunk", chunk];
        let report = json("logits", &args);
        assert_eq!((&report["positions"], &report["vocab"]), (&5.into(), &256.into()));
        std::fs::read(path).unwrap()
    };
    let (whole, cut) = (read("a", "5"), read("b", "2"));
    let [whole, cut] = [&whole, &cut].map(|b| f32s(&SafeTensors::deserialize(b).unwrap(), "logits"));
    let error = whole.iter().zip(&cut).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
    assert!(error < 1e-4, "{error:e}");
}

struct Case<'a> {
    model: &'a str,
    activations: &'a str,
    length: usize,
    greedy: usize,
}

impl Case<'_> {
    /// Largest difference of the logits, largest expected logit, greedy ids.
    fn against(&self, expected: &SafeTensors<'_>, flavour: &str) -> (f32, f32, Vec<i64>) {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("logits.safetensors");
        let ids: Vec<_> =
            i64s(expected, &format!("inputs.ids.len{}", self.length)).iter().map(i64::to_string).collect();
        let greedy = self.greedy.to_string();
        let report = json(
            "logits",
            &[
                self.model,
                "--ids",
                &ids.join(","),
                "--out",
                out.to_str().unwrap(),
                "--greedy",
                &greedy,
                "--activations",
                self.activations,
            ],
        );
        let want = f32s(expected, &format!("{flavour}.logits.len{}", self.length));
        let got = logits(&out, self.length);
        assert_eq!(got.len(), want.len());
        let error = got
            .iter()
            .zip(&want)
            .map(|(a, b)| (a - b).abs())
            .fold(0f32, |m, e| if e > m || e.is_nan() { e } else { m });
        let largest = want.iter().fold(0f32, |m, v| m.max(v.abs()));
        let ids =
            report["greedy_ids"].as_array().map(|ids| ids.iter().map(|i| i.as_i64().unwrap()).collect());
        (error, largest, ids.unwrap_or_default())
    }
}

fn logits(path: &Path, positions: usize) -> Vec<f32> {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(file.tensor("logits").unwrap().shape()[0], positions);
    f32s(&file, "logits")
}

fn f32s(file: &SafeTensors<'_>, name: &str) -> Vec<f32> {
    let data = file.tensor(name).unwrap().data();
    data.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

fn i64s(file: &SafeTensors<'_>, name: &str) -> Vec<i64> {
    let data = file.tensor(name).unwrap().data();
    data.chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap())).collect()
}
