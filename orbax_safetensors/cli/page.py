"""The HTML page that `picture` fills in: layout, colours and the hover, no numbers.

`{{...}}` are the places that are filled. Colours are told apart by readers who see few, and in the dark.
"""

from orbax_safetensors.cli.style import STYLE

# fmt: off
PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Which process read which bytes: {{title}}</title>
<style>
:root {
  --first: #2f6fd0; --second: #e58a2e; --both: #7b4aa8; --header: #7d868f; --neither: #d3d8dd;
}
@media (prefers-color-scheme: dark) {
  :root {
    --first: #5b95ee; --second: #f0a04b; --both: #b086dd; --header: #8a939d; --neither: #3a4149;
  }
}
""" + STYLE + """\
svg { display: block; width: 100%; height: auto; cursor: crosshair; }
svg text { fill: var(--quiet); font-size: 10.5px; text-anchor: end; font-variant-numeric: tabular-nums; }
.first { fill: var(--first); background: var(--first); }
.second { fill: var(--second); background: var(--second); }
.both { fill: var(--both); background: var(--both); }
.header { fill: var(--header); background: var(--header); }
.neither { fill: var(--neither); background: var(--neither); }
.edges { fill: none; stroke: var(--page); stroke-width: .7; }
.chosen { fill: none; stroke: var(--mark); stroke-width: 1.6; pointer-events: none; }
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
