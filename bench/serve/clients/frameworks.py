"""Packages that speak to the APIs for others: `litellm`, `langchain-openai`, `openai-agents`, `pydantic-ai`,
`instructor`."""

import asyncio
import typing

from .checks import ANSWER, ASK, TOOL, WHO


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


def through_instructor(c):
    import instructor
    import openai
    from pydantic import BaseModel

    class Answer(BaseModel):
        city: typing.Literal["Oslo", "Rome"]

    api = openai.OpenAI(base_url=f"{c.url}/v1", api_key="key", max_retries=0)
    with c.part("as it is"):
        plain = instructor.from_openai(api)
        c.same(
            "as it is",
            plain.chat.completions.create(model="demo", messages=ASK, response_model=None, temperature=0)
            .choices[0]
            .message.content, ANSWER,
        )
    def told(mode, want):
        try:
            api_of = instructor.from_openai(api, mode=mode)
            made = api_of.chat.completions.create(
                model="demo", messages=ASK, response_model=Answer, max_retries=1, max_tokens=200)
            return "an answer" if isinstance(made, Answer) else repr(made)
        except Exception as e:
            return next((word for word in want if word in repr(e) + str(e)), repr(e))
    # Unasked, the demo model fills nothing in: what counts is that the request is taken and the reason told.
    formed = ["an answer"] if c.forms else ["not supported by this engine"]
    for mode, want in (
        ("MD_JSON", ["validation", "JSON"]), ("TOOLS", formed), ("JSON", ["validation", "JSON", "incomplete", *formed]),
        ("JSON_SCHEMA", formed),
    ):
        with c.part(mode):
            c.same(mode, told(instructor.Mode[mode], want) in want)
