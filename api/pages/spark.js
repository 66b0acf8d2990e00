/** The last minutes of a number as a line, as long as this page has watched it. */

const SVG = "http://www.w3.org/2000/svg";
const SPAN_MS = 300_000;

export class Spark {
  constructor(label) {
    this.points = [];
    this.label = label;
    this.svg = document.createElementNS(SVG, "svg");
    for (const [name, value] of Object.entries({ class: "spark", role: "img", preserveAspectRatio: "none" })) {
      this.svg.setAttribute(name, value);
    }
    this.below = document.createElementNS(SVG, "path");
    this.below.setAttribute("class", "below");
    this.line = document.createElementNS(SVG, "path");
    this.svg.append(this.below, this.line);
  }

  add(atMs, value) {
    this.points.push([atMs, value]);
    while (this.points[0][0] < atMs - SPAN_MS) this.points.shift();
    const since = this.points[0][0], span = Math.max(60_000, atMs - since);
    const top = Math.max(1, ...this.points.map(([, each]) => each));
    const at = ([time, each]) => `${((time - since) / span * 300).toFixed(1)} ${(42 - (each / top) * 38).toFixed(1)}`;
    const path = `M${this.points.map(at).join("L")}`;
    this.svg.setAttribute("viewBox", "0 0 300 46");
    this.line.setAttribute("d", path);
    this.below.setAttribute("d", `${path}V46H0Z`);
    this.svg.setAttribute("aria-label", `${this.label}: ${value}, at most ${top} of late`);
  }
}
