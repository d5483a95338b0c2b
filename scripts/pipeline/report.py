"""One page of all receipts: what was tested, with which results, and what none of them shows.

The page is one HTML file without a script and without anything from elsewhere. The same receipts give the same bytes.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from string import Template
from typing import Any

from scripts.pipeline import files, pins, receipt, report_charts
from scripts.pipeline.report_charts import in_process, numbers_of, verdict
from scripts.pipeline.say import Stop, main

TEMPLATE = Path(__file__).with_suffix(".html")
Json = Mapping[str, Any]
MARK = {"passed": "\u2713 passed", "failed": "\u2717 failed", "not climbed": "\u2013 not climbed"}


def files_of(paths: Sequence[Path]) -> list[Path]:
    """The receipts that are meant: each file once, of a folder its `*.json`. Raises Stop where a path is missing."""
    if missing := [path for path in paths if not path.exists()]:
        raise Stop(f"{missing[0]} isn't there: name receipts, or folders that hold some")
    found = [file for path in paths for file in (sorted(path.glob("*.json")) if path.is_dir() else [path])]
    return list({file.resolve(): file for file in found}.values())


def read_all(files: Iterable[Path]) -> tuple[list[dict[str, Any]], list[tuple[Path, str]]]:
    """The valid receipts, newest first, and each file that is none with the reason."""
    good, bad = [], []
    for file in files:
        try:
            good.append(receipt.read(file))
        except (Stop, ValueError) as error:  # ValueError: a failure that no ladder knows
            bad.append((file, str(error).removeprefix(f"{file}: ").removeprefix(f"{file} ")))
    good.sort(key=lambda r: json.dumps(r, sort_keys=True))
    good.sort(key=lambda r: str(r["when"]), reverse=True)
    return good, sorted(bad)


def short(value: str | None, unknown: str = "not known") -> str:
    """A hash or digest, shortened, with all of it in the tooltip."""
    if not value:
        return f'<span class="soft">{unknown}</span>'
    return f'<code title="{escape(value)}">{escape(value.rpartition("sha256:")[2][:12])}</code>'


def facts(r: Json) -> str:
    """What a receipt says of its image, as a list of terms."""
    image, contract, coverage = r["image"], r["contract"], r["coverage"]
    digest = (image["digests"] or [image["id"]])[0] if image else None
    checks = contract["checks"] if contract else []
    held = f"{sum(bool(check['ok']) for check in checks)}/{len(checks)}" if checks else "not known"
    statuses = sorted(coverage["statuses"].items(), key=lambda item: (-item[1], item[0])) if coverage else []
    covered = ", ".join(f"{count} {name}" for name, count in statuses)
    commit = (
        escape(r["revision"][:12] + ("-dirty" if r["revision"].endswith("-dirty") else "")) if r["revision"] else ""
    )
    terms = {
        "digest" if image and image["digests"] else "image id": short(digest, "no image"),
        "release": escape(" ".join(r["release"][key] for key in ("engine", "version", "variant"))),
        "base": escape(r["base"]["kind"]) if r["base"] else "not known",
        "series": f"{short(r['series']['sha256'])} ({len(r['series']['patches'])} patches)",
        "contract": f"<b>{held}</b>" if not contract or contract["ok"] else f'<b class="chip failed">{held}</b>',
        "coverage": escape(f"{coverage['arch']}: {covered}") if coverage else "not known",
        **({"twin of": f"{short(t['of'])}, {len(t['swapped'])} files swapped"} if (t := r.get("twin")) else {}),
        "commit": f"<code>{commit}</code>" if commit else "not known",
        "when": escape(r["when"].replace("T", " ").replace("Z", " UTC")),
    }
    return "".join(f"<div><dt>{term}</dt><dd>{value}</dd></div>" for term, value in terms.items())


def rung_cells(rungs: Sequence[Json]) -> str:
    """S0 to S4. Neighbours that weren't climbed for the same reason share a cell."""
    cells = []
    for (status, why), group in groupby(rungs, key=lambda g: (g["status"], g["detail"])):
        same = list(group)
        for these in [same] if status == "not climbed" else [[rung] for rung in same]:
            span = f' colspan="{len(these)}"' if len(these) > 1 else ""
            kind = {"not climbed": "none"}.get(status, status)
            mark = f"{MARK[status]} {escape(these[0]['failure'])}".strip()
            says = f'<span class="soft">{escape(why)}</span>'
            cells.append(f'<td class="rung {kind}"{span}><b>{mark}</b>{says}</td>')
    return "".join(cells)


