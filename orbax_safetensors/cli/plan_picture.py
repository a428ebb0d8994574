"""`plan --picture`: what each process would read, drawn over the files."""

from __future__ import annotations

from html import escape

from orbax_safetensors.cli.heat_map import draw, stretches
from orbax_safetensors.cli.partition import mesh_text
from orbax_safetensors.cli.plan_tables import Scenario, worst_leaves
from orbax_safetensors.cli.tables import human_bytes
from orbax_safetensors.cli.units import human_seconds
from orbax_safetensors.cost.heat import heat
from orbax_safetensors.errors import printable

_WORST = 20


def draw_plan(scenario: Scenario, family: str | None) -> str:
    """Return the page for one mesh; `family` is that of the tree that is restored."""
    distribution, plan = scenario.distribution, scenario.plan
    checkpoint, processes = distribution.checkpoint, distribution.process_count
    reads = heat(
        distribution.leaves,
        checkpoint.location,
        stretches(checkpoint),
        process_count=processes,
        max_gap_bytes=distribution.pace.max_gap_bytes,
    )
    needed = sum(cost.needed_bytes for cost in plan.processes)
    read = sum(cost.read_bytes for cost in plan.processes)
    facts = [
        *([] if family is None else [("family", family)]),
        ("mesh", mesh_text(scenario.mesh)),
        ("devices", f"{scenario.devices:,}"),
        ("processes", f"{processes:,}"),
        ("read by the process that reads most", human_bytes(max(cost.read_bytes for cost in plan.processes))),
        ("read by all of them", human_bytes(read)),
        ("over-read", f"{read / needed if needed else 1:.2f}"),
    ]
    if scenario.estimate is not None:
        facts.append(("estimated time", human_seconds(scenario.estimate.seconds)))
    summary = (
        f"What {processes:,} {'processes' if processes > 1 else 'process'} would read to restore "
        f"{plan.num_arrays:,} arrays, sharded over {scenario.devices:,} devices."
    )
    return draw(checkpoint, reads, summary=summary, facts=facts, leaves=_leaves(scenario))


def _leaves(scenario: Scenario) -> str:
    """Return a table of the leaves that cost most over-read, and what would cost less."""
    rows = worst_leaves(scenario, grouped=True)
    if not rows:
        return ""
    cells = "".join(
        f'<tr><td class="left name">{escape(printable(row.text))}</td><td>{human_bytes(row.needed_bytes)}</td>'
        f"<td>{human_bytes(row.read_bytes)}</td><td>{row.over_read:.2f}</td>"
        + (
            "<td></td><td></td></tr>\n"
            if row.instead is None
            else f'<td class="left">{escape(row.axes)}</td><td>{row.instead.over_read:.2f}</td></tr>\n'
        )
        for row in rows[:_WORST]
    )
    more = f'<p class="quiet">and {len(rows) - _WORST:,} more</p>' if len(rows) > _WORST else ""
    return (
        '<h2>Leaves that are read badly, and a partition that is not</h2>\n<div class="scroll"><table>\n'
        '<thead><tr><th class="left">leaf</th><th>needed</th><th>read</th><th>over-read</th>'
        f'<th class="left">instead</th><th>then</th></tr></thead>\n<tbody>{cells}</tbody></table></div>{more}\n'
    )
