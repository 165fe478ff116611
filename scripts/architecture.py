"""The picture in README.md: `python -m scripts.architecture` writes docs/architecture.svg.

Boxes by hand, because their places say something: what is inside the frame is one jitted function.
"""

import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path

PICTURE = Path(__file__).parents[1] / "docs" / "architecture.svg"
WIDTH, HEIGHT = 960, 560
INK, GREY, PAPER = "#222222", "#777777", "#ffffff"  # white ground, so that it reads on dark pages too
MODEL, CACHE, ATTENTION, HOST = "#fbe3d2", "#d5ecf7", "#d6f0e8", "#eeeeee"


@dataclass(frozen=True)
class Box:
    """A rounded rectangle with a name in monospace and a line of explanation."""

    x: int
    y: int
    width: int
    name: str
    text: str
    fill: str
    height: int = 46

    def svg(self) -> str:
        """Its elements."""
        middle = self.x + self.width // 2
        return (
            f'<rect x="{self.x}" y="{self.y}" width="{self.width}" height="{self.height}" rx="6" fill="{self.fill}" '
            f'stroke="{INK}" stroke-width="0.8"/>'
            + words(middle, self.y + 19, self.name, size=13, mono=True)
            + words(middle, self.y + 36, self.text, size=11.5, color="#444444")
        )


def words(
    x: int, y: int, text: str, *, size: float, mono: bool = False, color: str = INK, anchor: str = "middle"
) -> str:
    """A line of text."""
    family = "ui-monospace, Menlo, Consolas, monospace" if mono else "Helvetica, Arial, sans-serif"
    style = f'font-family="{family}" font-size="{size}" fill="{color}" text-anchor="{anchor}"'
    return f'<text x="{x}" y="{y}" {style}>{escape(text)}</text>'


def arrow(*points: tuple[int, int]) -> str:
    """A line through these points, with a head at the last."""
    path = " ".join(f"{x},{y}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{INK}" stroke-width="1.3" marker-end="url(#head)"/>'


def frame(x: int, y: int, width: int, height: int, *, dashed: bool = False) -> str:
    """A rectangle around boxes."""
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    place = f'x="{x}" y="{y}" width="{width}" height="{height}"'
    return f'<rect {place} rx="10" fill="none" stroke="{GREY}" stroke-width="1.3"{dash}/>'


BOXES = (
    Box(20, 70, 170, "Engine", "requests join and leave", HOST),
    Box(20, 190, 170, "prefill", "prompts, in chunks", MODEL),
    Box(20, 330, 170, "load_checkpoint", "Hugging Face folder", MODEL),
    Box(250, 70, 250, "PagePool.extend", "pages for new tokens: block table", CACHE),
    Box(520, 70, 180, "tile_schedule", "who computes what", ATTENTION),
    Box(250, 140, 450, "Drafter.draft", "the MTP module proposes a chain or a tree (only with drafts)", MODEL),
    Box(270, 232, 200, "absorb_query", "hidden → latents, W_UK · q", MODEL),
    Box(480, 232, 200, "PagedKVCache.write", "bf16, fp16, fp32, FP8", CACHE),
    Box(480, 302, 200, "mla_decode", "all heads read one row", ATTENTION),
    Box(270, 302, 200, "expand_output", "W_UV · out, then MLP or experts", MODEL),
    Box(250, 394, 215, "lm_logits", "then sample, or verify drafts", MODEL),
    Box(485, 394, 215, "PagePool.truncate", "rejected tokens give pages back", CACHE),
    Box(750, 196, 190, "mosaic_gpu", "Pallas kernel for Hopper", ATTENTION),
    Box(750, 256, 190, "flash_mla", "FlashMLA's CUDA kernels", ATTENTION),
    Box(750, 316, 190, "xla", "anywhere, in chunks", ATTENTION),
    Box(750, 376, 190, "reference", "the specification", ATTENTION),
)
ARROWS = (
    ((190, 93), (250, 93)),  # engine → step
    ((105, 116), (105, 190)),  # engine → prefill
    ((105, 330), (105, 236)),  # weights → prefill
    ((190, 213), (228, 213)),  # prefill → the state of the step
    ((500, 93), (520, 93)),
    ((475, 116), (475, 140)),
    ((475, 186), (475, 216)),
    ((470, 255), (480, 255)),
    ((580, 278), (580, 302)),
    ((480, 325), (470, 325)),
    ((370, 370), (370, 394)),
    ((465, 417), (485, 417)),
    ((592, 440), (592, 462), (215, 462), (215, 107), (250, 107)),  # the state goes round
    ((300, 440), (300, 500), (105, 500), (105, 440)),  # tokens go to the host
    ((680, 325), (715, 325), (715, 219), (750, 219)),
    ((715, 279), (750, 279)),
    ((715, 325), (715, 339), (750, 339)),
    ((715, 339), (715, 399), (750, 399)),
)
FRAMES = ((228, 36, 492, 418, False), (250, 216, 450, 154, True))
WORDS = (
    (474, 57, "one jitted function, which XLA captures into one CUDA graph", 13, INK),
    (475, 363, "for each layer", 11, GREY),
    (505, 478, "state: block table, lengths, latents, last tokens; all on the device", 11.5, GREY),
    (845, 180, "implementations of mla_decode", 12, INK),
    (200, 518, "new tokens, once every few steps", 11.5, GREY),
)
LEGEND = ((MODEL, "model"), (CACHE, "cache"), (ATTENTION, "attention"), (HOST, "host"))


def picture() -> str:
    """The SVG."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'role="img" aria-label="How a decode step flows through mla_jax">'
    )
    marker = (
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0,0.5 L7.5,4 L0,7.5 z" fill="{INK}"/></marker></defs>'
    )
    parts = [head, marker, f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="{PAPER}"/>']
    parts += [frame(x, y, w, h, dashed=dashed) for x, y, w, h, dashed in FRAMES]
    parts += [arrow(*points) for points in ARROWS]
    parts += [box.svg() for box in BOXES]
    parts.append(Box(20, 394, 170, "Update", "tokens as they come", HOST).svg())
    parts += [words(x, y, text, size=size, color=color) for x, y, text, size, color in WORDS]
    for i, (fill, name) in enumerate(LEGEND):
        x = 600 + 90 * i
        place = f'x="{x}" y="526" width="14" height="14" rx="3"'
        parts.append(f'<rect {place} fill="{fill}" stroke="{INK}" stroke-width="0.8"/>')
        parts.append(words(x + 20, 538, name, size=11.5, anchor="start"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> int:
    """The exit code."""
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(picture())
    return 0


if __name__ == "__main__":
    sys.exit(main())
