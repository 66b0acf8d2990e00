/** Markdown as it streams, as DOM nodes: a subset, in which text can only ever become text.
 *
 * Nothing here makes markup of a string: elements are made by name from a fixed list, words by `createTextNode`, and of
 * what the model wrote only a link's address becomes an attribute, once it is known to be http, https or mailto.
 */

const MAX_DEPTH = 6;
const PLAIN_FROM = 4000; // characters of one paragraph; beyond, its marks stay as they are

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6}) +(.+)$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const ITEM = /^( {0,7})(?:([-*+])|(\d{1,9})[.)])(?: +(.*)|$)/;
const TABLE_RULE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const INLINE =
  /\\([!-/:-@[-`{-~])|(`+)([^`]|[^`][\s\S]*?[^`])\2(?!`)|(\*\*|__)(?=\S)([\s\S]+?)\4|(\*|\b_)(?=[^\s*_])([\s\S]*?[^\s*])\6(?!\w)|~~(?=\S)([\s\S]+?)~~|!?\[([^\]]*)\]\(([^()\s]+)(?:\s+"[^"]*")?\)|(https?:\/\/[^\s<>()"'*_`]*[^\s<>()"'*_`.,;:!?])|( {2,}\n)/;

/** Shows text that comes in pieces inside `root`; blocks that are complete are not touched again. */
export class Markdown {
  constructor(root) {
    this.root = root;
    this.clear();
  }

  clear() {
    this.root.replaceChildren();
    this.source = "";
    this.open = [];
  }

  push(text) {
    this.source += text;
    for (const node of this.open) node.remove();
    const end = completeUpTo(this.source);
    if (end) this.root.append(...blocks(this.source.slice(0, end)));
    this.source = this.source.slice(end);
    this.open = blocks(this.source);
    this.root.append(...this.open);
  }
}

/** Where the last block begins that may still change: after a blank line that no fence, list or quote goes over. */
function completeUpTo(source) {
  let end = 0, at = 0, fence = "", wasBlank = false;
  for (const line of source.split("\n").slice(0, -1)) {
    const mark = FENCE.exec(line)?.[1];
    if (!fence && wasBlank && /^\S/.test(line) && !ITEM.test(line)) end = at;
    if (mark && !fence) fence = mark;
    else if (fence && line.trim().startsWith(fence)) fence = "";
    wasBlank = !line.trim();
    at += line.length + 1;
  }
  return end;
}

/** The nodes of a text. */
export function blocks(text, depth = 0) {
  if (depth > MAX_DEPTH) return [element("p", text)];
  const lines = text.split("\n"), nodes = [];
  while (lines.length) {
    if (!lines[0].trim()) lines.shift();
    else nodes.push(block(lines, depth));
  }
  return nodes;
}

function block(lines, depth) {
  const fence = FENCE.exec(lines[0]), heading = HEADING.exec(lines[0]);
  if (fence) return code(lines, fence[1], fence[2]);
  if (heading) return lines.shift(), element(`h${Math.min(6, heading[1].length + 2)}`, ...inline(heading[2].trim().replace(/ #+$/, "")));
  if (RULE.test(lines[0])) return lines.shift(), element("hr");
  if (QUOTE.test(lines[0])) {
    return element("blockquote", ...blocks(take(lines, QUOTE).map((line) => QUOTE.exec(line)[1]).join("\n"), depth + 1));
  }
  if (ITEM.test(lines[0])) return list(lines, depth);
  if (lines.length > 1 && lines[0].includes("|") && TABLE_RULE.test(lines[1])) return table(lines);
  return element("p", ...inline(paragraph(lines)));
}

function take(lines, pattern) {
  const taken = [];
  while (lines.length && pattern.test(lines[0])) taken.push(lines.shift());
  return taken;
}

function paragraph(lines) {
  const taken = [lines.shift()];
  const begins = (line) => [FENCE, HEADING, RULE, QUOTE].some((kind) => kind.test(line)) || /^ {0,3}[-*+] /.test(line);
  while (lines.length && lines[0].trim() && !begins(lines[0])) taken.push(lines.shift());
  return taken.join("\n");
}

function code(lines, mark, language) {
  lines.shift();
  const taken = [];
  while (lines.length && !lines[0].trim().startsWith(mark)) taken.push(lines.shift());
  lines.shift();
  const inner = element("code", taken.join("\n"));
  if (language) inner.dataset.language = language;
  const outer = element("pre", inner);
  outer.tabIndex = 0; // it scrolls, also by keys
  return outer;
}

/** Items of one kind and depth; what is indented below an item, or follows it without a blank line, is its own. */
function list(lines, depth) {
  const [, indent, bullet, number] = ITEM.exec(lines[0]), items = [];
  const isMine = (found) => found && found[1].length === indent.length && Boolean(found[2]) === Boolean(bullet);
  while (lines.length && isMine(ITEM.exec(lines[0]))) {
    const own = [ITEM.exec(lines.shift())[4] ?? ""];
    for (;;) {
      const isBlank = lines.length > 1 && !lines[0].trim();
      const next = isBlank ? lines[1] : lines[0];
      if (next === undefined || (!isBlank && !next.trim())) break;
      const isDeeper = next.search(/\S/) > indent.length + 1;
      if (!isDeeper && (isBlank || ITEM.test(next) || [FENCE, HEADING, RULE, QUOTE].some((kind) => kind.test(next)))) break;
      if (isBlank) own.push(lines.shift());
      own.push(isDeeper ? lines.shift().replace(/^ {2,4}/, "") : lines.shift());
    }
    while (lines.length > 1 && !lines[0].trim() && isMine(ITEM.exec(lines[1]))) lines.shift();
    const inner = blocks(own.join("\n"), depth + 1);
    const isTight = inner.length && inner[0].tagName === "P";
    items.push(element("li", ...(isTight ? [...inner[0].childNodes, ...inner.slice(1)] : inner)));
  }
  const made = element(bullet ? "ul" : "ol", ...items);
  if (number && number !== "1") made.start = Number(number);
  return made;
}

function table(lines) {
  const cells = (line, name) => {
    const parts = line.trim().replace(/^\||\|$/g, "").split("|");
    return element("tr", ...parts.map((part) => element(name, ...inline(part.trim()))));
  };
  const head = element("thead", cells(lines.shift(), "th"));
  lines.shift();
  const rows = [];
  while (lines.length && lines[0].includes("|")) rows.push(cells(lines.shift(), "td"));
  return element("table", head, element("tbody", ...rows));
}

/** The nodes of a line: emphasis, code, links, and the text between them. */
function inline(text, depth = 0) {
  const nodes = [];
  for (let rest = text; rest; ) {
    const found = depth < MAX_DEPTH && text.length < PLAIN_FROM ? INLINE.exec(rest) : null;
    if (!found) return nodes.push(document.createTextNode(rest)), nodes;
    if (found.index) nodes.push(document.createTextNode(rest.slice(0, found.index)));
    nodes.push(mark(found, depth + 1));
    rest = rest.slice(found.index + found[0].length);
  }
  return nodes;
}

function mark(found, depth) {
  const [whole, escaped, , coded, , strong, , emphasis, struck, label, target, address, broken] = found;
  if (escaped) return document.createTextNode(escaped);
  if (coded) return element("code", coded);
  if (strong) return element("strong", ...inline(strong, depth));
  if (emphasis) return element("em", ...inline(emphasis, depth));
  if (struck) return element("del", ...inline(struck, depth));
  if (target) return link(target, inline(label, depth), whole);
  if (address) return link(address, [document.createTextNode(address)], whole);
  return broken ? element("br") : document.createTextNode(whole);
}

/** A link that opens elsewhere; what is not an address that is safe to follow stays the text that it was. */
function link(target, label, whole) {
  const address = URL.canParse(target) ? new URL(target) : undefined;
  if (!["http:", "https:", "mailto:"].includes(address?.protocol)) return document.createTextNode(whole);
  const anchor = element("a", ...(label.length ? label : [document.createTextNode(target)]));
  Object.assign(anchor, { href: address.href, target: "_blank", rel: "noopener noreferrer nofollow" });
  return anchor;
}

function element(name, ...children) {
  const made = document.createElement(name);
  made.append(...children);
  return made;
}
