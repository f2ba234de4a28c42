//! What is sent to keep a server busy, to fill its memory or to overrun its stack. Each of these is refused, or
//! compiles; none of them takes the process with it.
use super::*;

fn deep(n: usize) -> Value {
    (0..n).fold(json!({"type": "null"}), |inner, _| json!({"type": "array", "items": inner}))
}

#[test]
fn hostile_schemas_are_refused_or_compile() {
    let house = House::new();
    let chain: serde_json::Map<_, _> = (0..4000)
        .map(|i| (format!("a{i}"), json!({"$ref": format!("#/$defs/a{}", i + 1)})))
        .chain([("a4000".to_owned(), json!({"type": "null"}))])
        .collect();
    let many: serde_json::Map<_, _> =
        (0..3000).map(|i| (format!("p{i}"), json!({"type": "string", "pattern": "^(a|b)*c$"}))).collect();
    let square: Vec<_> =
        (0..40).map(|i| json!({"properties": {format!("q{i}"): {"enum": [i, "x"]}}})).collect();
    for schema in [
        deep(60),
        deep(2000),
        json!({"$ref": "#"}),
        json!({"allOf": [{"$ref": "#"}]}),
        json!({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}),
        json!({"$ref": "#/$defs/a0", "$defs": chain}),
        json!({"type": "object", "properties": many}),
        json!({"allOf": square.clone()}),
        json!({"anyOf": square}),
        json!({"type": "string", "pattern": "^(a{1000}){1000}$"}),
        json!({"type": "string", "pattern": "(((((((a{9}){9}){9}){9}){9}){9}){9}){9}"}),
        json!({"type": "string", "pattern": "(a|aa|aaa)*(b|bb)*x{300}y"}),
        json!({"type": "string", "minLength": 1_000_000_000, "maxLength": 2_000_000_000}),
        json!({"type": "array", "minItems": 1_000_000, "items": {"type": "null"}}),
        json!({"type": "array", "maxItems": 4_000_000_000_u64, "items": {"type": "array", "maxItems": 100_000}}),
        json!({"type": "integer", "multipleOf": 999_999_937}),
        json!({"type": "number", "multipleOf": 1e-300}),
        json!({"type": "number", "minimum": 1e300, "maximum": 1.000_000_1e300}),
        json!({"enum": (0..20_000).map(|i| format!("{i:x}")).collect::<Vec<_>>()}),
    ] {
        if let Ok(grammar) = house.compile(&Constraint::JsonSchema(schema.clone())) {
            bounded_walk(&house, &grammar);
        }
    }
}

#[test]
fn hostile_patterns_and_grammars_are_refused_or_compile() {
    let house = House::new();
    let open = |n: usize| format!("{}a{}", "(".repeat(n), ")".repeat(n));
    let chain = |n: usize| {
        let rules: String = (0..n).map(|i| format!("r{i}: r{}\n", i + 1)).collect();
        format!("start: r0\n{rules}r{n}: \"a\"\n")
    };
    let terminals = |n: usize| {
        let rules: String = (0..n).map(|i| format!("T{i}: T{}\n", i + 1)).collect();
        format!("start: T0\n{rules}T{n}: \"a\"\n")
    };
    for constraint in [
        Constraint::Regex(open(200)),
        Constraint::Regex(open(30_000)),
        Constraint::Regex("a{1000000000}".to_owned()),
        Constraint::Regex("(a{1000}){1000}".to_owned()),
        Constraint::Regex("(x+x+)+y".to_owned()),
        Constraint::Regex("(.*a){40}".to_owned()),
        Constraint::Regex(r"\p{L}{0,5000}".to_owned()),
        Constraint::Regex("a".repeat(100_000)),
        Constraint::Grammar(format!("start: {}\n", open(30_000).replace('a', "\"a\""))),
        Constraint::Grammar(format!("start: {}\"a\"\n", "~".repeat(40_000))),
        Constraint::Grammar(format!("start: {}", "%lark { start: ".repeat(3000))),
        Constraint::Grammar(chain(4000)),
        Constraint::Grammar(terminals(4000)),
        Constraint::Grammar("start: start start | \"a\" | \"\"\n".to_owned()),
        Constraint::Grammar("start: start\n".to_owned()),
        Constraint::Grammar("start: (\"a\" ~ 1..1000000) ~ 1..1000000\n".to_owned()),
        Constraint::Grammar("start: A\nA: (/./ ~ 1..1000) & ~(/a/ ~ 1..1000)\n".to_owned()),
    ] {
        if let Ok(grammar) = house.compile(&constraint) {
            bounded_walk(&house, &grammar);
        }
    }
}

/// A few steps, each of which works or says why not.
fn bounded_walk(house: &House, grammar: &Grammar) {
    let mut matcher = grammar.matcher();
    for _ in 0..8 {
        let mut logits = vec![0.5; house.rows()];
        match matcher.mask(&mut logits, &[house.end]) {
            Ok(true) => {}
            Ok(false) => return,
            Err(e) => return assert_eq!(e.code(), Code::Usage, "{e}"),
        }
        let id = logits.iter().rposition(|l| *l == 0.5).expect("one of them may come") as u32;
        if id == house.end || !matcher.accept(id).unwrap_or(false) {
            return;
        }
    }
}
