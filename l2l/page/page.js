"use strict";
(() => {
  const main = document.getElementById("main");
  const live = document.body.dataset.live || "";
  const isTouched = matchMedia("(pointer: coarse)").matches;
  let content = JSON.parse(document.getElementById("content").textContent);
  let smoothing = 5;
  let isLogarithmic = false;
  let version = "";
  const shown = new Map();  // words that were put in place

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const isNarrow = () => innerWidth < 740;

  // The mean of the last values, as many as the slider says.
  function smoothed(values) {
    const width = Math.max(1, Math.round((smoothing / 100) * values.length));
    if (width === 1) return values;
    const found = [];
    const held = [];
    let sum = 0;
    for (const value of values) {
      if (value !== null) {
        held.push(value);
        sum += value;
        if (held.length > width) sum -= held.shift();
      }
      found.push(value === null || !held.length ? null : sum / held.length);
    }
    return found;
  }

  function traces(figure) {
    return figure.traces.map((trace) =>
      trace.meta && trace.meta.smooth ? { ...trace, y: smoothed(trace.y) } : trace);
  }

  function axis(given, own) {
    return {
      gridcolor: colour("grid"), linecolor: colour("line"), zeroline: false, automargin: true,
      tickfont: { size: 11 }, ...own, ...given, title: { standoff: 8, font: { size: 12 }, ...given.title },
    };
  }

  // Over few powers of ten at round numbers; else as plotly has them.
  function logarithmicTicks(figure) {
    const own = figure.traces.filter((trace) => trace.yaxis !== "y2").flatMap((trace) => trace.y);
    const known = own.filter((value) => value > 0);
    const ends = known.reduce(([low, high], one) => [Math.min(low, one), Math.max(high, one)], [Infinity, 0]);
    const powers = known.length ? Math.log10(ends[1] / ends[0]) : 99;
    if (powers > 3) return { nticks: 6, tickformat: "~g" };
    const digits = powers < 1.2 ? [1, 1.5, 2, 3, 5, 7] : [1, 2, 5];
    const values = [];
    for (let power = Math.floor(Math.log10(ends[0])) - 1; power <= Math.log10(ends[1]) + 1; power += 1) {
      values.push(...digits.map((digit) => Number((digit * 10 ** power).toPrecision(3))));
    }
    return { tickmode: "array", tickvals: values, ticktext: values.map(String) };
  }

  function layout(name, figure) {
    const given = figure.layout;
    const yaxis = axis(given.yaxis || {}, {});
    if (name === "loss" && isLogarithmic) yaxis.type = "log";
    if (yaxis.type === "log") Object.assign(yaxis, logarithmicTicks(figure));
    const legend = isNarrow() ? { yref: "container", y: 0, yanchor: "bottom" } : { y: 1.02, yanchor: "bottom" };
    return {
      hovermode: "x unified",
      ...given,
      autosize: true,
      xaxis: axis(given.xaxis || {}, { nticks: isNarrow() ? 5 : 10 }),
      yaxis,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, -apple-system, Segoe UI, Roboto, Arial, sans-serif", size: 12, color: colour("soft") },
      hoverlabel: { bgcolor: colour("card"), bordercolor: colour("line"), font: { color: colour("ink"), size: 12 } },
      legend: { orientation: "h", x: 0, ...legend, font: { size: 11 }, bgcolor: "rgba(0,0,0,0)", traceorder: "normal" },
      margin: { l: isNarrow() ? 8 : 24, r: isNarrow() ? 8 : 16, t: 34, b: 20 },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("soft"), activecolor: colour("ink") },
      dragmode: isTouched || !figure.zooms ? false : "zoom",
      uirevision: name === "loss" ? `loss ${isLogarithmic}` : name,
    };
  }

  const options = (figure) => ({
    responsive: true, displaylogo: false, displayModeBar: figure.zooms && (isTouched || "hover"),
    modeBarButtons: [["zoomIn2d", "zoomOut2d", "autoScale2d", "toImage"]],
    toImageButtonOptions: { scale: 2 },
  });

  function draw(name) {
    const place = document.getElementById(`figure-${name}`);
    const figure = content.figures[name];
    if (!place || !figure) return;
    const named = figure.layout.showlegend === false ? 0 : figure.traces.filter((one) => one.showlegend !== false).length;
    place.style.height = `${figure.height + (isNarrow() && named > 1 ? 20 * Math.ceil(named / 2) : 0)}px`;
    Plotly.react(place, traces(figure), layout(name, figure), options(figure));
  }

  function drawAll() {
    const halves = [...main.querySelectorAll("section.half")];
    halves.forEach((one, at) => one.classList.toggle("alone", at === halves.length - 1 && halves.length % 2 === 1));
    Object.keys(content.figures).forEach(draw);
  }

  function listen() {
    const slider = document.getElementById("smoothing");
    const box = document.getElementById("logarithmic");
    if (!slider || !box) return;
    slider.value = smoothing;
    box.checked = isLogarithmic;
    const say = () => { document.getElementById("smoothing-words").textContent = `${smoothing}%`; };
    say();
    slider.addEventListener("input", () => {
      smoothing = Number(slider.value);
      say();
      for (const [name, figure] of Object.entries(content.figures)) {
        if (figure.traces.some((trace) => trace.meta && trace.meta.smooth)) draw(name);
      }
    });
    box.addEventListener("change", () => { isLogarithmic = box.checked; draw("loss"); });
  }

  // What is new in a run that goes on: words where they have changed, figures in place.
  function take(found) {
    const isSame = found.names.join() === content.names.join();
    content = found;
    document.title = found.title;
    if (!isSame) {
      main.innerHTML = found.main;
      listen();
    }
    for (const [name, words] of Object.entries(found.words)) {
      const place = document.getElementById(name);
      if (place && shown.get(name) !== words) {
        const opened = [...place.querySelectorAll("details")].map((one) => one.open);
        place.innerHTML = words;
        place.querySelectorAll("details").forEach((one, at) => { one.open = Boolean(opened[at]); });
        shown.set(name, words);
      }
    }
    drawAll();
  }

  async function ask() {
    let wait = 3000;
    try {
      const answer = await fetch(live, { headers: version ? { "If-None-Match": version } : {}, cache: "no-store" });
      if (answer.status === 200) {
        version = answer.headers.get("ETag") || "";
        take(await answer.json());
      } else if (answer.status !== 304) {
        const status = document.getElementById("status");
        if (status) status.textContent = await answer.text();
      }
    } catch {
      const status = document.getElementById("status");
      if (status) status.textContent = "l2l watch has ended; this is its last state";
      version = "";
      wait = 10000;
    }
    setTimeout(ask, document.hidden ? 5 * wait : wait);
  }

  listen();
  drawAll();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  let wasNarrow = isNarrow();
  addEventListener("resize", () => {
    if (wasNarrow !== isNarrow()) { wasNarrow = isNarrow(); drawAll(); }
  });
  if (live) setTimeout(ask, 1000);
  document.documentElement.dataset.drawn = String(document.querySelectorAll(".main-svg").length > 0);
})();
