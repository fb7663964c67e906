// Draws the figures of #charts into the places that have their names, in the page's colours. One a turn of the event
// loop, so that the page can be read while they appear; body[data-charts] says "drawn" after the last.
"use strict";

const charts = JSON.parse(document.getElementById("charts").textContent);
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const options = { responsive: true, displaylogo: false, displayModeBar: false };

function colours(figure) {
  const of = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const change = { "font.color": of("--text"), "xaxis.gridcolor": of("--line"), "hoverlabel.bgcolor": of("--page") };
  change["hoverlabel.font.color"] = of("--text");
  (figure.layout.shapes || []).forEach((_, i) => { change[`shapes[${i}].line.color`] = of("--text"); });
  return change;
}

// Plotly takes the place's own height when a window is resized, which without this would be the least that the style allows.
function setHeight(place, height) {
  place.style.height = height ? `${height}px` : "";
}

async function draw(name) {
  const figure = structuredClone(charts[name]); // Plotly writes into what it is given; toggle needs the original
  const clear = { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { size: 12 } };
  const place = document.getElementById(name);
  await Plotly.newPlot(place, figure.data, { ...figure.layout, ...clear }, options);
  await Plotly.relayout(place, colours(figure));
}

// A button shows all ranks of its timeline, and the first few again.
function toggle(button) {
  const place = document.getElementById(button.dataset.chart);
  const { data, layout, all } = charts[button.dataset.chart];
  const few = button.dataset.all === "shown";
  const visible = data.map((trace) => !few || trace.visible);
  const rows = few ? { range: layout.yaxis.range, height: layout.height } : all;
  [button.textContent, button.dataset.other] = [button.dataset.other, button.textContent];
  button.dataset.all = few ? "" : "shown";
  setHeight(place, rows.height);
  // Plotly takes a height that is set for the end of its own sizing, and would keep the width at any window's.
  return Plotly.update(place, { visible }, { "yaxis.range": rows.range, height: rows.height, autosize: true });
}

async function drawAll() {
  for (const name of Object.keys(charts)) {
    await draw(name);
    await new Promise((next) => { setTimeout(next); });
  }
  document.body.dataset.charts = "drawn";
}

dark.addEventListener("change", () => {
  Object.entries(charts).forEach(([name, figure]) => Plotly.relayout(name, colours(figure)));
});
document.querySelectorAll("button[data-chart]").forEach((button) => {
  button.addEventListener("click", () => toggle(button));
});
drawAll();
