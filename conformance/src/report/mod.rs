//! What a run found: counts, claims, errors over bounds, and every case that is not right. Renderings are
//! beside it.
mod html;
mod json;
mod junit;
mod plot;
mod text;

use crate::case::{CaseResult, Outcome};
use crate::facts::{Library, device_fact, facts, machine};
use crate::options::{Options, SUITE_VERSION};
use crate::{Level, Limits, Profile, Proof};
use q4_core::{BackendDescriptor, Device, ExecPath, HostEnv};
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::Duration;

/// Cells of a histogram of errors over bounds, from 0 to 1.
pub const HISTOGRAM: usize = 40;

/// A run, of one backend or of several.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Version of q4, which made the report.
    pub q4: String,
    /// Version of the suite.
    pub suite: String,
    /// Profile.
    pub profile: Profile,
    /// Seed of the run.
    pub seed: u64,
    /// Every requested case of every backend ran or was rightly refused, none was wrong, and something ran
    /// at all.
    pub conformant: bool,
    /// Nothing of the profile was left out.
    pub complete: bool,
    /// Cases that passed.
    pub passed: usize,
    /// Cases that failed, crashed, hung or could not be run.
    pub failed: usize,
    /// Cases that were refused beforehand.
    pub skipped: usize,
    /// Cases that failed and are excused.
    pub waived: usize,
    /// Values compared.
    pub values: u64,
    /// Largest error over its bound.
    pub max_error_over_bound: f64,
    /// Backends.
    pub backends: Vec<BackendReport>,
    /// Claims, by backend.
    pub claims: Vec<ClaimReport>,
    /// Cases that are not right, waived ones included.
    pub failures: Vec<Failure>,
    /// What is wrong with the run itself: nothing executed, waivers expired or no longer needed.
    pub notes: Vec<String>,
    /// Fingerprint of the machine.
    pub machine: String,
    /// What computed, for people.
    pub device: String,
    /// The machine, for people.
    pub host: String,
    /// Wall-clock seconds.
    pub seconds: f64,
    /// The facts behind the fingerprint of the machine.
    #[serde(skip)]
    pub facts: Vec<String>,
    /// Every case.
    #[serde(skip)]
    pub cases: Vec<(usize, CaseResult)>,
}

/// A case that is not right.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Failure {
    /// Backend.
    pub backend: String,
    /// The command that runs it again.
    pub replay: String,
    /// The case.
    #[serde(flatten)]
    pub case: CaseResult,
}

impl std::ops::Deref for Failure {
    type Target = CaseResult;
    fn deref(&self) -> &CaseResult {
        &self.case
    }
}

/// Who was judged.
#[derive(Clone, Debug, Serialize)]
pub struct BackendReport {
    /// Name.
    pub name: String,
    /// Version.
    pub version: String,
    /// Who made it.
    pub vendor: String,
    /// The file it was loaded from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub library: Option<Library>,
    /// The device of its own that it was judged on, if it was.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// All of its requested cases are right.
    pub conformant: bool,
}

/// One claim of one backend.
#[derive(Clone, Debug, Serialize)]
pub struct ClaimReport {
    /// Backend.
    pub backend: String,
    /// `nvfp4@1/int8/cpu/fused-dequant`, or `backend` for what concerns the whole.
    pub claim: String,
    /// The products of that kind that it computes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub limits: Option<Limits>,
    /// Nothing of it is wrong.
    pub conformant: bool,
    /// By level.
    pub levels: BTreeMap<Level, LevelReport>,
    /// Largest error over its bound.
    pub max_error_over_bound: f64,
    /// Errors of f32 results: how good the arithmetic is.
    pub float32: Errors,
    /// Errors of f16 and bf16 results: the last rounding alone takes up to the whole bound.
    pub half: Errors,
}

/// Errors over bounds of the cases of a claim.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Errors {
    /// Largest.
    pub max: f64,
    /// Cases by their largest error over its bound, [`HISTOGRAM`] cells from 0 to 1.
    pub histogram: Vec<u32>,
}

impl Default for Errors {
    fn default() -> Self {
        Self { max: 0.0, histogram: vec![0; HISTOGRAM] }
    }
}