def block(r: Json) -> str:
    """A receipt in the table: what was tested, and a line for each run."""
    name = r["image"]["reference"] if r["image"] else f"server {r['server']}"
    head = (
        f'<th colspan="9" scope="rowgroup"><span class="name">{escape(name)}</span>{verdict(r)}<dl>{facts(r)}</dl></th>'
    )
    rows = [f"<tr>{head}</tr>"]
    for run in r["runs"]:
        length, exact, floor, _ = numbers_of(run)
        shown = "not measured" if length is None else f"<b>{length:.3f}</b>"
        against = f"exactly {exact:g}" if exact is not None else f"floor {floor:g}" if floor is not None else ""
        models = escape(f"{run['target']} with {run['drafter']}")
        rows.append(
            f'<tr><td title="{models}"><b>{escape(run["pair"])}</b></td><td class="number">{run["k"]}</td>'
            f'{rung_cells(run["rungs"])}<td class="number">{shown}<br><small>{against}</small></td>'
            f"<td><small>{escape(run['hardware'])}</small></td></tr>"
        )
    rows += [row_in_process(entry, r) for entry in r.get("in_process", ())]
    return f'<tbody class="receipt">{"".join(rows)}</tbody>'


def row_in_process(entry: Json, r: Json) -> str:
    """The line of an oracle that went through the image's own Python without a server."""
    title = f"oracle in process, {entry['drafter']}"
    runs = [run for run in in_process(r) if run["title"] == title]
    status = "passed" if entry["ok"] and runs else "failed"
    name = (
        entry["failure"].get("name", "") if isinstance(entry["failure"], dict) else "" if runs else "nothing measured"
    )
    lengths = ", ".join(f"{numbers_of(run)[0]:.3f} at K = {run['k']}" for run in runs)
    return (
        f'<tr><td colspan="2"><b>in process</b><br><small>oracle, {escape(entry["drafter"])}</small></td>'
        f'<td class="rung {status}" colspan="5"><b>{MARK[status]} {escape(str(name))}</b><span class="soft">'
        f"without a server, through the image's own Python, from target to verify loop</span></td>"
        f"<td><small>{lengths or 'not measured'}</small></td><td><small>not recorded</small></td></tr>"
    )


def gallery(panels: Sequence[str], none: str) -> str:
    return f'<div class="panels">{"".join(panels)}</div>' if panels else f'<p class="soft">{none}</p>'


def on_gpu(run: Json) -> bool:
    """Whether a run's hardware is known and is no processor (server.hardware writes it)."""
    if run["rungs"][1]["status"] != "passed":
        return False  # no server was up
    return "(CPU)" not in run["hardware"] and not run["hardware"].startswith("not known")


def missing(all_pins: pins.Pins, good: Sequence[Json], bad: Sequence[tuple[Path, str]]) -> list[str]:
    """What the receipts don't show, in words: hardware, models, releases, rungs that nobody climbed, files left out."""
    runs = [run for r in good for run in r["runs"]]
    said = []
    if not any(map(on_gpu, runs)):
        needs = "; ".join(sorted({what for r in good for what in r["needs_gpu"]})) or "speed, memory, real acceptance"
        said.append(f"<b>No receipt from a GPU yet.</b> What only a GPU shows is open: {escape(needs)}.")
    elif not any(on_gpu(run) and run["pair"] == "pinned" and run["ok"] for run in runs):
        said.append("No passed run of the pinned target on a GPU.")
    if not any(run["pair"] == "pinned" for run in runs):
        said.append("No run with the real target and drafter: an oracle shows that drafts and hidden states are right, "
                    "and nothing about speed or about the acceptance length of real models.")  # fmt: skip
    for drafter in all_pins.drafters:
        if not any(report_charts.drafter_of([drafter], run) for run in runs):
            said.append(f"No run with the drafter <code>{escape(drafter.model.repo)}</code>.")
    passed = {tuple(r["release"][key] for key in ("engine", "version", "variant")) for r in good if r["ok"]}
    if lacking := [r.name for r in all_pins.releases if (r.engine, r.version, r.variant) not in passed]:
        said.append(f"No passed receipt of these releases of pins.toml: {escape(', '.join(lacking))}.")
    if dirty := [r for r in good if (r["revision"] or "").endswith("-dirty")]:
        said.append(f"Receipts of images that were built from a tree with changes that no commit has: {len(dirty)}.")
    if unmeasured := sum(not numbers_of(run)[3] for run in runs):
        said.append(f"Runs that came to no measurement of acceptance, and have no chart: {unmeasured} of {len(runs)}.")
    if alone := sum(str(run["rungs"][3]["numbers"].get("output", "")).startswith("not compared") for run in runs):
        said.append(f"Runs whose output was not compared with anything: {alone} of {len(runs)}.")
    whys: dict[str, set[str]] = {}
    for item in (item for r in good for item in r["not_climbed"] if " failed (" not in item["why"]):
        whys.setdefault(item["why"], set()).add(item["rung"])
    said += [f"Not climbed, {', '.join(sorted(rungs))}: {escape(why)}." for why, rungs in sorted(whys.items())]
    return said + [
        f"<b>Left out, because it is no valid receipt:</b> {escape(f'{file.name}: {why}')}" for file, why in bad
    ]


