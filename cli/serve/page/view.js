// What is drawn: the turns of a conversation, and the panel that says who computes the answers.
import { draw, el } from '/markdown.js';

/** The article of one message. `node.draw()` brings it up to what the message says now. */
export function turn(message) {
  return message.role === 'user' ? question(message) : answer(message);
}

function question(message) {
  const text = el('div', { className: 'text' });
  const actions = el('div', { className: 'actions' }, action('edit', 'Edit'));
  const node = el('article', { className: 'turn user', 'aria-label': 'You' }, text, actions);
  node.draw = () => text.replaceChildren(message.text);
  /** Puts a field in the place of the text; `done` gets the new text, or null. */
  node.edit = (done) => {
    const field = el('textarea', { value: message.text, rows: 2, 'aria-label': 'Edit your message' });
    const close = (value) => {
      node.classList.remove('editing');
      node.draw();
      done(value);
    };
    const button = (className, label, onclick) => el('button', { type: 'button', className, onclick }, label);
    const cancel = button('plain', 'Cancel', () => close(null));
    const send = button('primary', 'Send', () => close(field.value));
    field.addEventListener('keydown', (event) => {
      if (event.key === 'Escape') close(null);
      else if (!sends(event)) return;
      else close(field.value);
      // Escape would stop an answer as well.
      event.stopPropagation();
      event.preventDefault();
    });
    node.classList.add('editing');
    text.replaceChildren(field, el('div', { className: 'row' }, cancel, send));
    field.focus();
    field.setSelectionRange(field.value.length, field.value.length);
  };
  node.draw();
  return node;
}

/**
 * Whether a key sends what is in a field. Not while an input method composes; and not Enter alone where there
 * is no key to start a line with but Enter.
 */
export function sends(event) {
  if (event.key !== 'Enter' || event.isComposing || event.shiftKey) return false;
  return event.ctrlKey || event.metaKey || !matchMedia('(pointer: coarse)').matches;
}

function answer(message) {
  const title = el('span');
  const thoughts = el('div', { className: 'thoughts' });
  const summary = el('summary', {}, title);
  const reasoning = el('details', { className: 'reasoning' }, summary, thoughts);
  const wait = el('p', { className: 'wait' }, 'Waiting for the first token');
  const text = el('div', { className: 'text' });
  const tools = el('div', { className: 'tools' });
  const note = el('div', { className: 'note' });
  const meta = el('span', { className: 'meta' });
  const actions = el('div', { className: 'actions' },
    meta, action('copy-answer', 'Copy'), action('again', 'Regenerate'));
  const node = el('article', { className: 'turn assistant', 'aria-label': 'Answer' },
    reasoning, wait, text, tools, note, actions);
  // Open while it streams and folded behind it, unless somebody chose otherwise.
  let chosen = false;
  summary.addEventListener('click', () => { chosen = true; });
  node.draw = () => {
    const streams = message.state === 'streaming';
    const thinks = streams && !message.text && !message.tools.length;
    reasoning.hidden = !message.reasoning;
    title.textContent = thinks ? 'Thinking' : thought(message.thought);
    if (!chosen) reasoning.open = thinks;
    // Appended, so that a selection in it and its place in a screen reader stay.
    const known = thoughts.textContent.length;
    if (message.reasoning.length > known) thoughts.append(message.reasoning.slice(known));
    draw(text, message.text);
    tools.replaceChildren(...message.tools.map(call));
    wait.hidden = !thinks || Boolean(message.reasoning);
    node.classList.toggle('streams', streams);
    remark(note, message);
    meta.textContent = streams ? '' : measures(message);
    actions.hidden = streams;
    actions.querySelector('[data-do=copy-answer]').hidden = !message.text;
  };
  node.draw();
  return node;
}

function action(name, label) {
  return el('button', { type: 'button', className: 'quiet', 'data-do': name }, label);
}

function thought(seconds) {
  return seconds ? `Thought for ${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s` : 'Thoughts';
}

function call({ name, arguments: given }) {
  let shown = given;
  try {
    shown = JSON.stringify(JSON.parse(given), null, 2);
  } catch {
    // Arguments that are still on their way, or no JSON: shown as they are.
  }
  const title = el('p', {}, 'Calls ', el('code', {}, name || 'a tool'));
  return el('div', { className: 'call' }, title, el('pre', {}, shown));
}

function remark(note, message) {
  const failed = message.state === 'failed';
  const said = [message.note, message.detail].join('\n');
  if (note.dataset.said === said) return;
  note.dataset.said = said;
  note.className = failed ? 'note failed' : 'note';
  note.hidden = !message.note;
  const parts = [el('p', {}, message.note ?? '')];
  if (message.detail) parts.push(el('p', { className: 'detail' }, message.detail));
  if (failed) parts.push(el('button', { type: 'button', className: 'plain', 'data-do': 'again' }, 'Retry'));
  note.replaceChildren(...parts);
  note.setAttribute('role', failed ? 'alert' : 'note');
}

