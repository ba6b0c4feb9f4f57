// Nodes: made as values, and put where they belong.
//
// `show` changes what is there into what should be there and touches only what differs, so selections, focus
// and running animations survive a second. Values become text and attributes, never markup.

import { sum } from "./numbers.js";

function make(space, name, attributes, children) {
  const node = document.createElementNS(`http://www.w3.org/${space}`, name);
  for (const [key, value] of Object.entries(attributes ?? {}))
    if (value !== null && value !== false) node.setAttribute(key, value);
  node.append(...children.flat().filter((child) => child !== null));
  return node;
}
export const html = (name, attributes, ...children) => make("1999/xhtml", name, attributes, children);
export const svg = (name, attributes, ...children) => make("2000/svg", name, attributes, children);
export const text = (x, y, words, kind = "") => svg("text", { x, y, class: kind }, words);

/** Change what stands in `parent` into `nodes`, touching only what differs. */
export function show(parent, ...nodes) {
  const wanted = nodes.flat().filter((node) => node !== null);
  wanted.forEach((node, i) => {
    const old = parent.childNodes[i];
    if (!old) parent.append(node);
    else if (old.nodeName !== node.nodeName || old.nodeType !== node.nodeType) old.replaceWith(node);
    else if (old.nodeType === Node.TEXT_NODE) {
      if (old.data !== node.data) old.data = node.data;
    } else become(old, node);
  });
  while (parent.childNodes.length > wanted.length) parent.lastChild.remove();
}

function become(old, node) {
  for (const { name } of [...old.attributes]) if (!node.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of node.attributes)
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  show(old, ...node.childNodes);
}

/** The same for the element of this id; words may stand for nodes. */
export const put = (id, ...nodes) =>
  show(
    document.getElementById(id),
    ...nodes.map((node) => (typeof node === "string" ? document.createTextNode(node) : node)),
  );

export const cell = (words, kind = null) => html("td", { class: kind }, words);
export const swatch = (kind, words) =>
  html(
    "li",
    {},
    svg(
      "svg",
      { class: "swatch", viewBox: "0 0 12 12", "aria-hidden": "true" },
      svg("rect", { width: 12, height: 12, rx: 3, class: kind }),
    ),
    words,
  );

/** A bar of `parts` (class, value, words), as long as `width`, drawn as shares of `total`. */
export function bar(parts, total, width, height) {
  let x = 0;
  return parts
    .filter(([, value]) => value > 0)
    .map(([kind, value, words]) => {
      const length = total ? (width * value) / total : 0;
      const rect = svg(
        "rect",
        { x: x.toFixed(2), width: length.toFixed(2), height, class: kind },
        svg("title", {}, words),
      );
      x += length;
      return rect;
    });
}

export function smallBar(parts, words) {
  const total = sum(parts.map(([, value]) => value));
  return svg(
    "svg",
    {
      class: "small-bar",
      viewBox: "0 0 120 10",
      preserveAspectRatio: "none",
      role: "img",
      "aria-label": words,
    },
    svg("rect", { width: 120, height: 10, class: "track" }),
    bar(parts, total, 120, 10),
  );
}