def page(all_pins: pins.Pins, good: Sequence[Json], bad: Sequence[tuple[Path, str]]) -> str:
    """The page. `good` are valid receipts, newest first; `bad` are the files left out, with the reason."""
    measured = [(r, run) for r in good for run in [*r["runs"], *in_process(r)] if numbers_of(run)[3]]
    drafters = all_pins.drafters
    oracle = [report_charts.oracle_panel(r, run) for r, run in measured if run["pair"] == "oracle"]
    real = [report_charts.real_panel(drafters, r, run) for r, run in measured if run["pair"] != "oracle"]
    by_drafter = [
        (d, [run for _, run in measured if run["pair"] != "oracle" and report_charts.drafter_of([d], run)])
        for d in drafters
    ]
    runs = [run for r in good for run in r["runs"]]
    plural = "receipt" if len(good) == 1 else "receipts"
    summary = (
        f"{len(good)} {plural}, {sum(r['ok'] for r in good)} of them passed; {len(runs)} runs, "
        f"{sum(map(on_gpu, runs))} of them on GPUs. The newest is of {good[0]['when'][:10]}."
    )
    return Template(TEMPLATE.read_text()).substitute(
        summary=escape(summary),
        receipts="\n".join(map(block, good)),
        oracle=gallery(oracle, "No run of an oracle has got as far as a measurement."),
        real=gallery(real, "No run of a real drafter has got as far as a measurement. What others published for it:"),
        published="\n".join(report_charts.published(d, ours) for d, ours in by_drafter if d.published),
        missing="\n".join(f"<li>{line}</li>" for line in missing(all_pins, good, bad)),
    )


def write(path: Path, text: str) -> None:
    """Write the page, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".report-") as folder:
        half = Path(folder) / "page"
        half.write_text(text, encoding="utf-8")
        os.replace(half, path)


def job(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="nox -s report --", description=__doc__, allow_abbrev=False)
    parser.add_argument("paths", nargs="*", type=Path, metavar="PATH", help="receipts, or folders of them "
                        "(default: those of this machine)")  # fmt: skip
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="the page (default: report.html beside the receipts' folder)"
    )
    options = parser.parse_args(argv)
    kept, out = files.cache() / "receipts", options.out or files.cache() / "report.html"
    paths = files_of(options.paths or ([kept] if kept.is_dir() else []))
    if not paths:
        raise Stop(f"no receipts in {', '.join(map(str, options.paths)) or kept}: `nox -s smoke-ENGINE` writes one")
    good, bad = read_all(paths)
    for file, why in bad:
        print(f"error: {file}: {why}", file=sys.stderr)
    if not good:
        raise Stop(f"none of {len(paths)} files is a valid receipt, so there is no page")
    if out.resolve() in {file.resolve() for file in paths}:
        raise Stop(f"--out {out} is one of the receipts: name another file")
    write(out, page(pins.load(), good, bad))
    print(out.resolve())
    if bad:
        raise SystemExit(1)


if __name__ == "__main__":
    main(job)
