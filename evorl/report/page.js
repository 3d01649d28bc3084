"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // Colours that are too dark beside the dark page, and what they become there.
  const night = { "#0072b2": "#4aa8e0", "#d55e00": "#f07f2e", "#009e73": "#1fbf92" };
  const rgb = (hex) => [1, 3, 5].map((place) => parseInt(hex.slice(place, place + 2), 16)).join(",");
  const seen = (value) => {
    if (!dark.matches || typeof value !== "string") return value;
    for (const [day, bright] of Object.entries(night)) {
      if (value === day) return bright;
      if (value.startsWith(`rgba(${rgb(day)},`)) return value.replace(rgb(day), rgb(bright));
    }
    return value;
  };

  const inked = (value, ink) => {
    if (Array.isArray(value)) return value.map((one) => inked(one, ink));
    if (value !== null && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, one]) => [key, inked(one, ink)]));
    }
    return value === "$ink" ? ink : seen(value);
  };

  const draw = (place) => {
    const figure = figures[place.dataset.figure];
    const [ink, soft, line] = ["--ink", "--soft", "--line"].map(colour);
    const layout = inked(figure.layout, ink);
    const fonts = getComputedStyle(document.body).fontFamily;
    for (const name of Object.keys(layout).filter((key) => /^[xy]axis\d*$/.test(key))) {
      layout[name] = { gridcolor: line, zerolinecolor: soft, linecolor: line, automargin: true, ...layout[name] };
      layout[name].title = { font: { size: 12, color: soft }, standoff: 8, ...(layout[name].title || {}) };
    }
    // Where the page is narrow, each entry of a legend takes lines of its own, which the chart would lack.
    const entries = layout.showlegend === false ? [] : figure.data.filter((trace) => trace.name && trace.showlegend !== false);
    const lines = entries.reduce((sum, trace) => sum + trace.name.split("<br>").length, 0);
    layout.height = (layout.height || 440) + (place.clientWidth < 600 ? 17 * Math.max(0, lines - 4) : 0);
    Plotly.react(place, inked(figure.data, ink), { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hovermode: "closest",
      font: { family: fonts, size: 12, color: ink }, margin: { l: 60, r: 16, t: 16, b: 44 },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: soft, activecolor: ink },
      hoverlabel: { align: "left", font: { family: fonts } },
      ...layout,
      legend: { orientation: "h", yref: "container", yanchor: "bottom", y: 0, x: 0, maxheight: 2000, ...(layout.legend || {}) },
    }, { responsive: true, displaylogo: false, showSendToCloud: false, displayModeBar: "hover", scrollZoom: Boolean(figure.zooms), modeBarButtonsToRemove: ["lasso2d", "select2d"] });
    place.dataset.drawn = "yes";
  };

  // What lies in a closed part has no width yet, so it is drawn when that is opened. One chart at a time, so that the
  // page can be read and scrolled meanwhile.
  const waiting = () => [...document.querySelectorAll(".chart:not([data-drawn])")]
    .filter((place) => !place.closest("details:not([open])"));
  const drawAll = () => {
    const [next, ...others] = waiting();
    if (next) draw(next);
    if (others.length) setTimeout(drawAll);
  };
  const paint = () => document.querySelectorAll(".dot").forEach((dot) => { dot.style.background = seen(dot.dataset.colour); });
  paint();
  drawAll();
  document.querySelectorAll("details").forEach((part) => part.addEventListener("toggle", drawAll));
  dark.addEventListener("change", () => {
    paint();
    document.querySelectorAll("[data-drawn]").forEach(draw);
  });
})();
