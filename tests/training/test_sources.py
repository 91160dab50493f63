"""Training on pairs of texts, alone and beside speech, and on sources with shares of the hours."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sacrebleu.metrics import BLEU, CHRF

from effasr import config as configuration
from effasr.checkpoint import load_model, resolve, save_model
from effasr.cli.main import main
from effasr.data.config import DataConfig
from effasr.data.index.corpus import Corpus
from effasr.data.loader import Loader
from effasr.data.manifest.pairs import pairs as read_pairs
from effasr.data.mixture import MixConfig
from effasr.data.prompt import Prompt
from effasr.data.tokenizer import load_tokenizer
from effasr.distributed.process_group import DistributedContext
from effasr.evaluation.evaluate import evaluate_pairs
from effasr.evaluation.result import read_summary
from effasr.evaluation.wer import count_errors
from effasr.model.cost import cost_model, text_cost_model
from effasr.nn.experts import ExpertsConfig
from effasr.training import build
from effasr.training.config import TrainConfig
from effasr.training.corpus import load_corpus
from effasr.training.flops import work_of
from effasr.training.resolve import find_tokenizer, resolve_config
from effasr.training.run_dir.run_directory import read_lines
from effasr.training.step import train_step
from effasr.training.trainer import run
from tests.training.conftest import TEXT_ENCODER, mix
from tests.training.test_equivalence import graphed


def test_speech_and_text_train_together(make_with_text, tmp_path, capsys):
    assert run(make_with_text(training={"max_steps": 8})) == 0
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert all(np.isfinite(line["loss"]) and line["ctc"] > 0 for line in lines)
    rows = json.loads((tmp_path / "run" / "blend.json").read_text())["sources"]
    assert [(row["source"], row["unit"]) for row in rows] == [
        ("speech", "hours"),
        ("text", "tokens"),
    ]
    assert all(row["drawn_amount"] > 0 for row in rows)
    visible = capsys.readouterr().err
    assert "and 1 of text alone, each" in visible
    assert "tokens  utterances" in visible
    assert load_model(resolve(tmp_path / "run")).model.config.text_encoder == TEXT_ENCODER


def test_shared_layers_and_consistency_train(make_with_text, tmp_path):
    config = make_with_text(training={"max_steps": 4})
    text = replace(TEXT_ENCODER, shared_layers=1, mask=0.2)
    loss = replace(config.loss, consistency_weight=0.5)
    config = replace(config, loss=loss, model=replace(config.model, text_encoder=text))
    batch = load_corpus(config, find_tokenizer(config, None), None).text.batch(np.arange(2))
    assert batch.num_monotonic_targets == batch.num_targets > 0
    assert batch.text.layout.rows == batch.source.layout.rows
    assert run(config) == 0
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert all(line["consistency"] > 0 and np.isfinite(line["loss"]) for line in lines)
    text, encoder = replace(text, upsample=50), replace(config.model.encoder, max_frames=60)
    with pytest.raises(ValueError, match=r"`model\.encoder\.max_frames` must be at least the"):
        load_corpus(
            replace(config, model=replace(config.model, encoder=encoder, text_encoder=text)),
            find_tokenizer(config, None),
            None,
        )


@pytest.mark.parametrize("sizes", [(1,), (1, 2, 4)])
@pytest.mark.representative(sizes=(1,))
def test_a_step_is_the_same_on_any_number_of_ranks(make_with_text, sizes):
    config = make_with_text()
    corpus = load_corpus(config, find_tokenizer(config, None), None)
    seen, shapes = [], set()
    for size in sizes:
        loaders = [
            Loader(corpus, config.data, seed=3, rank=rank, world_size=size, pin_memory=False)
            for rank in range(size)
        ]
        steps = []
        kinds: list[set] = [set() for _ in loaders]
        for parts in zip(*(loader.steps() for loader in loaders), strict=False):
            texts = [[b.source is not None for b in part.batches] for part in parts]
            assert sum(map(sum, texts)) == 1
            for kind, of_rank in zip(kinds, texts, strict=True):
                kind |= set(of_rank)
            shapes |= {tuple(x.shape for x in b.tensors()) for part in parts for b in part.batches}
            members = [
                sorted(np.concatenate([getattr(part, name) for part in parts]).tolist())
                for name in ("indices", "text_indices")
            ]
            assert all(members)
            steps.append(members)
            if parts[0].epoch == 2:
                break
        seen.append(steps)
        # All ranks have both in turn: batch norms of one without speech would learn nothing.
        assert all(len(kind) == 2 for kind in kinds)
    assert all(steps == seen[0] for steps in seen)
    assert len(seen[0]) > 3
    # Batches of each kind have one shape.
    assert len(shapes) == 2


def test_another_plan_of_texts_is_another_fingerprint(make_with_text):
    config = make_with_text()
    corpus = load_corpus(config, find_tokenizer(config, None), None)
    wide = replace(corpus.text.shape, frame_budget=2 * corpus.text.shape.frame_budget)
    both = corpus, replace(corpus, text=replace(corpus.text, shape=wide))
    assert len({Loader(each, config.data, seed=3).fingerprint(0) for each in both}) == 2


def test_a_run_validates_on_text_pairs(make_with_text, pairs, tmp_path, capsys):
    data, training = {"validation": f"{pairs}/pairs.jsonl"}, {"max_steps": 8, "validate_every": 8}
    assert run(make_with_text(data=data, training=training)) == 0
    (validated,) = read_lines(tmp_path / "run" / "validation.jsonl")
    assert (validated["set"], validated["utterances"], validated["failed"]) == ("pairs", 120, 0)
    # Translations alone choose the best checkpoint by BLEU.
    state = tmp_path / "run" / "checkpoints" / "step_00000008" / "training.pt"
    assert torch.load(state, weights_only=True)["best"] == validated["bleu"]
    command = ["evaluate", str(tmp_path / "run"), str(pairs / "pairs.jsonl"), "--device", "cpu"]
    assert main(command) == 0
    assert "| de->en " in capsys.readouterr().out
    folder = tmp_path / "run" / "evaluation" / "pairs"
    row = read_summary(folder)["groups"]["de->en"]
    texts = read_lines(folder / "hypotheses.jsonl")
    columns = [[line[name] for line in texts] for name in ("hypothesis", "reference")]
    for name, metric in (("bleu", BLEU()), ("chrf", CHRF())):
        score = metric.corpus_score(columns[0], [columns[1]]).score
        assert row[name] == validated[name] == pytest.approx(score, abs=1e-9)
    for options, field in (("--chunk 9", "chunk_seconds"), ("--language de", "language")):
        assert main([*command, *options.split()]) == 2
        assert f"`{field}` must be left out for text pairs" in capsys.readouterr().err


def test_a_run_with_an_expert_for_each_language_of_texts(
    make_with_text, tones, pairs, model_config, tmp_path
):
    rows = [json.loads(line) for line in (pairs / "pairs.jsonl").read_text().splitlines()]
    for row in rows[::3]:
        row.update(source_lang="en", source_text=row["text"])
    manifest = tmp_path / "named.jsonl"
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows))
    experts = ExpertsConfig(count=2, route="language", names=("en", "de"))
    decoder = replace(model_config.decoder, experts=experts)
    text = replace(TEXT_ENCODER, experts=experts)
    model = replace(model_config, text_encoder=text, decoder=decoder)
    sources = {"speech": f"{tones}/train.jsonl", "text": str(manifest)}
    mix = configuration.from_mapping(MixConfig, {"sources": sources})
    data = {"mix": mix, "validation": str(pairs / "pairs.jsonl")}
    training = {"max_steps": 4, "log_every": 4, "validate_every": 4}
    assert run(make_with_text(model=model, data=data, training=training)) == 0
    (line,) = read_lines(tmp_path / "run" / "metrics.jsonl")
    for stack in ("text_encoder", "decoder"):
        shares = line[f"{stack}_expert_shares"]
        assert min(shares) > 0
        assert sum(shares) == pytest.approx(1.0)
    (validated,) = read_lines(tmp_path / "run" / "validation.jsonl")
    assert (validated["utterances"], validated["failed"]) == (120, 0)
    english = replace(experts, count=1, names=("en",))
    text, decoder = (replace(stack, experts=english) for stack in (text, decoder))
    model = replace(model, text_encoder=text, decoder=decoder)
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows[::3]))
    # The first of the pairs to validate on has no expert.
    unnamed = make_with_text(model=model, data=data, name="unnamed")
    with pytest.raises(ValueError, match=r"pairs.jsonl:1: the language of an utterance must be .*"):
        run(unnamed)


def test_validation_on_text_counts_what_the_model_writes(make_with_text, pairs):
    tokenizer = load_tokenizer(pairs / "tokenizer")
    config = resolve_config(make_with_text(), None)
    trained = build.build_model(config, tokenizer.vocab_size, None, torch.device("cpu"))
    members = list(read_pairs(pairs / "pairs.jsonl"))[:5]
    result = evaluate_pairs(trained, tokenizer, [*members, replace(members[0], prompt=Prompt())])
    assert [item.reference for item in result.utterances] == [item.text for item in members] + [
        members[0].text
    ]
    assert set(result.groups) == {"de->en", "en"}
    assert result.errors.words == len(members[0].text.split())
    assert trained.training
    for item, pair in zip(result.utterances, members, strict=False):
        alone = evaluate_pairs(trained, tokenizer, [pair]).utterances[0]
        assert alone.hypothesis == item.hypothesis
        assert item.errors == count_errors(pair.text, item.hypothesis)
    unknown = replace(members[0], prompt=Prompt("fr", "fr"))
    failed = evaluate_pairs(trained, tokenizer, [unknown])
    assert (len(failed.failures), failed.utterances) == (1, ())


@pytest.mark.parametrize(
    ("data", "model", "message"),
    [
        ({"text_share": None}, {}, r"`data\.text_share` must be given .* as .*pairs.jsonl is"),
        ({}, {"text_encoder": None}, r"`model\.text_encoder` must be given for text-only"),
        ({"mix": None, "train": "SPEECH"}, {},
         r"`data\.text_share` must be null where no manifest is text-only, but is 0.25"),
        ({"mix": None, "train": "TEXT"}, {},
         "`data.train` must name at least one manifest with audio, but is text-only: add one"),
    ],
)  # fmt: skip
def test_error_messages(make_with_text, tones, pairs, data, model, message):
    paths = {"SPEECH": f"{tones}/train.jsonl", "TEXT": f"{pairs}/pairs.jsonl"}
    if "train" in data:
        data = data | {"train": paths[data["train"]]}
    config = make_with_text(data=data)
    config = replace(config, model=replace(config.model, **model))
    with pytest.raises(ValueError, match=message):
        load_corpus(config, load_tokenizer(pairs / "tokenizer"), None)


def test_recordings_of_speech_and_of_text_are_the_steps(make_with_text):
    config = resolve_config(make_with_text(), None)
    text = replace(config.model.text_encoder, shared_layers=1, durations="learnt")
    config = replace(config, model=replace(config.model, text_encoder=text))
    results, vocabulary = [], find_tokenizer(config, None).vocab_size
    for is_recorded in (False, True):
        context = DistributedContext(0, 1, torch.device("cpu"))
        model = build.build_model(config, vocabulary, None, context.device)
        state = build.build_train_state(config, model, context)
        state = graphed(model, state) if is_recorded else state
        for number, step in enumerate(itertools.islice(loader(config).steps(), 3)):
            assert {batch.source is None for batch in step.batches} == {False, True}
            train_step(state, step.batches, number).read()
        results.append([x.clone() for x in model.state_dict().values()])
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_manifests_need_no_shares(make_with_text, tones, pairs, tmp_path):
    paths = (f"{tones}/train.jsonl", f"{pairs}/pairs.jsonl")
    assert run(make_with_text(data={"mix": None, "train": paths}, training={"max_steps": 3})) == 0
    assert not (tmp_path / "run" / "blend.json").exists()


def test_work_on_text_is_counted_by_the_text_encoder(make_with_text):
    config = make_with_text()
    corpus = load_corpus(config, find_tokenizer(config, None), None)
    assert corpus.text is not None
    batch = corpus.text.batch(np.arange(2))
    cost, text_cost = cost_model(config.model, 60), text_cost_model(config.model, 60)
    assert text_cost is not None
    useful, computed = work_of([batch], cost, text_cost)
    lengths = np.array(batch.frame_lengths), np.array(batch.token_lengths)
    assert useful == 3 * text_cost.of(*lengths).sum()
    assert computed > useful
    with pytest.raises(ValueError, match="`text_cost` must be given for text-only batches"):
        work_of([batch], cost)


def test_a_model_without_text_encoder_gets_one(make_with_text, make_config, pairs, tmp_path):
    """Its weights are drawn, and all the others are those to begin with."""
    data = {"tokenizer": f"{pairs}/tokenizer"}
    assert run(make_config(name="base", data=data, training={"max_steps": 2})) == 0
    config = make_with_text(init_from=str(tmp_path / "base"), data={"tokenizer": ""})
    config = resolve_config(config, None)
    context = DistributedContext(0, 1, torch.device("cpu"))
    model = build.build_model(config, 30, None, context.device)
    before = load_model(resolve(tmp_path / "base")).model.state_dict()
    after = model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert {name.split(".")[0] for name in after.keys() - before.keys()} == {"text_encoder"}


NAMED = ExpertsConfig(count=2, route="language", names=("de", "en"))


@pytest.mark.parametrize("experts", [ExpertsConfig(), ExpertsConfig(top_k=2), NAMED], ids=str)
def test_experts_begin_as_copies_of_a_dense_model(experts, make_with_text, tmp_path):
    config = resolve_config(make_with_text(), None)
    tokenizer, cpu = find_tokenizer(config, None), torch.device("cpu")
    dense = build.build_model(config, tokenizer.vocab_size, None, cpu).eval()
    save_model(tmp_path / "dense", dense, tokenizer)
    stacks = {
        name: replace(getattr(config.model, name), experts=experts)
        for name in ("encoder", "text_encoder", "decoder")
    }
    data = replace(config.data, tokenizer="" if experts.is_learned else config.data.tokenizer)
    model = replace(config.model, **stacks)
    config = replace(config, model=model, data=data, init_from=str(tmp_path / "dense"))
    upcycled = build.build_model(config, tokenizer.vocab_size, None, cpu).eval()
    assert upcycled.decoder.layers[0].mlp.linear1.weight.ndim == 3
    steps = itertools.islice(loader(config).steps(), 6)
    batches = {batch.source is None: batch for step in steps for batch in step.batches}
    assert len(batches) == 2
    for batch in batches.values():
        expected, actual = dense(batch), upcycled(batch)
        for name in ("cross_entropy", "ctc"):
            item, other = getattr(actual, name), getattr(expected, name)
            torch.testing.assert_close(item, other, rtol=2e-3, atol=1e-4)


SEED = 3


def loader(config: TrainConfig, **options) -> Loader:
    corpus = load_corpus(config, find_tokenizer(config, None), None)
    return Loader(corpus, config.data, seed=SEED, pin_memory=False, **options)


def test_sources_have_their_shares(make_mixed, tmp_path, capsys):
    assert run(make_mixed()) == 0
    blend = json.loads((tmp_path / "run" / "blend.json").read_text())
    assert blend["step"] == 12
    rows = {row["source"]: row for row in blend["sources"]}
    assert list(rows) == ["large", "others/small", "others/tiny"]
    for row in rows.values():
        assert row["realised"] == pytest.approx(row["asked"], abs=0.1)
    assert rows["others/tiny"]["drawn_utterances"] > 2 * rows["others/tiny"]["utterances"]
    # The table at the start.
    assert "others/tiny" in capsys.readouterr().err


def _written(config: TrainConfig) -> Path:
    path = Path(config.output) / "written.yaml"
    path.write_text(configuration.dump(config))
    return path


def test_manifests_may_move_but_shares_must_stay(make_mixed, tmp_path, sources):
    config = make_mixed(training={"max_steps": 2})
    assert run(config) == 0
    (sources / "tiny.jsonl").rename(sources / "renamed.jsonl")
    path = "data.mix.sources.others.sources.tiny.manifests"
    moved = ["training.max_steps=3", f"{path}={sources}/renamed.jsonl"]
    assert run(configuration.load(TrainConfig, _written(config), moved)) == 0
    hotter = [*moved, "data.mix.sources.others.temperature=0.7"]
    with pytest.raises(ValueError, match=r"`data.mix.sources.others.temperature` must stay None"):
        run(configuration.load(TrainConfig, _written(config), hotter))


def test_a_source_of_which_nothing_is_left_is_named(make_mixed, sources):
    lines = (sources / "tiny.jsonl").read_text().splitlines()
    empty = [json.dumps(json.loads(line) | {"text": ""}) for line in lines]
    (sources / "tiny.jsonl").write_text("\n".join(empty) + "\n")
    with pytest.raises(ValueError, match=r"every source must have an utterance .*others/tiny has"):
        loader(make_mixed())


def test_the_budgets_of_tokens_and_nodes_are_those_of_the_blend(make_mixed, sources, tones):
    """A source with much text has more of it in an epoch than in the corpus."""
    config = make_mixed().data
    tokenizer = find_tokenizer(make_mixed(), None)
    lines = (sources / "tiny.jsonl").read_text().splitlines()
    wordy = [json.dumps(json.loads(line) | {"text": "low high " * 4}) for line in lines]
    (sources / "tiny.jsonl").write_text("\n".join(wordy) + "\n")

    def budgets(temperature: float) -> tuple[int, int]:
        data = DataConfig(
            mix=mix(sources, temperature=temperature),
            tokenizer=config.tokenizer,
            frame_budget=200,
        )
        paths, names = zip(*data.manifests, strict=True)
        corpus = Corpus.load(paths, tokenizer, data, ctc=False, transducer=True, sources=names)
        assert corpus.shape.node_budget is not None
        return corpus.shape.token_budget, corpus.shape.node_budget

    for of_equal_shares, of_sizes in zip(budgets(0.0), budgets(1.0), strict=True):
        assert of_equal_shares > 1.05 * of_sizes
