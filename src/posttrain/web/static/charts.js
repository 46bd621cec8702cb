// Draws the charts of a page with Apache ECharts: each <figure class="chart"> holds a place, an option as JSON, and a
// table of the same numbers. The option has no functions; those that it names are here (see charts/chart.py).
(() => {
  "use strict";

  const dark = matchMedia("(prefers-color-scheme: dark)");
  const still = matchMedia("(prefers-reduced-motion: reduce)");
  const coarse = matchMedia("(pointer: coarse)");
  const drawn = new Map();
  const LEGEND_ROW = 24, SLIDER = 34, BOX = 36;

  const list = (value) => (value === undefined ? [] : Array.isArray(value) ? value : [value]);
  const number = (value) =>
    Math.abs(value) > 0 && Math.abs(value) < 1e-3
      ? Number(value.toPrecision(3)).toExponential()
      : value.toLocaleString("en", { maximumSignificantDigits: Math.abs(value) >= 1000 ? 15 : 4, maximumFractionDigits: 6 });

  // Texts of records stand under other keys, and keep their dollar signs.
  const COLOUR_KEYS = new Set(["color", "borderColor", "backgroundColor", "textBorderColor"]);
  function paint(value, colours, key) {
    if (typeof value === "string") {
      return COLOUR_KEYS.has(key) && value.startsWith("$") ? colours(value.slice(1)) : value;
    }
    if (Array.isArray(value)) return typeof value[0] === "number" ? value : value.map((entry) => paint(entry, colours, key));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([name, entry]) => [name, paint(entry, colours, name)]));
  }

  function theme(colours, font) {
    const axis = {
      axisLine: { lineStyle: { color: colours("grid") } },
      axisTick: { show: false },
      axisLabel: { color: colours("soft"), fontSize: 12.5 },
      nameTextStyle: { color: colours("soft"), fontSize: 12.5 },
      splitLine: { lineStyle: { color: colours("grid") } },
    };
    return {
      textStyle: { color: colours("ink"), fontFamily: font, fontSize: 13 },
      categoryAxis: { ...axis, splitLine: { show: false } },
      valueAxis: { ...axis, axisLine: { show: false } },
      dataZoom: {
        borderColor: colours("grid"),
        fillerColor: `${colours("blue")}22`,
        handleStyle: { color: colours("paper"), borderColor: colours("gray") },
        moveHandleStyle: { color: colours("gray"), opacity: 0.4 },
        dataBackground: { lineStyle: { color: colours("gray") }, areaStyle: { color: colours("track") } },
        selectedDataBackground: { lineStyle: { color: colours("blue") }, areaStyle: { color: colours("track") } },
      },
      legend: { textStyle: { color: colours("soft"), fontSize: 12.5 }, inactiveColor: colours("grid") },
    };
  }

  // An element of text nodes: the strings of records never pass through innerHTML.
  function tooltipBox(lines) {
    const box = document.createElement("div");
    for (const line of lines) {
      const row = document.createElement("div");
      row.textContent = line;
      box.append(row);
    }
    return lines.length ? box : "";
  }

  function tipLines(option, unit, params) {
    const entries = list(params);
    const axis = list(option.xAxis)[0], rows = list(option.yAxis)[0];
    const lines = [];
    for (const entry of entries) {
      const value = entry.value;
      if (entry.data?.tip) lines.push(entry.data.tip);
      else if (entry.seriesType === "heatmap") {
        lines.push(`${rows.data[value[1]]}, ${axis.name} ${axis.data[value[0]]}: ${number(value[2])}`);
      } else if (entry.seriesType === "line" && Number.isFinite(value?.[1])) {
        if (!lines.length) lines.push(`${axis.name} ${number(value[0])}`);
        lines.push(`${entry.seriesName}: ${number(value[1] * unit[0])}${unit[1]}`);
      }
    }
    return lines;
  }

  function bin(params, api) {
    const [left, top] = api.coord([api.value(0), api.value(2)]);
    const [right, bottom] = api.coord([api.value(1), 0]);
    // A bin with a single record stays visible next to one with a million.
    const height = Math.max(bottom - top, 1);
    const shape = { x: left + 0.5, y: bottom - height, width: Math.max(right - left - 1, 1), height };
    return { type: "rect", shape, style: { fill: api.visual("color") } };
  }

  // Pixels of a text at the size of labels: letters of East Asia are twice as wide.
  const letterWidth = (letter) => (letter.codePointAt(0) >= 0x2e80 ? 13.5 : 7.2);
  const textWidth = (text) => [...text].reduce((sum, letter) => sum + letterWidth(letter), 0);

  // Cuts the middle of a long name, as names that begin alike differ at their ends.
  function shorten(name, width) {
    if (textWidth(name) <= width) return name;
    const letters = [...name];
    const half = Math.max(Math.floor((width / textWidth(name)) * letters.length / 2) - 1, 2);
    return `${letters.slice(0, half).join("")}…${letters.slice(-half).join("")}`;
  }

  function legendRows(names, width) {
    let rows = 1, used = 0;
    for (const name of names) {
      const room = 42 + Math.min(textWidth(name), width - 60);
      if (used && used + room > width) [rows, used] = [rows + 1, 0];
      used += room;
    }
    return rows;
  }

  // Completes the option for a width; returns the height of the whole chart in pixels.
  function complete(option, settings, width) {
    let below = 0;
    if (option.legend) {
      const names = option.legend.data;
      below += LEGEND_ROW * legendRows(names.map((name) => name.name ?? name), width) + 6;
      option.legend.formatter = (name) => shorten(name, width - 60);
      Object.assign(option.legend, { bottom: 0, left: 0, itemGap: 14, itemWidth: 16, itemHeight: 12 });
    }
    const zooms = list(option.dataZoom);
    for (const zoom of zooms) {
      if (zoom.type === "slider") {
        Object.assign(zoom, { bottom: below + 4, height: 18, left: 8, right: 8, brushSelect: false, showDetail: false });
        below += SLIDER;
      } else {
        // The wheel scrolls the page and a finger too.
        Object.assign(zoom, { zoomOnMouseWheel: "ctrl", moveOnMouseMove: true, preventDefaultMouseMove: false });
      }
    }
    if (zooms.length && coarse.matches) option.dataZoom = zooms.filter((zoom) => zoom.type !== "inside");
    const height = settings.height + below;
    option.grid = {
      left: 4, right: 8, top: 8, outerBoundsMode: "same", outerBoundsContain: "all", ...option.grid,
      bottom: (option.grid?.bottom ?? 2) + below,
    };
    for (const axis of [...list(option.xAxis), ...list(option.yAxis)]) {
      const label = (axis.axisLabel ??= {});
      if (axis.texts) {
        const texts = axis.texts;
        const near = (value) => (best, text) => (Math.abs(text[0] - value) < Math.abs(best[0] - value) ? text : best);
        label.formatter = (value) => texts.reduce(near(value), texts[0])[1];
      } else if (axis.type === "value") label.formatter = number;
      label.hideOverlap = axis.type === "value" || label.interval === undefined;
    }
    for (const axis of list(option.yAxis).filter((axis) => axis.type === "category")) {
      // Long names are truncated, so that bars stay comparable on a phone; the tooltip and the table have all of them.
      const share = axis.position === "right" ? 0.36 : 0.4;
      axis.axisLabel.formatter = (name) => shorten(name, share * width);
    }
    for (const axis of list(option.xAxis).filter((axis) => axis.type === "value")) {
      axis.axisLabel = { alignMinLabel: "left", alignMaxLabel: "right", ...axis.axisLabel };
    }
    for (const axis of list(option.xAxis).filter((axis) => axis.axisLabel.rotate)) {
      axis.axisLabel.formatter = (name) => shorten(name, 150);
      // The last name leans over the end of the axis.
      option.grid.right = Math.min(0.65 * Math.max(...axis.data.map(textWidth)), 100);
    }
    if (settings.equal) keepScale(option, width - 20, settings.height - 20);
    for (const series of option.series) {
      if (series.renderItem === "bin") series.renderItem = bin;
      if (series.label?.show) series.label.formatter = (params) => params.data.text ?? "";
      if (settings.boxes && series.type === "graph") fitBoxes(series, width / option.xAxis.data.length);
      series.animation = !still.matches;
      series.animationDuration = 250;
      // Charts are read by their shapes: the rest of a chart must not fade under a pointer.
      series.emphasis ??= { scale: 1.2 };
    }
    return height;
  }

  function keepScale(option, width, height) {
    const ends = [option.xAxis.max, option.yAxis.max];
    const scale = 1.04 * Math.max(ends[0] / width, ends[1] / height);
    [option.xAxis, option.yAxis].forEach((axis, at) => {
      const half = (scale * [width, height][at]) / 2;
      Object.assign(axis, { min: ends[at] / 2 - half, max: ends[at] / 2 + half });
    });
  }

  function fitBoxes(series, column) {
    const narrow = column < 130, width = column - (narrow ? 10 : 40);
    series.symbolSize = [width, BOX];
    const padding = [0, narrow ? 2 : 7];
    const room = { width: width - 2 * padding[1], height: BOX, padding, overflow: "truncate", ellipsis: "…" };
    Object.assign(series.label, room, { align: "center", verticalAlign: "middle" });
    if (narrow) series.label.fontSize = 11;
  }

  function draw(figure) {
    const plot = figure.querySelector(".plot");
    const settings = JSON.parse(figure.querySelector('script[type="application/json"]').textContent);
    const style = getComputedStyle(figure);
    const colours = (name) => style.getPropertyValue(`--${name}`).trim();
    const option = paint(settings.option, colours);
    const width = plot.clientWidth;
    const height = complete(option, settings, width);
    plot.style.height = `${height}px`;
    drawn.get(figure)?.chart.dispose();
    // ECharts does not escape double quotes when it writes a picture to a file.
    const font = style.fontFamily.replaceAll('"', "'");
    const chart = echarts.init(plot, theme(colours, font), { renderer: "svg", width, height });
    chart.setOption({
      ...option,
      aria: { enabled: true, label: { description: plot.getAttribute("aria-label") } },
      tooltip: {
        ...option.tooltip,
        confine: true,
        formatter: (params) => tooltipBox(tipLines(option, settings.unit, params)),
        backgroundColor: colours("paper"),
        borderColor: colours("grid"),
        textStyle: { color: colours("ink"), fontSize: 13 },
        extraCssText: "max-width:min(420px,86vw);white-space:normal;overflow-wrap:anywhere",
        transitionDuration: still.matches ? 0 : 0.2,
        axisPointer: {
          ...option.tooltip?.axisPointer,
          lineStyle: { color: colours("gray") },
          shadowStyle: { color: colours("gray"), opacity: 0.14 },
          animation: false,
        },
      },
    });
    drawn.set(figure, { chart, width });
  }

  // Zoom by keyboard: the numbers of all charts are in their tables, but a part of a long curve is not.
  function zoomByKey(figure, event) {
    const chart = drawn.get(figure)?.chart;
    const [zoom] = chart?.getOption().dataZoom ?? [];
    if (!zoom || event.ctrlKey || event.metaKey || event.altKey) return;
    const span = zoom.end - zoom.start, middle = (zoom.start + zoom.end) / 2;
    const change = {
      "+": [middle - span / 4, middle + span / 4],
      "=": [middle - span / 4, middle + span / 4],
      "-": [middle - span, middle + span],
      "0": [0, 100],
      ArrowLeft: [zoom.start - span / 4, zoom.end - span / 4],
      ArrowRight: [zoom.start + span / 4, zoom.end + span / 4],
    }[event.key];
    if (!change) return;
    event.preventDefault();
    const start = Math.min(Math.max(change[0], 0), Math.max(100 - (change[1] - change[0]), 0));
    const end = Math.min(Math.max(start + change[1] - change[0], 1), 100);
    chart.getOption().dataZoom.forEach((_, dataZoomIndex) =>
      chart.dispatchAction({ type: "dataZoom", dataZoomIndex, start, end }));
  }

  function addSaving(figure, texts) {
    const details = figure.querySelector("details.data");
    details?.addEventListener("toggle", () => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = texts?.save ?? "Save the picture as SVG";
      button.addEventListener("click", () => {
        const link = document.createElement("a");
        const background = getComputedStyle(figure).getPropertyValue("--paper").trim();
        link.href = drawn.get(figure).chart.getDataURL({ type: "svg", backgroundColor: background });
        link.download = "chart.svg";
        link.click();
      });
      details.append(button);
    }, { once: true });
  }

  // A chart in closed details has no width; it is drawn once it gets one, and again where the width changes.
  const sizes = new ResizeObserver((entries) => {
    for (const { target } of entries) {
      const figure = target.closest("figure");
      if (target.clientWidth && drawn.get(figure)?.width !== target.clientWidth) draw(figure);
    }
  });

  function mount(root) {
    for (const figure of root.querySelectorAll("figure.chart")) {
      const plot = figure.querySelector(".plot");
      if (!plot || drawn.has(figure)) continue;
      const { height, option, texts } = JSON.parse(figure.querySelector('script[type="application/json"]').textContent);
      plot.style.height = `${height}px`;
      if (option.dataZoom) {
        plot.tabIndex = 0;
        plot.setAttribute("aria-description", texts?.zoom ?? "The keys + and - zoom, arrows move, and 0 shows everything.");
        plot.addEventListener("keydown", (event) => zoomByKey(figure, event));
      }
      addSaving(figure, texts);
      sizes.observe(plot);
    }
  }

  dark.addEventListener("change", () => drawn.forEach((_, figure) => draw(figure)));
  addEventListener("beforeprint", () => drawn.forEach((_, figure) => draw(figure)));
  mount(document);
  window.posttrainCharts = { mount, drawn };
})();
