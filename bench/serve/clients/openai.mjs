// The package `openai` of npm.
import { ANSWER, ASK, CITIES, SCHEMA, WHO, all, busy, end, forms } from "./checks.mjs";
import { load, part, same, throws, url } from "./checks.mjs";

const { OpenAI } = load("openai");
const api = new OpenAI({ baseURL: `${url}/v1`, apiKey: "key", maxRetries: 0 });
const chat = (more = {}) =>
  api.chat.completions.create({ model: "demo", messages: ASK, temperature: 0, ...more });
const FUNCTION = { name: "weather", description: "The weather of a city", parameters: SCHEMA };
const TOOL = { type: "function", function: FUNCTION };

await part("chat", async () => {
  const answer = await chat();
  const [choice] = answer.choices;
  same("chat text", choice.message.content, ANSWER);
  same("chat finish", choice.finish_reason, "stop");
  const { prompt_tokens, completion_tokens, total_tokens } = answer.usage;
  same("chat usage", [prompt_tokens, completion_tokens, total_tokens], [17, 15, 32]);
  same("chat request id", Boolean(answer._request_id));
});
await part("stream", async () => {
  const chunks = await all(await chat({ stream: true, stream_options: { include_usage: true } }));
  const last = chunks.pop();
  same("stream text", chunks.map((c) => c.choices[0].delta.content ?? "").join(""), ANSWER);
  same("stream finish", chunks.map((c) => c.choices[0].finish_reason).filter(Boolean), ["stop"]);
  same("stream usage", [last.choices, last.usage.completion_tokens], [[], 15]);
  same("stream ids", new Set(chunks.map((c) => c.id)).size, 1);
});
await part("stream helper", async () => {
  const stream = api.chat.completions.stream({ model: "demo", messages: ASK, temperature: 0 });
  let text = "";
  stream.on("content", (delta) => (text += delta));
  same("stream helper", await stream.finalContent(), ANSWER);
  same("stream helper events", text, ANSWER);
});
await part("a stream that is left", async () => {
  const stream = await chat({ stream: true, max_tokens: 2000, ignore_eos: true });
  for await (const _ of stream) break;
  same("after a stream that was left", (await chat()).choices[0].message.content, ANSWER);
});
await part("parameters", async () => {
  same("stop", (await chat({ stop: ["demo"] })).choices[0].message.content, "I am the q4 ");
  same("length", (await chat({ max_completion_tokens: 3 })).choices[0].finish_reason, "length");
  same("n", (await chat({ n: 3 })).choices.map((c) => c.message.content), [ANSWER, ANSWER, ANSWER]);
  const { content } = (await chat({ logprobs: true, top_logprobs: 3 })).choices[0].logprobs;
  same("logprobs", content.map((t) => t.token).join(""), ANSWER);
  same("top logprobs", new Set(content.map((t) => t.top_logprobs.length)), new Set([3]));
  const seeded = () => chat({ seed: 5, temperature: 1.5, messages: [{ role: "user", content: "a b" }] });
  const [one, two] = await Promise.all([seeded(), seeded()]);
  same("seed", one.choices[0].message.content, two.choices[0].message.content);
});
await part("tools", async () => {
  const call = { id: "c1", type: "function", function: { name: "weather", arguments: '{"city": "Oslo"}' } };
  const talk = [
    ...ASK,
    { role: "assistant", content: null, tool_calls: [call] },
    { role: "tool", tool_call_id: "c1", content: "rain" },
  ];
  same("tool results", (await chat({ messages: talk, tools: [TOOL] })).choices[0].message.role, "assistant");
});
const forced = () =>
  chat({ tools: [TOOL], max_tokens: 400, tool_choice: { type: "function", function: { name: "weather" } } });
if (await forms()) {
  await part("forced tool", async () => {
    const { name, arguments: text } = (await forced()).choices[0].message.tool_calls[0].function;
    same("forced tool", [name, CITIES.includes(JSON.parse(text).city)], ["weather", true]);
  });
} else await throws("forced tool", OpenAI.BadRequestError, forced, { code: "unsupported" });
await part("models", async () => {
  same("models", (await all(api.models.list())).map((model) => model.id), ["demo"]);
  same("model", (await api.models.retrieve("demo")).object, "model");
});
await part("completions", async () => {
  const both = { model: "demo", prompt: ["a", "b"], max_tokens: 2, echo: true };
  const texts = await api.completions.create(both);
  same("completions", texts.choices.map((choice) => choice.text[0]), ["a", "b"]);
});
await part("responses", async () => {
  const ask = { model: "demo", input: WHO, temperature: 0 };
  const answer = await api.responses.create(ask);
  same("responses text", [answer.output_text, answer.status], [ANSWER, "completed"]);
  same("responses usage", [answer.usage.input_tokens, answer.usage.output_tokens], [17, 15]);
  const events = await all(await api.responses.create({ ...ask, input: ASK, stream: true }));
  const ends = [events[0].type, events.at(-1).type];
  same("responses first and last", ends, ["response.created", "response.completed"]);
  const deltas = events.filter((e) => e.type === "response.output_text.delta").map((e) => e.delta);
  same("responses deltas", deltas.join(""), ANSWER);
  same("responses order", events.map((e) => e.sequence_number), events.map((_, i) => i));
  const stream = api.responses.stream(ask);
  same("responses helper", (await stream.finalResponse()).output_text, ANSWER);
});
const { APIConnectionTimeoutError, AuthenticationError } = OpenAI;
const { BadRequestError, NotFoundError, RateLimitError } = OpenAI;
const invalid = { type: "invalid_request_error" };
await throws("bad temperature", BadRequestError, () => chat({ temperature: -1 }), { status: 400 });
await throws("no messages", BadRequestError, () => chat({ messages: [] }), invalid);
const much = [{ role: "user", content: "lake ".repeat(9000) }];
const full = { code: "context_length_exceeded" };
await throws("long prompt", BadRequestError, () => chat({ messages: much }), full);
const wrong = new OpenAI({ baseURL: `${url}/v1`, apiKey: "other", maxRetries: 0 });
await throws("wrong key", AuthenticationError, () => all(wrong.models.list()), { status: 401 });
await throws("wrong model", NotFoundError, () => api.models.retrieve("other"), { code: "model_not_found" });
const ask = { model: "demo", messages: ASK, temperature: 0 };
const endless = { ...ask, max_tokens: 2000, ignore_eos: true };
const hasty = () => api.chat.completions.create(endless, { timeout: 50 });
await throws("time out", APIConnectionTimeoutError, hasty);

const crowded = new OpenAI({ baseURL: `${busy}/v1`, apiKey: "key", maxRetries: 0 });
const long = crowded.chat.completions.create(endless);
await new Promise((resolve) => setTimeout(resolve, 100));
const another = () => crowded.chat.completions.create(ask);
await throws("queue full", RateLimitError, another, { code: "queue_full" });
await part("retries", async () => {
  const patient = crowded.withOptions({ maxRetries: 20 });
  same("retries", (await patient.chat.completions.create(ask)).choices[0].message.content, ANSWER);
  await long;
});
end("openai");
