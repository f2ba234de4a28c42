"""The package `openai`: chat."""

import json

from .checks import ANSWER, ASK, CITIES, SCHEMA, TOOL, WHO


def checks(c):
    import openai

    api = openai.OpenAI(base_url=f"{c.url}/v1", api_key="key", max_retries=0)
    chat = lambda **more: api.chat.completions.create(
        model="demo", **{"messages": ASK, "temperature": 0, **more}
    )
    with c.part("chat"):
        answer = chat()
        c.same("chat text", answer.choices[0].message.content, ANSWER)
        c.same("chat finish", answer.choices[0].finish_reason, "stop")
        c.same(
            "chat usage",
            (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens),
            (17, 15, 32),
        )
        c.same(
            "chat object", (answer.object, answer.model, answer.choices[0].message.role),
            ("chat.completion", "demo", "assistant"),
        )
        c.same("chat request id", bool(answer._request_id))
        c.same("chat no tools", answer.choices[0].message.tool_calls, None)
    with c.part("stream"):
        chunks = list(chat(stream=True))
        deltas = [chunk.choices[0].delta for chunk in chunks]
        c.same("stream text", "".join(d.content or "" for d in deltas), ANSWER)
        c.same("stream role", deltas[0].role, "assistant")
        c.same("stream pieces", len(chunks) > 5)
        c.same(
            "stream finish", [x.choices[0].finish_reason for x in chunks if x.choices[0].finish_reason],
            ["stop"],
        )
        c.same("stream ids", len({chunk.id for chunk in chunks}), 1)
    with c.part("stream usage"):
        chunks = list(chat(stream=True, stream_options={"include_usage": True}))
        c.same("stream usage last", (chunks[-1].choices, chunks[-1].usage.completion_tokens), ([], 15))
        c.same("stream usage others", [x.usage for x in chunks[:-1] if x.usage], [])
    with c.part("stream helper"):
        with api.chat.completions.stream(model="demo", messages=ASK, temperature=0) as stream:
            kinds = {event.type for event in stream}
            c.same("stream helper text", stream.get_final_completion().choices[0].message.content, ANSWER)
        c.same("stream helper events", {"chunk", "content.delta", "content.done"} <= kinds)
    with c.part("stop"):
        answer = chat(stop=["demo"]).choices[0]
        c.same("stop text", (answer.message.content, answer.finish_reason), ("I am the q4 ", "stop"))
        c.same("stop as a text", chat(stop=" model").choices[0].message.content, "I am the q4 demo")
        c.same(
            "stop in a stream",
            "".join(x.choices[0].delta.content or "" for x in chat(stop="demo", stream=True)), "I am the q4 ",
        )
    with c.part("length"):
        answer = chat(max_completion_tokens=3)
        c.same("length", (answer.choices[0].finish_reason, answer.usage.completion_tokens), ("length", 3))
        c.same(
            "length the old way", chat(max_tokens=3).choices[0].message.content,
            answer.choices[0].message.content,
        )
    with c.part("n"):
        choices = chat(n=3).choices
        c.same("n", [x.index for x in choices], [0, 1, 2])
        c.same("n greedy", {x.message.content for x in choices}, {ANSWER})
        texts = ["", "", ""]
        for chunk in chat(n=3, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        c.same("n in a stream", texts, [ANSWER] * 3)
    with c.part("seed"):
        one, two = (
            chat(seed=5, temperature=1.5, messages=[{"role": "user", "content": "a b"}])
            .choices[0]
            .message.content
            for _ in "ab"
        )
        c.same("seed", one, two)
    with c.part("logprobs"):
        content = chat(logprobs=True, top_logprobs=3).choices[0].logprobs.content
        c.same("logprobs text", b"".join(bytes(t.bytes) for t in content).decode(), ANSWER)
        c.same("logprobs top", {len(t.top_logprobs) for t in content}, {3})
        c.same("logprobs negative", all(t.logprob <= 0 for t in content))
        c.same("logprobs greedy", all(t.token == t.top_logprobs[0].token for t in content))
        c.same(
            "logprobs alone", {len(t.top_logprobs) for t in chat(logprobs=True).choices[0].logprobs.content},
            {0},
        )
        streamed = [
            t.token
            for x in chat(logprobs=True, stream=True)
            if x.choices[0].logprobs
            for t in x.choices[0].logprobs.content
        ]
        c.same("logprobs in a stream", streamed, [t.token for t in content])
    with c.part("messages"):
        parts = [{"role": "user", "content": [{"type": "text", "text": WHO}]}]
        c.same("parts", chat(messages=parts).choices[0].message.content, ANSWER)
        c.same(
            "system",
            bool(
                chat(messages=[{"role": "system", "content": "Be brief."}, *ASK]).choices[0].message.content
                is not None
            ),
        )
        c.same(
            "developer",
            chat(messages=[{"role": "developer", "content": "Be brief."}, *ASK]).usage.prompt_tokens,
            chat(messages=[{"role": "system", "content": "Be brief."}, *ASK]).usage.prompt_tokens,
        )
    with c.part("tools"):
        answer = chat(tools=[TOOL], tool_choice="auto", parallel_tool_calls=False).choices[0]
        c.same("tools", answer.finish_reason in ("stop", "tool_calls"))
        made = {
            "id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
        }
        talk = [
            *ASK, {"role": "assistant", "content": None, "tool_calls": [made]},
            {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        ]
        c.same("tool results", chat(messages=talk, tools=[TOOL]).choices[0].message.role, "assistant")
    forced = {"type": "function", "function": {"name": "weather"}}
    shape = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}
    asked = {
        "forced tool": {"tools": [TOOL], "tool_choice": forced},
        "required tool": {"tools": [TOOL], "tool_choice": "required"},
        "JSON": {"response_format": {"type": "json_object"}},
        "JSON by a schema": {"response_format": shape},
    }
    for name, more in asked.items():
        if not c.forms:
            c.throws(name, openai.BadRequestError, lambda more=more: chat(**more), code="unsupported")
            continue
        with c.part(name):
            choice = chat(max_tokens=400, **more).choices[0]
            if "tools" in more:
                call = choice.message.tool_calls[0].function
                have = (call.name, json.loads(call.arguments)["city"] in CITIES["enum"])
                c.same(name, have, ("weather", True))
            elif choice.finish_reason == "length":
                c.same(name, choice.message.content.lstrip()[:1], "{")
            else:
                names = set() if name == "JSON" else {"city"}
                c.same(name, set(json.loads(choice.message.content)) >= names)
    c.throws("bad temperature", openai.BadRequestError, lambda: chat(temperature=-1), status_code=400)
    c.throws(
        "bad role", openai.BadRequestError, lambda: chat(messages=[{"role": "x", "content": "a"}]),
        param="messages[0].role",
    )
    c.throws("no messages", openai.BadRequestError, lambda: chat(messages=[]), type="invalid_request_error")
    picture = [
        {
            "role": "user",
            "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}],
        }
    ]
    c.throws("picture", openai.BadRequestError, lambda: chat(messages=picture), code="unsupported")
    long = [{"role": "user", "content": "lake " * 9000}]
    c.throws(
        "long prompt", openai.BadRequestError, lambda: chat(messages=long), code="context_length_exceeded"
    )
