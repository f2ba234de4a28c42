"""Asks `q4 serve` as clients of OpenAI and Anthropic do: serve_clients.py CLIENT --url URL --busy URL, in a
Python that has the client. The last line is JSON: how many checks were made, and which failed and why. The
server asks for the key `key`; the one at --busy takes one request at a time."""

import argparse
import asyncio
import contextlib
import importlib.metadata
import json
import pathlib
import tempfile
import threading
import time

ANSWER = "I am the q4 demo model, made of four-bit numbers."
WHO = "Who are you?"
ASK = [{"role": "user", "content": WHO}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "weather", "description": "The weather of a city", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
# The files of the model that is served, for clients with a tokenizer of their own.
DEMO = pathlib.Path(__file__).resolve().parent.parent / "cli/demo"
CLIENTS = {}


class Checks:
    """Small assertions with names."""

    def __init__(self, url, busy):
        self.url, self.busy, self.made, self.failed = url, busy, 0, {}

    def same(self, name, have, want=True):
        """One that two things are equal."""
        self.made += 1
        if have != want:
            self.failed[name] = f"need {want!r}, have {have!r}"[:400]

    @contextlib.contextmanager
    def part(self, name):
        """What breaks in here is one check that failed."""
        try:
            yield
        except Exception as e:  # whatever a client throws
            self.made += 1
            self.failed[name] = f"{type(e).__name__}: {e}"[:600]

    def throws(self, name, kind, act, **want):
        """That a client throws what it has for this, with these fields."""
        self.made += 1
        try:
            act()
            self.failed[name] = f"need {kind.__name__}, have no error"
        except kind as e:
            have = {field: getattr(e, field, None) for field in want}
            if have != want:
                self.failed[name] = f"need {want}, have {have}"
        except Exception as e:
            self.failed[name] = f"need {kind.__name__}, have {type(e).__name__}: {e}"[:400]


def client(package):
    """Marks the checks of a package."""
    def mark(check):
        CLIENTS[package] = check
        return check
    return mark


def occupied(ask):
    """While somebody else is answered at length, and another one is about to ask."""
    @contextlib.contextmanager
    def within():
        thread = threading.Thread(target=ask)
        thread.start()
        time.sleep(0.3)
        yield
        thread.join()
    return within()


@client("openai")
def openai_itself(c):
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
    c.throws(
        "forced tool", openai.BadRequestError, lambda: chat(tools=[TOOL], tool_choice=forced),
        code="unsupported",
    )
    c.throws(
        "json mode", openai.BadRequestError, lambda: chat(response_format={"type": "json_object"}),
        code="unsupported",
    )
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
    wrong = openai.OpenAI(base_url=f"{c.url}/v1", api_key="other", max_retries=0)
    c.throws(
        "wrong key", openai.AuthenticationError, lambda: wrong.models.list(), status_code=401,
        code="invalid_api_key",
    )
    c.throws(
        "wrong path", openai.NotFoundError, lambda: api.embeddings.create(model="demo", input="a"),
        status_code=404,
    )
    c.throws(
        "wrong model", openai.NotFoundError, lambda: api.models.retrieve("other"), code="model_not_found"
    )
    with c.part("models"):
        c.same("models", [model.id for model in api.models.list()], ["demo"])
        c.same("model", api.models.retrieve("demo").object, "model")
    with c.part("completions"):
        texts = api.completions.create(
            model="demo", prompt=["a", "b"], max_tokens=2, temperature=0, echo=True, logprobs=1
        )
        c.same("completions", [x.text[0] for x in texts.choices], ["a", "b"])
        c.same(
            "completions logprobs",
            len(texts.choices[0].logprobs.tokens) == len(texts.choices[0].logprobs.token_logprobs),
        )
        whole = (
            api.completions.create(model="demo", prompt="the", max_tokens=5, temperature=0).choices[0].text
        )
        pieces = api.completions.create(model="demo", prompt="the", max_tokens=5, temperature=0, stream=True)
        c.same("completions stream", "".join(x.choices[0].text for x in pieces), whole)
    with c.part("responses"):
        answer = api.responses.create(model="demo", input=WHO, temperature=0)
        c.same("responses text", (answer.output_text, answer.status), (ANSWER, "completed"))
        c.same("responses usage", (answer.usage.input_tokens, answer.usage.output_tokens), (17, 15))
        c.same(
            "responses length",
            api.responses.create(model="demo", input=WHO, max_output_tokens=3).incomplete_details.reason,
            "max_output_tokens",
        )
        events = list(api.responses.create(model="demo", input=ASK, temperature=0, stream=True))
        c.same(
            "responses first and last", (events[0].type, events[-1].type),
            ("response.created", "response.completed"),
        )
        c.same(
            "responses deltas", "".join(e.delta for e in events if e.type == "response.output_text.delta"),
            ANSWER,
        )
        c.same("responses order", [e.sequence_number for e in events], list(range(len(events))))
        c.same("responses last text", events[-1].response.output_text, ANSWER)
        with api.responses.stream(model="demo", input=WHO, temperature=0) as stream:
            c.same("responses helper", stream.get_final_response().output_text, ANSWER)
        tool = {"type": "function", "strict": True, **FUNCTION}
        c.same(
            "responses tools", api.responses.create(model="demo", input=WHO, tools=[tool]).tools[0].name,
            "weather",
        )
        again = [*ASK, *(item.model_dump() for item in answer.output), {"role": "user", "content": "Why?"}]
        c.same("responses go on", api.responses.create(model="demo", input=again).status, "completed")
    c.throws(
        "responses kept", openai.BadRequestError,
        lambda: api.responses.create(model="demo", input=WHO, previous_response_id="r"), code="unsupported",
    )
    with c.part("asynchronous"):
        async def both():
            other = openai.AsyncOpenAI(base_url=f"{c.url}/v1", api_key="key", max_retries=0)
            one = lambda: other.chat.completions.create(model="demo", messages=ASK, temperature=0)
            return {x.choices[0].message.content for x in await asyncio.gather(*(one() for _ in range(12)))}
        c.same("12 at once", asyncio.run(both()), {ANSWER})
    with c.part("left stream"):
        for _ in range(5):
            stream = chat(stream=True)
            next(iter(stream))
            stream.close()
        c.same("after streams that were left", chat().choices[0].message.content, ANSWER)
    with c.part("raw"):
        raw = api.chat.completions.with_raw_response.create(
            model="demo", messages=ASK, extra_headers={"x-request-id": "mine"}
        )
        c.same("request id", raw.headers["x-request-id"], "mine")
    crowded = openai.OpenAI(base_url=f"{c.busy}/v1", api_key="key", max_retries=0)
    long = lambda: crowded.chat.completions.create(
        model="demo", messages=ASK, max_tokens=1500, extra_body={"ignore_eos": True}
    )
    with occupied(long):
        c.throws(
            "queue full", openai.RateLimitError,
            lambda: crowded.chat.completions.create(model="demo", messages=ASK), status_code=429,
            code="queue_full",
        )
        patient = crowded.with_options(max_retries=20)
        with c.part("retries"):
            c.same(
                "retries", patient.chat.completions.create(model="demo", messages=ASK, temperature=0)
                .choices[0]
                .message.content, ANSWER,
            )
    short = api.with_options(timeout=0.05)
    c.throws("time out", openai.APITimeoutError, lambda: short.chat.completions.create(
        model="demo", messages=ASK, max_tokens=1500, extra_body={"ignore_eos": True}))


@client("anthropic")
def anthropic_itself(c):
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
    c.throws(
        "forced tool", anthropic.BadRequestError, lambda: say(tools=[tool], tool_choice={"type": "any"}),
        status_code=400,
    )
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
        model="demo", max_tokens=1500, messages=ASK, extra_body={"ignore_eos": True}
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


@client("litellm")
def through_litellm(c):
    import litellm

    litellm.telemetry = False
    ask = lambda **more: litellm.completion(
        **{
            "model": "openai/demo", "api_base": f"{c.url}/v1", "api_key": "key", "messages": ASK,
            "temperature": 0, "max_retries": 0, **more,
        }
    )
    with c.part("openai"):
        answer = ask()
        c.same("text", answer.choices[0].message.content, ANSWER)
        c.same("usage", answer.usage.total_tokens, 32)
        c.same("stream", "".join(x.choices[0].delta.content or "" for x in ask(stream=True)), ANSWER)
        c.same("tools", ask(tools=[TOOL]).choices[0].finish_reason, "stop")
        c.same("stop", ask(stop=["demo"]).choices[0].message.content, "I am the q4 ")
    with c.part("hosted_vllm"):
        c.same("as vLLM", ask(model="hosted_vllm/demo").choices[0].message.content, ANSWER)
    with c.part("anthropic"):
        c.same("as Anthropic", ask(model="anthropic/demo", api_base=c.url).choices[0].message.content, ANSWER)
        c.same(
            "as Anthropic, stream",
            "".join(
                x.choices[0].delta.content or ""
                for x in ask(model="anthropic/demo", api_base=c.url, stream=True)
            ),
            ANSWER,
        )
    with c.part("text"):
        text = litellm.text_completion(
            model="text-completion-openai/demo", api_base=f"{c.url}/v1", api_key="key", prompt="a",
            max_tokens=2,
        )
        c.same("completions", text.object, "text_completion")
    with c.part("responses"):
        c.same(
            "responses",
            litellm.responses(
                model="openai/demo", api_base=f"{c.url}/v1", api_key="key", input=WHO, temperature=0
            )
            .output[0]
            .content[0]
            .text, ANSWER,
        )
    c.throws("wrong key", litellm.AuthenticationError, lambda: ask(api_key="other"), status_code=401)
    c.throws("bad temperature", litellm.BadRequestError, lambda: ask(temperature=-1), status_code=400)
    long = [{"role": "user", "content": "lake " * 9000}]
    c.throws("long prompt", litellm.ContextWindowExceededError, lambda: ask(messages=long))


@client("langchain-openai")
def through_langchain(c):
    from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI, OpenAI

    model = ChatOpenAI(base_url=f"{c.url}/v1", api_key="key", model="demo", temperature=0, max_retries=0)
    with c.part("invoke"):
        answer = model.invoke(WHO)
        c.same("text", answer.content, ANSWER)
        c.same("usage", answer.usage_metadata["total_tokens"], 32)
        c.same("finish", answer.response_metadata["finish_reason"], "stop")
    with c.part("stream"):
        c.same("stream", "".join(x.content for x in model.stream(WHO)), ANSWER)
        c.same("batch", [x.content for x in model.batch([WHO] * 4)], [ANSWER] * 4)
        c.same("asynchronous", asyncio.run(model.ainvoke(WHO)).content, ANSWER)
        c.same("stop", model.invoke(WHO, stop=["demo"]).content, "I am the q4 ")
        c.same(
            "logprobs", len(model.bind(logprobs=True).invoke(WHO).response_metadata["logprobs"]["content"]),
            15,
        )
    with c.part("tools"):
        @tool
        def weather(city: str) -> str:
            """The weather of a city."""
            return city
        c.same("tools", model.bind_tools([weather]).invoke(WHO).type, "ai")
        made = AIMessage("", tool_calls=[{"name": "weather", "args": {"city": "Oslo"}, "id": "c1"}])
        talk = [SystemMessage("Be brief."), HumanMessage(WHO), made, ToolMessage("rain", tool_call_id="c1")]
        c.same("tool results", model.bind_tools([weather]).invoke(talk).type, "ai")
    with c.part("responses"):
        other = ChatOpenAI(
            base_url=f"{c.url}/v1", api_key="key", model="demo", temperature=0, use_responses_api=True
        )
        c.same(
            "responses",
            other.invoke(WHO).text if isinstance(other.invoke(WHO).text, str) else other.invoke(WHO).text(),
            ANSWER,
        )
        pieces = [x.text if isinstance(x.text, str) else x.text() for x in other.stream(WHO)]
        c.same("responses stream", "".join(pieces), ANSWER)
    with c.part("completions"):
        c.same(
            "completions",
            isinstance(
                OpenAI(base_url=f"{c.url}/v1", api_key="key", model="demo", max_tokens=3).invoke("a"), str
            ),
        )


@client("openai-agents")
def through_agents(c):
    import agents
    import openai

    agents.set_tracing_disabled(True)

    @agents.function_tool
    def weather(city: str) -> str:
        """The weather of a city."""
        return city

    # Each loop of events has a client of its own.
    def agent(kind, *tools):
        api = openai.AsyncOpenAI(base_url=f"{c.url}/v1", api_key="key", max_retries=0)
        return agents.Agent(name="a", model=kind(model="demo", openai_client=api), tools=list(tools),
                            model_settings=agents.ModelSettings(temperature=0))

    async def streamed(one):
        result = agents.Runner.run_streamed(one, WHO)
        kinds = [event.type async for event in result.stream_events()]
        return result.final_output, kinds

    for kind in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
        name = kind.__name__.removeprefix("OpenAI").removesuffix("Model")
        with c.part(name):
            result = agents.Runner.run_sync(agent(kind), WHO)
            c.same(f"{name} text", result.final_output, ANSWER)
            c.same(f"{name} usage", result.context_wrapper.usage.output_tokens, 15)
            c.same(
                f"{name} goes on",
                isinstance(
                    agents.Runner.run_sync(agent(kind), [*result.to_input_list(), *ASK]).final_output, str
                ),
            )
        with c.part(f"{name} stream"):
            text, kinds = asyncio.run(streamed(agent(kind)))
            c.same(f"{name} stream text", text, ANSWER)
            c.same(
                f"{name} stream events", "raw_response_event" in kinds and "run_item_stream_event" in kinds
            )
        with c.part(f"{name} tools"):
            c.same(
                f"{name} tools",
                isinstance(agents.Runner.run_sync(agent(kind, weather), WHO).final_output, str),
            )
            c.same(
                f"{name} instructions",
                isinstance(
                    agents.Runner.run_sync(agent(kind).clone(instructions="Be brief."), WHO).final_output, str
                ),
            )


@client("pydantic-ai-slim")
def through_pydantic(c):
    from pydantic_ai import Agent
    from pydantic_ai.exceptions import ModelHTTPError
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    own = OpenAIProvider(base_url=f"{c.url}/v1", api_key="key")
    other = AnthropicProvider(
        anthropic_client=__import__("anthropic").AsyncAnthropic(base_url=c.url, api_key="key")
    )
    models = {
        "chat": OpenAIChatModel("demo", provider=own),
        "responses": OpenAIResponsesModel("demo", provider=own),
        "anthropic": AnthropicModel("demo", provider=other),
    }
    settings = {"temperature": 0, "max_tokens": 64}

    async def streamed(agent):
        async with agent.run_stream(WHO) as result:
            return await result.get_output()

    for name, model in models.items():
        with c.part(name):
            agent = Agent(model, model_settings=settings)
            result = agent.run_sync(WHO)
            c.same(f"{name} text", result.output, ANSWER)
            usage = result.usage() if callable(result.usage) else result.usage
            c.same(f"{name} usage", usage.output_tokens, 15)
            c.same(
                f"{name} goes on",
                isinstance(agent.run_sync("Why?", message_history=result.all_messages()).output, str),
            )
        with c.part(f"{name} stream"):
            c.same(f"{name} stream", asyncio.run(streamed(Agent(model, model_settings=settings))), ANSWER)
        with c.part(f"{name} tools"):
            agent = Agent(model, model_settings=settings, instructions="Be brief.")

            @agent.tool_plain
            def weather(city: str) -> str:
                """The weather of a city."""
                return city
            c.same(f"{name} tools", isinstance(agent.run_sync(WHO).output, str))
    wrong = OpenAIChatModel("demo", provider=OpenAIProvider(base_url=f"{c.url}/v1", api_key="other"))
    c.throws("wrong key", ModelHTTPError, lambda: Agent(wrong).run_sync(WHO), status_code=401)


@client("instructor")
def through_instructor(c):
    import instructor
    import openai
    from pydantic import BaseModel

    class Answer(BaseModel):
        city: str

    api = openai.OpenAI(base_url=f"{c.url}/v1", api_key="key", max_retries=0)
    with c.part("as it is"):
        plain = instructor.from_openai(api)
        c.same(
            "as it is",
            plain.chat.completions.create(model="demo", messages=ASK, response_model=None, temperature=0)
            .choices[0]
            .message.content, ANSWER,
        )
    # The demo model fills nothing in: what counts is that the request is taken and the reason told.
    def told(mode, want):
        try:
            instructor.from_openai(api, mode=mode).chat.completions.create(
                model="demo", messages=ASK, response_model=Answer, max_retries=1, max_tokens=40)
            return "an answer"
        except Exception as e:
            return next((word for word in want if word in repr(e) + str(e)), repr(e))
    for mode, want in (
        ("MD_JSON", ["validation", "JSON"]), ("TOOLS", ["not supported by this engine"]),
        ("JSON", ["not supported by this engine"]), ("JSON_SCHEMA", ["not supported by this engine"]),
    ):
        with c.part(mode):
            c.same(mode, told(instructor.Mode[mode], want) in want)


@client("lm_eval")
def through_lm_eval(c):
    import lm_eval
    from lm_eval.tasks import TaskManager

    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        (folder / "q.jsonl").write_text("".join(json.dumps({"q": q, "a": ANSWER}) + "\n" for q in [WHO] * 3))
        base = (
            f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {folder}/q.jsonl\n"
            "test_split: test\ndoc_to_text: '{{q}}'\n"
        )
        (folder / "say.yaml").write_text(
            f"task: q4_say\noutput_type: generate_until\n{base}doc_to_target: '{{{{a}}}}'\n"
            "generation_kwargs:\n  until: ['\\n']\n  max_gen_toks: 40\n  temperature: 0\n"
            "metric_list:\n  - metric: exact_match\n"
        )
        (folder / "choose.yaml").write_text(
            f"task: q4_choose\noutput_type: multiple_choice\n{base}doc_to_target: 0\n"
            "doc_to_choice: [' I am', ' zzz']\nmetric_list:\n  - metric: acc\n"
        )
        manager = TaskManager(include_path=str(folder), include_defaults=False)
        run = lambda model, more, task, **options: lm_eval.simple_evaluate(
            model=model, model_args=f"model=demo,base_url={c.url}/v1/{more},num_concurrent=2,max_retries=1",
            tasks=[task], task_manager=manager, bootstrap_iters=0, **options)["results"][task]
        with c.part("local-chat-completions"):
            result = run(
                "local-chat-completions", "chat/completions,tokenizer_backend=None", "q4_say",
                apply_chat_template=True,
            )
            c.same("chat score", result["exact_match,none"], 1.0)
        with c.part("local-completions"):
            result = run("local-completions", "completions,tokenizer_backend=None", "q4_say")
            c.same("completions", "exact_match,none" in result)
        with c.part("log-likelihoods"):
            result = run(
                "local-completions", f"completions,tokenizer_backend=huggingface,tokenizer={DEMO}",
                "q4_choose",
            )
            c.same("log-likelihoods", 0 <= result["acc,none"] <= 1)


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("client", nargs="?", choices=CLIENTS)
    p.add_argument("--list", action="store_true", help="print the packages")
    p.add_argument("--url")
    p.add_argument("--busy")
    args = p.parse_args()
    if args.list:
        return print("\n".join(CLIENTS))
    try:
        version = importlib.metadata.version(args.client)
    except importlib.metadata.PackageNotFoundError:
        return print(json.dumps({"missing": f"{args.client} is not installed"}))
    checks = Checks(args.url, args.busy)
    with checks.part("all of it"):
        CLIENTS[args.client](checks)
    print(json.dumps({"version": version, "made": checks.made, "failed": checks.failed}))


main()
