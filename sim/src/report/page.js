"use strict";
// Reads values off the drawings under the pointer. The page is complete without it.
(() => {
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  document.body.append(tip);

  const axis = (text) => {
    const [lo, hi, kind] = text.split(",");
    return { lo: +lo, hi: +hi, log: kind === "log" };
  };
  const valueAt = (a, t) => (a.log ? a.lo * Math.pow(a.hi / a.lo, t) : a.lo + t * (a.hi - a.lo));
  const round = (v) => (Math.abs(v) >= 100 ? v.toFixed(0) : String(+v.toPrecision(3)));

  const show = (event, text) => {
    tip.textContent = text;
    tip.hidden = !text;
    const box = tip.getBoundingClientRect();
    const x = event.clientX + 16 + box.width > innerWidth ? event.clientX - 16 - box.width : event.clientX + 16;
    const y = Math.min(event.clientY + 14, innerHeight - box.height - 6);
    tip.style.left = Math.max(4, x) + "px";
    tip.style.top = Math.max(4, y) + "px";
  };

  const place = (svg, event) => {
    const box = svg.getBoundingClientRect();
    const view = svg.viewBox.baseVal;
    return [((event.clientX - box.left) / box.width) * view.width, ((event.clientY - box.top) / box.height) * view.height];
  };

  const pointsOf = (path) => {
    path.points ??= [...path.getAttribute("d").matchAll(/(-?[\d.]+),(-?[\d.]+)/g)].map((m) => [+m[1], +m[2]]);
    return path.points;
  };

  for (const svg of document.querySelectorAll("svg.chart")) {
    const [left, top, wide, high] = svg.dataset.frame.split(",").map(Number);
    const x = axis(svg.dataset.x);
    const y = axis(svg.dataset.y);
    const cursor = svg.querySelector("path.axis").cloneNode();
    cursor.setAttribute("class", "cursor");
    cursor.removeAttribute("d");
    svg.append(cursor);
    svg.addEventListener("pointermove", (event) => {
      const [at] = place(svg, event);
      const share = (at - left) / wide;
      if (share < 0 || share > 1) return;
      cursor.setAttribute("d", `M${at},${top}v${high}`);
      const rows = [];
      for (const path of svg.querySelectorAll("path[data-name]")) {
        const points = pointsOf(path);
        if (!points.length || getComputedStyle(path).display === "none") continue;
        const near = points.reduce((a, b) => (Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a));
        if (Math.abs(near[0] - at) > 12) continue;
        rows.push(path.dataset.name + ": " + round(valueAt(y, 1 - (near[1] - top) / high)) + svg.dataset.yUnit);
      }
      show(event, rows.length ? svg.dataset.xName + ": " + round(valueAt(x, share)) + "\n" + rows.join("\n") : "");
    });
    svg.addEventListener("pointerleave", () => {
      cursor.removeAttribute("d");
      tip.hidden = true;
    });
  }

  for (const cells of document.querySelectorAll("svg.cells")) {
    const names = cells.dataset.rows.split(",");
    const { span, columns } = cells.ownerSVGElement.dataset;
    cells.addEventListener("pointermove", (event) => {
      const box = cells.querySelector(".bed").getBoundingClientRect();
      const row = Math.floor(((event.clientY - box.top) / box.height) * names.length);
      const column = Math.floor(((event.clientX - box.left) / box.width) * columns);
      const level = /h(\d)/.exec(event.target.getAttribute("class") || "");
      const share = !level ? "about 0 %" : level[1] === "9" ? "over 100 %" : "about " + level[1] * 12.5 + " %";
      const second = (n) => Math.round((n * span) / columns);
      show(event, `instance ${names[row] ?? ""}\n${second(column)}–${second(column + 1)} s\n${share}`);
    });
    cells.addEventListener("pointerleave", () => (tip.hidden = true));
  }
})();
