// Small assertions with names, as checks.py has them, for clients in JavaScript:
//   node PACKAGE.mjs --url URL --busy URL, with Q4_NODE a folder in which the package is installed.
import { createRequire } from "node:module";
import { isDeepStrictEqual } from "node:util";
import { readFileSync } from "node:fs";

export const ANSWER = "I am the q4 demo model, made of four-bit numbers.";
export const WHO = "Who are you?";
export const ASK = [{ role: "user", content: WHO }];
export const CITIES = ["Oslo", "Rome"];
export const SCHEMA = {
  type: "object",
  properties: { city: { type: "string", enum: CITIES } },
  required: ["city"],
  additionalProperties: false,
};

const folder = process.env.Q4_NODE;
const option = (name) => process.argv[process.argv.indexOf(name) + 1];
export const url = option("--url");
export const busy = option("--busy");
export const load = createRequire(`${folder}/package.json`);

let made = 0;
const failed = {};

export function same(name, have, want = true) {
  made += 1;
  if (!isDeepStrictEqual(have, want)) {
    failed[name] = `need ${JSON.stringify(want)}, have ${JSON.stringify(have)}`.slice(0, 400);
  }
}

// What breaks in `run` is one check that failed.
export async function part(name, run) {
  try {
    await run();
  } catch (e) {
    made += 1;
    failed[name] = `${e.name}: ${e.message}`.slice(0, 600);
  }
}

// That `run` throws a `kind` with these fields.
export async function throws(name, kind, run, want = {}) {
  made += 1;
  try {
    await run();
    failed[name] = `need ${kind.name}, have no error`;
  } catch (e) {
    const have = Object.fromEntries(Object.keys(want).map((field) => [field, e[field]]));
    if (!(e instanceof kind)) failed[name] = `need ${kind.name}, have ${e.name}: ${e.message}`.slice(0, 400);
    else if (!isDeepStrictEqual(have, want)) {
      failed[name] = `need ${JSON.stringify(want)}, have ${JSON.stringify(have)}`;
    }
  }
}

export async function all(stream) {
  const events = [];
  for await (const event of stream) events.push(event);
  return events;
}

// Whether the server keeps answers to a form, as checks.py asks it.
export async function forms() {
  const body = { messages: ASK, max_tokens: 8, response_format: { type: "json_object" } };
  const headers = { authorization: "Bearer key", "content-type": "application/json" };
  const request = { method: "POST", headers, body: JSON.stringify(body) };
  const answer = await fetch(`${url}/v1/chat/completions`, request);
  return answer.status === 200;
}

export function end(name) {
  const { version } = JSON.parse(readFileSync(`${folder}/node_modules/${name}/package.json`, "utf8"));
  console.log(JSON.stringify({ version, made, failed }));
}
