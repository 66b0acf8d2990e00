/** Elements made by name and filled with text, and lists of them that follow data without being made anew. */

/** `element("td", { class: "n" }, "7")`; nothing of this can become markup. */
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [attribute, value] of Object.entries(attributes)) made.setAttribute(attribute, value);
  made.append(...children);
  return made;
}

/** Set a text, but only if it is another: what is selected or being read stays. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Make `parent` hold one child for each item, in their order; a child stays with its key. */
export function follow(parent, items, keyOf, make, update) {
  const old = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  const kept = new Set();
  let at = parent.firstElementChild;
  for (const item of items) {
    const key = String(keyOf(item)), known = old.get(key), child = known && !kept.has(known) ? known : make(item);
    kept.add(child);
    child.dataset.key = key;
    update(child, item);
    if (child === at) at = at.nextElementSibling;
    else parent.insertBefore(child, at);
  }
  for (const child of [...parent.children]) if (!kept.has(child)) child.remove();
}

/** Rows of text; `cellsOf` answers `[text, class]` or a text for each cell. */
export function rows(body, items, keyOf, cellsOf) {
  const cells = (item) => cellsOf(item).map((cell) => [cell].flat());
  const make = (item) => element("tr", {}, ...cells(item).map(([, kind]) => element("td", kind ? { class: kind } : {})));
  follow(body, items, keyOf, make, (row, item) => cells(item).forEach(([text], index) => say(row.cells[index], String(text))));
}
