"""The colours of all pictures: of pages that commands write, and of the documentation.

A colour with a meaning has the same one everywhere:

- `moved`, blue: bytes of files that are read or written, and needed.
- `over`, orange: bytes that are read but not needed.
- `stored`, grey: bytes of files that stay where they are.
- `device`, green: arrays on devices.

People who do not see all colours tell these apart, and each stands out from `ground`, in the dark as well.
"""

from __future__ import annotations

# In the light, in the dark.
_COLOURS = {
    "moved": ("#0066b0", "#5ab4f0"),
    "over": ("#c2500a", "#f09a3e"),
    "stored": ("#dfe4ea", "#333d49"),
    "device": ("#007a5a", "#35c497"),
    "ground": ("#ffffff", "#161b22"),
    "card": ("#f3f5f8", "#1f2630"),
    "line": ("#9aa5b1", "#5c6875"),
    "ink": ("#1f2933", "#e6e9ed"),
    "soft": ("#52606d", "#b0bac5"),
    "inverse": ("#ffffff", "#11161c"),
}
MEANINGS = ("moved", "over", "stored", "device")
# A terminal's background is not known: these are legible on black and on white, and near the colours above.
TERMINAL = {"moved": "color(32)", "over": "color(166)", "stored": "dim"}


def style() -> str:
    """Return the CSS that defines the colours as variables, and a class for each that has a meaning."""
    light, dark = (" ".join(f"--{name}: {pair[column]};" for name, pair in _COLOURS.items()) for column in (0, 1))
    classes = "\n".join(f".{name} {{ fill: var(--{name}); }}" for name in MEANINGS)
    return (
        f":root {{ color-scheme: light dark; {light} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n{classes}\n"
    )
