use super::House;
use crate::openapi::document;
use crate::page;
use crate::refusal::Kind;
use crate::router::routes;
use axum::body::Body;
use axum::http::{Method, Request};
use serde_json::Value;
use std::collections::BTreeSet;

/// A path of the router as the document writes it.
fn written(path: &str) -> String {
    path.replace("{*name}", "{name}")
}

#[test]
fn every_route_is_in_it_and_nothing_else() {
    let files = page::FILES.iter().map(|(path, ..)| (*path).to_owned());
    let routes: BTreeSet<String> = routes().iter().map(|(path, _)| written(path)).chain(files).collect();
    let document = document();
    let paths = document["paths"].as_object().expect("paths");
    assert_eq!(paths.keys().cloned().collect::<BTreeSet<_>>(), routes);
}

#[tokio::test]
async fn a_path_takes_the_methods_that_are_in_it() {
    let house = House::saying("Hello");
    let document = document();
    for (path, methods) in document["paths"].as_object().expect("paths") {
        for method in [Method::GET, Method::POST, Method::PUT, Method::PATCH, Method::DELETE] {
            let request = Request::builder().method(method.clone()).uri(path.replace("{name}", "demo"));
            let got = house.send(request.body(Body::empty()).expect("a request")).await;
            let is_in_it = methods.get(method.as_str().to_lowercase()).is_some();
            assert_eq!(got.status != 405, is_in_it, "{method} {path}: {}", got.status);
        }
    }
}

/// Where a `$ref` leads.
fn followed<'a>(document: &'a Value, value: &'a Value) -> &'a Value {
    match value["$ref"].as_str().and_then(|to| to.strip_prefix('#')) {
        Some(to) => document.pointer(to).unwrap_or_else(|| panic!("nothing is at {to}")),
        None => value,
    }
}

fn every_ref<'a>(value: &'a Value, found: &mut Vec<&'a str>) {
    match value {
        Value::Object(fields) => {
            found.extend(fields.get("$ref").and_then(Value::as_str));
            fields.values().for_each(|inner| every_ref(inner, found));
        }
        Value::Array(items) => items.iter().for_each(|inner| every_ref(inner, found)),
        _ => {}
    }
}

#[test]
fn what_it_refers_to_is_there_and_all_of_it_is_referred_to() {
    let document = document();
    let mut found = Vec::new();
    every_ref(&document, &mut found);
    let found: BTreeSet<&str> = found.into_iter().collect();
    let mut there = BTreeSet::new();
    for kind in ["schemas", "responses"] {
        let names = document["components"][kind].as_object().expect("components").keys();
        there.extend(names.map(|name| format!("#/components/{kind}/{name}")));
    }
    assert_eq!(found, there.iter().map(String::as_str).collect());
}

#[test]
fn every_status_is_one_that_refusals_have() {
    const KINDS: [Kind; 10] = [
        Kind::Invalid,
        Kind::Key,
        Kind::Origin,
        Kind::Missing,
        Kind::Method,
        Kind::Slow,
        Kind::TooLarge,
        Kind::Busy,
        Kind::Unready,
        Kind::Fault,
    ];
    let known: BTreeSet<String> = KINDS.iter().map(|kind| kind.status().to_string()).collect();
    let document = document();
    for (path, methods) in document["paths"].as_object().expect("paths") {
        for operation in methods.as_object().expect("methods").values() {
            for (status, response) in operation["responses"].as_object().expect("responses") {
                assert!(status == "200" || known.contains(status), "{path}: {status}");
                let response = followed(&document, response);
                assert!(response["description"].is_string(), "{path}: {status}");
            }
        }
    }
}

#[tokio::test]
async fn it_is_served_with_the_version_of_the_program() {
    let got = House::saying("Hello").get("/openapi.json").await;
    assert_eq!((got.status, got.header("content-type")), (200, "application/json"));
    assert_eq!(got.json()["info"]["version"], env!("CARGO_PKG_VERSION"));
}
