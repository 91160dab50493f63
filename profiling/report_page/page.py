"""The page, from report.json: the verdict first, then what it rests on."""

from collections.abc import Callable
from html import escape
from typing import Any

from analysis.budget import PARTS
from analysis.verdict import NAMES, milliseconds, percent

from effasr.pages.markup import (
    Cell,
    bar,
    figure,
    key,
    keyed,
    lead,
    legend,
    page,
    paragraph,
    records,
    section,
    text,
    tiles,
)
from effasr.pages.markup import (
    contents as links,
)
from report_page import markup, style
from report_page.markup import duration, share, times, unbroken

_NOTABLE = 0.005  # ranks whose times differ by less are the same


def render(report: dict[str, Any]) -> str:
    if "comparison" in report:
        title = f"{report['comparison']['after']} against {report['comparison']['before']}"
        body = _comparison(report)
    else:
        title = report["name"]
        body = _header(report) + all_of(report)
    return page(f"Where the time goes: {title}", body)


def _header(report: dict[str, Any]) -> str:
    facts = " · ".join(f"{escape(name)}: {escape(fact)}" for name, fact in report["facts"].items())
    return (
        f"<header><h1>Where the time goes: {escape(report['name'])}</h1>"
        f'<p class="verdict">{unbroken(report["verdict"]["text"])}</p><p>{facts}</p>'
        f"{links(contents(report))}</header>{_tiles(report)}"
    )


def _tiles(report: dict[str, Any]) -> str:
    budget, log = report["budget"], report["log"]
    shown: list[tuple[str, str, str]] = []
    if budget:
        step = budget["step_ms"]
        parts = {part["name"]: part for part in budget["parts"]}
        worst = max((p for p in budget["parts"] if p["name"] != "compute"), key=lambda p: p["ns"])
        spread = f"{milliseconds(step['min'])} to {milliseconds(step['max'])}"
        shown = [
            ("a step", milliseconds(step["mean"]), spread if budget["windows"] > 1 else ""),
            ("compute", percent(parts["compute"]["share"]), "of the step"),
            (NAMES[worst["name"]], percent(worst["share"]), "the largest other part"),
        ]
    elif "step_s" in log:
        shown = [("a step", milliseconds(log["step_s"]["mean"] * 1e3), "by metrics.jsonl")]
    if "audio_hours_per_hour" in log:
        shown.append(("audio", f"{log['audio_hours_per_hour']:,.0f} h", "trained on in an hour"))
    if "padding_frames" in report["padding"]:
        shown.append(("padding", percent(report["padding"]["padding_frames"]["mean"]), "of frames"))
    if report["ranks"].get("slowest_by", 0.0) >= _NOTABLE:
        ranks = report["ranks"]
        by = f"{percent(ranks['slowest_by'])} over the mean"
        shown.append(("slowest", ranks["slowest"], by))
    return tiles(shown)


# The sections of a report of one run, in the order of a reader's questions.

MEANINGS = {
    "compute": "a kernel runs that is no communication",
    "communication": "only communication runs: nothing hides it",
    "copies": "only copies and fills of memory run",
    "data_wait": "the GPU has nothing to do, and the host waits for a batch",
    "host_gap": "the GPU has nothing to do, and the next work is not launched yet",
    "idle": "the GPU has nothing to do for another reason, see below",
}
ON_CPU = {
    "compute": "an operator runs",
    "data_wait": "a batch is made or waited for",
    "host_gap": "no operator runs: Python, and the profiler itself",
    "idle": "outside of every range",
}
IDLE = {
    "queued": "launched but not begun: launch latency, or waiting for other work",
    "synchronizing": "the host is blocked in a synchronizing call",
    "outside": "the host is in no range",
}
_MOST_STEPS = 40  # shown one by one; report.json has all


def contents(report: dict[str, Any]) -> list[tuple[str, str, Callable[[dict[str, Any]], str]]]:
    data = report["budget"]
    work = "Kernels" if data and data["has_gpu"] else "Operators"
    sections = [
        (data, "budget", "Step budget", budget),
        (True, "actions", "What to do", actions),
        (data, "timeline", "One step", timeline),
        (data, "work", "Work", by_phase),
        (data, "kernels", work, kernels),
        (report["ranks"], "ranks", "Ranks", ranks),
        (True, "padding", "FLOPs and padding", padding),
        (True, "quality", "Capture quality", quality),
        (True, "method", "How to read this", method),
    ]
    return [tuple(section) for is_there, *section in sections if is_there]