impl Errors {
    /// Cases counted.
    pub fn cases(&self) -> u32 {
        self.histogram.iter().sum()
    }
    fn add(&mut self, ratio: f64) {
        self.max = self.max.max(ratio);
        self.histogram[((ratio * HISTOGRAM as f64) as usize).min(HISTOGRAM - 1)] += 1;
    }
}

/// One level of a claim.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct LevelReport {
    /// Cases that passed.
    pub passed: usize,
    /// Cases that are wrong.
    pub failed: usize,
    /// Cases that were refused beforehand.
    pub unsupported: usize,
    /// Cases that are wrong and excused.
    pub waived: usize,
}

impl Report {
    /// The report of one backend.
    pub(crate) fn of(
        descriptor: &BackendDescriptor,
        env: &HostEnv,
        options: &Options,
        proofs: &[Proof],
        results: Vec<CaseResult>,
        mut notes: Vec<String>,
        took: Duration,
    ) -> Self {
        let backend = descriptor.name.to_string();
        let mut claims: Vec<ClaimReport> = Vec::new();
        for r in &results {
            let name = r.claim.as_deref().unwrap_or("backend");
            let at = claims.iter().position(|c| c.claim == name).unwrap_or_else(|| {
                claims.push(ClaimReport {
                    backend: backend.clone(),
                    claim: name.to_owned(),
                    limits: proofs.iter().find(|p| p.claim.to_string() == name).map(|p| p.limits.clone()),
                    conformant: true,
                    levels: BTreeMap::new(),
                    max_error_over_bound: 0.0,
                    float32: Errors::default(),
                    half: Errors::default(),
                });
                claims.len() - 1
            });
            claims[at].add(r);
        }
        for c in &mut claims {
            for (level, counts) in
                c.levels.iter().filter(|(_, l)| options.sample.is_none() && l.executed() == 0)
            {
                c.conformant = false;
                notes.push(format!(
                    "nothing executed: {level} of {}, {} cases refused",
                    c.claim, counts.unsupported
                ));
            }
        }
        if results.is_empty() {
            notes.push(match &options.replay {
                Some(id) => format!("nothing executed: {backend} has no case {id}"),
                None => format!("nothing executed: {backend} has no case that was asked for"),
            });
        }
        // What the backend says about itself is no product.
        let of_products = options.replay.is_none() && options.levels().iter().any(|l| *l != Level::L0);
        let on = match options.device {
            Device::Cpu => String::new(),
            device => format!(" --device {device}"),
        };
        let claims_nothing = of_products && claims.iter().all(|c| c.claim == "backend");
        if claims_nothing && !results.is_empty() {
            let on_cpu = options.device == Device::Cpu
                && descriptor.offers.iter().all(|(_, path)| *path == ExecPath::NativeKernel);
            let why = if on_cpu && !descriptor.offers.is_empty() {
                ": it offers native-kernel alone, for devices with units for 4-bit operands, and this is the CPU"
            } else {
                ""
            };
            notes.push(format!("nothing executed: {backend} claims no product{why}"));
        }
        let count = |is: &dyn Fn(Outcome) -> bool| results.iter().filter(|r| is(r.outcome)).count();
        let failed = count(&Outcome::is_bad);
        let passed = count(&|o| o == Outcome::Pass);
        let waived = count(&|o| o == Outcome::Waived);
        let conformant =
            failed == 0 && passed + waived > 0 && !claims_nothing && claims.iter().all(|c| c.conformant);
        Self {
            q4: env!("CARGO_PKG_VERSION").into(),
            suite: SUITE_VERSION.into(),
            profile: options.profile,
            seed: options.seed,
            conformant,
            complete: options.is_complete(),
            passed,
            failed,
            skipped: count(&|o| o == Outcome::Unsupported),
            waived,
            values: results.iter().map(|r| r.values).sum(),
            max_error_over_bound: claims.iter().fold(0.0, |a, c| a.max(c.max_error_over_bound)),
            backends: vec![BackendReport {
                name: backend,
                version: descriptor.version.to_string(),
                vendor: descriptor.vendor.to_string(),
                library: None,
                device: env.vendor_device(options.device).map(device_fact),
                conformant,
            }],
            claims,
            failures: results
                .iter()
                .filter(|r| r.outcome.is_bad() || r.outcome == Outcome::Waived)
                .map(|r| Failure {
                    backend: descriptor.name.to_string(),
                    replay: format!("q4 conformance --backend {}{on} --replay '{}'", descriptor.name, r.id),
                    case: r.clone(),
                })
                .collect(),
            notes,
            machine: machine(env),
            device: CPU.into(),
            host: host(env),
            facts: facts(env),
            seconds: took.as_secs_f64(),
            cases: results.into_iter().map(|r| (0, r)).collect(),
        }
    }

    /// The same for a backend that was loaded from a file; a plugin is named by it when a case is run again.
    pub fn loaded_from(mut self, library: Library, is_plugin: bool) -> Self {
        if is_plugin {
            for f in &mut self.failures {
                let (name, file) =
                    (format!("--backend {}", f.backend), format!("--plugin '{}'", library.path));
                f.replay = f.replay.replacen(&name, &file, 1);
            }
        }
        for b in &mut self.backends {
            b.library = Some(library.clone());
        }
        self
    }

    /// The same with the name of the processor, which is no fact that a certificate is about.
    pub fn on_processor(mut self, name: &str) -> Self {
        if self.device == CPU {
            name.clone_into(&mut self.device);
        }
        self
    }

    /// One report of several backends.
    pub fn merge(mut self, other: Self) -> Self {
        let first = self.backends.len();
        self.conformant &= other.conformant;
        self.complete &= other.complete;
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
        self.waived += other.waived;
        self.values += other.values;
        self.max_error_over_bound = self.max_error_over_bound.max(other.max_error_over_bound);
        self.backends.extend(other.backends);
        self.claims.extend(other.claims);
        self.failures.extend(other.failures);
        self.notes.extend(other.notes);
        self.seconds += other.seconds;
        self.cases.extend(other.cases.into_iter().map(|(b, r)| (first + b, r)));
        self
    }

    /// Text for people: a table of claims, then whatever is wrong with the command that runs it again.
    pub fn text(&self) -> String {
        text::render(self)
    }
    /// One JSON document, `"schema": "q4.conformance/1"` first.
    pub fn json(&self) -> String {
        json::render(self)
    }
    /// JUnit XML: a suite for each claim and level.
    pub fn junit(&self) -> String {
        junit::render(self)
    }
    /// One page without any other file.
    pub fn html(&self) -> String {
        html::render(self)
    }
}

impl ClaimReport {
    fn add(&mut self, r: &CaseResult) {
        let level = self.levels.entry(r.level).or_default();
        match r.outcome {
            Outcome::Pass => level.passed += 1,
            Outcome::Unsupported => level.unsupported += 1,
            Outcome::Waived => level.waived += 1,
            _ => {
                level.failed += 1;
                self.conformant = false;
            }
        }
        if let Some(ratio) = r.ratio {
            self.max_error_over_bound = self.max_error_over_bound.max(ratio);
            let is_half = r.id.contains("/float16/") || r.id.contains("/bfloat16/");
            if is_half { &mut self.half } else { &mut self.float32 }.add(ratio);
        }
    }
}

impl LevelReport {
    /// Cases that were not refused.
    pub fn executed(&self) -> usize {
        self.passed + self.failed + self.waived
    }
}

/// Claims are about the CPU; other devices are facts about the machine.
const CPU: &str = "CPU";

fn host(env: &HostEnv) -> String {
    let mut parts = vec![env.arch.clone()];
    if !env.cpu_features.is_empty() {
        parts.push(env.cpu_features.join(" "));
    }
    parts.extend(env.cuda.iter().map(|d| format!("{} ({})", d.name, d.arch())));
    parts.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Date;

    /// A run that never was, with everything that a rendering can show.
    fn run() -> Report {
        let descriptor = |name: &'static str, version: &'static str| BackendDescriptor {
            name: name.into(),
            version: version.into(),
            vendor: "Acme <& sons>".into(),
            priority: 0,
            offers: Vec::new(),
        };
        let env = HostEnv { arch: "x86_64".into(), cpu_features: vec!["avx2".into()], ..HostEnv::default() };
        let options = Options { seed: 7, today: Date::default(), ..Options::of(Profile::Training) };
        let case = |level: Level, claim: Option<&str>, outcome, ratio, message: Option<&str>| CaseResult {
            id: format!("{level}/{}/case-{}/s7", claim.unwrap_or("backend"), Outcome::as_str(outcome)),
            level,
            claim: claim.map(str::to_owned),
            outcome,
            values: 1234,
            ratio,
            message: message.map(str::to_owned),
            waiver: (outcome == Outcome::Waived).then(|| "known until 1.1".to_owned()),
        };
        let (native, int8) = ("nvfp4@1/native/cpu/fused-dequant", "nvfp4@1/int8/cpu/fused-dequant");
        let good = vec![
            case(Level::L0, None, Outcome::Pass, None, None),
            case(Level::L1, Some(native), Outcome::Pass, None, None),
            case(Level::L2, Some(native), Outcome::Pass, Some(0.25), None),
            case(
                Level::L2,
                Some(native),
                Outcome::Unsupported,
                None,
                Some("shape-unsupported need k % 64 == 0; have k = 80"),
            ),
            case(Level::L3, Some(native), Outcome::Waived, None, Some("Q4-E0601: dx[0, 1]")),
        ];
        let bad = vec![
            case(Level::L1, Some(int8), Outcome::Unsupported, None, Some("layout-unsupported")),
            CaseResult {
                id: "L2/nvfp4@1/int8/cpu/fused-dequant/lattice/nvfp4/int8/bfloat16/n1.k16.m1/s7".into(),
                ..case(Level::L2, Some(int8), Outcome::Pass, Some(0.999), None)
            },
            case(
                Level::L2,
                Some(int8),
                Outcome::Fail,
                None,
                Some("Q4-E0601: y[3, 4]\n  need: 1 within \"2e-7\"\n  have: <NaN>"),
            ),
            case(Level::L2, Some(int8), Outcome::Crash, None, Some("the process ended: signal: 6")),
            case(Level::L5, Some(int8), Outcome::Hang, None, Some("no end within 3 s")),
        ];
        let took = Duration::from_millis(1500);
        let notes = vec!["unexpected pass: L1/* of 3 cases is no longer needed (known)".to_owned()];
        let library = Library {
            path: "/opt/acme/libacme.so".into(),
            sha256: "0123456789abcdef".repeat(4),
            needs: Vec::new(),
        };
        let first = Report::of(&descriptor("acme-q4", "1.2.0"), &env, &options, &[], good, notes, took);
        first.loaded_from(library, true).merge(Report::of(
            &descriptor("other-q4", "0.1.0"),
            &env,
            &options,
            &[],
            bad,
            Vec::new(),
            took,
        ))
    }

    #[test]
    fn a_case_of_a_device_is_run_again_there() {
        let descriptor = BackendDescriptor {
            name: "acme-q4".into(),
            version: "1".into(),
            vendor: "Acme".into(),
            priority: 0,
            offers: Vec::new(),
        };
        let (env, id) = (HostEnv::default(), "L2/nvfp4@1/native/cuda:1/fused-dequant/lattice/s0");
        let failed = CaseResult {
            id: id.into(),
            level: Level::L2,
            claim: None,
            outcome: Outcome::Fail,
            values: 1,
            ratio: None,
            message: None,
            waiver: None,
        };
        let options = Options { device: Device::Cuda(1), ..Options::of(Profile::Inference) };
        let report = Report::of(&descriptor, &env, &options, &[], vec![failed], Vec::new(), Duration::ZERO);
        let want = |who: &str| [format!("q4 conformance {who} --device cuda:1 --replay '{id}'")];
        let commands = |r: &Report| r.failures.iter().map(|f| f.replay.clone()).collect::<Vec<_>>();
        assert_eq!(commands(&report), want("--backend acme-q4"));
        let library = Library { path: "/opt/libacme.so".into(), sha256: String::new(), needs: Vec::new() };
        assert_eq!(commands(&report.loaded_from(library, true)), want("--plugin '/opt/libacme.so'"));
    }

    #[test]
    fn counts_add_up() {
        let r = run();
        assert_eq!((r.passed, r.failed, r.skipped, r.waived), (4, 3, 2, 1));
        assert!(!r.conformant && r.complete && r.backends[0].conformant && !r.backends[1].conformant);
        assert_eq!((r.max_error_over_bound, r.values), (0.999, 12_340));
        assert_eq!(
            r.claims.iter().map(|c| (c.float32.cases(), c.half.cases())).collect::<Vec<_>>(),
            [(0, 0), (1, 0), (0, 1)]
        );
        assert!(r.notes.iter().any(|n| n.contains("nothing executed: L1 of nvfp4@1/int8")), "{:?}", r.notes);
    }

    /// A backend that is wrong everywhere has one cause, and it shows in the first failure of a check that
    /// can see it.
    #[test]
    fn the_text_has_the_first_failure_of_every_kind_and_how_many_more() {
        let descriptor = BackendDescriptor {
            name: "acme-q4".into(),
            version: "1".into(),
            vendor: "Acme".into(),
            priority: 0,
            offers: Vec::new(),
        };
        let case = |level: Level, name: String, outcome| CaseResult {
            id: format!("{level}/nvfp4@1/native/cpu/fused-dequant/{name}/s0"),
            level,
            claim: Some("nvfp4@1/native/cpu/fused-dequant".into()),
            outcome,
            values: 1,
            ratio: None,
            message: Some(format!("message of {name}")),
            waiver: None,
        };
        let mut cases = Vec::new();
        for i in 0..50 {
            let layout = if i < 30 { "row-major" } else { "swizzled" };
            cases.push(case(Level::L1, format!("every-code/{layout}/{i}"), Outcome::Fail));
        }
        cases.push(case(Level::L2, "lattice/first".into(), Outcome::Crash));
        for i in 0..30 {
            cases.push(case(Level::L4, format!("check-{i}/x"), Outcome::Fail));
        }
        for i in 0..3 {
            cases.push(CaseResult {
                message: Some("need a;  have b".into()),
                ..case(Level::L2, format!("fused/{i}"), Outcome::Unsupported)
            });
        }
        let options = Options { today: Date::default(), ..Options::of(Profile::Inference) };
        let env = HostEnv::default();
        let r = Report::of(&descriptor, &env, &options, &[], cases, Vec::new(), Duration::ZERO);
        let text = r.text();
        let of = "nvfp4@1/native/cpu/fused-dequant";
        for line in [
            format!("fail L1/{of}/every-code/row-major/0/s0\n    message of every-code/row-major/0\n"),
            format!("    and 49 more of L1/{of}/every-code: 29 row-major, 20 swizzled\n"),
            format!("crash L2/{of}/lattice/first/s0\n    message of lattice/first\n"),
            format!("fail L4/{of}/check-17/x/s0\n    message"),
            format!("fail L4/{of}/check-18/x/s0, the first of 1 of L4/{of}/check-18\n"),
            format!("unsupported L2/{of}/fused, 3 cases, the first L2/{of}/fused/0/s0\n    need a; have b\n"),
            "the JSON report has every failure".into(),
        ] {
            assert!(text.contains(&line), "no {line} in {text}");
        }
        let json: serde_json::Value = serde_json::from_str(&r.json()).expect("JSON");
        assert_eq!(json["failures"].as_array().map(Vec::len), Some(81));
        assert_eq!(json["unsupported"].as_array().map(Vec::len), Some(3));
        assert_eq!((&json["unsupported"][0]["backend"], &json["q4"]), (&"acme-q4".into(), &r.q4.into()));
    }

    #[test]
    fn renderings_are_pinned() {
        let r = run();
        insta::assert_snapshot!("text", r.text());
        insta::assert_snapshot!("json", r.json());
        insta::assert_snapshot!("junit", r.junit());
        insta::assert_snapshot!("html", r.html());
    }

    #[test]
    fn a_page_needs_nothing_else_and_shows_no_markup_of_others() {
        let html = run().html();
        for foreign in ["http", "<script", "url(", "<NaN>", "<& sons>", "@import"] {
            assert!(!html.contains(foreign), "{foreign}");
        }
        assert!(html.contains("&lt;NaN&gt;") && html.contains("prefers-color-scheme: dark"));
    }

    #[test]
    fn json_is_what_it_says() -> Result<(), serde_json::Error> {
        let text = run().json();
        assert!(text.starts_with("{\"schema\":\"q4.conformance/1\","), "{text}");
        let v: serde_json::Value = serde_json::from_str(&text)?;
        assert_eq!(
            (v["passed"].as_u64(), v["failed"].as_u64(), v["skipped"].as_u64()),
            (Some(4), Some(3), Some(2))
        );
        assert_eq!(v["claims"].as_array().map(Vec::len), Some(3));
        assert_eq!(v["failures"][0]["id"], "L3/nvfp4@1/native/cpu/fused-dequant/case-waived/s7");
        Ok(())
    }
}
