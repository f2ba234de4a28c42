"""The package `openai`: doors, models, completions, responses, and a server that is busy."""

import asyncio

from .checks import ANSWER, ASK, FUNCTION, WHO, occupied


def checks(c):
    import openai

    api = openai.OpenAI(base_url=f"{c.url}/v1", api_key="key", max_retries=0)
    chat = lambda **more: api.chat.completions.create(
        model="demo", **{"messages": ASK, "temperature": 0, **more}
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
        model="demo", messages=ASK, max_tokens=2000, extra_body={"ignore_eos": True}
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
        model="demo", messages=ASK, max_tokens=2000, extra_body={"ignore_eos": True}))