def all_of(report: dict[str, Any]) -> str:
    return "".join(
        section(title, identifier, content(report))
        for identifier, title, content in contents(report)
    )


def budget(report: dict[str, Any]) -> str:
    data = report["budget"]
    parts, mean = data["parts"], data["step_ms"]["mean"]
    meanings = MEANINGS if data["has_gpu"] else MEANINGS | ON_CPU
    bar = markup.stacked(
        [("", [(part["name"], part["ms"]) for part in parts])],
        *(style.PARTS, "Parts of a step"),
        names=NAMES,
    )
    entries = []
    for part in parts:
        name = part["name"]
        title = key(style.PARTS[name]) + escape(NAMES[name])
        entries.append(part | {"title": title, "when": meanings[name]})
        reasons = data["idle"] if name == "idle" and part["ns"] else []
        entries += [
            reason | {"title": f"&emsp;of it: {reason['name']}", "when": IDLE[reason["name"]]}
            for reason in reasons
            if reason["ns"]
        ]
    columns = {
        "part": lambda entry: Cell(entry["title"]),
        "per step": duration("ms"),
        "share": share("share"),
        "when": lambda entry: text(entry["when"]),
    }
    exact = "exactly: the parts are the step, divided"
    last = {"title": "the step", "ms": mean, "share": 1, "when": exact}
    hidden, more = data["hidden_communication"], ""
    if hidden["ns"]:
        more = lead(
            f"Another {milliseconds(hidden['ms'])} of communication a step are hidden under "
            "compute and cost nothing."
        )
    summary = "Every moment of a step counts once: for the first of these parts that holds."
    made = paragraph(summary) + bar + records(columns, entries, last=last) + more
    return made + (_per_step(data) if len(data["per_step"]) > 1 else "")


def _per_step(data: dict[str, Any]) -> str:
    steps = data["per_step"][:_MOST_STEPS]
    rows = [
        (f"step {step['step']}", [(name, step["parts_ms"][name]) for name in PARTS])
        for step in steps
    ]
    of = f" of {data['per_rank'][0]['name']}" if data["ranks"] > 1 else ""
    left_out = len(data["per_step"]) - len(steps)
    title = f"Step by step{of}" + (f", without the last {left_out}" if left_out else "")
    picture = markup.stacked(rows, style.PARTS, title, names=NAMES)
    return f"<details><summary>{escape(title)}</summary>{picture}</details>"


def actions(report: dict[str, Any]) -> str:
    if not report["actions"]:
        return paragraph("No part but compute takes 0.5 % of a step.")
    summary = (
        "How many times as fast the run would be if the part took no time at all: a bound, not a "
        "forecast."
    )
    columns = {
        "action": lambda entry: Cell(f"{entry['number']}. {escape(entry['title'])}"),
        "at most": lambda entry: figure(
            entry["speedup_at_most"] or 1e9, times(entry["speedup_at_most"])
        ),
        "share of the step": share("share"),
        "which part": lambda entry: text(entry["basis"]),
        "how": lambda entry: text(entry["how"]),
    }
    numbered = [entry | {"number": n} for n, entry in enumerate(report["actions"], 1)]
    return paragraph(summary) + records(columns, numbered)


