"""The charts of the page of receipts, as SVG: acceptance by position of one run, published lengths by K."""

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import Any

from scripts.pipeline import pins

Json = Mapping[str, Any]
SMALL, BIG = (224, 132), (446, 240)  # sizes of the charts, in the units of their viewBox
LEFT, RIGHT, TOP, BOTTOM = 38, 8, 18, 20  # around what is plotted


def numbers_of(run: Json) -> tuple[float | None, float | None, float | None, list[float]]:
    """Acceptance length, exact expectation, floor, shares by position; None and empty where they weren't measured."""
    numbers = run["rungs"][3]["numbers"]
    length, exact, floor = (_number(numbers.get(name)) for name in ("acceptance", "expected", "floor"))
    shares = [_number(share) for share in numbers.get("per_position") or ()]
    return length, exact, floor, [share for share in shares if share is not None and 0 <= share <= 1]


def verdict(tested: Json) -> str:
    """The chip of a receipt or of a run: passed, failed, or open where nothing failed and not all was climbed."""
    parts = tested.get("runs", [tested])
    broken = any(rung["status"] == "failed" for run in parts for rung in run["rungs"])
    broken = broken or not all(entry["ok"] for entry in tested.get("in_process", ()))
    word, kind = (
        ("passed", "passed") if tested["ok"] and not broken else ("failed",) * 2 if broken else ("open", "none")
    )
    return f'<span class="chip {kind}">{word}</span>'


