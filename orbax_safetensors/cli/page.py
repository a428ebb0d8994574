"""The HTML page that `picture` fills in: layout, colours and the hover, no numbers.

`{{...}}` are the places that are filled. Colours are told apart by readers who see few, and in the dark.
"""

PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Which process read which bytes: {{title}}</title>
<style>
:root {
  color-scheme: light dark;
  --page: #fbfbfa; --text: #1d2126; --quiet: #626a73; --line: #dfe2e6; --mark: #111;
  --first: #2f6fd0; --second: #e58a2e; --both: #7b4aa8; --header: #7d868f; --neither: #d3d8dd;
  --good: #1b7a3d; --bad: #b3261e;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #15181c; --text: #e7eaed; --quiet: #9aa3ad; --line: #31373e; --mark: #fff;
    --first: #5b95ee; --second: #f0a04b; --both: #b086dd; --header: #8a939d; --neither: #3a4149;
    --good: #62c584; --bad: #f28b82;
  }
}
body { margin: 2rem auto; max-width: 68rem; padding: 0 1.5rem; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 1.55rem; line-height: 1.2; margin: 0 0 .3rem; }
h2 { font-size: 1rem; margin: 1.6rem 0 .5rem; overflow-wrap: anywhere; }
p { margin: .4rem 0; max-width: 52rem; }
code, .name { font-family: ui-monospace, "SF Mono", "DejaVu Sans Mono", monospace; font-size: .88em; }
.path { color: var(--quiet); overflow-wrap: anywhere; }
.good { color: var(--good); font-weight: 600; }
.bad { color: var(--bad); font-weight: 600; }
.quiet { color: var(--quiet); font-weight: 400; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .22rem 0 .22rem 1.5rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap }
th { color: var(--quiet); font-weight: 500; }
th.left, td.left { text-align: left; }
th:first-child, td:first-child { padding-left: 0; }
td.name { white-space: normal; overflow-wrap: anywhere; }
.legend { display: flex; flex-wrap: wrap; gap: .25rem 1.6rem; margin: 1.2rem 0 0; padding: 0; list-style: none; }
.swatch { display: inline-block; width: .8rem; height: .8rem; margin-right: .45rem; border-radius: 2px; }
svg { display: block; width: 100%; height: auto; cursor: crosshair; }
svg text { fill: var(--quiet); font-size: 10.5px; text-anchor: end; font-variant-numeric: tabular-nums; }
.first { fill: var(--first); background: var(--first); }
.second { fill: var(--second); background: var(--second); }
.both { fill: var(--both); background: var(--both); }
.header { fill: var(--header); background: var(--header); }
.neither { fill: var(--neither); background: var(--neither); }
.edges { fill: none; stroke: var(--page); stroke-width: .7; }
.chosen { fill: none; stroke: var(--mark); stroke-width: 1.6; pointer-events: none; }
#tip { position: fixed; display: none; z-index: 1; max-width: 32rem; padding: .5rem .7rem; pointer-events: none;
  background: var(--page); border: 1px solid var(--quiet); border-radius: 6px; box-shadow: 0 3px 14px #0004;
  font-size: 13px; white-space: pre-line; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