def timeline(report: dict[str, Any]) -> str:
    picture = report["timeline"]
    # Names of the segments of the rows, in the order in which they come.
    used: dict[str, dict[str, None]] = {"budget": {}, "host": {}, "device": {}}
    for row in picture["rows"]:
        kind = row["name"] if row["name"] in used else "device"
        used[kind] |= dict.fromkeys(name for *_, name in row["segments"])
    phases = dict(zip(used["host"], style.CYCLE, strict=False))

    def color_of(row: str, name: str) -> str:
        colors = {"budget": style.PARTS, "host": phases}.get(row, style.CATEGORIES)
        return colors.get(name, "--grey")

    grey = [("others", "--grey")] if len(used["host"]) > len(phases) else []
    legends = {
        "Budget": [(NAMES[name], style.PARTS[name]) for name in PARTS if name in used["budget"]],
        "Host": [*phases.items(), *grey],
        "Device" if report["budget"]["has_gpu"] else "Operators": [
            (name, color) for name, color in style.CATEGORIES.items() if name in used["device"]
        ],
    }
    keys = "".join(
        f'<p class="lead" style="margin:6px 0 0">{title}</p>{legend(entries)}'
        for title, entries in legends.items()
        if entries
    )
    more = picture["streams_left_out"]
    summary = (
        f"Step {picture['step']} of {picture['process']}, the one of median length. trace.json "
        "shows every kernel in ui.perfetto.dev, with the range that made it."
    ) + (f" {more} less busy streams are left out." if more else "")
    return paragraph(summary) + markup.timeline(picture, color_of) + keys


