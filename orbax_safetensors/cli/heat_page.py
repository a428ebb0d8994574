"""The HTML page that `heat_map` fills in: layout, colours and the hover, no numbers.

`{{...}}` are the places that are filled. Light to dark is little to much, in either of two hues; in the dark it is dark
to light.
"""

# fmt: off
PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Which process reads which bytes: {{title}}</title>
<style>
:root {
  color-scheme: light dark;
  --page: #fbfbfa; --text: #1d2126; --quiet: #626a73; --line: #dfe2e6;
  --good: #1b7a3d; --bad: #b3261e;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #15181c; --text: #e7eaed; --quiet: #9aa3ad; --line: #31373e;
    --good: #62c584; --bad: #f28b82;
  }
}
body { margin: 2rem auto; max-width: 68rem; padding: 0 1.5rem; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 1.55rem; line-height: 1.2; margin: 0 0 .3rem; }
h2 { font-size: 1rem; margin: 1.6rem 0 .5rem; overflow-wrap: anywhere; }
p { margin: .4rem 0; max-width: 52rem; }
.name { font-family: ui-monospace, "SF Mono", "DejaVu Sans Mono", monospace; font-size: .88em; }
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
#tip { position: fixed; display: none; z-index: 1; max-width: 32rem; padding: .5rem .7rem; pointer-events: none;
  background: var(--page); border: 1px solid var(--quiet); border-radius: 6px; box-shadow: 0 3px 14px #0004;
  font-size: 13px; white-space: pre-line; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
#tip b { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: 12px; }
.scroll { overflow-x: auto; font-size: 13px; }
:root { --none: #e9ebee; --low: #cfe0f7; --high: #0d3f8f; --over-low: #fbdcb8; --over-high: #a33c00; }
@media (prefers-color-scheme: dark) {
  :root { --none: #23282e; --low: #213a5f; --high: #a9cdff; --over-low: #573a1a; --over-high: #ffc27d; }
}
.files { display: grid; grid-template-columns: repeat(auto-fill, minmax({{cell}}, 1fr)); gap: .9rem .8rem; }
figure { margin: 0; min-width: 0; }
figcaption { font-size: 12px; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
canvas { display: block; height: {{height}}px; image-rendering: pixelated; cursor: crosshair; background: var(--none); }
.none { background: var(--none); }
.ramp { display: inline-block; width: 9rem; height: .8rem; margin: 0 .45rem; border-radius: 2px; }
.read { background: linear-gradient(to right, var(--low), var(--high)); }
.over { background: linear-gradient(to right, var(--over-low), var(--over-high)); }
</style>
</head>
<body>
<h1>Which process reads which bytes</h1>
<p class="path name">{{title}}</p>
<p>{{summary}}</p>
{{verdict}}
<table><tbody>{{facts}}</tbody></table>
<ul class="legend">
<li>Share of a stretch that a process reads: {{least}}<span class="ramp read"></span>all of it</li>
<li>The same, if it needs less than nine tenths of what it reads:<span class="ramp over"></span></li>
<li><span class="swatch none"></span>nothing</li>
</ul>
<p class="quiet">A box is a file, from its first byte at the left to its last at the right{{widths}}. Its rows are the
processes, the first on top{{rows}}. Point at a place to see the numbers. Headers, which each process reads first to
find the tensors, are left out.</p>
<h2>{{heading}}</h2>
<div class="files">{{files}}</div>
{{leaves}}
<noscript><p class="bad">The boxes are drawn by a script in this page, which is switched off.</p></noscript>
<div id="tip"></div>
<script type="application/json" id="data">{{data}}</script>
<script>
const data = JSON.parse(document.getElementById("data").textContent);
const tip = document.getElementById("tip");
const number = n => Math.round(n).toLocaleString("en-US");
const percent = n => n >= 0.9995 ? "100%" : (n * 100).toPrecision(3) + "%";
// Little-endian uint16 of all rows, each with the stretches of all files.
function unpacked(text) {
  const bytes = Uint8Array.from(atob(text), char => char.charCodeAt(0)), out = new Uint16Array(bytes.length / 2);
  for (let i = 0; i < out.length; i++) out[i] = bytes[2 * i] | bytes[2 * i + 1] << 8;
  return out;
}
const read = unpacked(data.read), needed = unpacked(data.needed), stretches = data.tensors.length;

function colours(low, high) {
  const style = getComputedStyle(document.documentElement);
  const [from, to] = [low, high].map(name =>
    [1, 3, 5].map(at => parseInt(style.getPropertyValue(name).trim().slice(at, at + 2), 16)));
  return part => from.map((value, i) => value + (to[i] - value) * part);
}
function draw() {
  const plain = colours("--low", "--high"), over = colours("--over-low", "--over-high");
  document.querySelectorAll("canvas").forEach((canvas, file) => {
    const { first, cuts } = data.files[file], columns = cuts.length - 1;
    canvas.width = columns;
    canvas.height = data.rows.length;
    const context = canvas.getContext("2d"), image = context.createImageData(columns, data.rows.length);
    for (let row = 0; row < data.rows.length; row++) for (let column = 0; column < columns; column++) {
      const at = row * stretches + first + column, share = read[at] / data.unit;
      if (!share) continue;
      // Logarithmic, from half of what each process has if all share evenly.
      const part = Math.min(Math.max(1 - Math.log(share) / Math.log(data.least), 0), 1);
      const colour = (needed[at] < 0.9 * read[at] ? over : plain)(part);
      image.data.set([...colour, 255], 4 * (row * columns + column));
    }
    context.putImageData(image, 0, 0);
  });
}
function show(event, file, row, column) {
  const { name, first, cuts } = data.files[file], at = row * stretches + first + column;
  const nbytes = cuts[column + 1] - cuts[column], [from, to] = data.rows[row];
  const [head, tail, count] = data.tensors[first + column];
  const heading = document.createElement("b");
  heading.textContent = name;
  const who = from === to ? `process ${from} reads` : `processes ${from} to ${to} read, each on average,`;
  let text = `\\nbytes ${number(cuts[column])} to ${number(cuts[column + 1])}` +
    `\\n${who} ${percent(read[at] / data.unit)}: ${number(read[at] / data.unit * nbytes)} of ${number(nbytes)}`;
  if (read[at]) text += `\\nand needs ${number(needed[at] / data.unit * nbytes)}`;
  if (count) text += count === 1 ? `\\n${head}` : `\\n${head}\\nto ${tail}, ${number(count)} tensors`;
  tip.replaceChildren(heading, text);
  tip.style.display = "block";
  tip.style.left = Math.min(event.clientX + 16, innerWidth - tip.offsetWidth - 8) + "px";
  const below = event.clientY + 18;
  tip.style.top = (below + tip.offsetHeight < innerHeight ? below : event.clientY - tip.offsetHeight - 12) + "px";
}
document.querySelectorAll("canvas").forEach((canvas, file) => {
  canvas.addEventListener("pointermove", event => {
    const box = canvas.getBoundingClientRect(), columns = data.files[file].cuts.length - 1;
    const column = Math.floor((event.clientX - box.left) / box.width * columns);
    const row = Math.floor((event.clientY - box.top) / box.height * data.rows.length);
    show(event, file, Math.min(Math.max(row, 0), data.rows.length - 1), Math.min(Math.max(column, 0), columns - 1));
  });
  canvas.addEventListener("pointerleave", () => { tip.style.display = "none"; });
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
draw();
</script>
</body>
</html>
"""