/** `128 tokens · 24.1 tokens/s`; a count of pieces where the server did not come to count tokens. */
function measures({ tokens, pieces, rate }) {
  const count = tokens ?? pieces;
  if (!count) return '';
  const counted = `${tokens === undefined ? 'about ' : ''}${count} ${count === 1 ? 'token' : 'tokens'}`;
  return rate ? `${counted} · ${rate < 100 ? rate.toFixed(1) : Math.round(rate)} tokens/s` : counted;
}

/** The plan of the model as nodes, from what `/v1/q4/explain` says; any part of it may be missing. */
export function plan(doc) {
  const layers = doc.layers ?? [];
  const parts = [facts(doc)];
  if (layers.length) parts.push(section('Who computes', served(layers)));
  if (doc.downgraded) {
    const what = `${count(doc.downgraded, 'layer')} computed from a dense copy: every kernel was rejected.`;
    parts.push(el('p', {}, what));
  }
  const open = doc.not_reproducible ?? [];
  if (open.length) {
    const reasons = groups(open, (entry) => entry.why);
    parts.push(section('Why answers may differ', list(reasons, ([why, entries]) =>
      [el('p', {}, why), named(entries.map((entry) => entry.layer))])));
  }
  const refused = groups(layers.flatMap(refusals), (entry) => JSON.stringify(entry.shown));
  if (refused.length) {
    parts.push(section('Who was rejected, and why', list(refused, ([, entries]) => rejection(entries))));
  }
  if (layers.length) parts.push(everyLayer(layers));
  return parts;
}

function facts({ model, device, isa, reproducible }) {
  const told = { true: 'Yes: the same request and seed give the same answer', false: 'No' }[reproducible];
  const rows = { Model: model, Device: device, 'Instruction set': isa, Reproducible: told };
  return el('dl', {}, ...Object.entries(rows).filter(([, value]) => value).map(([name, value]) =>
    el('div', {}, el('dt', {}, name), el('dd', {}, String(value)))));
}

function section(title, ...children) {
  return el('section', {}, el('h3', {}, title), ...children);
}

function list(entries, show) {
  return el('ul', { className: 'entries' }, ...entries.map((entry) => el('li', {}, ...show(entry))));
}

/** Entries by what `key` says of them, in the order of their first. */
function groups(entries, key) {
  const found = new Map();
  for (const entry of entries) {
    const name = key(entry);
    found.set(name, [...(found.get(name) ?? []), entry]);
  }
  return [...found];
}

const count = (n, what) => `${n} ${what}${n === 1 ? '' : 's'}`;

function served(layers) {
  const by = groups(layers, ({ chosen, schema }) =>
    JSON.stringify([chosen?.backend ?? 'nobody', chosen?.path, schema, chosen?.activations]));
  return list(by, ([key, entries]) => {
    const [backend, path, schema, activations] = JSON.parse(key);
    const how = [path, schema, activations && `${activations} activations`].filter(Boolean).join(' · ');
    const pair = [el('b', {}, backend), el('span', {}, count(entries.length, 'layer'))];
    return [el('p', { className: 'pair' }, ...pair), el('p', { className: 'soft' }, how)];
  });
}

/** A rejection has its reason in itself or a list of them. */
function refusals({ name, rejected }) {
  return (rejected ?? []).flatMap(({ backend, reasons, ...own }) => (reasons ?? [own]).map(
    ({ code, need, have }) => ({ layer: name, shown: { backend, code, need, have } })));
}

function rejection(entries) {
  const { backend, code, need, have } = entries[0].shown;
  const pair = [el('b', {}, backend ?? 'unnamed'), el('code', {}, code ?? '')];
  const parts = [el('p', { className: 'pair' }, ...pair)];
  if (need) parts.push(el('p', {}, el('i', {}, 'need'), need));
  if (have) parts.push(el('p', {}, el('i', {}, 'have'), have));
  return [...parts, named(entries.map((entry) => entry.layer))];
}

function named(layers) {
  const names = el('p', { className: 'names' }, layers.filter(Boolean).join(', '));
  return el('details', {}, el('summary', {}, count(layers.length, 'layer')), names);
}

function everyLayer(layers) {
  const head = el('tr', {}, ...['Layer', 'Shape', 'Backend'].map((name) => el('th', { scope: 'col' }, name)));
  const rows = layers.map(({ name, n, k, chosen }) => el('tr', {}, el('td', {}, name ?? ''),
    el('td', {}, n && k ? `${n} × ${k}` : ''), el('td', {}, chosen?.backend ?? 'nobody')));
  return el('details', { className: 'all' }, el('summary', {}, 'Every layer'),
    el('div', { className: 'table', tabIndex: 0, role: 'region', 'aria-label': 'Every layer' },
      el('table', {}, el('thead', {}, head), el('tbody', {}, ...rows))));
}
