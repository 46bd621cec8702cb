"""Guidelines as pages show them: Markdown as safe HTML, and the lines in which two versions differ."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache

from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markdown_it.utils import EnvType, OptionsDict

_MOST_STEPS = 3_000_000  # of difflib on one comparison, less than a second
_CONTEXT = 2  # unchanged lines that are shown around a change


class _Renderer(RendererHTML):
    """Renders headings two levels lower, below those of the page, and links that tell their target nothing."""

    def heading_open(self, tokens: Sequence[Token], index: int, options: OptionsDict, env: EnvType) -> str:
        return f"<h{_lower(tokens[index])}>"

    def heading_close(self, tokens: Sequence[Token], index: int, options: OptionsDict, env: EnvType) -> str:
        return f"</h{_lower(tokens[index])}>\n"

    def link_open(self, tokens: Sequence[Token], index: int, options: OptionsDict, env: EnvType) -> str:
        # A new tab: the page may hold an answer that is not sent yet.
        tokens[index].attrs |= {"rel": "noopener noreferrer nofollow", "target": "_blank"}
        return str(self.renderToken(tokens, index, options, env))


def render_markdown(text: str) -> str:
    """Renders Markdown as HTML without any of the text's own tags, scripts or pictures."""
    return str(_parser().render(text))


@dataclass(frozen=True)
class DiffLine:
    """A line of a comparison: ``same``, ``added``, ``removed``, or ``gap`` for unchanged lines that are left out."""

    kind: str
    text: str


def compare(old: str, new: str) -> list[DiffLine]:
    """Compares two texts line by line, in a time that does not grow with the square of their lengths."""
    before, after = old.splitlines(), new.splitlines()
    lines: list[DiffLine] = []
    start = new_start = 0
    for block, new_block, size in [*_equal_blocks(before, after), (len(before), len(after), 0)]:
        if start < block or new_start < new_block:
            lines += _lines(before, after, "changed", start, block, new_start, new_block)
        if size:
            lines += _lines(before, after, "equal", block, block + size, new_block, new_block + size)
        start, new_start = block + size, new_block + size
    return lines


def _equal_blocks(before: list[str], after: list[str]) -> list[tuple[int, int, int]]:
    """Returns the starts in both texts, and the length, of each stretch of lines that stayed."""
    head = _shared(before, after)
    middle, new_middle = before[head:], after[head:]
    tail = _shared(middle[::-1], new_middle[::-1])
    middle, new_middle = middle[: len(middle) - tail], new_middle[: len(new_middle) - tail]
    blocks = [(0, 0, head)]
    # Difflib looks at all pairs of equal lines for each block that it finds. Beyond the limit the lines between are
    # shown as removed and added.
    counts = Counter(new_middle)
    if min(len(middle), len(new_middle)) * (len(middle) + sum(counts[line] for line in middle)) <= _MOST_STEPS:
        matches = SequenceMatcher(None, middle, new_middle, autojunk=False).get_matching_blocks()
        blocks += [(head + block.a, head + block.b, block.size) for block in matches]
    blocks.append((len(before) - tail, len(after) - tail, tail))
    return [block for block in blocks if block[2]]


def _shared(first: list[str], second: list[str]) -> int:
    """Returns how many lines two lists have in common at their beginning."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(first), len(second)))


def _lines(before: list[str], after: list[str], kind: str, *bounds: int) -> Iterator[DiffLine]:
    start, stop, new_start, new_stop = bounds
    if kind != "equal":
        yield from (DiffLine("removed", line) for line in before[start:stop])
        yield from (DiffLine("added", line) for line in after[new_start:new_stop])
        return
    lines = before[start:stop]
    head = _CONTEXT if start else 0
    tail = _CONTEXT if stop < len(before) or new_stop < len(after) else 0
    if len(lines) <= head + tail + 1:
        yield from (DiffLine("same", line) for line in lines)
        return
    yield from (DiffLine("same", line) for line in lines[:head])
    yield DiffLine("gap", str(len(lines) - head - tail))
    yield from (DiffLine("same", line) for line in lines[len(lines) - tail :])


def _lower(token: Token) -> int:
    return min(6, int(token.tag[1:]) + 2)


@cache
def _parser() -> MarkdownIt:
    # No HTML and no pictures: the content policy would block theirs, and a picture elsewhere tells who reads it.
    parser = MarkdownIt("commonmark", {"html": False}, renderer_cls=_Renderer)
    return parser.enable(["table", "strikethrough"]).disable("image")
