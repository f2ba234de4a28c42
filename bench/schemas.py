#!/usr/bin/env python3
"""Counts answers that keep to JSON schemas: schemas.py --url http://127.0.0.1:8080 [--count 500] [--seeds 20]

Draws schemas, sends each with every seed to a running `q4 serve` as `response_format`, and judges every answer
with the package jsonschema, which knows nothing of q4. Standard output is one JSON document: answers that are
valid, those that were cut by their length (which say so), those that are invalid, and schemas that were refused
with status 400. Anything else, other statuses among them, is `failed`. Exit 1 where anything is invalid or
failed; `--differences FILE` keeps every such case with its schema, seed and answer.

`--print` writes the schemas, one a line, and asks nobody.
"""
import argparse
import collections
import concurrent.futures
import json
import random
import sys
import urllib.error
import urllib.request

PATTERNS = [
    "^[a-f]{2,4}$", "^[0-9]{3}-[0-9]{2}$", "^(red|green|blue)$", "^[A-Z][a-z]{1,6}$", "^v[0-9]+[.][0-9]{1,2}$",
    "[xyz]$", "^[^ab]{1,4}$", "^\\d{2}:\\d{2}$", "^\\w{1,5}$", "^(a|bc)*d$",
]
FORMATS = ["date", "time", "date-time", "uuid", "ipv4", "email"]
NAMES = ["id", "name", "kind", "a\"b", "né", "with space", "x", "count", "tags", "$ref"]
WORDS = ["red", "a", "", "né", "two words", "quote\"d", "back\\slash", "line\nbreak", "你好"]


class Schemas:
    """Small schemas, so that answers to them end."""

    def __init__(self, seed):
        self.draw = random.Random(seed)

    def root(self):
        """A schema with definitions, some of which are used, one perhaps by itself."""
        self.definitions = {}
        for name in ["one", "two"][: self.draw.randrange(3)]:
            self.definitions[name] = self.schema(1, refers=False)
        if self.draw.random() < 0.2:
            self.definitions["list"] = {
                "anyOf": [
                    {"type": "null"},
                    {"type": "object", "properties": {"v": self.leaf(), "next": {"$ref": "#/$defs/list"}},
                     "required": ["v", "next"], "additionalProperties": False},
                ]
            }
        schema = self.schema(3, refers=True)
        if self.definitions:
            schema = {**schema, "$defs": self.definitions}
        if self.draw.random() < 0.2:
            schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
        return schema

    def schema(self, depth, refers):
        draw = self.draw
        if refers and self.definitions and draw.random() < 0.25:
            return {"$ref": f"#/$defs/{draw.choice(list(self.definitions))}"}
        if depth == 0 or draw.random() < 0.35:
            return self.leaf()
        kind = draw.choice([self.object, self.object, self.object, self.array, self.array, self.any_of])
        made = kind(depth - 1, refers)
        if draw.random() < 0.15:
            made["description"] = draw.choice(WORDS)
        return made

    def leaf(self):
        kind = self.draw.choice(
            [self.string, self.string, self.integer, self.number, self.enum, self.const, self.plain])
        return kind()

    def string(self):
        draw = self.draw
        way = draw.randrange(4)
        if way == 0:
            return {"type": "string", "pattern": draw.choice(PATTERNS), "maxLength": 12}
        if way == 1:
            return {"type": "string", "format": draw.choice(FORMATS)}
        least = draw.randrange(4)
        return {"type": "string", "minLength": least, "maxLength": least + draw.randrange(8)}

    def integer(self):
        low = self.draw.randrange(-200, 200)
        schema = {"type": "integer", "minimum": low, "maximum": low + self.draw.randrange(12, 3000)}
        if self.draw.random() < 0.2:
            schema["multipleOf"] = self.draw.choice([2, 3, 5, 10])
        return schema

    def number(self):
        low = self.draw.randrange(-50, 50) / self.draw.choice([1, 2, 4])
        bounds = self.draw.choice([("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum"),
                                   ("minimum", "exclusiveMaximum")])
        return {"type": "number", bounds[0]: low, bounds[1]: low + self.draw.choice([0.5, 1, 7, 100])}

    def enum(self):
        values = [*WORDS, 1, -7, 2.5, True, None, [1, "a"], {"k": "v"}]
        return {"enum": self.draw.sample(values, self.draw.randrange(1, 6))}

    def const(self):
        return {"const": self.draw.choice([*WORDS, 0, -12, False, None, {"a": [1, {"b": None}]}, [], {}])}

    def plain(self):
        return {"type": self.draw.choice(["boolean", "null", ["boolean", "null"], "integer"])}

    def object(self, depth, refers):
        draw = self.draw
        names = draw.sample(NAMES, draw.randrange(0, 4))
        schema = {
            "type": "object",
            "properties": {name: self.schema(depth, refers) for name in names},
            "required": [name for name in names if draw.random() < 0.6],
            "additionalProperties": False,
        }
        if draw.random() < 0.1:
            schema["additionalProperties"] = self.leaf()
            schema["maxProperties"] = len(names) + 2
        if draw.random() < 0.15:
            schema["patternProperties"] = {"^p_[a-c]{1,2}$": self.leaf()}
        return schema

    def array(self, depth, refers):
        draw = self.draw
        least = draw.randrange(3)
        schema = {"type": "array", "items": self.schema(depth, refers), "minItems": least,
                  "maxItems": least + draw.randrange(3)}
        if draw.random() < 0.25:
            schema["prefixItems"] = [self.leaf() for _ in range(draw.randrange(1, 3))]
        return schema

    def any_of(self, depth, refers):
        draw = self.draw
        way = draw.random()
        options = [self.schema(depth, refers) for _ in range(draw.randrange(2, 4))]
        if way < 0.15:
            # Alternatives that a checker tells apart by a constant.
            options = [{"type": "object", "properties": {"kind": {"const": kind}, "v": self.leaf()},
                        "required": ["kind", "v"], "additionalProperties": False} for kind in "ab"]
            return {"oneOf": options}
        if way < 0.3:
            low = draw.randrange(50)
            return {"allOf": [{"type": "integer", "minimum": low}, {"maximum": low + draw.randrange(40)}]}
        return {"anyOf": options}


