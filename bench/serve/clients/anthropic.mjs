// The package `@anthropic-ai/sdk` of npm.
import { ANSWER, ASK, CITIES, SCHEMA, all, busy, end, forms } from "./checks.mjs";
import { load, part, same, throws, url } from "./checks.mjs";

const { Anthropic } = load("@anthropic-ai/sdk");
const api = new Anthropic({ baseURL: url, apiKey: "key", maxRetries: 0 });
const ask = { model: "demo", max_tokens: 64, messages: ASK };
const say = (more = {}) => api.messages.create({ ...ask, ...more });
const tool = { name: "weather", description: "The weather of a city", input_schema: SCHEMA };

await part("message", async () => {
  const answer = await say();
  same("text", answer.content[0].text, ANSWER);
  same("stop reason", [answer.stop_reason, answer.stop_sequence], ["end_turn", null]);
  const { input_tokens, cache_read_input_tokens, output_tokens } = answer.usage;
  same("usage", [input_tokens + cache_read_input_tokens, output_tokens], [17, 15]);
});
await part("parameters", async () => {
  same("length", (await say({ max_tokens: 3 })).stop_reason, "max_tokens");
  const stopped = await say({ stop_sequences: ["demo"] });
  same("stop", [stopped.content[0].text, stopped.stop_sequence], ["I am the q4 ", "demo"]);
  same("system", (await say({ system: [{ type: "text", text: "Be brief." }] })).role, "assistant");
  const thinking = { type: "enabled", budget_tokens: 1024 };
  same("thinking", (await say({ thinking, max_tokens: 2048 })).type, "message");
});
await part("stream", async () => {
  const events = (await all(await say({ stream: true }))).filter((event) => event.type !== "ping");
  const kinds = events.map((event) => event.type);
  same("events", [...kinds.slice(0, 2), ...kinds.slice(-3)], [
    "message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop",
  ]);
  const deltas = events.filter((event) => event.type === "content_block_delta");
  same("deltas", deltas.map((event) => event.delta.text).join(""), ANSWER);
});
await part("stream helper", async () => {
  const stream = api.messages.stream(ask);
  let text = "";
  stream.on("text", (delta) => (text += delta));
  same("final text", await stream.finalText(), ANSWER);
  same("text events", text, ANSWER);
});
await part("a stream that is left", async () => {
  const stream = await say({ stream: true, max_tokens: 2000, ignore_eos: true });
  for await (const _ of stream) break;
  same("after a stream that was left", (await say()).content[0].text, ANSWER);
});
await part("tools", async () => {
  const use = { type: "tool_use", id: "t1", name: "weather", input: { city: "Oslo" } };
  const talk = [
    ...ASK,
    { role: "assistant", content: [use] },
    { role: "user", content: [{ type: "tool_result", tool_use_id: "t1", content: "rain" }] },
  ];
  same("tool results", (await say({ messages: talk, tools: [tool] })).type, "message");
});
const forced = () => say({ tools: [tool], tool_choice: { type: "any" }, max_tokens: 400 });
if (await forms()) {
  await part("forced tool", async () => {
    const used = (await forced()).content.find((block) => block.type === "tool_use");
    same("forced tool", [used.name, CITIES.includes(used.input.city)], ["weather", true]);
  });
} else await throws("forced tool", Anthropic.BadRequestError, forced, { status: 400 });
await part("count and models", async () => {
  same("count_tokens", (await api.messages.countTokens({ model: "demo", messages: ASK })).input_tokens, 17);
  same("models", (await all(api.models.list())).map((model) => model.id), ["demo"]);
  same("model", (await api.models.retrieve("demo")).display_name, "demo");
});
await part("8 at once", async () => {
  const answers = await Promise.all(Array.from({ length: 8 }, () => say()));
  same("8 at once", new Set(answers.map((answer) => answer.content[0].text)), new Set([ANSWER]));
});
await throws("no messages", Anthropic.BadRequestError, () => say({ messages: [] }), { status: 400 });
const wrong = new Anthropic({ baseURL: url, apiKey: "other", maxRetries: 0 });
await throws("wrong key", Anthropic.AuthenticationError, () => wrong.messages.create(ask), { status: 401 });

const crowded = new Anthropic({ baseURL: busy, apiKey: "key", maxRetries: 0 });
const long = crowded.messages.create({ ...ask, max_tokens: 2000, ignore_eos: true });
await new Promise((resolve) => setTimeout(resolve, 100));
await throws("queue full", Anthropic.RateLimitError, () => crowded.messages.create(ask), { status: 429 });
await long;
end("@anthropic-ai/sdk");
