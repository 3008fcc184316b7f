"""Draw generated text with each token coloured by where it came from: an accepted guess, or the target itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from kdtree_nb.viz.theme import BLUE, GREY, ORANGE, figure
from kdtree_nb.viz.tree import readable

_ASPECT = 2.1
"""Height of a line in units of a character's width."""


_FIGURE_WIDTH = 8.0
_GLYPH_WIDTH = 0.602
"""Width of a DejaVu Sans Mono character in units of the font size."""


def draw_text(
    prompt: str,
    tokens: Sequence[int],
    accepted_per_step: Sequence[int],
    decode: Callable[[list[int]], str],
    *,
    width: int = 72,
    ax: Axes | None = None,
) -> Figure:
    """Draw `prompt` in grey and the generated tokens behind it, each on a box: blue where the tree had guessed it,
    orange and underlined where the target supplied it, which ends a step.

    tokens: the generated ids; accepted_per_step: how many of a step's tokens were guesses, as in GenerationStats.
    decode: [token] -> text. width: characters per line. ax: where to draw, instead of in a new figure.
    """
    cells = [(character, "prompt") for character in prompt]
    for token, source in zip(tokens, token_sources(accepted_per_step, len(tokens)), strict=True):
        cells += [(character, source) for character in decode([token])]
    placed = _lay_out(cells, width)
    num_lines = 1 + placed[-1][2]
    if ax is None:
        _, ax = figure(_FIGURE_WIDTH, text_height(num_lines, width) + 0.2)
    for character, source, line, column in placed:
        _draw_character(ax, character, source, line, column, font=0.92 * _FIGURE_WIDTH * 72 / width / _GLYPH_WIDTH)
    ax.set(xlim=(0, width), ylim=(-num_lines * _ASPECT, 0), aspect="equal")
    ax.axis("off")
    return ax.figure


def text_height(num_lines: int, width: int = 72) -> float:
    """Inches that so many lines of `draw_text` take, in an axes eight inches wide."""
    return _FIGURE_WIDTH / width * _ASPECT * num_lines


def token_sources(accepted_per_step: Sequence[int], num_tokens: int) -> list[str]:
    """For each token "guess" or "target": a step emits its accepted guesses and then one token of the target.

    Raises ValueError when the steps do not add up to `num_tokens` (the last one may have been cut short).
    """
    sources = [s for accepted in accepted_per_step for s in ["guess"] * accepted + ["target"]]
    if not num_tokens <= len(sources) <= num_tokens + 1:
        raise ValueError(f"draw_text: expected steps of {num_tokens} tokens, got {len(sources)}")
    return sources[:num_tokens]


def _lay_out(cells: Sequence[tuple[str, str]], width: int) -> list[tuple[str, str, int, int]]:
    """(character, source, line, column) of each cell; a line feed is drawn where it stands and ends its line."""
    placed, line, column = [], 0, 0
    for character, source in cells:
        if column == width:
            line, column = line + 1, 0
        placed.append((character, source, line, column))
        column += 1
        if character == "\n":
            line, column = line + 1, 0
    return placed


def _draw_character(ax: Axes, character: str, source: str, line: int, column: int, font: float) -> None:
    top = -line * _ASPECT
    if source != "prompt":
        colour = BLUE if source == "guess" else ORANGE
        ax.add_patch(Rectangle((column + 0.04, top - _ASPECT + 0.15), 0.92, _ASPECT - 0.3, color=colour, linewidth=0))
    if source == "target":
        ax.plot([column + 0.1, column + 0.9], [top - _ASPECT + 0.38] * 2, color="white", linewidth=0.8)
    shown = character if source == "prompt" else readable(character)
    if shown.strip():
        style = {"color": GREY if source == "prompt" else "white", "family": "DejaVu Sans Mono", "fontsize": font}
        ax.text(column + 0.5, top - _ASPECT / 2, shown, ha="center", va="center", **style)
