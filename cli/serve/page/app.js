// The conversation: what it holds, how it is kept, and how an answer comes from the server.
import { el } from '/markdown.js';
import { plan, sends, turn } from '/view.js';

const $ = (id) => document.getElementById(id);
const log = $('log');
const prompt = $('prompt');
/** Where a focused field brings up a keyboard, over the answer. */
const { matches: touch } = matchMedia('(pointer: coarse)');

/**
 * The turns. A question is `{role: 'user', text}`; an answer has `text`, `reasoning`, `tools`, a `state` of
 * 'streaming', 'done', 'stopped' or 'failed', a `note` on how it ended, and what was measured.
 */
let messages = [];
/** The conversation that "New chat" put away, until the next one has begun. */
let put = null;
/** Stops the answer that is on its way. */
let stopper = null;

// Keeping

/** Storage may be full, absent or forbidden; the page works without. */
function kept(area, name) {
  try {
    return window[area].getItem(name);
  } catch {
    return null;
  }
}

function keep(area, name, value) {
  try {
    if (value === null) window[area].removeItem(name);
    else window[area].setItem(name, value);
    return true;
  } catch {
    return false;
  }
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

const LEFT = 'The page was left before the answer ended.';
/** Whether the page is being left, which ends its connections. */
let left = false;
let warned = false;

function save() {
  const done = keep('localStorage', 'q4.messages', messages.length ? JSON.stringify(messages) : null);
  if (!done && !warned) say('This browser keeps no more: a reload will lose what is new here.');
  warned = !done;
}

function restore() {
  const found = parsed(kept('localStorage', 'q4.messages'));
  const known = (m) => typeof m?.text === 'string' && ['user', 'assistant'].includes(m.role);
  messages = Array.isArray(found) && found.every(known) ? found : [];
  for (const message of messages.filter((m) => m.role === 'assistant')) {
    message.reasoning ??= '';
    message.tools ??= [];
    if (message.state === 'streaming') fail(message, LEFT);
  }
}

// Asking the server

/** An answer of the server that says what is wrong, or the lack of one. */
class Refusal extends Error {
  constructor(what, detail) {
    super(what);
    this.detail = detail;
  }
}

let secret = kept('sessionStorage', 'q4.key');

async function request(path, init = {}) {
  for (;;) {
    const used = secret;
    const headers = { ...init.headers, ...(used && { Authorization: `Bearer ${used}` }) };
    const response = await fetch(path, { ...init, headers }).catch((error) => {
      if (init.signal?.aborted) throw error;
      throw new Refusal('The server does not answer.', 'It may have stopped, or the network is down.');
    });
    if (response.status !== 401) return response;
    // Another request may have asked for the key meanwhile.
    const why = used ? 'The server did not take this key.' : 'This server answers only with a key.';
    if (used === secret && !(await askKey(why))) {
      throw new Refusal('This server needs an API key.', 'It is asked for when you retry.');
    }
  }
}

async function get(path) {
  const response = await request(path);
  if (!response.ok) throw await refusal(response);
  return response;
}

const json = (path) => get(path).then((response) => response.json());

async function refusal(response) {
  const { error } = parsed(await response.text().catch(() => '')) ?? {};
  const wait = Number(response.headers.get('Retry-After'));
  const busy = wait ? `The server is busy. Retry in ${wait} s.` : 'The server is busy. Retry in a moment.';
  const what = response.status === 429 ? busy : 'The server refused the request.';
  return new Refusal(what, inWords(error) ?? `HTTP ${response.status} ${response.statusText}`.trim());
}

function inWords(error) {
  if (typeof error === 'string') return error;
  if (!error?.message) return undefined;
  return error.code ? `${error.message} (${error.code})` : error.message;
}

/** The documents of a stream of server-sent events. */
async function* events(body) {
  // Read directly: a pipe through a decoder drops what waits in it when the connection breaks.
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let rest = '';
  let kind = '';
  try {
    for (let ended = false; !ended;) {
      const { value, done } = await reader.read();
      ended = done;
      const lines = (rest + (done ? '\n' : decoder.decode(value, { stream: true }))).split('\n');
      rest = lines.pop();
      for (const line of lines.map((text) => text.trimEnd())) {
        if (!line) kind = '';
        if (line.startsWith('event:')) kind = line.slice(6).trim();
        if (!line.startsWith('data:')) continue;
        const data = line.slice(5).trim();
        if (data === '[DONE]') return;
        const document = parsed(data);
        if (!document) throw new Refusal('The server sent what is no answer.', data.slice(0, 200));
        yield kind === 'error' && !document.error ? { error: document } : document;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function body() {
  const said = messages.filter((m) => m.text).map(({ role, text }) => ({ role, content: text }));
  const { system, ...sampling } = settings();
  return {
    model: models[0],
    messages: system ? [{ role: 'system', content: system }, ...said] : said,
    ...sampling,
    stream: true,
    stream_options: { include_usage: true },
  };
}

/** Gets an answer to the last question. Where none begins, `old`, the answer before, comes back. */
async function answer(old) {
  const turns = messages;
  const sent = body();
  const reply = { role: 'assistant', text: '', reasoning: '', tools: [], state: 'streaming', pieces: 0 };
  stopper = new AbortController();
  add(reply);
  busy(true);
  follow = true;
  redraw();
  try {
    // The server may have been away when the page came.
    if (!models.length) await greet();
    sent.model ??= models[0];
    const headers = { 'Content-Type': 'application/json' };
    const init = { method: 'POST', headers, body: JSON.stringify(sent), signal: stopper.signal };
    const clock = { asked: performance.now() };
    const response = await request('/v1/chat/completions', init);
    if (!response.ok) throw await refusal(response);
    await receive(reply, response.body, clock);
    conclude(reply);
  } catch (error) {
    if (stopper.signal.aborted) stopped(reply);
    else if (left) fail(reply, LEFT);
    else if (error instanceof Refusal) fail(reply, error.message, error.detail);
    else fail(reply, 'The connection ended before the answer did.', reply.pieces ? 'What came is kept.' : '');
  }
  if (old && !reply.pieces && reply.state !== 'done') bringBack(old, reply, turns);
  stopper = null;
  busy(false);
  redraw();
  save();
}

async function receive(reply, stream, clock) {
  for await (const chunk of events(stream)) {
    if (chunk.error) throw new Refusal('The server could not finish the answer.', inWords(chunk.error));
    if (chunk.usage) reply.tokens = chunk.usage.completion_tokens;
    const choice = chunk.choices?.[0];
    if (choice?.finish_reason) reply.finish = choice.finish_reason;
    if (choice?.delta) take(reply, choice.delta, clock);
    later();
  }
  if (!reply.finish) throw new TypeError('the stream ended before the answer');
}

function take(reply, delta, clock) {
  const reasoning = delta.reasoning_content ?? delta.reasoning ?? '';
  const calls = delta.tool_calls ?? [];
  if (!reasoning && !delta.content && !calls.length) return;
  const now = performance.now();
  clock.first ??= now;
  reply.pieces += 1;
  reply.reasoning += reasoning;
  reply.text += delta.content ?? '';
  for (const { index = 0, function: part } of calls) {
    const call = (reply.tools[index] ??= { name: '', arguments: '' });
    call.name += part?.name ?? '';
    call.arguments += part?.arguments ?? '';
  }
  if (reasoning) reply.thought = (now - clock.first) / 1000;
  // What came in one go says nothing about how fast it was made, but the wait for it does.
  reply.atOnce = now - clock.first <= 50;
  reply.seconds = (now - (reply.atOnce ? clock.asked : clock.first)) / 1000;
}

/** The first token stands for the prompt, so one less was made in the time measured from there on. */
function measure(reply) {
  const many = reply.tokens ?? reply.pieces;
  const made = reply.atOnce ? many : many - 1;
  if (reply.seconds && many > 1) reply.rate = made / reply.seconds;
}

function conclude(reply) {
  measure(reply);
  reply.state = 'done';
  const many = reply.tokens ?? reply.pieces;
  if (reply.finish === 'length') reply.note = `Cut after ${many} tokens.`;
  else if (!['stop', 'tool_calls'].includes(reply.finish)) reply.note = `Ended with ${reply.finish}.`;
  else if (!reply.text && !reply.tools.length) reply.note = 'The answer is empty.';
}

function stopped(reply) {
  measure(reply);
  reply.state = 'stopped';
  reply.note = 'Stopped.';
}

function fail(reply, note, detail) {
  measure(reply);
  Object.assign(reply, { state: 'failed', note, detail });
}

function bringBack(old, { state, note, detail }, turns) {
  turns[turns.length - 1] = old;
  if (state === 'failed') Object.assign(old, { state, note, detail });
  // A new chat may stand there by now.
  if (turns === messages) log.lastElementChild.replaceWith(turn(old));
}

// Showing

/** Whether the view stays at the end while the answer grows. */
let follow = true;
let due = 0;
let saved = 0;

addEventListener('scroll', () => {
  const { scrollHeight } = document.documentElement;
  follow = innerHeight + scrollY > scrollHeight - 60;
}, { passive: true });

function redraw() {
  due = 0;
  log.lastElementChild?.draw();
  if (follow) scrollTo(0, document.documentElement.scrollHeight);
  if (Date.now() - saved < 1000) return;
  saved = Date.now();
  save();
}

/** Tokens may come faster than frames. */
function later() {
  due ||= requestAnimationFrame(redraw);
}

function add(message) {
  messages.push(message);
  log.append(turn(message));
  $('welcome').hidden = true;
  save();
}

function show() {
  log.replaceChildren(...messages.map(turn));
  $('welcome').hidden = messages.length > 0;
  scrollTo(0, document.documentElement.scrollHeight);
}

/** A screen reader hears of the answer once, when it is whole. */
function busy(on) {
  log.setAttribute('aria-busy', on);
  const held = document.activeElement === $('stop') || document.activeElement === $('send');
  $('send').hidden = on;
  $('stop').hidden = !on;
  if (held) (on ? $('stop') : touch ? $('send') : prompt).focus();
  $('progress').textContent = on ? 'The answer is being written.' : 'The answer has ended.';
}

/** One line above the field, with a button if there is something to do about it. */
function say(text, label, act) {
  const button = label && el('button', { type: 'button', className: 'plain' }, label);
  button?.addEventListener('click', () => {
    $('notice').replaceChildren();
    act();
  });
  $('notice').replaceChildren(...(text ? [el('p', {}, text)] : []), ...(button ? [button] : []));
}

// Doing

function ask(text) {
  if (!text.trim() || stopper) return false;
  if (put) say('');
  put = null;
  add({ role: 'user', text: text.trim() });
  answer();
  return true;
}

function again() {
  if (stopper) return;
  const held = log.contains(document.activeElement);
  const old = messages.at(-1)?.role === 'assistant' ? messages.pop() : undefined;
  if (old) log.lastElementChild.remove();
  answer(old?.text || old?.reasoning ? old : undefined);
  // The button that had the focus is gone.
  if (held) $('stop').focus();
}

function edit() {
  const at = messages.findLastIndex((m) => m.role === 'user');
  if (stopper || at < 0) return;
  log.children[at].edit((text) => {
    if (!text?.trim()) return prompt.focus();
    messages.length = at;
    while (log.children.length > at) log.lastElementChild.remove();
    ask(text);
    return prompt.focus();
  });
}

function begin() {
  stopper?.abort();
  if (!messages.length) return;
  put = messages;
  messages = [];
  show();
  save();
  say('A new chat.', 'Bring the last one back', () => {
    messages = put ?? messages;
    put = null;
    show();
    save();
  });
  prompt.focus();
}

async function copy(text, button) {
  const done = await navigator.clipboard?.writeText(text).then(() => true, () => false);
  const label = button.textContent;
  button.textContent = done || copyOldWay(text) ? 'Copied' : 'Not copied';
  setTimeout(() => { button.textContent = label; }, 1500);
}

/** The clipboard is for secure origins; a server in the house is none. */
function copyOldWay(text) {
  const field = el('textarea', { value: text, className: 'unseen', 'aria-hidden': 'true' });
  document.body.append(field);
  field.select();
  const done = document.execCommand('copy');
  field.remove();
  return done;
}

log.addEventListener('click', ({ target }) => {
  const button = target.closest('[data-do]');
  switch (button?.dataset.do) {
    case 'again': return again();
    case 'edit': return edit();
    case 'copy-code': return copy(button.closest('figure').querySelector('code').textContent, button);
    case 'copy-answer': {
      const at = [...log.children].indexOf(button.closest('.turn'));
      return copy(messages[at].text, button);
    }
    default: return undefined;
  }
});

$('composer').addEventListener('submit', (event) => {
  event.preventDefault();
  if (ask(prompt.value)) prompt.value = '';
  grow();
});
prompt.addEventListener('keydown', (event) => {
  if (!sends(event)) return;
  event.preventDefault();
  $('composer').requestSubmit();
});
prompt.addEventListener('input', grow);
$('stop').addEventListener('click', () => stopper?.abort());
$('new').addEventListener('click', begin);
addEventListener('keydown', (event) => {
  if (event.key === 'Escape' && !document.querySelector('dialog[open]')) stopper?.abort();
});
addEventListener('pageshow', () => { left = false; });
addEventListener('pagehide', () => {
  left = true;
  save();
});

function grow() {
  if (CSS.supports('field-sizing', 'content')) return;
  prompt.style.height = 'auto';
  prompt.style.height = `${prompt.scrollHeight}px`;
}

// Settings

const fields = $('fields');
let models = [];

/** What is set, as the request names it; a value out of its range is as good as none. */
function settings() {
  const set = [...fields.elements].filter(({ name, value, validity }) => name && value && validity.valid);
  const pair = ({ name, type, value }) => [name, type === 'number' ? Number(value) : value];
  return Object.fromEntries(set.map(pair));
}

fields.addEventListener('input', () => keep('localStorage', 'q4.settings', JSON.stringify(settings())));
fields.addEventListener('submit', (event) => event.preventDefault());
$('reset').addEventListener('click', () => {
  for (const field of fields.querySelectorAll('input')) field.value = '';
  fields.dispatchEvent(new Event('input'));
});

function fill() {
  const stored = parsed(kept('localStorage', 'q4.settings')) ?? {};
  for (const field of fields.elements) {
    if (field.name in stored) field.value = stored[field.name];
  }
}

for (const dialog of document.querySelectorAll('dialog')) {
  // A click beside a dialog is a click on its backdrop, which counts as the dialog itself.
  dialog.addEventListener('click', ({ target }) => {
    if (target === dialog || target.closest('[data-close]')) dialog.close();
  });
}
$('open-settings').addEventListener('click', () => $('settings').showModal());
$('open-plan').addEventListener('click', () => $('plan').showModal());
$('change-key').addEventListener('click', () => askKey('It is sent with every request to this server.'));

let asking = null;

/** Asks for the key and says whether one was given. */
function askKey(why) {
  asking ??= new Promise((resolve) => {
    $('key-why').textContent = why;
    $('key-field').value = secret ?? '';
    $('key-form').onsubmit = (event) => {
      event.preventDefault();
      secret = $('key-field').value.trim() || null;
      keep('sessionStorage', 'q4.key', secret);
      $('key').close('given');
    };
    $('key').returnValue = '';
    $('key').addEventListener('close', () => {
      asking = null;
      resolve($('key').returnValue === 'given' && secret !== null);
    }, { once: true });
    $('key').showModal();
  });
  return asking;
}

// The start

/** Asks once who is there. Nothing is asked again unless somebody wants it. */
async function greet() {
  const list = json('/v1/models').then(({ data }) => { models = (data ?? []).map(({ id }) => id); });
  const [listed, ready, explained] = await Promise.allSettled([list, get('/ready'), json('/v1/q4/explain')]);
  const doc = explained.value ?? {};
  const name = doc.model ?? models[0];
  if (name) {
    document.title = `${name} · q4`;
    $('model').textContent = name;
    $('machine').textContent = [doc.device, doc.isa].filter(Boolean).join(', ');
    $('greeting').textContent = `Ask ${name} something.`;
  }
  $('open-plan').hidden = !name;
  const unknown = el('p', {}, `The server does not say how it computes. ${explained.reason?.message ?? ''}`);
  $('plan-body').replaceChildren(...(explained.value ? plan(doc) : [unknown]));
  say('');
  if (listed.reason) say(listed.reason.message, 'Try again', greet);
  else if (ready.reason) say(`The server is not ready: ${ready.reason.detail}`, 'Try again', greet);
}

fill();
restore();
show();
if (!touch) prompt.focus();
greet();