def ranks(report: dict[str, Any]) -> str:
    data = report["ranks"]
    values = [value for rank in data["ranks"] for value in rank["own_ms"]]
    low, high = min(values, default=0.0), max(values, default=1.0)
    steps = data["steps"][:_MOST_STEPS]
    heads = ["rank", *(f"step {number}" for number in steps), "mean", "communication"]
    rows = []
    for rank in data["ranks"]:
        name = escape(rank["name"]) + (" ← slowest" if rank["name"] == data["slowest"] else "")
        cells = "".join(_heat(value, low, high) for value in rank["own_ms"][:_MOST_STEPS])
        rows.append(
            f'<tr><th scope="row">{name}</th>{cells}<td>{milliseconds(rank["mean_own_ms"])}</td>'
            f"<td>{milliseconds(rank['communication_ms'])}</td></tr>"
        )
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in heads)
    grid = (
        '<div class="scroll"><table class="heat"><caption>Own time of each rank in each step: the '
        "step without its exposed communication. Darker is slower.</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )
    waiting = data.get("waiting_ms")
    summary = (
        f"{data['slowest']} is the slowest, {percent(data['slowest_by'])} over the mean. Fast "
        "ranks spend the difference in the exchange of gradients"
        + (f": {milliseconds(waiting)} a step on average." if waiting is not None else ".")
    )
    return paragraph(summary) + grid


def _heat(value: float, low: float, high: float) -> str:
    strength = 0.06 + 0.6 * (value - low) / (high - low) if high > low else 0.06
    return f'<td style="background:rgb(var(--heat) / {strength:.2f})">{milliseconds(value)}</td>'


def padding(report: dict[str, Any]) -> str:
    fall = report["waterfall"]
    if "bars" in fall:
        bars = [(bar["name"], [(bar["name"], bar["share"])]) for bar in fall["bars"]]
        label = "From the peak of the GPU to useful FLOPs"
        content = markup.stacked(bars, style.WATERFALL, label, show=percent)
        if fall["is_estimate"]:
            content += lead(
                "The padded share is estimated: useful FLOPs divided by the share of frames that "
                "are no padding."
            )
    else:
        content = lead(f"No share of a peak: {fall['reason']}.")
    if "useful_tflops" in report["log"]:
        rate = report["log"]["useful_tflops"]["mean"]
        content += lead(
            f"{rate:.4g} TFLOP/s useful on each rank, padding left out, by metrics.jsonl."
        )
    for data in report["padding"].values():
        label = f"Padding of {data['label']}: mean {percent(data['mean'])}"
        ranges = zip(data["edges"], data["edges"][1:], data["counts"], strict=False)
        bars = [
            (f"{percent(low)} to {percent(high)}", [("lines", count)])
            for low, high, count in ranges
            if count
        ]
        picture = markup.stacked(bars, {"lines": "--aqua"}, label, show=lambda n: f"{n:g} lines")
        content += f"<h3>{escape(label)}</h3>{picture}"
    return content


def quality(report: dict[str, Any]) -> str:
    items = "".join(
        f'<li class="{note["level"]}"><b>{note["level"]}</b>{escape(note["text"])}</li>'
        for note in report["quality"]
    )
    return f'<ul class="notes">{items}</ul>'


def method(report: dict[str, Any]) -> str:
    columns = {
        "category": lambda entry: text(entry[0]),
        "names that match, without regard to case": lambda entry: Cell(
            f"<code>{escape(entry[1])}</code>"
        ),
    }
    patterns = records(
        *(columns, report["patterns"].items()),
        caption="The first category whose pattern is found in the name of a kernel is its own.",
    )
    made = escape(", ".join(report["sources"]) or "metrics.jsonl alone")
    return (
        f'<p class="lead">Made from {made}. Wall time is always the length of a union of '
        "intervals: kernels that overlap are not added up. <b>Work</b> is the sum of durations, "
        "which may exceed the step where streams overlap; <b>wall</b> is what something adds to "
        "the time in which anything runs. A step ends when the work that it launched is done, and "
        "the next begins there. A kernel counts for one range only: the innermost around its "
        "launch, or for a kernel of the backward the range of the forward operator that it belongs "
        "to. trace.json holds the first steps, up to 50,000 kernels of each rank.</p>"
        f"<details><summary>Categories of kernels</summary>{patterns}</details>"
    )


# Sections on what the device works on: phases, categories, ranges, kernels.

_MOST_PHASES, _MOST_RANGES = 12, 60
_AMOUNTS = {
    "work": duration("work_ms"),
    "wall": duration("wall_ms"),
    "share of work": share("share"),
}


def by_phase(report: dict[str, Any]) -> str:
    data = report["phases"]
    names = data["categories"]
    order = sorted(names, key=list(style.CATEGORIES).index)
    bars = [
        (phase, [(name, work[names.index(name)]) for name in order])
        for phase, work in zip(data["phases"], data["work_ms"], strict=True)
    ]
    left_out = len(bars) - _MOST_PHASES
    picture = markup.stacked(bars[:_MOST_PHASES], style.CATEGORIES, "Work of each phase")
    keys = legend((name, style.CATEGORIES[name]) for name in order)
    summary = "Summed durations per step and rank, by phase of the step and kind of kernel."
    if left_out > 0:
        summary += f" {left_out} phases with less work are left out of the picture."
    columns = {"category": lambda entry: Cell(_category(entry["name"])), **_AMOUNTS}
    content = picture + keys + records(columns, report["categories"], sortable=True)
    return paragraph(summary) + content + _ranges(report["ranges"])


def _category(name: str) -> str:
    return keyed(style.CATEGORIES.get(name, "--grey"), name)


def _ranges(ranges: list[dict[str, Any]]) -> str:
    caption = "Each kernel counts once, for the range that made it; one of the backward for the "
    caption += "range of its forward where that is known."
    if len(ranges) > _MOST_RANGES:
        caption += f" {len(ranges) - _MOST_RANGES} ranges with less work are in report.json."
    columns = {
        "range": lambda entry: text(entry["name"]),
        "forward": duration("forward_ms"),
        "backward": duration("backward_ms"),
        "share of work": share("share"),
        "": lambda entry: Cell(bar(entry["share"]) if "wall_ms" in entry else ""),
    }
    fields = ("forward_ms", "backward_ms", "share")
    last = {field: sum(entry[field] for entry in ranges) for field in fields}
    made = records(
        *(columns, ranges[:_MOST_RANGES]),
        caption=caption,
        last={"name": "all ranges", **last},
        sortable=True,
    )
    return f"<h3>By the range that made it</h3>{made}"


def kernels(report: dict[str, Any]) -> str:
    data = report["kernels"]
    is_sum = lambda entry: "kinds" in entry
    columns = {
        "kernel" if report["budget"]["has_gpu"] else "operator": lambda entry: (
            text(f"{entry['kinds']} others")
            if is_sum(entry)
            else Cell(f"<code>{escape(entry['name'])}</code>")
        ),
        "category": lambda entry: Cell("" if is_sum(entry) else _category(entry["category"])),
        "calls": lambda entry: figure(entry["calls"], f"{entry['calls']:,.4g}"),
        "median": lambda entry: (
            text("")
            if is_sum(entry)
            else figure(entry["median_us"], milliseconds(entry["median_us"] / 1e3))
        ),
        **_AMOUNTS,
    }
    last = data["others"] if data["others"]["kinds"] else None
    made = records(columns, data["top"], last=last, sortable=True)
    return paragraph("Per step and rank, most work first.") + made


# The page of two runs: what changed, then each of them.

Show = Callable[[float], str]
_LOG: dict[str, tuple[str, Show]] = {
    "step_s": ("step, by the log", lambda value: milliseconds(value * 1e3)),
    "data_wait_s": ("waiting for data, by the log", lambda value: milliseconds(value * 1e3)),
    "rank_imbalance": ("imbalance of the ranks", lambda value: f"{100 * value:.2f} %"),
    "audio_seconds": ("audio a step", lambda value: f"{value:,.1f} s"),
    "padding_frames": ("padding of frames", lambda value: f"{100 * value:.2f} %"),
    "padding_tokens": ("padding of tokens", lambda value: f"{100 * value:.2f} %"),
}
_NOTABLE_CHANGE = 0.01  # a smaller change is shown in neither colour


def _comparison(report: dict[str, Any]) -> str:
    data, reports = report["comparison"], report["reports"]
    header = (
        f"<header><h1>Two runs: {escape(data['before'])} and {escape(data['after'])}</h1>"
        f'<p class="verdict">{unbroken(data["text"])}</p></header>'
    )
    parts = [_changes(data, reports)]
    for single in reports:
        # Ids of sections are unique on the page.
        prefix = "".join(letter if letter.isalnum() else "-" for letter in single["name"])
        parts.append(
            f'<h2 class="subject">{escape(single["name"])}</h2>{lead(single["verdict"]["text"])}'
            + all_of(single).replace('<section id="', f'<section id="{prefix}-')
        )
    return header + "".join(parts)


def _changes(data: dict[str, Any], reports: list[dict[str, Any]]) -> str:
    def changes(first: str, rows: list[dict[str, Any]], show: Show | None, **options: Any) -> str:
        """A table of rows; without ``show`` they are of the log, each with its own unit."""
        visible = lambda row, field: (show or _LOG[row["name"]][1])(row[field])
        named = lambda row: row.get("title", row["name"] if show else _LOG[row["name"]][0])
        value = lambda field: lambda row: figure(row[field], visible(row, field))
        columns = {
            first: lambda row: text(named(row)),
            data["before"]: value("before"),
            # A run may be compared with itself.
            data["after"] + " " * (data["after"] == data["before"]): value("after"),
            "difference": lambda row: figure(row["delta"], _difference(row, visible(row, "delta"))),
            "ratio": lambda row: figure(
                row["ratio"], "" if row["ratio"] is None else f"{row['ratio']:.2f}"
            ),
        }
        return records(columns, rows, **options)

    content = ""
    if "parts" in data:
        bars = [
            (single["name"], [(part["name"], part["ms"]) for part in single["budget"]["parts"]])
            for single in reports
        ]
        content += markup.stacked(bars, style.PARTS, "Parts of a step", names=NAMES)
        content += legend((NAMES[name], color) for name, color in style.PARTS.items())
        rows = [row | {"title": NAMES[row["name"]]} for row in data["parts"]]
        last = data["step_ms"] | {"title": "the step"}
        options = {"last": last, "caption": "Per step and rank."}
        content += changes("part", rows, milliseconds, **options)
        titles = {"categories": "By category", "kernels": "Kernels that changed most"}
        for name, title in titles.items():
            content += f"<h3>{title}</h3>"
            content += changes("name", data[name], milliseconds, sortable=True)
    if data["log"]:
        content += f"<h3>By the runs' own logs</h3>{changes('figure', data['log'], None)}"
    return section("What changed", "changes", content)


def _difference(row: dict[str, Any], shown: str) -> str:
    delta, ratio = row["delta"], row["ratio"]
    mark = "worse" if delta > 0 else "better"
    is_change = ratio is None or abs(ratio - 1) > _NOTABLE_CHANGE
    if not delta or not is_change or row["name"] == "audio_seconds":
        mark = ""
    return f'<span class="{mark}">{"+" if delta > 0 else ""}{shown}</span>'