#tip b { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: 12px; }
details { margin: 2rem 0; }
summary { cursor: pointer; font-weight: 600; }
.scroll { overflow-x: auto; font-size: 13px; }
tbody tr:hover { background: color-mix(in srgb, var(--first) 10%, transparent); }
</style>
</head>
<body>
<h1>Which process read which bytes</h1>
<p class="path name">{{title}}</p>
<p>Two processes restored {{arrays}} arrays, sharded over {{devices}} devices. Each asked the files only for what its
own devices hold, and for the short gaps between such parts.</p>
<p class="{{verdict_class}}">{{verdict}}</p>
<table>
<thead><tr><th class="left">process</th><th>devices</th><th>shards compared</th><th>needed</th><th>planned</th>
<th>measured</th><th>of all bytes</th></tr></thead>
<tbody>{{processes}}</tbody>
</table>
<ul class="legend">{{legend}}</ul>
{{files}}
<p class="quiet">To scale, in the order of the file: a row is {{row}}, each begins where the one above ends. Point at a
place to see whose it is.</p>
<details>
<summary>All tensors</summary>
<div class="scroll"><table>
<thead><tr><th class="left">tensor</th><th class="left">dtype</th><th class="left">shape</th>
<th class="left">sharded over</th><th>bytes</th><th>process 0 only</th><th>process 1 only</th><th>both</th></tr></thead>
<tbody id="tensors">{{tensors}}</tbody>
</table></div>
</details>
<div id="tip"></div>
<script type="application/json" id="data">{{data}}</script>
<script>
const data = JSON.parse(document.getElementById("data").textContent);
const tip = document.getElementById("tip");
const maps = [...document.querySelectorAll("svg")];
const byFile = data.sizes.map((_, file) => data.tensors.filter(t => t.file === file && t.end > t.begin));
const number = n => n.toLocaleString("en-US");

// The rectangles of [begin, end), row by row, as an outline.
function outline(begin, end) {
  let path = "";
  for (let at = begin; at < end;) {
    const row = Math.floor(at / data.row_bytes), stop = Math.min(end, (row + 1) * data.row_bytes);
    const x = (at / data.row_bytes - row) * data.width, w = Math.max((stop - at) / data.row_bytes * data.width, 1);
    path += `M${x} ${row * data.pitch}h${w}v${data.height}h${-w}z`;
    at = stop;
  }
  return path;
}
function choose(tensor) {
  maps.forEach((map, file) => {
    const mine = tensor && tensor.file === file;
    map.querySelector(".chosen").setAttribute("d", mine ? outline(tensor.begin, tensor.end) : "");
  });
}
function at(file, offset) {  // the tensor that holds the byte
  const tensors = byFile[file];
  let low = 0, high = tensors.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (tensors[middle].end <= offset) low = middle + 1; else high = middle;
  }
  return low < tensors.length && tensors[low].begin <= offset ? tensors[low] : null;
}
function show(event, offset, tensor) {
  const heading = document.createElement("b");
  heading.textContent = tensor ? tensor.name : "header";
  let text = tensor
    ? `\\n${tensor.dtype} ${tensor.shape}, sharded over: ${tensor.axes}` +
      `\\nbytes ${number(tensor.begin)} to ${number(tensor.end)}, ${number(tensor.end - tensor.begin)} in all`
    : "\\nread by each process to find the tensors";
  if (tensor) ["process 0 only", "process 1 only", "both"].forEach((who, i) => {
    if (tensor.owners[i]) text += `\\n${who}: ${number(tensor.owners[i])}`;
  });
  tip.replaceChildren(heading, text);
  tip.style.display = "block";
  tip.style.left = Math.min(event.clientX + 16, innerWidth - tip.offsetWidth - 8) + "px";
  const below = event.clientY + 18;
  tip.style.top = (below + tip.offsetHeight < innerHeight ? below : event.clientY - tip.offsetHeight - 12) + "px";
}
function hide() { tip.style.display = "none"; choose(null); }

maps.forEach((map, file) => {
  map.addEventListener("pointermove", event => {
    const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(map.getScreenCTM().inverse());
    const offset = (Math.floor(point.y / data.pitch) + point.x / data.width) * data.row_bytes;
    if (point.x < 0 || point.x >= data.width || offset < 0 || offset >= data.sizes[file]) return hide();
    const tensor = at(file, offset);
    choose(tensor);
    show(event, offset, tensor);
  });
  map.addEventListener("pointerleave", hide);
});
[...document.getElementById("tensors").rows].forEach((row, i) => {
  row.addEventListener("pointerenter", () => choose(data.tensors[i]));
  row.addEventListener("pointerleave", () => choose(null));
});
</script>
</body>
</html>
"""