def ask(url, schema, seed, tokens):
    """The answer and why it ended, or a status and its message."""
    body = {
        "messages": [{"role": "user", "content": "Answer in JSON."}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": True}},
        "max_tokens": tokens, "seed": seed, "temperature": 0 if seed == 0 else 1.0,
    }
    request = urllib.request.Request(f"{url.rstrip('/')}/v1/chat/completions", json.dumps(body).encode(),
                                     {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=600) as response:
            choice = json.load(response)["choices"][0]
            return 200, choice["message"]["content"] or "", choice["finish_reason"]
    except urllib.error.HTTPError as e:
        return e.code, e.read().decode(errors="replace"), None
    except OSError as e:
        return 0, str(e), None


def judge(validator, got):
    """What an answer is, and why."""
    status, text, finish = got
    if status == 400:
        return "refused", text
    if status != 200:
        return "failed", f"{status}: {text}"
    if finish == "length":
        return "cut", ""
    try:
        value = json.loads(text)
    except ValueError as e:
        return "invalid", str(e)
    error = next(validator.iter_errors(value), None)
    return ("invalid", error.message) if error else ("valid", "")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1, help="of the schemas")
    parser.add_argument("--tokens", type=int, default=400, help="of an answer, at most")
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--differences")
    parser.add_argument("--print", action="store_true")
    args = parser.parse_args()
    source = Schemas(args.seed)
    schemas = [source.root() for _ in range(args.count)]
    if args.print:
        for schema in schemas:
            print(json.dumps(schema, ensure_ascii=False))
        return
    import jsonschema

    validators = [jsonschema.Draft202012Validator(schema) for schema in schemas]
    counts, whys, kept, refused = collections.Counter(), collections.Counter(), [], set()
    with concurrent.futures.ThreadPoolExecutor(args.at_once) as pool:
        cases = [(i, seed) for i in range(args.count) for seed in range(args.seeds)]
        answers = pool.map(lambda case: ask(args.url, schemas[case[0]], case[1], args.tokens), cases)
        for (i, seed), got in zip(cases, answers):
            what, why = judge(validators[i], got)
            counts[what] += 1
            if what == "refused":
                refused.add(i)
                try:
                    why = json.loads(why)["error"]["message"]
                except (ValueError, KeyError, TypeError):
                    pass
                whys[why[:160]] += 1
            if what in ("invalid", "failed"):
                kept.append({"what": what, "why": why, "schema": schemas[i], "seed": seed, "answer": got[1]})
    if args.differences:
        with open(args.differences, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(case, ensure_ascii=False) + "\n" for case in kept)
    document = {
        "schemas": args.count, "seeds": args.seeds,
        **{what: counts[what] for what in ("valid", "cut", "invalid", "failed", "refused")},
        "refused_schemas": len(refused), "refusals": dict(whys.most_common(20)),
    }
    print(json.dumps(document, indent=1, ensure_ascii=False))
    sys.exit(1 if kept else 0)


if __name__ == "__main__":
    main()