def in_process(r: Json) -> list[dict[str, Any]]:
    """The oracle's runs without a server, in the form of runs up the ladder, of which they have S3's numbers alone."""
    found = []
    for entry in r.get("in_process", ()):
        for part in filter(lambda part: isinstance(part, dict), entry["runs"]):
            k, drafts, length = (_number(part.get(name)) for name in ("k", "drafts", "acceptance_length"))
            if not k or not drafts or length is None:
                continue
            # With a partial draft vocabulary it is less than K + 1, by how much is not in the receipt.
            whole = isinstance(entry["oracle"], dict) and not entry["oracle"].get("partial")
            exact = k + 1 if whole else None
            by_position = [(_number(count) or 0) / drafts for count in part.get("accepted_per_position") or ()]
            numbers = {"acceptance": length, "expected": exact, "per_position": by_position}
            s3 = {"status": "passed" if entry["ok"] else "failed", "numbers": numbers}
            title = f"oracle in process, {entry['drafter']}"
            found.append(
                {"pair": "oracle", "title": title, "k": int(k), "ok": entry["ok"], "rungs": [{"status": ""}] * 3 + [s3]}
            )
    return found


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def curves(drafter: pins.Drafter) -> dict[tuple[str, str], dict[int, float]]:
    """Published acceptance lengths by K, for each (prompts, source), in the order of pins.toml."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    for p in drafter.published:
        found.setdefault((p.prompts, p.source), {})[p.k] = p.acceptance
    return found


def shares(curve: Mapping[int, float]) -> list[float]:
    """Shares by position out of acceptance lengths at K = 1, 2, ... without a gap: each K adds the share of its last.

    An estimate: with another K, rounds begin at other tokens.
    """
    lengths = [1.0]
    while len(lengths) in curve:
        lengths.append(curve[len(lengths)])
    return [max(0.0, b - a) for a, b in pairwise(lengths)]


def axes(size: tuple[int, int], ticks: Mapping[str, float], below: str) -> str:
    """Grid lines at heights of 0 to 1 with their labels, and the name of the horizontal axis."""
    width, height = size
    lines = []
    for label, share in ticks.items():
        y = TOP + (1 - share) * (height - TOP - BOTTOM)
        lines.append(
            f'<line class="{"grid" if share else "axis"}" x1="{LEFT}" x2="{width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        lines.append(f'<text x="{LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    return "".join(lines) + f'<text x="{width - RIGHT}" y="{height + 10}" text-anchor="end">{below}</text>'


def panel(r: Json, run: Json, expected: Sequence[float], against: str) -> str:
    """A chart of one run: a bar for each position, and a line where it is expected."""
    length, _, _, measured = numbers_of(run)
    width, height = SMALL
    slot, plot = (width - LEFT - RIGHT) / len(measured), height - TOP - BOTTOM
    bars = []
    for i, share in enumerate(measured):
        x, bar, top = LEFT + i * slot, min(34.0, slot * 0.7), TOP + (1 - share) * plot
        kind = "oracle" if run["pair"] == "oracle" else "real"
        place = f'x="{x + (slot - bar) / 2:.1f}" y="{top:.1f}"'
        bars.append(f'<rect class="{kind}" {place} width="{bar:.1f}" height="{share * plot:.1f}"/>')
        mark = [share]
        if i < len(expected):
            y = TOP + (1 - expected[i]) * plot
            bars.append(f'<line class="known" x1="{x + 2:.1f}" x2="{x + slot - 2:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>')
            mark.append(expected[i])
        if len(measured) <= 8:
            y = TOP + (1 - max(mark)) * plot - 4
            bars.append(
                f'<text class="value" x="{x + slot / 2:.1f}" y="{y:.1f}" text-anchor="middle">{share * 100:.0f}</text>'
            )
            bars.append(f'<text x="{x + slot / 2:.1f}" y="{height - 6}" text-anchor="middle">{i + 1}</text>')
    name = r["image"]["reference"].rpartition("/")[2] if r["image"] else str(r["server"])
    of = f"{escape(r['image']['id'][7:19])}, " if r["image"] else ""
    title = run.get("title", run["pair"])
    label = f"{name}, {title}, K = {run['k']}: " + ", ".join(f"{share:.0%}" for share in measured)
    return (
        f"<figure><figcaption><b>{escape(title)}, K = {run['k']}</b> {verdict(run)}<br>"
        f"<small>{escape(name)}<br>{of}{escape(r['when'][:10])}</small></figcaption>"
        f'<svg viewBox="0 0 {width} {height + 14}" role="img" aria-label="{escape(label)}">'
        f"{axes(SMALL, {'0': 0, '50 %': 0.5, '100 %': 1}, 'position')}{''.join(bars)}</svg>"
        f"<figcaption><b>{length or 0:.3f}</b> <small>{escape(against)}</small></figcaption></figure>"
    )


def oracle_panel(r: Json, run: Json) -> str:
    _, exact, _, _ = numbers_of(run)
    # Only K + 1 says what each position has to be. For another sum, the receipt doesn't hold the parts.
    expected = [1.0] * run["k"] if exact == run["k"] + 1 else []
    return panel(r, run, expected, "no exact length is recorded" if exact is None else f"expected: exactly {exact:g}")


def drafter_of(drafters: Iterable[pins.Drafter], run: Json) -> pins.Drafter | None:
    return next((d for d in drafters if d.model.repo == run["drafter"].partition("@")[0]), None)


def real_panel(drafters: Sequence[pins.Drafter], r: Json, run: Json) -> str:
    known = drafter_of(drafters, run)
    whole = {key: shares(curve) for key, curve in curves(known).items()} if known else {}
    (prompts, _), expected = max(whole.items(), key=lambda item: len(item[1]), default=(("", ""), []))
    at_k = [p.acceptance for p in known.published if p.k == run["k"]] if known else []
    text = f"published at K = {run['k']}: {min(at_k):g} to {max(at_k):g}" if at_k else "nothing is published for this K"
    return panel(r, run, expected, f"{text}; line: {prompts}, estimated" if expected else text)


def published(drafter: pins.Drafter, runs: Sequence[Json]) -> str:
    """The published acceptance lengths of a drafter by K, drawn and as a table, with our own runs beside them."""
    if not drafter.published:
        return ""
    ours = [(run["k"], length) for run in runs if (length := numbers_of(run)[0]) is not None]
    top = max([p.k for p in drafter.published] + [k for k, _ in ours])
    width, height = BIG
    high = math.ceil(max([p.acceptance for p in drafter.published] + [length for _, length in ours]))

    def at(k: float, length: float) -> tuple[float, float]:
        x = LEFT + (k - 0.5) / top * (width - LEFT - RIGHT)
        return x, TOP + (1 - (length - 1) / (high - 1)) * (height - TOP - BOTTOM)

    (x1, y1), (x2, y2) = at(0.5, 1.5), at(high - 1, high)
    drawn = [f'<line class="limit" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>']
    drawn.append(f'<text x="{x2 + 6:.1f}" y="{y2 + 9:.1f}">K + 1, the most there can be</text>')
    for curve in curves(drafter).values():
        points = [at(k, length) for k, length in sorted(curve.items())]
        drawn.append(f'<path class="path" d="M{" L".join(f"{x:.1f} {y:.1f}" for x, y in points)}"/>')
        drawn += [f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="4"/>' for x, y in points]
    for k, length in ours:
        x, y = at(k, length)
        place = f'x="{x - 5:.1f}" y="{y - 5:.1f}" width="10" height="10"'
        drawn.append(f'<rect class="real" {place}><title>{length:.3f}</title></rect>')
    for k in range(1, top + 1):
        drawn.append(f'<text x="{at(k, 1)[0]:.1f}" y="{height - 6}" text-anchor="middle">{k}</text>')
    ticks = {f"{n}": (n - 1) / (high - 1) for n in range(1, high + 1)}
    name = escape(drafter.model.repo)
    ks = sorted({p.k for p in drafter.published} | {k for k, _ in ours})
    row = "<tr><td>{}</td>{}<td><small>{}</small></td></tr>"
    lines = [(escape(prompts), curve, escape(source)) for (prompts, source), curve in curves(drafter).items()]
    lines += [(f"<b>measured</b>, run {n}", {k: length}, "these receipts") for n, (k, length) in enumerate(ours, 1)]
    rows = [
        row.format(a, "".join(f'<td class="number">{c[k]:.2f}</td>' if k in c else "<td></td>" for k in ks), b)
        for a, c, b in lines
    ]
    heads = "".join(f'<th class="number">{k}</th>' for k in ks)
    return (
        f'<h3>Published for <code>{name}</code>, by K</h3><div class="beside"><figure class="big">'
        f'<svg viewBox="0 0 {width} {height + 14}" role="img" aria-label="published acceptance lengths by K">'
        f"{axes(BIG, ticks, 'K, draft tokens')}{''.join(drawn)}</svg><figcaption><small>Acceptance length by K. Dots: "
        f"published. Squares: measured, over all prompts of a run.</small></figcaption></figure>"
        f'<table class="figures"><thead><tr><th>Prompts, K =</th>{heads}<th>Source</th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )
