//! Files that are nearly all header: what a process that reads them takes of the machine.
#![cfg(target_os = "linux")]
use crate::q4;
use serde_json::json;
use std::io::Write;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

/// Resident bytes for a byte of the file, the mapped file among them.
const ALLOWED: u64 = 4;
const TENSORS: usize = 500_000;

#[test]
fn a_file_of_headers_takes_no_more_than_four_times_its_size() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(crate::golden("qwen3_tiny_a").join("config.json"), dir.path().join("config.json")).unwrap();
    let model = dir.path().to_str().unwrap();
    // Nothing that is listed; matrices that contradict themselves; names of which one is far longer than the
    // others.
    for (what, suffix, longest) in [("tensors", "", 4), ("matrices", ".weight", 4), ("a long name", "", 1000)]
    {
        let size = write(&dir.path().join("model.safetensors"), suffix, longest);
        for verb in ["inspect", "verify", "generate"] {
            for json in [false, true] {
                let (status, peak) = peak(model, verb, json);
                println!("{what}, {verb}, JSON {json}: {peak} of {size}: {:.2}", peak as f64 / size as f64);
                assert!(
                    peak > size && peak <= ALLOWED * size,
                    "{what}: {verb}: {peak} bytes for a file of {size}"
                );
                assert_eq!(
                    status,
                    Some(if verb == "inspect" { 0 } else { 3 + i32::from(verb == "generate") })
                );
            }
        }
    }
}

/// How it ended, and the most bytes it had in memory. What the system says when a process has ended is no
/// less than what its parent had when it began, so it is asked before.
fn peak(model: &str, verb: &str, json: bool) -> (Option<i32>, u64) {
    let mut command = q4();
    if json {
        command.arg("--json");
    }
    command.args([verb, model]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    if verb == "generate" {
        command.args(["-p", "x"]);
    }
    let mut child = command.spawn().unwrap();
    let mut most = 0;
    loop {
        let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap_or_default();
        let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"));
        let now = line.and_then(|l| l.trim().strip_suffix(" kB")?.parse::<u64>().ok());
        most = most.max(now.unwrap_or(0) << 10);
        if let Some(status) = child.try_wait().unwrap() {
            return (status.code(), most);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Size of a file of tensors of one byte.
fn write(path: &Path, suffix: &str, longest: usize) -> u64 {
    let mut header = json!({"__metadata__": {}}).to_string();
    header.pop();
    for t in 0..TENSORS {
        let name = format!("{t:0>width$x}{suffix}", width = if t == 0 { longest } else { 0 });
        header += &format!(",\"{name}\":{{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[{t},{}]}}", t + 1);
    }
    header.push('}');
    let mut file = std::fs::File::create(path).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    file.set_len((8 + header.len() + TENSORS) as u64).unwrap();
    (8 + header.len() + TENSORS) as u64
}
