/** When each token came, as ticks on a line; the time without a connection is a gap with a colour of its own. */

const SVG = "http://www.w3.org/2000/svg";
const SPANS = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 3600].map((seconds) => seconds * 1000);

export function drawStrip(svg, label, run) {
  const now = run.isOver ? (run.times.at(-1) ?? 0) : run.elapsed;
  const span = SPANS.find((each) => each >= now) ?? now;
  svg.setAttribute("viewBox", `0 0 ${span} 32`);
  const ticks = run.times.map((time) => `M${time.toFixed(1)} 6V26`).join("");
  const gaps = run.lost.map(([from, to]) => rect("gap", from, (to ?? run.elapsed) - from));
  const line = document.createElementNS(SVG, "path");
  line.setAttribute("d", ticks || "M0 0");
  svg.replaceChildren(...gaps, line);
  label.textContent = `${span / 1000} s`;
  svg.setAttribute("aria-label", `${run.times.length} pieces of text in time, ${run.lost.length} breaks of the connection`);
}

function rect(name, x, width) {
  const made = document.createElementNS(SVG, "rect");
  const set = { class: name, x: x.toFixed(1), width: Math.max(width, 1).toFixed(1), y: 2, height: 28 };
  for (const [attribute, value] of Object.entries(set)) made.setAttribute(attribute, value);
  return made;
}
