"use strict";
(() => {
  const text = (id) => document.getElementById(id).textContent;
  const result = JSON.parse(text("result"));
  const themes = JSON.parse(text("themes"));
  const plots = new Map(result.sections.flatMap((section) => section.plots).map((plot) => [plot.name, plot]));
  const views = new Map();
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null; // a theme that the reader chose; otherwise the system's

  const themeName = () => chosen ?? (prefersDark.matches ? "dark" : "light");

  const sized = (spec, box) => {
    const height = box.clientWidth < 520 ? 280 : 340;
    return { width: "container", height, autosize: { type: "fit-x", contains: "padding" }, ...spec };
  };

  const save = (name, blob) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  };

  // The rows of a chart and of its layers, each once.
  const rowsOf = (spec) => {
    const found = [spec, ...(spec.layer ?? [])].map((part) => part.data?.values ?? []);
    return [...new Map(found.filter((rows) => rows.length).map((rows) => [JSON.stringify(rows), rows])).values()];
  };

  const cell = (tag, value) => {
    const element = document.createElement(tag);
    element.textContent = typeof value === "number" ? String(Number(value.toPrecision(6))) : (value ?? "");
    if (typeof value === "number") element.className = "number";
    return element;
  };

  const dataTable = (rows) => {
    const names = [...new Set(rows.flatMap((row) => Object.keys(row)))];
    const table = document.createElement("table");
    const head = table.createTHead().insertRow();
    const number = (name) => rows.every((row) => typeof (row[name] ?? 0) === "number");
    names.forEach((name) => {
      head.append(Object.assign(cell("th", name), { scope: "col", className: number(name) ? "number" : "" }));
    });
    const body = table.createTBody();
    rows.slice(0, 500).forEach((row) => body.insertRow().append(...names.map((name) => cell("td", row[name]))));
    if (rows.length > 500) table.createCaption().textContent = `The first 500 of ${rows.length} rows.`;
    return table;
  };

  // What a row does not have is left out: rows of one chart may have different keys.
  const tooltip = (value, escape) => {
    if (value === null || typeof value !== "object") return escape(String(value));
    const known = Object.entries(value).filter(([, item]) => !["NaN", "undefined", "null", ""].includes(String(item)));
    const row = ([key, item]) => `<tr><td class="key">${escape(key)}</td><td>${escape(String(item))}</td></tr>`;
    return `<table>${known.map(row).join("")}</table>`;
  };

  // A legend of several rows rises above the height that Vega reckoned with: room for it.
  const makeRoom = (figure) => {
    const [box, svg] = [figure.querySelector(".chart"), figure.querySelector("svg")];
    const words = [...svg.querySelectorAll("text")].filter((word) => word.textContent);
    const top = Math.min(...words.map((word) => word.getBoundingClientRect().top));
    box.style.paddingTop = `${Math.max(0, Math.ceil(svg.getBoundingClientRect().top - top))}px`;
  };

  const draw = async (figure) => {
    const plot = plots.get(figure.dataset.plot);
    const box = figure.querySelector(".chart");
    try {
      const { view } = await vegaEmbed(box, sized(plot.spec, box), {
        mode: "vega-lite",
        renderer: "svg",
        actions: false,
        ast: true, // expressions are interpreted: the page's policy allows no code made from text
        config: themes[themeName()],
        defaultStyle: false,
        tooltip: { disableDefaultStyle: true, theme: "page", formatTooltip: tooltip },
      });
      views.get(figure)?.finalize();
      views.set(figure, view);
      makeRoom(figure);
      figure.dataset.state = "drawn";
      figure.querySelector(".tools").hidden = false;
      figure.querySelector(".hint").hidden = !JSON.stringify(plot.spec).includes('"bind":"scales"');
    } catch (error) {
      figure.dataset.state = "failed";
      box.textContent = `This chart could not be drawn: ${error.message}`;
      console.error(plot.name, error);
    }
  };

  const figures = [...document.querySelectorAll("figure[data-plot]")];
  let drawing = Promise.resolve();
  const drawAll = () => {
    const dark = themeName() === "dark";
    document.documentElement.style.colorScheme = themeName();
    document.getElementById("theme").textContent = dark ? "Light" : "Dark";
    drawing = drawing.then(async () => {
      document.documentElement.dataset.state = "drawing";
      for (const figure of figures) await draw(figure);
      document.documentElement.dataset.state = "drawn";
    });
  };

  for (const figure of figures) {
    const plot = plots.get(figure.dataset.plot);
    figure.querySelector("details").addEventListener("toggle", (event) => {
      const place = event.target.querySelector(".scroll");
      if (event.target.open && !place.childElementCount) place.append(...rowsOf(plot.spec).map(dataTable));
    });
    for (const button of figure.querySelectorAll("[data-save]")) {
      button.addEventListener("click", async () => {
        const view = views.get(figure);
        if (button.dataset.save === "svg") {
          save(`${plot.name}.svg`, new Blob([await view.toSVG()], { type: "image/svg+xml" }));
        } else {
          (await view.toCanvas(2)).toBlob((blob) => save(`${plot.name}.png`, blob));
        }
      });
    }
  }
  document.getElementById("download").addEventListener("click", () => {
    save("result.json", new Blob([text("result")], { type: "application/json" }));
  });
  document.getElementById("theme").addEventListener("click", () => {
    chosen = themeName() === "dark" ? "light" : "dark";
    drawAll();
  });
  prefersDark.addEventListener("change", drawAll);
  let resized = 0;
  addEventListener("resize", () => {
    clearTimeout(resized);
    resized = setTimeout(() => [...views.keys()].forEach(makeRoom), 200); // once Vega has followed the new width
  });
  drawAll();
})();
