"""Translations are judged by BLEU and chrF, as sacrebleu's own command computes them."""

import json
import subprocess
import sys

import numpy as np
import pytest

from effasr.evaluation import translation
from effasr.evaluation.bootstrap import rate
from effasr.evaluation.comparison import compare, read_run
from effasr.evaluation.metric import BY_NAME
from effasr.evaluation.model_card import ModelCard
from effasr.evaluation.model_card import TestedSet as ResultOfSet
from effasr.evaluation.result import Evaluation, ScoredUtterance, read_summary, save
from effasr.evaluation.tables import wer_table
from effasr.evaluation.translation import count_ngrams
from effasr.evaluation.wer import count_errors
from effasr.pages.run_page import run_page
from effasr.training.checkpointing.state import RunProgress

TEXT = "the cat, which sat on a mat, saw two birds in the old tree."


def texts(count: int, wrong: float, seed: int = 0) -> list[tuple[str, str]]:
    draw = np.random.default_rng(seed)
    pairs = []
    for _ in range(count):
        words = list(draw.choice(TEXT.split(), draw.integers(5, 12)))
        other = [w if draw.random() > wrong else str(draw.choice(TEXT.split())) for w in words]
        pairs.append((" ".join(words).capitalize(), " ".join(other).capitalize()))
    return pairs


def scored(pairs, group: str = "de->en") -> Evaluation:
    made = (
        ScoredUtterance(f"{group}{n}", group, *pair, 1.0, count_errors(*pair))
        for n, pair in enumerate(pairs)
    )
    return Evaluation("basic", tuple(made), seconds=1.0)


MIXED = Evaluation(
    "basic",
    scored(texts(40, 0.3)).utterances
    + scored([("eins zwei", "eins drei")], "de").utterances
    + scored([("我喜欢你们", "我喜欢他们")], "en->zh").utterances,
    seconds=1.0,
)


def test_the_command_of_sacrebleu_agrees(tmp_path):
    save(MIXED, tmp_path / "set")
    groups = read_summary(tmp_path / "set")["groups"]
    lines = (tmp_path / "set" / "hypotheses.jsonl").read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    for source, target in (("de", "en"), ("en", "zh")):
        chosen = [row for row in rows if row.get("group") == f"{source}->{target}"]
        for name in ("reference", "hypothesis"):
            text = "".join(f"{row[name]}\n" for row in chosen)
            (tmp_path / name).write_text(text, encoding="utf-8")
        words = [str(tmp_path / "reference"), "-i", str(tmp_path / "hypothesis"), "-w", "10"]
        words += ["-l", f"{source}-{target}", "-m", "bleu", "chrf"]
        command = [sys.executable, "-m", "sacrebleu", *words]
        out = subprocess.run(command, capture_output=True, check=True, text=True).stdout
        row = groups[f"{source}->{target}"]
        printed = {item["name"].lower()[:4]: item for item in json.loads(out)}
        for name in ("bleu", "chrf"):
            assert row[name] == pytest.approx(printed[name]["score"], abs=1e-9)
            assert row["signatures"][name] == printed[name]["signature"]
        counts = [count_ngrams(r["reference"], r["hypothesis"], target) for r in chosen]
        assert rate(counts) == pytest.approx(row["bleu"], abs=1e-9)


def test_both_tasks_are_reported_apart(tmp_path):
    summary = MIXED.summary()
    assert (summary["wer"], summary["words"], summary["rate"]) == (0.5, 2, "wer")
    groups = summary["groups"]
    assert summary["bleu"] == (groups["de->en"]["bleu"] + groups["en->zh"]["bleu"]) / 2
    low, high = groups["de->en"]["bleu_interval"]
    assert low < groups["de->en"]["bleu"] < high
    table = wer_table(MIXED)
    assert "| de->en " not in table.split("BLEU")[0]
    assert "tok:zh" in table
    alone = scored(texts(9, 0.5))
    assert alone.metric.name == alone.summary()["rate"] == "bleu"
    assert "WER" not in wer_table(alone)
    card = ModelCard(
        name="m", loader="x", parameters=1, languages=(), configuration="",
        tested=[ResultOfSet("dev", summary), ResultOfSet("st", alone.summary())],
    ).text()  # fmt: skip
    assert card.count("type: automatic-speech-translation") == 3
    assert card.count("type: wer") == 1
    assert "| st | de-&gt;en | 9 |" in card
    save(MIXED, tmp_path / "run" / "evaluation" / "dev", model="x")
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    lines = [alone.summary() | {"step": n, "set": "st", "bleu": 9.0 - n} for n in (1, 2)]
    (tmp_path / "run" / "validation.jsonl").write_text("\n".join(map(json.dumps, lines)))
    page = run_page(tmp_path / "run", tmp_path / "page.html")
    assert "BLEU of st" in page
    assert "highest, at step 1" in page


def test_systems_are_compared_by_bleu(tmp_path):
    for name, wrong in (("first", 0.6), ("second", 0.1)):
        made = scored(texts(40, wrong)).utterances + MIXED.utterances[40:41]
        save(Evaluation("basic", made, seconds=1.0), tmp_path / name / "evaluation" / "dev")
    runs = [item for name in ("first", "second") for item in read_run(tmp_path / name)]
    spoken, translated = compare(runs).split("\n\n")
    assert spoken.count("| dev |") == 2
    first, second = translated.splitlines()[2:]
    bleu = [float(line.split("|")[4]) for line in (first, second)]
    assert f"{bleu[1] - bleu[0]:+.1f}" in second
    assert "(better: 100 %)" in second


@pytest.mark.parametrize(("name", "best"), [("bleu", 0.3), ("wer", 0.1)])
def test_the_metric_says_which_value_is_better(name, best):
    progress = RunProgress()
    for value in (float("nan"), 0.2, 0.1, 0.3, float("nan"), 0.2):
        progress.record_metric(value, BY_NAME[name])
    assert progress.best == best
    assert not progress.is_best


def test_a_missing_package_is_named(monkeypatch, tmp_path):
    save(scored(texts(3, 0.5)), tmp_path / "dev")
    monkeypatch.setattr(translation, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"^BLEU .* pip install 'effasr\[translation\]'\.$"):
        read_run(tmp_path / "dev")
