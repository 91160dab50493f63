"""Looks of a page, in light and in dark, and the little that its script does."""

CSS = """
:root {
  color-scheme: light dark;
  --page: #f6f6f4; --surface: #ffffff; --ink: #17171a; --soft: #56565e; --line: #dcdcd8;
  --blue: #2a78d6; --violet: #5b48b8; --aqua: #17997c; --orange: #dd5f2c; --yellow: #dca012;
  --green: #3f8f2f; --magenta: #c9498a; --red: #c8343c; --slate: #3c5068; --brown: #8a6a4a;
  --grey: #a3a3a0; --heat: 42 120 214; --good: #2d7a2f; --bad: #b42a2a;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #141416; --surface: #1d1d20; --ink: #ececee; --soft: #a5a5ad; --line: #36363b;
    --blue: #4a92ea; --violet: #9385ea; --aqua: #2bb195; --orange: #e8743f; --yellow: #d9a520;
    --green: #62ad4d; --magenta: #dd6ba5; --red: #e2585c; --slate: #7d95b2; --brown: #b3906a;
    --grey: #77777a; --heat: 74 146 234; --good: #7cc47e; --bad: #f08a86;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 28px 24px 64px; }
header p { margin: 0; color: var(--soft); }
h1 { font-size: 15px; font-weight: 600; color: var(--soft); margin: 0 0 6px; }
h2 { font-size: 19px; margin: 0 0 4px; }
h3 { font-size: 15px; margin: 22px 0 6px; }
.verdict { font-size: 23px; line-height: 1.35; font-weight: 600; margin: 0 0 10px;
  color: var(--ink); text-wrap: pretty; }
section { background: var(--surface); border: 1px solid var(--line); border-radius: 10px;
  padding: 18px 20px 20px; margin-top: 18px; }
section > p, .lead { color: var(--soft); margin: 0 0 12px; max-width: 82ch; }
nav { margin-top: 14px; display: flex; flex-wrap: wrap; gap: 4px 16px; font-size: 14px; }
a { color: var(--blue); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px;
  margin: 18px 0 0; }
.tiles div { background: var(--surface); border: 1px solid var(--line); border-radius: 10px;
  padding: 10px 14px; }
.tiles dt { color: var(--soft); font-size: 13px; }
.tiles dd { margin: 0; font-size: 22px; font-weight: 600; }
.tiles small { display: block; font-size: 12.5px; font-weight: 400; color: var(--soft); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
caption { text-align: left; color: var(--soft); padding: 0 0 6px; }
th, td { padding: 5px 10px 5px 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--line); }
thead th { color: var(--soft); font-weight: 600; white-space: nowrap; vertical-align: bottom; }
tbody th { font-weight: 400; overflow-wrap: anywhere; }
.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
tr.sum th, tr.sum td { font-weight: 600; border-top: 1.5px solid var(--soft); border-bottom: 0; }
th button { all: unset; cursor: pointer; }
th button:focus-visible { outline: 2px solid var(--blue); outline-offset: 2px; }
th[aria-sort="ascending"] button::after { content: " \\2191"; }
th[aria-sort="descending"] button::after { content: " \\2193"; }
.key { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 7px; }
.keyed { white-space: nowrap; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 16px; margin: 6px 0 12px; padding: 0;
  list-style: none; font-size: 13.5px; color: var(--soft); }
svg { display: block; width: 100%; height: auto; margin: 4px 0; }
svg text { fill: var(--ink); font: 13px system-ui, -apple-system, "Segoe UI", Roboto,
  "Liberation Sans", sans-serif; }
svg text.soft { fill: var(--soft); }
svg line { stroke: var(--line); }
svg .track { fill: var(--line); opacity: .45; }
.bar { display: inline-block; height: 9px; border-radius: 0 3px 3px 0; background: var(--blue);
  vertical-align: middle; }
.heat td { text-align: center; font-variant-numeric: tabular-nums; padding: 5px 6px;
  border: 2px solid var(--surface); }
.notes { list-style: none; margin: 0; padding: 0; }
.notes li { padding: 4px 0 4px 96px; position: relative; }
.notes b { position: absolute; left: 0; font-weight: 600; }
.warning b { color: var(--bad); } .ok b { color: var(--good); } .note b { color: var(--soft); }
.better { color: var(--good); } .worse { color: var(--bad); }
code { font: 13px ui-monospace, "SF Mono", Menlo, "Liberation Mono", monospace;
  overflow-wrap: anywhere; }
details { margin-top: 12px; } summary { cursor: pointer; color: var(--blue); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr));
  gap: 14px 22px; }
figure { margin: 0; min-width: 0; } figcaption { font-weight: 600; font-size: 14px; }
figure .legend { margin: 2px 0 0; }
svg polyline { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.pair { margin: 4px 0; overflow-wrap: anywhere; }
del { color: var(--bad); } ins { color: var(--good); text-underline-offset: 3px; }
audio { display: block; width: min(100%, 320px); height: 34px; margin: 4px 0; }
.item { border-top: 1px solid var(--line); padding: 6px 0; overflow-wrap: anywhere; }
.item b, tbody th { min-width: 8em; }
tbody th.n { width: 5em; min-width: 0; }
@media (max-width: 600px) { main { padding: 16px 10px 40px; } figure svg text { font-size: 18px; } }
.examples { max-height: 30em; overflow: auto; }
.subject { margin: 40px 0 0; font-size: 21px; }
@media print { body { background: #fff; } section { break-inside: avoid; } nav { display: none; } }
"""

SCRIPT = """
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  [...table.tHead.rows[0].cells].forEach((cell, column) => {
    const button = document.createElement("button");
    button.textContent = cell.textContent;
    button.title = "sort by this column";
    cell.replaceChildren(button);
    button.onclick = () => {
      const up = cell.getAttribute("aria-sort") === "descending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      cell.setAttribute("aria-sort", up ? "ascending" : "descending");
      const value = (row) => row.cells[column].dataset.v ?? row.cells[column].textContent;
      const rows = [...body.rows].filter((row) => !row.classList.contains("sum"));
      const last = [...body.rows].filter((row) => row.classList.contains("sum"));
      rows.sort((a, b) => {
        const [x, y] = [value(a), value(b)];
        const order = isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;
        return up ? order : -order;
      });
      body.append(...rows, ...last);
    };
  });
}
"""
