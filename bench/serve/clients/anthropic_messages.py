"""The package `anthropic`."""

import asyncio

from .checks import ANSWER, ASK, CITIES, SCHEMA, WHO, occupied


def checks(c):
    import anthropic

    api = anthropic.Anthropic(base_url=c.url, api_key="key", max_retries=0)
    say = lambda **more: api.messages.create(**{"model": "demo", "max_tokens": 64, "messages": ASK, **more})
    tool = {"name": "weather", "description": "The weather of a city", "input_schema": SCHEMA}
    with c.part("message"):
        answer = say()
        c.same("text", answer.content[0].text, ANSWER)
        c.same("stop reason", (answer.stop_reason, answer.stop_sequence), ("end_turn", None))
        usage = answer.usage
        c.same("usage", (usage.input_tokens + usage.cache_read_input_tokens, usage.output_tokens), (17, 15))
        c.same("shape", (answer.type, answer.role, answer.model), ("message", "assistant", "demo"))
    with c.part("length"):
        c.same("length", say(max_tokens=3).stop_reason, "max_tokens")
    with c.part("stop"):
        answer = say(stop_sequences=["demo"])
        c.same(
            "stop", (answer.content[0].text, answer.stop_reason, answer.stop_sequence),
            ("I am the q4 ", "stop_sequence", "demo"),
        )
    with c.part("stream"):
        events = list(say(stream=True))
        kinds = [e.type for e in events if e.type != "ping"]
        c.same(
            "events", (kinds[0], kinds[1], kinds[-3:]),
            ("message_start", "content_block_start", ["content_block_stop", "message_delta", "message_stop"]),
        )
        c.same("deltas", "".join(e.delta.text for e in events if e.type == "content_block_delta"), ANSWER)
        c.same("last usage", next(e for e in events if e.type == "message_delta").usage.output_tokens, 15)
    with c.part("stream helper"):
        with api.messages.stream(model="demo", max_tokens=64, messages=ASK) as stream:
            c.same("text stream", "".join(stream.text_stream), ANSWER)
            c.same("final message", stream.get_final_message().content[0].text, ANSWER)
    with c.part("count"):
        c.same("count_tokens", api.messages.count_tokens(model="demo", messages=ASK).input_tokens, 17)
        c.same(
            "count_tokens of tools",
            api.messages.count_tokens(model="demo", messages=ASK, tools=[tool]).input_tokens >= 17,
        )
    with c.part("system"):
        c.same("system", say(system="Be brief.").role, "assistant")
        c.same(
            "system in parts",
            say(system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]).role,
            "assistant",
        )
        parts = [
            {
                "role": "user",
                "content": [{"type": "text", "text": WHO, "cache_control": {"type": "ephemeral"}}],
            }
        ]
        c.same("parts", say(messages=parts).content[0].text, ANSWER)
    with c.part("tools"):
        c.same(
            "tools", say(tools=[tool], tool_choice={"type": "auto"}).stop_reason in ("end_turn", "tool_use")
        )
        talk = [
            *ASK,
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": "Wait."},
                    {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result", "tool_use_id": "t1",
                        "content": [{"type": "text", "text": "rain"}], "is_error": False,
                    }
                ],
            },
        ]
        c.same("tool results", say(messages=talk, tools=[tool]).type, "message")
        c.same(
            "thinking", say(thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=2048).type,
            "message",
        )
        c.same("metadata", say(metadata={"user_id": "a"}, service_tier="auto").type, "message")
    with c.part("models"):
        c.same("models", [model.id for model in api.models.list()], ["demo"])
        c.same("model", api.models.retrieve("demo").display_name, "demo")
    forced = lambda: say(tools=[tool], tool_choice={"type": "any"}, max_tokens=200)
    if c.forms:
        with c.part("forced tool"):
            used = next(block for block in forced().content if block.type == "tool_use")
            have = (used.name, used.input["city"] in CITIES["enum"])
            c.same("forced tool", have, ("weather", True))
    else:
        c.throws("forced tool", anthropic.BadRequestError, forced, status_code=400)
    c.throws(
        "bad temperature", anthropic.BadRequestError, lambda: say(extra_body={"temperature": -1}),
        status_code=400,
    )
    c.throws("no messages", anthropic.BadRequestError, lambda: say(messages=[]), status_code=400)
    c.throws("no max_tokens", anthropic.BadRequestError, lambda: say(max_tokens=0), status_code=400)
    picture = [
        {
            "role": "user",
            "content": [
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
            ],
        }
    ]
    c.throws("picture", anthropic.BadRequestError, lambda: say(messages=picture), status_code=400)
    wrong = anthropic.Anthropic(base_url=c.url, api_key="other", max_retries=0)
    c.throws(
        "wrong key", anthropic.AuthenticationError,
        lambda: wrong.messages.create(model="demo", max_tokens=1, messages=ASK), status_code=401,
    )
    bearer = anthropic.Anthropic(base_url=c.url, auth_token="key", api_key=None, max_retries=0)
    with c.part("bearer"):
        c.same(
            "bearer", bearer.messages.create(model="demo", max_tokens=64, messages=ASK).content[0].text,
            ANSWER,
        )
    crowded = anthropic.Anthropic(base_url=c.busy, api_key="key", max_retries=0)
    long = lambda: crowded.messages.create(
        model="demo", max_tokens=2000, messages=ASK, extra_body={"ignore_eos": True}
    )
    with occupied(long):
        c.throws(
            "queue full", anthropic.RateLimitError,
            lambda: crowded.messages.create(model="demo", max_tokens=1, messages=ASK), status_code=429,
        )
    with c.part("asynchronous"):
        async def both():
            other = anthropic.AsyncAnthropic(base_url=c.url, api_key="key", max_retries=0)
            one = lambda: other.messages.create(model="demo", max_tokens=64, messages=ASK)
            return {x.content[0].text for x in await asyncio.gather(*(one() for _ in range(8)))}
        c.same("8 at once", asyncio.run(both()), {ANSWER})
