"""What the pages of pictures have in common: type, tables, the box at the pointer. Each adds its own colours."""

STYLE = """\
:root {
  color-scheme: light dark;
  --page: #fbfbfa; --text: #1d2126; --quiet: #626a73; --line: #dfe2e6; --mark: #111;
  --good: #1b7a3d; --bad: #b3261e;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #15181c; --text: #e7eaed; --quiet: #9aa3ad; --line: #31373e; --mark: #fff;
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
#tip { position: fixed; display: none; z-index: 1; max-width: 32rem; padding: .5rem .7rem; pointer-events: none;
  background: var(--page); border: 1px solid var(--quiet); border-radius: 6px; box-shadow: 0 3px 14px #0004;
  font-size: 13px; white-space: pre-line; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
#tip b { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: 12px; }
details { margin: 2rem 0; }
summary { cursor: pointer; font-weight: 600; }
.scroll { overflow-x: auto; font-size: 13px; }
"""
