"""The parts that reports are made of: one HTML file, no script, no external resource, everything from outside escaped.

What is passed as `html` or ends in `_html` is put in as it is; everything else is text.
"""

from collections.abc import Iterable, Sequence
from html import escape

from agent_r3.archive import EpisodeInfo, TurnText

Figure = tuple[str, str | None, str]  # title, SVG or None where there is nothing to draw, caption
Tile = tuple[str, str, str]  # label, value, small print

_TEXT_CHARS = 4_000


def page(title: str, heading: str, lead_html: str, sections_html: Iterable[str]) -> str:
    """The whole document. `title` is the browser's, `heading` the reader's."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_CSS}</style></head><body>"
        f"<header><h1>{escape(heading)}</h1><p>{lead_html}</p></header>"
        f"{''.join(sections_html)}</body></html>\n"
    )


def section(heading: str, html: str) -> str:
    return f"<section><h2>{escape(heading)}</h2>{html}</section>"


def tiles(entries: Iterable[Tile]) -> str:
    cells = "".join(
        f'<div class="tile"><span>{escape(label)}</span><b>{escape(value)}</b><small>{escape(below)}</small></div>'
        for label, value, below in entries
    )
    return f'<section class="tiles">{cells}</section>'


def figures(entries: Iterable[Figure]) -> str:
    """Those that have something to draw, side by side where there is room."""
    shown = "".join(
        f"<figure><h3>{escape(title)}</h3>{svg}<figcaption>{escape(caption)}</figcaption></figure>"
        for title, svg, caption in entries
        if svg is not None
    )
    return f'<div class="figures">{shown}</div>'


def table(headings: Sequence[str], rows_html: Iterable[Sequence[str]], *, numbers: Sequence[int] = ()) -> str:
    """Cells are HTML already. Columns in `numbers` stand to the right."""
    kind = ["<{} class='n'>" if column in numbers else "<{}>" for column in range(len(headings))]
    head = "".join(f"{k.format('th')}{escape(heading)}</th>" for k, heading in zip(kind, headings, strict=True))
    body = "".join(
        "<tr>" + "".join(f"{k.format('td')}{cell}</td>" for k, cell in zip(kind, row, strict=True)) + "</tr>"
        for row in rows_html
    )
    return f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def badge(text: str, kind: str) -> str:
    """`kind`: good, bad, or a class of its own in the style sheet."""
    return f'<span class="badge {escape(kind)}">{escape(text)}</span>'


def episode(head_html: str, info: EpisodeInfo) -> str:
    """A finished episode, folded: its turns and its patch."""
    turns = "".join(map(_turn, info.turns))
    patch = f"<h4>patch</h4><pre>{cut(info.patch)}</pre>" if info.patch.strip() else ""
    ids = (
        f"<p class='note'>{escape(info.id)}, {info.cached_tokens:,} of {info.prompt_tokens:,} prompt tokens cached</p>"
    )
    return f"<details class='episode'><summary>{head_html}</summary>{ids}{turns}{patch}</details>"


def _turn(turn: TurnText) -> str:
    seconds = ", ".join(f"{name} {value:.2f} s" for name, value in turn.seconds.items())
    head = (
        f"turn {turn.index + 1} · tokens {turn.start}..{turn.start + turn.prompt + turn.sampled - 1} "
        f"({turn.prompt} new, {turn.sampled} sampled, {turn.cached_tokens} cached) · policy {turn.policy_version}"
        + (f" · {seconds}" if seconds else "")
    )
    observations = "".join(
        f"<pre class='observation{' wrong' if observation.is_error else ''}'>{cut(observation.text)}</pre>"
        for observation in turn.observations
    )
    return f"<div class='turn'><h4>{escape(head)}</h4><pre class='sampled'>{cut(turn.text)}</pre>{observations}</div>"


def cut(text: str) -> str:
    """Escaped, the middle of a long text left out."""
    if len(text) <= _TEXT_CHARS:
        return escape(text)
    half = _TEXT_CHARS // 2
    return f"{escape(text[:half])}\n[… {len(text) - 2 * half:,} characters …]\n{escape(text[-half:])}"


_CSS = """
body{font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif;color:#0f172a;background:#f8fafc;margin:0 auto;
max-width:1180px;padding:24px}
h1{margin:0;font-size:26px;overflow-wrap:anywhere}h2{font-size:19px;margin:34px 0 10px}h3{font-size:14px;margin:0 0 4px}
h4{font-size:12px;font-weight:600;color:#475569;margin:14px 0 4px}
header p,.note,figcaption,small{color:#64748b}header p{margin:4px 0 18px;overflow-wrap:anywhere}
.note{font-size:13px;max-width:900px}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(200px,1fr));gap:10px}
.tile,figure,.episode,.group{background:#fff;border:1px solid #e2e8f0;border-radius:8px}
.tile{padding:10px 14px;display:flex;flex-direction:column}.tile span{font-size:12px;color:#64748b}
.tile b{font-size:20px}.tile small{font-size:12px}
.figures{display:grid;align-items:start;grid-template-columns:repeat(auto-fit,minmax(min(480px,100%),1fr));gap:14px}
figure{margin:0;padding:12px 14px}figcaption{font-size:12px}
figure svg{width:100%;max-width:640px;height:auto;display:block;margin:0 auto}
.table{overflow-x:auto}table{border-collapse:collapse}td,th{padding:3px 18px 3px 0;text-align:left;vertical-align:top}
th{font-size:12px;color:#475569;white-space:nowrap}.n{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
.notes{max-width:900px;margin:14px 0;padding:10px 14px 10px 30px;background:#fffbeb;border:1px solid #fde68a;
border-radius:8px;font-size:14px;overflow-wrap:anywhere}
.episode,.group{margin:8px 0;padding:8px 14px}summary{cursor:pointer;overflow-wrap:anywhere}
.group table{font-size:13px}.group td{border-top:1px solid #f1f5f9}
.id{overflow-wrap:anywhere;min-width:150px;max-width:300px}.reason{color:#475569;min-width:180px;overflow-wrap:anywhere}
.badge{display:inline-block;min-width:22px;text-align:center;border-radius:10px;padding:0 7px;color:#fff}
.badge{font-size:12px;white-space:nowrap}
.good,.resolved{background:#15803d}.bad,.failed{background:#dc2626}.empty_patch{background:#64748b}
.not_applied{background:#b45309}.error{background:#7e22ce}.none{background:#94a3b8}
pre{font:12px/1.45 ui-monospace,"SF Mono",Menlo,Consolas,monospace;background:#f1f5f9;border-radius:6px;
padding:8px 10px;margin:4px 0;white-space:pre-wrap;overflow-wrap:anywhere;max-height:420px;overflow:auto}
.sampled{background:#eff6ff;border-left:3px solid #2563eb}.observation{border-left:3px solid #94a3b8}
.observation.wrong{background:#fef2f2;border-left-color:#dc2626}
@media(max-width:600px){body{padding:14px}.tiles{grid-template-columns:repeat(2,minmax(0,1fr))}
figure{padding:10px 8px}.tile{padding:8px 10px}td,th{padding-right:12px}
table{font-size:13px}.id{min-width:90px}.reason{min-width:150px}}
"""
