"""Requests of many kinds, what processes of their own answer to them, and what a server answers."""

import json
import random
import tempfile
from concurrent.futures import ThreadPoolExecutor

from rows import must

from .server import CHAT, leave, say

FINISH = {"stop-string": "stop", "context": "length"}


def asked(count):
    """Requests of many kinds, always the same ones; the fields are those of `--batch`."""
    draw = random.Random(4)
    words = "who are you tell me a story about UFO lake four bit number Oslo 12 π naïve 雪 over. why?"
    words = words.split()
    text = lambda n: " ".join(draw.choice(words) for _ in range(n))
    common = [text(n) for n in (40, 90, 170)]
    found = []
    for i in range(count):
        length = draw.choice([1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 120])
        prompt = "Who are you?" if i % 9 == 0 else text(length)
        if i % 4 == 1:
            prompt = f"{draw.choice(common)} {prompt}"
        one = {
            "messages": [{"role": "user", "content": prompt}], "max_tokens": draw.choice([1, 4, 12, 24, 48]),
        }
        if i % 11 == 3:
            one["messages"].insert(0, {"role": "system", "content": "Be brief."})
        if i % 2:
            one |= {"temperature": draw.choice([0.3, 0.8, 1.3]), "seed": draw.randrange(1 << 31)}
            one |= draw.choice([{}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05, "top_k": 0}])
        else:
            one |= {"temperature": 0}
        if i % 7 == 2:
            one["repetition_penalty"] = 1.2
        if i % 5 == 4:
            one["stop"] = draw.choice([["bit"], [" a", "the"], [".", "q4"]])
        found.append(one)
    return found


def grown(count):
    """Short prompts, which are let in together, with long answers, which then find no room."""
    return [
        {
            "messages": [{"role": "user", "content": f"lake {i}"}], "max_tokens": 100 + i % 90,
            "seed": i, "temperature": 0.8 * (i % 2), "ignore_eos": True,
        }
        for i in range(count)
    ]


def outcome(text, finish, tokens):
    return text, FINISH.get(finish, finish), tokens


def of_process(q4, one, isa=""):
    """What `q4 generate`, a process of its own, answers."""
    words = ["--threads", 1, "generate", "--json", "-n", one["max_tokens"]]
    words += ["-p", one["messages"][-1]["content"]]
    if len(one["messages"]) > 1:
        words += ["--system", one["messages"][0]["content"]]
    for name in ("temperature", "seed", "top_p", "top_k", "min_p", "repetition_penalty"):
        if name in one:
            words += [f"--{name.replace('_', '-')}", one[name]]
    for stop in one.get("stop", []):
        words += ["--stop", stop]
    if one.get("ignore_eos"):
        words += ["--ignore-eos"]
    answer = json.loads(must(q4, *words, env={"Q4_ISA": isa} if isa else {})[1])
    return outcome(answer["text"], answer["finish_reason"], len(answer["token_ids"]))


def of_processes(q4, requests, isa=""):
    """The same of many requests, a process each."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda one: of_process(q4, one, isa), requests))


def of_batch(q4, requests, isa, *words):
    """What `q4 generate --batch` answers, and seconds."""
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.writelines(json.dumps(r) + "\n" for r in requests)
        file.flush()
        seconds, text = must(q4, "generate", "--batch", file.name, *words, env={"Q4_ISA": isa} if isa else {})
    answers = [json.loads(line) for line in text.splitlines()]
    return seconds, [outcome(a["text"], a["finish_reason"], len(a["token_ids"])) for a in answers]


def over_http(server, one, stream):
    """What a server answers to the same request."""
    body = {**one, "stream": stream, "stream_options": {"include_usage": True}}
    status, _, data = server.ask("POST", CHAT, body, timeout=600)
    if status != 200:
        return status, data.decode(errors="replace"), 0
    return streamed(data) if stream else whole(data)


def whole(data):
    """A document of chat as an outcome."""
    answer = json.loads(data)
    choice = answer["choices"][0]
    tokens = answer["usage"]["completion_tokens"]
    return outcome(choice["message"]["content"], choice["finish_reason"], tokens)


def streamed(data):
    """A stream of chat as an outcome; without a finish where it has no end."""
    events = [line[6:] for line in data.decode(errors="replace").split("\n\n") if line.startswith("data: ")]
    is_whole = bool(events) and events.pop() == "[DONE]"
    text, finish, tokens = "", None, None
    for event in map(json.loads, events):
        for choice in event.get("choices", ()):
            text += choice["delta"].get("content") or ""
            finish = choice["finish_reason"] or finish
        tokens = event["usage"]["completion_tokens"] if event.get("usage") else tokens
    return outcome(text, finish if is_whole else None, tokens)


def compared(server, requests, want, at_once=32, seed=0, cancel=False):
    """How many answers are the wanted ones, of how many. Every other one is a stream."""
    draw = random.Random(seed)
    order = list(range(len(requests)))
    if at_once > 1:
        draw.shuffle(order)

    def one(i):
        if cancel and i % 3 == 0:
            return leave(server, requests[i], random.Random(i))
        have = over_http(server, requests[i], stream=(i + seed) % 2 == 0)
        if have != want[i]:
            say("differs:", json.dumps(requests[i], ensure_ascii=False), "have", have, "want", want[i])
        return have == want[i]

    with ThreadPoolExecutor(at_once) as pool:
        results = [r for r in pool.map(one, order) if r is not None]
    return sum(results), len(results)
