// Markdown as language models write it, built from nodes and text: nothing of an answer is parsed as HTML,
// and no picture is fetched.

const FENCE = /^\s*(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(\s+|$)/;
const DASHES = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const LABEL = String.raw`!?\[((?:[^[\]\\]|\\.|\[[^[\]]*\])*)\]`;
const TARGET = String.raw`\(\s*<?((?:[^\s()<>]|\([^\s()]*\))*)>?(?:\s+["'][^)]*)?\s*\)`;
const LINK = new RegExp(LABEL + TARGET, 'y');
const BARE = /https?:\/\/[^\s<>"'`*|]+/y;
const SPECIAL = /[\\`*_~[!\n]|https?:\/\//g;
// Brackets keep their backslash: it is more often TeX than an escape.
const ESCAPED = /[!-'*-/:-@^-`{-~\\]/;
// Quotes in quotes deeper than this stay text, so that no answer can exhaust the stack.
const DEEPEST = 12;

/** A node with its properties, attributes where it has no such property, and children. */
export function el(name, props = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(props)) {
    if (key in node) node[key] = value;
    else node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

const drawn = new WeakMap();

/** Makes `parent` show `text`. Blocks that did not change keep their nodes, with focus and selection. */
export function draw(parent, text) {
  const list = blocks(text.split('\n'), 0);
  list.forEach((block, i) => {
    const old = parent.children[i];
    const before = old && drawn.get(old);
    const source = block.lines.join('\n');
    if (before?.kind === block.kind && before.source === source) return;
    const grows = before?.kind === 'fence' && before.source.startsWith(`${block.lines[0]}\n`);
    if (grows && block.kind === 'fence') {
      old.querySelector('code').textContent = fenced(block.lines);
      drawn.set(old, { kind: block.kind, source });
      return;
    }
    const node = build(block, 0);
    drawn.set(node, { kind: block.kind, source });
    if (old) old.replaceWith(node);
    else parent.append(node);
  });
  while (parent.children.length > list.length) parent.lastElementChild.remove();
}

function blocks(lines, depth) {
  const list = [];
  for (let i = 0; i < lines.length;) {
    const kind = kindOf(lines, i, depth);
    const end = kind ? endOf[kind](lines, i) : i + 1;
    if (kind) list.push({ kind, lines: lines.slice(i, end) });
    i = end;
  }
  return list;
}

function kindOf(lines, i, depth) {
  const line = lines[i];
  if (!line.trim()) return null;
  if (depth > DEEPEST) return 'text';
  if (FENCE.test(line)) return 'fence';
  if (HEADING.test(line)) return 'heading';
  if (RULE.test(line)) return 'rule';
  if (QUOTE.test(line)) return 'quote';
  if (ITEM.test(line)) return 'list';
  if (line.includes('|') && lines[i + 1]?.includes('-') && DASHES.test(lines[i + 1])) return 'table';
  return 'text';
}

/** The index of the line behind a block that starts at line `i`. */
const endOf = {
  fence(lines, i) {
    const mark = FENCE.exec(lines[i])[1];
    const closes = (line) => line.trim().startsWith(mark) && !line.replaceAll(mark[0], '').trim();
    let end = i + 1;
    while (end < lines.length && !closes(lines[end])) end++;
    return Math.min(end + 1, lines.length);
  },
  heading: (lines, i) => i + 1,
  rule: (lines, i) => i + 1,
  quote: (lines, i) => while_(lines, i, (line) => QUOTE.test(line)),
  table: (lines, i) => while_(lines, i, (line) => line.includes('|')),
  list(lines, i) {
    const base = ITEM.exec(lines[i]);
    const belongs = (j) => {
      const item = ITEM.exec(lines[j]);
      const sibling = item && item[1].length < base[1].length + 2;
      return sibling ? family(item) === family(base) && !RULE.test(lines[j]) : /^\s{2}/.test(lines[j]);
    };
    let end = i + 1;
    for (; end < lines.length; end++) {
      if (lines[end].trim()) {
        const lazy = lines[end - 1].trim() && kindOf(lines, end, 0) === 'text';
        if (!belongs(end) && !lazy) break;
      } else {
        const next = lines.findIndex((line, j) => j > end && line.trim());
        if (next < 0 || !belongs(next)) break;
      }
    }
    return end;
  },
  text(lines, i) {
    let end = i + 1;
    while (end < lines.length && !interrupts(lines, end)) end++;
    return end;
  },
};

function while_(lines, i, holds) {
  while (i < lines.length && holds(lines[i])) i++;
  return i;
}

/** Bullets of one sign are a list; numbers with one sign behind them are another. */
const family = (item) => item[2].at(-1);

/** Of numbers only 1 ends a paragraph: a line may happen to begin with a year. */
function interrupts(lines, i) {
  const kind = kindOf(lines, i, 0);
  if (kind === 'list') return !/^\s*\d/.test(lines[i]) || /^\s*1[.)]/.test(lines[i]);
  return kind !== 'text';
}

function build({ kind, lines }, depth) {
  switch (kind) {
    case 'fence': return code(fenced(lines), FENCE.exec(lines[0])[2].trim().split(/\s/)[0]);
    case 'rule': return el('hr');
    case 'heading': return heading(HEADING.exec(lines[0]));
    case 'quote': return el('blockquote', {}, ...nested(lines.map((line) => line.replace(QUOTE, '')), depth));
    case 'list': return list(lines, depth);
    case 'table': return table(lines);
    default: return el('p', {}, ...inline(lines.map((line) => line.trimStart()).join('\n').trimEnd()));
  }
}

const nested = (lines, depth) => blocks(lines, depth + 1).map((block) => build(block, depth + 1));

function fenced(lines) {
  const [, mark] = FENCE.exec(lines[0]);
  const indent = lines[0].length - lines[0].trimStart().length;
  const closed = lines.length > 1 && lines.at(-1).trim().startsWith(mark)
    && !lines.at(-1).replaceAll(mark[0], '').trim();
  const body = lines.slice(1, closed ? -1 : undefined);
  return body.map((line) => line.slice(Math.min(indent, line.length - line.trimStart().length))).join('\n');
}

function code(text, language) {
  const copy = el('button', { type: 'button', 'data-do': 'copy-code', 'aria-label': 'Copy code' }, 'Copy');
  const label = language ? `Code, ${language}` : 'Code';
  return el('figure', { className: 'code' },
    el('figcaption', {}, el('span', {}, language || 'text'), copy),
    // A long line scrolls, and a keyboard must reach what scrolls.
    el('pre', { tabIndex: 0, role: 'region', 'aria-label': label }, el('code', {}, text)));
}

// The page has the first two levels itself.
function heading([, marks, text]) {
  return el(`h${Math.min(marks.length + 2, 6)}`, {}, ...inline(text.replace(/\s#+\s*$/, '').trim()));
}

function list(lines, depth) {
  const base = ITEM.exec(lines[0]);
  const items = [];
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && item[1].length < base[1].length + 2) {
      items.push({ offset: item[1].length + item[2].length + 1, lines: [line.slice(item[0].length)] });
    } else {
      const indent = line.length - line.trimStart().length;
      items.at(-1).lines.push(line.slice(Math.min(indent, items.at(-1).offset)));
    }
  }
  const loose = lines.some((line) => !line.trim());
  const children = items.map((item) => el('li', {}, ...content(item.lines, loose, depth)));
  if (/\d/.test(base[2])) return el('ol', { start: parseInt(base[2], 10) }, ...children);
  return el('ul', {}, ...children);
}

function content(lines, loose, depth) {
  lines[0] = lines[0].replace(/^\[( |x|X)\] /, (_, mark) => (mark === ' ' ? '☐ ' : '☑ '));
  const opened = (node) => (node.tagName === 'P' && !loose ? [...node.childNodes] : [node]);
  return nested(lines, depth).flatMap(opened);
}

function table([head, dashes, ...rows]) {
  const cells = (row) => row.trim().replace(/^\||\|$/g, '').split(/(?<!\\)\|/).map((cell) => cell.trim());
  const sides = cells(dashes).map((cell) => (cell.endsWith(':') ? 'right' : ''));
  const row = (name, text) => el('tr', {}, ...cells(text).slice(0, sides.length).map((cell, i) =>
    el(name, { className: sides[i] }, ...inline(cell.replaceAll('\\|', '|')))));
  const body = el('tbody', {}, ...rows.map((text) => row('td', text)));
  return el('div', { className: 'table', tabIndex: 0, role: 'region', 'aria-label': 'Table' },
    el('table', {}, el('thead', {}, row('th', head)), body));
}

/** The nodes of a line of text. */
function inline(text, links = true, depth = 0) {
  const nodes = [];
  const unclosed = new Set();
  let plain = '';
  let at = 0;
  const push = (node) => {
    if (plain) nodes.push(plain);
    plain = '';
    nodes.push(node);
  };
  while (at < text.length) {
    SPECIAL.lastIndex = at;
    const found = depth > DEEPEST ? null : SPECIAL.exec(text);
    const start = found ? found.index : text.length;
    plain += text.slice(at, start);
    if (!found) break;
    const span = spanAt(text, start, links, depth, unclosed);
    if (span.node) push(span.node);
    else plain += span.text;
    at = span.end;
  }
  if (plain) nodes.push(plain);
  return nodes;
}

/** What begins at a special character: a node, or text that stands for itself. */
function spanAt(text, at, links, depth, unclosed) {
  const sign = text[at];
  const itself = { text: sign, end: at + 1 };
  if (sign === '\n') return { node: el('br'), end: at + 1 };
  const next = text[at + 1] ?? '';
  if (sign === '\\') return ESCAPED.test(next) ? { text: next, end: at + 2 } : itself;
  if (sign === '`') return codeSpan(text, at);
  if (sign === '*' || sign === '_' || sign === '~') return emphasis(text, at, links, depth, unclosed);
  if (!links) return itself;
  if (sign === '[' || sign === '!') {
    const [all, label, href] = matchAt(LINK, text, at) ?? [];
    const node = all && link(href, inline(label || href, false, depth + 1));
    return node ? { node, end: at + all.length } : itself;
  }
  const href = bare(matchAt(BARE, text, at)?.[0] ?? sign);
  const node = link(href, [href]);
  return node ? { node, end: at + href.length } : itself;
}

function matchAt(pattern, text, at) {
  pattern.lastIndex = at;
  return pattern.exec(text);
}

/** An address without the punctuation of the sentence it stands in. */
function bare(href) {
  const cut = href.replace(/[.,;:!?_~]+$/, '');
  return cut.endsWith(')') && !cut.includes('(') ? bare(cut.slice(0, -1)) : cut;
}

/** Null for everything but http and https. */
function link(href, children) {
  const url = URL.canParse(href) ? new URL(href) : null;
  if (url?.protocol !== 'http:' && url?.protocol !== 'https:') return null;
  return el('a', { href: url.href, rel: 'noopener noreferrer', target: '_blank' }, ...children);
}

function codeSpan(text, at) {
  const ticks = '`'.repeat(runAt(text, at));
  const from = at + ticks.length;
  for (let end = text.indexOf(ticks, from); end >= 0; end = text.indexOf(ticks, end)) {
    const run = runAt(text, end);
    if (run === ticks.length) {
      const body = text.slice(from, end).replaceAll('\n', ' ');
      const inner = body.trim() && body.startsWith(' ') && body.endsWith(' ') ? body.slice(1, -1) : body;
      return { node: el('code', {}, inner), end: end + run };
    }
    end += run;
  }
  return { text: ticks, end: at + ticks.length };
}

/** How often the sign at `at` is repeated. */
function runAt(text, at) {
  let length = 1;
  while (text[at + length] === text[at]) length++;
  return length;
}

const TAGS = { 1: ['em'], 2: ['strong'], 3: ['strong', 'em'] };

function emphasis(text, at, links, depth, unclosed) {
  const sign = text[at];
  const length = runAt(text, at);
  const mark = sign.repeat(length);
  const literal = { text: mark, end: at + length };
  const inside = sign === '_' && /[\p{L}\p{N}]/u.test(text[at - 1] ?? '');
  const opens = /\S/.test(text[at + length] ?? '') && !inside && (sign === '~' ? length === 2 : length <= 3);
  if (!opens || unclosed.has(mark)) return literal;
  const end = closing(text, at + length, sign, length);
  if (end < 0) {
    // None further on either: a row of stars must not cost the square of its length.
    unclosed.add(mark);
    return literal;
  }
  const children = inline(text.slice(at + length, end), links, depth + 1);
  const tags = sign === '~' ? ['del'] : TAGS[length];
  const node = tags.reduceRight((inner, tag) => [el(tag, {}, ...inner)], children)[0];
  return { node, end: end + length };
}

/** Where a run of `length` signs closes; of three signs some may close what was opened inside. */
function closing(text, from, sign, length) {
  for (let at = text.indexOf(sign, from); at >= 0; at = text.indexOf(sign, at)) {
    const run = runAt(text, at);
    const word = sign === '_' && /[\p{L}\p{N}]/u.test(text[at + run] ?? '');
    if ((run === length || (run === 3 && length < 3)) && /\S/.test(text[at - 1]) && !word && at > from) {
      return at + run - length;
    }
    at += run;
  }
  return -1;
}
