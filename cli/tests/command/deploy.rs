//! The files of docs/deploy: they fit together, and a server starts and answers as they say.
use crate::q4;
use crate::serve::Server;
use q4_core::memory::parse_bytes;
use yaml_rust2::{Yaml, YamlLoader};

const FILES: [&str; 3] = [
    include_str!("../../../docs/deploy/q4.yaml"),
    include_str!("../../../docs/deploy/podmonitor.yaml"),
    include_str!("../../../docs/deploy/inference-pool.yaml"),
];

/// Every document, of all files.
fn documents() -> Vec<Yaml> {
    FILES.iter().flat_map(|text| YamlLoader::load_from_str(text).expect("YAML")).collect()
}

fn of_kind<'a>(all: &'a [Yaml], kind: &str) -> Vec<&'a Yaml> {
    let found: Vec<_> = all.iter().filter(|doc| doc["kind"].as_str() == Some(kind)).collect();
    assert!(!found.is_empty(), "no {kind}");
    found
}

fn number(yaml: &Yaml) -> i64 {
    yaml.as_i64().unwrap_or_else(|| panic!("no number: {yaml:?}"))
}

fn text(yaml: &Yaml) -> &str {
    yaml.as_str().unwrap_or_else(|| panic!("no text: {yaml:?}"))
}

/// What a Deployment runs, and its port.
struct Runs<'a> {
    pod: &'a Yaml,
    container: &'a Yaml,
    args: Vec<&'a str>,
}

impl<'a> Runs<'a> {
    fn of(deployment: &'a Yaml) -> Self {
        let template = &deployment["spec"]["template"];
        assert_eq!(template["metadata"]["labels"], deployment["spec"]["selector"]["matchLabels"]);
        let container = &template["spec"]["containers"][0];
        let args: Vec<_> = container["args"].as_vec().expect("arguments").iter().map(text).collect();
        assert_eq!(args[0], "serve");
        Self { pod: template, container, args }
    }
    /// The value of an option.
    fn option(&self, name: &str) -> Option<&'a str> {
        self.args.iter().find_map(|arg| arg.strip_prefix(name)?.strip_prefix('='))
    }
    fn seconds(&self, name: &str) -> i64 {
        self.option(name).and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("no {name}"))
    }
    fn port(&self) -> &'a Yaml {
        &self.container["ports"][0]
    }
}

#[test]
fn pods_have_the_time_and_the_memory_that_their_server_takes() {
    for deployment in of_kind(&documents(), "Deployment") {
        let runs = Runs::of(deployment);
        let (spec, container) = (&runs.pod["spec"], runs.container);
        let before = number(&container["lifecycle"]["preStop"]["sleep"]["seconds"]);
        let grace = number(&spec["terminationGracePeriodSeconds"]);
        assert!(grace >= before + runs.seconds("--drain-timeout") + 10, "{grace} s");
        assert_eq!(number(&runs.port()["containerPort"]), runs.seconds("--port"));
        let bytes = |amount: &str| parse_bytes(amount).expect("an amount");
        let limit = bytes(&format!("{}B", text(&container["resources"]["limits"]["memory"])));
        assert!(bytes(runs.option("--memory-limit").expect("a limit")) < limit);
        // Every volume that is mounted is there.
        let names = |list: &Yaml| -> Vec<String> {
            list.as_vec().expect("a list").iter().map(|v| text(&v["name"]).to_owned()).collect()
        };
        assert_eq!(names(&container["volumeMounts"]), names(&spec["volumes"]));
    }
}

#[test]
fn whoever_selects_pods_finds_some_and_their_port() {
    let all = documents();
    let pods: Vec<_> = of_kind(&all, "Deployment").into_iter().map(Runs::of).collect();
    let of = |labels: &Yaml| {
        let found = pods.iter().find(|runs| runs.pod["metadata"]["labels"] == *labels);
        found.unwrap_or_else(|| panic!("nobody has {labels:?}"))
    };
    for service in of_kind(&all, "Service") {
        let port = &service["spec"]["ports"][0]["targetPort"];
        assert_eq!(of(&service["spec"]["selector"]).port()["name"], *port);
    }
    for monitor in of_kind(&all, "PodMonitor") {
        let port = &monitor["spec"]["podMetricsEndpoints"][0]["port"];
        assert_eq!(of(&monitor["spec"]["selector"]["matchLabels"]).port()["name"], *port);
    }
    for policy in of_kind(&all, "NetworkPolicy") {
        let port = &policy["spec"]["ingress"][0]["ports"][0]["port"];
        assert_eq!(of(&policy["spec"]["podSelector"]["matchLabels"]).port()["containerPort"], *port);
    }
    for pool in of_kind(&all, "InferencePool") {
        let port = &pool["spec"]["targetPorts"][0]["number"];
        assert_eq!(of(&pool["spec"]["selector"]["matchLabels"]).port()["containerPort"], *port);
        let routes = of_kind(&all, "HTTPRoute");
        assert_eq!(routes[0]["spec"]["rules"][0]["backendRefs"][0]["name"], pool["metadata"]["name"]);
    }
}

#[test]
fn a_server_answers_as_the_manifests_say() {
    let dir = tempfile::tempdir().unwrap();
    let keys = dir.path().join("keys");
    std::fs::write(&keys, "secret\n").unwrap();
    let (file, all) = (format!("--api-key-file={}", keys.display()), documents());
    for deployment in of_kind(&all, "Deployment") {
        let runs = Runs::of(deployment);
        assert!(runs.args[1].starts_with("/models/"));
        let has_keys = runs.option("--api-key-file").is_some();
        // The model, its context, the port and the file are those of this test.
        let here = |arg: &&str| match arg.split('=').next() {
            Some("--port" | "--context") => None,
            Some("--api-key-file") => Some(file.clone()),
            _ => Some((*arg).to_owned()),
        };
        let args: Vec<String> = runs.args[2..].iter().filter_map(here).collect();
        let server = Server::of(q4(), &args.iter().map(String::as_str).collect::<Vec<_>>());
        server.wait_until_ready();
        for probe in ["startupProbe", "readinessProbe", "livenessProbe"] {
            let get = &runs.container[probe]["httpGet"];
            assert_eq!(get["port"], runs.port()["name"], "{probe}");
            assert_eq!(server.ask(&format!("GET {}", text(&get["path"])), "").0, 200, "{probe}");
        }
        assert_eq!(server.ask("GET /metrics", "").0, if has_keys { 401 } else { 200 });
        let monitor = of_kind(&all, "PodMonitor")[0];
        let path = text(&monitor["spec"]["podMetricsEndpoints"][0]["path"]);
        let keyed = format!("GET {path} HTTP/1.1\r\nauthorization: Bearer secret\r\nx:");
        let (status, figures) = server.ask(&keyed, "");
        assert_eq!(status, 200);
        // What the comment of the pool names, in the words that pickers look for.
        for name in ["vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"] {
            assert!(FILES[2].contains(name) && figures.contains(name), "{name}");
        }
        assert_eq!(server.end("-TERM"), Some(0));
    }
}

#[test]
fn the_image_is_built_with_the_toolchain_of_the_tree() {
    let (image, toolchain) =
        (include_str!("../../../docs/deploy/Dockerfile"), include_str!("../../../rust-toolchain.toml"));
    let version =
        image.split("FROM rust:").nth(1).and_then(|rest| rest.split('-').next()).expect("a version");
    assert!(toolchain.contains(&format!("channel = \"{version}.")), "{version}");
    assert!(image.contains("ENTRYPOINT [\"/opt/q4/q4\"]") && image.contains("target/release/libNVFP4.so"));
}
